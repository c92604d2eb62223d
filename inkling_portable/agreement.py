"""Hold one function to one contract: the comparison behind the tests, `verify` and `record`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from inkling_portable.registry import Op

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def convert(value: Any, dtype: torch.dtype | None = None, device: str | None = None) -> Any:
    """A private copy of an argument that keeps its strides; floating tensors go to `dtype`."""
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    target = dtype if dtype is not None and value.dtype.is_floating_point else value.dtype
    # Views into a wider buffer keep their gaps: kernels must honour strides.
    if value.numel() and not value.is_contiguous():
        base = torch.empty(_extent(value), dtype=target, device=device or value.device)
        copy = base.as_strided(value.shape, value.stride())
        copy.copy_(value)
        return copy
    return value.to(device=device or value.device, dtype=target, copy=True)


def _extent(value: Tensor) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))


def run(
    function: Callable[..., Any],
    contract: Op,
    arguments: dict[str, Any],
    dtype: torch.dtype | None = None,
    device: str | None = None,
    keep: bool = False,
) -> list[Tensor]:
    """Outputs on fresh copies of the arguments: returned tensors, then mutated ones, on the CPU or,
    with `keep`, where they are."""
    copies = {name: convert(value, dtype, device) for name, value in arguments.items()}
    returned = function(**copies)
    outputs = list(returned) if isinstance(returned, tuple) else [returned]
    outputs = [x for x in outputs if x is not None]
    outputs += [copies[name] for name in contract.mutates]
    return outputs if keep else [x.cpu() for x in outputs]


def output_names(contract: Op, count: int) -> list[str]:
    """Names for reports: result0, result1, ... and the mutated arguments."""
    returned = count - len(contract.mutates)
    return [f"result{i}" for i in range(returned)] + list(contract.mutates)


def disagreements(
    contract: Op, function: Callable[..., Any], arguments: dict[str, Any], device: str | None = None
) -> list[str]:
    """Sentences, one for each output of `function` that breaks the contract on these arguments."""
    return held(contract, function, arguments, device)[0]


def held(
    contract: Op, function: Callable[..., Any], arguments: dict[str, Any], device: str | None = None
) -> tuple[list[str], float]:
    """`disagreements`, and the largest error as a part of what it may be."""
    import torch

    keep = device is None
    truth = run(contract.reference, contract, arguments, torch.float64, keep=keep)
    baseline = run(contract.reference, contract, arguments, keep=keep)
    got = run(function, contract, arguments, device=device, keep=keep)
    if len(got) != len(truth):
        return [f"{contract.name}: {len(got)} outputs where the contract has {len(truth)}"], 0.0
    tolerances = contract.tolerances_of(len(got))
    names = output_names(contract, len(got))
    reports, share = [], 0.0
    for name, tolerance, g, b, t in zip(names, tolerances, got, baseline, truth, strict=True):
        if reason := tolerance.check(g, b, t):
            reports.append(f"{contract.name}.{name}: {reason}")
        else:
            share = max(share, tolerance.share(g, b, t))
    return reports, share
