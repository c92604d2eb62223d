"""Damaged safetensors headers, indexes and values: each a sentence that names file and remedy."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from inkling_portable.model import loading
from inkling_portable.model.checkpoint import CheckpointError

FILE = "model.safetensors"
ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def write(folder: Path, header: Any) -> None:
    text = json.dumps(header).encode()
    (folder / FILE).write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))


def refused(folder: Path, file: str, cause: str) -> None:
    with pytest.raises(
        CheckpointError, match=rf"^file {file} [^\n]*{cause}[^\n]*download"
    ) as error:
        loading.read_headers(folder)
    assert str(error.value).count(". ") == 0


def test_a_sound_file(tmp_path: Path) -> None:
    write(tmp_path, {"__metadata__": {"format": "pt"}, "a": ENTRY})
    assert loading.read_headers(tmp_path).shapes == {"a": (2,)}


@pytest.mark.parametrize("header", [[], [{"a": ENTRY}], "a", None, 3])
def test_a_header_that_is_no_object(tmp_path: Path, header: Any) -> None:
    write(tmp_path, header)
    refused(tmp_path, FILE, "damaged header")


@pytest.mark.parametrize(
    "entry",
    [
        *({k: v for k, v in ENTRY.items() if k != gone} for gone in ENTRY),
        ENTRY | {"dtype": 3},
        ENTRY | {"shape": "2"},
        ENTRY | {"shape": [2.5]},
        ENTRY | {"shape": None},
        ENTRY | {"data_offsets": [0]},
        ENTRY | {"data_offsets": [0, "8"]},
        ENTRY | {"data_offsets": [-8, 8]},
        None,
        [0, 8],
    ],
)
def test_a_header_entry_without_its_parts(tmp_path: Path, entry: Any) -> None:
    write(tmp_path, {"sound": ENTRY, "spoilt": entry})
    refused(tmp_path, FILE, "tensor spoilt needs a dtype, a shape and two data_offsets")


@pytest.mark.parametrize(
    "text",
    [
        b"{}",
        b'{"metadata": {}}',
        b'{"weight_map": {"a": "model.safe',
        b'{"weight_map": ["model.safetensors"]}',
        b'{"weight_map": null}',
        b"[]",
        b"null",
        b"",
        b"version https://git-lfs.github.com/spec/v1",
        b"\xff\xfe\x80",
    ],
)
def test_a_damaged_index(tmp_path: Path, text: bytes) -> None:
    write(tmp_path, {"a": ENTRY})
    (tmp_path / loading.INDEX).write_bytes(text)
    refused(tmp_path, loading.INDEX, "damaged")


@pytest.mark.parametrize("name", ["other.safetensors", 3, None, ["model.safetensors"], ""])
def test_an_index_naming_a_file_that_is_not_there(tmp_path: Path, name: Any) -> None:
    write(tmp_path, {"a": ENTRY})
    (tmp_path / loading.INDEX).write_text(json.dumps({"weight_map": {"a": FILE, "b": name}}))
    with pytest.raises(CheckpointError, match=r"is missing from|missing from .*; complete|damaged"):
        loading.read_headers(tmp_path)
