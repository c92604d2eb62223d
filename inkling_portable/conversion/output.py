"""Where a conversion writes: files of their final size filled in place, a journal, and the move.

Everything is written below `DST/.converting`. The journal there has a line for each block that is
on the disk, so a killed conversion goes on where it was. Only whole output is moved to DST: weights
first, the index and other files then, and config.json, without which nothing loads, last.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from inkling_portable.conversion.blocks import Energy
from inkling_portable.conversion.plan import Job, Plan
from inkling_portable.conversion.source import BYTES, INDEX, SIDECAR, ConvertError, Source

if TYPE_CHECKING:
    from torch import Tensor

STAGING = ".converting"
JOURNAL = "journal"
REPORT = "conversion.json"
COMMIT_SECONDS = 2.0
"""Blocks that were finished within this time become durable together."""
WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack"}
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Output:
    """One conversion's folder `DST/.converting`, locked while this object is entered.

    done    blocks that are on the disk, by (job, block), with their energies
    """

    def __init__(self, folder: Path, plan: Plan, commit_seconds: float = COMMIT_SECONDS) -> None:
        self.folder = folder
        self.staging = folder / STAGING
        self.plan = plan
        self.done: dict[tuple[str, int], Energy] = {}
        self.moving = False
        self._pause = commit_seconds
        self._open: dict[str, int] = {}
        self._dirty: set[str] = set()
        self._pending: list[str] = []
        self._committed = time.monotonic()
        self._journal = -1

    # --- beginning and ending -------------------------------------------------------------------

    def start(self, force: bool) -> None:
        """Make the folder, or take up what a former run of the same conversion left.

        Raises ConvertError if the folder holds something else and `force` is not given, if another
        process is at it, or if the disk is too small.
        """
        if self.folder.exists() and not self.folder.is_dir():
            raise ConvertError(f"{self.folder} is a file; name a folder")
        other = self.folder.is_dir() and any(p.name != STAGING for p in self.folder.iterdir())
        if other and not (self.staging / JOURNAL).is_file():
            self._require(force)
        self.staging.mkdir(parents=True, exist_ok=True)
        self._journal = os.open(self.staging / JOURNAL, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConvertError(
                f"another process is converting into {self.folder}; wait for it or name another "
                "folder"
            ) from None
        known = self._read_journal(force)
        if other and not self.moving:
            self._require(force)
        if known:
            self._open_files()
            return
        for path in self.staging.iterdir():
            if path.name != JOURNAL:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        free = shutil.disk_usage(self.staging).free
        if free < self.plan.nbytes:
            raise ConvertError(
                f"{self.folder} needs {gigabytes(self.plan.nbytes)} and its disk has "
                f"{gigabytes(free)} free; make room or name a folder on another disk"
            )
        os.ftruncate(self._journal, 0)
        self._open_files()
        for file, (header, size) in self.plan.files.items():
            with _disk(file, "the header"):
                os.ftruncate(self._open[file], size)
            self._dirty.add(file)
            self._put(file, "the header", memoryview(header), 0)
        # The line that says what the rest is for comes after all it relies on.
        self._commit([json.dumps({"plan": self.plan.digest})])

    def _require(self, force: bool) -> None:
        if not force:
            raise ConvertError(f"{self.folder} is not empty; name another folder or pass --force")

    def __enter__(self) -> Output:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        for descriptor in self._open.values():
            os.close(descriptor)
        if self._journal >= 0:
            os.close(self._journal)

    def _read_journal(self, force: bool) -> bool:
        """Whether the journal is of this conversion, which then goes on; else it starts anew."""
        text = Path(self.staging / JOURNAL).read_bytes()
        good = 0
        plan = None
        for line in text.splitlines(keepends=True):
            try:
                entry = json.loads(line)
                if not line.endswith(b"\n"):
                    break
                if plan is None:
                    plan = entry["plan"]
                elif "moving" in entry:
                    self.moving = True
                else:
                    self.done[entry["job"], entry["block"]] = Energy(*entry["energy"])
            except (ValueError, KeyError, TypeError):
                break  # cut off by the end of a former run; its block is done again
            good += len(line)
        if plan is None:
            return False
        found = "of another conversion" if plan != self.plan.digest else ""
        if not found and not self.moving and not self._files_are_there():
            found = "whose files have been changed"
        if not found:
            os.ftruncate(self._journal, good)
            os.lseek(self._journal, 0, os.SEEK_END)
            return True
        if not force:
            raise ConvertError(
                f"{self.folder} has unfinished output {found}; repeat that command to finish it, "
                "or pass --force to start anew"
            )
        self.done.clear()
        self.moving = False
        return False

    def _files_are_there(self) -> bool:
        paths = [(self.staging / file, size) for file, (_, size) in self.plan.files.items()]
        return all(path.is_file() and path.stat().st_size == size for path, size in paths)

    def _open_files(self) -> None:
        """All at once, since threads share them."""
        if not self.moving:
            for file in self.plan.files:
                path = self.staging / file
                path.parent.mkdir(parents=True, exist_ok=True)
                self._open[file] = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)

    # --- writing --------------------------------------------------------------------------------

    def write(self, name: str, row: int, values: Tensor) -> None:
        """Store rows of tensor `name` from row `row` on, seen as [rows of all experts, columns]."""
        import torch

        slot = self.plan.slots[name]
        shape = slot.part.shape
        flat = values.contiguous().view(torch.uint8).reshape(-1).numpy()
        width = BYTES[slot.part.dtype] * (shape[-1] if len(shape) > 1 else 1)
        self.write_bytes(name, row * width, memoryview(flat.data))

    def write_bytes(self, name: str, offset: int, data: memoryview) -> None:
        slot = self.plan.slots[name]
        self._put(slot.file, f"tensor {name}", data, slot.start + offset)

    def _put(self, file: str, what: str, data: memoryview, at: int) -> None:
        while data:
            with _disk(file, what):
                count = os.pwrite(self._open[file], data, at)
            data, at = data[count:], at + count

    def finish_block(self, job: Job, block: int, energy: Energy) -> None:
        """Note that a block is written; from the next commit on it survives anything."""
        self.done[job.key, block] = energy
        self._dirty |= {self.plan.slots[part.name].file for part in job.target.values()}
        entry = {"job": job.key, "block": block, "energy": list(energy)}
        self._pending.append(json.dumps(entry))
        if time.monotonic() - self._committed >= self._pause:
            self.commit()

    def commit(self) -> None:
        """Make all finished blocks durable: their data first, then their lines in the journal."""
        lines, self._pending = self._pending, []
        self._commit(lines)

    def _commit(self, lines: list[str]) -> None:
        for file in sorted(self._dirty):
            with _disk(file, "the data"):
                os.fsync(self._open[file])
        self._dirty.clear()
        text = "".join(f"{line}\n" for line in lines).encode()
        with _disk(JOURNAL, "a line"):
            while text:
                text = text[os.write(self._journal, text) :]
            os.fsync(self._journal)
        self._committed = time.monotonic()

    # --- the end --------------------------------------------------------------------------------

    def place(self, source: Source, report: dict[str, Any]) -> None:
        """Move whole output to the folder, config.json last, and remove what was below it.

        A checkpoint that was there before goes when all of the new one is ready.
        """
        if not self.moving:
            self.commit()
            self._write_small_files(source, report)
            self._remove_former()
            self._commit([json.dumps({"moving": True})])
        ready = [p for p in sorted(self.staging.rglob("*")) if p.is_file() and p.name != JOURNAL]
        for path in sorted(ready, key=self._order):
            target = self.folder / path.relative_to(self.staging)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)
        _sync_folder(self.folder)
        for path in self.staging.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
        (self.staging / JOURNAL).unlink()
        self.staging.rmdir()

    def _order(self, path: Path) -> tuple[int, str]:
        name = path.relative_to(self.staging).as_posix()
        rank = {"config.json": 3, INDEX: 1}.get(name, 0 if name in self.plan.files else 2)
        return rank, name

    def _write_small_files(self, source: Source, report: dict[str, Any]) -> None:
        for path in sorted(source.folder.rglob("*")):
            inside = path.relative_to(source.folder)
            hidden = any(part.startswith(".") for part in inside.parts)
            own = inside.as_posix() in ("config.json", INDEX, SIDECAR, REPORT)
            if path.is_file() and not hidden and not own and path.suffix not in WEIGHT_SUFFIXES:
                target = self.staging / inside
                target.parent.mkdir(parents=True, exist_ok=True)
                with _disk(inside.as_posix(), "the copy"):
                    shutil.copyfile(path, target)
        made = {INDEX: self.plan.index, SIDECAR: self.plan.sidecar,
                "config.json": self.plan.config, REPORT: report}  # fmt: skip
        for name, content in made.items():
            if content is not None:
                with _disk(name, "the text"):
                    (self.staging / name).write_text(json.dumps(content, indent=2) + "\n", "utf-8")
        _sync_folder(self.staging)

    def _remove_former(self) -> None:
        """Remove a former checkpoint, beginning with the config that makes it load."""
        names = ["config.json", INDEX, SIDECAR, REPORT]
        names += [p.name for p in self.folder.glob("*.safetensors")]
        for name in names:
            (self.folder / name).unlink(missing_ok=True)


@contextmanager
def _disk(file: str, what: str) -> Iterator[None]:
    """Says what of which file could not be written, and why."""
    try:
        yield
    except OSError as error:
        full = "the disk is full: " if error.errno in FULL else ""
        raise ConvertError(
            f"{what} of {file} cannot be written ({full}{error.strerror}); mend that and repeat "
            "the command, which goes on from there"
        ) from error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def gigabytes(count: float) -> str:
    """Bytes for people."""
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
