"""The contracts: every op of the model, its arithmetic, inputs and tolerance, one file per area."""

from inkling_portable.registry import KV_DTYPES, Offer, needs, offers_in

offer = offers_in(__name__)
kv = needs(kv_dtype=KV_DTYPES)

OFFERS: tuple[Offer, ...] = (
    offer("rms_norm", "reference", ".norm:rms_norm"),
    offer("embed_norm", "reference", ".norm:embed_norm"),
    offer("embed_norm_chain", "reference", ".norm:embed_norm_chain"),
    offer("concat_norms", "reference", ".norm:concat_norms"),
    offer("conv_sources", "reference", ".short_conv:conv_sources", invariant=True),
    offer("conv_residual_norm", "reference", ".short_conv:conv_residual_norm"),
    offer("qkvr_prep", "reference", ".attention:qkvr_prep", kv),
    offer("rel_attention", "reference", ".attention:rel_attention", kv),
    offer("gate_logits", "reference", ".experts:gate_logits"),
    offer("route", "reference", ".experts:route"),
    offer("swiglu", "reference", ".experts:swiglu"),
    offer("sink_experts", "reference", ".experts:sink_experts"),
    offer("gated_sinks", "reference", ".experts:gated_sinks"),
    offer("routed_experts", "reference", ".experts:routed_experts"),
    offer("skinny_linear", "reference", ".linear:skinny_linear"),
    offer("norm_gelu", "reference", ".towers:norm_gelu"),
    offer("dmel_embed_norm", "reference", ".towers:dmel_embed_norm"),
)
