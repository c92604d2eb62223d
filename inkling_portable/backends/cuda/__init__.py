"""Offers of the cuda backend."""

from inkling_portable.registry import Offer, needs, offers_in

offer = offers_in(__name__)

OFFERS: tuple[Offer, ...] = (
    # Weights that do not fit its chunks of 128 columns, and other dtypes, it hands to Triton's row.
    offer("routed_experts", "mma", ".routed_experts_mma:routed_experts",
          needs(arch=("sm90", "sm100", "sm103", "sm120"), weights=("nvfp4", "mxfp4"),
                dtype="bfloat16", triton=">=3.6")),
)  # fmt: skip
