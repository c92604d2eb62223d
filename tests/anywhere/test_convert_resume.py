"""A conversion that is ended anywhere goes on to the same bytes, and is not taken for whole."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from inkling_portable.commands import convert as command
from inkling_portable.commands import tiny
from inkling_portable.commands.convert import convert
from inkling_portable.conversion.source import ConvertError
from inkling_portable.model.config import parse

ROOT = Path(__file__).resolve().parents[2]
CALLS = ("pwrite", "write", "fsync", "replace", "ftruncate")
"""What changes the disk."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume") / "source"
    tiny.write_tiny(folder, dtype="bfloat16", shard_mb=1, layers=3, mtp_depths=1)
    return folder


@pytest.fixture(scope="module")
def whole(source: Path) -> dict[str, bytes]:
    """The output of a conversion that nothing interrupts."""
    convert(source, source.parent / "whole", "nvfp4")
    return content(source.parent / "whole")


def content(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*")
            if p.is_file()}  # fmt: skip


class Killed(BaseException):
    """Nothing in the package catches this, so what it leaves is what SIGKILL leaves."""


def kill_at(patch: pytest.MonkeyPatch, count: float, torn: bool) -> Callable[[], int]:
    """Die at call number `count` that changes the disk, in its middle if `torn` and it writes."""
    calls = 0

    def wrapped(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls >= count:
                if torn and name in ("pwrite", "write"):
                    real(arguments[0], arguments[1][: len(arguments[1]) // 2], *arguments[2:])
                raise Killed
            # Thousands of real ones take minutes, and a kill does not lose what the system holds.
            return None if name == "fsync" else real(*arguments)

        return call

    for name in CALLS:
        patch.setattr(os, name, wrapped(name))
    return lambda: calls


def test_killed_at_any_point_it_goes_on_to_the_same_bytes(source, whole, tmp_path) -> None:
    """Points are spread over the whole run; a tenth of them are killed a second time."""
    draw = random.Random(0)
    with pytest.MonkeyPatch.context() as patch:
        calls = kill_at(patch, float("inf"), torn=False)
        convert(source, tmp_path / "count", "nvfp4", commit_seconds=0)
    total = calls()
    assert total > 300
    # The beginning and the end, where files come and go, in full.
    points = {*range(1, 8), *range(total - 14, total + 1), *draw.sample(range(8, total - 14), 14)}
    early = 0
    for number, point in enumerate(sorted(points)):
        folder = tmp_path / f"{point}"
        for again in range(1 + (number % 10 == 0)):
            with pytest.MonkeyPatch.context() as patch:
                kill_at(patch, max(1, point // (1 + again)), torn=draw.random() < 0.5)
                with pytest.raises(Killed):
                    convert(source, folder, "nvfp4", commit_seconds=0)
                    raise Killed  # a second, shorter way may be whole already
            left = content(folder)
            if "config.json" in left:
                assert {n: left[n] for n in whole} == whole, point
            else:
                early += 1
        if (folder / ".converting").exists():
            convert(source, folder, "nvfp4")
        assert content(folder) == whole, point
    assert early > len(points) - 3


def test_a_block_that_is_noted_is_not_done_again(source, whole, tmp_path, monkeypatch) -> None:
    from inkling_portable.conversion import blocks

    done: list[tuple[str, int]] = []
    real = blocks.convert_block

    def counted(job: Any, block: int, *rest: Any) -> Any:
        done.append((job.key, block))
        if len(done) == 6:
            raise Killed
        return real(job, block, *rest)

    monkeypatch.setattr(blocks, "convert_block", counted)
    with pytest.raises(Killed):
        convert(source, tmp_path / "out", "nvfp4", commit_seconds=0, threads=1)
    convert(source, tmp_path / "out", "nvfp4", commit_seconds=0, threads=1)
    # Up to two are in work ahead of the one that is noted.
    assert 17 <= len(done) <= 19 and len(set(done)) == 16
    assert set(done[:5]).isdisjoint(done[5:])
    assert content(tmp_path / "out") == whole


def test_sigkill(source, whole, tmp_path: Path) -> None:
    """The real thing, at a point that the journal shows."""
    code = (
        "import sys; from inkling_portable.commands.convert import convert; "
        "from inkling_portable.conversion import blocks; import time; real = blocks.convert_block; "
        "blocks.convert_block = lambda *a: (time.sleep(0.02), real(*a))[1]; "
        "convert(*sys.argv[1:], 'nvfp4', commit_seconds=0)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, source, tmp_path / "out"], cwd=ROOT)
    journal = tmp_path / "out/.converting/journal"
    end = time.monotonic() + 60
    while not (journal.exists() and b"experts.w2" in journal.read_bytes()):
        assert child.poll() is None and time.monotonic() < end
        time.sleep(0.005)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [".converting"]
    convert(source, tmp_path / "out", "nvfp4")
    assert content(tmp_path / "out") == whole


def interrupt(source: Path, folder: Path, point: int = 100) -> None:
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, point, torn=False)
        with pytest.raises(Killed):
            convert(source, folder, "nvfp4", commit_seconds=0)


def test_other_settings_do_not_go_on(source, whole, tmp_path: Path) -> None:
    interrupt(source, tmp_path / "out")
    with pytest.raises(ConvertError, match="unfinished output of another conversion; repeat"):
        convert(source, tmp_path / "out", "mxfp4")
    with pytest.raises(ConvertError, match="unfinished output of another conversion"):
        convert(source, tmp_path / "out", "nvfp4", layers={1})
    assert content(tmp_path / "out").keys() < {f".converting/{n}" for n in [*whole, "journal"]}
    convert(source, tmp_path / "out", "mxfp4", force=True)
    assert "hf_quant_config.json" not in content(tmp_path / "out")
    # A source that has changed is another conversion too.
    interrupt(source, tmp_path / "changed")
    os.utime(source / "mtp.safetensors", (1, 1))
    with pytest.raises(ConvertError, match="another conversion"):
        convert(source, tmp_path / "changed", "nvfp4")


def test_spoilt_leftovers(source, whole, tmp_path: Path) -> None:
    """A cut-off journal costs a few blocks; a file of another size is not built upon."""
    interrupt(source, tmp_path / "out")
    journal = tmp_path / "out/.converting/journal"
    journal.write_bytes(journal.read_bytes()[:-9])
    convert(source, tmp_path / "out", "nvfp4")
    assert content(tmp_path / "out") == whole
    interrupt(source, tmp_path / "cut")
    file = next((tmp_path / "cut/.converting").glob("model-*"))
    os.truncate(file, 100)
    with pytest.raises(ConvertError, match="files have been changed"):
        convert(source, tmp_path / "cut", "nvfp4")
    convert(source, tmp_path / "cut", "nvfp4", force=True)
    assert content(tmp_path / "cut") == whole


def test_a_former_checkpoint_stays_until_the_new_one_is_whole(source, whole, tmp_path) -> None:
    convert(source, tmp_path / "out", "mxfp4")
    former = content(tmp_path / "out")
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, 150, torn=False)
        with pytest.raises(Killed):
            convert(source, tmp_path / "out", "nvfp4", force=True, commit_seconds=0)
    left = content(tmp_path / "out")
    assert {n: left[n] for n in former} == former
    with pytest.raises(ConvertError, match="not empty; name another folder or pass --force"):
        convert(source, tmp_path / "out", "nvfp4")
    convert(source, tmp_path / "out", "nvfp4", force=True)
    assert content(tmp_path / "out") == whole


def test_two_at_once(source, tmp_path: Path, monkeypatch) -> None:
    from inkling_portable.conversion import blocks

    said: list[str] = []
    real = blocks.convert_block

    def convert_block(*arguments: Any) -> Any:
        if not said:
            with pytest.raises(ConvertError) as error:
                convert(source, tmp_path / "out", "nvfp4")
            said.append(str(error.value))
        return real(*arguments)

    monkeypatch.setattr(blocks, "convert_block", convert_block)
    convert(source, tmp_path / "out", "nvfp4")
    assert "another process is converting into" in said[0]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk(source, whole, tmp_path: Path, monkeypatch, capsys, number: int) -> None:
    real, written = os.pwrite, 0

    def pwrite(descriptor: int, data: Any, at: int) -> int:
        nonlocal written
        written += len(data)
        if written > 600_000:
            raise OSError(number, os.strerror(number))
        return real(descriptor, data, at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        assert command.main([str(source), str(tmp_path / "out"), "--to", "nvfp4", "--quiet"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "disk is full" in error
    assert "tensor model." in error and ".safetensors" in error
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [".converting"]
    convert(source, tmp_path / "out", "nvfp4")
    assert content(tmp_path / "out") == whole


def test_too_small_a_disk_is_seen_before_anything_is_written(source, tmp_path, monkeypatch) -> None:
    import shutil
    from types import SimpleNamespace

    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**6))
    with pytest.raises(ConvertError, match=r"needs \d\.\d MB and its disk has 1\.0 MB free"):
        convert(source, tmp_path / "out", "nvfp4")
    assert not list((tmp_path / "out").rglob("*.safetensors"))


def sparse_checkpoint(folder: Path, source: Path) -> Iterator[tuple[str, int]]:
    """A checkpoint of zeros whose embedding and experts are large, as a file of holes.

    Yields name and bytes of every tensor.
    """
    from inkling_portable.commands.tiny_tensors import tensor_specs

    raw = json.loads((source / "config.json").read_text())
    raw.pop("mtp_config")
    raw |= {"hidden_size": 2048, "intermediate_size": 2048, "n_routed_experts": 1,
            "moe_intermediate_size": 2048, "num_experts_per_tok": 1, "num_hidden_layers": 2,
            "local_layer_ids": [0], "vocab_size": 65536, "unpadded_vocab_size": 65000}  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    header: dict[str, Any] = {}
    at = 0
    for spec in tensor_specs(parse(raw)):
        count = 4 if spec.fp32 else 2
        for size in spec.shape:
            count *= size
        header[spec.name] = {"dtype": "F32" if spec.fp32 else "BF16", "shape": list(spec.shape),
                             "data_offsets": [at, at + count]}  # fmt: skip
        at += count
        yield spec.name, count
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)


def test_memory_does_not_grow_with_tensors(source, tmp_path: Path) -> None:
    """An expert of 8 million weights and an embedding of 268 MB.

    Rounding the expert as a whole would take about 60 bytes for each weight.
    """
    sizes = dict(sparse_checkpoint(tmp_path / "large", source))
    assert sizes["model.llm.embed.weight"] >= 2**28
    code = (
        "import sys, resource; from inkling_portable.commands.convert import convert; "
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; "
        "convert(sys.argv[1], sys.argv[2] + '/small', 'mxfp4'); before = peak(); "
        "convert(sys.argv[3], sys.argv[2] + '/out', 'mxfp4', layers={1}, threads=2); "
        "print(peak() - before)"
    )
    arguments = [sys.executable, "-c", code, source, tmp_path, tmp_path / "large"]
    found = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=True)
    unit = 1 if sys.platform == "darwin" else 1024
    assert int(found.stdout) * unit < 300e6, found.stdout
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * unit < 2e9
