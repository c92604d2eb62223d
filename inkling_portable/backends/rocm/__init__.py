"""Offers of the rocm backend."""

from inkling_portable.registry import Facts, Offer, needs, offers_in
from inkling_portable.target import Target


def aiter_a16w4(target: Target, facts: Facts) -> str | None:
    """AITER with the 16-bit by 4-bit expert GEMM and plain SiLU, known by what its source offers.

    A described machine states a version at most, so there 0.1.16, the first with both, stands for
    it.
    """
    if not facts.rocm_aiter:
        return "VLLM_ROCM_USE_AITER=0 is set; unset it or ask for routed_experts=triton"
    if "aiter-a16w4" in target.features:
        return None
    return needs(amd_aiter=">=0.1.16")(target, facts)


offer = offers_in(__name__)

OFFERS: tuple[Offer, ...] = (
    offer("routed_experts", "aiter", ".routed_experts_aiter:routed_experts",
          needs(arch=("gfx942", "gfx950"), weights="mxfp4", dtype="bfloat16", lora=False,
                batch_invariant=False), aiter_a16w4,
          note="W4A16, with a routing table of our own", verified="signature only",
          only_if_asked=True),
    # vLLM has had its AMD kernels since 0.28.
    offer("rel_attention", "vllm", ".incumbent:rel_attention",
          needs(arch=("gfx942", "gfx950"), vllm=">=0.28,<0.34"),
          needs(dtype="bfloat16", head_dim=128, kv_dtype=("auto", "bfloat16")),
          only_if_asked=True),
)  # fmt: skip
