"""AMDGPU assembly text as instructions with parsed operands, and the directives that matter."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

VCC, M0, EXEC = 106, 124, 126
ACCUMULATORS = 256  # AGPR n is row 256 + n of the vector file
_NAMED = {"vcc": (VCC, 2), "vcc_lo": (VCC, 1), "vcc_hi": (VCC + 1, 1), "m0": (M0, 1),
          "exec": (EXEC, 2), "exec_lo": (EXEC, 1), "exec_hi": (EXEC + 1, 1)}  # fmt: skip
_SUFFIX = re.compile(r"_(e32|e64|dpp|sdwa|e64_dpp)$")
_INSTRUCTION = re.compile(r"(s|v|ds|buffer|global|flat|scratch)_\w+$")
_REGISTER = re.compile(r"([sva])(?:(\d+)|\[(\d+):(\d+)\])$")


class CodeError(Exception):
    """The code, or what it does, is wrong or beyond this executor; one sentence."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A register range, a constant or a name, with its source modifiers.

    kind: "s" or "v" (first register in `index`), "int", "float", "name" (text in `name`).
    """

    kind: str
    index: int = 0
    count: int = 1
    value: float = 0
    name: str = ""
    negate: bool = False
    absolute: bool = False
    sext: bool = False


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line: `name` without the encoding's suffix, `text` for messages."""

    name: str
    operands: tuple[Operand, ...]
    modifiers: dict[str, str]
    encoding: str
    text: str
    line: int

    def number(self, name: str) -> int:
        """A numeric modifier, 0 where it is absent."""
        return int(self.modifiers.get(name, "0"), 0)

    def bits(self, name: str, default: int, count: int) -> list[int]:
        """A modifier that lists bits, such as op_sel:[0,1]; what it leaves out is `default`."""
        text = self.modifiers.get(name, "").strip("[]")
        found = [int(x) for x in text.split(",")] if text else []
        return [*found, *[default] * (count - len(found))]


@dataclass
class Program:
    """A kernel: instructions, where labels point, what the metadata says."""

    instructions: list[Instruction]
    labels: dict[str, int]
    directives: dict[str, int]
    arguments: list[tuple[int, int, str]] = field(default_factory=list)  # offset, bytes, kind
    kernarg_bytes: int = 0
    target: str = ""  # the chip, where the text names one


def operand(text: str) -> Operand:
    """One operand. Raises CodeError where the text is none."""
    text = text.strip()
    if text.startswith("-") and not re.fullmatch(r"-[\d.].*", text):
        return replace(operand(text[1:]), negate=True)
    for opening, closing, mark in (("|", "|", "absolute"), ("abs(", ")", "absolute"),
                                   ("neg(", ")", "negate"), ("sext(", ")", "sext")):  # fmt: skip
        if text.startswith(opening) and text.endswith(closing):
            marks: dict[str, Any] = {mark: True}
            return replace(operand(text[len(opening) : -1]), **marks)
    if text in _NAMED:
        index, count = _NAMED[text]
        return Operand("s", index, count)
    found = _REGISTER.match(text)
    if found:
        low = int(found[2] if found[2] is not None else found[3])
        high = low if found[4] is None else int(found[4])
        base = ACCUMULATORS if found[1] == "a" else 0
        return Operand("s" if found[1] == "s" else "v", base + low, high - low + 1)
    if re.fullmatch(r"-?(0x[0-9a-f]+|\d+)", text):
        return Operand("int", value=int(text, 0))
    if re.fullmatch(r"-?\d*\.\d+(e[+-]?\d+)?", text):
        return Operand("float", value=float(text))
    if re.fullmatch(r"[.\w$()]+(,\s*\d+)*\)?|hwreg\(.*\)", text):
        return Operand("name", name=text)
    raise CodeError(f"operand {text!r} is not understood")


def _split(text: str, separator: str) -> list[str]:
    """Parts between separators that are outside brackets."""
    parts, depth, start = [], 0, 0
    for i, letter in enumerate(text):
        depth += (letter in "([") - (letter in ")]")
        if letter == separator and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [part.strip() for part in [*parts, text[start:]] if part.strip()]


def instruction(text: str, line: int = 0) -> Instruction:
    """One line of code without its comment."""
    name, _, rest = text.strip().partition(" ") if " " in text.strip() else (text.strip(), "", "")
    suffix = _SUFFIX.search(name)
    encoding = suffix[1] if suffix else ""
    base = name[: suffix.start()] if suffix else name
    operands: list[Operand] = []
    modifiers: dict[str, str] = {}
    if base == "s_waitcnt":
        for count in re.finditer(r"(\w+)\((\d+)\)", rest):
            modifiers[count[1]] = count[2]
        if not modifiers:
            raise CodeError(f"line {line}: {text.strip()!r} names no counter")
    else:
        for part in _split(rest, ","):
            words = _split(part, " ")
            # The assembler prints negations and factors with spaces only inside brackets.
            if not _is_modifier(words[0]):
                operands.append(operand(words[0]))
                words = words[1:]
            for word in words:
                key, _, value = word.partition(":")
                modifiers[key] = value or "1"
    return Instruction(base, tuple(operands), modifiers, encoding, text.strip(), line)


_FLAGS = {"offen", "idxen", "sc0", "sc1", "nt", "lds", "clamp", "gds"}


def _is_modifier(word: str) -> bool:
    return (":" in word and "[" not in word.partition(":")[0]) or word in _FLAGS


def program(text: str) -> Program:
    """The only kernel of an assembly file as Triton's `asm["amdgcn"]` holds it."""
    if not isinstance(text, str) or text.count(".amdhsa_kernel ") != 1:
        raise CodeError(f"needs assembly of one kernel; found {str(text).count('.amdhsa_kernel ')}")
    target = re.search(r"\.amdgcn_target \"\S*-(gfx\w+)", text)
    found = Program([], {}, {}, target=target[1] if target else "")
    inside = True
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.split(";")[0].split("//")[0].replace("\t", " ").strip()
        if line.startswith(".amdhsa_") and not line.startswith(".amdhsa_kernel"):
            words = line.split()
            if len(words) == 2 and re.fullmatch(r"-?\d+", words[1]):
                found.directives[words[0].removeprefix(".amdhsa_")] = int(words[1])
        if line.startswith(".section"):
            inside = ".text" in line
        elif line.startswith(".text"):
            inside = True
        label = re.match(r"([.\w$]+):$", line)
        if not line or not inside:
            continue
        if label:
            found.labels[label[1]] = len(found.instructions)
        elif _INSTRUCTION.match(line.split(" ")[0]):
            found.instructions.append(instruction(line, number))
        elif not line.startswith("."):
            raise CodeError(f"line {number}: {line!r} is not understood")
    _metadata(text, found)
    return found


def _metadata(text: str, into: Program) -> None:
    """Argument layout: the metadata's YAML, whose shape is fixed enough to be read by lines."""
    _, found, notes = text.partition(".amdgpu_metadata")
    if not found:
        return
    notes = notes.partition(".end_amdgpu_metadata")[0]
    size = re.search(r"\.kernarg_segment_size:\s*(\d+)", notes)
    into.kernarg_bytes = int(size[1]) if size else 0
    listed = notes.partition(".args:")[2].partition("\n    .group_segment")[0]
    pieces = re.split(r"\n\s+- ", listed)
    for piece in pieces[1:]:
        entry = dict(re.findall(r"\.(\w+):\s*(\w+)", piece))
        into.arguments.append((int(entry["offset"]), int(entry["size"]), entry["value_kind"]))
