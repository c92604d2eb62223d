"""Kernels compiled side by side before they are needed, instead of one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


@contextmanager
def compiled_ahead(threads: int) -> Iterator[None]:
    """In the block, launches of this package's kernels compile, in `threads` threads, and do
    nothing else, those of vLLM's sampler too; all are ready when it ends. Others run as always.

    Results of ops inside are undefined: nothing may be done with them but to pass them on to ops.
    """
    from concurrent.futures import ThreadPoolExecutor

    import torch
    from triton import AsyncCompileMode
    from triton.runtime.jit import JITFunction

    from inkling_portable.backends.cuda import compiled

    launch, seen = JITFunction.run, set[tuple[Any, ...]]()
    kernels, device = list[Any](), torch.cuda.current_device()

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if not self.fn.__module__.startswith(("inkling_portable.", "vllm.v1.worker.gpu.sample")):
            return launch(self, *args, grid=grid, warmup=warmup, **kwargs)
        kind = (id(self), *map(_kind, args), *((k, _kind(v)) for k, v in kwargs.items()))
        if kind not in seen:  # Triton would look at every one of them at length
            seen.add(kind)
            kernels.append(launch(self, *args, grid=grid, warmup=True, **kwargs))
        return None

    def load(kernel: Any) -> None:
        # What Triton does before a first launch: it builds a C stub for each signature by gcc.
        with suppress(Exception):  # a launch does it again, and says what is wrong
            torch.cuda.set_device(device)
            getattr(kernel, "result", lambda: kernel)()._init_handles()

    try:
        with ThreadPoolExecutor(threads) as pool:
            JITFunction.run, compiled.ahead = compile_only, pool
            with AsyncCompileMode(pool):
                yield
            list(pool.map(load, kernels))
    finally:
        JITFunction.run, compiled.ahead = launch, None


def _kind(value: Any) -> Any:
    """What of an argument can make another kernel; finer than need be for large integers."""
    if hasattr(value, "data_ptr"):
        return value.dtype, value.data_ptr() % 16
    if isinstance(value, int) and not isinstance(value, bool):
        return value if value < 4096 else (value % 16, value >> 31)
    if hasattr(value, "block_shape"):
        return tuple(value.block_shape), str(value.base.dtype)
    return value
