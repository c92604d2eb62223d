"""Structural tags: what the model may write when a request asks for a call or for a format.

The grammar begins with the first generated token, so it holds the whole layout: reasoning blocks
if the model wants them, then the opener of what was asked for. A constraint that knew only the
JSON would forbid the opener, and one that waited for the opener could not require it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from inkling_portable.chat import markers

Tag = dict[str, Any]
"""A node of xgrammar's structural tag format, as JSON."""

_FORBIDDEN_IN_BLOCKS = [*markers.ROLES, *markers.OPENERS]


def structural_tag(
    tools: Sequence[Mapping[str, Any]],
    choice: str | None,
    output: Tag | None,
    parallel: bool = True,
) -> Tag | None:
    """The tag for a request, or None where the model is free.

    tools: name, parameters (a JSON schema or None) and strict of each function.
    choice: `none`, `auto`, `required`, or the name of the function that has to be called.
    output: the format that the visible answer must have, or None.
    """
    if choice in (None, "none"):
        answer = output and _text_block(output)
    elif choice == "auto":
        strict = any(tool.get("strict") for tool in tools)
        if output is not None:
            answer = {"type": "or", "elements": [_text_block(output), _calls(tools, parallel)]}
        else:
            return _free_but_for_calls(tools) if strict else None
    else:
        named = [tool for tool in tools if choice in ("required", tool["name"])]
        if not named:
            names = ", ".join(str(tool["name"]) for tool in tools)
            raise ValueError(
                f"tool_choice asks for {choice} and the request declares {names or 'no tools'}; "
                "name one of its tools"
            )
        answer = _calls(named, parallel and choice == "required")
    if answer is None:
        return None
    return {
        "type": "structural_tag",
        "format": {"type": "sequence", "elements": [_thinking(), answer]},
    }


def _thinking() -> Tag:
    """Any number of reasoning blocks, each followed by the header of the next block."""
    block = {
        "type": "tag",
        "begin": markers.THINKING,
        "content": {"type": "any_text", "excludes": _FORBIDDEN_IN_BLOCKS},
        "end": markers.END_MESSAGE,
    }
    header = {"type": "const_string", "value": markers.MODEL}
    return {"type": "star", "content": {"type": "sequence", "elements": [block, header]}}


def _text_block(output: Tag) -> Tag:
    return {"type": "tag", "begin": markers.TEXT, "content": output, "end": markers.END_MESSAGE}


def _calls(tools: Sequence[Mapping[str, Any]], parallel: bool) -> Tag:
    return {
        "type": "tags_with_separator",
        "tags": [_call(tool, header=True) for tool in tools],
        "separator": markers.MODEL,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }


def _call(tool: Mapping[str, Any], header: bool) -> Tag:
    """One call; its arguments follow the schema unless the tool says `strict: false`."""
    name = str(tool["name"])
    schema = tool.get("parameters")
    if schema is None or tool.get("strict") is False:
        schema = {"type": "object"}
    quoted = json.dumps(name, ensure_ascii=False)
    return {
        "type": "tag",
        "begin": f'{name if header else ""}{markers.CALL}{{"name":{quoted},"args":',
        "content": {"type": "json_schema", "json_schema": schema},
        "end": "}" + markers.END_MESSAGE,
    }


def _free_but_for_calls(tools: Sequence[Mapping[str, Any]]) -> Tag:
    """Free output in which a call, once opened, follows its schema."""
    return {
        "type": "structural_tag",
        "format": {
            "type": "triggered_tags",
            "triggers": [markers.CALL],
            "tags": [_call(tool, header=False) for tool in tools],
        },
    }


def output_format(
    response_format: Mapping[str, Any] | None, constraint: Mapping[str, Any] | None
) -> Tag | None:
    """The visible answer's format as a node, or None if any text will do.

    response_format: the OpenAI field, dumped. constraint: vLLM's structured outputs, dumped.
    """
    kind = (response_format or {}).get("type")
    if response_format and kind == "json_object":
        return _any_object()
    if response_format and kind == "json_schema":
        declared = response_format.get("json_schema") or response_format
        schema = declared.get("schema", declared.get("json_schema"))
        return {"type": "json_schema", "json_schema": {} if schema is None else schema}
    if not constraint:
        return None
    if constraint.get("json") is not None:
        schema = constraint["json"]
        schema = json.loads(schema) if isinstance(schema, str) else schema
        return {"type": "json_schema", "json_schema": schema}
    if constraint.get("json_object"):
        return _any_object()
    if constraint.get("regex") is not None:
        return {"type": "regex", "pattern": constraint["regex"]}
    if constraint.get("choice") is not None:
        strings = [{"type": "const_string", "value": value} for value in constraint["choice"]]
        return {"type": "or", "elements": strings}
    if constraint.get("grammar") is not None:
        return {"type": "grammar", "grammar": constraint["grammar"]}
    return None


def _any_object() -> Tag:
    return {"type": "json_schema", "json_schema": {"type": "object"}}
