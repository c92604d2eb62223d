"""Kernels written in CUDA C++: compiled at first use by the NVRTC that torch's wheels bring.

A source file stands beside its launcher; its macros fix the shape, so that each shape gets its own
kernel. Nothing here needs a CUDA toolkit or a C++ compiler. What was compiled is kept where Triton
keeps its own, so that a restart does not compile again.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import re
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import cache, cached_property, partial
from pathlib import Path

import torch
from torch import Tensor
from triton.runtime.cache import get_cache_manager

_SHARED_MOST = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in percent
_TOGETHER = 2  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE
_DEPENDENT = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


ahead: Executor | None = None
"""Compiles while kernels are only made ready; what Triton's would have written is not there then,
so that nothing is launched."""


class CompileError(RuntimeError):
    """NVRTC or the driver refused; the message has its words."""


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int),
                ("rest", ctypes.c_char * 60)]  # fmt: skip


class _Config(ctypes.Structure):
    _fields_ = [*((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
                ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)),
                ("count", ctypes.c_uint)]  # fmt: skip


_attributes = (_Attribute * 2)(_Attribute(_DEPENDENT, value=1), _Attribute(_TOGETHER, value=1))
# Where a launch's attributes begin, by whether it is a dependent one.
_begin = [ctypes.cast(ctypes.byref(_attributes, i * ctypes.sizeof(_Attribute)),
                      ctypes.POINTER(_Attribute)) for i in (1, 0)]  # fmt: skip


@cache
def nvrtc() -> ctypes.CDLL:
    """The run-time compiler: of the wheels that torch depends on, else the system's.

    Raises CompileError where there is none.
    """
    major = (torch.version.cuda or "13").split(".")[0]
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    for folder in (f"cu{major}", "cuda_nvrtc"):
        for root in roots:
            found = root / folder / "lib" / f"libnvrtc.so.{major}"
            if found.is_file():
                # NVRTC opens its built-ins by their bare name, which finds them once loaded.
                for part in sorted(found.parent.glob(f"libnvrtc-builtins.so.{major}*")):
                    ctypes.CDLL(str(part), ctypes.RTLD_GLOBAL)
                return ctypes.CDLL(str(found))
    try:
        return ctypes.CDLL(f"libnvrtc.so.{major}")
    except OSError as error:
        raise CompileError(
            f"needs libnvrtc.so.{major} to compile CUDA kernels; found none ({error}); install "
            "nvidia-cuda-nvrtc or ask for triton where `explain` shows mma, rows or wgmma"
        ) from None


def compile_source(source: str, macros: tuple[tuple[str, int], ...], arch: str) -> bytes:
    """The cubin of CUDA source for `arch`, such as "sm_90". Raises CompileError with the log."""
    library, program = nvrtc(), ctypes.c_void_p()
    library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
    options = [f"--gpu-architecture={arch}", "--std=c++17", *(f"-D{k}={v}" for k, v in macros)]
    encoded = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
    failed = library.nvrtcCompileProgram(program, len(options), encoded)

    def text(size: str, get: str) -> bytes:
        length = ctypes.c_size_t()
        getattr(library, size)(program, ctypes.byref(length))
        buffer = ctypes.create_string_buffer(length.value)
        getattr(library, get)(program, buffer)
        return buffer.raw

    try:
        if failed:
            log = text("nvrtcGetProgramLogSize", "nvrtcGetProgramLog").decode(errors="replace")
            raise CompileError(f"NVRTC cannot compile for {arch}: {log.strip(chr(0)).strip()}")
        return text("nvrtcGetCUBINSize", "nvrtcGetCUBIN")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def cubin_of(path: Path, macros: tuple[tuple[str, int], ...], arch: str) -> bytes:
    """A source file compiled, now or by a process before this one."""
    source, version = source_of(path), (ctypes.c_int * 2)()
    nvrtc().nvrtcVersion(ctypes.byref(version), ctypes.byref(version, ctypes.sizeof(ctypes.c_int)))
    key = hashlib.sha256(repr((source, macros, arch, *version)).encode()).hexdigest()
    kept, name = get_cache_manager(key), f"{path.stem}.cubin"
    if found := kept.get_file(name):
        return Path(found).read_bytes()
    cubin = compile_source(source, macros, arch)
    kept.put(cubin, name)
    return cubin


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int, doing: str) -> None:
    if status:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(status, ctypes.byref(name))
        raise CompileError(f"the CUDA driver failed in {doing}: {(name.value or b'?').decode()}")


class Values:
    """Arguments of a launch, 64 bits each, of which a kernel reads as many as it declares."""

    def __init__(self, numbers: list[int]) -> None:
        self._block = (ctypes.c_longlong * len(numbers))(*numbers)
        first = ctypes.addressof(self._block)
        places = array("Q", range(first, first + 8 * len(numbers), 8))
        self.pointers = (ctypes.c_void_p * len(numbers)).from_buffer(places)


def packed(args: Sequence[Tensor | int | None], wide: int) -> Values:
    """Arguments as a launch wants them: see `Kernel.launch`. Its pointers are good while it is."""
    return Values([a if isinstance(a, int) else 0 if a is None else a.data_ptr() for a in args])


class Kernel:
    """One kernel of one device, loaded when it is first used."""

    def __init__(self, cubin: Callable[[], bytes], name: str, device: int) -> None:
        self._cubin, self._name, self._device = cubin, name, device
        self._shared = 0

    @cached_property
    def _function(self) -> ctypes.c_void_p:
        cubin, module, function = self._cubin(), ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(self._device):
            torch.cuda.current_stream().synchronize()  # the device's context exists from here on
            _check(_driver().cuModuleLoadData(ctypes.byref(module), cubin), f"loading {self._name}")
        _check(_driver().cuModuleGetFunction(ctypes.byref(function), module, self._name.encode()),
               f"finding {self._name}")  # fmt: skip
        return function

    def _ask_for(self, shared: int) -> None:
        if shared > self._shared:
            for attribute, value in ((_SHARED_MOST, shared), (_CARVEOUT, 100)):
                _check(_driver().cuFuncSetAttribute(self._function, attribute, value),
                       f"asking for {shared} bytes of shared memory")  # fmt: skip
            self._shared = shared

    def resident(self, threads: int, shared: int) -> int:
        """How many blocks an SM holds at once; 0 while kernels are only made ready."""
        if ahead is not None:
            return 0
        self._ask_for(shared)
        count = ctypes.c_int()
        _check(_driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(
            ctypes.byref(count), self._function, threads, ctypes.c_size_t(shared)),
            "counting blocks of an SM")  # fmt: skip
        return count.value

    def launch(self, grid: tuple[int, int], threads: int, args: Sequence[Tensor | int | None],
               wide: int, dependent: bool, shared: int = 0, together: bool = False
               ) -> None:  # fmt: skip
        """Launch on the current stream.

        Tensors go as pointers, None as a null pointer, numbers as 32 bits and the last `wide` of
        them as 64 bits. A `dependent` kernel may start before its predecessor on the stream ends;
        `shared` bytes are each block's beside what its source names. Blocks of a kernel that is
        launched `together` run at the same time, or none does.
        """
        if ahead is not None:
            return
        values = packed(args, wide)
        self._ask_for(shared)
        config = _Config(
            *grid, 1, threads, 1, 1, shared, torch.cuda.current_stream().cuda_stream,
            _begin[dependent], int(dependent) + int(together),
        )  # fmt: skip
        start = _driver().cuLaunchKernelEx
        status = start(ctypes.byref(config), self._function, values.pointers, None)
        _check(status, "launching a kernel")


def arch_of(device: int | None = None) -> str:
    """What a device's kernels are compiled for; Hopper's own instructions need its own target."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")


def source_of(path: Path) -> str:
    """A source file with what it includes of the files beside it."""
    return re.sub(r'^#include "(.*)"$', lambda m: source_of(path.parent / m[1]),
                  path.read_text(), flags=re.MULTILINE)  # fmt: skip


@cache
def kernel(path: Path, name: str, macros: tuple[tuple[str, int], ...], device: int) -> Kernel:
    """Kernel `name` of a source file for one device; it is compiled once."""
    work = partial(cubin_of, path, macros, arch_of(device))
    return Kernel(work if ahead is None else ahead.submit(work).result, name, device)
