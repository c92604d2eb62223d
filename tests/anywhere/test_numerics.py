"""The tolerances refuse what they should: shifted rows, small drifts, wrong dtypes, lost values."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from inkling_portable.inputs import SeededDraw, fill
from inkling_portable.numerics import exact, snr, ulps, within_twice_baseline


def sample(dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A baseline and its truth: rows of values rounded once to `dtype`."""
    truth = torch.randn(16, 64, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return truth.to(dtype), truth


@given(seed=st.integers(0, 100), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_the_baseline_itself_passes_and_a_displaced_row_does_not(
    seed: int, dtype: torch.dtype
) -> None:
    baseline, truth = sample(dtype, seed)
    for tolerance in (within_twice_baseline(), ulps(1, "test")):
        assert tolerance.check(baseline, baseline, truth) is None
        moved = baseline.clone()
        moved[5] = moved[5].roll(1)
        assert "row 5" in str(tolerance.check(moved, baseline, truth))


def test_twice_the_baseline_is_the_line() -> None:
    baseline, truth = sample(torch.bfloat16)
    step = torch.finfo(torch.bfloat16).eps * truth.abs().amax(-1, keepdim=True)
    near = (truth + 0.9 * step).to(torch.bfloat16)
    far = (truth + 3.5 * step).to(torch.bfloat16)
    assert ulps(2, "test").check(near, baseline, truth) is None
    assert within_twice_baseline().check(far, baseline, truth) is not None


def test_a_small_bias_everywhere_is_caught_by_the_mean() -> None:
    baseline, truth = sample(torch.float32)
    step = torch.finfo(torch.float32).eps * truth.abs().amax(-1, keepdim=True)
    drift = (truth + 0.95 * step).float()
    assert "mean error" in str(within_twice_baseline().check(drift, baseline, truth))


def test_lost_values_shapes_and_dtypes() -> None:
    baseline, truth = sample(torch.float32)
    holed = baseline.clone()
    holed[0, 0] = float("nan")
    check = within_twice_baseline().check
    assert "not finite" in str(check(holed, baseline, truth))
    assert "dtype" in str(check(baseline.bfloat16(), baseline, truth))
    assert "shape" in str(check(baseline[:3], baseline, truth))
    assert exact().check(holed, baseline, truth) == "1 of 1024 values differ, none may"
    assert exact().check(holed, holed, truth) is None
    assert check(baseline[:0], baseline[:0], truth[:0]) is None


def test_rows_poisoned_in_the_contract_bind_nobody() -> None:
    baseline, truth = sample(torch.float32)
    truth[3] = float("nan")
    wild = baseline.clone()
    wild[3] = 1e9
    assert within_twice_baseline().check(wild, baseline, truth) is None


def test_snr_floor() -> None:
    baseline, truth = sample(torch.float32)
    assert snr(20).check((truth * 1.05).float(), baseline, truth) is None
    assert "below 30" in str(snr(30).check((truth * 1.05).float(), baseline, truth))


def test_fill_kinds_are_what_they_say() -> None:
    grid = fill((1000,), torch.bfloat16, "grid", 1)
    assert torch.equal(grid * 4, (grid * 4).round()) and grid.abs().max() <= 2
    assert 0.5 < fill((1000,), torch.float32, "gain", 1).mean() < 1.5
    assert torch.equal(fill((4,), torch.float32, "normal", 9), SeededDrawTwin(9).tensor())


class SeededDrawTwin:
    """The bytes depend on the seed alone."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def tensor(self) -> torch.Tensor:
        return torch.randn(4, generator=torch.Generator().manual_seed(self.seed))


def test_seeded_draw_covers_its_ranges() -> None:
    draw = SeededDraw(0)
    assert {draw.integer(1, 3) for _ in range(50)} == {1, 2, 3}
    assert {draw.choice("ab") for _ in range(50)} == {"a", "b"}


def test_an_approximated_function_doubles_what_float32_is_granted():
    """And nothing else: bfloat16 keeps twice the baseline's error and one step."""
    # Exact in both dtypes; one value of many is moved, for the mean has a bound too.
    truth = (torch.arange(9, 17, dtype=torch.float64) / 8).repeat(64, 1)
    plain = within_twice_baseline()
    wide = within_twice_baseline(approximates="a function")
    for dtype, steps in ((torch.float32, 6), (torch.bfloat16, 2)):
        moved = truth.to(dtype)
        moved[3, 0] += steps * torch.finfo(dtype).eps * 2
        assert plain.check(moved, truth.to(dtype), truth) is not None
        assert (wide.check(moved, truth.to(dtype), truth) is None) == (dtype == torch.float32)
