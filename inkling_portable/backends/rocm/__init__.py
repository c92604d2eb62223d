"""Offers of the rocm backend."""

from inkling_portable.registry import Facts, Offer, needs, offers_in
from inkling_portable.target import Target


def aiter_a16w4(target: Target, facts: Facts) -> str | None:
    """AITER with the 16-bit by 4-bit expert GEMM and plain SiLU, known by what its source offers.

    A described machine states a version at most, so there 0.1.16, the first with both, stands for
    it.
    """
    missing = needs(amd_aiter=">=0.1.16")(target, facts)
    if missing and "aiter-a16w4" not in target.features:
        return missing
    return None if facts.rocm_aiter is not False else (
        "VLLM_ROCM_USE_AITER or VLLM_ROCM_USE_AITER_MOE is set to off; unset it or ask for "
        "routed_experts=triton")  # fmt: skip


def switched_on(target: Target, facts: Facts) -> str | None:
    """vLLM's own switch holds for its kernels wherever they are called from."""
    if not facts.gfx950_gluon:
        return "INKLING_GFX950_GLUON is not 1; set it to 1 or ask for rel_attention=triton"
    return None


LAMPORT = "inkling_portable.backends.triton.lamport:"


def proved_memory(target: Target, facts: Facts) -> str | None:
    """What the exchange without barriers stands on; nothing on a machine states it by itself."""
    if "fine-grained" in target.features:
        return None
    return ("needs proof of whole stores, at system scope, into other GPUs' fine-grained memory; "
            "found none; use conv_residual_norm=triton")  # fmt: skip


offer = offers_in(__name__)
TRITON = "inkling_portable.backends.triton.rel_attention:rel_attention"
gluon = (needs(arch="gfx950", vllm=">=0.28,<0.34", triton=">=3.6"), switched_on,
         needs(dtype="bfloat16", head_dim=(64, 128), page_size=(0, 64, 128, 256),
               kv_dtype=("auto", "bfloat16")))  # fmt: skip

OFFERS: tuple[Offer, ...] = (
    offer("routed_experts", "aiter", ".routed_experts_aiter:routed_experts",
          needs(arch=("gfx942", "gfx950"), weights="mxfp4", dtype="bfloat16", lora=False,
                batch_invariant=False), aiter_a16w4,
          note="W4A16, with a routing table of our own", verified="executed",
          only_if_asked=True),
    offer("conv_residual_norm", "lamport", LAMPORT + "conv_residual_norm", proved_memory,
          needs(tp=(2, 4, 8), dtype="bfloat16", triton=">=3.6"), prepare=LAMPORT + "prepare",
          only_if_asked=True),
    # vLLM has had its AMD kernels since 0.28.
    offer("rel_attention", "vllm", ".incumbent:rel_attention",
          needs(arch=("gfx942", "gfx950"), vllm=">=0.28,<0.34"),
          needs(dtype="bfloat16", head_dim=128, kv_dtype=("auto", "bfloat16")),
          only_if_asked=True),
    # vLLM's Gluon kernels, each for the calls that vLLM gives it, and Triton for the others. Both
    # public launch recipes found serving faster without them.
    offer("rel_attention", "gluon", ".incumbent:gluon_decode", *gluon,
          when=".incumbent:decodes", note="single new tokens", only_if_asked=True,
          verified="executed"),
    offer("rel_attention", "gluon", ".incumbent:gluon_extend", *gluon,
          when=".incumbent:extends", note="chunks of global layers, from 8,192 tokens on",
          only_if_asked=True, verified="executed"),
    offer("rel_attention", "gluon", TRITON, *gluon, note="all other calls, by Triton",
          only_if_asked=True),
)  # fmt: skip
