"""No step of serving launches a kernel that the warm-up did not: compared as compilation jobs.

A job is what Triton's launcher would compile: constants, types, alignment attributes, options. The
warm-up's steps and random steps of a server are recorded on tensors without memory; nothing is
compiled here.
"""

import random
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch

from benchmarks.experts import MODELS, tokens_of, weights_of
from benchmarks.small_ops_shapes import OPS, RANKS, arguments
from ci.cross_compile import Job, Launch, job, recorded
from inkling_portable.backends.triton import OFFERS
from inkling_portable.backends.triton._common import launching_for
from inkling_portable.backends.triton.rel_attention import attend
from inkling_portable.model.warm_up_steps import (
    Bounds,
    Step,
    geometric,
    steps_of_attention,
    steps_of_layers,
)
from inkling_portable.target import Target

CHIPS = {"sm90": "h200", "gfx942": "mi300x"}  # the tuning of the others takes the same turns
BOUNDS = Bounds(rows=8192, requests=128, fresh=4, length=131072)
TOWERS = ("norm_gelu", "dmel_embed_norm")
RANK = RANKS["large-tp8-global"]
FUNCTIONS = {row.op: row.load() for row in OFFERS}


def small_ops(rows: Iterable[int]) -> None:
    for count in rows:
        for op in OPS:
            if op not in TOWERS and (op != "skinny_linear" or count <= 16):
                FUNCTIONS[op](**arguments(op, count, RANK, "meta", count <= BOUNDS.requests))


def experts(rows: Iterable[int]) -> None:
    for form in ("nvfp4", "bf16"):
        weights = weights_of("large-tp8", form, "meta")
        for count in rows:
            FUNCTIONS["routed_experts"](
                **weights, **tokens_of(MODELS["large-tp8"][0], count, 1, "meta")[0]
            )


def attention(target: Target, steps: Iterable[Step]) -> None:
    def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    for step in steps:
        for kv_heads, window, extent in ((1, 0, 1024), (2, 512, 512)):
            cache = tensor(4096, kv_heads, 16, 256).transpose(1, 2)
            attend(
                target, tensor(step.rows, 8, 128), cache[..., :128], cache[..., 128:],
                tensor(step.rows, 8, extent), tensor(step.requests, 8191, dtype=torch.int32),
                tensor(step.requests + 1, dtype=torch.int32),
                tensor(step.requests, dtype=torch.int32), step.fresh, step.longest, window,
                1 / 128, tensor(step.rows, 8, 128),
            )  # fmt: skip


def served(count: int, seed: int) -> Iterator[Step]:
    """Random steps within the bounds: decoding, verifying drafts, chunks, all of these at once."""
    draw = random.Random(seed)

    def size(low: int, high: int) -> int:
        """Between low and high, each order of magnitude as likely as another."""
        return min(high, int(low * (high / low) ** draw.random()))

    for _ in range(count):
        requests = size(1, BOUNDS.requests)
        each = draw.choice((1, 1, size(2, BOUNDS.fresh)))
        longest = size(each, BOUNDS.length)
        if draw.random() < 0.4:
            chunk = size(2, BOUNDS.rows - requests)
            longest = max(longest, chunk)
            yield Step(chunk + requests - 1, requests, chunk, longest)
        else:
            padded = min(BOUNDS.rows, requests * each + draw.choice((0, 0, 7)))
            yield Step(padded, requests, each, draw.choice((longest, BOUNDS.length)))


def jobs(arch: str, steps: Iterable[Step], calls: Iterable[Step]) -> set[Job]:
    target = Target.parse(CHIPS[arch])
    counts = sorted({step.rows for step in steps})
    with launching_for(target), recorded() as launches:
        small_ops(counts)
        experts(counts)
        attention(target, calls)
    return {job(launch, arch) for launch in {_kind(launch): launch for launch in launches}.values()}


def _kind(launch: Launch) -> tuple[Any, ...]:
    """What a job can depend on, and more: equal kinds are equal jobs, at a fraction of the cost."""

    def of(parameter: Any, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.dtype
        if type(value) is int and not parameter.is_constexpr:
            return value == 1, value % 16 == 0, value >> 31
        return str(value)

    options = tuple(sorted(launch.options.items()))
    return launch.name, tuple(map(of, launch.kernel.params, launch.args)), options


@pytest.mark.parametrize("arch", CHIPS)
def test_random_steps_compile_nothing_new(arch: str) -> None:
    warm = jobs(arch, steps_of_layers(BOUNDS), steps_of_attention(BOUNDS))
    steps = list(served(300, seed=7))
    missing = jobs(arch, steps[:30], steps) - warm
    assert sorted({m.kernel for m in missing}) == []
    # The first start compiles so many kernels for each kind of layer, one after the other.
    assert len(warm) < 150, len(warm)


def test_each_tower_kernel_has_one_form() -> None:
    """They run while the engine profiles its largest media inputs, and are not warmed again."""
    with launching_for(Target.parse("h200")), recorded() as launches:
        for op in TOWERS:
            for rows in (1, 2, 16, 100, 4096):
                FUNCTIONS[op](**arguments(op, rows, RANK, "meta"))
    # A frame of sound is summed by one kernel and normed by another.
    assert len({job(launch, "sm90") for launch in launches}) == len(TOWERS) + 1


def test_geometric() -> None:
    assert geometric(1, 1, 2) == [1] and geometric(512, 2000, 4) == [512, 2000]
    assert geometric(4096, 512, 4) == [512]
