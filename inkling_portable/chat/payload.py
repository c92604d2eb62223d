"""The payload of a call, `{"name": NAME, "args": {...}}`, read while it is being generated.

A call is announced once its name is known and its arguments have begun, which in the order that
the model was trained on is long before it ends. What is announced is never taken back, and
arguments go out word for word, so that a client who got half of a broken call can see what broke.
A payload in any other order is judged when it is complete, and one that is no call at all is text.
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
_SPACE = re.compile(r"[ \t\n\r]*")
_SURROGATE = re.compile("[\ud800-\udfff]")
# Numbers are only passed over: Python refuses to read whole ones of thousands of digits.
_READER = json.JSONDecoder(parse_int=str, parse_float=str)
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
    _opening: str = ""
    _later: list[str] = field(default_factory=list)
    """What is kept behind the opening: pieces, for a long string must not be copied per token."""
    _announced: bool = False
    _open: list[str] = field(default_factory=list)
    _in_string: bool = False
    _escaped: bool = False
    _complete: bool = False

    def feed(self, text: str) -> list[Part]:
        if not self._announced:
            if len(self._opening) > _OPENING_LIMIT:
                self._later.append(text)
                return []
            self._opening += text
            found = _OPENING.match(self._opening, 0, _OPENING_LIMIT)
            name = _name(found.group(1)) if found else ""
            if found is None or not name:
                return []
            self._announced = True
            raw, text = self._opening[: found.end()], self._opening[found.end() :]
            self._opening = ""
            return [Announced(name, raw), *self._grow(text)]
        return self._grow(text)

    def _grow(self, text: str) -> list[Part]:
        """Pass on what belongs to the arguments and keep what follows them."""
        if self._complete:
            self._later.append(text)
            return []
        end = self._end_of_arguments(text)
        self._later.append(text[end:])
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
        rest, self._opening, self._later = self._opening + "".join(self._later), "", []
        if not self._announced:
            return self._judge(rest)
        if self._complete and _is_tail(rest):
            return [Arguments("", rest)] if rest else []
        return [Rest(rest)] if rest.strip() else []

    def _judge(self, text: str) -> list[Part]:
        """A whole payload that was not in the usual order."""
        if not text.strip():
            return [Rest(self.header)] if self.header else []
        members = _members(text)
        if members is None:
            return [Rest(text)]
        name = _name(members.get("name", "")) or self.header
        if not name:
            return [Rest(text)]
        return [Announced(name, ""), Arguments(_arguments(members), text)]


def _arguments(members: dict[str, str]) -> str:
    """The arguments of a payload, as the text that clients expect."""
    for key in ("args", "arguments", "parameters"):
        raw = members.get(key, "null")
        if raw.startswith('"'):
            return escape_surrogates(str(_loads(raw)))
        if raw != "null":
            return raw
    return "{}"


def _name(raw: str) -> str:
    """The function's name of its JSON text, or "" if it is none that a client could be told."""
    value = _loads(raw)
    return value if isinstance(value, str) and escape_surrogates(value) == value else ""


def escape_surrogates(text: str) -> str:
    """Halves of surrogate pairs as the escapes they came from: no answer could hold them."""
    return _SURROGATE.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


def _is_tail(text: str) -> bool:
    """Whether `text` may follow the arguments: more members, if any, and the closing brace."""
    return _members('{"":0' + text) is not None


def _members(text: str) -> dict[str, str] | None:
    """The text of each member of a JSON object, word for word; None if it is no object."""
    members: dict[str, str] = {}
    mark = "{"
    at = _skip(text, 0)
    try:
        if text[at] != mark:
            return None
        at = _skip(text, at + 1)
        while text[at] != "}" or mark == ",":
            if text[at] != '"':
                return None
            key, at = _READER.raw_decode(text, at)
            at = _skip(text, at)
            if text[at] != ":":
                return None
            start = _skip(text, at + 1)
            _, end = _READER.raw_decode(text, start)
            members[key] = text[start:end]
            at = _skip(text, end)
            mark = text[at]
            if mark == ",":
                at = _skip(text, at + 1)
            elif mark != "}":
                return None
    except (ValueError, IndexError, RecursionError):
        return None
    return None if text[at + 1 :].strip() else members


def _skip(text: str, at: int) -> int:
    """The next place that holds no white space."""
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


def _loads(text: str) -> Any:
    """The JSON value of `text`, or None, which no payload of ours is."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
