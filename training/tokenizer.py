"""portable-nano's tokenizer: bytes, whole words and Inkling's special tokens, without merges.

The vocabulary ends with the block of special tokens, as the released one does. A word that is in
the vocabulary is one token; any other text is its bytes.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from inkling_portable.commands.eval_words import PATTERN, pieces
from inkling_portable.commands.tiny_presets import SPECIAL_BLOCK
from inkling_portable.commands.tiny_tokenizer import byte_symbols, special_tokens


def vocabulary_size() -> int:
    """Number of valid ids."""
    return 256 + len(pieces()) + SPECIAL_BLOCK


@cache
def _words() -> dict[str, int]:
    return {piece: 256 + index for index, piece in enumerate(pieces())}


@cache
def special_ids() -> dict[str, int]:
    """Ids of all special tokens by their text."""
    return special_tokens(vocabulary_size())


_CUT = re.compile(PATTERN)


def encode(text: str) -> list[int]:
    """Ids of plain text, in which no special token is recognised; what the written file does."""
    words, ids = _words(), []
    for piece in _CUT.findall(text):
        known = words.get(piece)
        if known is None:
            ids.extend(piece.encode())
        else:
            ids.append(known)
    return ids


def write(folder: Path, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    symbols = byte_symbols()
    ids = {symbol: index for index, symbol in enumerate(symbols)}
    for piece, index in _words().items():
        ids["".join(symbols[byte] for byte in piece.encode())] = index
    tokenizer = Tokenizer(models.BPE(vocab=ids | special_ids(), merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special_ids()]
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
