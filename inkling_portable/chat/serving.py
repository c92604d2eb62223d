"""vLLM's chat interfaces over this package: renderer, reasoning parser and tool parser.

The one file of `chat` that knows vLLM. Registered by name over the in-tree ones (`plugin.py`), so
`--reasoning-parser inkling --tool-call-parser inkling` and the renderer that vLLM picks for the
architecture are these.

vLLM asks two objects, one for reasoning and then one for calls, about one output. Here both are
faces of one machine: the tool parser joins the reasoning parser that was made right before it, as
vLLM makes its pairs, and so nothing has to be handed over as text and parsed again.
"""

from __future__ import annotations

import copy
import json
import re
import threading
import uuid
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllm.reasoning.abs_reasoning_parsers import ReasoningParser
from vllm.renderers.inkling import InklingRenderer
from vllm.sampling_params import StructuredOutputsParams
from vllm.tool_parsers.abstract_tool_parser import (
    DeltaMessage,
    ExtractedToolCallInformation,
    ToolParser,
)
from vllm.v1.structured_output import utils as structured_output

from inkling_portable.chat import grammar, markers
from inkling_portable.chat.blocks import (
    BlockParser,
    CallArguments,
    CallBegins,
    Content,
    Event,
    MarkerPattern,
    Reasoning,
    State,
)
from inkling_portable.chat.rendering import Encoder, render

_patterns: weakref.WeakKeyDictionary[Any, MarkerPattern] = weakref.WeakKeyDictionary()
_unpaired = threading.local()


def _pattern(tokenizer: Any) -> MarkerPattern:
    """The markers of a tokenizer: all its special tokens, for none of them may be shown."""
    found = _patterns.get(tokenizer)
    if found is None:
        found = MarkerPattern(_special_tokens(tokenizer))
        _patterns[tokenizer] = found
    return found


def _special_tokens(tokenizer: Any) -> list[str]:
    vocabulary = tokenizer.get_vocab()
    markers.special_ids(vocabulary)
    return [token for token in vocabulary if token.startswith("<|") and token.endswith("|>")]


class _Output:
    """One output being parsed, shared by the two parsers of a request."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.pattern = _pattern(tokenizer)
        self.machine = BlockParser(self.pattern)
        self.waiting: list[Event] = []
        """What the reasoning parser saw and the tool parser has yet to say."""
        self.has_tool_parser = False
        self.fed = False
        self.finished = False
        self.whole: tuple[str, list[Event]] | None = None
        """A whole answer's text after its reasoning, and the events in it."""

    def begin(self, state: State) -> None:
        if not self.fed:
            self.machine = BlockParser(self.pattern, state)

    def feed(self, text: str) -> list[Event]:
        self.fed = True
        return self.machine.feed(text)

    def finish(self) -> list[Event]:
        if self.finished:
            return []
        self.finished = True
        return self.machine.finish()


def _message(events: Iterable[Event], calls_are_text: bool) -> Any:
    """The DeltaMessage that says `events`, or None if there is nothing to say."""
    said = {"reasoning": "", "content": ""}
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        if isinstance(event, Reasoning):
            said["reasoning"] += event.text
        elif isinstance(event, Content):
            said["content"] += event.text
        elif calls_are_text:
            said["content"] += event.raw
        elif isinstance(event, CallBegins):
            begins = {"index": event.index, "id": _call_id(), "type": "function"}
            calls[event.index] = {**begins, "function": {"name": event.name, "arguments": ""}}
        elif event.text:
            more = {"index": event.index, "function": {"arguments": ""}}
            calls.setdefault(event.index, more)["function"]["arguments"] += event.text
    fields: dict[str, Any] = {name: text for name, text in said.items() if text}
    if calls:
        fields["tool_calls"] = list(calls.values())
    return DeltaMessage(**fields) if fields else None


def _call_id() -> str:
    return f"chatcmpl-tool-{uuid.uuid4().hex}"


def _wants_calls(request: Any) -> bool:
    """Whether calls go out as calls: the client declared tools and did not forbid their use."""
    return bool(getattr(request, "tools", None)) and request.tool_choice != "none"


class InklingReasoningParser(ReasoningParser):
    """Reasoning blocks; with no tool parser beside it, the whole answer."""

    engine_based_streaming = True

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(tokenizer, *args, **kwargs)
        self.output = _Output(tokenizer)
        _unpaired.latest = weakref.ref(self)
        vocabulary = tokenizer.get_vocab()
        ids = markers.special_ids(vocabulary)
        self._thinking, self._model = ids[markers.THINKING], ids[markers.MODEL]
        self._ends = {ids[marker] for marker in markers.ENDS}
        answers = (markers.TEXT, markers.CALL, markers.CALL_TEXT, markers.TOOL_ERROR)
        self._answers = {vocabulary[marker] for marker in answers if marker in vocabulary}
        self._answers.add(ids[markers.END_SAMPLING])

    @property
    def reasoning_start_str(self) -> str:
        """Where vLLM's reasoning budget begins to count, and below what it writes when it ends."""
        return markers.THINKING

    @property
    def reasoning_end_str(self) -> str:
        return markers.END_MESSAGE

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Whether the answer has begun: the last opener is no reasoning and no bare header."""
        for token in reversed(input_ids):
            if token in (self._thinking, self._model):
                return False
            if token in self._answers:
                return True
        return False

    def is_reasoning_end_streaming(
        self, input_ids: Sequence[int], delta_ids: Iterable[int]
    ) -> bool:
        return any(token in self._answers for token in delta_ids)

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        """The ids from the first answer's opener on."""
        for at, token in enumerate(input_ids):
            if token in self._answers:
                return input_ids[at:]
        return []

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        inside, count = False, 0
        for token in token_ids:
            if token == self._thinking:
                inside = True
            elif token in self._ends or token in self._answers or token == self._model:
                inside = False
            elif inside:
                count += 1
        return count

    def adjust_initial_state_from_prompt(self, prompt_token_ids: Sequence[int]) -> None:
        """A prompt may end inside a reasoning block, where the output then goes on."""
        for token in reversed(prompt_token_ids):
            if token == self._thinking:
                self.output.begin(State.THINKING)
            if token in (self._thinking, self._model, *self._ends):
                return

    def adjust_request(self, request: Any) -> Any:
        """Keep the markers in the text, and let a demanded format begin with its opener."""
        request.skip_special_tokens = False
        if not _wants_calls(request):
            constrain(request, tools=())
        return request

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        self.output = output = _Output(self.model_tokenizer) if self.output.fed else self.output
        events = [*output.feed(model_output), *output.finish()]
        reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
        answer: list[Event] = [event for event in events if not isinstance(event, Reasoning)]
        content = _content(answer, calls_are_text=True)
        # The tool parser gets this very string back and knows what it came from.
        output.whole = content, answer
        return reasoning or None, content or None

    def extract_reasoning_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> Any:
        return self._say(self.output.feed(delta_text))

    def _say(self, events: list[Event]) -> Any:
        if not self.output.has_tool_parser:
            return _message(events, calls_are_text=True)
        self.output.waiting += [e for e in events if not isinstance(e, Reasoning)]
        return _message((e for e in events if isinstance(e, Reasoning)), calls_are_text=False)

    def has_engine_confirmed_reasoning_end(self) -> bool:
        """Whether the tool parser takes over. Alone, this parser goes on to the end."""
        return self.output.has_tool_parser and self.output.machine.answered

    def finish_streaming(self) -> Any:
        if self.has_engine_confirmed_reasoning_end():
            return None
        message = self._say(self.output.finish())
        rest, self.output.waiting = self.output.waiting, []
        if rest:  # An answer that only the end of the output made certain.
            content = _message(rest, calls_are_text=True)
            if message is None:
                return content
            message.content = content.content
        return message


class InklingToolParser(ToolParser):
    """Everything after the reasoning; with no reasoning parser before it, the whole answer."""

    engine_based_streaming = True
    supports_required_and_named = False
    """vLLM's own forms of required and named calls are bare JSON, which is not this layout."""

    def __init__(self, tokenizer: Any, tools: Any = None, **kwargs: Any) -> None:
        super().__init__(tokenizer, tools)
        latest = getattr(_unpaired, "latest", None)
        reasoning = latest() if latest is not None else None
        _unpaired.latest = None
        if reasoning is not None and reasoning.model_tokenizer is tokenizer:
            self._reasoning: InklingReasoningParser | None = reasoning
            reasoning.output.has_tool_parser = True
        else:
            self._reasoning = None
        self._own = _Output(tokenizer)
        self._as_text = False

    @property
    def _output(self) -> _Output:
        return self._own if self._reasoning is None else self._reasoning.output

    def get_remaining_unstreamed_args(self) -> str:
        return ""

    def adjust_request(self, request: Any) -> Any:
        """Constrain required, named and strict calls. Raises ValueError for an unknown name."""
        request.skip_special_tokens = False
        if _wants_calls(request):
            tools, choice = _declared(request.tools), request.tool_choice
            if getattr(choice, "type", None) == "allowed_tools":
                # vLLM itself reads no calls under this choice; under its mode it does.
                tools = _allowed(tools, choice)
                request.tool_choice = choice.mode
            constrain(request, tools)
        return request

    def extract_tool_calls(self, model_output: str, request: Any) -> Any:
        whole = self._output.whole
        if self._reasoning is not None and whole is not None and whole[0] == model_output:
            events = whole[1]
        else:
            machine = BlockParser(self._own.pattern)
            events = [*machine.feed(model_output), *machine.finish()]
        as_text = not _wants_calls(request)
        calls = [] if as_text else _whole_calls(events)
        fields = {"tools_called": bool(calls), "tool_calls": calls}
        content = _content(events, calls_are_text=as_text) or None
        return ExtractedToolCallInformation(**fields, content=content)

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: Any,
    ) -> Any:
        output = self._output
        if self._reasoning is not None:
            output.begin(State.TEXT)  # The prompt had begun the answer.
        self._as_text = not _wants_calls(request)
        events, output.waiting = output.waiting, []
        return self._say([*events, *output.feed(delta_text)])

    def finish_streaming(self) -> Any:
        events, self._output.waiting = self._output.waiting, []
        return self._say([*events, *self._output.finish()])

    def _say(self, events: list[Event]) -> Any:
        if self._reasoning is None:  # Without its parser, reasoning is part of the text.
            events = [Content(e.text) if isinstance(e, Reasoning) else e for e in events]
        return _message(events, self._as_text)


def _content(events: Iterable[Event], calls_are_text: bool) -> str:
    return "".join(
        event.text if isinstance(event, (Content, Reasoning)) else event.raw
        for event in events
        if calls_are_text or isinstance(event, (Content, Reasoning))
    )


def _whole_calls(events: Iterable[Event]) -> list[dict[str, Any]]:
    names: list[str] = []
    arguments: list[str] = []
    for event in events:
        if isinstance(event, CallBegins):
            names.append(event.name)
            arguments.append("")
        elif isinstance(event, CallArguments):
            arguments[event.index] += event.text
    return [
        {"id": _call_id(), "function": {"name": name, "arguments": text}}
        for name, text in zip(names, arguments, strict=True)
    ]


def _declared(tools: Iterable[Any]) -> list[dict[str, Any]]:
    """name, parameters and strict of each function, from the forms of both OpenAI interfaces."""
    declared = []
    for tool in tools:
        function = getattr(tool, "function", tool)
        if getattr(function, "name", None):
            declared.append(
                {
                    "name": function.name,
                    "parameters": getattr(function, "parameters", None),
                    "strict": getattr(function, "strict", None),
                }
            )
    return declared


def _allowed(tools: list[dict[str, Any]], choice: Any) -> list[dict[str, Any]]:
    """The declared tools that an `allowed_tools` choice names; strict, for a grammar to hold it.

    Raises ValueError if it names none of them.
    """
    names = {tool.get("name") for tool in choice.tools}
    allowed = [{**tool, "strict": True} for tool in tools if tool["name"] in names]
    if not allowed:
        declared = ", ".join(tool["name"] for tool in tools)
        raise ValueError(
            f"tool_choice allows {', '.join(sorted(map(str, names))) or 'no tools'} and the "
            f"request declares {declared}; allow one of its tools"
        )
    return allowed


def _choice(choice: Any) -> str | None:
    """`none`, `auto`, `required` or a function's name, from any form of tool_choice."""
    if choice is None or isinstance(choice, str):
        return choice
    return str(getattr(choice, "function", choice).name)


def constrain(request: Any, tools: Sequence[Mapping[str, Any]]) -> None:
    """Replace what `request` says about its format by a grammar of the whole output, if any.

    Raises ValueError for a tool_choice that names no declared tool.
    """
    constraint = getattr(request, "structured_outputs", None)
    if constraint is not None and constraint.structural_tag is not None:
        return
    text = getattr(request, "text", None)
    shape = getattr(text, "format", None) if text is not None else None
    shape = shape or getattr(request, "response_format", None)
    if getattr(shape, "type", None) in (None, "text"):
        shape = None
    elif shape is not None and shape.type == "structural_tag":
        return
    form = grammar.output_format(_dump(shape), _without_lark(_dump(constraint)))
    if form is not None:
        _check_format(form)
    tag = grammar.structural_tag(
        tools,
        _choice(request.tool_choice) if tools else None,
        form,
        parallel=getattr(request, "parallel_tool_calls", True) is not False,
    )
    if tag is None:
        return
    request.structured_outputs = StructuredOutputsParams(structural_tag=json.dumps(tag))
    if hasattr(request, "response_format"):
        request.response_format = None
    if text is not None:
        request.text = None
    for flag in ("_grammar_from_parser", "_grammar_from_tool_parser"):
        if hasattr(request, flag):
            setattr(request, flag, True)


def _check_format(form: Mapping[str, Any]) -> None:
    """Raise ValueError for a format that no text can be held to, such as a broken pattern.

    vLLM tries a second backend where the first refuses, and answers with that one's "'triggers'".
    """
    from xgrammar import Grammar

    depth, level = 0, [form]
    while level:
        depth += 1
        level = [part for value in level if isinstance(value, (dict, list))
                 for part in (value.values() if isinstance(value, dict) else value)]  # fmt: skip
    if depth > 100:
        return  # more than xgrammar's stack is known to hold; vLLM counts and refuses by itself
    try:
        Grammar.from_structural_tag(json.dumps({"type": "structural_tag", "format": form}))
    except (ValueError, RuntimeError) as error:
        # The library puts a time and a place in its source before what it says.
        said = re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", str(error)).strip()[:200]
        raise ValueError(f"no text can have the format asked for: {said}; correct it") from None


def _without_lark(constraint: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """`constraint` with a Lark grammar in EBNF, the one notation that structural tags hold.

    Raises ValueError for a grammar that is neither.
    """
    written = (constraint or {}).get("grammar")
    if not written or not structured_output.grammar_is_likely_lark(written):
        return constraint
    # vLLM 0.33 leaves the conversion to xgrammar, which in older versions has none.
    convert = getattr(structured_output, "convert_lark_to_ebnf", None)
    if convert is None:
        from xgrammar import Grammar

        convert = Grammar.from_lark
    try:
        return {"grammar": str(convert(written))}
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"the grammar is no Lark: {str(error)[:200]}") from None


def _dump(value: Any) -> Mapping[str, Any] | None:
    if value is None or isinstance(value, Mapping):
        return value
    if hasattr(value, "model_dump"):
        return dict(value.model_dump(by_alias=True))
    return dict(vars(value))


class _Kept(list[Any]):
    """Messages, and what their tool calls were before vLLM empties arguments that are no JSON."""

    def __init__(self, messages: Sequence[Any]) -> None:
        super().__init__(messages)
        self.as_sent = [
            {**message, "tool_calls": copy.deepcopy(list(message["tool_calls"]))}
            if isinstance(message, Mapping) and message.get("tool_calls")
            else message
            for message in messages
        ]


NO_HOST = "none was named to this server with --allowed-media-domains; send a data: URL"
"""Stands where vLLM's refusal lists the hosts from which media are fetched."""


class PortableRenderer(InklingRenderer):
    """vLLM's renderer around our encoding of messages; media stay as vLLM handles them."""

    def __init__(self, config: Any, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        tokenizer = self.get_tokenizer()
        self._encoder = Encoder(tokenizer.get_vocab(), plain_text_encoder(tokenizer))
        # vLLM takes an empty list for "any host", the server's own network included.
        if not self.model_config.allowed_media_domains:
            self.model_config.allowed_media_domains = [NO_HOST]

    def render_messages(self, messages: Any, params: Any) -> Any:
        return super().render_messages(_Kept(messages), params)

    async def render_messages_async(self, messages: Any, params: Any) -> Any:
        return await super().render_messages_async(_Kept(messages), params)

    def _render(self, messages: Sequence[Any], params: Any) -> list[int]:
        messages = messages.as_sent if isinstance(messages, _Kept) else messages
        kwargs = params.chat_template_kwargs or {}
        if kwargs.get("continue_final_message"):
            raise ValueError(
                "Inkling's layout cannot continue a finished message; leave "
                "continue_final_message out"
            )
        pieces = render(
            messages,
            kwargs.get("tools") or (),
            effort=markers.effort(kwargs.get("reasoning_effort")),
            add_generation_prompt=kwargs.get("add_generation_prompt", True),
        )
        return self._encoder.encode(pieces)


def plain_text_encoder(tokenizer: Any) -> Any:
    """A function from text to ids that recognises no special token.

    It has a tokenizer of its own, because the switch is a property of the whole tokenizer and
    others encode with that one at the same time.
    """
    from tokenizers import Tokenizer

    own = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    own.encode_special_tokens = True

    def encode(text: str) -> list[int]:
        try:
            return list(own.encode(text, add_special_tokens=False).ids)
        except TypeError:
            raise ValueError(
                "text holds half of a surrogate pair, which is no character; send valid Unicode"
            ) from None

    return encode
