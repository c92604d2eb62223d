"""Messages to token ids as vLLM's encoder does it, and vLLM's pair of parsers over our machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.parser.parser_manager import ParserManager
from vllm.renderers.inkling import _HfBackedTmlTokenizer
from vllm.renderers.inkling_encoding import render_inkling_messages

from inkling_portable import plugin
from inkling_portable.chat import markers as m
from inkling_portable.chat.blocks import BlockParser, CallArguments, CallBegins, MarkerPattern
from inkling_portable.chat.rendering import Encoder, render
from inkling_portable.chat.serving import plain_text_encoder
from inkling_portable.commands.tiny_tokenizer import write_tokenizer
from tests.anywhere.test_chat_output import CASES, Answer

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "d",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city":"SF","b":{"z":1,"a":[2,"é"]}}'},
}
NAN = {"a": float("nan")}
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


CORPUS: dict[str, list[dict[str, Any]]] = {
    "nothing": [],
    "hi": [user("Hi")],
    "system": [{"role": "system", "content": "S"}, user("Hi")],
    "system late": [user("Hi"), {"role": "system", "content": "S"}, user("again")],
    "developer": [{"role": "developer", "content": "D", "tools": TOOLS[1:]}, user("Hi")],
    "empty text": [user(""), user([text("")]), user("x")],
    "media between text": [user([text("a"), IMAGE, text("b"), AUDIO, IMAGE, text("c")])],
    "parts without a type": [user(["plain", {"text": "untyped"}])],
    "answer": [user("1+1"), {"role": "assistant", "content": "2"}, user("sure?")],
    "reasoning": [user("q"), {"role": "assistant", "reasoning": "r", "content": "a"}, user("q")],
    "old name of reasoning": [user("q"), {"role": "assistant", "reasoning_content": "r"}],
    "tool round trip": [
        user("w?"),
        {"role": "assistant", "reasoning": "t", "content": "ok", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "72"},
        {"role": "assistant", "content": "It is 72."},
        user("thanks"),
    ],
    "two calls": [
        user("w?"),
        {"role": "assistant", "content": None, "tool_calls": [CALL, {**CALL, "id": "c2"}]},
        {"role": "tool", "tool_call_id": "c2", "content": [text("7"), text("3")]},
        {"role": "tool", "tool_call_id": "c1", "name": "other", "content": ""},
        {"role": "tool", "tool_call_id": "unknown", "content": "x"},
    ],
    "empty arguments": [
        {"role": "assistant", "tool_calls": [{"function": {"name": "now", "arguments": ""}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "now", "arguments": {}}}]},
    ],
    "unicode": [user("Ünïcode 日本語 🙂\n\ttabs  and\r\nlines\x00")],
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    plugin.register()
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, 500, 4096)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def encoder(tokenizer: Any) -> Encoder:
    return Encoder(tokenizer.get_vocab(), plain_text_encoder(tokenizer))


@pytest.mark.parametrize("tools", [[], TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("effort", [None, 0.0, 0.25, 0.7, 0.9, 0.99])
@pytest.mark.parametrize("case", CORPUS)
def test_ids_equal_vllms(
    encoder: Encoder, tokenizer: Any, case: str, effort: float | None, tools: list[dict[str, Any]]
) -> None:
    expected = render_inkling_messages(
        CORPUS[case],
        _HfBackedTmlTokenizer(tokenizer),
        tools=tools,
        reasoning_effort=effort,
    )
    found = encoder.encode(render(CORPUS[case], tools, effort=effort))
    assert tokenizer.decode(found) == tokenizer.decode(expected)
    assert found == expected


def test_an_empty_assistant_turn_leaves_nothing(encoder: Encoder) -> None:
    """The model's template against vLLM's encoder, which leaves a bare end of sampling."""
    empty = {"role": "assistant", "content": ""}
    assert encoder.encode(render([user("a"), empty, user("b")])) == encoder.encode(
        render([user("a"), user("b")])
    )


def shown(pieces: Iterator[tuple[str, bool]]) -> str:
    return "".join(piece for piece, _ in pieces)


def test_the_specifications_renderings() -> None:
    """Section 7.2, character by character."""
    assert shown(render([user("Hi")])) == (
        "<|message_system|><|content_text|>Thinking effort level: 0.9<|end_message|>"
        "<|message_user|><|content_text|>Hi<|end_message|><|message_model|>"
    )
    messages = [{"role": "system", "content": "S"}, user([text("look"), IMAGE, AUDIO])]
    assert shown(render(messages, effort=m.effort("none"))) == (
        "<|message_system|><|content_text|>S<|end_message|>"
        "<|message_system|><|content_text|>Thinking effort level: 0.0<|end_message|>"
        "<|message_user|><|content_text|>look<|end_message|>"
        "<|message_user|><|content_image|><|end_message|>"
        "<|message_user|><|content_audio_input|><|audio_end|><|end_message|><|message_model|>"
    )


@pytest.mark.parametrize("marker", [*m.RENDERED[:13], "<|unused_200024|>", "<|unused_200054|>"])
@pytest.mark.parametrize("where", ["user", "tool", "author", "arguments", "reasoning"])
def test_a_spelt_marker_stays_text(
    encoder: Encoder, tokenizer: Any, marker: str, where: str
) -> None:
    """What anyone writes is never the end of a message, a role or a slot of an image."""
    words = f"say {marker} twice"
    message = {
        "user": user(words),
        "tool": {"role": "tool", "content": words},
        "author": {"role": "tool", "name": words, "content": "x"},
        "reasoning": {"role": "assistant", "reasoning": words},
        "arguments": {
            "role": "assistant",
            "tool_calls": [{"function": {"name": "f", "arguments": json.dumps({"a": words})}}],
        },
    }[where]
    ids = encoder.encode(render([message]))
    vocabulary = tokenizer.get_vocab()
    layout = [vocabulary.get(piece, vocabulary.get("<|unused_200024|>"))
              for piece, is_marker in render([message]) if is_marker]  # fmt: skip
    special = set(tokenizer.get_added_vocab().values())
    assert [token for token in ids if token in special] == layout
    assert words in tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("arguments", "rendered"),
    [
        ('{"city":"S', '"{\\"city\\":\\"S"'),
        ("no json", '"no json"'),
        ('{"a":NaN}', '"{\\"a\\":NaN}"'),
        ("[1, 2]", "[1,2]"),
        ("5", "5"),
        ('{"b":1,"a":"\\ud800"}', '{"a":"\\ud800","b":1}'),
        ("[" * 5000, json.dumps("[" * 5000)),
    ],
)
def test_a_broken_call_can_be_told_again(encoder: Encoder, arguments: str, rendered: str) -> None:
    """What the parser gave to a client comes back, and the parser would give it again."""
    call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    text = shown(render([{"role": "assistant", "tool_calls": [call]}]))
    payload = f'{{"name":"f","args":{rendered}}}'
    assert f"{m.MODEL}f{m.CALL}{payload}{m.END_MESSAGE}" in text
    encoder.encode(render([{"role": "assistant", "tool_calls": [call]}]))
    [begins, *more] = BlockParser(MarkerPattern([])).feed(f"f{m.CALL}{payload}{m.END_MESSAGE}")
    assert isinstance(begins, CallBegins)
    told = "".join(event.text for event in more if isinstance(event, CallArguments))
    assert told == arguments or json.loads(told) == json.loads(arguments)


def test_half_a_surrogate_pair_is_a_sentence(encoder: Encoder) -> None:
    with pytest.raises(ValueError, match="half of a surrogate pair"):
        encoder.encode(render([user("\ud800")]))


BAD: dict[str, tuple[list[dict[str, Any]], str]] = {
    "role": ([user("x"), {"role": "robot", "content": "x"}], "message 1: role must be one of"),
    "no role": ([{"content": "x"}], "message 0: role must be one of"),
    "content": ([user(7)], "content must be text or a list"),
    "part": ([user([{"type": "video_url"}])], "a content part must be text, an image or audio"),
    "part is no object": ([user([7])], "a content part must be an object"),
    "image in a tool's result": ([{"role": "tool", "content": [IMAGE]}], "result must be text"),
    "call without a name": (
        [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}],
        "needs the name of its function",
    ),
    "arguments that are no text": (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}],
        "must be JSON text or an object",
    ),
    "NaN": (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": NAN}}]}],
        "cannot be written as JSON",
    ),
    "reasoning": ([{"role": "assistant", "reasoning": ["x"]}], "reasoning must be text"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_messages_are_sentences(case: str) -> None:
    messages, sentence = BAD[case]
    with pytest.raises(ValueError, match=sentence):
        list(render(messages))


@pytest.mark.parametrize(
    ("tool", "sentence"),
    [
        ({"function": {}}, "a tool needs the name"),
        ({"function": {"name": "f", "parameters": {"type": 5}}}, "tool f are no JSON schema"),
        ({"function": {"name": "f", "parameters": {"required": "a"}}}, "tool f are no JSON schema"),
        ("f", "a tool must be an object"),
    ],
)
def test_bad_tools_are_sentences(tool: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        list(render([user("x")], [tool]))


@pytest.mark.parametrize("value", ["MEDIUM", "", "0.5", True, False, 1.0, -0.1, [], {}])
def test_bad_efforts_are_sentences(value: object) -> None:
    with pytest.raises(ValueError, match="reasoning_effort must"):
        m.effort(value)


def test_ten_thousand_messages(encoder: Encoder) -> None:
    messages = [user("x"), {"role": "assistant", "content": "y"}] * 5000
    assert len(encoder.encode(render(messages))) > 5000 * 9


# --- parsers, as vLLM's server holds them -------------------------------------------------------


def parser_for(tokenizer: Any, reasoning: bool = True, tools: bool = True) -> Any:
    made = ParserManager.get_parser(
        tool_parser_name="inkling" if tools else None,
        reasoning_parser_name="inkling" if reasoning else None,
        enable_auto_tools=tools,
    )
    assert made is not None
    return made(tokenizer, None)


def request(choice: Any = "auto", tools: bool = True) -> ChatCompletionRequest:
    fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice} if tools else {}
    return ChatCompletionRequest(messages=[user("x")], model="m", **fields)


def whole(parser: Any, output: str, asked: ChatCompletionRequest) -> Answer:
    reasoning, content, calls = parser.parse(output, asked, enable_auto_tools=True)
    return reasoning or "", content or "", [(c.name, c.arguments) for c in calls or ()]


def streamed(parser: Any, pieces: list[str], asked: ChatCompletionRequest, ids: Any) -> Answer:
    reasoning, content = "", ""
    calls: list[tuple[str, str]] = []
    prompt = ids(m.MODEL)
    for number, piece in enumerate(pieces):
        delta = parser.parse_delta(
            piece, ids(piece), asked, prompt, finished=number == len(pieces) - 1
        )
        if delta is None:
            continue
        reasoning += delta.reasoning or ""
        content += delta.content or ""
        for part in delta.tool_calls or ():
            if part.id is not None:
                assert part.index == len(calls)
                calls.append((part.function.name, ""))
            name, arguments = calls[part.index]
            calls[part.index] = name, arguments + (part.function.arguments or "")
    return reasoning, content, calls


@pytest.mark.parametrize("case", [case for case, (text, _) in CASES.items() if len(text) < 4000])
def test_streams_equal_whole_answers(tokenizer: Any, case: str) -> None:
    """With both parsers, through the object that vLLM's server calls, token by token and worse."""
    output, expected = CASES[case]

    def ids(piece: str) -> list[int]:
        return list(tokenizer.encode(piece, add_special_tokens=False))

    assert whole(parser_for(tokenizer), output, request()) == expected
    tokens = [tokenizer.decode([token]) for token in ids(output)]
    if "".join(tokens) != output:  # A character of several tokens: as the detokenizer holds it.
        tokens = list(output)
    for pieces in ([output], list(output), tokens, [output[:9], output[9:], ""]):
        assert streamed(parser_for(tokenizer), pieces, request(), ids) == expected


@pytest.mark.parametrize("choice", ["none", None])
@pytest.mark.parametrize("reasoning", [True, False])
def test_a_call_that_nobody_wanted_is_text(tokenizer: Any, reasoning: bool, choice: Any) -> None:
    """tool_choice none, or no tools at all: the payload is shown, and no marker is."""
    payload = '{"name":"f","args":{"a":1}}'
    output = f"f{m.CALL}{payload}{m.END_MESSAGE}{m.MODEL}{m.TEXT}x{m.END_MESSAGE}"
    asked = request(choice, tools=choice is not None)

    def ids(piece: str) -> list[int]:
        return list(tokenizer.encode(piece, add_special_tokens=False))

    for tools in (True, False) if reasoning else (True,):
        expected = ("", payload + "x", [])
        made = parser_for(tokenizer, reasoning, tools)
        assert whole(made, output, asked) == expected
        made = parser_for(tokenizer, reasoning, tools)
        assert streamed(made, list(output), asked, ids) == expected


def test_one_parser_alone(tokenizer: Any) -> None:
    """Without a tool parser text stays clean after the reasoning; without the other it is text."""
    output = f"{m.THINKING}why{m.END_MESSAGE}{m.MODEL}{m.TEXT}so{m.END_MESSAGE}{m.END_SAMPLING}"

    def ids(piece: str) -> list[int]:
        return list(tokenizer.encode(piece, add_special_tokens=False))

    for made in (whole, lambda p, o, r: streamed(p, list(o), r, ids)):
        plain = request(tools=False)
        assert made(parser_for(tokenizer, tools=False), output, plain) == ("why", "so", [])
        assert made(parser_for(tokenizer, reasoning=False), output, plain) == ("", "whyso", [])


@settings(max_examples=60)
@given(st.lists(st.integers(1, 40), max_size=12))
def test_any_cut_of_a_stream(tokenizer: Any, sizes: list[int]) -> None:
    output, expected = CASES["two calls and text"]
    pieces, at = [], 0
    for size in sizes:
        pieces.append(output[at : at + size])
        at += size
    pieces.append(output[at:])
    made = parser_for(tokenizer)
    assert streamed(made, pieces, request(), lambda piece: tokenizer.encode(piece)) == expected


# --- grammars -----------------------------------------------------------------------------------

LARK = 'start: "yes" | "no"'
OPTIONS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "regex": ({"structured_outputs": {"regex": "[0-9]{2}"}}, ["42"], ["4", "x1"]),
    "choice": ({"structured_outputs": {"choice": ["a b", "<|x"]}}, ["a b", "<|x"], ["c"]),
    "EBNF": ({"structured_outputs": {"grammar": 'root ::= "yes" | "no"'}}, ["no"], ["maybe"]),
    "Lark": ({"structured_outputs": {"grammar": LARK}}, ["yes"], ["maybe"]),
    "JSON": ({"structured_outputs": {"json": {"type": "integer"}}}, ["7"], ['"7"']),
    "any object": ({"response_format": {"type": "json_object"}}, ['{"a":[1]}'], ["[1]"]),
}  # fmt: skip


def accepted(tag: str, output: str) -> bool:
    """Whether xgrammar, which compiles it in the engine, lets the whole output through."""
    letters = [bytes([code]) for code in range(256)]
    info = xgrammar.TokenizerInfo([*letters, b"the end"], stop_token_ids=[len(letters)])
    matcher = xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(info).compile_structural_tag(tag))
    return matcher.accept_string(output) and matcher.accept_token(len(letters))


@pytest.mark.parametrize("tools", [False, True], ids=["no tools", "tools"])
@pytest.mark.parametrize("case", OPTIONS)
def test_formats_hold_the_answer_behind_its_opener(tokenizer: Any, case: str, tools: bool) -> None:
    options, good, bad = OPTIONS[case]
    fields = {"tools": TOOLS, "tool_choice": "auto"} if tools else {}
    asked = ChatCompletionRequest(messages=[user("x")], model="m", **options, **fields)
    asked = parser_for(tokenizer).adjust_request(asked)
    assert asked.response_format is None and asked.skip_special_tokens is False
    tag = asked.structured_outputs.structural_tag
    thought = f"{m.THINKING}hm{m.END_MESSAGE}{m.MODEL}"
    for before in ("", thought, thought * 2):
        for text in good:
            assert accepted(tag, f"{before}{m.TEXT}{text}{m.END_MESSAGE}"), (before, text)
        for text in bad:
            assert not accepted(tag, f"{before}{m.TEXT}{text}{m.END_MESSAGE}"), (before, text)
        called = f'{before}now{m.CALL}{{"name":"now","args":{{}}}}{m.END_MESSAGE}'
        assert accepted(tag, called) is tools


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools(tokenizer: Any, mode: str) -> None:
    """Of the Responses interface: only some of the declared tools may be, or must be, called."""
    tools = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in "fg"]
    choice: dict[str, Any] = {"type": "allowed_tools", "mode": mode}
    choice["tools"] = [{"type": "function", "name": "f"}]
    asked = ResponsesRequest(input="x", tools=tools, tool_choice=choice)
    parser = parser_for(tokenizer)
    tag = parser.adjust_request(asked).structured_outputs.structural_tag
    calls = {name: f'{name}{m.CALL}{{"name":"{name}","args":{{}}}}{m.END_MESSAGE}' for name in "fg"}
    assert accepted(tag, calls["f"]) and not accepted(tag, calls["g"])
    assert accepted(tag, f"{m.TEXT}x{m.END_MESSAGE}") is (mode == "auto")
    # The call is then read as one.
    assert whole(parser, calls["f"], asked) == ("", "", [("f", "{}")])
    choice["tools"] = [{"type": "function", "name": "h"}]
    asked = ResponsesRequest(input="x", tools=tools, tool_choice=choice)
    with pytest.raises(ValueError, match="tool_choice allows h and the request declares f, g"):
        parser_for(tokenizer).adjust_request(asked)


def test_a_grammar_that_is_none_is_a_sentence(tokenizer: Any) -> None:
    asked = ChatCompletionRequest(
        messages=[user("x")], model="m", structured_outputs={"grammar": "start: ((("}
    )
    with pytest.raises(ValueError, match="the grammar is no Lark"):
        parser_for(tokenizer).adjust_request(asked)


@pytest.mark.parametrize(
    "asked",
    [
        {"regex": "("},
        {"choice": []},
        {"grammar": "root ::= ("},
        {"json": {"enum": []}},
        {"json": {"$ref": "#/nowhere"}},
        {"json": {"type": "string", "pattern": "("}},
        {"json": {"type": "nope"}},
    ],
)
def test_a_format_that_is_none_is_a_sentence(tokenizer: Any, asked: dict[str, Any]) -> None:
    request = ChatCompletionRequest(messages=[user("x")], model="m", structured_outputs=asked)
    with pytest.raises(
        ValueError, match=r"^no text can have the format asked for: [A-Za-z].{5,200}; correct it$"
    ):
        parser_for(tokenizer).adjust_request(request)


def test_reasoning_is_counted(tokenizer: Any) -> None:
    output = f"{m.THINKING}why{m.END_MESSAGE}{m.MODEL}{m.TEXT}so it is{m.END_MESSAGE}"
    ids = tokenizer.encode(output, add_special_tokens=False)
    thought = tokenizer.encode("why", add_special_tokens=False)
    assert parser_for(tokenizer).count_reasoning_tokens(ids) == len(thought)
