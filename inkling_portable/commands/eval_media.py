"""Pictures of one shape and clips of one note, drawn from a seed, and questions about them.

They go over the wire as any OpenAI client sends them: a PNG or a WAV file in the message.
"""

from __future__ import annotations

import base64
import io
import math
import random
import wave
import zlib
from typing import Any

from inkling_portable.commands.eval_tasks import Case, Exchange, assistant
from inkling_portable.commands.eval_words import COLOURS, SHAPES

SIDE = 32
"""Pixels along a side of a picture."""
RATE = 16_000
SECONDS = 0.4

PAINTS = {
    "red": (215, 35, 35),
    "green": (40, 160, 60),
    "blue": (40, 70, 215),
    "yellow": (240, 215, 40),
    "white": (250, 250, 250),
    "black": (15, 15, 15),
    "pink": (245, 140, 190),
    "grey": (128, 128, 128),
}
GROUNDS = ((225, 205, 165), (95, 60, 30), (25, 60, 70))
"""Beige, brown and dark cyan: none is near a paint."""
PLACES = {
    "top left": (0.27, 0.27),
    "top right": (0.73, 0.27),
    "middle": (0.5, 0.5),
    "bottom left": (0.27, 0.73),
    "bottom right": (0.73, 0.73),
}
"""Where the middle of a shape is, as shares of the width and the height."""


def picture(rng: random.Random, colour: str, place: str, shape: str) -> bytes:
    """A PNG of one shape on a plain ground, with noise."""
    import numpy as np
    from PIL import Image

    noise = np.random.default_rng(rng.getrandbits(32))
    rows, columns = np.mgrid[0:SIDE, 0:SIDE].astype(np.float32)
    x, y = (share * SIDE + rng.uniform(-1.5, 1.5) - 0.5 for share in PLACES[place])
    radius = rng.uniform(4.5, 6.5)
    across, down = columns - x, rows - y
    if shape == "circle":
        inside = across**2 + down**2 <= radius**2
    elif shape == "square":
        inside = np.maximum(abs(across), abs(down)) <= radius * 0.85
    elif shape == "triangle":
        inside = (down <= radius * 0.8) & (abs(across) * 2 <= down + radius)
    else:
        bar = radius * 0.35
        inside = (np.minimum(abs(across), abs(down)) <= bar) & (
            np.maximum(abs(across), abs(down)) <= radius
        )
    shift = [rng.randint(-12, 12) for _ in range(3)]
    ground = np.array(rng.choice(GROUNDS), dtype=np.float32)
    paint = np.array(PAINTS[colour], dtype=np.float32)
    pixels = np.where(inside[..., None], paint, ground) + np.array(shift, dtype=np.float32)
    pixels += noise.normal(0, 4, pixels.shape)
    out = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(out, format="PNG", compress_level=1)
    return out.getvalue()


def clip(rng: random.Random, pitch: int) -> bytes:
    """A WAV of a tone of pitch class 0 to 11 (0 = C) in one of two octaves, with an overtone."""
    import numpy as np

    hertz = 440 * 2 ** ((pitch - 9 + 12 * rng.choice((1, 2))) / 12) * 2 ** rng.uniform(-0.01, 0.01)
    time = np.arange(int(RATE * SECONDS)) / RATE
    phase, loudness = rng.uniform(0, 2 * math.pi), rng.uniform(0.15, 0.6)
    tone = np.sin(2 * math.pi * hertz * time + phase)
    tone += rng.uniform(0, 0.3) * np.sin(4 * math.pi * hertz * time)
    tone += np.random.default_rng(rng.getrandbits(32)).normal(0, 0.005, time.shape)
    samples = (tone * loudness * 0.7 * 32767).clip(-32767, 32767).astype("<i2")
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(samples.tobytes())
    return out.getvalue()


def image_part(data: bytes) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def audio_part(data: bytes) -> dict[str, Any]:
    encoded = base64.b64encode(data).decode()
    return {"type": "input_audio", "input_audio": {"data": encoded, "format": "wav"}}


def _ask(part: dict[str, Any], text: str) -> dict[str, Any]:
    return {"role": "user", "content": [part, {"type": "text", "text": text}]}


def _draw(rng: random.Random, split: str) -> tuple[bytes, str, str]:
    """A picture whose colour, place and shape together belong to the split, and what is on it."""
    while True:
        colour, place, shape = rng.choice(COLOURS), rng.choice(list(PLACES)), rng.choice(SHAPES)
        held_out = zlib.crc32(f"{colour}|{place}|{shape}".encode()) % 8 == 0
        if held_out == (split == "eval"):
            return picture(rng, colour, place, shape), colour, place


def colour_of(rng: random.Random, split: str) -> Exchange:
    """The colour of the shape on a picture."""
    data, colour, _ = _draw(rng, split)
    asked = _ask(image_part(data), "what colour is the shape?")
    return Exchange("colour", [asked, assistant(f"the shape is {colour}.")])


def place_of(rng: random.Random, split: str) -> Exchange:
    """Where the shape on a picture is."""
    data, _, place = _draw(rng, split)
    asked = _ask(image_part(data), "where is the shape?")
    return Exchange("place", [asked, assistant(f"it is at the {place}.")])


def note_of(rng: random.Random, split: str) -> Exchange:
    """The pitch class of a tone, as a number; noise, tuning and overtones are never the same."""
    pitch = rng.randrange(12)
    asked = _ask(audio_part(clip(rng, pitch)), "what note do you hear?")
    return Exchange("note", [asked, assistant(f"it is note {pitch}.")])


TASKS = {"colour of a shape": colour_of, "place of a shape": place_of, "note of a tone": note_of}
SUITES = {"vision": ("colour of a shape", "place of a shape"), "audio": ("note of a tone",)}
WANTED = 0.95


def case(task: str, index: int, seed: int = 0) -> Case:
    """Question number `index` of a task, the same each time."""
    made = TASKS[task](random.Random(f"{seed}:{task}:{index}"), "eval")
    return Case(task, made.messages, [])
