"""Generated text to reasoning, content and calls: the same answer however the text is cut."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inkling_portable.chat import markers as m
from inkling_portable.chat.blocks import (
    BlockParser,
    CallArguments,
    CallBegins,
    Content,
    Event,
    MarkerPattern,
    Reasoning,
)

PATTERN = MarkerPattern(["<|content_image|>", "<|unused_200024|>", "<|endoftext|>"])
Answer = tuple[str, str, list[tuple[str, str]]]
"""reasoning, content, and (name, arguments) of each call."""


def gather(events: Iterable[Event]) -> Answer:
    reasoning, content = "", ""
    calls: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, Reasoning):
            reasoning += event.text
        elif isinstance(event, Content):
            content += event.text
        elif isinstance(event, CallBegins):
            assert event.index == len(calls)
            calls.append((event.name, ""))
        else:
            assert isinstance(event, CallArguments)
            name, text = calls[event.index]
            calls[event.index] = (name, text + event.text)
    return reasoning, content, calls


def parse(pieces: Iterable[str]) -> Answer:
    parser = BlockParser(PATTERN)
    return gather([*(event for piece in pieces for event in parser.feed(piece)), *parser.finish()])


def call(payload: str, header: str = "f") -> str:
    return f"{header}{m.CALL}{payload}{m.END_MESSAGE}"


THINK = f"{m.THINKING}why{m.END_MESSAGE}{m.MODEL}"
NESTED = '{"q":"a } { \\" [ ]","deep":{"x":[1,{"y":"\\u00e9\\\\"}]}}'
BIG = json.dumps({"code": "line\n" * 20_000})

CASES: dict[str, tuple[str, Answer]] = {
    "text": (f"{m.TEXT}Hello{m.END_MESSAGE}", ("", "Hello", [])),
    "text, ended by sampling alone": (f"{m.TEXT}Hello{m.END_SAMPLING}", ("", "Hello", [])),
    "text, cut": (f"{m.TEXT}Hel", ("", "Hel", [])),
    "thinking and text": (
        f"{THINK}{m.TEXT}Answer{m.END_MESSAGE}{m.END_SAMPLING}",
        ("why", "Answer", []),
    ),
    "empty thinking": (
        f"{m.THINKING}{m.END_MESSAGE}{m.MODEL}{m.TEXT}Answer{m.END_MESSAGE}",
        ("", "Answer", []),
    ),
    "unterminated thinking": (f"{m.THINKING}all of it", ("all of it", "", [])),
    "two thoughts": (f"{THINK}{THINK}{m.TEXT}x{m.END_MESSAGE}", ("whywhy", "x", [])),
    "text before any opener": ("It is 4. And more", ("", "It is 4. And more", [])),
    "a word without opener": (f"Hello{m.END_MESSAGE}", ("", "Hello", [])),
    "bare JSON without opener": ('{"a": 1}', ("", '{"a": 1}', [])),
    "call": (
        call('{"name":"f","args":{"city":"SF"}}') + m.END_SAMPLING,
        ("", "", [("f", '{"city":"SF"}')]),
    ),
    "call after thinking": (
        THINK + call('{"name":"f","args":' + NESTED + "}"),
        ("why", "", [("f", NESTED)]),
    ),
    "call inside unclosed thinking": (
        f"{m.THINKING}hm{m.CALL}" + '{"name":"f","args":{}}' + m.END_MESSAGE,
        ("hm", "", [("f", "{}")]),
    ),
    "two calls and text": (
        call('{"name":"f","args":{}}')
        + m.MODEL
        + call('{"name":"g","args":{"a":[1,2]}}', "g")
        + f"{m.MODEL}{m.TEXT}tail{m.END_MESSAGE}",
        ("", "tail", [("f", "{}"), ("g", '{"a":[1,2]}')]),
    ),
    "text, call, text": (
        f"{m.TEXT}before{m.END_MESSAGE}{m.MODEL}"
        + call('{"name":"f","args":{}}')
        + f"{m.MODEL}{m.TEXT}after{m.END_MESSAGE}",
        ("", "beforeafter", [("f", "{}")]),
    ),
    "spaces in the payload": (
        call(' { "name" : "f" ,\n "args" : {"a": 1} } '),
        ("", "", [("f", '{"a": 1}')]),
    ),
    "args before name": (
        call('{"args":{"a": 1e999,"b":2},"name":"f"}'),
        ("", "", [("f", '{"a": 1e999,"b":2}')]),
    ),
    "args as a string": (
        call('{"name":"f","args":"{\\"a\\":1}"}'),
        ("", "", [("f", '{"a":1}')]),
    ),
    "no args": (call('{"name":"f"}'), ("", "", [("f", "{}")])),
    "null args": (call('{"name":"f","args":null}'), ("", "", [("f", "{}")])),
    "name in the header only": (
        call('{"args":{"a":1}}', "weather"),
        ("", "", [("weather", '{"a":1}')]),
    ),
    "no name at all": (call('{"args":{"a":1}}', ""), ("", '{"args":{"a":1}}', [])),
    "no JSON": (call("weather(SF)"), ("", "weather(SF)", [])),
    "nothing in it": (call("", "now") + m.END_SAMPLING, ("", "now", [])),
    "half a surrogate pair": (
        call('{"name":"f","args":{"a":"\\ud800"}}'),
        ("", "", [("f", '{"a":"\\ud800"}')]),
    ),
    "half a pair in a string of arguments": (
        call('{"args":"{\\"a\\":\\"\\ud800\\"}","name":"f"}'),
        ("", "", [("f", '{"a":"\\ud800"}')]),
    ),
    "half a pair for a name": (
        call('{"name":"\\ud800","args":{}}', ""),
        ("", '{"name":"\\ud800","args":{}}', []),
    ),
    "a number of 5,000 digits": (
        call('{"args":{"a":' + "9" * 5000 + '},"name":"f"}'),
        ("", "", [("f", '{"a":' + "9" * 5000 + "}")]),
    ),
    "5,000 levels": (
        call('{"name":"f","args":' + '{"a":' * 5000 + "1" + "}" * 5001),
        ("", "", [("f", '{"a":' * 5000 + "1" + "}" * 5000)]),
    ),
    "cut before the arguments": (f'f{m.CALL}{{"name":"f","ar', ("", '{"name":"f","ar', [])),
    "cut in the arguments": (
        f'f{m.CALL}{{"name":"f","args":{{"a":"b',
        ("", "", [("f", '{"a":"b')]),
    ),
    "cut after the arguments": (
        f'f{m.CALL}{{"name":"f","args":{{"a":1}}',
        ("", "", [("f", '{"a":1}')]),
    ),
    "whole call without its end": (
        f'f{m.CALL}{{"name":"f","args":{{"a":1}}}}',
        ("", "", [("f", '{"a":1}')]),
    ),
    "text behind the payload": (
        call('{"name":"f","args":{}} and so on'),
        ("", "} and so on", [("f", "{}")]),
    ),
    "another member": (
        call('{"name":"f","args":{},"id":"7"}'),
        ("", "", [("f", "{}")]),
    ),
    "unicode": (
        call('{"name":"f","args":{"città":"\\u00e9\\ud83d\\ude00 日本"}}'),
        ("", "", [("f", '{"città":"\\u00e9\\ud83d\\ude00 日本"}')]),
    ),
    "100 KB of arguments": (
        call('{"name":"f","args":' + BIG + "}"),
        ("", "", [("f", BIG)]),
    ),
    "raw tool text": (
        f"{m.CALL_TEXT}ls -l{m.END_MESSAGE}{m.MODEL}{m.TOOL_ERROR}no{m.END_MESSAGE}",
        ("", "ls -lno", []),
    ),
    "an image block": (f"{m.IMAGE}{m.END_MESSAGE}{m.MODEL}{m.TEXT}x", ("", "x", [])),
    "tokens of no block": (
        f"{m.THINKING}a<|unused_200024|>b<|endoftext|>{m.END_MESSAGE}{m.MODEL}{m.TEXT}x<|endoftext|>",
        ("ab", "x", []),
    ),
    "less-than signs": (
        f"{m.TEXT}a<b <| c <|content <<|{m.END_MESSAGE}",
        ("", "a<b <| c <|content <<|", []),
    ),
    "a marker without its end": (f"{m.TEXT}a<|end_mess", ("", "a<|end_mess", [])),
}


@pytest.mark.parametrize("case", CASES)
def test_cases(case: str) -> None:
    """Whole, character by character, and in pieces of other sizes."""
    text, expected = CASES[case]
    assert parse([text]) == expected
    for size in (1, 2, 3, 7, 64):
        if len(text) < 2000 or size > 3:
            cut = [text[at : at + size] for at in range(0, len(text), size)]
            assert parse(cut) == expected, size


WORDS = st.text(alphabet='ab {}[]":,\\<|>é\n0', max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(WORDS, VALUES, max_size=3)
JSON_CALL = st.tuples(st.sampled_from(["f", "get_weather"]), ARGUMENTS)


@st.composite
def outputs(draw: st.DrawFn) -> tuple[str, Answer]:
    """Well-formed blocks in any order, and what they say."""
    text, reasoning, content = "", "", ""
    calls: list[tuple[str, str]] = []
    for number in range(draw(st.integers(0, 5))):
        text += m.MODEL if number else ""
        kind = draw(st.sampled_from(["text", "thinking", "call", "image"]))
        if kind == "call":
            name, arguments = draw(JSON_CALL)
            compact = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
            payload = f'{{"name":"{name}","args":{compact}}}'
            if m.CALL in payload or any(end in payload for end in (*m.ENDS, *m.ROLES)):
                continue
            text += call(payload, name)
            calls.append((name, compact))
        elif kind == "image":
            text += m.IMAGE + m.END_MESSAGE
        else:
            words = draw(WORDS)
            text += (m.TEXT if kind == "text" else m.THINKING) + words + m.END_MESSAGE
            content += words if kind == "text" else ""
            reasoning += words if kind == "thinking" else ""
    return text + m.END_SAMPLING, (reasoning, content, calls)


@given(outputs(), st.data())
def test_well_formed(output: tuple[str, Answer], data: st.DataObject) -> None:
    text, expected = output
    assert parse([text]) == expected
    assert parse(text) == expected
    at = data.draw(st.integers(0, len(text)))
    assert parse([text[:at], text[at:]]) == expected


SCRAPS = [
    "<|",
    "<|content_",
    '{"name":"f","args":',
    '{"name":"f"',
    *'{}"[\\f',
    " Z!",
    "<|endoftext|>",
]
PIECES = st.sampled_from([*m.ROLES, *m.OPENERS, *m.ENDS, *SCRAPS])


@given(st.lists(PIECES, max_size=14))
def test_anything_at_all(pieces: list[str]) -> None:
    """Any sequence of markers and scraps: one answer, no marker in it, no character lost."""
    text = "".join(pieces)
    whole = parse([text])
    assert parse(text) == whole
    assert parse(pieces) == whole
    reasoning, content, calls = whole
    shown = reasoning + content + "".join(name + arguments for name, arguments in calls)
    assert PATTERN.find(reasoning) is None and PATTERN.find(content) is None
    assert shown.count("Z") == text.count("Z")


def test_a_later_call_needs_no_earlier_block() -> None:
    """A turn may begin with a call: the header of the prompt is all that stood before it."""
    text = call('{"name":"f","args":{"a":1}}', "")
    assert parse(text) == ("", "", [("f", '{"a":1}')])


@pytest.mark.parametrize(
    "payload",
    ["{", '{"name":"f",}', '{"name":"f"', '{5:1,"name":"f"}', '{"name" "f"}', '{"name":}',
     '{"name":"f"}}', "[1]", '"f"', '{"name":"f";"args":{}}', "{" * 9000],
)  # fmt: skip
def test_broken_payloads_are_text(payload: str) -> None:
    assert parse([call(payload)]) == parse(call(payload)) == ("", payload, [])


def test_time_of_a_long_payload_in_no_usual_order() -> None:
    """The time per token may not grow with what was kept before."""

    def cost(tokens: int) -> float:
        pieces = ["abcd"] * tokens
        started = time.process_time()
        parse([f'f{m.CALL}{{"args":{{"a":"', *pieces, f'"}},"name":"f"}}{m.END_MESSAGE}'])
        return (time.process_time() - started) / tokens

    assert min(cost(100_000) for _ in range(2)) < 3 * min(cost(5_000) for _ in range(3))


def test_arguments_grow_while_they_are_generated() -> None:
    parser = BlockParser(PATTERN)
    parser.feed(f'f{m.CALL}{{"name":"f","args":{{"a":"')
    assert parser.feed("more") == [CallArguments(0, "more", "more")]


def test_time_per_token() -> None:
    """At most 20 us for a token of a stream, the rate at which it must never be noticed."""
    text = (
        THINK
        + call('{"name":"f","args":' + BIG + "}")
        + f"{m.MODEL}{m.TEXT}"
        + "some words " * 5000
    )
    tokens = [text[at : at + 4] for at in range(0, len(text), 4)]
    best = float("inf")
    for _ in range(3):
        started = time.process_time()
        parse(tokens)
        best = min(best, time.process_time() - started)
    assert best / len(tokens) < 20e-6
