"""Mixture of experts: one gate call, routed experts, always-active sink experts.

Routed experts are vLLM's fused layer where the decision for `routed_experts` is `engine`, so that
expert parallelism, load balancing and adapters stay the engine's; else our own op runs on weights
that this file holds, and on a CPU an adapter of routed experts is refused.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from inkling_portable.model.config import ConfigError
from inkling_portable.model.engine import (
    MergedColumnParallelLinear,
    QuantizationConfig,
    RowParallelLinear,
    build_routed_experts,
)
from inkling_portable.model.settings import Settings


class Gate(nn.Module):
    """Scores of routed experts and sinks. Bias and scale are float32 as stored."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        text = settings.text
        rows = text.num_experts + text.num_sinks
        self.weight = nn.Parameter(torch.empty(rows, text.hidden_size), requires_grad=False)
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
        self.w2_weight = nn.Parameter(
            torch.empty(text.num_sinks, text.hidden_size, width), requires_grad=False
        )
        self.op = settings.ops().sink_experts

    def forward(self, x: Tensor, gammas: Tensor) -> Tensor:
        """x [T, H], gammas [T, S] -> this rank's partial sum [T, H]."""
        return self.op(x, self.w13_weight, self.w2_weight, gammas)


class SinkLinears(nn.Module):
    """The sink experts as two plain linear layers, which the engine can wrap for adapters.

    All sinks lie side by side, sink after sink: `w13` has their gate rows and then their up rows,
    and the columns of `w2` are in the same order, so that one slab of columns is a rank's share.
    """

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
        self.sinks = [start // text.expert_width for start in starts]

    def forward(self, x: Tensor, gammas: Tensor) -> Tensor:
        """x [T, H], gammas [T, S] -> this rank's partial sum [T, H]."""
        rows, runs = x.shape[0], len(self.sinks)
        # swiglu weighs rows, so every run of columns becomes rows of its own.
        gate_up = self.w13(x).view(rows, 2, runs, self.run).permute(2, 0, 1, 3)
        gate_up = gate_up.reshape(runs * rows, 2 * self.run)
        weight = gammas[:, self.sinks].t().reshape(-1)
        inner = self.ops.swiglu(gate_up, False, weight).view(runs, rows, self.run)
        return self.w2(inner.transpose(0, 1).reshape(rows, runs * self.run))


class OwnWeights(nn.Module):
    """Routed experts' weights in vLLM's layout: gate block over up block [E, 2I, H]; [E, H, I]."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        text = settings.text
        width = text.expert_width // settings.tp
        self.w13_weight = nn.Parameter(
            torch.empty(text.num_experts, 2 * width, text.hidden_size), requires_grad=False
        )
        self.w2_weight = nn.Parameter(
            torch.empty(text.num_experts, text.hidden_size, width), requires_grad=False
        )


class OwnExperts(nn.Module):
    """Routed experts through the resolved op, split over ranks by width.

    Raises ConfigError for settings that only the engine's layer serves.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        facts = settings.facts
        # Adapters on experts need vLLM's layer. On a CPU that layer has none either: there, vLLM
        # refuses such an adapter by its module names, and others are served.
        adapters = facts.lora and settings.target.vendor != "cpu"
        for name, found, wanted in (("weights", facts.weights, "bf16"), ("ep", facts.ep, 1),
                                    ("lora", adapters, False)):  # fmt: skip
            if found != wanted:
                raise ConfigError(
                    f"routed experts outside vLLM's layer need {name} {wanted}; found {found}; "
                    "ask for routed_experts=engine or change that setting"
                )
        self.op = settings.ops().routed_experts
        self.routed_experts = OwnWeights(settings)

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """x [T, H], weights and ids [T, k] -> partial [T, H]."""
        own = self.routed_experts
        return self.op(
            x, ids, weights, own.w13_weight, own.w2_weight, None, None, None, None, "bf16", "bf16",
            False,
        )  # fmt: skip


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
        self.own = self.ops.routed_experts is not None
        if self.own:
            self.experts = OwnExperts(settings)
        else:
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

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H] -> (routed partial [T, H], sink partial [T, H])."""
        logits = self.ops.gate_logits(x, self.gate.weight)
        weights, ids, gammas = self._route(logits)
        sinks = self.sink_experts(x, gammas)
        if self.own:
            return self.experts(x, weights, ids), sinks
        self._routed = (logits, weights, ids)
        routed = self.experts(hidden_states=x, router_logits=logits)
        self._routed = None
        return routed, sinks

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
