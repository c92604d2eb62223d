"""A byte-level tokenizer of any size that has all of Inkling's special tokens.

Ids 0 to 255 are the bytes, then come merged pieces, and the special tokens end the vocabulary as
in the released one. The pieces are made by rule, not trained: they only have to exist, so that
every valid id has a text, and to be the same each time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from inkling_portable.commands.tiny_presets import (
    RELEASED_BLOCK_START,
    SPECIAL_BLOCK,
    SPECIAL_TOKENS,
)

_FREQUENT = " etaoinshrdlucmfwypvbgkjqxz"
"""Letters by their frequency in English text: pieces of frequent letters come first."""


def special_tokens(vocab: int) -> dict[str, int]:
    """Every special token of a vocabulary of `vocab` valid ids, the unused ones included."""
    start = vocab - SPECIAL_BLOCK
    named = {offset: token for token, offset in SPECIAL_TOKENS.items()}
    return {
        named.get(offset, f"<|unused_{RELEASED_BLOCK_START + offset}|>"): start + offset
        for offset in range(SPECIAL_BLOCK)
    }


def byte_symbols() -> list[str]:
    """The visible character that stands for each byte in a byte-level vocabulary."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte) if byte in visible else chr(next(spare)) for byte in range(256)]


def merged_pieces(count: int) -> list[tuple[str, str]]:
    """The first `count` merges, each of two pieces that exist before it."""
    symbols = byte_symbols()
    letters = [symbols[ord(letter)] for letter in _FREQUENT]
    printable = [symbols[code] for code in range(32, 127)]
    merges: list[tuple[str, str]] = []
    seen: set[str] = set(symbols)
    for left, right in _pairs(letters, printable):
        if len(merges) == count:
            break
        if left + right not in seen:
            seen.add(left + right)
            merges.append((left, right))
    return merges


def _pairs(letters: list[str], printable: list[str]) -> Iterator[tuple[str, str]]:
    """Pairs of letters, frequent ones first, then growing strings of printable characters."""
    ranked = [(i + j, i, j) for i in range(len(letters)) for j in range(1, len(letters))]
    yield from ((letters[i], letters[j]) for _, i, j in sorted(ranked))
    level = printable
    while True:
        for left in level:
            for right in printable:
                yield left, right
        level = [left + right for left in level for right in printable]


def write_tokenizer(folder: Path, vocab: int, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json for `vocab` valid ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    specials = special_tokens(vocab)
    merges = merged_pieces(vocab - SPECIAL_BLOCK - 256)
    pieces = byte_symbols() + [left + right for left, right in merges]
    ids = {piece: index for index, piece in enumerate(pieces)} | specials
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in specials]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|content_model_end_sampling|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
