"""Keys and values in 8 bits: what is written, in which layouts it is read, what is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor

from inkling_portable.agreement import convert, disagreements
from inkling_portable.backends.triton import qkvr_prep as prep
from inkling_portable.backends.triton import rel_attention as kernel
from inkling_portable.formats.codes import (
    E4M3_POSITIVE,
    E4M3FNUZ_POSITIVE,
    decode_e4m3,
    upper_bounds,
)
from inkling_portable.registry import contract
from tests.anywhere.test_triton_attention import case
from tests.quick_interpreter import install

install()
OP = contract("rel_attention")
FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz


def written(values: Tensor, stored: torch.dtype, scale: float) -> Tensor:
    """The value cache after a step with `values` [T, 64] float32, where convolution does nothing.

    Rows have one head of each kind, and every row has its own slot.
    """
    rows, width, device = values.shape[0], values.shape[1], values.device
    qkvr = torch.zeros(rows, 3 * width + 8, device=device)
    qkvr[:, 2 * width : 3 * width] = values
    none = torch.zeros(width, 4, device=device)
    gain, state = torch.ones(width, device=device), torch.zeros(1, 4, 1, width, device=device)
    slots = torch.arange(rows, device=device)
    caches = [torch.zeros(-(-rows // 16), 16, 1, width, device=device).to(stored) for _ in "kv"]
    prep.qkvr_prep(
        qkvr, none, none, gain, gain, torch.zeros(8, 16, device=device), 1e-6, 0.0, 0.1, state,
        state.clone(), torch.full_like(slots, -1), torch.full((rows, 3), -1, device=device),
        *caches, slots, slots, 1.0, scale,
    )  # fmt: skip
    return caches[1].view(torch.uint8).view(-1, width)[:rows]


def hard_values(count: int, positive: tuple[float, ...]) -> Tensor:
    """Every border between codes and its neighbours, beyond the range, and random values."""
    borders = upper_bounds(positive, torch.float32, torch.device("cpu"))
    near = torch.cat([borders, *(borders.nextafter(torch.tensor(x)) for x in (0.0, 1e9))])
    fixed = torch.cat([near, torch.tensor(positive), torch.tensor([1e-30, 1e30, 448.1, 464, 500])])
    generator = torch.Generator().manual_seed(3)
    random = torch.randn(count, generator=generator) * torch.randn(count, generator=generator).exp()
    values = torch.cat([fixed, -fixed, random * 20, torch.tensor([float("nan")])])
    return values[: values.numel() // 64 * 64].view(-1, 64)


def wrongly_rounded(stored: torch.dtype, count: int, device: str) -> int:
    """How many values the kernel stores as another code than nearest, ties to even, saturated."""
    values = hard_values(count, E4M3FNUZ_POSITIVE if stored == FNUZ else E4M3_POSITIVE)
    most = torch.finfo(stored).max
    want = decode_e4m3(values.clamp(-most, most).to(stored), fnuz=stored == FNUZ)
    got = decode_e4m3(written(values.to(device), stored, 1.0).cpu().view(stored),
                      fnuz=stored == FNUZ)  # fmt: skip
    return int(((got != want) & ~(got.isnan() & want.isnan())).sum())


@pytest.mark.parametrize("stored", [FN, FNUZ])
def test_stored_numbers_are_the_nearest(stored: torch.dtype) -> None:
    assert wrongly_rounded(stored, 1 << 14, "cpu") == 0


@pytest.mark.parametrize("stored", [FN, FNUZ])
def test_every_code_is_read_as_its_number(stored: torch.dtype) -> None:
    """One key is all a row sees, so its value, times the scale, is the result."""
    codes = torch.arange(256, dtype=torch.uint8)
    call = case([1] * 16, [0] * 16, heads=1, padding=0)
    values = codes.view(16, 16).view(stored)
    for name in ("k_cache", "v_cache"):
        call[name] = torch.zeros(call[name].shape).to(stored)
    call["v_cache"][call["pages"][:, 0].long(), 0, 0] = values
    kernel.rel_attention(**call, k_scale=1.0, v_scale=0.5)
    want = (values.float() * 0.5).bfloat16()
    # A NaN beside other numbers of its row does not change them.
    assert torch.equal(call["out"][:, 0].nan_to_num(7e7), want.nan_to_num(7e7))


def eight_bit(call: dict[str, Any], stored: torch.dtype) -> dict[str, Any]:
    """The call with its caches, NaN of unused rows included, in 8 bits."""
    caches = {name: convert(call[name], stored) for name in ("k_cache", "v_cache")}
    return {**call, **caches, "k_scale": 0.3, "v_scale": 1.7}


@pytest.mark.parametrize("page", [16, 64, 128])
@pytest.mark.parametrize("heads", [1, 4, 8, 16])
def test_agrees_for_every_group_and_page(heads: int, page: int) -> None:
    """Decoding over several programs beside a chunk; all that no request owns is NaN."""
    window = 40 if (heads + page // 64) % 2 else 0
    call = case([1, 9, 11], [400, 30, 5], heads=heads, page=page, extent=40, window=window)
    stored = FNUZ if heads == 4 else FN
    assert not disagreements(OP, kernel.rel_attention, eight_bit(call, stored))


@pytest.mark.parametrize("change", [
    {"v_cache": torch.bfloat16}, {"k_cache": torch.float8_e5m2, "v_cache": torch.float8_e5m2},
])  # fmt: skip
def test_other_types_are_refused(change: dict[str, torch.dtype]) -> None:
    call = eight_bit(case([3], [10]), FN)
    wrong = {name: call[name].to(stored) for name, stored in change.items()}
    with pytest.raises(ValueError, match=r"^._cache needs the type of q"):
        kernel.rel_attention(**{**call, **wrong})


def test_scales_of_wide_caches_are_refused() -> None:
    with pytest.raises(ValueError, match=r"scales need 8-bit caches; found 1 and 0.5"):
        written(torch.zeros(4, 64), torch.float32, 0.5)
