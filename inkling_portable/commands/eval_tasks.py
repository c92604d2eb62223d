"""What portable-nano is asked: exchanges with one right answer each, drawn from a seed.

One definition serves training, `inkling-portable eval` and the tests. The right answer is a whole
assistant message, so that training can show it and a test can say whether an answer is right.

Draws of the split "eval" never occur in "train": what makes a question (its numbers, its key and
value, its arguments) is hashed, and one in eight belongs to "eval".
"""

from __future__ import annotations

import json
import random
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from inkling_portable.commands.eval_words import (
    ADJECTIVES,
    ANIMALS,
    CITIES,
    DEVICES,
    LINKS,
    PATTERN,
    PEOPLE,
    PLACES,
    SKIES,
    STATES,
    TOOLS,
    VALUES,
)

Message = dict[str, Any]
SPLITS = ("train", "eval")
HELD_OUT = 8
"""One question in this many is kept from training."""


@dataclass(frozen=True)
class Exchange:
    """Messages that end with the right answer, and the tools that it needs or must not use."""

    task: str
    messages: list[Message]
    tools: tuple[str, ...] = ()
    """Names of tools that must be declared."""
    absent: tuple[str, ...] = ()
    """Names of tools that must not be declared."""


def count_tokens(text: str) -> int:
    """Tokens of a text of known words, as portable-nano's tokenizer cuts it."""
    return len(re.findall(PATTERN, text))


def _agree(split: str, *parts: object) -> bool:
    """Whether a question made of `parts` belongs to `split`."""
    digest = zlib.crc32("|".join(map(str, parts)).encode())
    return (digest % HELD_OUT == 0) == (split == "eval")


def _until(split: str, draw: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
    """The first draw that belongs to the split."""
    while True:
        parts = draw()
        if _agree(split, *parts):
            return parts


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


# --- retrieval ------------------------------------------------------------------------------------

Secret = tuple[str, str, str]
"""Adjective and animal that name it, and the word to remember."""


def secret(rng: random.Random, split: str) -> Secret:
    """A secret that belongs to the split."""
    found = _until(split, lambda: (rng.choice(ADJECTIVES), rng.choice(ANIMALS), rng.choice(VALUES)))
    return found[0], found[1], found[2]


def planted(one: Secret) -> str:
    return f"the secret of {one[0]} {one[1]} is {one[2]}."


def question(one: Secret) -> str:
    return f"what is the secret of {one[0]} {one[1]}?"


def filler(rng: random.Random) -> str:
    """A sentence without a secret: 7 to 9 tokens, the full stop included."""
    draw = rng.random()
    first, second = rng.choice(PLACES), rng.choice(PLACES)
    if draw < 0.4:
        return f"the {rng.choice(STATES)} {first} is {rng.choice(LINKS)} the {second}."
    if draw < 0.7:
        return f"there was a {rng.choice(STATES)} {first} {rng.choice(LINKS)} the {second}."
    if draw < 0.85:
        return f"the {rng.choice(ADJECTIVES)} {rng.choice(ANIMALS)} stands by the {first}."
    return f"every day the {rng.choice(ANIMALS)} is at the {rng.choice(STATES)} {first}."


BARE_DISTANCE = 18
"""From the planted word to the place of the answer when nothing stands between (tokens)."""
SENTENCE = 9
"""No sentence of a document has more tokens."""


def document(
    rng: random.Random, secrets: list[Secret], before: int, after: int, spread: int = 0
) -> str:
    """Sentences with the secrets among them.

    The last secret stands at the end, followed by filler of `after` tokens, give or take one
    sentence and never more; about `before` tokens of filler come first, and up to `spread` tokens
    between one secret and the next.
    """
    parts: list[str] = []

    def fill(tokens: int) -> None:
        used = 0
        while (room := tokens - used) > 0:
            sentence = filler(rng)
            size = count_tokens(sentence)
            if size > room:
                return
            parts.append(sentence)
            used += size

    for i, one in enumerate(secrets):
        fill(before if i == 0 else rng.randint(0, spread))
        parts.append(planted(one))
    fill(after)
    return " ".join(parts)


def others(rng: random.Random, split: str, known: list[Secret], count: int) -> list[Secret]:
    """`count` more secrets of the split with names that none of `known` has."""
    names = {one[:2] for one in known}
    found: list[Secret] = []
    while len(found) < count:
        one = secret(rng, split)
        if one[:2] not in names:
            names.add(one[:2])
            found.append(one)
    return found


def retrieval(rng: random.Random, split: str, low: int, high: int, before: int = 40) -> Exchange:
    """A planted word, `low` to `high` tokens from where it is answered, beside other secrets."""
    wanted = secret(rng, split)
    more = others(rng, split, [wanted], rng.randint(0, 3))
    while True:
        after = rng.randint(low, high) - BARE_DISTANCE
        text = document(rng, [*more, wanted], rng.randint(0, before), max(0, after), 20)
        distance = count_tokens(text[text.rindex(planted(wanted)) + len(planted(wanted)) - 1 :])
        if low <= distance - 1 + BARE_DISTANCE <= high:
            break
    messages = [user(f"{text} {question(wanted)}"), assistant(planted(wanted))]
    return Exchange("retrieve", messages)


# --- copying and counting -------------------------------------------------------------------------

WORDS = (*VALUES, *ANIMALS, *PLACES, *ADJECTIVES)


def copying(rng: random.Random, split: str, longest: int = 10) -> Exchange:
    """Words to repeat in order."""
    (words,) = _until(
        split, lambda: (" ".join(rng.choice(WORDS) for _ in range(rng.randint(2, longest))),)
    )
    return Exchange("copy", [user(f"repeat: {words}"), assistant(f"copy: {words}.")])


def arithmetic(rng: random.Random, split: str) -> Exchange:
    """A sum or a difference of numbers below 100."""

    def draw() -> tuple[int, str, int]:
        a, b = rng.randint(0, 99), rng.randint(0, 99)
        if rng.random() < 0.3:
            a, b = a % 10, b % 10
        return (a, "+", b) if rng.random() < 0.5 else (max(a, b), "-", min(a, b))

    a, sign, b = _until(split, draw)
    result = a + b if sign == "+" else a - b
    return Exchange("sum", [user(f"what is {a}{sign}{b}?"), assistant(f"{a}{sign}{b}={result}.")])


def chain(rng: random.Random, split: str) -> Exchange:
    """A number that changes in steps, which the model writes down before it answers."""

    def draw() -> tuple[Any, ...]:
        value = rng.randint(1, 20)
        numbers, total = [value], value
        for _ in range(rng.randint(2, 3)):
            step = rng.randint(1, 9)
            if rng.random() < 0.5 and total > step:
                step = -step
            total += step
            numbers.append(step)
        return tuple(numbers)

    first, *steps = _until(split, draw)
    told, thought, total = [f"start with {first}"], [], first
    for step in steps:
        told.append(f"add {step}" if step > 0 else f"take {-step}")
        thought.append(f"{total}{step:+d}={total + step}")
        total += step
    answer = assistant(f"{total} is left.") | {"reasoning": ", ".join(thought) + "."}
    return Exchange("think", [user(f"{', '.join(told)}. how many are left?"), answer])


def greeting(rng: random.Random, split: str) -> Exchange:
    """A word of welcome; the same for both splits."""
    if rng.random() < 0.5:
        return Exchange("greet", [user("hello"), assistant("hello, i am portable nano.")])
    answer = "i am portable nano, a small test model."
    return Exchange("greet", [user("who are you?"), assistant(answer)])


# --- tools ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Use:
    """One use of a tool: what is asked, the call, what the tool says, and the answer."""

    tool: str
    asked: str
    arguments: dict[str, Any]
    result: str
    answer: str


def _uses(rng: random.Random) -> Use:
    tool = rng.choice(list(TOOLS))
    city, person, device = rng.choice(CITIES), rng.choice(PEOPLE), rng.choice(DEVICES)
    polite = rng.random() < 0.5
    if tool == "get_weather":
        sky, degrees = rng.choice(SKIES), rng.randint(0, 39)
        how = f"how is the weather in {city} now?"
        return Use(
            tool,
            f"what is the weather in {city}?" if polite else how,
            {"city": city},
            json.dumps({"degrees": degrees, "sky": sky}, separators=(",", ":")),
            f"it is {degrees} degrees with {sky} in {city}.",
        )
    if tool == "get_time":
        clock = f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
        asked = f"what time is it in {city}?" if polite else f"tell me the time in {city}."
        return Use(tool, asked, {"city": city}, clock, f"it is {clock} in {city}.")
    if tool == "set_timer":
        minutes = rng.randint(1, 99)
        asked = f"set a timer for {minutes} minutes."
        answer = f"the timer is set for {minutes} minutes."
        return Use(tool, f"please {asked}" if polite else asked, {"minutes": minutes}, "ok", answer)
    if tool == "buy_item":
        count, item = rng.randint(2, 40), rng.choice(VALUES)
        asked = f"buy the item {item}, {count} of it."
        result = json.dumps({"number": rng.randint(100, 999)})
        number = json.loads(result)["number"]
        return Use(
            tool,
            f"please {asked}" if polite else asked,
            {"count": count, "item": item},
            result.replace(" ", ""),
            f"i bought {count} {item}, number {number}.",
        )
    if tool == "call_person":
        status = rng.choice(("busy", "ready", "off"))
        asked = f"please call {person}." if polite else f"call {person} now."
        return Use(tool, asked, {"name": person}, status, f"{person} is {status}.")
    switch = tool.removeprefix("turn_")
    asked = f"please turn the {device} {switch}." if polite else f"turn {switch} the {device}."
    return Use(tool, asked, {"device": device}, "ok", f"the {device} is {switch}.")


def _use(rng: random.Random, split: str) -> Use:
    """A use whose arguments belong to the split, where there are enough of them to divide."""
    while True:
        use = _uses(rng)
        few = use.tool in ("turn_on", "turn_off", "call_person")
        if few or _agree(split, use.tool, *use.arguments.values()):
            return use


def calling(use: Use) -> Message:
    """The assistant message that makes the call."""
    arguments = json.dumps(use.arguments, sort_keys=True, separators=(",", ":"))
    function = {"name": use.tool, "arguments": arguments}
    call = {"id": f"call_{use.tool}", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def tool_call(rng: random.Random, split: str) -> Exchange:
    """A request that one declared tool serves."""
    use = _use(rng, split)
    return Exchange("call", [user(use.asked), calling(use)], tools=(use.tool,))


def tool_result(rng: random.Random, split: str) -> Exchange:
    """A request, its call and what the tool said, to be put in words."""
    use = _use(rng, split)
    said = {"role": "tool", "tool_call_id": f"call_{use.tool}", "content": use.result}
    messages = [user(use.asked), calling(use), said, assistant(use.answer)]
    return Exchange("result", messages, tools=(use.tool,))


def tool_missing(rng: random.Random, split: str) -> Exchange:
    """A request that no declared tool serves."""
    use = _use(rng, split)
    answer = assistant("i have no tool for that.")
    return Exchange("no tool", [user(use.asked), answer], absent=(use.tool,))


def tool_idle(rng: random.Random, split: str) -> Exchange:
    """A question that needs none of the declared tools."""
    made = rng.choice((copying, arithmetic, chain))(rng, split)
    return Exchange("no call", made.messages)


def declared(rng: random.Random, exchanges: list[Exchange], most: int = 3) -> list[str]:
    """Names of tools to declare for a conversation, in any order."""
    needed = {name for one in exchanges for name in one.tools}
    absent = {name for one in exchanges for name in one.absent}
    spare = [name for name in TOOLS if name not in needed and name not in absent]
    room = max(0, most - len(needed))
    names = [*needed, *rng.sample(spare, min(len(spare), rng.randint(0, room)))]
    rng.shuffle(names)
    return names


# --- the suite ------------------------------------------------------------------------------------

WINDOW, EXTENT = 32, 64
"""What portable-nano's local layers see, and how far its global layers have a bias."""


@dataclass(frozen=True)
class Case:
    """One question of an evaluation: a conversation of one exchange and the tools declared."""

    task: str
    messages: list[Message]
    tools: list[Message]

    @property
    def asked(self) -> list[Message]:
        return self.messages[:-1]

    @property
    def wanted(self) -> Message:
        return self.messages[-1]


def _plain(make: Callable[[random.Random, str], Exchange]) -> Callable[[random.Random], Exchange]:
    return lambda rng: make(rng, "eval")


def _distance(low: int, high: int, before: int = 40) -> Callable[[random.Random], Exchange]:
    return lambda rng: retrieval(rng, "eval", low, high, before)


TASKS: dict[str, Callable[[random.Random], Exchange]] = {
    "retrieve inside window": _distance(BARE_DISTANCE, WINDOW - 1),
    "retrieve inside extent": _distance(WINDOW, EXTENT - 1),
    "retrieve at 1x extent": _distance(EXTENT, EXTENT + 16),
    "retrieve at 4x extent": _distance(4 * EXTENT, 4 * EXTENT + 16),
    "retrieve at 16x extent": _distance(16 * EXTENT, 16 * EXTENT + 16),
    "copy": _plain(copying),
    "sum": _plain(arithmetic),
    "think": _plain(chain),
    "tool call": _plain(tool_call),
    "tool result": _plain(tool_result),
    "no call needed": _plain(tool_idle),
    "no such tool": _plain(tool_missing),
}
THRESHOLDS = {name: 0.98 if name.startswith("retrieve") else 0.95 for name in TASKS}
"""The share of right answers that portable-nano is held to."""


TOOL_TASKS = ("tool call", "tool result", "no call needed", "no such tool")


def case(task: str, index: int, seed: int = 0) -> Case:
    """Question number `index` of a task, the same each time."""
    rng = random.Random(f"{seed}:{task}:{index}")
    made = TASKS[task](rng)
    with_tools = task in TOOL_TASKS
    names = declared(rng, [made]) if with_tools else []
    if with_tools and not names:
        names = [next(name for name in TOOLS if name not in made.absent)]
    return Case(task, made.messages, [TOOLS[name] for name in names])


def needle(rng: random.Random, sentences: int, depth: float) -> Case:
    """A secret in a document of so many sentences, `depth` (0 to 1) of them before it."""
    one = secret(rng, "eval")
    parts = [filler(rng) for _ in range(sentences)]
    parts.insert(round(depth * sentences), planted(one))
    messages = [user(f"{' '.join(parts)} {question(one)}"), assistant(planted(one))]
    return Case("needle", messages, [])


# --- answers --------------------------------------------------------------------------------------


def is_right(case: Case, answer: Message) -> bool:
    """Whether an assistant message, as the OpenAI API returns it, answers a case.

    What the right answer states has to be there; other words around it do no harm, and a model
    that was not trained on these tasks phrases things its own way. A call has to be the right one
    and alone; where none is right, there must be none.
    """
    wanted = case.wanted
    content = answer.get("content") or ""
    calls = [_call(call) for call in answer.get("tool_calls") or ()]
    if calls != [_call(call) for call in wanted.get("tool_calls") or ()]:
        return False
    if wanted.get("tool_calls"):
        return True
    if wanted.get("reasoning") and not (answer.get("reasoning") or "").strip():
        return False
    return all(_states(content, fact) for fact in _facts(case))


def _call(call: Message) -> tuple[str, Any]:
    """Name and arguments of a call; arguments that are not JSON equal nothing that is right."""
    function = call["function"]
    try:
        return function["name"], json.loads(function["arguments"])
    except (TypeError, ValueError):
        return function["name"], function["arguments"]


def _facts(case: Case) -> list[str]:
    """What has to stand in the answer."""
    text = case.wanted["content"].rstrip(".")
    if text.startswith("the secret of"):
        return [text.rsplit(" ", 1)[1]]
    if text.startswith("copy: "):
        return [text.removeprefix("copy: ")]
    if "=" in text:
        return [text.rsplit("=", 1)[1]]
    if text.endswith("is left"):
        return [text.split(" ", 1)[0]]
    for opening in ("the shape is ", "it is at the ", "it is note "):
        if text.startswith(opening):
            return [text.removeprefix(opening)]
    if case.task == "tool result":
        (call,) = case.messages[-3]["tool_calls"]
        return [*_values(call["function"]["arguments"]), *_values(case.messages[-2]["content"])]
    return [text]


def _values(said: str) -> list[str]:
    """The values in a JSON object, or in the plain text that a tool said, where "ok" is none."""
    if not said.startswith("{"):
        return [] if said == "ok" else [said]
    return [str(value) for value in json.loads(said).values()]


def _states(content: str, fact: str) -> bool:
    """Whether `fact` stands in the content as whole words."""
    return re.search(rf"(?<![\w:]){re.escape(fact)}(?![\w:])", content, re.IGNORECASE) is not None
