"""OpenAI-style messages to the token ids of Inkling's chat layout.

Section 7 of the model's specification, which is what vLLM's encoder does too, with two differences:
text is encoded with special tokens switched off, so that a user who writes `<|end_message|>` has
written fourteen characters and not the end of a message; and an assistant's turn without any block
leaves nothing behind, as in the model's own template.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from inkling_portable.chat import markers
from inkling_portable.chat.payload import escape_surrogates

_ROLE_MARKERS = {
    "user": markers.USER,
    "assistant": markers.MODEL,
    "system": markers.SYSTEM,
    "developer": markers.SYSTEM,
    "tool": markers.TOOL,
}
_IMAGE_PARTS = frozenset({"image", "input_image", "image_url"})
_AUDIO_PARTS = frozenset({"audio", "input_audio", "audio_url"})
_TEXT_PARTS = frozenset({None, "text", "input_text", "output_text"})

Piece = tuple[str, bool]
"""A marker (True) or text (False)."""


class Encoder:
    """Turns pieces into ids: markers by the vocabulary, text with no special token recognised."""

    def __init__(
        self, vocabulary: Mapping[str, int], encode_text: Callable[[str], Sequence[int]]
    ) -> None:
        self._ids = markers.special_ids(vocabulary)
        self._encode_text = encode_text

    def encode(self, pieces: Iterator[Piece]) -> list[int]:
        ids: list[int] = []
        for text, is_marker in pieces:
            if is_marker:
                ids.append(self._ids[text])
            elif text:
                ids.extend(self._encode_text(text))
        return ids


def render(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    effort: float | None = markers.DEFAULT_EFFORT,
    add_generation_prompt: bool = True,
) -> Iterator[Piece]:
    """The pieces of a conversation in order.

    `effort` None leaves the effort block out. Images are their opener alone and clips their opener
    and `<|audio_end|>`: the processor inserts the slots.

    Raises ValueError, with the number of the message, for what the layout has no place for.
    """
    declared = [*tools]
    for message in messages:
        if message.get("role") == "developer":
            declared += message.get("tools") or []
    if declared:
        yield from _block("system", markers.XML, declarations(declared), author="tool_declare")
    effort_due = effort is not None
    names: dict[str, str] = {}
    for number, message in enumerate(messages):
        try:
            role = _role(message)
            if effort_due and role not in ("system", "developer"):
                yield from _effort_block(effort)
                effort_due = False
            yield from _message(role, message, names)
        except ValueError as error:
            raise ValueError(f"message {number}: {error}") from None
    if effort_due:
        yield from _effort_block(effort)
    if add_generation_prompt:
        yield markers.MODEL, True


def _effort_block(effort: float | None) -> Iterator[Piece]:
    assert effort is not None
    yield from _block("system", markers.TEXT, markers.effort_text(effort))


def _message(role: str, message: Mapping[str, Any], names: dict[str, str]) -> Iterator[Piece]:
    """The blocks of one message. `names` remembers which function each call id asked for."""
    if role == "tool":
        known = names.get(str(message.get("tool_call_id") or ""), "")
        author = str(message.get("name") or known)
        yield from _block("tool", markers.TEXT, _only_text(message.get("content")), author)
        return
    if role != "assistant":
        for kind, text in _parts(message.get("content")):
            yield from _block(role, kind, text)
        return
    blocks = list(_assistant_blocks(message, names))
    yield from blocks
    if blocks:
        yield markers.END_SAMPLING, True


def _assistant_blocks(message: Mapping[str, Any], names: dict[str, str]) -> Iterator[Piece]:
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning:
        if not isinstance(reasoning, str):
            raise ValueError(f"reasoning must be text; found a {type(reasoning).__name__}")
        yield from _block("assistant", markers.THINKING, reasoning)
    for kind, text in _parts(message.get("content")):
        yield from _block("assistant", kind, text)
    for call in message.get("tool_calls") or ():
        call = _mapping(call, "a tool call")
        name, arguments = _call(call)
        if call.get("id"):
            names[str(call["id"])] = name
        payload = f'{{"name":{canonical(name)},"args":{arguments}}}'
        yield from _block("assistant", markers.CALL, payload, author=name)


def _block(role: str, kind: str, text: str, author: str = "") -> Iterator[Piece]:
    yield _ROLE_MARKERS[role], True
    yield author, False
    yield kind, True
    if kind == markers.AUDIO:
        yield markers.AUDIO_END, True
    yield text, False
    yield markers.END_MESSAGE, True


def _role(message: Mapping[str, Any]) -> str:
    role = message.get("role")
    if role not in _ROLE_MARKERS:
        known = ", ".join(sorted(_ROLE_MARKERS))
        raise ValueError(f"role must be one of {known}; found {role!r}")
    return str(role)


def _parts(content: Any) -> Iterator[tuple[str, str]]:
    """(opener, text) of each content part. Empty text is a part only where a list says so."""
    if content is None or content == "":
        return
    if isinstance(content, str):
        yield markers.TEXT, content
        return
    if not isinstance(content, Sequence) or isinstance(content, (bytes, bytearray)):
        raise ValueError(f"content must be text or a list; found a {type(content).__name__}")
    for part in content:
        if isinstance(part, str):
            yield markers.TEXT, part
            continue
        kind = _mapping(part, "a content part").get("type")
        if kind in _TEXT_PARTS:
            text = part.get("text", "")
            yield markers.TEXT, text if isinstance(text, str) else ""
        elif kind in _IMAGE_PARTS:
            yield markers.IMAGE, ""
        elif kind in _AUDIO_PARTS:
            yield markers.AUDIO, ""
        else:
            raise ValueError(f"a content part must be text, an image or audio; found {kind!r}")


def _only_text(content: Any) -> str:
    """A tool's result: text, or the texts of its parts one after the other."""
    parts = list(_parts(content))
    if any(kind != markers.TEXT for kind, _ in parts):
        raise ValueError("a tool's result must be text; put images and audio into a user message")
    return "".join(text for _, text in parts)


def _call(call: Mapping[str, Any]) -> tuple[str, str]:
    """Name and JSON arguments of an earlier call, given as JSON text or as an object.

    Text that is no JSON, such as a call that was cut short, goes back as a JSON string: the answer
    that held it cannot be unsaid, and refusing it would end the conversation.
    """
    function = _mapping(call.get("function", {}), "a tool call's function")
    name = function.get("name")
    if not isinstance(name, str):
        raise ValueError("a tool call needs the name of its function")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments, parse_constant=_refuse) if arguments.strip() else {}
    elif not isinstance(arguments, Mapping):
        raise ValueError(
            f"the arguments of the call to {name} must be JSON text or an object; found a "
            f"{type(arguments).__name__}"
        )
    return name, canonical(arguments)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def declarations(tools: Sequence[Mapping[str, Any]]) -> str:
    """The JSON that tells the model which tools it has. Raises ValueError for what is no tool."""
    described = []
    for tool in tools:
        tool = _mapping(tool, "a tool")
        function = _mapping(tool.get("function", {}), "a tool's function")
        name, parameters = function.get("name"), function.get("parameters") or {}
        if not isinstance(name, str) or not name:
            raise ValueError("a tool needs the name of its function")
        check_schema(name, parameters)
        described.append(
            {
                "description": function.get("description") or "",
                "name": name,
                "parameters": parameters,
                "type": tool.get("type", "function"),
            }
        )
    return canonical(described)


def check_schema(name: str, parameters: Any) -> None:
    """Raises ValueError unless `parameters` is a JSON schema."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError

    try:
        Draft202012Validator.check_schema(parameters)
    except SchemaError as error:
        raise ValueError(
            f"the parameters of tool {name} are no JSON schema: {error.message[:200]}"
        ) from None
    except RecursionError:
        raise ValueError(f"the parameters of tool {name} are nested too deeply") from None


def canonical(value: Any) -> str:
    """JSON as the model was trained on it: sorted keys, no spaces, no NaN, and nothing escaped but
    halves of surrogate pairs, which are no text.
    """
    try:
        written = json.dumps(
            value,
            ensure_ascii=False,
            allow_nan=False,
            separators=(",", ":"),
            sort_keys=True,
            default=dict,
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"a value cannot be written as JSON: {error}") from None
    return escape_surrogates(written)


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if hasattr(value, "model_dump"):
        value = value.model_dump()
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} must be an object; found a {type(value).__name__}")
    return value
