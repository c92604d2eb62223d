"""`explain --acceptance`: how many drafts pay, on numbers worked out by hand."""

from __future__ import annotations

import pytest

from inkling_portable.__main__ import main as command_line
from inkling_portable.commands import explain
from inkling_portable.commands.released_configs import released
from inkling_portable.draft_costs import step_bytes, table
from inkling_portable.model.config import parse
from inkling_portable.registry import SelectionError


def test_measured_steps() -> None:
    """1.8 tokens in 4.5 ms beat 1 in 4 and 2.1 in 6: 1.6, 1 and 1.4 times as fast."""
    lines = table([0.8, 0.3], [4.0, 4.5, 6.0], "ms")
    assert [line.split() for line in lines[1:4]] == [
        ["0", "1.00", "4.000", "1.00"],
        ["1", "1.80", "4.500", "1.60", "<-", "best"],
        ["2", "2.10", "6.000", "1.40"],
    ]
    assert lines[4] == '--speculative-config \'{"method": "mtp", "num_speculative_tokens": 1}\''


def test_drafts_that_never_come_true_are_not_drawn() -> None:
    assert table([0.0], [4.0, 4.1], "ms")[-1] == "no --speculative-config"


def test_what_is_not_measured_is_not_recommended() -> None:
    assert len(table([0.9, 0.9, 0.9], [4.0, 4.0], "ms")) == 1 + 2 + 1


@pytest.mark.parametrize("acceptance", [[1.1], [-0.1], [0.5, 0.6], [float("nan")]])
def test_impossible_shares(acceptance: list[float]) -> None:
    with pytest.raises(SelectionError, match="needs shares from 1 down to 0"):
        table(acceptance, [1.0] * 9, "ms")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--acceptance", ""], "found none"),
        (["--acceptance", "0.5", "--step-ms", "0,0"], "needs to be above 0; found 0.0, 0.0"),
        (["--acceptance", "0.5", "--step-ms", "4,nan"], "above 0"),
        (["--acceptance", "0.5", "--step-ms=-4,5"], "above 0"),
        (["--acceptance", "0.5", "--step-ms", "4"], "without drafts and with 1 at least; found 4"),
        (["--acceptance", "0.8,,0.5"], "need numbers"),
        (["--acceptance", "0.5", "--context", "0"], "needs to be 1 or more"),
        (["--acceptance", ",".join(["0.5"] * 9)], "at most 8 shares, one for each draft"),
        (["--acceptance", "0.5", "--json"], "leave --json out"),
        (["--step-ms", "4,5"], "give --acceptance"),
    ],
)
def test_options_that_mean_nothing(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line(["explain", "--target", "h200", *options]) == 2
    shown = capsys.readouterr()
    assert message in shown.err and shown.err.count("\n") == 1 and not shown.out


def test_bytes_of_a_step() -> None:
    """What a draft adds is a depth, the head again, its own cells and newly chosen experts."""
    config = parse(released("Inkling"))
    text, mtp = config.text, config.require_mtp()
    at = [step_bytes(config, "bf16", 8, 8192, k) for k in (0, 1)]
    hidden, width = text.hidden_size, text.expert_width // 8
    sparse = sum(not text.layer_is_dense(i) for i in range(text.num_layers))
    expert = 3 * hidden * width * 2
    # Of n experts, k of which a row chooses, two rows choose 2k - k²/n.
    k, n = text.top_k, text.num_experts
    chosen = sparse * expert * (k - k * k / n)
    head = text.vocab_size * hidden * 2 / 8
    sizes = config.mtp_attention(0)
    seen = min(8192, text.window) if mtp.depth_is_local(0) else 8192
    cells = 2 * 2 * seen * sizes.head_dim * sizes.kv_heads / 8
    depth = at[1] - at[0] - chosen - head - cells
    # One dense layer of its own: attention, a projection of two rows to one, and an MLP.
    qkvro = hidden * (sum(sizes.qkvr_sizes) + sizes.heads * sizes.head_dim)
    known = 2 * (2 * hidden * hidden + (qkvro + 3 * hidden * text.dense_width) / 8)
    assert depth == pytest.approx(known, rel=0.02)
    # A longer context costs its cells once.
    more = step_bytes(config, "bf16", 8, 8193, 0) - at[0]
    globals_ = sum(not text.layer_is_local(i) for i in range(text.num_layers))
    assert more == globals_ * 2 * 2 * text.global_head_dim * max(1, text.global_kv_heads // 8)
    short, long = (step_bytes(config, "bf16", 8, context, 0, cell=1) for context in (8192, 8193))
    assert long - short == more / 2


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--target", "h200", "--weights", "nvfp4", "--tp", "8", "--acceptance"]
    assert explain.main([*given, "0.8,0.65,0.5,0.4,0.3,0.2,0.1,0.1"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 1 + 9 + 1 and sum("best" in line for line in shown) == 1
    assert explain.main([*given, "0.8", "--context", "1048576", "--kv-cache-dtype", "fp8"]) == 0
    small = float(capsys.readouterr().out.splitlines()[1].split()[2])
    assert explain.main([*given, "0.8", "--context", "1048576"]) == 0
    assert float(capsys.readouterr().out.splitlines()[1].split()[2]) > small + 1
    assert explain.main([*given, "0.8", "--step-ms", "4,x"]) == 2
    assert "need numbers" in capsys.readouterr().err
