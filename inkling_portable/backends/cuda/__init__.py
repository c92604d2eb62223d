"""Offers of the cuda backend."""

from inkling_portable.backends.evidence import MEASURED
from inkling_portable.backends.triton import plain_layers
from inkling_portable.registry import Facts, Offer, Predicate, needs, offers_in
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

LAMPORT = "inkling_portable.backends.triton.lamport:"
products = needs(dtype="bfloat16", triton=">=3.6")
ranks = needs(tp=(2, 4, 8), dtype="bfloat16", triton=">=3.6")


def by_flashinfer(target: Target, facts: Facts) -> str | None:
    """vLLM takes the kernel that `--moe-backend` names or refuses, so the row can promise it.

    Both round activations to NVFP4 and take a routing of our own; the others were not looked at.
    """
    asked, served = facts.moe_backend, ("flashinfer_trtllm", "flashinfer_cutlass")
    return (
        None if asked in served else f"needs --moe-backend {' or '.join(served)}; asked is {asked}"
    )


def measured(target: Target, facts: Facts) -> str | None:
    """Where the exchange was timed beside NCCL's and the engine's; four ranks were virtual ones."""
    if facts.tp == 2 and target.key in MEASURED.get(("conv_residual_norm", "lamport"), ()):
        return None
    return (f"nobody has timed this exchange of {facts.tp} ranks on {target.key}; ask with "
            "conv_residual_norm=lamport")  # fmt: skip


def timed(op: str) -> Predicate:
    """Where the products of few rows were timed for `op`."""

    def waits(target: Target, facts: Facts) -> str | None:
        known = target.key in MEASURED.get((op, "wgmma"), ())
        asking = f"ask with {op}=wgmma"
        return None if known else f"nobody has timed it on {target.key}; {asking}"

    return waits


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
    # Steps that are too long for their memory both hand to Triton's row.
    offer("conv_residual_norm", "lamport", LAMPORT + "conv_residual_norm",
          needs(arch=("sm90", "sm100", "sm103")), ranks, prepare=LAMPORT + "prepare",
          only_if_asked=measured),
    offer("conv_residual_norm", "rows", ".short_conv_rows:conv_residual_norm", needs(arch="sm90"),
          needs(tp=1, dtype="bfloat16", conv_taps=4, triton=">=3.6")),
    offer("conv_residual_norm", "vllm", ".incumbent:conv_residual_norm",
          needs(arch=("sm90", "sm100"), conv_taps=4), fork, ranks, prepare=".incumbent:prepare",
          only_if_asked=True),
    # Products of 2 to 128 rows; one row, more, and what does not fit they hand to Triton's rows.
    *(offer(op, "wgmma", f".few_rows:{op}", needs(arch="sm90"), products, *more,
            only_if_asked=timed(op))
      for op, *more in (("gate_logits",), ("sink_experts",), ("gated_sinks",),
                        ("skinny_linear", plain_layers))),
    # vLLM's layer of experts, as `engine`, by a kernel of FlashInfer's.
    offer("routed_experts", "flashinfer", "engine", needs(arch=("sm100", "sm103")),
          needs(weights="nvfp4", dtype="bfloat16", lora=False, batch_invariant=False), fork,
          needs(flashinfer_python=">=0.6.14,<0.8"), by_flashinfer, verified="signature only",
          note="vLLM's layer; activations are rounded to NVFP4"),
    # Weights that do not fit its chunks of 128 columns, and other dtypes, it hands to Triton's row.
    offer("routed_experts", "mma", ".routed_experts_mma:routed_experts",
          needs(arch=("sm90", "sm100", "sm103", "sm120"), weights=("nvfp4", "mxfp4"),
                dtype="bfloat16", triton=">=3.6"), own_layer),
)  # fmt: skip
