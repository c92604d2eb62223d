"""Offers without a function: the engine's mixture-of-experts and linear layers, parts of an op.

Its refusals that we know of are written here as data, with the versions they hold for, so that
`explain` can state them for a machine that is not present. The engine is never probed.
"""

from inkling_portable.registry import Facts, Offer, needs
from inkling_portable.target import Target


def engine_has_experts(target: Target, facts: Facts) -> str | None:
    """Known refusals of vLLM 0.26 to 0.33 for Inkling's routed experts."""
    if target.vendor == "cpu" and facts.weights in ("nvfp4", "mxfp4"):
        return f"vLLM has no {facts.weights.upper()} experts for a CPU"
    if target.vendor == "cpu" and facts.weights == "fp8":
        return "vLLM's FP8 experts for a CPU need scales per block and routing of its own"
    if target.vendor == "cpu" and facts.ep > 1:
        return "vLLM's experts for a CPU ignore the expert map of expert parallelism"
    if target.vendor == "cpu" and facts.dp > 1:
        return "vLLM's experts for a CPU cannot exchange rows between data-parallel ranks"
    if target.vendor == "cpu" and facts.lora:
        return "vLLM's experts under adapters need Triton kernels, which a CPU lacks"
    if facts.batch_invariant and (target.vendor == "cpu" or facts.weights in ("nvfp4", "mxfp4")):
        return f"vLLM's {facts.weights} experts on {target.vendor} are not batch-invariant"
    if facts.weights == "mxfp4" and target.arch == "gfx942" and facts.moe_backend == "aiter":
        return "vLLM has no AITER MXFP4 kernel for gfx942 that accepts custom routing"
    if target.vendor == "rocm" and facts.moe_backend.startswith("aiter") and not facts.rocm_aiter:
        return "vLLM wants VLLM_ROCM_USE_AITER=1 and VLLM_ROCM_USE_AITER_MOE not off for AITER's"
    return None


def unpacks_everything(target: Target, facts: Facts) -> str | None:
    """Where vLLM has no kernel for the format, and its way takes over 100 ms a step."""
    if facts.weights == "mxfp4" and target.arch == "gfx942":
        return ("vLLM unpacks all experts to bfloat16 on every step there; ask with "
                "routed_experts=engine")  # fmt: skip
    return None


OFFERS: tuple[Offer, ...] = (
    # The name of the engine's layer, not a function: the model builds that layer when this row
    # is chosen.
    Offer("routed_experts", "engine", "engine", (needs(vllm=">=0.26,<0.34"), engine_has_experts),
          only_if_asked=unpacks_everything, invariant=True),
    # Linear layers as the engine builds them, for every number of rows.
    Offer("skinny_linear", "engine", "engine", (needs(vllm=""),), invariant=True),
    # gate_logits, route and sink_experts by whoever has them.
    Offer("gated_sinks", "parts", "parts", invariant=True),
)  # fmt: skip
