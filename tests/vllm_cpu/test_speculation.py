"""Drafting on a CPU: output as without it, and drafts of depths that have seen everything.

The oracle of a draft is a pass over the whole sequence from nothing, with the true tokens and, at
the end, the drafts of the depths before.
"""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from inkling_portable.commands.tiny import write_tiny
from inkling_portable.model import self_check
from inkling_portable.model.preprocess import ImageSettings, image_patches
from inkling_portable.registry import Facts, resolve
from inkling_portable.target import Target
from tests.media import picture
from tests.plain_inkling import PlainInkling
from tests.vllm_cpu.conftest import Engine, prompt

DEPTHS = 4
LIMIT = 160  # tokens of a request
CHUNK = 80  # tokens of a step
PATCH = 16
BOUND = 5e-5
"""On hidden rows of deviation 3, where float32 in another order of sums costs up to 1.6e-5."""
CONTEXT = 0.07
"""What is left of the trunk's and the depths' branches where a token decides alone, mostly."""


def drafting(count: int) -> dict[str, Any]:
    return {
        "block_size": 16,
        "speculative_config": {"method": "mtp", "num_speculative_tokens": count},
    }


@pytest.mark.parametrize("count", [1, 2])
def test_greedy_output_is_the_same(engines: Callable[..., Engine], count: int) -> None:
    prompts = [prompt(length, seed=length) for length in (1, 3, 20, 40, 97)]
    plain, engine = engines(block_size=16), engines(**drafting(count))
    wanted = plain.greedy(prompts, 24)
    assert engine.greedy(prompts, 24) == wanted
    before = engine.counter("vllm:spec_decode_num_draft_tokens")
    for ids, tokens in zip(prompts, wanted, strict=True):
        assert engine.greedy([ids], 24) == [tokens]
    drafted = engine.counter("vllm:spec_decode_num_draft_tokens") - before
    assert drafted >= 20 * count * len(prompts)
    # A start checks the depths on their loaded weights too.
    draft = runner_of(engine).drafter.model
    line = self_check.check(draft, draft.vllm_config)
    assert line is not None and "ops agree" in line and "transformer_block (" in line


# --- drafts ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def predictable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Depths that are often right: mostly, a token decides alone about the one behind it."""
    folder = tmp_path_factory.mktemp("predictable")
    write_tiny(folder, preset="omni", dtype="float32", mtp_depths=DEPTHS, force=True)
    trunk, depths = load_file(folder / "model.safetensors"), load_file(folder / "mtp.safetensors")
    for name, tensor in [*trunk.items(), *depths.items()]:
        if name.endswith(("wo_ud.weight", "w2_md.weight", "w2_weight")):
            tensor *= CONTEXT
    hidden = trunk["model.llm.norm.weight"].shape[0]
    for depth in range(DEPTHS):
        at = f"model.mtp.layers.{depth}"
        depths[f"{at}.embed_norm.weight"] = trunk["model.llm.norm.weight"].clone()
        projection = depths[f"{at}.input_proj.weight"]
        projection *= CONTEXT
        projection[:, hidden:] += torch.eye(hidden)
    save_file(trunk, folder / "model.safetensors")
    save_file(depths, folder / "mtp.safetensors")
    return folder


@dataclass
class Draft:
    request: str
    known: int  # tokens of the request when it was made, the sampled one included
    tokens: list[int]
    hidden: list[Tensor]  # [H] of every depth, from which the token was drawn


@pytest.fixture(scope="module")
def deep(predictable: Path) -> Iterator[Engine]:
    yield Engine(
        predictable, **drafting(DEPTHS), max_model_len=LIMIT, max_num_batched_tokens=CHUNK,
        max_num_seqs=8, mm_processor_kwargs={"max_image_tokens": 60, "max_audio_tokens": 60},
    )  # fmt: skip


@pytest.fixture
def drafts(deep: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Draft]:
    return record(deep, monkeypatch)


def runner_of(engine: Engine) -> Any:
    return engine.llm.llm_engine.model_executor.driver_worker.worker.model_runner


def record(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Draft]:
    """Every draft that the engine makes from now on."""
    runner = runner_of(engine)
    drafter, made = runner.drafter, []
    propose, sample = drafter.propose, drafter._sample_draft_tokens_for_step
    rows: list[Tensor] = []

    def sampled(hidden: Tensor, *given: Any, **more: Any) -> Any:
        rows.append(hidden.clone())
        return sample(hidden, *given, **more)

    def recorded(**given: Any) -> Tensor:
        rows.clear()
        found: Tensor = propose(**given)
        for i, name in enumerate(runner.input_batch.req_ids):
            known = drafter.histories[name].rows.end + 1
            made.append(Draft(name, known, found[i].tolist(), [row[i] for row in rows]))
        return found

    monkeypatch.setattr(drafter, "propose", recorded)
    monkeypatch.setattr(drafter, "_sample_draft_tokens_for_step", sampled)
    return made


@dataclass
class Asked:
    """A prompt with at most one picture (uint8 [h, w, 3]) behind its first `before` tokens."""

    ids: list[int]
    picture: np.ndarray | None = None
    before: int = 0

    def input(self, opener: int) -> dict[str, Any]:
        if self.picture is None:
            return {"prompt_token_ids": self.ids}
        ids = [*self.ids[: self.before], opener, *self.ids[self.before :]]
        return {
            "prompt_token_ids": ids,
            "multi_modal_data": {"image": [Image.fromarray(self.picture)]},
        }


class Teacher:
    """Whole passes of a checkpoint's trunk and depths over one request."""

    def __init__(self, folder: Path) -> None:
        ops = resolve(Target.parse("cpu"), Facts())
        self.plain = PlainInkling(folder, ops, length=LIMIT + DEPTHS)
        raw = json.loads((folder / "config.json").read_text())
        self.opener, self.slot = raw.get("image_bos_token_id"), raw.get("image_token_id")

    def start(self, ids: list[int], image: Tensor | None) -> None:
        """Run the trunk over `ids`, the rows of a picture [n, H] in its slots."""
        self.ids, self.rows = ids, None
        if image is not None:
            self.rows = torch.full((len(ids) + DEPTHS, image.shape[1]), float("nan"))
            self.rows[[i for i, token in enumerate(ids) if token == self.slot]] = image
        self.plain.lengths = [0]
        rows = None if self.rows is None else self.rows[: len(ids)]
        self.hidden = self.plain.forward([0], [ids], rows=rows)

    def assert_greedy(self, start: int) -> None:
        logits = self.plain.logits(self.hidden[start - 1 : -1])
        assert logits.argmax(-1).tolist() == self.ids[start:]

    def assert_drafts(self, draft: Draft, chosen: bool) -> None:
        """`chosen`: the tokens are the most likely ones."""
        count, given = draft.known - 1, self.ids[: draft.known] + draft.tokens
        previous = self.hidden[:count]
        for depth, token in enumerate(draft.tokens):
            part = slice(depth + 1, depth + 1 + count)
            rows = None if self.rows is None else self.rows[part]
            previous = self.plain.draft_hidden(depth, [0], previous, [given[part]], [0], rows)
            where = f"{draft.request} after {draft.known} tokens, depth {depth}"
            error = (draft.hidden[depth] - previous[-1]).abs().max()
            assert error < BOUND, f"{where}: {error:.1e}"
            (logits,) = self.plain.logits(previous[-1:])
            # Near ties may fall either way.
            assert not chosen or logits.max() - logits[token] < BOUND, where


def tower_rows(engine: Engine, picture: np.ndarray) -> Tensor:
    """[slots, H] of a picture, from the tower of the model that serves."""
    patches = image_patches(Image.fromarray(picture), ImageSettings(patch_size=PATCH))[:, :1]
    sizes = torch.tensor([len(patches)])
    with torch.no_grad():
        (rows,) = engine.on_model(
            lambda model: model.embed_multimodal(pixel_values=patches, num_patches=sizes)
        )
    return rows.clone()


def run_and_check(
    engine: Engine, made: list[Draft], teacher: Teacher, prompts: list[Asked], chosen: bool = True
) -> tuple[list[Any], list[int]]:
    """Hold one batch to the teacher: its outputs, and how many tokens each step brought."""
    from vllm import SamplingParams

    made.clear()
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=30)
    inputs = [asked.input(teacher.opener) for asked in prompts]
    outputs = engine.llm.generate(inputs, params, use_tqdm=False)
    advances = []
    for asked, out in zip(prompts, outputs, strict=True):
        ids = list(out.prompt_token_ids) + list(out.outputs[0].token_ids)
        start = len(out.prompt_token_ids)
        picture = asked.picture
        teacher.start(ids, None if picture is None else tower_rows(engine, picture))
        teacher.assert_greedy(start)
        mine = [d for d in made if d.request.split("-")[0] == out.request_id]
        mine = [d for d in mine if start < d.known <= len(ids)]
        assert mine[0].known == start + 1
        for draft in mine:
            teacher.assert_drafts(draft, chosen)
        advances += [b.known - a.known for a, b in itertools.pairwise(mine)]
    return outputs, advances


def test_drafts_equal_a_pass_over_everything(
    deep: Engine, drafts: list[Draft], predictable: Path
) -> None:
    teacher = Teacher(predictable)
    # The third takes two chunks, the last one ends at the limit.
    prompts = [Asked(prompt(length, seed=length)) for length in (3, 20, 97, 140)]
    outputs, advances = run_and_check(deep, drafts, teacher, prompts)
    assert [out.num_cached_tokens for out in outputs] == [0] * len(prompts)
    assert [len(out.outputs[0].token_ids) for out in outputs] == [30, 30, 30, LIMIT - 140]
    # Every number of right drafts happened, so every number of rows ran again.
    assert set(advances) == set(range(1, DEPTHS + 2)), advances

    # What the same and another request left in the caches serves the depths too.
    outputs, _ = run_and_check(deep, drafts, teacher, prompts[2:])
    assert all(out.num_cached_tokens >= 64 for out in outputs)
    fork = Asked(prompts[-1].ids[:130] + prompt(9, seed=1))
    outputs, _ = run_and_check(deep, drafts, teacher, [fork])
    assert outputs[0].num_cached_tokens >= 64


@pytest.mark.parametrize("before", [CHUNK - 10, CHUNK - 4, CHUNK - 2, CHUNK - 1])
def test_drafts_see_a_picture_at_the_border_of_a_chunk(
    deep: Engine, drafts: list[Draft], predictable: Path, before: int
) -> None:
    """The opener, slots, or only what is looked ahead for stand on either side."""
    asked = Asked(prompt(before + 7, seed=before), picture(24, before - 30), before)
    run_and_check(deep, drafts, Teacher(predictable), [asked])


def test_a_slot_that_was_drafted_is_not_yet_a_picture(
    deep: Engine, monkeypatch: pytest.MonkeyPatch, predictable: Path
) -> None:
    """Depths that looked beyond the chunk were given the slot's token, not the picture's row."""
    teacher = Teacher(predictable)

    def slots(hidden: Tensor, *_: Any, **__: Any) -> Any:
        return torch.full((len(hidden),), teacher.slot), None

    monkeypatch.setattr(runner_of(deep).drafter, "_sample_draft_tokens_for_step", slots)
    asked = Asked(prompt(90, seed=5), picture(24, 50), CHUNK - 10)
    run_and_check(deep, record(deep, monkeypatch), teacher, [asked], chosen=False)


def test_depths_that_look_tokens_up_themselves(
    engines: Callable[..., Engine], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without towers the depths are given tokens, not rows."""
    engine = engines(**drafting(2))
    engine.forget_prefixes()
    prompts = [Asked(prompt(length, seed=length)) for length in (5, 40)]
    run_and_check(engine, record(engine, monkeypatch), Teacher(checkpoint), prompts)


# --- limits and the hook --------------------------------------------------------------------------


def engine_config(folder: Path, **speculative: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    spec = {"method": "mtp", **speculative}
    return EngineArgs(
        model=str(folder), dtype="float32", max_model_len=512, speculative_config=spec
    ).create_engine_config()


def test_more_drafts_than_depths_stop_the_start(checkpoint: Path) -> None:
    sentence = "drafting 4 tokens .* needs as many MTP depths; the checkpoint has 2; .* at most 2"
    with pytest.raises(ValueError, match=sentence):
        engine_config(checkpoint, num_speculative_tokens=4)
    with pytest.raises(ValueError, match=r"num_speculative_tokens:3 must be divisible by .*2"):
        engine_config(checkpoint, num_speculative_tokens=3)


def test_the_hook_is_still_needed(checkpoint: Path) -> None:
    """Fails when vLLM's V1 runner draws on several depths by itself: take `install_proposer` out.

    Left alone, the runner builds an EagleProposer, which does not say which depth to run and wants
    all draft layers in one cache group; the V1 runner asks for nothing else.
    """
    from vllm.config import SpeculativeConfig
    from vllm.v1.spec_decode.eagle import EagleProposer
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    spec = engine_config(checkpoint, num_speculative_tokens=2).speculative_config
    unhooked = inspect.unwrap(SpeculativeConfig.use_step3p5_mtp)
    assert spec.use_multi_module_mtp() and spec.use_step3p5_mtp() and not unhooked(spec)
    assert "spec_step_idx" not in inspect.getsource(EagleProposer.propose)
    assert "use_multi_module_mtp" not in inspect.getsource(GPUModelRunner)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"disable_padded_drafter_batch": True}, "found disable_padded_drafter_batch; leave it"),
        ({"data_parallel_size": 2}, "data parallel size 1, .* found 2; start one server per rank"),
    ],
)
def test_what_drafting_cannot_do_is_a_sentence(
    checkpoint: Path, change: dict[str, Any], sentence: str
) -> None:
    from inkling_portable.model.drafting import EveryDepth

    config = engine_config(checkpoint, num_speculative_tokens=2)
    for name, value in change.items():
        owner = config.parallel_config if "parallel" in name else config.speculative_config
        setattr(owner, name, value)
    with pytest.raises(ValueError, match=sentence):
        EveryDepth(config, torch.device("cpu"))
