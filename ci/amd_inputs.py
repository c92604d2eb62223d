"""Inputs at which executed AMD kernels run in the configurations that served shapes get.

A case is an op, the sizes at which its contract draws inputs, and the launch settings it is to run
with where only a large step would get them. `SizedDraw` answers the contract's own questions: what
the contract offers is replaced by what is served, so padding, poison and edges stay the contract's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch

from ci.cdna.launch import CHIPS
from inkling_portable.backends.reference import attention as attention_contract
from inkling_portable.backends.reference.norm import WIDTHS
from inkling_portable.backends.triton import OFFERS, qkvr_prep, rel_attention, short_conv
from inkling_portable.backends.triton import rel_attention_tuning as tuning
from inkling_portable.backends.triton._common import launching_for
from inkling_portable.backends.triton.rel_attention_tuning import Plan
from inkling_portable.backends.triton.routed_experts_tuning import gemv_to
from inkling_portable.inputs import SeededDraw
from inkling_portable.registry import Facts
from inkling_portable.target import Target

T = TypeVar("T")
Sizes = Mapping[tuple[Any, ...], Sequence[Any]]
HIDDEN = (6144, 4096)  # Inkling and Inkling-Small
FORMATS = ("nvfp4", "mxfp4", "fp8", "bf16")
_BF16 = torch.bfloat16


class InTurn(tuple[Any, ...]):
    """What is drawn from at the first, second, ... time of an offer."""

    def __new__(cls, *parts: Sequence[Any]) -> InTurn:
        return super().__new__(cls, parts)


_KINDS = ("decode", "verify", "prefill", "empty")  # of requests


class SizedDraw(SeededDraw):
    """Draws from `sizes[offer]` where the contract's offer is a key; of types, those AMD serves.

    An offer is what `choice` was given, or the bounds of `integer`.
    """

    def __init__(self, seed: int, sizes: Sizes) -> None:
        super().__init__(seed)
        self._sizes = sizes
        self._used: Counter[tuple[Any, ...]] = Counter()

    def integer(self, low: int, high: int) -> int:
        self._used[(low, high)] += 1
        first, last = self._sizes.get((low, high), (low, high))
        return super().integer(first, last)

    def choice(self, values: Sequence[T]) -> T:
        offered = self._sizes.get(tuple(values), values)
        if isinstance(offered, InTurn):
            offered = offered[min(self._used[tuple(values)], len(offered) - 1)]
        self._used[tuple(values)] += 1
        return super().choice([v for v in offered if v is not torch.float32])

    def unused(self) -> list[tuple[Any, ...]]:
        """Choices that the contract never offered: it has changed, and this file must follow.

        Which bounds it asks for depends on what it drew before, so those are left out.
        """
        bounds = [o for o in self._sizes if len(o) == 2 and all(type(x) is int for x in o)]
        return [o for o in self._sizes if o not in self._used and o not in bounds]


@dataclass(frozen=True)
class Case:
    """One op in one configuration; `weight` is about how long it runs, to start long ones first."""

    name: str
    op: str
    sizes: Sizes = field(hash=False)
    fixed_order: bool = False
    forced: tuple[tuple[Any, str, Any], ...] = field(default=(), hash=False)
    function: Callable[..., Any] | None = field(default=None, hash=False)
    weight: float = 1
    extra: bool = False  # one input is enough: the configuration is another case's too

    def run(self) -> Callable[..., Any]:
        """The op's function as the chooser would load it, or the case's own."""
        if self.function is not None:
            return self.function
        row = next(row for row in OFFERS if row.op == self.op)
        return row.under(Facts(batch_invariant=self.fixed_order)).load()

    @contextmanager
    def settings(self) -> Iterator[None]:
        """The launch settings that the case forces, in place of the tuning functions."""
        before = [(module, name, getattr(module, name)) for module, name, _ in self.forced]
        for module, name, value in self.forced:
            setattr(module, name, lambda *_, value=value: value)
        try:
            yield
        finally:
            for module, name, value in before:
                setattr(module, name, value)


_ROWS = (0, 9)  # what most contracts ask for
_BATCH: dict[tuple[Any, ...], Sequence[Any]] = {(0, 4): (2, 4)}  # requests, some always


def small_ops() -> Iterator[Case]:
    """Norms, routing, activations and the towers at the served widths."""
    for width in HIDDEN:
        for op in ("rms_norm", "embed_norm", "embed_norm_chain", "concat_norms"):
            for residual in (True, False) if op == "rms_norm" else (True,):
                sizes: dict[tuple[Any, ...], Sequence[Any]] = {WIDTHS: (width,), _ROWS: (2, 9)}
                if op == "rms_norm":
                    sizes[(True, False)] = (residual,)
                yield Case(f"{op} {width} {residual}", op, sizes)
    yield Case("norm_gelu", "norm_gelu", {(64, 128, 320, 1216, 4800): (4800,), _ROWS: (2, 9)})
    for width in HIDDEN:
        sizes = {(32, 128, 192): (width,), (1, 4, 80): (80,), (2, 16): (16,), _ROWS: (2, 5)}
        yield Case(f"dmel_embed_norm {width}", "dmel_embed_norm", sizes)
    yield Case(
        "route", "route", {(8, 256, 40): (256,), (2, 1): (2,), (2, 6, 1): (6,), _ROWS: (5, 9)}
    )
    for width in (384, 768, 2048, 1024):
        for weighted in (True, False):
            sizes = {(16, 64, 33, 384, 1024): (width,), _ROWS: (2, 9),
                     (True, False): InTurn((weighted,), (True, False))}  # fmt: skip
            yield Case(f"swiglu {width} {weighted}", "swiglu", sizes)


def conv_cases(chip: str) -> Iterator[Case]:
    """Where the earlier taps are, and the convolution of a stream with its norm."""
    yield Case("conv_sources short", "conv_sources", {**_BATCH, (1, 20): (1, 300)})
    long = {(0, 4): (3, 4), (1, 20): (350, 420),
            _KINDS: ("prefill",)}  # fmt: skip
    yield Case("conv_sources long", "conv_sources", long, weight=2)
    for hidden in HIDDEN:
        sizes = {**_BATCH, (1, 2, 3): (8,), (16, 64, 7): (hidden // 8,), (4, 2): (4,)}
        yield Case(f"conv_residual_norm {hidden}", "conv_residual_norm", sizes, weight=2)
        # As layers call it: with the sinks' part and with a norm. (What is offered for the
        # part is also offered for sharing pages.)
        layer = {**sizes, (False, True): (True,), (True, True, False): (True,)}
        yield Case(f"conv_residual_norm {hidden} layer", "conv_residual_norm", layer, weight=2)
        forced = ((short_conv, "tiling", (16, 1024, 2)),)
        yield Case(f"conv_residual_norm {hidden} many", "conv_residual_norm", layer, forced=forced,
                   weight=3)  # fmt: skip
    yield Case("conv_residual_norm fixed", "conv_residual_norm", sizes, fixed_order=True)


def _cache_sizes(chip: str, eight: bool) -> Sizes:
    stored = torch.float8_e4m3fnuz if chip == "gfx942" else torch.float8_e4m3fn
    return {(_BF16, attention_contract.FP8[0]): (stored if eight else _BF16,)}


def prep_cases(chip: str) -> Iterator[Case]:
    """From the fused projection to attention's inputs and caches."""
    kinds = {"global": ((8, 1), 1024, 24.0), "local": ((8, 2), 512, 0.0)}
    for kind, (heads, extent, floor) in kinds.items():
        for eight in (False, True) if kind == "global" else (False,):
            sizes = {
                **_BATCH, **_cache_sizes(chip, eight), attention_contract.HEADS: (heads,),
                (16, 64, 128): InTurn((128,), (128, 16)), (8, 16): (16,), (16, 40, 128): (extent,),
                (0.0, 24.0): (floor,),
            }  # fmt: skip
            name = f"qkvr_prep {kind} {8 if eight else 16} bits"
            for many, settings in ((False, (4, 1, 16, 128, 2)), (True, (16, 4, 64, 128, 4))):
                yield Case(name + " many" * many, "qkvr_prep", sizes,
                           forced=((qkvr_prep, "tiling", settings),), weight=3)  # fmt: skip
    yield Case("qkvr_prep fixed", "qkvr_prep", sizes, fixed_order=True, weight=3)


# New tokens, requests, longest, window: both sides of every switch in the tuning function.
ATTENTION = [
    (fresh, batch, longest, window)
    for fresh in (1, 2, 3, 4, 8, 9, 16, 17, 64, 2048, 16384)
    for batch in (1, 4, 64)
    for longest in (512, 8192, 65536, 131072)
    for window in (0, 512)
    if fresh <= longest
]


def attention_plans(target: Target, stored: int
                    ) -> dict[tuple[Any, ...], tuple[Plan, int, int, int]]:  # fmt: skip
    """Plans with different tiles for a rank of Inkling: (plan, new tokens, window, page).

    stored: bytes of a cached number.
    """
    found: dict[tuple[Any, ...], tuple[Plan, int, int, int]] = {}
    for fresh, batch, longest, window in ATTENTION:
        for page in (128, 16):
            shape = tuning.Shape(
                rows=fresh * batch, batch=batch, heads=8, kv_heads=2 if window else 1, width=128,
                extent=window or 1024, window=window, page=page, max_q=fresh, max_kv=longest,
                stored=stored,
            )  # fmt: skip
            plan = tuning.plan(target, shape)
            few = plan.few and replace(plan.few, programs=0)
            found.setdefault((few, plan.many, window, page), (plan, fresh, window, page))
    return found


def attention_cases(chip: str) -> Iterator[Case]:
    """Every plan with caches of 16 and of 8 bits, and the kernels of a fixed order."""
    kinds = ((0, 40), (16, 16), (0, 128), (48, 48), (48, 16), (20, 64))

    def sizes(window: int, page: int, eight: bool) -> dict[tuple[Any, ...], Sequence[Any]]:
        return {
            **_cache_sizes(chip, eight), (16, 64, 128): InTurn((128,), (page,)),
            attention_contract.HEADS: ((8, 2),) if window else ((8, 1),),
            kinds: ((window, window),) if window else ((0, 1024),),
            (0, 4): (2, 3), (0, 300): (0, 640), (0, 37): (0, 80),
        }  # fmt: skip

    for eight in (False, True):
        plans = attention_plans(Target.parse(CHIPS[chip]), 1 if eight else 2).values()
        for number, (plan, fresh, window, page) in enumerate(plans):
            # What a program is to do does not depend on how many there are.
            plan = replace(plan, few=plan.few and replace(plan.few, programs=15))
            asked = {**sizes(window, page, eight), (1, 70): (1, 40)}
            if plan.many is None:  # no request has more new tokens than the plan serves
                most = min(fresh, 20)
                asked |= {_KINDS: ("decode", "verify", "empty"), (2, 9): (1, min(most, 9))}
                if most > 9:
                    asked[_KINDS] = ("decode", "prefill", "empty")
                    asked[(1, 70)] = (1, most)
                    del asked[(2, 9)]
            tiles = plan.few or plan.many
            assert tiles is not None
            name = f"rel_attention {number}: {tiles.m} rows, window {window}, pages of {page}, "
            name += "8 bits" if eight else "16 bits"
            yield Case(name, "rel_attention", asked, function=partial(rel_attention.attend, plan),
                       weight=4 + tiles.m / 8)  # fmt: skip
    # Where a request may have few keys its sums are split, where very many they are not.
    for window, bound in ((0, 2000), (0, 1 << 30), (512, 100)):
        for page in (128, 16):
            asked = {**sizes(window, page, False), (0, 100): (bound,)}
            yield Case(f"rel_attention fixed, window {window}, bound {bound}, pages of {page}",
                       "rel_attention", asked, fixed_order=True, weight=12)  # fmt: skip


def linear_cases() -> Iterator[Case]:
    """Products with few rows: the router's, the head's, the sinks' and those of layers."""
    tall = {"one": (1, 1), "16": (2, 16), "32": (17, 32), "64": (33, 64), "more": (65, 140)}
    widths, columns = (64, 96, 33, 1024, 6144), (10, 258, 34)
    for name, (low, high) in tall.items():
        for width in HIDDEN if high <= 16 else (1056,):
            sizes = {widths: (width,), columns: (258,), (0, 20): (low, high)}
            yield Case(f"gate_logits {name} {width}", "gate_logits", sizes, weight=4)
        sizes = {(32, 64, 128): (224,), (2, 1): (2,), (16, 64, 24): (384,), (0, 9): (low, high)}
        if high <= 64:
            yield Case(f"sink_experts {name}", "sink_experts", sizes, weight=4)
    for hidden, inner in ((6144, 48), (4096, 48), (96, 768), (96, 1024), (96, 2048)):
        sizes = {(32, 64, 128): (hidden,), (2, 1): (2,), (16, 64, 24): (inner,), (0, 9): (1, 1)}
        yield Case(f"sink_experts one {hidden} {inner}", "sink_experts", sizes, weight=3)
    for hidden, inner in (*((h, 48) for h in HIDDEN), *((96, i) for i in (384, 768, 1024, 2048))):
        sizes = {(1, 0, 3): (1,), (64, 32, 2080): (hidden,), (8, 256, 40): (256,), (2, 1): (2,),
                 (16, 64, 24): (inner,), (2, 6, 1): (6,)}  # fmt: skip
        yield Case(f"gated_sinks {hidden} {inner}", "gated_sinks", sizes, weight=3)
    for inner in (6144, 4096, 2048, 1536, 1024, 320):
        for name in ("one", "16"):
            sizes = {(64, 96, 40, 1024, 3072): (inner,), (0, 16): tall[name]}
            yield Case(f"skinny_linear {name} {inner}", "skinny_linear", sizes, weight=2)
    sizes = {widths: (1056,), columns: (258,), (0, 20): (1, 80)}
    yield Case("gate_logits fixed", "gate_logits", sizes, fixed_order=True, weight=5)
    sizes = {(32, 64, 128): (544,), (2, 1): (2,), (16, 64, 24): (384,), (0, 9): (1, 70)}
    yield Case("sink_experts fixed", "sink_experts", sizes, fixed_order=True, weight=6)
    yield Case("skinny_linear fixed", "skinny_linear", {(64, 96, 40, 1024, 3072): (1056,)},
               fixed_order=True, weight=3)  # fmt: skip


def _as_fnuz(**arguments: Any) -> torch.Tensor:
    """routed_experts on E4M3 as gfx942 has it: the same bits are half as much there."""
    for name in ("w13", "w2"):
        codes = arguments[name]
        codes = torch.where(codes == 0x80, 0, codes)  # -0, which is NaN there
        arguments[name] = codes.view(torch.float8_e4m3fnuz)
        arguments[f"{name}_scale"] = arguments[f"{name}_scale"] * 2
    return next(r for r in OFFERS if r.op == "routed_experts").load()(**arguments)


def expert_cases(chip: str) -> Iterator[Case]:
    """Each format with one token, a few, some and many; widths that cut tiles."""
    with launching_for(Target.parse(CHIPS[chip])):
        tiles_from = gemv_to() + 1
    # name: (tokens, experts, experts of a token, hidden size, expert width, fixed order)
    kinds = {
        "one": ((1, 1), 8, 6, 2080, 96, False), "a few": ((2, 6), 4, 2, 352, 544, False),
        "some": ((tiles_from, 16), 4, 2, 352, 96, False), "many": ((17, 40), 11, 3, 160, 96, False),
        "most": ((50, 70), 4, 2, 96, 352, False), "fixed": ((1, 40), 4, 2, 352, 96, True),
    }  # fmt: skip
    for form in FORMATS:
        for name, ((low, high), experts, top_k, hidden, width, fixed) in kinds.items():
            sizes = {
                ("bf16", "nvfp4", "mxfp4", "fp8"): (form,), (3, 12, 40): (high,),
                (0, high): (low, high), (4, 8, 11): (experts,), (2, 1, 3): (top_k,),
                (32, 64, 160): (hidden,), (32, 96, 64): (width,),
            }  # fmt: skip
            # Without a matrix-vector kernel a few tokens are as some.
            extra = "fp4" not in form and name == "a few"
            yield Case(f"routed_experts {form} {name}", "routed_experts", sizes, fixed, weight=5,
                       extra=extra)  # fmt: skip
            if form == "fp8" and chip == "gfx942" and not fixed:
                yield Case(f"routed_experts fp8fnuz {name}", "routed_experts", sizes,
                           function=_as_fnuz, weight=5, extra=extra)  # fmt: skip


def cases(chip: str) -> list[Case]:
    """Everything for one chip."""
    return [*small_ops(), *conv_cases(chip), *prep_cases(chip), *attention_cases(chip),
            *linear_cases(), *expert_cases(chip)]  # fmt: skip
