"""What all Triton kernels share: the facts of the machine that sizes launches, and checks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from inkling_portable.backends.evidence import DEPENDENT_LAUNCH
from inkling_portable.target import Target

if TYPE_CHECKING:
    from torch import Tensor

if os.environ.get("TRITON_INTERPRET") == "1":
    from inkling_portable.backends.triton._interpreter import repair

    repair()

_stated: Target | None = None


@cache
def _detected() -> Target:
    return Target.detect()


def target() -> Target:
    """The machine to launch for: this one, looked at once, or the one that `launching_for` states.

    Kernels never ask a device: what they are sized by is this description.
    """
    return _stated or _detected()


@contextmanager
def launching_for(machine: Target) -> Iterator[None]:
    """Size every launch in the block for `machine`: how kernels are compiled for absent chips."""
    global _stated
    before, _stated = _stated, machine
    try:
        yield
    finally:
        _stated = before


def compute_units() -> int:
    """SMs or CUs of the launch target; 4 where it states none, as under the interpreter."""
    machine = target()
    return machine.compute_units if machine.vendor != "cpu" and machine.compute_units else 4


def is_rocm() -> bool:
    """Whether waves have 64 lanes and launches take AMD's options."""
    return target().vendor == "rocm"


# Programmatic dependent launch lets a kernel start while its predecessor drains. It is on where a
# committed measurement on the chip shows that it pays; benchmarks switch it to take such ones.
_dependent_launch: bool | None = None


@contextmanager
def dependent_launch(on: bool = True) -> Iterator[None]:
    """Launch the block's kernels with (or without) programmatic dependent launch, on sm90+."""
    global _dependent_launch
    before, _dependent_launch = _dependent_launch, on
    try:
        yield
    finally:
        _dependent_launch = before


def pdl() -> bool:
    """The value of the kernels' PDL constant for the launch target.

    A kernel that is launched with it must call `gdc_wait` before it reads what another kernel
    wrote, or writes what another may still read. What it reads ahead of that must be older than
    the last kernel before it that waits first and then lets the next one start: the other way
    round, as `few_rows.cu` has it, says nothing of what came before.
    """
    global _asked
    machine = target()
    if _asked[0] is not machine:  # every launch asks, and hashing a target takes a microsecond
        can = machine.vendor == "cuda" and int(machine.arch[2:]) >= 90
        _asked = machine, can, can and machine.key in DEPENDENT_LAUNCH
    return _asked[2] if _dependent_launch is None else _dependent_launch and _asked[1]


_asked: tuple[Target | None, bool, bool] = (None, False, False)
"""The target that `pdl` was last asked for: whether it can, and whether it pays."""


_fixed_order = False


@contextmanager
def fixed_order() -> Iterator[None]:
    """Launch the block's kernels with tiles that do not depend on how many rows there are."""
    global _fixed_order
    before, _fixed_order = _fixed_order, True
    try:
        yield
    finally:
        _fixed_order = before


def order_is_fixed() -> bool:
    """Whether tilings must be those of `fixed_order`."""
    return _fixed_order


def options(**chosen: Any) -> dict[str, Any]:
    """Launch options for the target: `chosen`, plus the dependent-launch flag where it is on."""
    return {**chosen, "launch_pdl": True} if pdl() else chosen


@cache
def _zeros(device: Any, owner: str) -> Tensor:
    import torch

    zeros = torch.zeros(64, 4, dtype=torch.int32, device=device)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return zeros


_streams: dict[int, int] = {}


def arrivals(device: Any, owner: str) -> Tensor:
    """Zeros [4] int32 of the current stream, by which programs of a launch count themselves.

    The last to arrive leaves zeros behind. Kernels of different names (`owner`) may overlap, so
    each has its own. Made before anything is captured.
    """
    import torch

    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _zeros(device, owner)[_streams.setdefault(stream, len(_streams)) % 64]


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n` (1 for n <= 1)."""
    return 1 << max(0, n - 1).bit_length()


def ceil_div(a: int, b: int) -> int:
    """`a / b` rounded up."""
    return -(-a // b)


WIDEST_ROW = 16384
"""A row is held in registers by one program; wider ones would spill."""


def row_block(op: str, width: int) -> tuple[int, int]:
    """(block, warps) for one program that holds a row of `width` values.

    Raises ValueError beyond WIDEST_ROW.
    """
    if width > WIDEST_ROW:
        raise ValueError(f"{op}: rows of {width} values are beyond {WIDEST_ROW}; use provider "
                         "reference for this width")  # fmt: skip
    block = next_power_of_2(width)
    # 8 to 16 values for each lane: two 16-byte loads, and few enough registers for a deep chain.
    lanes = 64 if is_rocm() else 32
    return block, min(16, max(1, block // (8 * lanes)))


def check_rows(op: str, **tensors: Tensor | None) -> None:
    """Raise ValueError naming the first argument whose last axis is not contiguous."""
    for name, value in tensors.items():
        if value is not None and value.stride(-1) != 1 and value.shape[-1] > 1:
            raise ValueError(f"{op}: {name} needs a contiguous last axis; found stride "
                             f"{value.stride(-1)}, so pass {name}.contiguous()")  # fmt: skip


def check_table(pages: Tensor, kv_lens: Tensor, page: int) -> None:
    """Raise ValueError where lengths on the host exceed `pages` [B, P]; builders check the rest."""
    room = pages.shape[1] * page
    if kv_lens.device.type == "cpu" and len(kv_lens) and int(kv_lens.max()) > room:
        raise ValueError(f"pages needs columns for {int(kv_lens.max())} tokens; found "
                         f"{pages.shape[1]} of {page} tokens")  # fmt: skip


def check_shapes(op: str, spec: str, *values: Tensor | None, **sizes: int) -> None:
    """Raise ValueError naming the first argument that does not go with those before it.

    spec: "x TH=, weight H": each argument with a letter for every axis. Axes of one letter have
    one size, which `sizes` may give, and arguments with "=" one dtype. Float64 is never taken.
    """
    _agree(op, spec, *((v.shape, v.dtype) if v is not None else None for v in values), **sizes)


@lru_cache(maxsize=4096)  # all layers of a step ask the same
def _agree(op: str, spec: str, *values: tuple[Any, Any] | None, **sizes: int) -> None:
    first: str | None = None
    for part, value in zip(spec.split(", "), values, strict=True):
        name, axes = part.split()
        if value is None:
            continue
        shape, dtype, letters = list(value[0]), str(value[1]), axes.rstrip("=")
        wanted = [sizes.setdefault(*axis) for axis in zip(letters, shape, strict=False)]
        if wanted != shape or len(letters) != len(shape):
            known = ", ".join(f"{letter} = {sizes[letter]}" for letter in letters[: len(shape)])
            raise ValueError(f"{op}: {name} needs axes {letters} with {known}; found {shape}")
        first = first or (dtype if axes != letters else None)
        if dtype == "torch.float64" or (axes != letters and dtype != first):
            raise ValueError(f"{op}: {name} needs one of the served dtypes, and that of the "
                             f"arguments before it; found {dtype}")  # fmt: skip
