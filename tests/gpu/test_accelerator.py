"""What the package says about the GPU under it, against torch; recordings of one machine agree."""

from pathlib import Path

import pytest
import torch

from inkling_portable.__main__ import main
from inkling_portable.commands import fit
from inkling_portable.target import CHIPS, Target


def test_target_is_this_gpu() -> None:
    target, device = Target.detect(), torch.cuda.get_device_properties(0)
    assert target.vendor == ("rocm" if torch.version.hip else "cuda")
    assert target.compute_units == device.multi_processor_count
    assert target.warp == device.warp_size
    # How a build was made (+cu130) is in the module, and not always in the metadata.
    assert str(target.lib("torch")).partition("+")[0] == torch.__version__.partition("+")[0]
    assert 0 <= device.total_memory - (target.memory_gib << 30) < 1 << 30


def test_described_chip_offers_what_this_one_does() -> None:
    """`fit` reckons with less memory than there is, by at most 3 percent."""
    here = Target.detect()
    same = [c for c in CHIPS if (c.arch, c.compute_units) == (here.arch, here.compute_units)]
    assert same, f"{here.key} is not in the table of chips"
    chip = min(same, key=lambda c: abs(c.memory_gib - here.memory_gib))
    question = fit.question_of(fit.parser().parse_args(["--target", chip.name]))
    total = torch.cuda.get_device_properties(0).total_memory
    assert 0.97 * total < question.memory <= total


def test_recordings_of_one_machine_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(tmp_path / "one"), str(tmp_path / "two")]
    for path in files:
        assert main(["record", "rms_norm", "route", "--out", path]) == 0
    assert main(["compare", *files]) == 0
    assert "pairs agree" in capsys.readouterr().out
