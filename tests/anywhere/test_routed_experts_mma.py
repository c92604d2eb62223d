"""The routed experts' CUDA kernels on a CPU: source and launcher as they are, and the contract.

`tests/cuda_on_cpu.hpp` runs a block's threads as fibers; a C++ compiler builds each kernel with the
macros that its launcher chose.
"""

import ctypes
import subprocess
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from inkling_portable.agreement import disagreements
from inkling_portable.backends.cuda import OFFERS, compiled
from inkling_portable.backends.cuda import routed_experts_mma as module
from inkling_portable.backends.triton._common import launching_for
from inkling_portable.backends.triton.routed_experts import Matrix
from inkling_portable.formats import ARRANGED, arranged
from inkling_portable.registry import Facts, check_schema, contract
from inkling_portable.target import Target
from tests.anywhere.test_triton_experts import case

OP = contract("routed_experts")
OFFER = next(row for row in OFFERS if row.op == "routed_experts" and row.provider == "mma")
HOST = Path(__file__).parents[1] / "cuda_on_cpu.hpp"


class HostKernel:
    """What `compiled.Kernel` is on a GPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        library.launch.restype = None

    def launch(self, grid: tuple[int, int], threads: int, args: Any, wide: int, dependent: bool,
               shared: int = 0, together: bool = False) -> None:  # fmt: skip
        assert shared <= 227 << 10
        values = compiled.packed(args, wide)
        self.library.launch(*grid, threads, values.pointers)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., HostKernel]:
    folder = tmp_path_factory.mktemp("kernels")

    @cache
    def built(path: Path, name: str, macros: tuple[tuple[str, int], ...], device: int | None
              ) -> HostKernel:  # fmt: skip
        library = folder / f"{abs(hash((name, macros)))}.so"
        defines = [f"-D{k}={v}" for k, v in macros]
        defines += ["-DON_HOST", f"-DNAME={name}", f'-DSOURCE="{path}"']
        subprocess.run(["g++", "-x", "c++", "-O1", "-w", "-std=c++17", "-shared", "-fPIC",
                        *defines, str(HOST), "-o", str(library)], check=True)  # fmt: skip
        return HostKernel(ctypes.CDLL(str(library)))

    return built


@pytest.fixture
def provider(build: Callable[..., HostKernel], monkeypatch: pytest.MonkeyPatch
             ) -> Callable[..., Tensor]:  # fmt: skip
    monkeypatch.setattr(module, "kernel", build)
    # No case here may be handed on.
    monkeypatch.setattr(module.triton, "routed_experts", None)
    function = OFFER.load()
    check_schema(OP, function, OFFER.code)
    return function


Settings = module.Stream


@pytest.mark.parametrize(("form", "rows", "hidden", "inner", "settings", "buffers"), [
    ("nvfp4", 1, 512, 256, Settings(4, 2, 1, 256, 1, 256, 3, 2), 9),  # warps share k
    ("nvfp4", 4, 512, 512, Settings(4, 4, 1, 512, 1, 256, 2, 1, 2), 2),  # rows come one by one
    ("mxfp4", 40, 512, 384, Settings(3, 1, 1, 512, 2, 384, 2, 1), 1),  # tiles of an expert
    ("mxfp4", 9, 512, 512, Settings(2, 1, 2, 512, 2, 512, 2, 2), 2),
    ("nvfp4", 31, 128, 384, None, 0),  # sorted beforehand, an odd number of chunks
    ("mxfp4", 60, 256, 128, None, 0),
])  # fmt: skip
def test_contract(provider: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch, form: str,
                  rows: int, hidden: int, inner: int, settings: module.Stream | None, buffers: int
                  ) -> None:  # fmt: skip
    """Every path, with foreign ids, gate and up rows in turn or as two halves, experts of a pair of
    tokens and of more, sums of all slabs, of two or of one at a time."""
    use(monkeypatch, settings)
    monkeypatch.setattr(module.Stream, "buffers", lambda *_: buffers)
    arguments = case(form, rows, 6, 3, hidden, inner, seed=rows)
    arguments["ids"][0] = torch.tensor([-1, 6, 2])
    arguments["interleaved"] = rows % 2 == 1
    assert not disagreements(OP, provider, arguments)
    assert_arranged_codes_change_no_bit(provider, arguments)


def assert_arranged_codes_change_no_bit(
    provider: Callable[..., Tensor], arguments: dict[str, Any]
) -> None:
    """Nor is the kernel the same; the contract reads such codes too."""
    there = arguments | {name: arranged(arguments[name]) for name in ("w13", "w2")}
    there["format"] += ARRANGED
    assert torch.equal(provider(**there), provider(**arguments))
    assert torch.equal(OP.reference(**there), OP.reference(**arguments))
    assert not torch.equal(provider(**there | {"format": arguments["format"]}), provider(**there))


def use(monkeypatch: pytest.MonkeyPatch, settings: module.Stream | None) -> None:
    """The one launch for a few tokens with these settings and nothing else, or what many take."""
    monkeypatch.setattr(module, "few_most", lambda _: 0 if settings is None else 1000)
    monkeypatch.setattr(module, "stream_settings", lambda *_: (settings,))
    monkeypatch.setattr(module, "compute_units", lambda: 5)
    if settings is not None:
        monkeypatch.setattr(module, "make_plan", None)


def test_settings_of_every_size(
    provider: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What longer steps are given."""
    arguments, many = case("nvfp4", 30, 6, 3, 1024, 128), module.many_tiles
    use(monkeypatch, None)
    for tokens in (100, 1024, 4096):
        monkeypatch.setattr(module, "many_tiles", lambda _, is_up, n=tokens: many(n, is_up))
        assert not disagreements(OP, provider, arguments)


@pytest.mark.parametrize(
    ("hidden", "inner"), [(6144, 384), (6144, 768), (4096, 1024), (4096, 2048)]
)
def test_served_shapes_stream(hidden: int, inner: int) -> None:
    """In both formats some settings fit, up to the most tokens."""
    for block in (16, 32):
        up, down = (
            Matrix(torch.empty(8, rows, columns // 2, dtype=torch.uint8, device="meta"),
                   torch.empty(8, rows, columns // block, dtype=torch.uint8), None,
                   "nvfp4" if block == 16 else "mxfp4", rows, columns)
            for rows, columns in ((2 * inner, hidden), (hidden, inner))
        )  # fmt: skip
        for tokens in (1, 9, 36, module.few_most(inner)):
            settings = module.stream_settings(tokens, hidden, inner)
            assert any(one.shared(up, down, 6 * tokens) for one in settings), (block, tokens)
            with launching_for(Target.parse("rtxpro6000")):  # 100 KiB, not 228
                wanted = [one.shared(up, down, 6 * tokens) for one in settings]
            assert max(wanted) < 99 << 10


def test_row_gains_and_all_tokens_on_the_same_experts(
    provider: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A global scale for each row; experts that nobody chose; launches that find ten tokens."""
    use(monkeypatch, Settings(4, 2, 1, 256, 1, 256, 2, 1))
    arguments = case("nvfp4", 10, 40, 3, 256, 256)
    arguments["ids"][:] = torch.tensor([7, 0, 39])
    for name in ("w13_global", "w2_global"):
        rows = arguments[name.replace("global", "scale")].shape[1]
        arguments[name] = arguments[name].view(40, 1) * torch.linspace(0.5, 2, rows)
    assert not disagreements(OP, provider, arguments)


def test_steps_run_in_parts_that_change_no_bit(
    provider: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts by output columns and by tokens; tokens in any order."""
    for settings in (None, Settings(4, 1, 1, 256, 1, 256, 2, 1)):
        use(monkeypatch, settings)
        arguments = case("nvfp4", 9, 6, 3, 256, 256)
        plain = provider(**arguments)
        order = torch.randperm(9)
        moved = {k: v[order] if k in ("x", "ids", "weights") else v for k, v in arguments.items()}
        assert torch.equal(provider(**moved), plain[order])
        monkeypatch.setattr(module, "PARTS_BYTES", 9 * 3 * 128 * 4)
        assert torch.equal(provider(**arguments), plain)
        monkeypatch.setattr(module, "INNER_BYTES", 4 * 3 * 256 * 2)
        assert torch.equal(provider(**arguments), plain)


def test_no_part_is_longer_than_a_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """One choice of a narrow expert leaves room for more tokens than a grid's second axis has."""
    parts: list[int] = []
    monkeypatch.setattr(module, "_run", lambda x, *_: parts.append(len(x)))
    monkeypatch.setattr(module.wgmma, "takes", lambda *_: False)
    arguments = case("nvfp4", 1, 6, 1, 128, 128)
    OFFER.load()(**{k: v.expand(70_000, -1) if k in ("x", "ids", "weights") else v
                    for k, v in arguments.items()})  # fmt: skip
    assert parts == [65_532, 4_468]


@pytest.mark.parametrize(("hidden", "inner"), [(6144, 384), (4096, 256), (4096, 128), (6144, 3072)])
def test_no_step_needs_more_memory_than_the_longest(
    monkeypatch: pytest.MonkeyPatch, hidden: int, inner: int
) -> None:
    """The engine counts that of the longest step it allows, and gives caches what is left. Parts
    take kernels as a step of their length would, and their ids start as a whole tensor does."""
    parts: list[tuple[int, bool]] = []

    def taken(hopper: bool, x: Tensor, ids: Tensor, *_: Any) -> None:
        assert ids.storage_offset() * ids.element_size() % 16 == 0
        parts.append((len(x), hopper))

    monkeypatch.setattr(module, "_run", partial(taken, False))
    monkeypatch.setattr(module.wgmma, "run", partial(taken, True))
    monkeypatch.setattr(module.torch.cuda, "get_device_capability", lambda *_: (9, 0))

    shapes = (256, 2 * inner, hidden), (256, hidden, inner)
    w, scales = (
        [torch.empty(e, rows, columns // n, dtype=torch.uint8, device="meta")
         for e, rows, columns in shapes]
        for n in (2, 32)
    )  # fmt: skip

    def memory(tokens: int) -> int:
        """Bytes beside the output: what lies between the products, and what the second writes."""
        parts.clear()
        x = torch.empty(tokens, hidden, dtype=torch.bfloat16, device="meta")
        ids, weights = (torch.empty(tokens, 6, dtype=t, device="meta") for t in (torch.int32, None))
        OFFER.load()(x, ids, weights, *w, *scales, None, None, "mxfp4", "bf16", True)
        assert sum(rows for rows, _ in parts) == tokens
        assert [hopper for _, hopper in parts] == [rows > 256 for rows, _ in parts]
        return max(6 * rows * (2 * inner + 2 * hidden * hopper) for rows, hopper in parts)

    needs = [memory(n) for n in (8192, 8644, 8648, 8900, 14_336, 14_340, 16_384, 17_289, 40_000)]
    assert needs == sorted(needs)


def test_what_the_kernels_do_not_take_goes_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[str] = []

    def triton(*args: Any) -> Tensor:
        handed.append(args[9])
        return args[0]

    monkeypatch.setattr(module.triton, "routed_experts", triton)
    monkeypatch.setattr(module, "kernel", None)
    odd = case("nvfp4", 2, 6, 3, 128, 128)
    odd["x"] = torch.zeros(2, 132, dtype=torch.bfloat16)[:, 4:]
    for arguments in (case("fp8", 2, 6, 3, 128, 128), case("nvfp4", 2, 6, 3, 160, 128),
                      case("mxfp4", 2, 6, 3, 128, 96), odd,
                      case("nvfp4", 2, 6, 3, 128, 128, torch.float32),
                      case("nvfp4", 2, 6, 3, 160, 128) | {"format": "nvfp4-arranged"}):  # fmt: skip
        OFFER.load()(**arguments)
    assert handed == ["fp8", "nvfp4", "mxfp4", "nvfp4", "nvfp4", "nvfp4-arranged"]


def test_the_row_needs_an_nvidia_chip_and_4_bit_weights() -> None:
    h200 = Target.parse("h200+triton=3.6.0")
    assert OFFER.refusal(h200, Facts(weights="nvfp4", tp=8)) is None
    assert OFFER.refusal(h200, Facts(weights="fp8")) == "needs weights nvfp4 or mxfp4; asked is fp8"
    assert "adapters" in (OFFER.refusal(h200, Facts(weights="nvfp4", lora=True)) or "")
    assert "data-parallel" in (OFFER.refusal(h200, Facts(weights="nvfp4", tp=2, ep=4)) or "")
    assert "needs sm90" in (OFFER.refusal(Target.parse("cuda:sm80"), Facts(weights="nvfp4")) or "")
