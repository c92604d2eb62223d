"""`inkling-portable fit`: published sizes, laws that any honest answer obeys, known machines."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inkling_portable.__main__ import main
from inkling_portable.commands import fit, fit_memory
from inkling_portable.commands.fit_cache import Demand, LayerCache, layer_caches, plan
from inkling_portable.commands.released_configs import released
from inkling_portable.model.config import parse
from inkling_portable.target import Target

GIB = 1 << 30
NAMES = ("Inkling", "Inkling-Small")
SHORT = ("--max-num-batched-tokens", "2048")


# --- weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "weights", "mtp", "published", "digit"),
    [
        ("Inkling", "bf16", True, 1.905e12, 1e9),
        ("Inkling", "bf16", True, 1774 * GIB, GIB),
        ("Inkling", "nvfp4", True, 592e9, 1e9),
        ("Inkling", "nvfp4", True, 551.4 * GIB, 0.1 * GIB),
        ("Inkling", "nvfp4", False, 541.6 * GIB, 0.1 * GIB),
        ("Inkling-Small", "bf16", True, 532e9, 1e9),
        ("Inkling-Small", "nvfp4", True, 171e9, 1e9),
    ],
)
def test_checkpoints_have_their_published_size(
    name: str, weights: str, mtp: bool, published: float, digit: float
) -> None:
    """Within half of the last published digit; a checkpoint counts in decimal or binary units."""
    size = fit_memory.checkpoint_bytes(parse(released(name)), weights, mtp=mtp)
    assert abs(size - published) <= 0.6 * digit


def test_loaded_small_mxfp4_is_near_the_published_load() -> None:
    """One MI355X reported 149.03 GiB after loading Inkling-Small in MXFP4."""
    loaded = sum(
        fit_memory.weights_per_gpu(parse(released("Inkling-Small")), "mxfp4", 1, 0).values()
    )
    assert 0.98 < loaded / (149.03 * GIB) <= 1.0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("weights", fit.WEIGHTS)
def test_ranks_hold_the_checkpoint_and_what_is_replicated(name: str, weights: str) -> None:
    """All ranks together hold the whole once, and each replicated tensor once more per rank."""
    config = parse(released(name))
    whole = fit_memory.checkpoint_bytes(config, weights)
    one = fit_memory.weights_per_gpu(config, weights, 1, 8)
    assert sum(one.values()) == whole
    for tp in (2, 4, 8):
        ranks = fit_memory.weights_per_gpu(config, weights, tp, 8)
        extra = {part: tp * ranks[part] - one[part] for part in one}
        embedding = config.text.padded_vocab_size * config.text.hidden_size * 2
        assert extra["embedding (on every GPU)"] == (tp - 1) * embedding
        assert extra["towers"] == (tp - 1) * one["towers"]
        for part in ("dense MLP", "shared experts", "unembedding", "routed experts", "attention"):
            assert 0 <= extra[part] <= 0.001 * tp * one[part], part
        # Each depth's input projection is whole on every rank.
        projections = 8 * 2 * config.text.hidden_size**2 * 2
        assert extra["draft depths"] == pytest.approx((tp - 1) * projections, rel=0.02)


# --- caches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_published_pages(name: str, tp: int) -> None:
    """A block of convolution state is 131,072 bytes over all ranks in both models."""
    caches = layer_caches(parse(released(name)), tp=tp, block=16, kv_bytes=2)
    assert {c.page * tp for c in caches if c.kind == "conv"} == {131072}
    per_token = {c.kind: c.page * tp // c.block for c in caches if c.kind != "conv"}
    assert per_token == {"global": 4096, "local": 8192 if name == "Inkling" else 4096}


def test_reserve_of_a_convolution_group_is_the_reported_one() -> None:
    """8,194 blocks for each group at 16,384 batched tokens, as vLLM issue 54703 reports."""
    caches = plan(layer_caches(parse(released("Inkling-Small")), tp=2, block=16, kv_bytes=2))
    demand = Demand(context=131072, batch_tokens=16384)
    conv = [group for group in caches.groups if group.cache.kind == "conv"]
    assert [fit.reserved_blocks(group.cache, demand) for group in conv] == [8194] * 6
    assert 6 * 8194 / caches.reserve(demand) == pytest.approx(0.84, abs=0.01)


CACHES = st.builds(
    LayerCache,
    kind=st.just("any"),
    block=st.sampled_from((1, 4, 16, 20, 32, 128)),
    heads=st.sampled_from((1, 2, 8)),
    cell=st.sampled_from((64, 256, 2048)),
    element_bytes=st.sampled_from((1, 2)),
    window=st.sampled_from((0, 4, 512)),
)
DEMANDS = st.builds(
    Demand,
    context=st.integers(1, 1 << 20),
    batch_tokens=st.integers(1, 1 << 15),
    steps_in_flight=st.sampled_from((1, 2)),
    mtp=st.integers(0, 8),
)


@given(st.lists(CACHES, min_size=1, max_size=24))
def test_a_plan_has_every_layer_once_and_one_page(caches: list[LayerCache]) -> None:
    planned = plan(caches)
    assert sum(group.layers for group in planned.groups) == len(caches)
    assert {group.cache.page for group in planned.groups} == {max(c.page for c in caches)}
    for group in planned.groups:
        cell = group.cache.heads * group.cache.cell * group.cache.element_bytes
        assert group.cache.block * cell <= group.cache.page


@given(st.lists(CACHES, min_size=1, max_size=24), DEMANDS, DEMANDS, st.integers(0, 1 << 40))
def test_more_never_needs_less(
    caches: list[LayerCache], one: Demand, other: Demand, memory: int
) -> None:
    planned = plan(caches)
    larger = Demand(
        max(one.context, other.context),
        max(one.batch_tokens, other.batch_tokens),
        max(one.steps_in_flight, other.steps_in_flight),
        max(one.mtp, other.mtp),
    )
    assert planned.reserve(larger) >= planned.reserve(one)
    assert planned.held(larger) >= planned.held(one)
    assert planned.resident(memory, larger) <= planned.resident(memory, one)
    assert planned.resident(2 * memory, one) >= planned.resident(memory, one)
    assert planned.engine_concurrency(memory, larger) <= planned.engine_concurrency(memory, one)


@given(st.lists(CACHES, min_size=1, max_size=24), DEMANDS, st.integers(0, 1 << 40))
def test_counted_requests_fit_and_one_more_does_not(
    caches: list[LayerCache], demand: Demand, memory: int
) -> None:
    planned = plan(caches)
    count = planned.resident(memory, demand)
    assert count == 0 or planned.memory_for(count, demand) <= memory
    assert planned.memory_for(count + 1, demand) > memory


@given(DEMANDS)
def test_a_decoding_request_holds_its_windows(demand: Demand) -> None:
    """No layer may free what a step still reads: blocks cover the window and the step's tokens."""
    caches = plan(layer_caches(parse(released("Inkling")), tp=8, block=16, kv_bytes=2))
    for group in caches.groups:
        tokens = group.cache.block * fit.held_blocks(group.cache, demand)
        window = group.cache.window or demand.context
        assert tokens >= min(window + demand.mtp, demand.context)


# --- answers --------------------------------------------------------------------------------------


def asked(*options: str) -> fit.Fit:
    return fit.answer(fit.question_of(fit.parser().parse_args(options)))


@pytest.mark.parametrize(
    ("options", "fits"),
    [
        # Published layouts of both models.
        (("--weights", "nvfp4", "--tp", "8", "--target", "h200"), True),
        (("--weights", "nvfp4", "--tp", "4", "--target", "b200", *SHORT), True),
        (("--weights", "mxfp4", "--tp", "4", "--target", "mi355x"), True),
        (("--model", "small", "--weights", "nvfp4", "--tp", "1", "--target", "b300"), True),
        (("--model", "small", "--weights", "nvfp4", "--tp", "2", "--target", "h200"), True),
        (("--model", "small", "--weights", "mxfp4", "--tp", "1", "--target", "mi355x"), True),
        (("--model", "small", "--weights", "mxfp4", "--tp", "2", "--target", "mi300x"), True),
        (("--model", "small", "--tp", "8", "--target", "h200"), True),
        (("--model", "small", "--tp", "4", "--target", "mi355x"), True),
        # What cannot be served.
        (("--tp", "8", "--target", "h200"), False),
        (("--weights", "nvfp4", "--tp", "4", "--target", "h200"), False),
        # Here the reserve of the default batch is what does not fit.
        (("--weights", "nvfp4", "--tp", "4", "--target", "b200"), False),
        (("--weights", "nvfp4", "--tp", "8", "--target", "h100"), False),
        (("--model", "small", "--weights", "nvfp4", "--tp", "1", "--target", "h200"), False),
    ],
)
def test_known_machines(options: tuple[str, ...], fits: bool) -> None:
    found = asked(*options)
    assert (found.missing == 0) == fits
    assert fit.report(found)["fits"] == fits


def test_missing_gib_is_what_has_to_be_added(capsys: pytest.CaptureFixture[str]) -> None:
    """Eight H200 lack about 100 GiB each for BF16; with that memory the answer turns."""
    options = ["--tp", "8", "--target", "h200", "--context", "131072"]
    assert main(["fit", *options]) == 1
    out = capsys.readouterr().out
    found = asked(*options)
    assert f"no: {found.missing / GIB:.1f} GiB per GPU are missing" in out
    assert "--weights nvfp4" in out and "vllm serve" not in out
    assert 95 < found.missing / GIB < 115
    share = 1 / found.question.utilization
    enough = found.question.memory + int((found.missing + 1) * share) + 1
    for memory, answer in ((enough, True), (enough - int(0.01 * GIB), False)):
        assert (fit.answer(replace(found.question, memory=memory)).missing == 0) == answer


@given(
    st.sampled_from(("large", "small")),
    st.sampled_from(fit.WEIGHTS),
    st.sampled_from(("h200", "b200", "mi300x", "mi355x")),
    st.sampled_from((1, 2, 4)),
    st.integers(0, 8),
)
def test_laws_of_the_answer(model: str, weights: str, chip: str, tp: int, mtp: int) -> None:
    """More GPUs, fewer drafts, less context, more memory or half the key bytes: never worse."""
    base = asked("--model", model, "--weights", weights, "--target", chip, "--tp", str(tp),
                 "--mtp", str(mtp), "--context", "65536")  # fmt: skip
    question = base.question
    for change in (
        {"tp": 2 * tp},
        {"context": 32768},
        {"memory": question.memory + GIB},
        {"batch_tokens": question.batch_tokens // 2},
    ):
        better = fit.answer(replace(question, **change))
        assert better.missing <= base.missing, change
        assert better.resident >= base.resident, change
    assert sum(base.weights.values()) >= sum(fit.answer(replace(question, mtp=0)).weights.values())
    if not base.missing:
        assert not fit.answer(replace(question, concurrency=base.resident)).missing


def test_remedies_work() -> None:
    """Each option that the refusal names does make it fit."""
    options = ["--model", "small", "--weights", "nvfp4", "--tp", "2", "--target", "b200",
               "--mtp", "8", "--concurrency", "64", "--context", "131072"]  # fmt: skip
    refused = asked(*options)
    named = fit.remedies(refused)
    assert refused.missing and named
    for remedy in named:
        assert not asked(*options, *remedy.split()).missing, remedy


def test_serve_line_carries_the_question(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "small", "--weights", "nvfp4", "--tp", "4", "--target", "h200", "--mtp",
               "2", "--concurrency", "16", "--context", "65536", "--kv-dtype", "fp8",
               "--block-size", "32", "--max-num-batched-tokens", "4096", "--json"]  # fmt: skip
    assert main(["fit", *options]) == 0
    data = json.loads(capsys.readouterr().out)
    line = data["serve"]
    given = dict(zip(line[3::2], line[4::2], strict=False))
    assert line[:3] == ["vllm", "serve", "thinkingmachines/Inkling-Small-NVFP4"]
    assert given["--tensor-parallel-size"] == "4"
    assert given["--max-model-len"] == "65536"
    assert given["--max-num-seqs"] == "16"
    assert given["--max-num-batched-tokens"] == "4096"
    assert given["--block-size"] == "32"
    assert given["--kv-cache-dtype"] == "fp8"
    assert json.loads(given["--speculative-config"]) == {
        "method": "mtp",
        "num_speculative_tokens": 2,
    }
    assert not any("reference" in note for note in data["notes"])
    assert sum(g["layers"] for g in data["groups"]) == 2 * (42 + 2)


def test_the_batch_that_starves_requests_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "small", "--weights", "mxfp4", "--tp", "2", "--target", "mi300x",
               "--context", "131072"]  # fmt: skip
    assert main(["fit", *options]) == 0
    out = capsys.readouterr().out
    assert "convolution groups take 84% of the blocks" in out
    gain = asked(*options, "--max-num-batched-tokens", "2048").engine_concurrency
    assert f"--max-num-batched-tokens 2048 gives {gain:.2f}" in out
    assert main(["fit", *options, "--max-num-batched-tokens", "2048"]) == 0
    assert "convolution groups take" not in capsys.readouterr().out


def test_ops_on_the_reference_are_named() -> None:
    """A machine that is described with libraries, but without Triton, would be slow."""
    full, bare = (
        fit.report(asked("--weights", "nvfp4", "--tp", "8", "--target", target))["notes"]
        for target in ("h200+triton=3.6.0+vllm=0.33.0", "h200+vllm=0.33.0")
    )
    assert not any("slow reference" in note for note in full)
    assert any("slow reference: rms_norm" in note and "needs triton" in note for note in bare)


def test_padded_experts_are_counted() -> None:
    """AITER's multiple of 256 makes TP8 of the large model a third larger, and no other layout."""
    one, two = (
        asked("--weights", "mxfp4", "--tp", "8", "--target", chip).weights["routed experts"]
        for chip in ("mi300x", "mi355x")
    )
    assert 1.2 < two / one < 4 / 3
    assert Target.parse("mi300x").arch == "gfx942"
    three, four = (
        asked("--weights", "mxfp4", "--tp", "4", "--target", chip).weights["routed experts"]
        for chip in ("mi300x", "mi355x")
    )
    assert three == four


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target", "h300"], "is not understood"),
        (["--target", "h200", "--tp", "3"], "tensor parallel size 3 needs"),
        (["--target", "h200", "--tp", "0"], "at least 1 rank"),
        (["--target", "h200", "--tp", "many"], "invalid int value"),
        (["--target", "h200", "--weights", "int4"], "invalid choice"),
        (["--target", "h200", "--mtp", "9"], "--mtp needs a number from 0 to 8; found 9"),
        (["--target", "h200", "--context", "0"], "--context needs"),
        (["--target", "h200", "--context", "1048577"], "from 1 to 1048576"),
        (["--target", "h200", "--concurrency", "0"], "--concurrency needs"),
        (["--target", "h200", "--concurrency", "9000"], "from 1 to 8192"),
        (["--target", "h200", "--block-size", "0"], "--block-size needs"),
        (["--target", "h200", "--max-num-batched-tokens", "0"], "--max-num-batched-tokens needs"),
        (["--target", "h200", "--gpu-memory-utilization", "1.5"], "needs a part of 1"),
        (["--target", "cpu"], "the memory of cpu is not known; give --memory-gib"),
        (["--target", "cuda:sm90/999", "--memory-gib", "-1"], "above 0"),
        (["--target", "h200", "--memory-gib", "nan"], "above 0"),
        (["--target", "h200", "--memory-gib", "inf"], "above 0"),
        (["--target", "h200", "stray"], "unrecognized arguments"),
    ],
)
def test_questions_without_an_answer(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", *options]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_answers_in_a_second_without_torch() -> None:
    """A second of processor time: neighbours on the machine do not count."""
    code = (
        "import sys; from inkling_portable.__main__ import main;"
        "status = main(['fit', '--target', 'h200', '--tp', '8', '--context', '131072']);"
        "assert not {'torch', 'vllm', 'triton'} & set(sys.modules); sys.exit(status)"
    )

    def spent() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = spent()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert spent() - before < 1.0
    assert "missing" in done.stdout
