"""Generated text to reasoning, content and calls: one machine for streams and for whole answers.

The model writes blocks, `ROLE [author] KIND payload END`, the first role being part of the prompt.
A whole answer is a stream of one piece, so the two cannot differ, and where the stream is cut
never matters: what could be the beginning of a marker waits for the next piece.

Rules where the layout leaves a choice:
- text before the first opener, or before an end without an opener, is content;
- an author's name is metadata and is not shown; a header that cannot be a name (longer than 128
  characters, or with a space or bracket in it) is content at once;
- reasoning that a new opener interrupts has ended; openers without a meaning here begin content;
- a payload that is no call is content; no special token is ever shown, and those that belong to no
  block change nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from inkling_portable.chat import markers
from inkling_portable.chat.payload import Announced, Arguments, Payload, Rest

_LONGEST_NAME = 128
_NOT_A_NAME = re.compile(r"[^\w.:/\-]")


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class CallBegins:
    """Call number `index` of this answer; `raw` is its text for those who wanted no calls."""

    index: int
    name: str
    raw: str


@dataclass(frozen=True)
class CallArguments:
    index: int
    text: str
    raw: str


Event = Reasoning | Content | CallBegins | CallArguments


class State(Enum):
    HEADER = "header"
    """Between a role and an opener."""
    TEXT = "text"
    THINKING = "thinking"
    CALL = "call"


class MarkerPattern:
    """Finds markers in text; made once for a tokenizer, since a vocabulary has many."""

    def __init__(self, tokens: Iterable[str]) -> None:
        known = {*tokens, *markers.ROLES, *markers.OPENERS, *markers.ENDS}
        ordered = sorted(known, key=len, reverse=True)
        self.find = re.compile("|".join(map(re.escape, ordered))).search
        self._beginnings = {token[:n] for token in known for n in range(1, len(token))}
        self._longest = len(ordered[0])

    def unfinished(self, text: str) -> int:
        """How many characters at the end of `text` could still become a marker."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] == "<" and text[start:] in self._beginnings:
                return len(text) - start
        return 0


class BlockParser:
    """The machine. `feed` and `finish` return what has become certain."""

    def __init__(self, pattern: MarkerPattern, state: State = State.HEADER) -> None:
        self._pattern = pattern
        self.state = state
        self._held = ""
        self._header = ""
        self._payload = Payload()
        self._calls = 0
        self.answered = state is State.TEXT
        """Whether anything but reasoning has begun."""

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        text = self._held + text
        at = 0
        while (found := self._pattern.find(text, at)) is not None:
            self._take(text[at : found.start()], events)
            self._mark(found.group(), events)
            at = found.end()
        keep = self._pattern.unfinished(text[at:])
        self._held = text[len(text) - keep :]
        self._take(text[at : len(text) - keep], events)
        return events

    def finish(self) -> list[Event]:
        """End of the output: nothing that was held back is lost."""
        events: list[Event] = []
        held, self._held = self._held, ""
        self._take(held, events)
        self._close(events)
        return events

    def _take(self, text: str, events: list[Event]) -> None:
        """Text between markers."""
        if not text:
            return
        if self.state is State.HEADER:
            self._header += text
            if len(self._header) > _LONGEST_NAME or _NOT_A_NAME.search(self._header.strip()):
                text, self._header = self._header, ""
                self.state = State.TEXT
                self._say(text, events)
        elif self.state is State.TEXT:
            self._say(text, events)
        elif self.state is State.THINKING:
            events.append(Reasoning(text))
        else:
            self._add(self._payload.feed(text), events)

    def _say(self, text: str, events: list[Event]) -> None:
        self.answered = True
        events.append(Content(text))

    def _mark(self, marker: str, events: list[Event]) -> None:
        """A marker: what is open ends, and what it opens begins."""
        if marker in markers.ENDS:
            self._close(events)
        elif marker in markers.ROLES:
            self._close(events)
            self.state = State.HEADER
        elif marker in markers.OPENERS:
            header, self._header = self._header.strip(), ""
            self._close(events)
            if marker == markers.THINKING:
                self.state = State.THINKING
                return
            self.answered = True
            if marker == markers.CALL:
                self.state = State.CALL
                self._payload = Payload(header)
            else:
                self.state = State.TEXT

    def _close(self, events: list[Event]) -> None:
        """The open block ends, with or without its marker."""
        header, self._header = self._header, ""
        if header.strip():
            self._say(header, events)
        if self.state is State.CALL:
            self._add(self._payload.finish(), events)
        self.state = State.TEXT

    def _add(self, parts: list[Announced | Arguments | Rest], events: list[Event]) -> None:
        for part in parts:
            if isinstance(part, Announced):
                events.append(CallBegins(self._calls, part.name, part.raw))
                self._calls += 1
            elif isinstance(part, Arguments):
                events.append(CallArguments(self._calls - 1, part.text, part.raw))
            else:
                events.append(Content(part.text))
