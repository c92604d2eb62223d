"""The registry's rules, on the real tables and on small made-up ones."""

import subprocess
import sys
import timeit
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from inkling_portable import registry
from inkling_portable.registry import (
    Facts,
    Offer,
    SelectionError,
    check_schema,
    choose,
    contract,
    needs,
    op_names,
    ordered_rows,
    parse_overrides,
    reference_warnings,
    resolve,
)
from inkling_portable.target import CHIPS, Target, TargetError

CPU = Target.parse("cpu")
LARGE = Facts()
H200 = Target.parse("h200+vllm=0.33.0+triton=3.6.0")


@pytest.fixture
def fake_tables(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Offer]]:
    """Empty tables for one op, `route`, to be filled by a test."""
    tables: dict[str, list[Offer]] = {name: [] for name in registry.TABLES}
    tables["reference"].append(
        Offer("route", "reference", "inkling_portable.backends.reference.experts:route")
    )
    monkeypatch.setattr(registry, "table", lambda name: tuple(tables[name]))
    registry.choose.cache_clear()
    registry.contract.cache_clear()
    registry._resolve.cache_clear()
    yield tables
    registry.choose.cache_clear()
    registry.contract.cache_clear()
    registry._resolve.cache_clear()


def chosen(target: Target, facts: Facts = LARGE, **requests: str) -> list[str]:
    decisions = choose(target, facts, tuple(sorted(requests.items())))
    return [d.provider for d in decisions if d.verdict == "chosen"]


# --- targets


@pytest.mark.parametrize("chip", CHIPS, ids=lambda c: c.name)
def test_chip_names_and_written_targets_agree(chip: object) -> None:
    named = Target.parse(chip.name)
    written = Target.parse(f"{chip.vendor}:{chip.arch}/{chip.compute_units}")
    assert named.key == written.key and named.shared_kib == written.shared_kib
    assert Target.parse(str(named)).key == named.key


def test_target_numbers() -> None:
    assert Target.parse("rocm:gfx942/304").shared_kib == 64
    assert Target.parse("rocm:gfx950").shared_kib == 160
    assert Target.parse("cuda:sm90/78").compute_units == 78
    assert Target.parse("h200").memory_gib == 141
    assert Target.parse("rocm:gfx942").warp == 64


@pytest.mark.parametrize(
    "text",
    [
        "",
        "gpu",
        "cuda",
        "cuda:gfx942",
        "rocm:sm90",
        "cuda:sm90/many",
        "cuda:sm90+tritn=3.6",
        "cpu+p2p=1",
        "h200+triton=new",
    ],
)
def test_unreadable_targets_are_sentences(text: str) -> None:
    with pytest.raises(TargetError, match="target "):
        Target.parse(text)


def test_detect_on_this_machine_needs_no_torch() -> None:
    code = (
        "import sys; from inkling_portable.target import Target; t = Target.detect();"
        "assert t.vendor == 'cpu', t; assert 'torch' not in sys.modules; print(t)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "torch=" in out.stdout


# --- needs


def test_needs_speak_in_sentences() -> None:
    facts = Facts(weights="mxfp4", lora=True)
    assert needs(arch=("sm90", "sm90"))(H200, facts) is None
    assert needs(arch="gfx950")(H200, facts) == "needs gfx950; this is sm90"
    assert (
        needs(weights=("nvfp4", "bf16"))(H200, facts)
        == "needs weights nvfp4 or bf16; asked is mxfp4"
    )
    assert needs(lora=False)(H200, facts) == "needs lora False; asked is True"
    assert needs(triton=">=3.7")(H200, facts) == "needs triton >=3.7; found 3.6.0"
    assert (
        needs(amd_aiter=">=0.1.16")(H200, facts)
        == "needs amd-aiter >=0.1.16, which is not installed"
    )
    assert (
        needs(features="p2p")(H200, facts) == "needs the feature p2p; this target does not state it"
    )
    assert needs(triton=">=3.6,<3.10", vllm="")(H200, facts) is None


def test_local_versions_and_open_versions_count() -> None:
    assert needs(vllm=">=0.32,<0.34")(Target.parse("cpu+vllm=0.32.0"), Facts()) is None
    local = replace(CPU, libs=(("vllm", "0.32.0+cpu"),))
    assert needs(vllm="==0.32.0")(local, Facts()) is None
    assert needs(triton=">=3.6")(Target.parse("h200+triton"), Facts()) is None


# --- order and choice


def test_rows_are_ordered_by_evidence(
    fake_tables: dict[str, list[Offer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "MEASURED", {("route", "triton"): ("cuda:sm90/132",)})
    fake_tables["cuda"] += [Offer("route", "vllm", "x:y"), Offer("route", "own", "x:y")]
    fake_tables["triton"] += [Offer("route", "triton", "x:y")]
    fake_tables["rocm"] += [Offer("route", "gluon", "x:y")]
    order = [row.provider for row in ordered_rows("route", H200)]
    assert order == ["triton", "vllm", "own", "reference"]
    b200 = [row.provider for row in ordered_rows("route", Target.parse("b200"))]
    assert b200 == ["vllm", "own", "triton", "reference"]
    assert [r.provider for r in ordered_rows("route", CPU)] == ["triton", "reference"]


def test_only_if_asked_and_later_rows(fake_tables: dict[str, list[Offer]]) -> None:
    fake_tables["cuda"] += [
        Offer("route", "asked", "x:y", only_if_asked=True),
        Offer("route", "own", "x:y", (needs(arch="sm100"),)),
    ]
    verdicts = {d.provider: d.verdict for d in choose(H200, Facts())}
    assert verdicts == {"asked": "only if asked", "own": "refused", "reference": "chosen"}
    assert chosen(H200, route="asked") == ["asked"]
    with pytest.raises(
        SelectionError, match=r"route=own cannot be obeyed.*needs sm100; this is sm90.*asked"
    ):
        choose(H200, Facts(), (("route", "own"),))


def test_star_skips_ops_that_the_provider_does_not_offer() -> None:
    decisions = choose(CPU, Facts(), (("*", "reference"),))
    assert {d.provider for d in decisions if d.verdict == "chosen"} == {"reference"}


def test_moe_backend_names_a_family(fake_tables: dict[str, list[Offer]]) -> None:
    fake_tables["reference"][0] = replace(fake_tables["reference"][0], op="routed_experts")
    fake_tables["engine"].append(
        Offer("routed_experts", "engine", "engine", (needs(arch="gfx950"),))
    )
    fake_tables["rocm"].append(
        Offer("routed_experts", "aiter", "x:y", (needs(arch=("gfx942", "gfx950")),))
    )
    fake_tables["rocm"].append(Offer("routed_experts", "own", "x:y"))
    aiter = Facts(moe_backend="aiter")
    assert chosen(Target.parse("mi300x"), aiter) == ["aiter"]
    assert chosen(Target.parse("mi355x"), aiter) == ["engine"]
    assert chosen(Target.parse("mi300x")) == ["aiter"]
    with pytest.raises(SelectionError, match="--moe-backend aiter cannot be obeyed"):
        choose(H200, aiter)


def test_when_rows_chain_and_must_end(fake_tables: dict[str, list[Offer]]) -> None:
    here = __name__
    fake_tables["cuda"].append(Offer("route", "few", f"{here}:route_few", when=f"{here}:one_row"))
    bound = resolve(H200, Facts()).route
    row = torch.zeros(1, 9)
    assert bound(row, torch.zeros(8), torch.ones(1), 2, 8.0) == "few"
    weights, ids, _ = bound(row.expand(2, -1), torch.zeros(8), torch.ones(1), 2, 8.0)
    assert ids.tolist() == [[0, 1], [0, 1]] and weights.shape == (2, 2)


def route_few(
    logits: Tensor, bias: Tensor, global_scale: Tensor, top_k: int, route_scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return "few"  # type: ignore[return-value]


def one_row(logits: Tensor, *_: object) -> bool:
    return logits.shape[0] == 1


def test_schema_drift_is_refused() -> None:
    def route(
        logits: Tensor, bias: Tensor, global_scale: Tensor, k: int, route_scale: float
    ) -> Tensor: ...

    with pytest.raises(SelectionError, match=r"schema of op route: 'top_k: int' became 'k: int'"):
        check_schema(contract("route"), route, "x:route")


# --- overrides


def test_overrides_first_speaker_wins() -> None:
    config = {"inkling_portable": {"rms_norm": "reference"}}
    assert parse_overrides(config, "route=reference") == {"rms_norm": "reference"}
    assert parse_overrides({}, "route=reference, rms_norm=reference") == {
        "route": "reference",
        "rms_norm": "reference",
    }
    assert parse_overrides({"inkling_portable": {"allow_nonfinite": True}}, "reference") == {
        "*": "reference"
    }
    assert parse_overrides(None, "off") == parse_overrides(None, None) == {}


@pytest.mark.parametrize(
    ("config", "env", "message"),
    [
        (
            {"inkling_portable": {"rmsnorm": "triton"}},
            None,
            "unknown op 'rmsnorm'; ops are rms_norm",
        ),
        ({"inkling_portable": {"route": "cutlass"}}, None, "route is offered by"),
        ({"inkling_portable": "triton"}, None, "found 'triton'"),
        ({}, "triton", "is not understood at 'triton'"),
        ({}, "route=", "is not understood"),
        ({}, "route=nope", "route is offered by"),
    ],
)
def test_unreadable_overrides_say_what_would_do(
    config: dict, env: str | None, message: str
) -> None:
    with pytest.raises(SelectionError, match=message):
        parse_overrides(config, env)


# --- binding


def test_resolved_calls_are_plain_functions_and_cached() -> None:
    ops = resolve(CPU, Facts())
    assert ops is resolve(CPU, Facts())
    assert ops.rms_norm is contract("rms_norm").reference
    assert ops.digest == resolve(CPU, Facts()).digest
    assert ops.routed_experts is contract("routed_experts").reference  # no engine on a bare target


def test_engine_row_binds_no_function() -> None:
    assert resolve(Target.parse("cpu+vllm=0.32.0"), Facts()).routed_experts is None


def route_nothing(
    logits: Tensor, bias: Tensor, global_scale: Tensor, top_k: int, route_scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return ()  # type: ignore[return-value]


def test_a_resolved_call_adds_at_most_an_attribute(fake_tables: dict[str, list[Offer]]) -> None:
    """At most 0.15 us over a plain call; the best of many rounds, so that noise cannot fail it."""
    fake_tables["cuda"].append(Offer("route", "free", f"{__name__}:route_nothing"))
    ops = resolve(H200, Facts())
    assert ops.route is sys.modules[__name__].route_nothing
    names = {"ops": ops, "plain": route_nothing}
    count = 20000
    plain, bound = (
        min(timeit.repeat(call, number=count, repeat=15, globals=names)) / count
        for call in ("plain(1, 2, 3, 4, 5)", "ops.route(1, 2, 3, 4, 5)")
    )
    assert bound - plain < 0.15e-6


def test_every_op_has_a_reference_with_a_schema() -> None:
    for name in op_names():
        op = contract(name)
        assert op.name == name
        assert op.reference.__doc__
        assert set(op.mutates) <= set(op.signature.parameters)
        torch.library.infer_schema(op.reference, mutates_args=op.mutates)


def test_slow_reference_on_an_accelerator_is_said() -> None:
    target = Target.parse("cuda:sm90/132")
    lines = reference_warnings(target, choose(target, Facts()))
    assert lines and all(line.startswith("on the slow reference: ") for line in lines)
    assert reference_warnings(CPU, choose(CPU, Facts())) == []
