"""The payload of a call, `{"name": NAME, "args": {...}}`, read while it is being generated.

A call is announced once its name is known and its arguments have begun, which in the order that
the model was trained on is long before it ends. What is announced is never taken back: arguments
go out word for word, so that a client who got half of a broken call can see what broke. A payload
of any other shape is judged when it is complete, and one that is no call at all is text.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

# `name` first, then `args` with an object: what can be passed on while it grows.
_OPENING = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"args"\s*:\s*(?=\{)', re.DOTALL
)
_OPENING_LIMIT = 4096
"""An opening longer than this is left to the end, so that no payload is scanned twice a token."""
_STRUCTURE = re.compile(r'["{}\[\]]')
_STRING_END = re.compile(r'["\\]')
_CLOSES = {"{": "}", "[": "]"}


@dataclass(frozen=True)
class Announced:
    """A call begins. `raw` is the payload's text up to its arguments."""

    name: str
    raw: str


@dataclass(frozen=True)
class Arguments:
    """More of the arguments of the call announced last. `raw` is the payload's text for them."""

    text: str
    raw: str


@dataclass(frozen=True)
class Rest:
    """Text of the payload that is no part of a call: to be shown, never dropped."""

    text: str


Part = Announced | Arguments | Rest


@dataclass
class Payload:
    """One payload; feed it as it comes and `finish` it at its end marker or when output ends.

    `header` is the function name that stood before the opener, used where the payload has none.
    """

    header: str = ""
    _held: str = ""
    _announced: bool = False
    _open: list[str] = field(default_factory=list)
    _in_string: bool = False
    _escaped: bool = False
    _complete: bool = False

    def feed(self, text: str) -> list[Part]:
        if not self._announced:
            self._held += text
            if len(self._held) > _OPENING_LIMIT + len(text):
                return []
            found = _OPENING.match(self._held, 0, _OPENING_LIMIT)
            name = _loads(found.group(1)) if found else None
            if found is None or not isinstance(name, str) or not name:
                return []
            self._announced = True
            raw, text, self._held = self._held[: found.end()], self._held[found.end() :], ""
            return [Announced(name, raw), *self._grow(text)]
        return self._grow(text)

    def _grow(self, text: str) -> list[Part]:
        """Pass on what belongs to the arguments and keep what follows them."""
        if self._complete:
            self._held += text
            return []
        end = self._end_of_arguments(text)
        self._held += text[end:]
        return [Arguments(text[:end], text[:end])] if end else []

    def _end_of_arguments(self, text: str) -> int:
        """Where in `text` the arguments end, or its length. Brackets count, inside no string."""
        at = 0
        while at < len(text):
            if self._escaped:
                self._escaped, at = False, at + 1
                continue
            found = (_STRING_END if self._in_string else _STRUCTURE).search(text, at)
            if found is None:
                return len(text)
            mark, at = found.group(), found.end()
            if self._in_string:
                self._in_string = mark != '"'
                self._escaped = mark == "\\"
            elif mark == '"':
                self._in_string = True
            elif mark in _CLOSES:
                self._open.append(_CLOSES[mark])
            elif self._open and self._open[-1] == mark:
                self._open.pop()
                if not self._open:
                    self._complete = True
                    return at
            # A bracket that closes nothing stays in the arguments: the client sees what broke.
        return at

    def finish(self) -> list[Part]:
        """What is still to be said when the block has ended."""
        rest, self._held = self._held, ""
        if not self._announced:
            return self._judge(rest)
        if self._complete and _is_tail(rest):
            return [Arguments("", rest)] if rest else []
        return [Rest(rest)] if rest.strip() else []

    def _judge(self, text: str) -> list[Part]:
        """A whole payload that was not in the usual order."""
        call = _loads(text)
        if not isinstance(call, dict):
            return [Rest(text)] if text.strip() else []
        name = call.get("name")
        if not isinstance(name, str) or not name:
            name = self.header
        if not name:
            return [Rest(text)]
        return [Announced(name, ""), Arguments(_arguments(call), text)]


def _arguments(call: dict[str, Any]) -> str:
    """The arguments of a parsed payload, as the JSON text that clients expect."""
    for key in ("args", "arguments", "parameters"):
        if (value := call.get(key)) is not None:
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return "{}"


def _is_tail(text: str) -> bool:
    """Whether `text` may follow the arguments: more members, if any, and the closing brace."""
    return isinstance(_loads('{"":0' + text), dict)


def _loads(text: str) -> Any:
    """The JSON value of `text`, or None, which no payload of ours is."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
