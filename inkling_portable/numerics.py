"""Tolerances that are derived, not chosen: how far a kernel may be from its contract, and why.

Every op's reference runs twice: in float64 it is the truth, in the serving dtype the baseline. A
kernel is judged per row (the last dimension), so that a few displaced rows cannot hide in a mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Tolerance:
    """One rule: `kind` picks it, `amount` is its number, `why` is printed in docs/numerics.md."""

    kind: str
    amount: float
    why: str
    spread: float = 1
    """Multiplies what float32 is granted, for ops whose kernels approximate a function."""

    def check(self, got: Tensor, baseline: Tensor, truth: Tensor) -> str | None:
        """None if `got` (any shape) is acceptable, else a sentence with the worst row.

        `baseline` and `truth` have the shape of `got`; truth is float64 for floating outputs.
        """
        import torch

        if got.shape != truth.shape:
            return f"shape {tuple(got.shape)} where the contract gives {tuple(truth.shape)}"
        if got.dtype != baseline.dtype:
            return f"dtype {got.dtype} where the contract gives {baseline.dtype}"
        if got.numel() == 0:
            return None
        if self.kind == "exact" or not got.dtype.is_floating_point:
            same = (got == baseline) | (got.isnan() & baseline.isnan())
            differing = int((~same).sum())
            return f"{differing} of {got.numel()} values differ, none may" if differing else None
        if got.dtype.itemsize == 1:
            return _codes_apart(got, baseline)
        g, b, t = (
            x.double().reshape(-1, x.shape[-1] if x.dim() else 1) for x in (got, baseline, truth)
        )
        wrong = ~torch.isfinite(g) & torch.isfinite(t)
        if wrong.any():
            return f"{int(wrong.sum())} values are not finite where the contract's are"
        # Rows that are not finite in the contract (poisoned padding) carry no requirement.
        rows = torch.isfinite(t).all(dim=-1)
        if not rows.any():
            return None
        g, b, t = g[rows], b[rows], t[rows]
        scale = t.abs().amax(dim=-1)
        error = (g - t).abs().amax(dim=-1)
        if self.kind == "snr":
            noise = ((g - t) ** 2).sum().clamp_min(1e-300)
            snr = float(10 * torch.log10((t**2).sum().clamp_min(1e-300) / noise))
            return f"SNR {snr:.1f} dB is below {self.amount} dB" if snr < self.amount else None
        step = torch.finfo(got.dtype).eps * scale
        allowed = self.allowed(b, t, got.dtype)
        excess = error - allowed
        worst = int(excess.argmax())
        if float(excess[worst]) > 0:
            return (f"row {worst} of {len(t)} (finite rows) is off by {float(error[worst]):.3e}, "
                    f"allowed {float(allowed[worst]):.3e}")  # fmt: skip
        if self.kind == "twice":
            mean, base = float((g - t).abs().mean()), float((b - t).abs().mean())
            limit = self.amount * base + self._granted(got.dtype)[1] * float(step.mean()) / 8
            if mean > limit:
                return f"mean error {mean:.3e} is above {limit:.3e}"
        return None

    def share(self, got: Tensor, baseline: Tensor, truth: Tensor) -> float:
        """The largest error of a row as a part of what it may be; 0 for rules without a number."""
        if self.kind not in ("twice", "ulps") or got.dtype.itemsize == 1 or not got.numel():
            return 0.0
        rows = (
            x.double().reshape(-1, x.shape[-1] if x.dim() else 1) for x in (got, baseline, truth)
        )
        g, b, t = rows
        allowed = self.allowed(b, t, got.dtype).clamp_min(1e-300)
        return float(((g - t).abs().amax(dim=-1) / allowed).nan_to_num(0.0, 0.0, 0.0).max())

    def allowed(self, baseline: Tensor, truth: Tensor, dtype: torch.dtype) -> Tensor:
        """Largest error of each row [rows], of kinds "twice" and "ulps"; both float64 [rows, n]."""
        import torch

        step = torch.finfo(dtype).eps * truth.abs().amax(dim=-1)
        if self.kind == "ulps":
            return self.amount * step
        factor, steps = self._granted(dtype)
        return factor * (baseline - truth).abs().amax(dim=-1) + steps * step

    def _granted(self, dtype: torch.dtype) -> tuple[float, float]:
        """Times the baseline's error, and rounding steps, that kind "twice" grants.

        Sums are float32. Where storage is no narrower than that, the baseline's error is a few
        roundings, lucky ones perhaps, and another order of summation multiplies it.
        """
        if dtype.itemsize < 4:
            return self.amount, 1.0
        return max(5, self.amount) * self.spread, 4 * self.spread


# The sums that are quantised differ by a unit of a bfloat16, and every 16th of its borders is one
# between 8-bit codes.
CODES_APART = 1 / 16


def _codes_apart(got: Tensor, baseline: Tensor) -> str | None:
    """None if 8-bit floats are the baseline's, but for a few that are its neighbours."""
    import torch

    g, b = got.double(), baseline.double()
    differing = (g != b) & ~(g.isnan() & b.isnan())
    count, allowed = int(differing.sum()), max(1, int(CODES_APART * got.numel()))
    if count > allowed:
        return f"{count} of {got.numel()} codes differ, {allowed} may"
    limits = torch.finfo(got.dtype)
    step = (limits.eps * b.abs()).clamp_min(limits.smallest_normal * limits.eps)
    # A NaN compares as no neighbour.
    far = differing & ~((g - b).abs() <= step)
    return f"{int(far.sum())} codes are not neighbours of the contract's" if far.any() else None


def exact() -> Tolerance:
    """Every value equal: integers, copies, which slots are written."""
    return Tolerance("exact", 0, "the op copies or counts; there is nothing to round")


def ulps(count: float, why: str) -> Tolerance:
    """Within `count` units in the last place of the output dtype, at the row's largest value."""
    return Tolerance("ulps", count, why)


def within_twice_baseline(approximates: str = "") -> Tolerance:
    """No worse than twice what the same maths costs in the serving dtype, plus a rounding step.

    The step covers rows in which the baseline happens to be exact: another summation order may
    still move the stored value to its neighbour. `approximates` names a function that accelerators
    approximate to two units in float32, which doubles what that dtype is granted.
    """
    wide = (
        f"ten times and eight steps, for {approximates}"
        if approximates
        else ("five times and four steps")
    )
    return Tolerance(
        "twice",
        2,
        "twice the reference's own error in this dtype and a rounding step; in float32, where that "
        f"error is a few roundings that another order multiplies, {wide}; in "
        "8-bit floats the reference's codes, of which one in sixteen may be its neighbour",
        2 if approximates else 1,
    )


def snr(decibels: float) -> Tolerance:
    """Signal-to-noise floor, for products whose activations are quantised to a few bits."""
    return Tolerance("snr", decibels, f"{decibels} dB: quantised activations round differently")
