"""Trains portable-nano: `python -m training.train OUT --minutes 9` on one GPU.

Stages follow each other with `--resume`: a stage starts from the weights of the one before, with
fresh optimiser state, and learns from batches that none before it has seen. Batches are a function
of their number alone, made by processes beside the GPU.

Written to OUT: weights.safetensors (the checkpoint's precision, about once a minute), log.jsonl
(losses, shares of right answers on held-out questions, speed).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TextIO, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from training import conversations, measure, nano
from training.batched import BatchedInkling, Media

T = TypeVar("T")

KINDS = ((128, False), (256, False), (512, False), (nano.MAX_LENGTH, False), (128, True))
"""Row length of a batch, and whether its rows have pictures and sounds."""
TEXT = (
    (0, (0.8, 0.2, 0.0, 0.0, 0.0)),
    (800, (0.5, 0.3, 0.2, 0.0, 0.0)),
    (2000, (0.35, 0.25, 0.2, 0.2, 0.0)),
)
"""From which batch on, which share of batches is of which kind."""
TOWERS = ((0, (0.15, 0.15, 0.15, 0.15, 0.4)),)
"""The same for a stage with towers, which follows stages without."""
DRAFT_WEIGHT = 0.3
BETAS = (0.9, 0.95)
DECAY = 0.05
CLIP = 1.0
BALANCE = 0.3
"""How far a step moves the selection bias of an expert that gets more or less than its share, in
learning rates."""


def kind_of(number: int, towers: bool) -> tuple[int, bool]:
    """Kind of batch `number`, counted over all stages."""
    shares = next(s for start, s in reversed(TOWERS if towers else TEXT) if number >= start)
    return random.Random(f"kind:{number}").choices(KINDS, shares)[0]


# --- batches --------------------------------------------------------------------------------------


def _produce(queue: Any, numbers: range, tokens: int, towers: bool) -> None:
    torch.set_num_threads(1)
    for number in numbers:
        length, media = kind_of(number, towers)
        queue.put(conversations.batch(number, tokens // length, length, media))


class Producers:
    """Processes that make batches `first` to `first + count - 1`, which come in order.

    They are started at once: make them before anything touches the GPU.
    """

    def __init__(self, first: int, count: int, tokens: int, workers: int, towers: bool) -> None:
        context = multiprocessing.get_context("fork")
        self.count = count
        self.queues = [context.Queue(maxsize=8) for _ in range(workers)]
        self.processes = [
            context.Process(
                target=_produce,
                args=(queue, range(first + i, first + count, workers), tokens, towers),
                daemon=True,
            )
            for i, queue in enumerate(self.queues)
        ]
        for process in self.processes:
            process.start()

    def __iter__(self) -> Iterator[conversations.Batch]:
        for number in range(self.count):
            yield self.queues[number % len(self.queues)].get(timeout=120)

    def close(self) -> None:
        for process in self.processes:
            process.kill()


def echoed(source: Iterable[T], times: int, kept: int = 64) -> Iterator[T]:
    """Each new batch, and after it `times - 1` of the last `kept` ones by lot.

    A GPU learns faster than a few processor cores make batches.
    """
    lot, recent = random.Random(0), deque[T](maxlen=kept)
    for batch in source:
        yield batch
        for _ in range(times - 1 if recent else 0):
            yield lot.choice(recent)
        recent.append(batch)


# --- one step -------------------------------------------------------------------------------------


class Learner:
    """Weights in one flat vector, their gradient, and AdamW on it; a step can be recorded.

    Every tensor is a view, so that the optimiser is a handful of operations, none of which waits
    for the GPU.
    """

    def __init__(self, weights: dict[str, Tensor], device: str, dtype: torch.dtype) -> None:
        self.config = nano.config(nano.has_towers(weights))
        size = sum(x.numel() for x in weights.values())
        self.flat = torch.empty(size, device=device)
        self.gradient = torch.zeros_like(self.flat)
        self.mean, self.square = torch.zeros_like(self.flat), torch.zeros_like(self.flat)
        self.shrink = torch.zeros_like(self.flat)
        self.rate = torch.zeros((), device=device)
        self.steps = torch.zeros((), device=device)
        self.report = torch.zeros(2 + nano.DEPTHS, device=device)
        """Loss of the trunk and of each depth, and the gradient's norm."""
        self.weights: dict[str, Tensor] = {}
        place = 0
        for name, x in weights.items():
            span = slice(place, place + x.numel())
            view = self.flat[span].view(x.shape)
            view.copy_(x)
            if not name.endswith("gate.bias"):
                view.requires_grad_()
                view.grad = self.gradient[span].view(x.shape)
            if x.dim() > 1 and "sconv" not in name:
                self.shrink[span] = DECAY
            self.weights[name] = view
            place = span.stop
        self.model = BatchedInkling(self.config, self.weights, dtype)

    def state(self) -> list[Tensor]:
        """What a step changes."""
        return [self.flat, self.mean, self.square, self.steps]

    def losses(self, ids: Tensor, weights: Tensor, media: Media | None) -> list[Tensor]:
        """Weighted mean loss of the trunk and of every depth; ids, weights [B, L]."""
        rows = self.model.rows(ids, media)
        hidden, found = self.model.trunk(rows), []
        for depth in range(-1, nano.DEPTHS):
            if depth >= 0:
                hidden = self.model.draft(depth, hidden, rows)
            ahead = 2 + depth
            logits = self.model.logits(hidden[:, :-ahead]).float()
            each = F.cross_entropy(logits.flatten(0, 1), ids[:, ahead:].flatten(), reduction="none")
            share = weights[:, ahead:].flatten()
            found.append((each * share).sum() / share.sum())
        return found

    def step(self, ids: Tensor, weights: Tensor, *media: Tensor) -> None:
        """One step of the optimiser on a batch; `media` are the fields of `Media`, or none."""
        self.gradient.zero_()
        trunk, *drafts = self.losses(ids, weights, Media(*media) if media else None)
        loss = trunk + DRAFT_WEIGHT * sum(drafts, torch.zeros_like(trunk))
        loss.backward()
        norm = self.gradient.norm()
        self.gradient.mul_((CLIP / (norm + 1e-6)).clamp_max(1.0))
        with torch.no_grad():
            self.steps += 1
            self.mean.lerp_(self.gradient, 1 - BETAS[0])
            self.square.mul_(BETAS[1]).addcmul_(self.gradient, self.gradient, value=1 - BETAS[1])
            root = (self.square / (1 - BETAS[1] ** self.steps)).sqrt_().add_(1e-8)
            update = self.mean / (1 - BETAS[0] ** self.steps) / root
            self.flat.sub_(self.rate * (update + self.shrink * self.flat))
            for name, load in self.model.loads.items():
                self.weights[f"model.{name}.gate.bias"].add_(
                    torch.sign(load.mean() - load) * (BALANCE * self.rate)
                )
            self.report.copy_(torch.stack([*(x.detach() for x in (trunk, *drafts)), norm]))


class RecordingError(Exception):
    """A step could not be recorded, or the recording does something else."""


class Recorder:
    """Runs steps: on a GPU, the step of each kind of batch is recorded as a CUDA graph."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self.graphs: dict[tuple[Any, ...], Any] = {}
        self.inputs: dict[tuple[Any, ...], list[Tensor]] = {}

    def __call__(self, inputs: list[Tensor]) -> None:
        shape = tuple(x.shape for x in inputs)
        if shape not in self.graphs:
            self.learner.step(*inputs)
            return
        for ours, given in zip(self.inputs[shape], inputs, strict=True):
            ours.copy_(given)
        self.graphs[shape].replay()

    def prepare(self, inputs: list[Tensor]) -> None:
        """Record the step for batches of these shapes, and hold the recording to the step.

        The learner is left as it was.
        """
        state = self.learner.state()
        before = [x.clone() for x in state]
        self.learner.rate.fill_(1e-4)
        self.learner.step(*inputs)
        wanted = self.learner.flat.clone()
        shape = tuple(x.shape for x in inputs)
        self.inputs[shape] = [x.clone() for x in inputs]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                self.learner.step(*self.inputs[shape])
            for x, old in zip(state, before, strict=True):
                x.copy_(old)
            graph.replay()
            apart = (self.learner.flat - wanted).norm().item()
        except RuntimeError as error:
            raise RecordingError(str(error)) from error
        moved = (wanted - before[0]).norm().item()
        for x, old in zip(state, before, strict=True):
            x.copy_(old)
        rows = tuple(inputs[0].shape)
        print(f"recorded {rows}: {apart:.1e} from the step, which moves {moved:.1e}", flush=True)
        if not apart <= 0.2 * moved:
            raise RecordingError(f"what was recorded for {rows} differs from the step")
        self.graphs[shape] = graph


# --- the run --------------------------------------------------------------------------------------


def rate(done: float, peak: float) -> float:
    """Learning rate when the share `done` of the stage has passed: up, flat, and down to 0."""
    if done < 0.02:
        return peak * done / 0.02
    return peak * min(1.0, (1 - done) / 0.4) if done < 1 else 0.0


def train(options: argparse.Namespace) -> None:
    started = time.monotonic()
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    most = options.steps or 1_000_000
    producers = Producers(options.first, most, options.tokens, options.workers, options.towers)
    try:
        # A recording is made on a stream of its own, and everything before it belongs there too.
        own = torch.cuda.stream(torch.cuda.Stream()) if options.graph else nullcontext()
        with (out / "log.jsonl").open("a") as log, own:
            _train(options, producers, started, log)
    finally:
        producers.close()


def _train(
    options: argparse.Namespace, producers: Producers, started: float, log: TextIO
) -> None:  # fmt: skip
    device, out = options.device, options.out
    asked = [q.on(device) for q in measure.all_questions(options.questions, 0, options.towers)]
    config = nano.config(options.towers)
    start = nano.fresh_weights(config, options.seed)
    if options.resume:
        # What the earlier stage did not have, the towers, starts fresh.
        start |= nano.read_single(options.resume)
    learner = Learner(start, device, getattr(torch, options.dtype))
    run = Recorder(learner)

    def send(batch: conversations.Batch) -> list[Tensor]:
        media = measure.media_of(batch)
        ids = torch.from_numpy(batch.ids.astype(np.int64))
        inputs = [ids, torch.from_numpy(batch.weights), *(media or ())]
        return [x.to(device) for x in inputs]

    def note(step: int, **found: Any) -> None:
        seconds = round(time.monotonic() - started, 1)
        line = json.dumps({"first": options.first, "step": step, "seconds": seconds, **found})
        log.write(line + "\n")
        log.flush()
        print(line, flush=True)

    def look(step: int) -> None:
        stored = nano.as_stored(learner.weights)
        nano.write_single(out / "weights.safetensors", stored)
        wide = {name: x.to(device, torch.float32) for name, x in stored.items()}
        model = BatchedInkling(config, wide, torch.float32)
        found = measure.measure(model, asked, nano.DEPTHS)
        note(step, right={task: round(share, 4) for task, share in found.items()})

    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    given = {k: str(v) for k, v in vars(options).items()}
    note(0, options=given, torch=torch.__version__, gpu=gpu)
    if options.graph:
        for length, media in KINDS:
            if options.towers or not media:
                rows = options.tokens // length
                run.prepare(send(conversations.batch(-length, rows, length, media)))
    losses: list[list[float]] = []
    told = saved = time.monotonic()
    step = tokens = 0
    for inputs in echoed(map(send, producers), options.times):
        now = time.monotonic()
        passed = (now - started) / (options.minutes * 60)
        done = max(passed, step / options.steps) if options.steps else passed
        if passed >= 1 or done >= 1:
            break
        learner.rate.fill_(rate(step / options.steps if options.steps else done, options.rate))
        run(inputs)
        step, tokens = step + 1, tokens + inputs[0].numel()
        if step % 25 == 0 or step < 10:
            losses.append(learner.report.tolist())
            if not np.isfinite(losses[-1]).all():
                raise ValueError(f"the loss is not finite at step {step}: {losses[-1]}")
        if now - told > 10 or step in (1, 10, 100):
            recent = [round(float(x), 4) for x in np.mean(losses[-20:], 0)]
            note(step, done=round(done, 4), losses=recent, tokens=tokens)
            told = now
        if now - saved > options.every:
            saved = now
            look(step)
    look(step)
    note(step, finished=True)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m training.train", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=9.0, help="the stage ends then")
    parser.add_argument("--steps", type=int, help="the stage ends then, if it is sooner")
    parser.add_argument("--first", type=int, default=0, help="number of the first batch")
    parser.add_argument("--resume", type=Path, help="weights.safetensors of an earlier stage")
    parser.add_argument(
        "--towers", action="store_true", help="with pictures and sounds, after text alone"
    )
    parser.add_argument("--rate", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of a batch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--times", type=int, default=1, help="times that a batch is learnt from")
    parser.add_argument("--questions", type=int, default=128, help="held-out cases per task")
    parser.add_argument("--every", type=float, default=60.0, help="seconds between measurements")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--graph", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args(argv)
    options.graph = options.graph and options.device == "cuda"
    try:
        train(options)
    except RecordingError as error:
        # A failed recording can leave the context unusable: start again without one.
        print(f"starting again without recording: {error}", flush=True)
        again = [sys.executable, "-m", "training.train", *argv, "--no-graph"]
        os.execv(sys.executable, again)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
