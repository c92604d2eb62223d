"""vLLM's Gluon attention for gfx950, called as our row calls it, executed against the contract.

Its sources are those of the installed vLLM; of vLLM itself nothing is imported, which would find no
GPU and no Triton.
"""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language import core

from benchmarks import attention_cases
from benchmarks.attention_cases import GLOBAL, LOCAL, Case
from ci.cdna.launch import executing
from inkling_portable.agreement import disagreements
from inkling_portable.backends.rocm import incumbent
from inkling_portable.registry import Facts, SelectionError, choose, contract
from inkling_portable.target import Target

OP = contract("rel_attention")
FOLDER = "vllm.models.inkling.amd.ops.gluon"


@pytest.fixture(autouse=True)
def sources(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Bare packages around the two files, and what they take from `vllm.triton_utils`."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    root = Path(spec.origin).parent
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    parts = FOLDER.split(".")
    for i in range(len(parts)):
        package = ModuleType(".".join(parts[: i + 1]))
        package.__path__ = [str(root.joinpath(*parts[1 : i + 1]))]
        monkeypatch.setitem(sys.modules, package.__name__, package)
    tools: Any = ModuleType("vllm.triton_utils")
    tools.gl, tools.gluon, tools.tl, tools.triton = gl, gluon, tl, triton
    tools.aggregate = getattr(core, "aggregate", None) or core._aggregate
    monkeypatch.setitem(sys.modules, tools.__name__, tools)
    yield
    for name in [name for name in sys.modules if name.startswith(FOLDER + ".")]:
        del sys.modules[name]


def call(case: Case) -> dict[str, Any]:
    torch.manual_seed(0)
    return attention_cases.arguments(case, "cpu")


def with_gaps(arguments: dict[str, Any]) -> dict[str, Any]:
    """Two requests of one token, one of none between them, and a padding row full of NaN."""
    arguments["q_starts"] = torch.tensor([0, 1, 1, 2], dtype=torch.int32)
    arguments["q"][2:] = arguments["rel"][2:] = float("nan")
    return arguments


CALLS = {
    "global decode": lambda: call(Case("", "decode", lengths=(300, 70), page=64, **GLOBAL)),
    "local decode": lambda: call(Case("", "local", lengths=(700, 65), page=128, **LOCAL)),
    "padding and an empty request": lambda: with_gaps(
        call(Case("", "decode", lengths=(130, 64, 65), page=64, **GLOBAL))
    ),
    "chunks": lambda: call(Case("", "prefill", lengths=(200, 150), fresh=20, page=64, **GLOBAL)),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_engine_s_kernels_keep_the_contract(name: str) -> None:
    arguments = CALLS[name]()
    function = incumbent.gluon_extend if name == "chunks" else incumbent.gluon_decode
    with executing("gfx950") as executed:
        assert disagreements(OP, function, arguments) == []
    wanted = {"_rel_mha_extend_fp16"} if name == "chunks" else {
        "_rel_mha_decode_fp16", "_rel_mha_decode_reduce_fp16"}  # fmt: skip
    assert set(executed.kernels) == wanted


def test_calls_go_where_the_engine_sends_them() -> None:
    decode, chunks = CALLS["global decode"](), CALLS["chunks"]()
    assert incumbent.decodes(**decode) and not incumbent.extends(**decode)
    assert not incumbent.decodes(**chunks) and not incumbent.extends(**chunks)
    assert incumbent.extends(**(chunks | {"max_kv": incumbent.LONG}))
    assert not incumbent.extends(**(chunks | {"max_kv": incumbent.LONG, "window": 512}))
    assert not incumbent.decodes(**decode, k_scale=0.5)
    short = call(Case("", "decode", lengths=(70,), page=16, **GLOBAL))
    assert not incumbent.decodes(**short)


def test_it_is_offered_last_asked_for_and_switched() -> None:
    """Never chosen by itself, refused elsewhere, and vLLM's own switch is obeyed."""
    mi355x = Target.parse("mi355x+triton=3.6.0+vllm=0.33.0")

    def rows(facts: Facts, asked: bool) -> list[str]:
        requests = (("rel_attention", "gluon"),) if asked else ()
        return [d.verdict for d in choose(mi355x, facts, requests)
                if d.op == "rel_attention" and d.provider == "gluon"]  # fmt: skip

    assert rows(Facts(), asked=False) == ["only if asked"] * 3
    assert rows(Facts(), asked=True) == ["chosen"] * 3
    with pytest.raises(SelectionError, match="INKLING_GFX950_GLUON is not 1; set it to 1"):
        rows(Facts(gfx950_gluon=False), asked=True)
    with pytest.raises(SelectionError, match="needs gfx950"):
        choose(Target.parse("mi300x+triton=3.6.0+vllm=0.33.0"), Facts(),
               (("rel_attention", "gluon"),))  # fmt: skip
