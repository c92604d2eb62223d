"""Damaged safetensors headers, indexes and values: each a sentence that names file and remedy."""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from inkling_portable.model import loading
from inkling_portable.model.checkpoint import CheckpointError, Copy, Stored

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


def load(values: Tensor, allow: bool = False, **options: Any) -> Tensor:
    """What arrives of one tensor `a`."""
    module = nn.Module()
    module.a = nn.Parameter(torch.zeros_like(values), requires_grad=False)
    plan = {"a": Stored(tuple(values.shape), (Copy("a"), Copy("a")))}
    loading.load(module, [("a", values)], plan, loading.Files(), allow, **options)
    return module.a.data


CODES = {
    torch.float8_e4m3fn: ([0x7E, 0xFE, 0x00, 0x80], [0x7F, 0xFF]),
    torch.float8_e5m2: ([0x7B, 0xFB, 0x00, 0x80], [0x7C, 0xFC, 0x7D, 0xFF]),
    torch.float8_e4m3fnuz: ([0x7F, 0xFF, 0x00, 0x81], [0x80]),
    torch.float8_e5m2fnuz: ([0x7F, 0xFF, 0x00, 0x81], [0x80]),
    torch.float8_e8m0fnu: ([0x00, 0xFE], [0xFF]),
}
"""Per type of eight bits, some finite codes and all or some of the others, by its definition."""


@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_eight_bits_that_are_no_number(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "WIDENED", 4)
    good, bad = CODES[dtype]
    sound = torch.tensor(good * 4, dtype=torch.uint8).view(2, -1)
    assert torch.equal(load(sound.view(dtype)).view(torch.uint8), sound)
    for code in bad:
        for place in (0, -1):
            spoilt = sound.clone()
            spoilt[place, place] = code
            with pytest.raises(CheckpointError, match=r"tensor a in .* has NaN or infinite values"):
                load(spoilt.view(dtype))


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """What the loader warns of, however the loggers above it are set."""
    heard = Heard()
    loading.logger.addHandler(heard)
    yield heard.messages
    loading.logger.removeHandler(heard)


NAN, SOUND = torch.tensor([1.0, float("nan")]), torch.ones(2)


def test_one_warning_for_target_and_draft(warnings: list[str]) -> None:
    load(NAN, True)
    assert warnings == [
        "NaN or infinite values, which additional_config allows, are in 1 of the tensors loaded; "
        "the first is a in the weight stream"
    ]
    load(NAN, True, draft=True)
    assert len(warnings) == 1
    load(NAN, True)  # another start in the same process
    assert len(warnings) == 2


def test_a_draft_warns_where_the_target_had_no_reason(warnings: list[str]) -> None:
    load(SOUND, True)
    assert not warnings
    load(NAN, True, draft=True)
    assert len(warnings) == 1


@pytest.mark.parametrize(("values", "others"), [(NAN, []), (SOUND, ["b in x"]), (NAN, ["b in x"])])
def test_one_rank_warns_for_all(warnings: list[str], values: Tensor, others: list[str]) -> None:
    load(values, True, ranks=loading.Ranks(0, lambda own: [own, others]))
    assert len(warnings) == 1
    load(values, True, ranks=loading.Ranks(1, lambda own: [others, own]))
    assert len(warnings) == 1
