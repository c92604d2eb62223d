"""Number formats of Inkling checkpoints: E2M1, E4M3, E8M0, and NVFP4, MXFP4 and FP8 built on them.

Pure torch, any device. Arithmetic runs in fp64 for fp64 input and in fp32 otherwise; a result is
then rounded to its dtype. Blocks run along the last dimension and must divide it. Two E2M1 codes
share a byte, the even column in the low nibble. Shapes name rows R, columns C and any leading
dimensions "..." (experts).
"""

from inkling_portable.formats.activations import ACTIVATION_FORMATS, fake_quantize
from inkling_portable.formats.codes import (
    ARRANGED,
    E2M1_VALUES,
    E4M3_VALUES,
    E4M3FNUZ_VALUES,
    E8M0_VALUES,
    arranged,
    as_stored,
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    encode_e2m1,
    encode_e4m3,
    pack_e2m1,
    unpack_e2m1,
)
from inkling_portable.formats.fp8 import (
    check_fp8,
    dequantize_fp8,
    fp8_to_fnuz,
    quantize_fp8_channel,
)
from inkling_portable.formats.mxfp4 import (
    MX_SCALE_RULES,
    MXFP4_BLOCK,
    check_mxfp4,
    dequantize_mxfp4,
    quantize_mxfp4,
)
from inkling_portable.formats.nvfp4 import (
    NVFP4_BLOCK,
    check_nvfp4,
    dequantize_nvfp4,
    quantize_nvfp4,
    row_global_scale,
    unify_global_scales,
)

__all__ = [
    "ACTIVATION_FORMATS",
    "ARRANGED",
    "E2M1_VALUES",
    "E4M3FNUZ_VALUES",
    "E4M3_VALUES",
    "E8M0_VALUES",
    "MXFP4_BLOCK",
    "MX_SCALE_RULES",
    "NVFP4_BLOCK",
    "arranged",
    "as_stored",
    "check_fp8",
    "check_mxfp4",
    "check_nvfp4",
    "decode_e2m1",
    "decode_e4m3",
    "decode_e8m0",
    "dequantize_fp8",
    "dequantize_mxfp4",
    "dequantize_nvfp4",
    "encode_e2m1",
    "encode_e4m3",
    "fake_quantize",
    "fp8_to_fnuz",
    "pack_e2m1",
    "quantize_fp8_channel",
    "quantize_mxfp4",
    "quantize_nvfp4",
    "row_global_scale",
    "unify_global_scales",
    "unpack_e2m1",
]
