"""What the demo asks beside plain text: a picture and a clip in one prompt, and a tool's result.

A server that lost any of them would answer as fluently. So prompts are counted against the rules
for media, and each part is replaced by another of the same length, which has to move the
log-probabilities of the answer.
"""

import base64
import io
import json
import math
import wave
from array import array
from pathlib import Path
from typing import Any

PICTURE = Path(__file__).with_name("demo.png")
RATE, SAMPLES = 16_000, 9_600
# Around an item: its message's role, its opener and the message's end; a clip has its own end too.
AROUND_IMAGE, AROUND_AUDIO = 3, 4
MOVED, SAME = 1e-2, 1e-3
"""Log-probabilities that are further apart are of another prompt; that are nearer, of the same."""

TOOL = {
    "type": "function",
    "function": {
        "name": "temperature",
        "description": "Degrees Celsius in a town now.",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    },
}


class DemoError(Exception):
    """A sentence: which step failed and what was seen."""


def clip(backwards: bool = False) -> bytes:
    """A rising whistle as a WAV file; backwards it falls."""
    times = [i / RATE for i in range(SAMPLES)]
    tone = [round(12_000 * math.sin(2 * math.pi * (300 + 1500 * t) * t)) for t in times]
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", "not compressed"))
        file.writeframes(array("h", tone[::-1] if backwards else tone).tobytes())
    return out.getvalue()


def picture(upside_down: bool = False) -> tuple[bytes, int, int]:
    """The repository's picture as a PNG file, its width and its height."""
    from PIL import Image

    with Image.open(PICTURE) as image:
        if not upside_down:
            return PICTURE.read_bytes(), *image.size
        out = io.BytesIO()
        image.transpose(Image.Transpose.FLIP_TOP_BOTTOM).save(out, format="PNG")
        return out.getvalue(), *image.size


def media_tokens(checkpoint: Path) -> tuple[int, int]:
    """Tokens by which the picture and the clip lengthen a prompt, from the checkpoint's files."""
    from inkling_portable.model import preprocess
    from inkling_portable.model.config import parse

    config, processor = (
        json.loads((checkpoint / name).read_text())
        for name in ("config.json", "processor_config.json")
    )
    towers = parse(config)
    if towers.vision is None or towers.audio is None:
        raise DemoError(f"the checkpoint in {checkpoint} has no towers; write it as preset omni")
    _, width, height = picture()
    patches = preprocess.image_settings(towers.vision, processor).tokens(width, height)
    frames = preprocess.audio_settings(towers.audio, processor).tokens(SAMPLES)
    return AROUND_IMAGE + patches, AROUND_AUDIO + frames


def ask(client: Any, model: str, messages: list[Any], **more: Any) -> tuple[list[float], int, str]:
    """Highest log-probabilities of the answer's first token, prompt tokens, and the answer."""
    answer = client.chat.completions.create(
        model=model, messages=messages, max_tokens=8, temperature=0.0, logprobs=True,
        top_logprobs=20, extra_body={"ignore_eos": True}, **more,
    )  # fmt: skip
    choice = answer.choices[0]
    top = [entry.logprob for entry in choice.logprobs.content[0].top_logprobs]
    message = choice.message
    text = getattr(message, "reasoning", None) or message.content or ""
    return top, answer.usage.prompt_tokens, repr(text)[1:-1]


def apart(one: list[float], other: list[float]) -> float:
    """Largest difference of two lists of falling log-probabilities."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def check_moved(what: str, moved: float, same: float) -> None:
    """Raises DemoError unless a replaced part moved the answer and a repeated prompt did not."""
    print(f"{what} moves the log-probabilities by {moved:.2f}; the same again, by {same:.0e}")
    if moved < MOVED or same > SAME:
        raise DemoError(
            f"{what} should have moved the log-probabilities by {MOVED} or more, and the same "
            f"prompt by {SAME} at most; seen were {moved} and {same}"
        )


def picture_and_clip(client: Any, model: str, tokens: tuple[int, int]) -> None:
    """A prompt of a picture, words and a clip; `tokens` is what `media_tokens` says."""
    words = {"type": "text", "text": "What do you see, and what do you hear?"}

    def content(**changed: bool) -> list[dict[str, Any]]:
        image, sound = (base64.b64encode(data).decode() for data in (
            picture(changed.get("upside_down", False))[0], clip(changed.get("backwards", False))
        ))  # fmt: skip
        return [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}},
            words,
            {"type": "input_audio", "input_audio": {"data": sound, "format": "wav"}},
        ]

    def answer(parts: list[dict[str, Any]]) -> tuple[list[float], int, str]:
        return ask(client, model, [{"role": "user", "content": parts}])

    _, width, height = picture()
    print(f"sent      user    [picture of {width}x{height} pixels] {words['text']} "
          f"[clip of {SAMPLES / RATE} s]")  # fmt: skip
    (_, bare, _), (first, count, text) = answer([words]), answer(content())
    print(f"received  {text}")
    print(f"{count} tokens in: {bare} for the words, {tokens[0]} for the picture, {tokens[1]} for "
          "the clip")  # fmt: skip
    if count != bare + sum(tokens):
        raise DemoError(f"the prompt should have {bare + sum(tokens)} tokens; it has {count}")
    same = apart(first, answer(content())[0])
    check_moved("the picture upside down",
                apart(first, answer(content(upside_down=True))[0]), same)  # fmt: skip
    check_moved("the clip backwards", apart(first, answer(content(backwards=True))[0]), same)


def tool_result(client: Any, model: str) -> None:
    """A conversation that already holds a call of a tool and what the tool said."""
    call = {"name": "temperature", "arguments": json.dumps({"town": "Bergen"})}
    question = {"role": "user", "content": "How warm is it in Bergen?"}

    def conversation(result: str) -> list[dict[str, Any]]:
        calls = [{"id": "call_1", "type": "function", "function": call}]
        return [
            question,
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": "call_1", "content": result},
        ]

    def answer(messages: list[dict[str, Any]]) -> tuple[list[float], int, str]:
        return ask(client, model, messages, tools=[TOOL])

    print(f"sent      user    {question['content']}")
    print(f"sent      model   calls {call['name']} with {call['arguments']}")
    print("sent      tool    7")
    (_, bare, _), (first, count, text) = answer([question]), answer(conversation("7"))
    print(f"received  {text}")
    other, other_count, _ = answer(conversation("9"))
    print(f"{count} tokens in, {count - bare} of them for the call and its result")
    least = len(call["name"]) // 2
    if count != other_count or count < bare + least:
        raise DemoError(
            f"the call and its result should lengthen a prompt of {bare} tokens by {least} or "
            f"more, for either result; seen were {count} and {other_count}"
        )
    check_moved("another result", apart(first, other),
                apart(first, answer(conversation("7"))[0]))  # fmt: skip
