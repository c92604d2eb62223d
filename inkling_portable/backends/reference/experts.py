"""Contracts of the feed-forward part: gate_logits, route, swiglu, sink_experts, routed_experts."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, silu

from inkling_portable.backends.reference._common import acc, store
from inkling_portable.inputs import Draw
from inkling_portable.numerics import exact, ulps, within_twice_baseline
from inkling_portable.registry import op

DTYPES = (torch.float32, torch.bfloat16)


def _gate_inputs(draw: Draw) -> dict[str, Any]:
    dtype, rows, width = (
        draw.choice(DTYPES),
        draw.integer(0, 20),
        draw.choice((64, 96, 33, 1024, 6144)),
    )
    return {"x": draw.tensor((rows, width), dtype),
            "weight": draw.tensor((draw.choice((10, 258, 34)), width), dtype, "small")}  # fmt: skip


# Tensor cores add sixteen products at a time and cut what falls off: 384 cuts for 6144 products.
LOGITS = ulps(384, "up to 384 partial sums, each cut by at most one ulp in a tensor core")


@op(inputs=_gate_inputs, tolerance=LOGITS)
def gate_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Router logits kept in fp32 (spec 2.4): x [T, H], weight [E + S, H] -> [T, E + S] float32."""
    return acc(x) @ acc(weight).T


def _route_inputs(draw: Draw) -> dict[str, Any]:
    rows, experts, sinks = draw.integer(0, 9), draw.choice((8, 256, 40)), draw.choice((2, 1))
    logits = draw.tensor((rows, experts + sinks), torch.float32) * draw.choice((1.0, 4.0, 13.0))
    bias = draw.tensor((experts,), torch.float32) * draw.choice((0.1, 6.0))
    top_k = draw.choice((2, 6, 1))
    # Ids are compared exactly, so no two scores near the cut may lie within rounding of each other:
    # drop the rows in which float32 and float64 could disagree.
    scores = torch.sigmoid(logits[:, :experts].double()) + bias.double()
    best = scores.sort(dim=-1, descending=True).values[:, : top_k + 1]
    clear = (best[:, :-1] - best[:, 1:] > 1e-5).all(dim=-1)
    return {"logits": logits[clear], "bias": bias, "top_k": top_k,
            "global_scale": draw.tensor((1,), torch.float32, "gain"),
            "route_scale": draw.choice((8.0, 1.0))}  # fmt: skip


# A log-sigmoid between 32 and 64 is stored to 16 eps; its own, the sum's and the two functions'
# errors together stay below 64 eps in the exponent, which is the relative error of the weight.
WEIGHTS = ulps(64, "exponents up to 64 are stored to 16 eps, and four such errors meet in a weight")


@op(inputs=_route_inputs, tolerance=(WEIGHTS, exact(), WEIGHTS))
def route(
    logits: Tensor, bias: Tensor, global_scale: Tensor, top_k: int, route_scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose experts and weigh them together with the sinks (spec 2.4).

    logits [T, E + S], bias [E], global_scale [1], all float32 -> (weights [T, k] float32,
    ids [T, k] int32, sink weights [T, S] float32). The bias selects only; the weights come from the
    logits, through log-sigmoid, so that tiny sigmoids keep their ratios; all k + S weights of a
    row sum to route_scale * global_scale. Ties go to the lowest index.
    """
    experts = bias.shape[0]
    scores = torch.sigmoid(logits[:, :experts]) + bias
    ids = scores.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    logs = logsigmoid(logits)
    active = torch.cat([logs[:, :experts].gather(1, ids), logs[:, experts:]], dim=-1)
    weights = active.softmax(-1) * (route_scale * global_scale)
    return weights[:, :top_k].contiguous(), ids.int(), weights[:, top_k:].contiguous()


def _swiglu_inputs(draw: Draw) -> dict[str, Any]:
    dtype, rows, width = (
        draw.choice(DTYPES),
        draw.integer(0, 9),
        draw.choice((16, 64, 33, 384, 1024)),
    )
    weight = draw.tensor((rows,), torch.float32) if draw.choice((True, False)) else None
    return {
        "gate_up": draw.tensor((rows, 2 * width), dtype),
        "interleaved": draw.choice((True, False)),
        "weight": weight,
    }


@op(inputs=_swiglu_inputs, tolerance=within_twice_baseline())
def swiglu(gate_up: Tensor, interleaved: bool, weight: Tensor | None) -> Tensor:
    """silu(gate) * up, times a weight per row if given: gate_up [T, 2F], weight [T] -> [T, F].

    Gate and up columns alternate (interleaved), or the first half is the gate.
    """
    wide = acc(gate_up)
    gate, up = (wide[:, 0::2], wide[:, 1::2]) if interleaved else wide.chunk(2, dim=-1)
    product = silu(gate) * up
    if weight is not None:
        product = product * weight.to(product.dtype)[:, None]
    return store(product, gate_up)


def _sink_inputs(draw: Draw) -> dict[str, Any]:
    dtype, rows, width = draw.choice(DTYPES), draw.integer(0, 9), draw.choice((32, 64, 128))
    sinks, inner = draw.choice((2, 1)), draw.choice((16, 64, 24))
    return {"x": draw.tensor((rows, width), dtype),
            "w13": draw.tensor((sinks, 2 * inner, width), dtype, "small"),
            "w2": draw.tensor((sinks, width, inner), dtype, "small"),
            "gammas": draw.tensor((rows, sinks), torch.float32).abs()}  # fmt: skip


@op(inputs=_sink_inputs, tolerance=within_twice_baseline())
def sink_experts(x: Tensor, w13: Tensor, w2: Tensor, gammas: Tensor) -> Tensor:
    """The always-active shared experts (spec 2.4, steps 6 and 7).

    x [T, H]; w13 [S, 2I, H] with gate and up rows alternating; w2 [S, H, I]; gammas [T, S] float32
    -> [T, H]. gamma multiplies the intermediate; the sum over sinks is rounded once.
    """
    total = torch.zeros_like(acc(x))
    for s in range(w13.shape[0]):
        gate_up = store(acc(x) @ acc(w13[s]).T, x)
        total = total + acc(swiglu(gate_up, True, gammas[:, s])) @ acc(w2[s]).T
    return store(total, x)


def _gated_inputs(draw: Draw) -> dict[str, Any]:
    dtype, rows, width = draw.choice(DTYPES), draw.choice((1, 0, 3)), draw.choice((64, 32, 2080))
    experts, sinks, inner = (
        draw.choice((8, 256, 40)),
        draw.choice((2, 1)),
        draw.choice((16, 64, 24)),
    )
    x, gate = (
        draw.tensor((rows, width), dtype),
        draw.tensor((experts + sinks, width), dtype, "small"),
    )
    bias = draw.tensor((experts,), torch.float32) * draw.choice((0.1, 6.0))
    top_k = draw.choice((2, 6, 1))
    # As in `route`, but sums of another order must not decide either.
    scores = torch.sigmoid(x.double() @ gate[:experts].double().T) + bias.double()
    best = scores.sort(dim=-1, descending=True).values[:, : top_k + 1]
    clear = (best[:, :-1] - best[:, 1:] > 1e-4).all(dim=-1)
    return {"x": x[clear], "gate": gate, "bias": bias, "top_k": top_k,
            "global_scale": draw.tensor((1,), torch.float32, "gain"),
            "route_scale": draw.choice((8.0, 1.0)),
            "w13": draw.tensor((sinks, 2 * inner, width), dtype, "small"),
            "w2": draw.tensor((sinks, width, inner), dtype, "small")}  # fmt: skip


SHARES = ulps(
    12_352, "logits up to 16 are off by 384 eps of that; twice so far in a weight, then `route`"
)


@op(inputs=_gated_inputs, tolerance=(LOGITS, SHARES, exact(), within_twice_baseline()))
def gated_sinks(
    x: Tensor, gate: Tensor, bias: Tensor, global_scale: Tensor, top_k: int, route_scale: float,
    w13: Tensor, w2: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """gate_logits, route and sink_experts, whose arguments these are, of the same rows.

    -> (logits [T, E + S] float32, weights [T, k] float32, ids [T, k] int32, sinks [T, H]). For
    steps of few rows, whose launches cost more than their bytes.
    """
    logits = gate_logits(x, gate)
    weights, ids, gammas = route(logits, bias, global_scale, top_k, route_scale)
    return logits, weights, ids, sink_experts(x, w13, w2, gammas)


def _routed_inputs(draw: Draw) -> dict[str, Any]:
    dtype, form = draw.choice(DTYPES), draw.choice(("bf16", "nvfp4", "mxfp4", "fp8"))
    rows = draw.integer(0, draw.choice((3, 12, 40)))
    experts, top_k = draw.choice((4, 8, 11)), draw.choice((2, 1, 3))
    width, inner = draw.choice((32, 64, 160)), draw.choice((32, 96, 64))
    # Spread over all experts, or every token on the same few while the others get none.
    last = draw.choice((experts - 1, 0))
    firsts = [draw.integer(0, last) for _ in range(rows)]
    ids = [[(first + j) % experts for j in range(top_k)] for first in firsts]
    w13, w13_scale, w13_global = _stack(draw, form, dtype, experts, 2 * inner, width)
    w2, w2_scale, w2_global = _stack(draw, form, dtype, experts, width, inner)
    return {
        "x": draw.tensor((rows, width), dtype),
        "ids": torch.tensor(ids, dtype=torch.int32).reshape(rows, top_k),
        "weights": draw.tensor((rows, top_k), torch.float32).abs(),
        "w13": w13,
        "w2": w2,
        "w13_scale": w13_scale,
        "w2_scale": w2_scale,
        "w13_global": w13_global,
        "w2_global": w2_global,
        "format": form,
        "act": "bf16",
        "interleaved": draw.choice((True, False)),
    }


def _stack(draw: Draw, form: str, dtype: torch.dtype, experts: int, rows: int, columns: int
           ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """(codes, scale, global scale) of a stack of matrices: every code occurs, weights are small."""
    shape = (experts, rows)
    if form == "bf16":
        return draw.tensor((*shape, columns), dtype, "small"), None, None
    generator = torch.Generator().manual_seed(draw.integer(0, 2**31 - 1))

    def codes(low: int, high: int, last: int) -> Tensor:
        return torch.randint(low, high, (*shape, last), generator=generator, dtype=torch.uint8)

    if form == "fp8":
        drawn = codes(0, 256, columns)
        drawn[(drawn & 127) == 127] = 0  # NaN
        return drawn, draw.tensor((*shape, 1), torch.float32).abs() * 2.0**-11 + 2.0**-13, None
    packed = codes(0, 256, columns // 2)
    if form == "mxfp4":
        return packed, codes(117, 125, columns // 32), None
    # From zero through the subnormals to 8; a global scale for each expert, or for each row where
    # gate and up were quantised apart.
    gain = (experts,) if draw.choice((True, False)) else shape
    small = draw.tensor(gain, torch.float32).abs() * 2.0**-9 + 2.0**-11
    return packed, codes(0, 0x51, columns // 16), small


@op(inputs=_routed_inputs, tolerance=within_twice_baseline())
def routed_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    w13_scale: Tensor | None,
    w2_scale: Tensor | None,
    w13_global: Tensor | None,
    w2_global: Tensor | None,
    format: str,
    act: str,
    interleaved: bool,
) -> Tensor:
    """The chosen experts, weighted on their outputs and summed (spec 2.4, step 5).

    x [T, H]; ids [T, k] int32, distinct in a row as `route` gives them, any number outside
    0 .. E-1 adding nothing; weights [T, k] float32; w13 [E, 2I, H] and w2 [E, H, I], packed to half
    the columns for the 4-bit formats, with block scales and per-expert global scales as
    `formats` describes them, whose codes are `formats.arranged` where `format` ends in ARRANGED.
    `act` says how activations are rounded before each product: bf16
    (not at all), fp8, nvfp4 or mxfp4. -> [T, H]; the sum over experts is rounded once.
    """
    total = torch.zeros_like(acc(x))
    for expert in range(w13.shape[0]):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        if token.numel() == 0:
            continue
        up = _dense(w13, w13_scale, w13_global, expert, format, x)
        down = _dense(w2, w2_scale, w2_global, expert, format, x)
        gate_up = store(acc(_rounded(x[token], act)) @ up.T, x)
        inner = swiglu(gate_up, interleaved, None)
        out = acc(_rounded(inner, act)) @ down.T
        total.index_add_(0, token, out * weights[token, slot].to(out.dtype)[:, None])
    return store(total, x)


def _dense(w: Tensor, scale: Tensor | None, global_scale: Tensor | None, expert: int, format: str,
           x: Tensor) -> Tensor:  # fmt: skip
    """One expert's matrix in the accumulation dtype of `x`."""
    if format == "bf16":
        return acc(w[expert]).to(acc(x).dtype)
    from inkling_portable import formats

    codes, format = formats.as_stored(w[expert], format)
    if scale is None:
        raise ValueError(
            f"routed_experts: format {format!r} needs block scales; pass w13_scale and w2_scale"
        )
    if format == "nvfp4":
        if global_scale is None:
            raise ValueError(
                "routed_experts: format 'nvfp4' needs global scales; pass w13_global and w2_global"
            )
        return formats.dequantize_nvfp4(
            codes, scale[expert], global_scale[expert], dtype=acc(x).dtype
        )
    if format == "mxfp4":
        return formats.dequantize_mxfp4(codes, scale[expert], dtype=acc(x).dtype)
    if format == "fp8":
        return formats.dequantize_fp8(codes, scale[expert], dtype=acc(x).dtype)
    raise ValueError(
        f"routed_experts: unknown weight format {format!r}; known are bf16, nvfp4, mxfp4, fp8"
    )


def _rounded(x: Tensor, act: str) -> Tensor:
    if act == "bf16":
        return x
    from inkling_portable import formats

    return formats.fake_quantize(x, act)
