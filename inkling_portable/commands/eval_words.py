"""The words, tools and phrases that portable-nano knows, and how its tokenizer cuts text.

portable-nano speaks a tiny language: each of these words is one token, with and without a space
before it, and everything else is bytes. The tasks in `eval_tasks.py` use no other words.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PORTABLE_NANO = Path(__file__).parents[1] / "portable_nano"
"""The checkpoint that comes with this package."""

COLOURS = ("red", "green", "blue", "yellow", "white", "black", "pink", "grey")
ADJECTIVES = (*COLOURS, "tiny", "brave", "calm", "lazy", "loud", "shy", "wild", "young",
              "proud", "quick", "clever", "gentle", "happy", "sad", "strong", "round")  # fmt: skip
ANIMALS = ("fox", "cat", "dog", "owl", "bear", "wolf", "deer", "frog", "hawk", "crow", "duck",
           "goat", "lion", "mole", "seal", "swan", "toad", "hare", "lynx", "moth", "crab", "newt",
           "boar", "horse")  # fmt: skip
VALUES = ("lemon", "apple", "bread", "candle", "button", "anchor", "basket", "bell", "book",
          "bottle", "brush", "carpet", "chain", "clock", "coin", "cup", "drum", "feather",
          "flute", "fork", "glass", "glove", "hammer", "hat", "jar", "key", "kite", "knife",
          "ladder", "mirror", "needle", "orange", "paper", "pear", "pencil", "piano", "pillow",
          "plate", "plum", "pot", "ring", "rope", "salt", "scarf", "shell", "shoe", "soap",
          "spoon", "stamp", "sugar", "sword", "tea", "thread", "towel", "violin", "wheel",
          "whistle", "wool")  # fmt: skip
PLACES = ("river", "tree", "hill", "house", "road", "garden", "bridge", "forest", "lake", "town",
          "tower", "field", "cloud", "stone", "island", "valley")  # fmt: skip
STATES = ("old", "long", "cold", "warm", "quiet", "empty", "dark", "bright", "far", "near", "high",
          "green")  # fmt: skip
LINKS = ("beside", "behind", "above", "below", "before", "after")
CITIES = ("paris", "london", "rome", "oslo", "cairo", "lima", "delhi", "tokyo", "berlin", "madrid",
          "quito", "dakar", "seoul", "hanoi", "riga", "bern")  # fmt: skip
PEOPLE = ("anna", "ben", "carla", "dan", "emma", "felix", "greta", "hugo")
DEVICES = ("lamp", "radio", "heater", "fan")
SKIES = ("rain", "snow", "sun", "wind", "fog", "storm")
SHAPES = ("circle", "square", "triangle", "cross")
SIDES = ("top", "bottom", "left", "right", "middle")
GLUE = (
    "the", "secret", "of", "is", "what", "repeat", "copy", "start", "with", "add", "take", "and",
    "tell", "me", "weather", "in", "now", "how", "time", "it", "set", "a", "timer", "for",
    "minutes", "buy", "please", "call", "turn", "on", "off", "i", "have", "no", "tool", "that",
    "are", "you", "who", "hello", "am", "portable", "nano", "small", "test", "model", "degrees",
    "bought", "ready", "busy", "answers", "has", "none", "remember", "answer", "one", "word",
    "be", "short", "think", "do", "not", "know", "there", "was", "many", "colour", "shape",
    "where", "note", "hear", "see", "Thinking", "effort", "level", "to", "number", "ok",
    "stands", "by", "day", "night", "every", "left", "items", "city", "person", "at",
)  # fmt: skip
NAMES = ("tool_declare", "name", "args", "description", "parameters", "properties", "type",
         "function", "object", "string", "integer", "required", "get_weather", "get_time",
         "set_timer", "buy_item", "call_person", "turn_on", "turn_off", "count", "item", "device",
         "sky", "status")  # fmt: skip
MARKS = ('[{"', '":"', '","', '":{"', '":{}', '":["', '"],"', '"]', '":', ',"', '"}},"', '"},"',
         '"}', '"}}', '}}', '{"', '}}},"', '"}}},"', '"},{"', '"}]', '"]},"', '":[],"',
         '"},"required":["')  # fmt: skip
"""Runs of punctuation in canonical JSON, so that a declaration of tools stays short."""

PATTERN = r" ?[A-Za-z_]+|[0-9]| ?[^\sA-Za-z0-9_]+|\s+"
"""How text is cut before lookup: words with the space before them, single digits, runs of marks."""


def pieces() -> list[str]:
    """Every text that is one token beside the 256 bytes, in the order of their ids."""
    words = dict.fromkeys((*ADJECTIVES, *ANIMALS, *VALUES, *PLACES, *STATES, *LINKS, *CITIES,
                           *PEOPLE, *DEVICES, *SKIES, *SHAPES, *SIDES, *GLUE))  # fmt: skip
    # Values of JSON and beginnings of sentences stand without a space before them.
    bare = dict.fromkeys((*VALUES, *CITIES, *PEOPLE, *DEVICES, *SKIES, *COLOURS, *SHAPES, *GLUE,
                          *NAMES))  # fmt: skip
    found = dict.fromkeys([*(f" {word}" for word in words), *bare, *MARKS])
    # One-letter words without a space are bytes already.
    return [piece for piece in found if len(piece) > 1 and re.fullmatch(PATTERN, piece)]


def _tool(name: str, description: str, /, **properties: str) -> dict[str, Any]:
    schema = {key: {"type": kind} for key, kind in properties.items()}
    parameters = {"type": "object", "properties": schema, "required": sorted(properties)}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = {
    tool["function"]["name"]: tool
    for tool in (
        _tool("get_weather", "the weather in a city now", city="string"),
        _tool("get_time", "the time in a city", city="string"),
        _tool("set_timer", "start a timer", minutes="integer"),
        _tool("buy_item", "buy items", count="integer", item="string"),
        _tool("call_person", "call a person", name="string"),
        _tool("turn_on", "turn a device on", device="string"),
        _tool("turn_off", "turn a device off", device="string"),
    )
}
"""The tools of the language, as OpenAI requests carry them, by name."""

SYSTEM_TEXTS = ("you are portable nano.", "be short.", "answer in one word.",
                "you are a small test model.")  # fmt: skip
