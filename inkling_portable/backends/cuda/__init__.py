"""Offers of the cuda backend."""

from inkling_portable.registry import Facts, Offer, needs, offers_in
from inkling_portable.target import Target


def own_layer(target: Target, facts: Facts) -> str | None:
    """What only vLLM's layer of experts serves."""
    if facts.lora:
        return "adapters on experts need vLLM's own kernels"
    if facts.ep not in (1, facts.tp):
        return "experts over data-parallel ranks need vLLM's own layer"
    return None


offer = offers_in(__name__)
served = needs(dtype="bfloat16", head_dim=128, kv_dtype=("auto", "bfloat16"))
gluon = needs(triton=">=3.6,<3.7")
TRITON = "inkling_portable.backends.triton.rel_attention:rel_attention"
fork = needs(vllm=">=0.26,<0.34")

OFFERS: tuple[Offer, ...] = (
    # Gluon is young and changes: the versions in which this kernel compiles and was run.
    offer("rel_attention", "gluon", ".rel_attention_hopper:rel_attention", needs(arch="sm90"),
          gluon, served, when=".rel_attention_hopper:serves"),
    # The same provider for the calls that kernel leaves.
    offer("rel_attention", "gluon", TRITON, needs(arch="sm90"), gluon, served,
          only_if_asked=True),
    # Two rows of one provider: long prefills of global layers, and everything else, where our
    # Triton kernels are faster, so it is there to be asked for.
    offer("rel_attention", "fa4", ".rel_attention_fa4:composed", needs(arch="sm90"), fork, served,
          needs(page_size=(0, 128), triton=">=3.6"),
          when=".rel_attention_fa4:long_prefill"),
    offer("rel_attention", "fa4", ".rel_attention_fa4:modified", needs(arch="sm90"), fork, served,
          only_if_asked=True),
    offer("rel_attention", "vllm", ".incumbent:rel_attention", needs(arch=("sm90", "sm100")), fork,
          served, only_if_asked=True),
    # Weights that do not fit its chunks of 128 columns, and other dtypes, it hands to Triton's row.
    offer("routed_experts", "mma", ".routed_experts_mma:routed_experts",
          needs(arch=("sm90", "sm100", "sm103", "sm120"), weights=("nvfp4", "mxfp4"),
                dtype="bfloat16", triton=">=3.6"), own_layer),
)  # fmt: skip
