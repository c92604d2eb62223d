"""docs/numerics.md: a part of what it shows is computed again."""

import json
from pathlib import Path

import pytest
import torch

from ci import cdna_agreement, layer_recording
from ci.cdna.launch import CHIPS
from ci.layer_recording import Recording
from inkling_portable.numerics import exact, within_twice_baseline
from inkling_portable.registry import contract

STORED = json.loads(cdna_agreement.FILE.read_text())
KEYS = {(row["layer"], row["op"], row["output"]): row["shares"] for row in STORED["layers"]}


def test_everything_shown_is_within_its_bound() -> None:
    for (layer, op, output), shares in KEYS.items():
        for name, value in shares.items():
            assert value <= (2 if " - " in name else 1), (layer, op, output, name)
    kinds = {layer for layer, _, _ in KEYS}
    assert kinds == set(cdna_agreement.KINDS.values())
    ops = {op for layer, op, _ in KEYS if layer == "global sparse"}
    assert ops == {"qkvr_prep", "rel_attention", "conv_residual_norm", "gate_logits", "route",
                   "routed_experts", "sink_experts"}  # fmt: skip
    said = STORED["generation"]
    assert set(said) == {"float64", "cpu", "h200", *CHIPS}
    assert len({tuple(of["tokens"]) for of in said.values()}) == 1


def test_a_part_of_the_table_is_computed_again() -> None:
    """Shares follow from seeded inputs; another torch may round the references' sums otherwise."""
    found = cdna_agreement.layers(CHIPS, ["route", "conv_residual_norm"])
    assert {row["layer"] for row in found} == set(cdna_agreement.KINDS.values())
    for row in found:
        stored = KEYS[row["layer"], row["op"], row["output"]]
        again = {name: stored[name] for name in row["shares"]}  # a GPU's part is only recorded
        assert row["shares"] == pytest.approx(again, abs=0.5)
        assert all(value <= (2 if " - " in name else 1) for name, value in row["shares"].items())


def test_a_recording_answers_only_the_inputs_it_was_made_with(tmp_path: Path) -> None:
    """Of the recorded H200: its outputs keep their contract; other inputs are not answered."""
    recording = Recording(cdna_agreement.RECORDED["h200"])
    assert recording.target.startswith("cuda:sm90/132") and recording.calls
    assert recording.tokens == STORED["generation"]["h200"]["tokens"]
    op, x = contract("swiglu"), torch.arange(8.0).reshape(1, 8)
    call = {"gate_up": x, "interleaved": True, "weight": None}
    with pytest.raises(SystemExit, match="has no call of swiglu with these inputs"):
        recording.outputs("swiglu", call)
    key = layer_recording.call_key("swiglu", call)
    made = {"target": "t", "chosen": {}, "calls": {key: ["one"]}, "tokens": [1]}
    kept = {"one": op.reference(**call), "logits": x}
    layer_recording.save(tmp_path / "file", kept, made)
    assert Recording(tmp_path / "file").outputs("swiglu", call)[0].equal(kept["one"])


def test_a_wrong_kernel_is_beyond_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    right = cdna_agreement.kernel("conv_residual_norm")

    def wrong(**arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = right(**arguments)
        normed[:1] *= 1.1
        return normed, residual

    monkeypatch.setitem(cdna_agreement.KERNELS, "conv_residual_norm", wrong)
    found = cdna_agreement.layers(["gfx942"], ["conv_residual_norm"], length=16)
    (row,) = (r for r in found if (r["layer"], r["output"]) == ("local dense", "result0"))
    assert row["shares"]["gfx942"] > 2 and row["shares"]["cpu"] <= 1


def test_a_share_is_the_worst_row_over_what_it_is_allowed() -> None:
    """Allowed are twice the error of the baseline and one step of bfloat16 at the largest value."""
    truth = torch.tensor([[1.0, 2.0], [float("nan"), 1.0]], dtype=torch.float64)
    base = torch.tensor([[1.25, 2.0], [0.0, 0.0]], dtype=torch.bfloat16)
    got = torch.tensor([[1.0, 1.5], [9.0, 9.0]], dtype=torch.bfloat16)
    value = cdna_agreement.share(within_twice_baseline(), got, truth, base, truth)
    assert value == pytest.approx(0.5 / (0.5 + 2**-7 * 2))
    whole = torch.tensor([1, 2, 3])
    assert cdna_agreement.share(exact(), whole, torch.tensor([1, 5, 6]), whole, whole) == 2
