"""The script that times one rank of eight: its model, its floors, and what it calls a kernel.

And what every benchmark says without a GPU.
"""

from __future__ import annotations

import json
import random
import re
from importlib import import_module
from inspect import signature
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import serving, serving_rank, timing
from inkling_portable.commands.released_configs import released
from inkling_portable.draft_costs import step_bytes
from inkling_portable.model.config import parse
from inkling_portable.model.weight_format import read_block
from inkling_portable.registry import MODELS

KERNELS = Path(__file__).parents[2] / "inkling_portable" / "backends"


def test_a_rank_has_an_eighth_of_what_ranks_divide() -> None:
    rank = parse(serving_rank.rank_config("Inkling", 8, None, "nvfp4")).text
    whole = parse(released("Inkling")).text
    assert (rank.num_layers, rank.hidden_size, rank.num_experts) == (66, 6144, 256)
    assert (rank.global_heads, rank.global_kv_heads, rank.local_kv_heads) == (8, 1, 2)
    assert rank.expert_width * 8 == whole.expert_width == MODELS["large"].expert_width
    assert rank.dense_width * 8 == whole.dense_width
    assert rank.padded_vocab_size * 8 == whole.padded_vocab_size
    assert rank.local_layers == whole.local_layers


def test_floors() -> None:
    """Bytes of batch 1 at 8K, by hand from the published sizes, within a tenth."""
    config = parse(serving_rank.rank_config("Inkling", 8, None, "nvfp4"))
    floors = serving_rank.floors_us(config, "nvfp4", 1, 8192, 4.3e12)
    # Six experts of width 384 with 4-bit codes and a scale for 16 of them; the first sparse
    # layer's are in bfloat16.
    expert = 3 * 6144 * 384
    experts = 6 * expert * (63 * (0.5 + 1 / 16) + 2)
    assert floors["routed experts"] == pytest.approx(experts / 4.3e6, rel=0.1)
    assert floors["unembedding"] == pytest.approx(2 * 25128 * 6144 / 4.3e6, rel=0.1)
    cells = 11 * 8192 * 2 * 128 + 55 * 512 * 2 * 2 * 128
    assert floors["keys and values"] == pytest.approx(2 * cells / 4.3e6)
    more = serving_rank.floors_us(config, "nvfp4", 64, 8192, 4.3e12)
    assert more["attention"] == floors["attention"]
    assert more["keys and values"] == pytest.approx(64 * floors["keys and values"])
    # Of 256 experts 64 rows of six leave (1 - 6/256)**64 unused.
    assert more["routed experts"] / floors["routed experts"] == pytest.approx(
        (1 - (250 / 256) ** 64) * 256 / 6, rel=0.01
    )
    # What `explain` counts for one request, but for the bytes that no step reads.
    drafting = serving_rank.floors_us(config, "nvfp4", 1, 8192, 1e6, drafts=3)
    assert sum(drafting.values()) == pytest.approx(
        step_bytes(config, "nvfp4", 1, 8192, 3), rel=0.01
    )


def test_routers_choose_evenly() -> None:
    """Whatever a model calls its layers, its routers get the same weights, and no bias."""
    models = []
    for _ in range(2):
        gate = nn.Linear(64, 34)
        gate.global_scale = nn.Parameter(torch.zeros(1))
        models.append(nn.ModuleDict({"mlp": nn.ModuleDict({"gate": gate})}))
    assert [serving_rank.draw_routers(model) for model in models] == [1, 1]
    first, second = (model["mlp"]["gate"] for model in models)  # type: ignore[index]
    assert torch.equal(first.weight, second.weight) and not first.bias.any()
    assert first.global_scale.item() == 1.0
    rows = torch.randn(4000, 64, generator=torch.Generator().manual_seed(1))
    chosen = torch.bincount((rows @ first.weight.T)[:, :32].topk(2).indices.flatten())
    assert chosen.min() > 50 and chosen.max() < 500  # 250 each, on average
    assert serving_rank.draw_routers(nn.Linear(4, 4)) == 0


def test_the_released_number_formats() -> None:
    """Of 66 layers two have no experts, and a quantised release keeps those of the third."""
    block = read_block(serving_rank.NVFP4)
    assert [layer for layer in range(2, 66) if block.experts_format(layer, 256, ()) != "nvfp4"] == [
        2
    ]


def test_choices_are_counted_in_either_model() -> None:
    ids = torch.arange(70)[:, None] % torch.tensor([5, 7])

    class Gate(nn.Module):
        global_scale = 1.0

        def select_experts(self, rows: int) -> tuple[None, torch.Tensor]:
            return None, ids[:rows]

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = Gate()

        def _route(self, rows: int) -> tuple[None, torch.Tensor]:
            return self.gate.select_experts(rows)

    for model, route in ((Gate(), "select_experts"), (Layer(), "_route")):
        serving_rank.watch_routers(model)
        for rows in (70, 3):  # a few rows say nothing
            getattr(model, route)(rows)
        assert serving_rank.chosen_experts(model) == [7]


def test_every_kernel_of_ours_belongs_to_an_op() -> None:
    names = set()
    pattern = r"@(?:triton|gluon)\.jit[^\n]*\ndef (\w*kernel|attend_\w+|combine_split|join_spans)\("
    for path in [*KERNELS.rglob("*.py")]:
        found = re.findall(pattern, path.read_text())
        names |= set(found)
        for op in ("rel_attention", "routed_experts"):
            if path.name.startswith(op):
                assert {serving.op_of(name) for name in found} <= {op}, path.name
    assert len(names) > 20
    assert [name for name in names if serving.op_of(name) == "unknown"] == []
    assert serving.op_of("conv_rows") == "short conv, sum, norm"
    assert serving.op_of("gemv_up_kernel") == serving.op_of("moe_align_block") == "routed_experts"
    assert serving.op_of("nvjet_tst_64x8_64x16_4x1_v_bz_TNT") == "linear layers"


def test_products_belong_to_what_stands_around_them() -> None:
    """Gates, sinks and linear layers share kernels; a layer's order tells them apart."""
    layer = ["_row_kernel", "_prep_kernel", "attend_split", "combine_split", "_row_kernel",
             "_conv_kernel", "_row_kernel", "_sum_kernel", "_route_kernel", "_row_kernel",
             "_row_kernel", "moe_fused_mul_sum_kernel", "_conv_kernel"]  # fmt: skip
    linear, gate, sinks = "linear layers", "route and gate_logits", "sinks and dense activation"
    conv, attention = "short conv, sum, norm", "rel_attention"
    assert serving.ops_of(layer * 2) == 2 * [
        linear, "qkvr_prep", attention, attention, linear, conv, gate, gate, gate, sinks, sinks,
        "routed_experts", conv,
    ]  # fmt: skip
    # Gate and sinks in one product, whose bytes are the sinks' for the most part.
    layer = [
        "few_rows",
        "_prep_kernel",
        "attend_split",
        "combine_split",
        "few_rows",
        "_conv_kernel",
        "few_rows",
        "_weigh_kernel",
        "few_rows",
        "experts",
        "_conv_kernel",
    ]
    assert serving.ops_of(layer * 2) == 2 * [
        linear, "qkvr_prep", attention, attention, linear, conv, sinks, gate, sinks,
        "routed_experts", conv,
    ]  # fmt: skip


def test_the_plan(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("INKLING_PORTABLE", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL"):
        monkeypatch.setenv(name, "")  # set by the script
    assert serving.main(["--dry-run", "--variant", "off", "--cases", "decode"]) == 0
    said = json.loads(capsys.readouterr().out)
    usual = ["1 x 8192", "1 x 65536", "1 x 262144", "16 x 2048", "64 x 8192"]
    assert said["plan"] == [f"decode {sizes}" for sizes in usual]
    assert 1.3 < said["floors ms"]["decode 1 x 8192"] < 1.6
    assert serving.cases("profile=2x9,throughput,prefill=7", serving.TINY) == [
        ("profile", (2, 9)), ("throughput", (4, 48, 8)), ("prefill", (7,)),
    ]  # fmt: skip
    with pytest.raises(SystemExit):
        serving.main(["--cases", "decoding"])
    with pytest.raises(SystemExit):  # its splits are enabled in this process
        serving.main(["--own-process", "--variant", "off-split"])
    options = type("Options", (), {"all_drafts": [1, 8]})
    assert serving.passes(options) == [  # type: ignore[arg-type]
        ("plugin", 0), ("off", 0), ("off-split", 0), ("plugin", 1), ("plugin", 8), ("off", 1),
        ("off", 8),
    ]  # fmt: skip


def test_busy_time_counts_what_overlaps_once() -> None:
    assert serving.busy([]) == 0
    assert serving.busy([(0, 4), (1, 2), (3, 6), (8, 9), (9, 10)]) == 8


def test_a_moment_belongs_to_the_kernel_that_ends_first() -> None:
    """Those that start early and wait have what is left when the ones before them ended."""
    assert serving.shares([]) == []
    spans = [(0, 4), (1, 2), (3, 6), (8, 9), (9, 10)]
    assert serving.shares(spans) == [3, 1, 2, 1, 1]
    dice = random.Random(0)
    for _ in range(50):
        spans = sorted((s := dice.randrange(90), s + dice.randrange(9)) for _ in range(30))
        found = serving.shares(spans)
        assert sum(found) == serving.busy(spans)
        assert all(0 <= one <= end - start for one, (start, end) in zip(found, spans, strict=True))


BENCHMARKS = sorted(path for path in Path(serving.__file__).parent.glob("*.py")
                    if "__main__" in path.read_text())  # fmt: skip
PAIRS = ("ranks", "serving_pair", "splits")


@pytest.mark.parametrize("name", [
    path.stem for path in BENCHMARKS if path.stem not in ("nano", "soak")  # serve on a CPU as well
])  # fmt: skip
def test_without_a_gpu_one_sentence_says_so(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is compiled, loaded or started."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: int(name in PAIRS))
    monkeypatch.setattr("sys.argv", [name])
    main = import_module(f"benchmarks.{name}").main
    with pytest.raises(SystemExit) as ended:
        main(*[[]] * len(signature(main).parameters))
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    found = "needs 2 GPUs; found 1; " if name in PAIRS else "needs a GPU; found none; "
    assert f"{name}: {found}run it on a machine that has " in line


def test_a_report_from_a_cpu_says_that_no_gpu_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """portable-nano is asked on a CPU as well, for minutes before its report is written."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert timing.environment()["gpu"] == "none"
