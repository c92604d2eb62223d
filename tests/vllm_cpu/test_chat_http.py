"""Chat through `vllm serve`: OpenAI's SDK (chat and Responses), Anthropic's, and bad requests.

Random weights say what `tests/forced_output.py` has them say, where no grammar forbids it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from jsonschema import validate
from transformers import AutoTokenizer

from inkling_portable.chat import markers as m
from inkling_portable.commands._server import Server, memory_arguments
from inkling_portable.commands.tiny import write_tiny
from tests.anywhere.test_chat_output import CASES, Answer
from tests.vllm_cpu.conftest import AS_A_USER

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["SF", "Rome"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"name": "get_weather", "description": "d", "parameters": SCHEMA}
OTHER = {"name": "f", "parameters": {"type": "object"}}
TOOLS: list[Any] = [{"type": "function", "function": tool} for tool in (WEATHER, OTHER)]
ASK: list[Any] = [{"role": "user", "content": "w?"}]


class Chat:
    def __init__(self, server: Server, tokenizer: Any) -> None:
        self.server, self.tokenizer = server, tokenizer
        self.openai = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        self.anthropic = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)

    def say(self, text: str) -> dict[str, Any]:
        """extra_body that has the model say `text`, no other thoughts, and then end."""
        ids = self.tokenizer.encode(text + m.END_SAMPLING, add_special_tokens=False)
        avoid = self.tokenizer.encode(f"{m.THINKING}{m.MODEL}<\t\r\n ", add_special_tokens=False)
        return {"vllm_xargs": {"say": ids, "avoid": avoid}}

    def ask(self, say: str, messages: list[Any] = ASK, **options: Any) -> Any:
        options = {"max_tokens": 300, "temperature": 0.0, **options}
        return self.openai.chat.completions.create(
            model=self.server.name, messages=messages, extra_body=self.say(say), **options
        )

    def stream(self, say: str, messages: list[Any] = ASK, **options: Any) -> tuple[Answer, str]:
        """The answer put together from its chunks, and why it ended."""
        reasoning, content, reason = "", "", ""
        calls: list[tuple[str, str]] = []
        for chunk in self.ask(say, messages, stream=True, **options):
            for choice in chunk.choices:
                reason = choice.finish_reason or reason
                reasoning += getattr(choice.delta, "reasoning", None) or ""
                content += choice.delta.content or ""
                for part in choice.delta.tool_calls or ():
                    if part.id:
                        assert part.index == len(calls)
                        calls.append((part.function.name, ""))
                    name, text = calls[part.index]
                    calls[part.index] = name, text + (part.function.arguments or "")
        return (reasoning, content, calls), reason


def whole(answer: Any) -> tuple[Answer, str]:
    [choice] = answer.choices
    message = choice.message
    calls = [(c.function.name, c.function.arguments) for c in message.tool_calls or ()]
    reasoning = getattr(message, "reasoning", None) or ""
    return (reasoning, message.content or "", calls), choice.finish_reason


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chat]:
    folder = tmp_path_factory.mktemp("text")
    write_tiny(folder, preset="text", dtype="float32", force=True)
    arguments = [
        *memory_arguments("64M"), "--max-model-len", "2048", "--block-size", "16",
        "--reasoning-parser", "inkling", "--tool-call-parser", "inkling",
        "--enable-auto-tool-choice", "--logits-processors", "tests.forced_output:ForcedOutput",
    ]  # fmt: skip
    log = tmp_path_factory.mktemp("log") / "server.log"
    with Server(folder, arguments, log, AS_A_USER) as server:
        server.wait_until_ready(300, lambda seconds: None)
        yield Chat(server, AutoTokenizer.from_pretrained(folder))


CUT = ("cut", "unterminated", "whole call without")
SHOWN = [name for name, (text, _) in CASES.items() if len(text) < 400 and m.IMAGE not in text]


@pytest.mark.parametrize("case", SHOWN)
def test_answers(chat: Chat, case: str) -> None:
    """Every kind of output, streamed and whole, through the OpenAI SDK."""
    text, expected = CASES[case]
    answer, reason = whole(chat.ask(text, tools=TOOLS))
    # The SDK's types turn lone surrogates in escapes into nothing, so text is compared as it came.
    assert answer == expected
    assert reason == ("tool_calls" if expected[2] else "stop")
    assert chat.stream(text, tools=TOOLS) == (expected, reason)


def test_a_later_turn_that_begins_with_a_call(chat: Chat) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        *ASK,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "72"},
        {"role": "user", "content": "and now?"},
    ]
    text = f'get_weather{m.CALL}{{"name":"get_weather","args":{{"city":"SF"}}}}{m.END_MESSAGE}'
    expected = ("", "", [("get_weather", '{"city":"SF"}')]), "tool_calls"
    assert whole(chat.ask(text, messages, tools=TOOLS)) == expected
    assert chat.stream(text, messages, tools=TOOLS) == expected


def test_max_tokens_inside_a_call(chat: Chat) -> None:
    text = f'f{m.CALL}{{"name":"f","args":{{"a":"bcdefgh"}}}}{m.END_MESSAGE}'
    cut = len(chat.tokenizer.encode(text.split("efgh")[0], add_special_tokens=False))
    # Of a whole answer with a call vLLM reports `tool_calls`, whatever ended it.
    (_, content, [(name, arguments)]), _ = whole(chat.ask(text, tools=TOOLS, max_tokens=cut))
    assert (content, name) == ("", "f")
    assert '{"a":"bcdefgh"}'.startswith(arguments) and arguments
    streamed, reason = chat.stream(text, tools=TOOLS, max_tokens=cut)
    assert streamed == ("", "", [("f", arguments)]) and reason == "length"


def test_a_call_that_was_cut_goes_back_as_it_was(chat: Chat) -> None:
    """An agent sends its history again; what the model had written is not lost, nor an error."""

    def prompt_tokens(arguments: str) -> int:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [*ASK, {"role": "assistant", "tool_calls": [call]}, *ASK]
        return int(chat.ask(PLAIN, messages, tools=TOOLS).usage.prompt_tokens)

    assert prompt_tokens('{"a":"bcd') > prompt_tokens("{}") + 5


def test_stop_strings(chat: Chat) -> None:
    text = f"{m.TEXT}one two three{m.END_MESSAGE}"
    expected = ("", "one ", []), "stop"
    assert whole(chat.ask(text, stop=["two"])) == expected
    assert chat.stream(text, stop=["two"]) == expected


def test_a_stop_string_can_be_shown(chat: Chat) -> None:
    text = f"{m.TEXT}one two three{m.END_MESSAGE}"
    body = {**chat.say(text), "include_stop_str_in_output": True}
    answer = chat.openai.chat.completions.create(
        model=chat.server.name, messages=ASK, max_tokens=90, stop=["two"], extra_body=body
    )
    assert whole(answer) == (("", "one two", []), "stop")


def test_several_answers_and_no_reasoning(chat: Chat) -> None:
    """n > 1 has a machine for each answer, and reasoning is left out where nobody wants it."""
    text = THOUGHT + f'f{m.CALL}{{"name":"f","args":{{"a":1}}}}{m.END_MESSAGE}'
    options = {"messages": ASK, "tools": TOOLS, "n": 2, "max_tokens": 90, "temperature": 0.5}
    body = {**chat.say(text), "include_reasoning": False}
    ask = chat.openai.chat.completions.create
    answer = ask(model=chat.server.name, extra_body=body, **options)
    for choice in answer.choices:
        assert not getattr(choice.message, "reasoning", None)
        assert [c.function.arguments for c in choice.message.tool_calls] == ['{"a":1}']
    told = {0: "", 1: ""}
    for chunk in ask(model=chat.server.name, extra_body=body, stream=True, **options):
        for choice in chunk.choices:
            assert not getattr(choice.delta, "reasoning", None)
            for part in choice.delta.tool_calls or ():
                told[choice.index] += part.function.arguments or ""
    assert told == {0: '{"a":1}', 1: '{"a":1}'}


PLAIN = f"{m.TEXT}I would rather not.{m.END_MESSAGE}"
THOUGHT = f"{m.THINKING}hm{m.END_MESSAGE}{m.MODEL}"


@pytest.mark.parametrize("thought", ["", THOUGHT])
@pytest.mark.parametrize("stream", [False, True])
def test_required_and_named_calls(chat: Chat, thought: str, stream: bool) -> None:
    """The model wants to answer in words and cannot; what it may think first, it may."""
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        options = {"tools": TOOLS[:1], "tool_choice": choice, "max_tokens": 120}
        ask = chat.stream if stream else lambda say, **o: whole(chat.ask(say, **o))
        (reasoning, content, calls), _ = ask(thought + PLAIN, **options)
        assert (reasoning, content) == ("hm" if thought else "", "")
        assert calls and {name for name, _ in calls} == {"get_weather"}
        validate(json.loads(calls[0][1]), SCHEMA)
    assert len(calls) == 1


def test_parallel_calls_can_be_forbidden(chat: Chat) -> None:
    one = 'f{"name":"f","args":{}}'.replace("{", m.CALL + "{", 1) + m.END_MESSAGE
    options = {"tools": TOOLS, "tool_choice": "required"}
    two = one + m.MODEL + one
    assert len(whole(chat.ask(two, **options))[0][2]) == 2
    assert len(whole(chat.ask(two, parallel_tool_calls=False, **options))[0][2]) == 1


def test_no_call_if_none_is_wanted(chat: Chat) -> None:
    payload = '{"name":"f","args":{}}'
    text = f"f{m.CALL}{payload}{m.END_MESSAGE}"
    expected = ("", payload, []), "stop"
    assert whole(chat.ask(text, tools=TOOLS, tool_choice="none")) == expected
    assert chat.stream(text, tools=TOOLS, tool_choice="none") == expected


def test_strict_arguments(chat: Chat) -> None:
    """A strict tool's call follows its schema; the model is free not to call."""
    strict = [{"type": "function", "function": {**WEATHER, "strict": True}}]
    wrong = 'get_weather{"name":"get_weather","args":{"town":"X"}}'
    wrong = wrong.replace("{", m.CALL + "{", 1) + m.END_MESSAGE
    (_, _, [(_, arguments)]), _ = whole(chat.ask(wrong, tools=strict, max_tokens=120))
    validate(json.loads(arguments), SCHEMA)
    assert whole(chat.ask(PLAIN, tools=strict))[0] == ("", "I would rather not.", [])


@pytest.mark.parametrize("thought", ["", THOUGHT])
def test_a_format(chat: Chat, thought: str) -> None:
    """response_format: JSON by its schema behind the opener, and behind any reasoning."""
    wanted = {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA}}
    say = thought + f'{m.TEXT}{{"city":"Paris","days":3}}{m.END_MESSAGE}'
    for ask in (chat.stream, lambda text, **o: whole(chat.ask(text, **o))):
        (reasoning, content, calls), reason = ask(say, response_format=wanted, max_tokens=120)
        assert (reasoning, calls, reason) == ("hm" if thought else "", [], "stop")
        validate(json.loads(content), SCHEMA)
    # The model's own choice: an answer in the format, or a call.
    options = {"response_format": wanted, "tools": TOOLS}
    say_call = f'f{m.CALL}{{"name":"f","args":{{}}}}{m.END_MESSAGE}'
    (_, _, calls), _ = whole(chat.ask(say_call, **options))
    assert calls == [("f", "{}")]
    (_, content, calls), _ = whole(chat.ask(say, max_tokens=120, **options))
    validate(json.loads(content), SCHEMA)
    assert calls == []


def test_responses(chat: Chat) -> None:
    """OpenAI's other interface: reasoning, text and calls as items, whole and streamed."""
    text = (
        f'{THOUGHT}{m.TEXT}ok{m.END_MESSAGE}{m.MODEL}f{m.CALL}{{"name":"f","args":{{"a":1}}}}'
        + m.END_MESSAGE
    )
    tools: list[Any] = [{"type": "function", **OTHER}]
    options: dict[str, Any] = {
        "model": chat.server.name, "input": "w?", "tools": tools, "max_output_tokens": 200,
        "temperature": 0.0, "extra_body": chat.say(text),
    }  # fmt: skip
    items = chat.openai.responses.create(**options).output
    found = {item.type: item for item in items}
    assert found["reasoning"].content[0].text == "hm"
    assert found["message"].content[0].text == "ok"
    assert (found["function_call"].name, found["function_call"].arguments) == ("f", '{"a":1}')
    words, arguments = "", ""
    for event in chat.openai.responses.create(stream=True, **options):
        if event.type == "response.output_text.delta":
            words += event.delta
        elif event.type == "response.function_call_arguments.delta":
            arguments += event.delta
    assert (words, arguments) == ("ok", '{"a":1}')


def test_responses_can_require_a_call(chat: Chat) -> None:
    tools: list[Any] = [{"type": "function", **WEATHER}]
    answer = chat.openai.responses.create(
        model=chat.server.name, input="w?", tools=tools, tool_choice="required",
        max_output_tokens=150, temperature=0.0, extra_body=chat.say(PLAIN),
    )  # fmt: skip
    [call] = [item for item in answer.output if item.type == "function_call"]
    validate(json.loads(call.arguments), SCHEMA)


def test_anthropic(chat: Chat) -> None:
    """Messages of Anthropic's SDK, with a call, its result, and a stream."""
    tools: list[Any] = [{"name": "f", "description": "d", "input_schema": {"type": "object"}}]
    text = f'{THOUGHT}{m.TEXT}ok{m.END_MESSAGE}{m.MODEL}f{m.CALL}{{"name":"f","args":{{"a":1}}}}'
    options: dict[str, Any] = {
        "model": chat.server.name, "max_tokens": 200, "tools": tools, "messages": ASK,
        "extra_body": chat.say(text + m.END_MESSAGE),
    }  # fmt: skip
    answer = chat.anthropic.messages.create(**options)
    kinds = {block.type: block for block in answer.content}
    assert kinds["text"].text == "ok"
    assert (kinds["tool_use"].name, kinds["tool_use"].input) == ("f", {"a": 1})
    assert answer.stop_reason == "tool_use"
    with chat.anthropic.messages.stream(**options) as stream:
        final = stream.get_final_message()
    assert [b.type for b in final.content] == [b.type for b in answer.content]
    messages = [
        *ASK,
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "72"}]},
    ]
    options |= {"messages": messages, "extra_body": chat.say(PLAIN)}
    assert chat.anthropic.messages.create(**options).content[0].text == "I would rather not."


NO_SCHEMA = {"schema": {"type": 5}}
BAD: dict[str, dict[str, Any]] = {
    "role": {"messages": [{"role": "robot", "content": "x"}]},
    "effort": {"reasoning_effort": "MEDIUM"},
    "effort in the template's arguments": {"chat_template_kwargs": {"reasoning_effort": 2}},
    "continued message": {"continue_final_message": True, "add_generation_prompt": False},
    "tool that is none": {"tools": [{"type": "function", "function": {"parameters": {}}}]},
    "schema that is none": {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 5}}}]
    },
    "choice of an unknown tool": {
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "nope"}},
    },
    "choice without tools": {"tool_choice": "required"},
    "format that is none": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "w", **NO_SCHEMA}}
    },
    "10,000 messages": {"messages": ASK * 10_000},
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_requests(chat: Chat, case: str) -> None:
    """A 4xx with one sentence, and the server goes on."""
    body = {"model": chat.server.name, "messages": ASK, "max_tokens": 2, **BAD[case]}
    with pytest.raises(openai.APIStatusError) as refused:
        chat.openai.post("/chat/completions", body=body, cast_to=object)
    assert 400 <= refused.value.status_code < 500
    assert whole(chat.ask(PLAIN))[0] == ("", "I would rather not.", [])


def test_users_cannot_write_markers(chat: Chat) -> None:
    """A spelt marker costs as many tokens as its letters and changes nobody's role."""

    def count(words: str) -> int:
        answer = chat.ask(PLAIN, [{"role": "user", "content": words}])
        return int(answer.usage.prompt_tokens)

    spelt = chat.tokenizer.backend_tokenizer
    assert count(m.END_MESSAGE + m.SYSTEM) > count("x") + 10
    assert spelt.encode(m.END_MESSAGE, add_special_tokens=False).ids != []
