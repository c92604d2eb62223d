"""Number formats against torch's own dtypes, compressed-tensors, torchao and the spec's vectors.

torchao's answers are recorded in tests/facts/torchao_formats.json (ci/record_torchao.py).
"""

import json
import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.mx_utils import decompress_mx_scale
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize as ct_dequantize
from compressed_tensors.quantization.lifecycle.forward import quantize as ct_quantize
from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from inkling_portable import formats as f

FACTS = json.loads((Path(__file__).parents[1] / "facts" / "torchao_formats.json").read_text())
BYTES = torch.arange(256, dtype=torch.uint8)
SPEC_BYTES = torch.tensor([[0x5A, 0x10, 0xF7, 0x3C]], dtype=torch.uint8)
TIES = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}
FLOATS = (torch.float64, torch.float32, torch.bfloat16)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64).to(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal values and signs (minus zero is not zero); NaN equals NaN."""
    number = ~a.isnan()
    return (
        torch.equal(number, ~b.isnan())
        and torch.equal(a[number].double(), b[number].double())
        and torch.equal(a[number].signbit(), b[number].signbit())
    )


def from_hex(text: str, dtype: torch.dtype, columns: int) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=dtype).reshape(-1, columns)


# Codes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_8_bit_code_decodes_as_in_torch(dtype: torch.dtype) -> None:
    e4m3 = BYTES.view(torch.float8_e4m3fn).to(dtype)
    fnuz = BYTES.view(torch.float8_e4m3fnuz).to(dtype)
    e8m0 = BYTES.view(torch.float8_e8m0fnu).to(dtype)
    assert same(f.decode_e4m3(BYTES, dtype), e4m3)
    assert same(f.decode_e4m3(BYTES, dtype, fnuz=True), fnuz)
    assert same(f.decode_e8m0(BYTES, dtype), e8m0)
    assert same(f.decode_e4m3(BYTES.view(torch.float8_e4m3fn), dtype), e4m3)


def test_every_e2m1_code_decodes_as_in_compressed_tensors() -> None:
    theirs = unpack_fp4_from_uint8(BYTES[:, None], 256, 2, dtype=torch.float32)
    assert same(f.decode_e2m1(f.unpack_e2m1(BYTES[:, None])), theirs)
    assert f.E2M1_VALUES[:8] == (0, 0.5, 1, 1.5, 2, 3, 4, 6)
    assert math.copysign(1, f.E2M1_VALUES[8]) == -1


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_code_encodes_to_itself(dtype: torch.dtype) -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(f.encode_e2m1(f.decode_e2m1(codes, dtype)), codes)
    for fnuz in (False, True):
        values = f.decode_e4m3(BYTES, dtype, fnuz=fnuz)
        number = ~values.isnan()
        assert torch.equal(f.encode_e4m3(values, fnuz=fnuz).view(torch.uint8)[number],
                           BYTES[number])  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS)
def test_e2m1_midpoints_round_to_the_even_code_with_either_sign(dtype: torch.dtype) -> None:
    ties = torch.tensor(list(TIES), dtype=dtype)
    want = torch.tensor(list(TIES.values()), dtype=dtype)
    assert torch.equal(f.decode_e2m1(f.encode_e2m1(ties), dtype), want)
    assert same(f.decode_e2m1(f.encode_e2m1(-ties), dtype), -want)
    above = torch.nextafter(ties, torch.full_like(ties, 9))
    below = torch.nextafter(ties, torch.zeros_like(ties))
    assert (f.encode_e2m1(above) - f.encode_e2m1(below) == 1).all()


def nearest_even(x: float, positive: tuple[float, ...]) -> int:
    """The code by definition, in exact arithmetic: least distance, then even."""
    size = min(abs(Fraction(x)), Fraction(positive[-1]))
    return min(range(len(positive)), key=lambda c: (abs(Fraction(positive[c]) - size), c % 2))


@given(st.lists(st.floats(-9, 9, allow_subnormal=True), min_size=1, max_size=20))
def test_e2m1_is_the_nearest_value_by_definition(numbers: list[float]) -> None:
    want = [nearest_even(x, f.E2M1_VALUES[:8]) + 8 * (math.copysign(1, x) < 0) for x in numbers]
    assert f.encode_e2m1(torch.tensor(numbers, dtype=torch.float64)).tolist() == want


@given(st.lists(st.floats(-500, 500), min_size=1, max_size=20))
def test_e4m3_is_the_nearest_value_by_definition(numbers: list[float]) -> None:
    x = torch.tensor(numbers, dtype=torch.float64)
    for fnuz, positive in ((False, f.E4M3_VALUES[:127]), (True, f.E4M3FNUZ_VALUES[:128])):
        got = f.encode_e4m3(x, fnuz=fnuz).view(torch.uint8)
        want = [nearest_even(v, positive) for v in numbers]
        sign = [128 * (math.copysign(1, v) < 0 and (w > 0 or not fnuz))
                for v, w in zip(numbers, want, strict=True)]  # fmt: skip
        assert got.tolist() == [w + s for w, s in zip(want, sign, strict=True)]


def test_e4m3_agrees_with_torchs_cast() -> None:
    every_bf16 = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    grid = f.decode_e4m3(BYTES).nan_to_num()
    middle = (grid[:126] + grid[1:127]) / 2
    x = torch.cat((
        every_bf16.view(torch.bfloat16).float().nan_to_num(0, 0, 0),
        torch.nextafter(middle, middle * 2), middle, torch.nextafter(middle, middle * 0),
        torch.tensor([400.1996, 272.1566]),
        normal(2**18, seed=1) * 20,
    ))  # fmt: skip
    x = x[x.abs() <= 448]
    assert same(f.encode_e4m3(x).float(), x.to(torch.float8_e4m3fn).float())
    assert f.encode_e4m3(torch.tensor([400.1996, 272.1566])).float().tolist() == [416, 288]
    assert f.encode_e4m3(torch.tensor([464.0, 1e9, math.inf])).float().tolist() == [448] * 3
    assert f.encode_e4m3(torch.tensor(math.nan)).float().isnan()


def test_fp64_is_rounded_once() -> None:
    # Through fp32 this would become the tie 1.0625 and then 1.
    assert f.encode_e4m3(torch.tensor(1.0625 + 1e-9, dtype=torch.float64)).float() == 1.125
    assert f.encode_e2m1(torch.tensor(0.25 + 1e-12, dtype=torch.float64)) == 1


def test_packing_puts_the_even_column_in_the_low_nibble() -> None:
    codes = torch.arange(16, dtype=torch.uint8)[None]
    packed = f.pack_e2m1(codes)
    assert bytes(packed[0].tolist()).hex() == "1032547698badcfe" == FACTS["pack"]["bytes"]
    values = f.decode_e2m1(codes)
    assert torch.equal(pack_fp4_to_uint8(values), packed)
    assert torch.equal(f.pack_e2m1(f.unpack_e2m1(BYTES.view(4, 64))), BYTES.view(4, 64))


# Worked vectors of the specification -------------------------------------------------------------


def test_nvfp4_vector_of_the_specification() -> None:
    want = [-0.09375, 0.28125, 0, 0.046875, 0.5625, -0.5625, -0.1875, 0.140625]
    packed = torch.cat((SPEC_BYTES, torch.zeros_like(SPEC_BYTES)), -1)
    scale = torch.tensor([[0x6C]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    multiplied = f.dequantize_nvfp4(packed, scale, torch.tensor(1 / 1024))
    divided = f.dequantize_nvfp4(packed, scale, torch.tensor([1024.0]), reciprocal=True)
    assert multiplied[0, :8].tolist() == want == divided[0, :8].tolist()
    block = torch.zeros(1, 16)
    block[0, 3] = 0.3
    _, scale, _ = f.quantize_nvfp4(block, torch.tensor(1 / 1024))
    assert scale.view(torch.uint8).tolist() == [[0x65]] and scale.float().item() == 52


def test_mxfp4_vector_of_the_specification_and_flattened_scales() -> None:
    want = [-0.03125, 0.09375, 0, 0.015625, 0.1875, -0.1875, -0.0625, 0.046875]
    packed = torch.cat((SPEC_BYTES, *[torch.zeros_like(SPEC_BYTES)] * 3), -1)
    got = f.dequantize_mxfp4(packed, torch.tensor([[0x7A]], dtype=torch.uint8))
    assert got[0, :8].tolist() == want
    w = normal(3, 4, 64)
    packed, scale = f.quantize_mxfp4(w)
    assert torch.equal(f.dequantize_mxfp4(packed, scale.reshape(12, 2)),
                       f.dequantize_mxfp4(packed, scale))  # fmt: skip
    by_expert = [f.dequantize_mxfp4(packed[e], scale.reshape(12, 2)[4 * e : 4 * e + 4])
                 for e in range(3)]  # fmt: skip
    assert torch.equal(torch.stack(by_expert), f.dequantize_mxfp4(packed, scale))


def test_fp8_vector_of_the_specification() -> None:
    codes = torch.tensor([[0x38, 0xC4, 0x7E, 0x01]], dtype=torch.uint8)
    assert f.decode_e4m3(codes).tolist() == [[1, -3, 448, 2**-9]]
    got = f.dequantize_fp8(codes, torch.tensor([[0.015625]]))
    assert got.tolist() == [[0.015625, -0.046875, 7, 2**-15]]


# compressed-tensors and torchao ------------------------------------------------------------------

NVFP4_ARGS = QuantizationArgs(
    num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True
)


@pytest.mark.parametrize("reciprocal_global", [1.0, 1024.0, 733.0])
def test_nvfp4_agrees_with_compressed_tensors(reciprocal_global: float) -> None:
    w = normal(24, 64, seed=2)
    divisor = torch.tensor([reciprocal_global])
    packed, scale, _ = f.quantize_nvfp4(w, 1 / divisor)
    with torch.compiler.set_stance("force_eager"):
        theirs = ct_quantize(
            w, scale.float(), torch.zeros_like(scale).float(), NVFP4_ARGS, global_scale=divisor
        )
    assert torch.equal(packed, pack_fp4_to_uint8(theirs))
    values = f.decode_e2m1(f.unpack_e2m1(packed))
    want = ct_dequantize(values, scale.float(), args=NVFP4_ARGS, global_scale=divisor)
    got = f.dequantize_nvfp4(packed, scale, divisor, reciprocal=True)
    # They divide the scale first: two roundings of fp32 against our one.
    torch.testing.assert_close(got, want, rtol=2 * 2**-24, atol=0)


def test_mxfp4_scales_agree_with_compressed_tensors() -> None:
    w = normal(64, 64, seed=3) * torch.logspace(-9, 9, 64)[:, None]
    codes = f.quantize_mxfp4(w)[1]
    theirs = generate_mx_scales(w.unflatten(-1, (-1, 32)).abs().amax(-1))
    assert torch.equal(codes.float(), theirs)
    assert torch.equal(f.decode_e8m0(codes), decompress_mx_scale(codes).float())


def test_e2m1_codes_agree_with_torchao() -> None:
    x = from_hex(FACTS["e2m1"]["x_fp32"], torch.float32, 1)
    assert torch.equal(f.encode_e2m1(x), from_hex(FACTS["e2m1"]["codes"], torch.uint8, 1))


@pytest.mark.parametrize("rule", f.MX_SCALE_RULES)
def test_mxfp4_agrees_with_torchao(rule: str) -> None:
    facts = FACTS["mxfp4"]
    x = from_hex(facts["x_fp32"], torch.float32, facts["columns"])
    packed, scale = f.quantize_mxfp4(x, rule)
    assert torch.equal(scale, from_hex(facts[rule]["scale"], torch.uint8, scale.shape[1]))
    assert torch.equal(packed, from_hex(facts[rule]["packed"], torch.uint8, packed.shape[1]))


@pytest.mark.parametrize("exponent", [0, -4, 3])
def test_nvfp4_agrees_with_torchao(exponent: int) -> None:
    facts = FACTS["nvfp4"]
    x = from_hex(facts["x_fp32"], torch.float32, facts["columns"])
    want = facts[str(exponent)]
    theirs = from_hex(want["scale"], torch.uint8, x.shape[1] // 16)
    packed, scale, _ = f.quantize_nvfp4(x, torch.tensor(2.0**exponent))
    # torchao keeps block scales normal (code 8 is its least); ours go down to code 1.
    normal_scale = theirs > 8
    assert normal_scale.sum() >= 8
    assert torch.equal(scale.view(torch.uint8)[normal_scale], theirs[normal_scale])
    assert (scale.view(torch.uint8)[~normal_scale] <= 8).all()
    codes = f.unpack_e2m1(packed).unflatten(-1, (-1, 16))[normal_scale]
    their_packed = from_hex(want["packed"], torch.uint8, packed.shape[1])
    their_codes = f.unpack_e2m1(their_packed).unflatten(-1, (-1, 16))[normal_scale]
    # torchao multiplies by a rounded reciprocal, so it may miss an exact tie; nothing else differs.
    block_scale = scale.double()[normal_scale][:, None] * 2.0**exponent
    exact = (x.double().unflatten(-1, (-1, 16))[normal_scale] / block_scale).abs()
    tie = torch.isin(exact, torch.tensor(list(TIES), dtype=torch.float64))
    assert torch.equal(codes[~tie], their_codes[~tie])


# Laws --------------------------------------------------------------------------------------------


def exact_nvfp4(seed: int, experts: int, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random codes on which quantising is exact: a 6 in each block, a power-of-two global scale."""
    g = generator(seed)
    codes = torch.randint(0, 16, (experts, rows, columns), generator=g, dtype=torch.uint8)
    codes[..., ::16] = 7
    scale = torch.randint(8, 127, (experts, rows, columns // 16), generator=g, dtype=torch.uint8)
    scale[..., 0, 0] = 126
    powers = torch.randint(-12, 4, (experts,), generator=g)
    return f.pack_e2m1(codes), scale.view(torch.float8_e4m3fn), 2.0 ** powers.float()


@given(st.integers(0, 2**31))
def test_nvfp4_round_trip_is_exact_on_its_grid(seed: int) -> None:
    packed, scale, factor = exact_nvfp4(seed, 3, 4, 64)
    for dtype in (torch.float64, torch.float32):
        w = f.dequantize_nvfp4(packed, scale, factor, dtype)
        again = f.quantize_nvfp4(w)
        assert torch.equal(again[0], packed)
        assert torch.equal(again[1].view(torch.uint8), scale.view(torch.uint8))
        assert torch.equal(again[2], factor)


@given(st.integers(0, 2**31), st.sampled_from(f.MX_SCALE_RULES))
def test_mxfp4_values_survive_requantising(seed: int, rule: str) -> None:
    g = generator(seed)
    packed = torch.randint(0, 256, (2, 3, 32), generator=g, dtype=torch.uint8)
    scale = torch.randint(60, 190, (2, 3, 2), generator=g, dtype=torch.uint8)
    w = f.dequantize_mxfp4(packed, scale)
    assert same(f.dequantize_mxfp4(*f.quantize_mxfp4(w, rule)), w)


@given(st.integers(0, 2**31), st.integers(-20, 20))
def test_powers_of_two_move_only_the_scales(seed: int, power: int) -> None:
    w = normal(4, 64, seed=seed)
    packed, scale = f.quantize_mxfp4(w)
    moved_packed, moved_scale = f.quantize_mxfp4(w * 2.0**power)
    assert torch.equal(moved_packed, packed)
    assert torch.equal(moved_scale.int() - scale.int(), torch.full(scale.shape, power))
    first = f.quantize_nvfp4(w)
    moved = f.quantize_nvfp4(w * 2.0**power)
    assert torch.equal(moved[0], first[0])
    assert torch.equal(moved[2], first[2] * 2.0**power)


@given(st.integers(0, 2**31))
def test_negating_flips_signs_only(seed: int) -> None:
    w = normal(4, 64, seed=seed)
    w[0, :5] = 0
    for plus, minus in (
        (f.quantize_nvfp4(w)[0], f.quantize_nvfp4(-w)[0]),
        (f.quantize_mxfp4(w)[0], f.quantize_mxfp4(-w)[0]),
    ):
        assert torch.equal(plus ^ 0x88, minus)


@given(st.integers(0, 2**31))
def test_quantising_is_done_row_by_row(seed: int) -> None:
    w = normal(6, 64, seed=seed)
    order = torch.randperm(6, generator=generator(seed))
    for quantised in (f.quantize_mxfp4, f.quantize_fp8_channel, f.quantize_nvfp4):
        whole, part = quantised(w), quantised(w[order])
        assert torch.equal(whole[0].view(torch.uint8)[order], part[0].view(torch.uint8))
        assert torch.equal(whole[1].view(torch.uint8)[order], part[1].view(torch.uint8))


@pytest.mark.parametrize(
    ("round_trip", "worst_step"),
    [
        # Half the widest gap below 6 is 1 of 6; a scale rounded down by 1/16 cuts 6.4 to 6.
        (lambda w: f.dequantize_nvfp4(*f.quantize_nvfp4(w)), 1 / 6 * (1 + 1 / 16)),
        (lambda w: f.dequantize_mxfp4(*f.quantize_mxfp4(w)), 1 / 4),
        (lambda w: f.dequantize_mxfp4(*f.quantize_mxfp4(w, "ceil")), 1 / 3),
        (lambda w: f.dequantize_fp8(*f.quantize_fp8_channel(w)), 16 / 448 * (1 + 2**-20)),
    ],
)
def test_error_stays_within_half_a_step_of_the_largest(
    round_trip: Callable[[Tensor], Tensor], worst_step: float
) -> None:
    w = normal(64, 256, seed=5)
    span = 16 if worst_step < 0.2 else 32
    span = 256 if worst_step < 0.1 else span
    amax = w.unflatten(-1, (-1, span)).abs().amax(-1).repeat_interleave(span, -1)
    error = (round_trip(w) - w).abs()
    assert (error <= amax * worst_step).all()
    # Random numbers come near the bound, so a looser quantiser would not pass unseen.
    assert (error / amax).max() > worst_step / 2


# FP8 ---------------------------------------------------------------------------------------------


def test_fnuz_conversion_keeps_every_value() -> None:
    codes = BYTES[(BYTES & 127) != 127].view(torch.float8_e4m3fn)[None]
    scale = torch.tensor([[0.0371]])
    moved, doubled = f.fp8_to_fnuz(codes, scale)
    assert moved.dtype == torch.float8_e4m3fnuz
    want = codes.float() * scale
    assert torch.equal(moved.float() * doubled, want)
    assert torch.equal(f.dequantize_fp8(moved, doubled), want)


def test_fp8_tiles_cover_ragged_edges() -> None:
    codes = f.encode_e4m3(normal(2, 5, 7, seed=6) * 50)
    scale = torch.arange(1, 2 * 3 * 3 + 1).reshape(2, 3, 3) / 8
    got = f.dequantize_fp8(codes, scale, block=(2, 3))
    for e in range(2):
        for r in range(5):
            for c in range(7):
                assert got[e, r, c] == codes[e, r, c].float() * scale[e, r // 2, c // 3]


@pytest.mark.parametrize("dtype", FLOATS)
def test_zero_weights_stay_zero_and_dtype_is_kept(dtype: torch.dtype) -> None:
    w = torch.zeros(2, 3, 32, dtype=dtype)
    for back in (
        f.dequantize_nvfp4(*f.quantize_nvfp4(w), dtype),
        f.dequantize_mxfp4(*f.quantize_mxfp4(w), dtype),
        f.dequantize_fp8(*f.quantize_fp8_channel(w), dtype),
    ):
        assert back.dtype == dtype and torch.equal(back, w)


# Global scales of two halves ---------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("reciprocal", [True, False])
def test_halves_are_unified_within_one_step_of_the_block_scale(
    interleaved: bool, reciprocal: bool
) -> None:
    packed, scale, _ = exact_nvfp4(7, 3, 4, 64)
    halves = torch.tensor([[1e-4, 2e-4], [3e-4, 3e-4], [5e-3, 5e-4]])
    halves = 1 / halves if reciprocal else halves
    rows = f.row_global_scale(halves, 4, interleaved=interleaved)
    assert rows[0].tolist() == halves[0, [0, 1, 0, 1] if interleaved else [0, 0, 1, 1]].tolist()
    before = f.dequantize_nvfp4(packed, scale, rows, reciprocal=reciprocal)
    unified, merged, changed = f.unify_global_scales(
        scale, halves, interleaved=interleaved, reciprocal=reciprocal
    )
    assert changed == 2 and merged.shape == (3,)
    after = f.dequantize_nvfp4(packed, unified, merged, reciprocal=reciprocal)
    multiplier = (1 / merged if reciprocal else merged)[:, None, None]
    # Half a step of E4M3: 1/16 of the scale, or half of the subnormal step.
    step = torch.maximum(scale.float() / 16, torch.tensor(2.0**-10))
    allowed = (step * multiplier).repeat_interleave(16, -1) * 6
    assert ((after - before).abs() <= allowed).all()
    assert torch.equal(unified[1].view(torch.uint8), scale[1].view(torch.uint8))


# Activations -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_activations_equal_quantised_weights(dtype: torch.dtype) -> None:
    x = normal(5, 64, seed=8, dtype=dtype) * 3
    one = torch.ones(())
    work = torch.float64 if dtype == torch.float64 else torch.float32
    assert f.fake_quantize(x, "bf16") is x
    for act, back in (
        ("nvfp4", f.dequantize_nvfp4(*f.quantize_nvfp4(x, one), work)),
        ("mxfp4", f.dequantize_mxfp4(*f.quantize_mxfp4(x), work)),
    ):
        got = f.fake_quantize(x, act)
        assert got.dtype == dtype and torch.equal(got, back.to(dtype))
    calibrated = torch.tensor(0.01)
    want = f.dequantize_nvfp4(*f.quantize_nvfp4(x, calibrated), work).to(dtype)
    assert torch.equal(f.fake_quantize(x, "nvfp4", calibrated), want)
    want = f.dequantize_fp8(*f.quantize_fp8_channel(x), work)
    # The stored scale of a weight is fp32 even where the arithmetic is fp64.
    torch.testing.assert_close(
        f.fake_quantize(x, "fp8"), want.to(dtype), rtol=2**-23, atol=0 if work != dtype else 1e-7
    )


@pytest.mark.parametrize("act", ["fp8", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_poisoned_row_spoils_only_itself(act: str, poison: float) -> None:
    x = normal(4, 64, seed=9)
    clean = f.fake_quantize(x, act)
    x[2, 40] = poison
    got = f.fake_quantize(x, act)
    assert torch.equal(got[[0, 1, 3]], clean[[0, 1, 3]])
    assert not got[2, 40].isfinite()
    assert f.fake_quantize(x[:0], act).shape == (0, 64)


# Refusals ----------------------------------------------------------------------------------------

W4 = torch.zeros(2, 3, 32, dtype=torch.uint8)
S16 = torch.ones(2, 3, 4).to(torch.float8_e4m3fn)
S32 = torch.full((2, 3, 2), 127, dtype=torch.uint8)
G = torch.ones(2)
W8 = torch.ones(2, 3, 4).to(torch.float8_e4m3fn)


def replaced(x: Tensor, value: int) -> Tensor:
    codes = x.clone().view(torch.uint8)
    codes[1, 2, 1] = value
    return codes.view(x.dtype)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: f.dequantize_nvfp4(W4, S32, G), r"shape \[2, 3, 4\]; found \[2, 3, 2\]"),
        (lambda: f.dequantize_nvfp4(W4, S16[:, :2], G), r"shape \[2, 3, 4\]; found \[2, 2, 4\]"),
        (lambda: f.dequantize_nvfp4(W4, replaced(S16, 0x7F), G), "block scale is NaN"),
        (lambda: f.dequantize_nvfp4(W4, replaced(S16, 0xFF), G), "block scale is NaN"),
        (lambda: f.dequantize_nvfp4(W4, S16, G * 0), "found 0 to 0"),
        (lambda: f.dequantize_nvfp4(W4, S16, -G), "found -1 to -1"),
        (lambda: f.dequantize_nvfp4(W4, S16, G * math.inf), "positive and finite"),
        (lambda: f.dequantize_nvfp4(W4, S16, G * math.nan), "positive and finite"),
        (lambda: f.dequantize_nvfp4(W4, S16, torch.ones(2, 2)), "row_global_scale"),
        (lambda: f.dequantize_nvfp4(W4.int(), S16, G), "needs uint8; found torch.int32"),
        (lambda: f.dequantize_nvfp4(W4[..., :4], S16, G), "16 must divide .* found 8 columns"),
        (lambda: f.dequantize_nvfp4(W4, S16.float(), G), "found torch.float32"),
        (lambda: f.dequantize_mxfp4(W4, replaced(S32, 255)), "code 255"),
        (lambda: f.dequantize_mxfp4(W4, S16), r"shape \[2, 3, 2\]; found \[2, 3, 4\]"),
        (lambda: f.dequantize_mxfp4(W4[..., :8], S32), "32 must divide .* found 16 columns"),
        (lambda: f.dequantize_fp8(W8, torch.ones(2, 4, 1)), r"\[2, 3, 1\]; found \[2, 4, 1\]"),
        (lambda: f.dequantize_fp8(W8, torch.ones(2, 3, 1) * 0), "found 0 to 0"),
        (lambda: f.dequantize_fp8(replaced(W8, 0x7F), torch.ones(2, 3, 1)), "weight is NaN"),
        (lambda: f.dequantize_fp8(W8, torch.ones(2, 1, 1), block=(2, 2)), r"\[2, 2, 2\]"),
        (lambda: f.fp8_to_fnuz(replaced(W8, 0xFF), torch.ones(2, 3, 1)), "weight is NaN"),
        (lambda: f.quantize_nvfp4(torch.ones(2, 24)), "16 must divide .* found 24"),
        (lambda: f.quantize_mxfp4(torch.ones(2, 48)), "32 must divide .* found 48"),
        (lambda: f.quantize_mxfp4(torch.full((2, 32), math.nan)), "finite weights"),
        (lambda: f.quantize_nvfp4(torch.full((2, 32), math.inf)), "finite weights"),
        (lambda: f.quantize_nvfp4(torch.ones(2, 32), torch.zeros(())), "positive and finite"),
        (lambda: f.quantize_mxfp4(torch.ones(2, 32), "up"), "one of even, floor, ceil"),
        (lambda: f.quantize_mxfp4(torch.ones(2, 32).int()), "float tensor; found torch.int32"),
        (lambda: f.fake_quantize(torch.ones(2, 32), "int8"), "one of bf16, fp8, nvfp4, mxfp4"),
        (lambda: f.fake_quantize(torch.ones(2, 24), "nvfp4"), "16 must divide"),
        (lambda: f.encode_e2m1(torch.tensor(math.nan)), "E2M1 has no NaN"),
        (lambda: f.pack_e2m1(torch.zeros(2, 3)), "even number of columns; found 3"),
    ],
)
def test_bad_tensors_are_refused_with_a_sentence(call: Callable[[], object], says: str) -> None:
    with pytest.raises(ValueError, match=says) as refusal:
        call()
    assert "\n" not in str(refusal.value) and ". " not in str(refusal.value)


def test_refusals_name_the_tensor_and_can_be_switched_off() -> None:
    with pytest.raises(ValueError, match=r"^layer 3 w2: "):
        f.dequantize_mxfp4(W4, replaced(S32, 255), name="layer 3 w2")
    assert f.dequantize_mxfp4(W4, replaced(S32, 255), check=False)[1, 2, 32:].isnan().all()


def test_arranged_codes_are_where_kernels_look() -> None:
    """Every code at each of eight places: pairs (j, j + 4), values at bits 6-8, signs at 15."""
    codes = torch.randint(0, 16, (2000, 8), generator=generator(9), dtype=torch.uint8)
    for place in range(8):
        codes[16 * place : 16 * place + 16, place] = torch.arange(16)
    stored = f.pack_e2m1(codes).unsqueeze(0)  # leading dimensions, as experts are
    there = f.arranged(stored)
    assert there.shape == stored.shape and not torch.equal(there, stored)
    for name in ("nvfp4", "mxfp4"):
        assert f.as_stored(stored, name) == (stored, name)
        back, plain = f.as_stored(there, name + f.ARRANGED)
        assert torch.equal(back, stored) and plain == name
    for eight, word in zip(codes.tolist(), there.view(torch.int32).flatten().tolist(), strict=True):
        w = word % 2**32
        last = w << 4 & 0x81808180 | w >> 4 & 0x00400040
        for j, both in enumerate((w << 6, w, w >> 6 | w << 26, last)):
            for half, code in enumerate((eight[j], eight[j + 4])):
                bits = both >> 16 * half
                assert (bits >> 15 & 1) << 3 | bits >> 6 & 7 == code
    assert torch.equal(f.arranged(stored[:, ::2]), there[:, ::2])
    for odd in (stored[..., :3], stored.float()):
        with pytest.raises(ValueError, match="in whole fours of bytes; found"):
            f.arranged(odd)
