"""Repairs of Triton's CPU interpreter, so that it computes what chips compute.

Three faults of Triton 3.6 to 3.9: narrowing float32 to bfloat16 cuts bits off, where NVIDIA and AMD
chips (and torch) round to nearest even; a `tl.dot` of bfloat16 multiplies the bit patterns as
integers; and 8-bit floats lose their NaN in one direction and are rounded wrongly in the other.
Kernels are written for chips, so the interpreter is repaired and not the kernels.
"""

from typing import Any

import numpy as np
import torch


def repair() -> None:
    """Replace the conversions in Triton's interpreter; may be called more than once."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    if getattr(builder.cast_impl, "repaired", False):
        return
    cast, dot, fp_to_fp = builder.cast_impl, builder.create_dot, builder.create_fp_to_fp
    eight = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e4b8: torch.float8_e4m3fnuz}

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        kinds = (src.dtype.scalar, dst_type.scalar)
        if kinds == (tl.float32, tl.bfloat16):
            values = torch.from_numpy(np.ascontiguousarray(src.data)).to(torch.bfloat16)
            data = values.view(torch.int16).numpy().view(np.uint16)
        elif kinds == (tl.bfloat16, tl.float32):
            data = (src.data.astype(np.uint32) << 16).view(np.float32)
        else:
            return cast(self, src, dst_type)
        return interpreter.TensorHandle(data.reshape(src.data.shape), dst_type.scalar)

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        narrow, wide = src.dtype.scalar, dst_type.scalar
        if narrow in eight and wide in (tl.float32, tl.bfloat16, tl.float16):
            codes = torch.from_numpy(np.ascontiguousarray(src.data)).view(eight[narrow])
            values = interpreter.TensorHandle(codes.float().numpy(), tl.float32)
            return values if wide == tl.float32 else cast_impl(self, values, dst_type)
        if wide in eight and narrow == tl.float32:
            values = torch.from_numpy(np.ascontiguousarray(src.data)).to(eight[wide])
            return interpreter.TensorHandle(values.view(torch.uint8).numpy(), wide)
        return fp_to_fp(self, src, dst_type, rounding_mode)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        wide = [
            cast_impl(self, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)
        ]
        return dot(self, *wide, *rest)

    cast_impl.repaired = True  # type: ignore[attr-defined]
    builder.cast_impl = cast_impl
    builder.create_dot = create_dot
    builder.create_fp_to_fp = create_fp_to_fp
