"""Offers of the triton backend: one set of kernels for both vendors and for the CPU interpreter."""

from inkling_portable.registry import KV_DTYPES, Facts, Offer, Predicate, needs, offers_in
from inkling_portable.target import Target


def accelerator(target: Target, facts: Facts) -> str | None:
    """A CPU runs these kernels only under Triton's interpreter."""
    if target.vendor == "cpu" and "interpret" not in target.features:
        return "needs an accelerator or TRITON_INTERPRET=1"
    # bfloat16 begins with sm80 (below, products spill hundreds of registers), Triton with gfx906.
    if target.arch in ("gfx900", "gfx902", "sm70", "sm72", "sm75"):
        return f"needs sm80 or newer, or gfx906 or newer; this is {target.arch}"
    return None


def attention(target: Target, facts: Facts) -> str | None:
    """What rel_attention's kernels do not serve."""
    if 0 < facts.page_size < 16:
        return f"needs pages of at least 16 tokens; asked is {facts.page_size}"
    return None


def two_ranks(target: Target, facts: Facts) -> str | None:
    """Two numbers have one sum; of more, the collective library chooses the order."""
    if facts.batch_invariant and facts.tp > 2:
        return f"sums over {facts.tp} ranks in no fixed order; batch invariance needs tp 1 or 2"
    return None


def whole_blocks(target: Target, facts: Facts) -> str | None:
    """Tokens stay on their rank, whose share must not cut a 4-bit block of up to 32 columns."""
    if facts.ep not in (1, facts.tp):
        return "experts over data-parallel ranks need vLLM's own layer"
    width = facts.expert_width // facts.tp
    if facts.weights in ("nvfp4", "mxfp4") and (width % 32 or facts.hidden % 32):
        return (f"needs hidden size and expert width per rank in multiples of 32 for "
                f"{facts.weights}; found {facts.hidden} and {width}")  # fmt: skip
    return None


def plain_layers(target: Target, facts: Facts) -> str | None:
    """The model leaves these with the engine: see `model.skinny`."""
    if facts.lora:
        return "adapters are added to the engine's linear layers"
    if facts.batch_invariant:
        return "few rows may not be summed otherwise than many"
    return None


triton = needs(triton=">=3.6")
offer = offers_in(__name__)

kv = needs(kv_dtype=KV_DTYPES)


def steady(op: str, code: str) -> Offer:
    """A row whose kernels give a token the same bits in every batch."""
    return offer(op, "triton", code, accelerator, triton, invariant=True)


def varying(op: str, code: str, *requires: Predicate, fixed: str = ".invariant:") -> Offer:
    """A row with one code for speed and one, of the op's name in the module `fixed`, for that."""
    return offer(op, "triton", code, accelerator, triton, *requires, invariant=fixed + op)


OFFERS: tuple[Offer, ...] = (
    steady("rms_norm", ".norm:rms_norm"),
    steady("embed_norm", ".norm:embed_norm"),
    steady("embed_norm_chain", ".norm:embed_norm_chain"),
    steady("concat_norms", ".norm:concat_norms"),
    steady("conv_sources", ".short_conv:conv_sources"),
    varying("conv_residual_norm", ".short_conv:conv_residual_norm", two_ranks),
    varying("qkvr_prep", ".qkvr_prep:qkvr_prep", kv),
    varying("rel_attention", ".rel_attention:rel_attention", attention, kv,
            needs(head_dim=(16, 32, 64, 128)), fixed=".rel_attention_fixed:"),
    varying("gate_logits", ".experts:gate_logits"),
    steady("route", ".experts:route"),
    steady("swiglu", ".experts:swiglu"),
    varying("sink_experts", ".experts:sink_experts"),
    varying("gated_sinks", ".gated_sinks:gated_sinks"),
    varying("routed_experts", ".routed_experts:routed_experts", whole_blocks),
    varying("skinny_linear", ".skinny_linear:skinny_linear", plain_layers),
    steady("norm_gelu", ".towers:norm_gelu"),
    steady("dmel_embed_norm", ".towers:dmel_embed_norm"),
)  # fmt: skip
