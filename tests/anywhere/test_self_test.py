"""The start-up self-test, on Triton's interpreter and on kernels with planted faults."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from inkling_portable import registry, self_test
from inkling_portable.backends.reference.experts import swiglu as right
from inkling_portable.registry import Facts, Offer, SelectionError, choose
from inkling_portable.target import Target

MACHINE = Target.parse("cpu+triton=3.9.0+torch=2.13.0+interpret")
FACTS = Facts()
HERE = "tests.anywhere.test_self_test"
calls: list[str] = []


def good(gate_up: Tensor, interleaved: bool, weight: Tensor | None) -> Tensor:
    calls.append("good")
    return right(gate_up, interleaved, weight)


def slightly_wrong(gate_up: Tensor, interleaved: bool, weight: Tensor | None) -> Tensor:
    calls.append("slightly_wrong")
    result = right(gate_up, interleaved, weight)
    result[-1, -1] *= 1.25
    return result


def not_finite(gate_up: Tensor, interleaved: bool, weight: Tensor | None) -> Tensor:
    result = right(gate_up, interleaved, weight)
    result[0] = float("nan")
    return result


def crashes(gate_up: Tensor, interleaved: bool, weight: Tensor | None) -> Tensor:
    raise RuntimeError("no kernel image is available\nfor execution")


def choosy(gate_up: Tensor, interleaved: bool, weight: Tensor | None) -> Tensor:
    """Serves plain blocks only and says so, as kernels with narrower needs do."""
    if interleaved or weight is not None:
        raise ValueError("gate_up needs gate before up; use another provider")
    calls.append("choosy")
    return right(gate_up, interleaved, weight)


def refuses(gate_up: Tensor, interleaved: bool, weight: Tensor | None) -> Tensor:
    raise ValueError("gate_up needs another colour; paint it")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.delenv(self_test.VARIABLE, raising=False)
    self_test.run.cache_clear()
    calls.clear()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces all tables: swiglu is offered by the named functions in order, then reference."""

    def clear() -> None:
        for cached in (registry.choose, registry.contract, registry._resolve, self_test.run):
            cached.cache_clear()

    def offer(*names: str) -> None:
        reference = "inkling_portable.backends.reference.experts:swiglu"
        rows = {
            "triton": tuple(Offer("swiglu", name, f"{HERE}:{name}") for name in names),
            "reference": (Offer("swiglu", "reference", reference),),
        }
        for module in (registry, self_test):
            monkeypatch.setattr(module, "table", lambda name: rows.get(name, ()))
        clear()

    clear()
    yield offer
    clear()


def chosen(outcome: self_test.Outcome, **requests: str) -> str:
    facts = replace(FACTS, failed=outcome.failed)
    decisions = choose(MACHINE, facts, tuple(sorted(requests.items())))
    return next(d.provider for d in decisions if d.verdict == "chosen")


def test_every_kernel_agrees_on_this_machine_and_is_remembered() -> None:
    """The real tables, in the interpreter; the second start reads what the first one wrote."""
    first = self_test.run(MACHINE, FACTS)
    kernels = {d.op for d in choose(MACHINE, FACTS)
               if d.verdict == "chosen" and d.provider == "triton"}  # fmt: skip
    assert len(kernels) > 10
    assert (first.failed, first.agreed, first.remembered) == ((), len(kernels), 0)
    self_test.run.cache_clear()
    again = self_test.run(MACHINE, FACTS)
    assert (again.failed, again.agreed, again.remembered) == ((), len(kernels), len(kernels))
    assert again.seconds < 3
    assert str(again).startswith(f"self-test: {len(kernels)} kernels agree with their contracts (")


@pytest.mark.parametrize("name", ["slightly_wrong", "not_finite", "crashes", "refuses"])
def test_a_default_that_fails_gives_way(name: str, kernels: Callable[..., None]) -> None:
    kernels(name, "good")
    outcome = self_test.run(MACHINE, FACTS)
    assert chosen(outcome) == "good" and outcome.agreed == 1
    decisions = choose(MACHINE, replace(FACTS, failed=outcome.failed))
    refused = next(d for d in decisions if d.provider == name)
    assert refused.verdict == "refused" and "failed its self-test on this machine" in refused.reason
    assert "\n" not in refused.reason and name in str(outcome)


def test_one_that_was_asked_for_stops_with_a_sentence(kernels: Callable[..., None]) -> None:
    kernels("slightly_wrong", "good")
    requests = (("swiglu", "slightly_wrong"),)
    outcome = self_test.run(MACHINE, FACTS, requests)
    with pytest.raises(SelectionError, match="swiglu=slightly_wrong cannot be obeyed") as caught:
        chosen(outcome, swiglu="slightly_wrong")
    assert "failed its self-test" in str(caught.value) and "good" in str(caught.value)
    assert "good" not in calls, "nothing that was not asked for is tried"


def test_both_may_fail(kernels: Callable[..., None]) -> None:
    kernels("slightly_wrong", "crashes")
    outcome = self_test.run(MACHINE, FACTS)
    assert chosen(outcome) == "reference" and len(outcome.failed) == 2


def test_what_a_kernel_leaves_to_others_is_not_held_against_it(
    kernels: Callable[..., None],
) -> None:
    kernels("choosy")
    outcome = self_test.run(MACHINE, FACTS)
    assert outcome.failed == () and calls == ["choosy"]


def test_the_input_has_rows_and_the_served_dtype(monkeypatch: pytest.MonkeyPatch,
                                                 kernels: Callable[..., None]) -> None:  # fmt: skip
    kernels("good")
    seen: list[Tensor] = []

    def noted(gate_up: Tensor, interleaved: bool, weight: Tensor | None) -> Tensor:
        seen.append(gate_up)
        return right(gate_up, interleaved, weight)

    monkeypatch.setattr("tests.anywhere.test_self_test.good", noted)
    before = torch.get_default_dtype()
    for dtype in ("bfloat16", "float32"):
        torch.set_default_dtype(torch.bfloat16)  # as when an engine builds a model
        try:
            self_test.run(MACHINE, replace(FACTS, dtype=dtype))
            assert torch.get_default_dtype() == torch.bfloat16
        finally:
            torch.set_default_dtype(before)
        assert str(seen[-1].dtype) == f"torch.{dtype}" and seen[-1].numel()


def test_failures_are_looked_at_again_and_passes_are_not(kernels: Callable[..., None]) -> None:
    kernels("slightly_wrong", "good")
    for start in range(3):
        outcome = self_test.run(MACHINE, FACTS)
        assert outcome.remembered == min(start, 1)
        self_test.run.cache_clear()
    assert calls == ["slightly_wrong", "good", "slightly_wrong", "slightly_wrong"]


@pytest.mark.parametrize(
    "machine", ["cpu+triton=3.6.0+torch=2.13.0+interpret", "cpu+triton=3.9.0+interpret"]
)
def test_another_machine_or_version_is_tested_anew(
    machine: str, kernels: Callable[..., None]
) -> None:
    kernels("good")
    self_test.run(MACHINE, FACTS)
    self_test.run(Target.parse(machine), FACTS)
    assert calls == ["good", "good"]


def test_another_source_is_tested_anew(
    kernels: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels("good")
    first = self_test.key(registry.table("triton")[0], MACHINE, FACTS)
    monkeypatch.setattr(self_test, "_sources", lambda module: "edited")
    assert self_test.key(registry.table("triton")[0], MACHINE, FACTS) != first


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\x00", b'{"swiglu=good": 3}', b"7"])
def test_a_damaged_cache_is_as_good_as_none(content: bytes, kernels: Callable[..., None]) -> None:
    kernels("good")
    path = self_test.cache_file()
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    assert self_test.run(MACHINE, FACTS).agreed == 1
    self_test.run.cache_clear()
    assert self_test.run(MACHINE, FACTS).remembered == 1


def test_a_folder_that_cannot_be_written(kernels: Callable[..., None], tmp_path: Path,
                                         monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    kernels("good")
    (tmp_path / "taken").write_text("a file where the folder should be")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "taken"))
    assert self_test.run(MACHINE, FACTS).agreed == 1


def test_where_results_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/a")
    assert self_test.cache_file() == Path("/a/inkling_portable/self_test.json")
    monkeypatch.delenv("VLLM_CACHE_ROOT")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert self_test.cache_file() == Path("/b/vllm/inkling_portable/self_test.json")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/c")
    assert self_test.cache_file() == Path("/c/.cache/vllm/inkling_portable/self_test.json")


def test_switched_off(kernels: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    kernels("slightly_wrong")
    monkeypatch.setenv(self_test.VARIABLE, "off")
    outcome = self_test.run(MACHINE, FACTS)
    assert outcome.failed == () and calls == [] and chosen(outcome) == "slightly_wrong"
    assert str(outcome) == "self-test: off, by INKLING_PORTABLE_SELF_TEST"


def test_explain_recalls_and_does_not_run(kernels: Callable[..., None]) -> None:
    kernels("slightly_wrong", "good")
    nothing = self_test.recall(MACHINE, FACTS)
    assert (nothing.unknown, nothing.failed, calls) == (1, (), [])
    self_test.run(MACHINE, FACTS)
    ran = list(calls)
    outcome = self_test.recall(MACHINE, FACTS)
    assert calls == ran and outcome.unknown == 0 and outcome.remembered == 1
    assert chosen(outcome) == "good"


def test_explain_prints_it(
    kernels: Callable[..., None], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from inkling_portable.commands import explain

    kernels("slightly_wrong", "good")
    monkeypatch.setattr(Target, "detect", classmethod(lambda cls: MACHINE))
    assert explain.main(["--ask", ""]) == 0
    assert "2 not tested" not in capsys.readouterr().out
    assert explain.main(["--ask", "", "--self-test"]) == 0
    shown = capsys.readouterr().out
    assert "no   failed its self-test on this machine" in shown and "self-test: 1 kernels" in shown
    assert explain.main(["--ask", ""]) == 0
    assert "no   failed its self-test on this machine" in capsys.readouterr().out
    assert explain.main(["--target", "cpu", "--self-test"]) == 2
    assert "leave --target out" in capsys.readouterr().err


def test_a_broken_device_ends_the_start(
    kernels: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sticky error of the device is not one of the kernel alone: nothing after it would work."""
    kernels("crashes", "good")

    def broken(*_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    monkeypatch.setattr(
        "inkling_portable.agreement.disagreements", lambda *args: (_ for _ in ()).throw(
            RuntimeError("illegal")
        )
    )  # fmt: skip
    gpu = Target.parse("h200+triton=3.6.0")
    with pytest.raises(SelectionError, match="swiglu=crashes left the device unusable") as caught:
        self_test.run(gpu, FACTS)
    assert "ask for swiglu=reference" in str(caught.value) and "\n" not in str(caught.value)


def test_untested_kernels_are_compiled_side_by_side_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each on the first draw that it serves; what goes wrong there is left to the test."""
    ran, together = list[tuple[str, bool]](), [False]

    @contextmanager
    def ahead(threads: int) -> Iterator[None]:
        together[0] = True
        yield
        together[0] = False

    def run(function: Any, contract: Any, arguments: dict[str, Any], device: str) -> None:
        ran.append((contract.name, together[0]))
        if len(ran) == 1:
            raise ValueError("a shape for others")
        if contract.name == "rms_norm":
            raise RuntimeError("whatever")

    monkeypatch.setattr("inkling_portable.compile_ahead.compiled_ahead", ahead)
    monkeypatch.setattr("inkling_portable.agreement.run", run)
    rows = {offer.op: offer for offer in registry.table("triton")}
    offers = [rows[op] for op in ("swiglu", "rms_norm", "route")]
    gpu = Target.parse("h200+triton=3.6.0")
    self_test._make_ready(offers, gpu, FACTS)
    assert ran == [(op, True) for op in ("swiglu", "swiglu", "rms_norm", "route")]
    self_test._make_ready(offers[:1], gpu, FACTS)
    assert len(ran) == 4, "one kernel by itself gains nothing"
