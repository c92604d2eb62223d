"""Mixture of experts: one gate call, routed experts, always-active sink experts.

The decision for `routed_experts` is taken first, for the number format of each layer. `engine`:
vLLM's fused layer with its own method, so that expert parallelism over data-parallel ranks, load
balancing and adapters stay the engine's. Else no method of the engine is ever built, which may
raise where our op runs: the op reads weights that this file holds, in one layout for every batch
size, the checkpoint's own but for the places of bits where that saves a kernel instructions.
"""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor, nn

from inkling_portable.formats import ARRANGED, arranged
from inkling_portable.model.checkpoint import Experts
from inkling_portable.model.config import ConfigError
from inkling_portable.model.engine import (
    AfterLoading,
    MergedColumnParallelLinear,
    QuantizationConfig,
    RowParallelLinear,
    build_routed_experts,
    expert_shard,
    side_by_side,
)
from inkling_portable.model.quant_layouts import Layout
from inkling_portable.model.settings import Settings
from inkling_portable.model.warm_up_steps import Call

TOGETHER: dict[tuple[str, ...], int] = {("wgmma",): 128}
"""Rows up to which providers of gated_sinks have fewer launches than its parts; the others: one."""


ARRANGES = (("mma",),)
"""Providers of routed_experts that take 4-bit codes as `formats.arranged` has them, and faster."""


class Gate(nn.Module):
    """Scores of routed experts and sinks. Bias and scale are float32 as stored."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        text = settings.text
        rows = text.num_experts + text.num_sinks
        # With a few rows of zeros behind it in memory: see the Triton provider of gate_logits.
        whole = torch.zeros(rows + -rows % 8, text.hidden_size)
        self.weight = nn.Parameter(whole[:rows], requires_grad=False)
        self.bias = nn.Parameter(
            torch.empty(text.num_experts, dtype=torch.float32), requires_grad=False
        )
        self.global_scale = nn.Parameter(torch.empty(1, dtype=torch.float32), requires_grad=False)


class SinkExperts(nn.Module):
    """Experts that every token uses: [S, 2I, H] with alternating gate and up rows, [S, H, I]."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        text = settings.text
        width = text.expert_width // settings.tp
        self.w13_weight = nn.Parameter(
            torch.empty(text.num_sinks, 2 * width, text.hidden_size), requires_grad=False
        )
        # In memory the sinks' columns lie side by side, so that a step of many rows is one product.
        beside = torch.empty(text.hidden_size, text.num_sinks, width)
        self.w2_weight = nn.Parameter(beside.transpose(0, 1), requires_grad=False)
        self.ops = settings.ops()

    def forward(self, x: Tensor, gammas: Tensor) -> Tensor:
        """x [T, H], gammas [T, S] -> this rank's partial sum [T, H]."""
        return self.ops.sink_experts(x, self.w13_weight, self.w2_weight, gammas)


class SinkLinears(nn.Module):
    """The sink experts as two plain linear layers, which the engine can wrap for adapters.

    All sinks lie side by side, sink after sink: `w13` has their gate rows and then their up rows,
    and the columns of `w2` are in the same order, so that one slab of columns is a rank's share.
    """

    sinks: Tensor  # of each run of columns, on the device: a graph copies nothing from the host

    def __init__(self, settings: Settings, prefix: str) -> None:
        super().__init__()
        text = settings.text
        total = text.num_sinks * text.expert_width
        self.ops = settings.ops()
        self.w13 = MergedColumnParallelLinear(
            text.hidden_size, [total, total], bias=False, prefix=f"{prefix}.w13",
            return_bias=False,
        )  # fmt: skip
        self.w2 = RowParallelLinear(
            total, text.hidden_size, bias=False, reduce_results=False, prefix=f"{prefix}.w2",
            return_bias=False,
        )  # fmt: skip
        # Columns of one rank, in runs that do not cross from one sink to the next.
        share = total // settings.tp
        self.run = math.gcd(share, text.expert_width)
        starts = range(settings.rank * share, (settings.rank + 1) * share, self.run)
        sinks = torch.tensor([start // text.expert_width for start in starts])
        self.register_buffer("sinks", sinks, persistent=False)

    def forward(self, x: Tensor, gammas: Tensor) -> Tensor:
        """x [T, H], gammas [T, S] -> this rank's partial sum [T, H]."""
        rows, runs = x.shape[0], len(self.sinks)
        # swiglu weighs rows, so every run of columns becomes rows of its own.
        gate_up = self.w13(x).view(rows, 2, runs, self.run).permute(2, 0, 1, 3)
        gate_up = gate_up.reshape(runs * rows, 2 * self.run)
        weight = gammas.index_select(1, self.sinks).t().reshape(-1)
        inner = self.ops.swiglu(gate_up, False, weight).view(runs, rows, self.run)
        return self.w2(inner.transpose(0, 1).reshape(rows, runs * self.run))


class OwnWeights(nn.Module):
    """Routed experts' weights as the checkpoint stores them, gate and up rows alternating.

    w13_weight [e, 2I, H] and w2_weight [e, H, I] for e local experts of local width I, packed to
    half the columns in 4-bit formats; `w13_scale` and `w2_scale` as `formats` describes them; for
    NVFP4 the factors `w13_global` [e, 2], for gate and up rows, and `w2_global` [e].
    """

    w13_weight: nn.Parameter
    w2_weight: nn.Parameter
    arranged: Tensor

    def __init__(self, hidden: int, width: int, experts: int, layout: Layout | None) -> None:
        super().__init__()
        packed = layout is not None and layout.format in ("nvfp4", "mxfp4")
        kind = {"fp8": torch.float8_e4m3fn, None: None}.get(
            layout.format if layout else None, torch.uint8
        )
        self.register_buffer("arranged", torch.zeros(1, dtype=torch.bool))
        for name, rows, columns in (("w13", 2 * width, hidden), ("w2", hidden, width)):
            stored = columns // 2 if packed else columns
            self._add(f"{name}_weight", (experts, rows, stored), kind)
            if layout is None:
                continue
            blocks = columns // layout.block if layout.block else 1
            scale = {"nvfp4": torch.float8_e4m3fn, "mxfp4": torch.uint8, "fp8": torch.float32}
            self._add(f"{name}_scale", (experts, rows, blocks), scale[layout.format])
            if layout.format == "nvfp4":
                gain = (experts, 2) if name == "w13" else (experts,)
                self._add(f"{name}_global", gain, torch.float32)

    def _add(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> None:
        setattr(self, name, nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False))

    def arrange(self) -> None:
        """Give 4-bit codes the places that kernels of ARRANGES want; `arranged` says it is done.

        It is a buffer, as weights that are saved from here come back with it.
        """
        if not self.arranged:
            for weight in (self.w13_weight, self.w2_weight):
                for some in weight.data.split(32):  # what it needs beside is of few experts
                    some.copy_(arranged(some))
            self.arranged.fill_(True)

    def finish(self) -> None:
        """Bring the factors of gate and up rows into the op's form, once they are loaded.

        One number per expert where both are the same, else one for each row.
        """
        halves = getattr(self, "w13_global", None)
        if halves is None or halves.dim() != 2 or halves.shape[1] != 2:
            return
        rows = self.w13_weight.shape[1]
        same = bool((halves[:, 0] == halves[:, 1]).all())
        gain = halves[:, 0].contiguous() if same else halves.repeat(1, rows // 2)
        self.w13_global = nn.Parameter(gain, requires_grad=False)


class OwnExperts(nn.Module):
    """Routed experts through the resolved op: split over ranks by width, or spread as wholes.

    Raises ConfigError for settings that only the engine's layer serves.
    """

    def __init__(self, settings: Settings, format: str, layout: Layout | None) -> None:
        super().__init__()
        facts, text = settings.facts, settings.text
        # Adapters on experts need vLLM's layer. On a CPU that layer has none either: there, vLLM
        # refuses such an adapter by its module names, and others are served.
        adapters = facts.lora and settings.target.vendor != "cpu"
        for name, found, wanted in (
            ("ep", facts.ep, 1 if facts.ep == 1 else facts.tp),
            ("lora", adapters, False),
            ("weights", format, format if layout else "bf16"),
        ):
            if found != wanted:
                raise ConfigError(
                    f"routed experts outside vLLM's layer need {name} {wanted}; found {found}; "
                    "ask for routed_experts=engine or change that setting"
                )
        # Spread: as many experts on each rank, the last of which may have fewer.
        share = -(-text.num_experts // facts.ep)
        self.first = settings.rank * share if facts.ep > 1 else 0
        self.local = min(share, text.num_experts - self.first)
        self.split = 1 if facts.ep > 1 else settings.tp
        self.rank = 0 if facts.ep > 1 else settings.rank
        self.layout = layout
        self.ops = settings.expert_ops(format)
        self.routed_experts = OwnWeights(
            text.hidden_size, text.expert_width // self.split, self.local, layout
        )
        # Whole chunks of columns, or the provider would hand steps to one that has to undo it.
        even = not (text.hidden_size % 128 or text.expert_width // self.split % 128)
        arrange = (self.ops.serving("routed_experts") in ARRANGES and even
                   and format in ("nvfp4", "mxfp4"))  # fmt: skip
        self.format = format + ARRANGED * arrange
        self.quant_method = AfterLoading(self._finish if arrange else self.routed_experts.finish)

    def _finish(self) -> None:
        self.routed_experts.arrange()
        self.routed_experts.finish()

    def share(self) -> Experts:
        ids = tuple(range(self.first, self.first + self.local))
        return Experts(ids, self.rank, self.split, own=True, layout=self.layout)

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """x [T, H], weights and ids [T, k] -> partial [T, H]."""
        own = self.routed_experts
        scales = (getattr(own, f"{w}_{kind}", None) for kind in ("scale", "global")
                  for w in ("w13", "w2"))  # fmt: skip
        # The op leaves out experts of other ranks, whose ids lie outside the local ones.
        ids = ids - self.first if self.first else ids
        return self.ops.routed_experts(
            x, ids, weights, own.w13_weight, own.w2_weight, *scales, self.format, "bf16", True
        )


class MoE(nn.Module):
    """Returns this rank's partial sums of routed and sink experts, apart.

    vLLM asks for the routing through a callback that gets the gate's logits. The sinks' weights
    come from the same normalisation, so routing is computed once before and handed over when the
    callback shows the very same logits; it computes anew when the engine regrouped tokens.
    """

    def __init__(
        self, settings: Settings, quant_config: QuantizationConfig | None, prefix: str
    ) -> None:
        super().__init__()
        text = settings.text
        self.ops = settings.ops()
        self.top_k, self.route_scale = text.top_k, text.route_scale
        self.gate = Gate(settings)
        where = re.search(r"layers\.(\d+)\.", f"{prefix}.")
        self.layer = int(where[1]) if where else 0
        self.format = format = settings.expert_format(self.layer)
        self.layout = settings.expert_layout(self.layer)
        self.own = settings.expert_ops(format).routed_experts is not None
        if self.own:
            self.experts = OwnExperts(settings, format, self.layout)
        else:
            # A layer in BF16 among quantised ones has none of their method.
            kept = format == "bf16" and settings.quantisation.layout is not None
            quant_config = None if kept else settings.engine_quant
            self.experts = build_routed_experts(
                # Equal shares per rank; experts added for that are zero and never chosen.
                experts=text.num_experts + -text.num_experts % settings.facts.ep,
                top_k=text.top_k,
                hidden=text.hidden_size,
                width=text.expert_width,
                select=self._select,
                quant_config=quant_config,
                prefix=f"{prefix}.experts",
            )
        self.sink_experts = (
            SinkLinears(settings, f"{prefix}.sink_experts")
            if settings.facts.lora
            else SinkExperts(settings)
        )
        self._routed: tuple[Tensor, Tensor, Tensor] | None = None
        parts = ("gate_logits", "route", "sink_experts")
        together = not settings.facts.lora and settings.together("gated_sinks", *parts)
        self.most_together = TOGETHER.get(settings.chosen()["gated_sinks"], 1) if together else 0

    def share(self) -> Experts:
        """This rank's part of the stored tensors."""
        if self.own:
            return self.experts.share()
        owned, rank, size = expert_shard(self.experts)
        held = self.experts.routed_experts
        stacks = (getattr(held, name, None) for name in ("w13_weight", "w13_weight_packed"))
        rows = next(stack.shape[1] // 2 for stack in stacks if stack is not None)
        return Experts(tuple(owned), rank, size, rows, layout=self.layout)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H] -> (routed partial [T, H], sink partial [T, H])."""
        if 0 < x.shape[0] <= self.most_together:
            logits, weights, ids, second = self._gated(x)
            return self._experts(x, logits, weights, ids), second
        logits, weights, ids, gammas = self._score(x)
        # Both read many bytes for few rows, and neither alone keeps a GPU's memory busy.
        return side_by_side(
            x.shape[0],
            lambda: self._experts(x, logits, weights, ids),
            lambda: self.sink_experts(x, gammas),
        )

    def warm_up_calls(self) -> list[Call]:
        """All but the routed experts by itself, if those are the engine's; then the whole."""
        calls = [Call(lambda ids, positions, rows: self(rows), engine=not self.own)]
        if not self.own:
            calls.append(Call(lambda ids, positions, rows: self._beside(rows)))
        return calls

    def _beside(self, x: Tensor) -> None:
        """What stands beside the engine's experts, in parts, and at once where a step has it."""
        self.sink_experts(x, self._score(x)[3])
        if 0 < x.shape[0] <= self.most_together:
            self._gated(x)

    def _gated(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [T, H] -> (logits, weights and ids of the chosen experts, sink partial [T, H])."""
        gate, sinks = self.gate, self.sink_experts
        found: tuple[Tensor, Tensor, Tensor, Tensor] = self.ops.gated_sinks(
            x, gate.weight, gate.bias, gate.global_scale, self.top_k, self.route_scale,
            sinks.w13_weight, sinks.w2_weight,
        )  # fmt: skip
        return found

    def _score(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [T, H] -> (logits, weights and ids of the chosen experts, sinks' weights [T, S])."""
        logits = self.ops.gate_logits(x, self.gate.weight)
        return logits, *self._route(logits)

    def _experts(self, x: Tensor, logits: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        if self.own:
            own: Tensor = self.experts(x, weights, ids)
            return own
        self._routed = (logits, weights, ids)
        routed: Tensor = self.experts(hidden_states=x, router_logits=logits)
        self._routed = None
        return routed

    def _route(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.ops.route(
            logits, self.gate.bias, self.gate.global_scale, self.top_k, self.route_scale
        )

    def _select(
        self, hidden_states: Tensor, gating_output: Tensor, topk: int, renormalize: bool
    ) -> tuple[Tensor, Tensor]:
        if self._routed is not None and self._routed[0] is gating_output:
            return self._routed[1], self._routed[2]
        weights, ids, _ = self._route(gating_output)
        return weights, ids
