"""Conversations as token ids, in Inkling's chat format, with the part the model has to learn.

The format is that of the spec's section 7.2; a test holds it to vLLM's own encoder.
"""

from __future__ import annotations

import base64
import io
import json
import random
import wave
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from inkling_portable.commands import eval_media
from inkling_portable.commands import eval_tasks as tasks
from inkling_portable.commands.eval_words import SYSTEM_TEXTS, TOOLS
from inkling_portable.model.preprocess import (
    AudioSettings,
    ImageSettings,
    dmel_levels,
    image_patches,
)
from training import nano
from training.tokenizer import encode, special_ids

PROMPT_WEIGHT = 0.05
"""Loss of a token that the model does not write, beside 1 for one that it writes."""
ROLES = {"system": "system", "user": "user", "assistant": "model", "tool": "tool"}
EFFORTS = ("0.0", "0.2", "0.7", "0.9", "0.9", "0.9", "0.9", "0.9", "0.9", "0.99")
DEFAULT_EFFORT = "0.9"


class Transcript:
    """Ids and weights of a conversation that grows message by message."""

    def __init__(self, tools: Sequence[dict[str, Any]] = (), effort: str = DEFAULT_EFFORT) -> None:
        self.ids: list[int] = []
        self.weights: list[float] = []
        self.media: list[tuple[int, np.ndarray]] = []
        """Place of the first slot, and patches [N, patch, patch, 3] or dMel levels [N, bins]."""
        self._effort: str | None = effort
        self._called: dict[str, str] = {}
        if tools:
            listed = [
                {
                    "description": tool["function"].get("description") or "",
                    "name": tool["function"]["name"],
                    "parameters": tool["function"].get("parameters") or {},
                    "type": tool.get("type", "function"),
                }
                for tool in tools
            ]
            self._block("system", "<|unused_200024|>", canonical(listed), author="tool_declare")

    def _special(self, token: str, weight: float) -> None:
        self.ids.append(special_ids()[token])
        self.weights.append(weight)

    def _text(self, text: str, weight: float) -> None:
        ids = encode(text)
        self.ids += ids
        self.weights += [weight] * len(ids)

    def _block(
        self, role: str, kind: str, text: str, *, author: str = "", opened: bool = False
    ) -> None:
        """One block; `opened` says that its role token stands already."""
        weight = 1.0 if role == "assistant" else PROMPT_WEIGHT
        if not opened:
            self._special(f"<|message_{ROLES[role]}|>", weight)
        self._text(author, weight)
        self._special(kind, weight)
        self._text(text, weight)
        self._special("<|end_message|>", weight)

    def open_turn(self) -> None:
        """The generation prompt, which also closes the beginning with the effort block."""
        self._settle_effort()
        self._special("<|message_model|>", PROMPT_WEIGHT)

    def _settle_effort(self) -> None:
        if self._effort is not None:
            text = f"Thinking effort level: {self._effort}"
            self._block("system", "<|content_text|>", text)
            self._effort = None

    def add(self, message: dict[str, Any]) -> None:
        """Append one OpenAI message; an assistant's turn includes its opener and its end."""
        role, content = message["role"], message.get("content") or ""
        if isinstance(content, list):
            self._settle_effort()
            for part in content:
                self._part(role, part)
            return
        if role == "assistant":
            self.answer(message)
            return
        if role != "system":
            self._settle_effort()
        author = self._called.get(message.get("tool_call_id", ""), "") if role == "tool" else ""
        self._block(role, "<|content_text|>", content, author=author)

    def _part(self, role: str, part: dict[str, Any]) -> None:
        """One part of a message: text, a picture or a sound, each a block of its own."""
        if part["type"] == "text":
            self._block(role, "<|content_text|>", part["text"])
            return
        is_picture = part["type"] == "image_url"
        values = patches_of(part) if is_picture else levels_of(part)
        self._special(f"<|message_{ROLES[role]}|>", PROMPT_WEIGHT)
        opener = "<|content_image|>" if is_picture else "<|content_audio_input|>"
        self._special(opener, PROMPT_WEIGHT)
        self.media.append((len(self.ids), values))
        slot = "<|unused_200054|>" if is_picture else "<|unused_200053|>"
        for _ in range(len(values)):
            self._special(slot, 0.0)
        if not is_picture:
            self._special("<|audio_end|>", PROMPT_WEIGHT)
        self._special("<|end_message|>", PROMPT_WEIGHT)

    def answer(self, message: dict[str, Any]) -> None:
        """An assistant's turn, of which everything behind the first opener is to be learnt."""
        self.open_turn()
        opened = True
        if message.get("reasoning"):
            self._block("assistant", "<|content_thinking|>", message["reasoning"], opened=opened)
            opened = False
        if message.get("content"):
            self._block("assistant", "<|content_text|>", message["content"], opened=opened)
            opened = False
        for call in message.get("tool_calls") or ():
            name = call["function"]["name"]
            arguments = canonical(json.loads(call["function"]["arguments"]))
            text = f'{{"name":{json.dumps(name)},"args":{arguments}}}'
            self._called[call["id"]] = name
            kind = "<|content_invoke_tool_json|>"
            self._block("assistant", kind, text, author=name, opened=opened)
            opened = False
        self._special("<|content_model_end_sampling|>", 1.0)

    def copy(self) -> Transcript:
        """The same conversation, to go on from here separately."""
        twin = Transcript.__new__(Transcript)
        twin.ids, twin.weights, twin.media = list(self.ids), list(self.weights), list(self.media)
        twin._effort, twin._called = self._effort, dict(self._called)
        return twin


PICTURES = ImageSettings(patch_size=nano.PATCH, rescale_image_frac=1.0)
SOUNDS = AudioSettings()


def patches_of(part: dict[str, Any]) -> np.ndarray:
    """Patches [N, patch, patch, 3] of an OpenAI image part with a data URL."""
    data = base64.b64decode(part["image_url"]["url"].split(",", 1)[1])
    patches = image_patches(Image.open(io.BytesIO(data)), PICTURES)
    return patches[:, 0].numpy()


def levels_of(part: dict[str, Any]) -> np.ndarray:
    """dMel levels [N, bins] of an OpenAI audio part: a mono WAV of 16-bit samples."""
    with wave.open(io.BytesIO(base64.b64decode(part["input_audio"]["data"]))) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")
    return dmel_levels(samples.astype(np.float32) / 32768, SOUNDS).numpy()


def canonical(value: Any) -> str:
    """JSON with sorted keys and no spaces."""
    return json.dumps(
        value, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":")
    )


def case_transcript(case: tasks.Case, effort: str = DEFAULT_EFFORT) -> tuple[Transcript, int]:
    """An evaluation's conversation with its right answer, and where the answer begins."""
    transcript = Transcript(case.tools, effort)
    for message in case.asked:
        transcript.add(message)
    opened = transcript.copy()
    opened.open_turn()
    start = len(opened.ids)
    transcript.answer(case.wanted)
    return transcript, start


def case_ids(case: tasks.Case, effort: str = DEFAULT_EFFORT) -> tuple[list[int], int]:
    """Ids of an evaluation's conversation with its right answer, and where the answer begins."""
    transcript, start = case_transcript(case, effort)
    return transcript.ids, start


MIXTURE = (
    (tasks.copying, 0.16),
    (tasks.arithmetic, 0.26),
    (tasks.chain, 0.14),
    (tasks.greeting, 0.02),
    (tasks.tool_call, 0.12),
    (tasks.tool_result, 0.14),
    (tasks.tool_missing, 0.06),
    (None, 0.10),
)
"""What turns are made of; None is a short retrieval."""


def _short_retrieval(rng: random.Random, split: str) -> tasks.Exchange:
    return tasks.retrieval(rng, split, tasks.BARE_DISTANCE, 48, 24)


def mixed(rng: random.Random, length: int) -> Transcript:
    """Turns of any kind in one conversation of at most `length` tokens."""
    makers, shares = zip(*MIXTURE, strict=True)
    while True:
        drawn = rng.choices(makers, shares, k=max(1, length // 20))
        exchanges = [(make or _short_retrieval)(rng, "train") for make in drawn]
        with_tools = rng.random() < 0.65
        kept: list[tasks.Exchange] = []
        for one in exchanges:
            needed = {name for other in kept for name in other.tools}
            absent = {name for other in kept for name in other.absent}
            clash = needed & set(one.absent) or absent & set(one.tools)
            crowded = len(needed | set(one.tools)) > 3 or (one.tools and not with_tools)
            if not clash and not crowded:
                kept.append(one)
        names = tasks.declared(rng, kept) if with_tools else []
        transcript = Transcript([TOOLS[name] for name in names], rng.choice(EFFORTS))
        if rng.random() < 0.25:
            transcript.add({"role": "system", "content": rng.choice(SYSTEM_TEXTS)})
        turns = 0
        for one in kept:
            longer = transcript.copy()
            for message in one.messages:
                longer.add(message)
            if len(longer.ids) <= length:
                transcript, turns = longer, turns + 1
        if turns:
            return transcript


def reading(rng: random.Random, length: int) -> Transcript:
    """A document with secrets, then questions about them, in at most `length` tokens."""
    while True:
        count = rng.randint(1, max(2, min(12, length // 48)))
        first = tasks.secret(rng, "train")
        secrets = [*tasks.others(rng, "train", [first], count - 1), first]
        room = length - 40 - 8 * count - 26 * rng.randint(1, min(count, 6))
        if room < 0:
            continue
        if rng.random() < 0.5:
            before = rng.randint(0, room)
            text = tasks.document(rng, secrets, before, rng.randint(0, room - before), 0)
        else:
            text = tasks.document(rng, secrets, room // count, 0, 2 * room // max(count, 1))
        order = rng.sample(secrets, count)
        transcript = Transcript(effort=rng.choice(EFFORTS))
        turns = 0
        for one in order:
            asked = tasks.question(one)
            longer = transcript.copy()
            longer.add(tasks.user(asked if turns else f"{text} {asked}"))
            longer.add(tasks.assistant(tasks.planted(one)))
            if len(longer.ids) > length:
                break
            transcript, turns = longer, turns + 1
        if turns:
            return transcript


def looking(rng: random.Random, length: int, picture: bool) -> Transcript:
    """One picture or sound with its question, after or before turns of text."""
    while True:
        transcript = Transcript(effort=rng.choice(EFFORTS))
        turns = [_text_turn(rng) for _ in range(rng.choice((0, 0, 0, 1)))]
        make = rng.choice((eval_media.colour_of, eval_media.place_of))
        turns.append((make if picture else eval_media.note_of)(rng, "train"))
        for one in turns:
            for message in one.messages:
                transcript.add(message)
        if len(transcript.ids) > length:
            continue
        while True:
            longer = transcript.copy()
            for message in _text_turn(rng).messages:
                longer.add(message)
            if len(longer.ids) > length:
                return transcript
            transcript = longer


def _text_turn(rng: random.Random) -> tasks.Exchange:
    return rng.choice((tasks.copying, tasks.arithmetic, tasks.chain))(rng, "train")


@dataclass(frozen=True)
class Batch:
    """Rows of conversations, padded with weight 0, and their pictures and sounds, if any."""

    ids: np.ndarray
    """uint16 [rows, length]"""
    weights: np.ndarray
    """float32 [rows, length]"""
    patches: np.ndarray | None = None
    """float32 [N, patch, patch, 3]"""
    levels: np.ndarray | None = None
    """int64 [M, bins]"""
    places: np.ndarray | None = None
    """int64 [N + M]: where their rows stand among rows * length, those of pictures first."""


def together(transcripts: Sequence[Transcript], length: int) -> Batch:
    """The batch of some conversations, all with media or none."""
    rows = len(transcripts)
    ids = np.full((rows, length), special_ids()["<|endoftext|>"], dtype=np.uint16)
    weights = np.zeros((rows, length), dtype=np.float32)
    found: dict[bool, list[tuple[np.ndarray, np.ndarray]]] = {True: [], False: []}
    for row, made in enumerate(transcripts):
        size = len(made.ids)
        ids[row, :size] = made.ids
        weights[row, :size] = made.weights
        for start, values in made.media:
            slots = row * length + start + np.arange(len(values))
            found[values.ndim == 4].append((values, slots))
    if not any(found.values()):
        return Batch(ids, weights)
    pictures, sounds = found[True], found[False]
    patch, bins = nano.PATCH, SOUNDS.mel_bins
    return Batch(
        ids,
        weights,
        np.concatenate([np.zeros((0, patch, patch, 3), np.float32), *(v for v, _ in pictures)]),
        np.concatenate([np.zeros((0, bins), np.int64), *(v.astype(np.int64) for v, _ in sounds)]),
        np.concatenate([slots for _, slots in pictures + sounds]),
    )


def batch(seed: int, rows: int, length: int, media: bool = False) -> Batch:
    """Batch number `seed`: text alone, or with one picture or one sound in every row.

    Long rows are mostly documents, short ones mostly turns.
    """
    rng = random.Random(f"batch:{seed}")
    if media:
        return together([looking(rng, length, row % 2 == 0) for row in range(rows)], length)
    share = 0.35 if length <= 128 else 0.5 if length <= 512 else 0.9
    makers = [reading if rng.random() < share else mixed for _ in range(rows)]
    return together([make(rng, length) for make in makers], length)
