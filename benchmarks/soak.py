"""Random requests against a server until time is up: every greedy answer equals its solo answer.

    python -m benchmarks.soak DIR|URL [--requests 2000] [--minutes 6] [--at-once 24] [--seed 1]
        [--preempt] [-- further arguments of `vllm serve`]

First every request of a drawn set is answered alone. Then they come many at once, cut to any
length: completions, chats, pictures, sounds, adapters, tools, formats, several answers to one, and
clients that leave. An answer counts up to its first near tie, where any company may decide. On a
GPU the server needs VLLM_BATCH_INVARIANT=1, on a CPU float32. In the end the blocks in use are back
to zero, the server is healthy and its memory has not grown. With a cache that is too small for what
is asked at once, --preempt demands that requests were preempted.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import random
import re
import sys
import tempfile
import time
import wave
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from inkling_portable.commands._server import (
    SERVE_ARGUMENTS,
    TINY_ARGUMENTS,
    Server,
    ServerError,
    memory_arguments,
)

TIE = 1e-3
"""Two ids whose log-probabilities are nearer than this may change places in another batch; float32
differs by less than 1e-5, and bits are the same under batch invariance."""
LONGEST = 48
TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {
    "type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}}}  # fmt: skip


class SoakError(Exception):
    """A sentence: what went wrong, with the request that shows it."""


@dataclass
class Request:
    """One greedy request, and what follows it when nobody else is served."""

    kind: str
    path: str
    body: dict[str, Any]
    alone: list[int] = field(default_factory=list)
    seconds: float = 0.5


@dataclass
class Outcome:
    """What happened, by kind of request."""

    right: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    memory_gib: tuple[float, float] = (0.0, 0.0)
    preemptions: int = 0

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(self.right.items()))
        before, after = self.memory_gib
        return (
            f"{self.right.total()} answers equal their solo answers ({kinds}), "
            f"{self.left.total()} were left by their clients; {self.tokens} tokens in "
            f"{self.seconds:.0f} s, {self.preemptions} preemptions; memory {before:.2f} GiB, then "
            f"{after:.2f} GiB"
        )


# --- what is asked --------------------------------------------------------------------------------


def picture(rng: random.Random) -> dict[str, Any]:
    from PIL import Image

    draw = np.random.default_rng(rng.getrandbits(32))
    pixels = draw.integers(0, 256, (rng.randint(8, 60), rng.randint(8, 60), 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, format="PNG")
    url = "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def sound(rng: random.Random) -> dict[str, Any]:
    draw = np.random.default_rng(rng.getrandbits(32))
    samples = draw.integers(-9000, 9000, rng.randint(800, 12_000)).astype("<i2")
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", "not compressed"))
        file.writeframes(samples.tobytes())
    data = base64.b64encode(out.getvalue()).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def words(rng: random.Random) -> dict[str, Any]:
    return {
        "type": "text",
        "text": " ".join(rng.choices(["abc", "def", "gh", "i", "jk", "lmn"], k=9)),
    }


def draw_request(
    rng: random.Random, models: Sequence[str], longest: int, media: bool, ids: int,
    tokens: int = LONGEST,
) -> Request:  # fmt: skip
    """One request of any kind, for up to `tokens` of an answer.

    models: the base and its adapters; longest: prompt tokens; ids: the vocabulary's size.
    """
    kinds = ["completion"] * 4 + ["chat", "tools", "format", "several"] + ["media"] * (2 * media)
    kind, model = rng.choice(kinds), rng.choice(models)
    adapter = "" if model == models[0] else " with an adapter"
    body: dict[str, Any] = {
        "model": model, "temperature": 0.0, "max_tokens": tokens, "return_token_ids": True,
    }  # fmt: skip
    if kind in ("completion", "several", "format"):
        length = int(longest ** rng.uniform(0.2, 1.0))
        body |= {"prompt": [rng.randrange(ids) for _ in range(length)], "logprobs": 2,
                 "ignore_eos": kind != "format"}  # fmt: skip
        if kind == "several":
            # Several greedy answers are refused; the best token of one is as good.
            body |= {"n": rng.randint(2, 4), "temperature": 1.0, "top_k": 1}
        if kind == "format":
            body["structured_outputs"] = {"regex": "(yes|no|maybe)( again)*!"}
        return Request(kind + adapter, "completions", body)
    content = [words(rng)]
    if kind == "media":
        content += [rng.choice((picture, sound))(rng) for _ in range(rng.randint(1, 3))]
    body |= {"messages": [{"role": "user", "content": content}], "logprobs": True,
             "top_logprobs": 2}  # fmt: skip
    if kind == "tools":
        body |= {"tools": [TOOL], "tool_choice": rng.choice(("auto", "required"))}
    return Request(kind + adapter, "chat/completions", body)


# --- asking ---------------------------------------------------------------------------------------


def ids_of(answer: Mapping[str, Any]) -> list[list[int]]:
    """The ids of every choice."""
    return [list(choice["token_ids"]) for choice in answer["choices"]]


def until_a_tie(ids: list[int], answer: Mapping[str, Any]) -> list[int]:
    """The beginning of a first choice in which no second-best id comes near the best one."""
    rows = answer["choices"][0]["logprobs"]
    if "content" in rows:
        pairs = [[entry["logprob"] for entry in row["top_logprobs"]] for row in rows["content"]]
    else:
        pairs = [list(row.values()) for row in rows["top_logprobs"]]
    for i, pair in enumerate(pairs):
        first, *others = sorted(pair, reverse=True)
        if others and first - others[0] < TIE:
            return ids[:i]
    return ids


class Client:
    """A server's OpenAI endpoints, and its metrics."""

    def __init__(self, url: str, timeout_s: float = 120.0) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.http = httpx.AsyncClient(timeout=timeout_s, limits=httpx.Limits(max_connections=None))

    async def ask(self, request: Request, **changes: Any) -> dict[str, Any]:
        """The answer; raises SoakError with what the server says otherwise."""
        body = request.body | changes
        answer = await self.http.post(f"{self.url}/v1/{request.path}", json=body)
        if answer.status_code != 200:
            raise SoakError(f"{request.kind} got status {answer.status_code}: {answer.text[:300]}")
        found: dict[str, Any] = answer.json()
        return found

    async def metric(self, name: str) -> float:
        """A metric of the server, summed over its labels; 0 where it has none."""
        lines = (await self.http.get(f"{self.url}/metrics")).text.splitlines()
        found = [line for line in lines if re.match(rf"{re.escape(name)}(?:\{{|\s)", line)]
        return sum(float(line.split()[-1]) for line in found)

    async def models(self) -> list[dict[str, Any]]:
        answer = await self.http.get(f"{self.url}/v1/models")
        found: list[dict[str, Any]] = answer.json()["data"]
        return found

    async def settle(self, limit_s: float = 20.0) -> None:
        """Wait until no request runs and no block is in use; SoakError when that does not come."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting",
                 "vllm:kv_cache_usage_perc")  # fmt: skip
        end = time.monotonic() + limit_s
        while any(values := [await self.metric(name) for name in names]):
            if time.monotonic() > end:
                left = ", ".join(f"{n} {v:g}" for n, v in zip(names, values, strict=True))
                raise SoakError(f"after {limit_s:.0f} s without requests: {left}")
            await asyncio.sleep(0.3)


async def answer_alone(client: Client, requests: Sequence[Request]) -> None:
    """Fill in what each request is answered when it is the only one, and in what time."""
    for request in requests:
        began = time.monotonic()
        answer = await client.ask(request, n=1)
        request.seconds = time.monotonic() - began
        request.alone = until_a_tie(ids_of(answer)[0], answer)


async def soak(
    client: Client, requests: Sequence[Request], count: int, seconds: float, at_once: int,
    rng: random.Random, memory_gib: Callable[[], float] = lambda: 0.0,
) -> Outcome:  # fmt: skip
    """Send up to `count` of the requests in random order, `at_once` at a time, until time is up."""
    outcome, began = Outcome(), time.monotonic()
    preempted = await client.metric("vllm:num_preemptions_total")
    chosen = rng.choices(requests, k=count)
    drawn = iter([(request, rng.randint(1, request.body["max_tokens"]), rng.random() < 0.15,
                   rng.uniform(0.0, 2.0) * request.seconds) for request in chosen])  # fmt: skip
    warm: list[float] = []

    async def tell() -> None:
        while True:
            await asyncio.sleep(15)
            print(f"{time.monotonic() - began:.0f} s: {outcome.right.total()} answers, "
                  f"{outcome.left.total()} left, {len(outcome.wrong)} wrong",
                  file=sys.stderr, flush=True)  # fmt: skip

    async def work() -> None:
        for request, tokens, leaves, patience in drawn:
            if time.monotonic() - began > seconds:
                return
            if not warm and time.monotonic() - began > seconds / 3:
                warm.append(memory_gib())
            asked = client.ask(request, max_tokens=tokens)
            try:
                found = ids_of(await asyncio.wait_for(asked, patience if leaves else None))
            except TimeoutError:
                outcome.left[request.kind] += 1
                continue
            except (SoakError, httpx.HTTPError) as error:
                outcome.wrong.append(f"{request.kind}: {type(error).__name__} {error}")
                continue
            expected = request.alone[:tokens]
            outcome.tokens += sum(map(len, found))
            if any(ids[: len(expected)] != expected for ids in found):
                shown = json.dumps({k: v for k, v in request.body.items() if k != "messages"})
                outcome.wrong.append(f"{request.kind}: {found}, alone {expected}; {shown[:500]}")
            outcome.right[request.kind] += 1

    telling = asyncio.create_task(tell())
    await asyncio.gather(*(work() for _ in range(at_once)))
    telling.cancel()
    outcome.seconds = time.monotonic() - began
    outcome.preemptions = int(await client.metric("vllm:num_preemptions_total") - preempted)
    outcome.memory_gib = (warm[0] if warm else memory_gib(), memory_gib())
    return outcome


# --- the command ----------------------------------------------------------------------------------


async def run(options: argparse.Namespace, url: str, memory_gib: Callable[[], float]) -> Outcome:
    """The whole soak of a server that is ready."""
    client, rng = Client(url), random.Random(options.seed)
    served = await client.models()
    names = [entry["id"] for entry in served]
    longest = min(options.longest, int(served[0].get("max_model_len") or 2048) - LONGEST - 1)
    requests = [draw_request(rng, names, longest, options.media, options.ids)
                for _ in range(options.distinct)]  # fmt: skip
    await answer_alone(client, requests)
    print(f"{len(requests)} requests were answered alone", file=sys.stderr, flush=True)
    outcome = await soak(client, requests, options.requests, 60 * options.minutes,
                         options.at_once, rng, memory_gib)  # fmt: skip
    await client.settle()
    return outcome


def main(argv: list[str]) -> int:
    """0 when every answer was right, 1 when one was not, 2 when the server failed."""
    given, extra = argv, []
    if "--" in argv:
        given, extra = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("target", metavar="DIR|URL")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--at-once", type=int, default=24)
    parser.add_argument("--distinct", type=int, default=100, help="different requests")
    parser.add_argument("--longest", type=int, default=1024, metavar="N", help="prompt tokens")
    parser.add_argument("--ids", type=int, default=440, help="prompt ids are below this")
    parser.add_argument("--media", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--growth", type=float, default=0.3, metavar="GIB", help="allowed")
    parser.add_argument("--preempt", action="store_true", help="fail without preemptions")
    parser.add_argument("--log", type=Path, metavar="FILE", help="for what the server prints")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(given)
    try:
        if options.target.startswith(("http://", "https://")):
            outcome = asyncio.run(run(options, options.target, lambda: 0.0))
        else:
            import torch

            arguments = list(SERVE_ARGUMENTS)
            if not torch.cuda.is_available():
                arguments += [*TINY_ARGUMENTS, *memory_arguments("64M")]
            env = {"VLLM_BATCH_INVARIANT": "1"} if torch.cuda.is_available() else {}
            with tempfile.TemporaryDirectory(prefix="inkling-soak-") as scratch:
                server = Server(Path(options.target), [*arguments, *extra],
                                options.log or Path(scratch) / "server.log", env)  # fmt: skip
                with server:
                    server.wait_until_ready(1800, lambda seconds: None)
                    print(server.plugin_line(), file=sys.stderr, flush=True)
                    total = lambda: sum(server.memory_gib().values())  # noqa: E731
                    outcome = asyncio.run(run(options, server.url, total))
    except (SoakError, ServerError, httpx.HTTPError) as error:
        print(f"soak: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print(outcome)
    for line in outcome.wrong[:10]:
        print(f"wrong: {line[:1500]}")
    before, after = outcome.memory_gib
    if after > before + options.growth:
        print(f"memory grew by {after - before:.2f} GiB")
        return 1
    if options.preempt and not outcome.preemptions:
        print("no request was preempted; give the server a smaller cache")
        return 1
    return 1 if outcome.wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
