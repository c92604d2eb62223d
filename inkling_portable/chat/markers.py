"""The special tokens of Inkling's chat layout and the levels of reasoning effort.

Facts from section 7 of the model's specification; ids are always taken from the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

USER = "<|message_user|>"
MODEL = "<|message_model|>"
SYSTEM = "<|message_system|>"
TOOL = "<|message_tool|>"
TEXT = "<|content_text|>"
THINKING = "<|content_thinking|>"
IMAGE = "<|content_image|>"
AUDIO = "<|content_audio_input|>"
AUDIO_END = "<|audio_end|>"
XML = "<|content_xml|>"
CALL = "<|content_invoke_tool_json|>"
CALL_TEXT = "<|content_invoke_tool_text|>"
TOOL_ERROR = "<|content_tool_error|>"
END_MESSAGE = "<|end_message|>"
END_SAMPLING = "<|content_model_end_sampling|>"

ROLES = (USER, MODEL, SYSTEM, TOOL)
OPENERS = (TEXT, THINKING, IMAGE, AUDIO, XML, CALL, CALL_TEXT, TOOL_ERROR)
ENDS = (END_MESSAGE, END_SAMPLING)
OTHER_SPELLINGS = {XML: "<|unused_200024|>"}
"""What the released tokenizer calls a token that the layout knows under another name."""

RENDERED = (*ROLES, TEXT, THINKING, IMAGE, AUDIO, AUDIO_END, XML, CALL, END_MESSAGE, END_SAMPLING)
"""What a prompt can hold, so what a tokenizer must have."""

EFFORTS: Mapping[str, float] = {
    "none": 0.0,
    "minimal": 0.1,
    "low": 0.2,
    "medium": 0.7,
    "high": 0.9,
    "xhigh": 0.99,
    "max": 0.99,
}
DEFAULT_EFFORT = 0.9
LARGEST_EFFORT = 0.99


def special_ids(vocabulary: Mapping[str, int]) -> dict[str, int]:
    """The id of each marker in `RENDERED`.

    Raises ValueError if the vocabulary lacks one under every spelling.
    """
    ids: dict[str, int] = {}
    missing: list[str] = []
    for marker in RENDERED:
        found = vocabulary.get(marker, vocabulary.get(OTHER_SPELLINGS.get(marker, marker)))
        if found is None:
            missing.append(marker)
        else:
            ids[marker] = found
    if missing:
        raise ValueError(
            f"Inkling's chat layout needs the tokens {', '.join(missing)} and this tokenizer lacks "
            "them; serve the checkpoint with its own tokenizer"
        )
    return ids


def effort(value: object) -> float:
    """The level in [0, 0.99] that a request's `reasoning_effort` means; None is the default.

    Raises ValueError for an unknown name, a number out of range, or anything else.
    """
    if value is None:
        return DEFAULT_EFFORT
    if isinstance(value, str):
        if value in EFFORTS:
            return EFFORTS[value]
        names = ", ".join(EFFORTS)
        raise ValueError(
            f"reasoning_effort must be one of {names}, or a number from 0 to {LARGEST_EFFORT}; "
            f"found {value[:40]!r}"
        )
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(
            f"reasoning_effort must be a name or a number; found a {type(value).__name__}"
        )
    if not 0 <= value <= LARGEST_EFFORT:
        raise ValueError(f"reasoning_effort must lie between 0 and {LARGEST_EFFORT}; found {value}")
    return float(value)


def effort_text(level: float) -> str:
    """The sentence that tells the model: at most two decimals, and zero as `0.0`."""
    shown = f"{level:.2f}".rstrip("0").rstrip(".")
    return f"Thinking effort level: {'0.0' if shown in ('0', '-0') else shown}"
