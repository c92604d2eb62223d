"""Offers of the triton backend: one set of kernels for both vendors and for the CPU interpreter."""

from inkling_portable.registry import Facts, Offer, needs, offers_in
from inkling_portable.target import Target


def accelerator(target: Target, facts: Facts) -> str | None:
    """A CPU runs these kernels only under Triton's interpreter."""
    if target.vendor == "cpu" and "interpret" not in target.features:
        return "needs an accelerator or TRITON_INTERPRET=1"
    return None


def attention(target: Target, facts: Facts) -> str | None:
    """What rel_attention's kernels do not serve."""
    if 0 < facts.page_size < 16:
        return f"needs pages of at least 16 tokens; asked is {facts.page_size}"
    if facts.batch_invariant:
        return "splits keys by the whole batch's lengths; batch invariance needs a fixed split"
    return None


def whole_blocks(target: Target, facts: Facts) -> str | None:
    """Blocks of 4-bit weights have up to 32 columns, and a rank's share must not cut one."""
    width = facts.expert_width // facts.tp
    if facts.weights in ("nvfp4", "mxfp4") and (width % 32 or facts.hidden % 32):
        return (f"needs hidden size and expert width per rank in multiples of 32 for "
                f"{facts.weights}; found {facts.hidden} and {width}")  # fmt: skip
    return None


triton = needs(triton=">=3.6")
offer = offers_in(__name__)

OFFERS: tuple[Offer, ...] = (
    offer("rms_norm", "triton", ".norm:rms_norm", accelerator, triton),
    offer("embed_norm", "triton", ".norm:embed_norm", accelerator, triton),
    offer("embed_norm_chain", "triton", ".norm:embed_norm_chain", accelerator, triton),
    offer("concat_norms", "triton", ".norm:concat_norms", accelerator, triton),
    offer("conv_sources", "triton", ".short_conv:conv_sources", accelerator, triton),
    offer("conv_residual_norm", "triton", ".short_conv:conv_residual_norm", accelerator, triton),
    offer("qkvr_prep", "triton", ".qkvr_prep:qkvr_prep", accelerator, triton),
    offer(
        "rel_attention",
        "triton",
        ".rel_attention:rel_attention",
        accelerator,
        triton,
        attention,
        needs(head_dim=(16, 32, 64, 128), kv_dtype=("auto", "bfloat16", "float16", "float32")),
    ),
    offer("gate_logits", "triton", ".experts:gate_logits", accelerator, triton),
    offer("route", "triton", ".experts:route", accelerator, triton),
    offer("swiglu", "triton", ".experts:swiglu", accelerator, triton),
    offer("sink_experts", "triton", ".experts:sink_experts", accelerator, triton),
    offer(
        "routed_experts",
        "triton",
        ".routed_experts:routed_experts",
        accelerator,
        triton,
        whole_blocks,
    ),
    offer("skinny_linear", "triton", ".skinny_linear:skinny_linear", accelerator, triton),
    offer("norm_gelu", "triton", ".towers:norm_gelu", accelerator, triton),
    offer("dmel_embed_norm", "triton", ".towers:dmel_embed_norm", accelerator, triton),
)
