"""How many MTP drafts a step pays for: expected tokens of a step against what the step costs.

A decode step of one request takes as long as its bytes, unless measured times are given: dense
weights and caches once, an expert for every row that may choose it, and for each draft one depth
and the head again. Launches are not in it, so measured times are better.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from inkling_portable.commands.fit_memory import BF16, weights_per_gpu
from inkling_portable.model.config import InklingConfig
from inkling_portable.registry import SelectionError

ONCE = ("attention", "dense MLP", "shared experts", "convolutions, gates, norms", "unembedding")


def step_bytes(
    config: InklingConfig, weights: str, tp: int, context: int, drafts: int, cell: float = BF16
) -> float:
    """Bytes that a rank reads in one step of one request with `context` tokens and its drafts;
    a number in the cache takes `cell`."""
    text = config.text
    parts = weights_per_gpu(config, weights, tp, drafts)
    # Each of the rows chooses top_k of the experts, here independently of the others.
    used = 1 - (1 - text.top_k / text.num_experts) ** (1 + drafts)
    layers = [(text.layer_is_local(i), text.geometry(text.layer_is_local(i)))
              for i in range(text.num_layers)]  # fmt: skip
    mtp = config.require_mtp()
    layers += [(mtp.depth_is_local(i), config.mtp_attention(i)) for i in range(drafts)]
    cells = sum(
        2 * max(1, sizes.kv_heads // tp) * sizes.head_dim
        * (min(context, text.window) if local else context)
        for local, sizes in layers
    )  # fmt: skip
    head = drafts * parts["unembedding"] + parts.get("draft depths", 0)
    return sum(parts[name] for name in ONCE) + used * parts["routed experts"] + head + cell * cells


def table(acceptance: Sequence[float], costs: Sequence[float], unit: str) -> list[str]:
    """Lines for 0 drafts and on, and the option for the best; costs[k] is that of a step with k.

    acceptance[i] is the share of steps in which draft i + 1 came true, as vLLM logs it by position.
    Raises SelectionError for shares that no acceptance by position can be, and for no such costs.
    """
    bounds = [1.0, *acceptance]
    if not acceptance or any(not 0 <= b <= a for a, b in zip(bounds, acceptance, strict=False)):
        raise SelectionError(
            "acceptance by position needs shares from 1 down to 0, none above the one before, as "
            f"vLLM logs them; found {', '.join(map(str, acceptance)) or 'none'}"
        )
    if len(costs) < 2:
        raise SelectionError(f"a {unit} is needed without drafts and with 1 at least; found "
                             f"{', '.join(map(str, costs))}")  # fmt: skip
    if not all(0 < cost < math.inf for cost in costs):
        raise SelectionError(f"a {unit} needs to be above 0; found {', '.join(map(str, costs))}")
    tokens = [1 + sum(acceptance[:k]) for k in range(min(len(bounds), len(costs)))]
    gains = [n * costs[0] / cost for n, cost in zip(tokens, costs, strict=False)]
    best = gains.index(max(gains))
    lines = [f"drafts  tokens a step  {unit:>10}  speed"]
    for k, (n, gain) in enumerate(zip(tokens, gains, strict=True)):
        mark = "  <- best" if k == best else ""
        lines.append(f"{k:6}  {n:13.2f}  {costs[k]:10.3f}  {gain:5.2f}{mark}")
    spec = json.dumps({"method": "mtp", "num_speculative_tokens": best})
    return [*lines, f"--speculative-config '{spec}'" if best else "no --speculative-config"]
