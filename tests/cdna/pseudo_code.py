"""AMD's own pseudo-code for single instructions, evaluated: what the executor is held to.

The text is that of the public CDNA documents, as tables that the package tinygrad carries. It is
translated statement by statement into Python on unbounded integers and numpy's floats; nothing here
knows the executor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
from tinygrad.runtime.autogen.amd.cdna.str_pcode import PCODE

FLOATS = {"f16": np.float16, "f32": np.float32, "f64": np.float64}
_UNSIGNED = {16: np.uint16, 32: np.uint32, 64: np.uint64}


@cache
def text_of(name: str) -> str | None:
    """The pseudo-code of an instruction by its name in assembly, None where there is none."""
    for suffix in ("", "_e32", "_e64"):
        for key, text in PCODE.items():
            if key.name.lower() == name + suffix:
                return str(text)
    return None


def as_bits(value: Any, width: int) -> int:
    """A number as the bits of a register of `width`."""
    if isinstance(value, np.floating):
        return int(np.asarray(value).view(_UNSIGNED[8 * value.itemsize]))
    return int(value) & (1 << width) - 1


def typed(bits: int, kind: str) -> Any:
    """The low bits of a register as a number of a type such as u32, i24 or f16."""
    letter, width = kind[0], int(kind[1:])
    if kind == "bf16":
        return np.array((bits & 0xFFFF) << 16, np.uint32).view(np.float32)[()]
    bits &= (1 << width) - 1
    if letter == "f":
        return np.array(bits, _UNSIGNED[width]).view(FLOATS[kind])[()]
    return bits - (1 << width) if letter == "i" and bits >> (width - 1) else bits


class Cell:
    """A register or variable: bits that are read and written through types and bit ranges."""

    def __init__(self, bits: int = 0, width: int = 64) -> None:
        self.bits, self.width = as_bits(bits, width), width

    def get(self, path: list[Any]) -> Any:
        """Apply types (text) and ranges (pairs) in order: the number, as an integer without one."""
        value: Any = self.bits
        for step in path:
            if step == "IEEE":  # a mode whose only concern are signalling NaNs
                value = 0
            elif isinstance(step, str):
                value = typed(as_bits(value, 128), step)
            else:
                high, low = step
                value = as_bits(value, 128)
                if high < low:  # the other way round: reversed
                    value = int(
                        f"{value >> high & (1 << low - high + 1) - 1:0{low - high + 1}b}"[::-1], 2
                    )
                else:
                    value = value >> low & (1 << high - low + 1) - 1
        return value

    def put(self, path: list[Any], value: Any) -> None:
        """Write a number; a range leaves the other bits, a type alone replaces everything."""
        ranges = [step for step in path if not isinstance(step, str)]
        kinds = [step for step in path if isinstance(step, str)]
        width = int(re.sub(r"\D", "", kinds[-1])) if kinds else self.width
        if kinds and kinds[-1] in FLOATS and not isinstance(value, np.floating):
            value = FLOATS[kinds[-1]](value)
        if kinds and kinds[-1] in FLOATS:
            value = FLOATS[kinds[-1]](value)
        if kinds and kinds[-1] == "bf16" and isinstance(value, np.floating):
            value = f32_to_bf16(value)
        if not ranges:
            self.bits = as_bits(value, width)
            return
        high, low = ranges[0]
        mask = (1 << high - low + 1) - 1 << low
        self.bits = self.bits & ~mask | as_bits(value, 128) << low & mask


class MemoryCell(Cell):
    """Memory as a register whose first range is an address."""

    def __init__(self, content: bytearray) -> None:
        super().__init__(0, 128)
        self.content = content

    def get(self, path: list[Any]) -> Any:
        at = path[0][0]
        found = int.from_bytes(self.content[at : at + 16], "little")
        return Cell(found, 128).get(path[1:])

    def put(self, path: list[Any], value: Any) -> None:
        at, width = path[0][0], int(re.sub(r"\D", "", path[1])) // 8
        self.content[at : at + width] = as_bits(value, 8 * width).to_bytes(width, "little")


def f32_to_bf16(x: Any) -> int:
    """Nearest even, by rational arithmetic's neighbour: the bits that torch would give."""
    import torch

    return int(torch.tensor([float(x)]).bfloat16().view(torch.int16)[0]) & 0xFFFF


def _fma(a: Any, b: Any, c: Any) -> Any:
    kind = type(a)
    if not all(np.isfinite(v) for v in (a, b, c)):
        return kind(np.float64(a) * np.float64(b) + np.float64(c))
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    if exact == 0:
        return kind(np.float64(a) * np.float64(b) + np.float64(c))
    near = kind(float(exact))  # twice rounded: one of its neighbours may be nearer
    options = [near, np.nextafter(near, kind(np.inf)), np.nextafter(near, kind(-np.inf))]
    finite = [v for v in options if np.isfinite(v)]
    if len(finite) < 3:
        return near
    even = lambda v: as_bits(v, 64) & 1  # noqa: E731
    return min(finite, key=lambda v: (abs(Fraction(float(v)) - exact), even(v)))


def _integer(x: Any, low: int, high: int) -> int:
    return 0 if np.isnan(x) else int(max(low, min(high, float(np.trunc(np.float64(x))))))


def _exponent(x: Any) -> int:
    return as_bits(x, 32) >> 23 & 255


def _extreme(pick: Callable[..., Any], propagate: bool) -> Callable[..., Any]:
    def choose(*values: Any) -> Any:
        numbers = [v for v in values if not np.isnan(v)]
        if propagate and len(numbers) < len(values):
            return np.float32(np.nan)
        # -0 is below +0.
        return pick(numbers, key=lambda v: (v, not np.signbit(v))) if numbers else values[0]

    return choose


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "fma": _fma, "isNAN": np.isnan, "abs": np.abs, "trunc": np.trunc, "floor": np.floor,
    "sqrt": lambda x: type(x)(math.sqrt(x)) if x >= 0 else type(x)(np.nan),
    "log2": np.log2, "pow": lambda a, b: np.float32(np.float64(a) ** np.float64(b)),
    "exponent": _exponent, "sign": lambda x: int(np.signbit(x)),
    "ldexp": lambda x, n: type(x)(np.ldexp(np.float64(x), int(n))),
    "isEven": lambda x: float(x) % 2 == 0, "fract": lambda x: x - np.floor(x),
    "isSignalNAN": lambda x: False, "cvtToQuietNAN": lambda x: x, "signext": lambda x: x,
    "signext_from_bit": lambda x, n: 0 if n == 0 else typed(x, f"i{n}"),
    "u32_to_f32": np.float32, "i32_to_f32": np.float32, "f16_to_f32": np.float32,
    "f32_to_f16": np.float16, "f32_to_bf16": f32_to_bf16,
    "f32_to_i32": lambda x: _integer(x, -(1 << 31), (1 << 31) - 1),
    "f32_to_u32": lambda x: _integer(x, 0, (1 << 32) - 1),
    "v_max_f32": _extreme(max, False), "v_min_f32": _extreme(min, False),
    "v_max3_f32": _extreme(max, False), "v_min3_f32": _extreme(min, False),
    "v_maximum_f32": _extreme(max, True), "v_minimum_f32": _extreme(min, True),
    **{f"v_{n}{m}_{k}": f for n, f in (("max", max), ("min", min)) for m in ("", "3")
       for k in ("i32", "u32")},
    "s_ff1_i32_b64": lambda x: (x & -x).bit_length() - 1,
}  # fmt: skip

_TOKEN = re.compile(r"""\s*(?:
    (?P<cast>\d+'[UIFB])\(
  | (?P<number>0x[0-9a-fA-F]+(?:ULL|LL|U)?|\d+'\d+[UIB]?|\d+\.\d+F?|\d+(?:ULL|LL|U)?)
  | (?P<name>[A-Za-z_]\w*)
  | (?P<sign><<=|>>=|\*\*|<<|>>|<>|<=|>=|==|!=|&&|\|\||\+=|-=|\|=|&=|[-+*/%&|^~!?:<>=()\[\]{},.])
)""", re.VERBOSE)  # fmt: skip


def tokens(line: str) -> list[tuple[str, str]]:
    """(kind, text) of an expression or assignment. Raises ValueError for what is neither."""
    found, place = [], 0
    line = line.rstrip()
    while place < len(line):
        match = _TOKEN.match(line, place)
        if match is None:
            raise ValueError(f"pseudo-code {line[place:]!r} is not understood")
        kind = match.lastgroup or ""
        found.append((kind, match[kind]))
        place = match.end()
    return found


_LEVELS = [["||"], ["&&"], ["|"], ["^"], ["&"], ["==", "!=", "<>"], ["<", ">", "<=", ">="],
           ["<<", ">>"], ["+", "-"], ["*", "/", "%"]]  # fmt: skip


def _divide(a: Any, b: Any) -> Any:
    return type(a)(np.float64(a) / np.float64(b))


_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "||": lambda a, b: a or b, "&&": lambda a, b: a and b, "|": lambda a, b: a | b,
    "^": lambda a, b: a ^ b, "&": lambda a, b: a & b, "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b, "<>": lambda a, b: a < b or a > b, "<": lambda a, b: a < b,
    ">": lambda a, b: a > b, "<=": lambda a, b: a <= b, ">=": lambda a, b: a >= b,
    "<<": lambda a, b: a << b, ">>": lambda a, b: a >> b, "+": lambda a, b: a + b,
    "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": _divide,
}  # fmt: skip


class Reader:
    """A recursive-descent evaluator over the tokens of one statement."""

    def __init__(self, parts: list[tuple[str, str]], state: dict[str, Cell]) -> None:
        self.parts, self.at, self.state = parts, 0, state

    def peek(self) -> str:
        return self.parts[self.at][1] if self.at < len(self.parts) else ""

    def take(self, expected: str = "") -> str:
        found = self.peek()
        if expected and found != expected:
            raise ValueError(f"pseudo-code has {found!r} where {expected!r} belongs")
        self.at += 1
        return found

    def expression(self) -> Any:
        value = self.binary(0)
        if self.peek() == "?":
            self.take()
            first = self.expression()
            self.take(":")
            second = self.expression()
            return first if value else second
        return value

    def binary(self, level: int) -> Any:
        if level == len(_LEVELS):
            return self.power()
        value = self.binary(level + 1)
        while self.peek() in _LEVELS[level]:
            sign = self.take()
            value = _BINARY[sign](value, self.binary(level + 1))
        return value

    def power(self) -> Any:
        value = self.unary()
        if self.peek() == "**":
            self.take()
            exponent = self.unary()
            value = type(value)(np.ldexp(1.0, int(max(-2000, min(2000, exponent)))).item()) if (
                isinstance(value, np.float64)) else np.float64(2.0) ** int(exponent)  # fmt: skip
        return value

    def unary(self) -> Any:
        if self.peek() in ("-", "~", "!", "+"):
            sign = self.take()
            value = self.unary()
            if sign == "+":
                return value
            return -value if sign == "-" else ~value if sign == "~" else not value
        return self.primary()

    def primary(self) -> Any:
        kind, text = self.parts[self.at]
        self.at += 1
        if kind == "number":
            return _number(text)
        if kind == "cast":
            return self.cast(text)
        if text == "(":
            value = self.expression()
            self.take(")")
            return self.suffixed(value)
        if text == "{":
            return self.joined()
        if kind == "name" and self.peek() == "(" and text not in self.state:
            return self.suffixed(self.call(text))
        if kind == "name":
            if text == "NAN":
                self.take("."), self.take()
                return np.float32(np.nan)
            cell = self.state.setdefault(text, Cell())
            path = self.path()
            return cell.get(path) if path else getattr(cell, "number", cell.bits)
        raise ValueError(f"pseudo-code {text!r} is not understood")

    def cast(self, text: str) -> Any:
        width, _, kind = text.partition("'")
        value = self.expression()
        self.take(")")
        if kind == "F":
            if isinstance(value, np.floating):
                return FLOATS[f"f{width}"](value)
            return typed(value, f"f{width}") if width == "32" else np.float64(value)
        bits = as_bits(int(value), int(width))
        return typed(bits, f"i{width}") if kind == "I" else bits

    def call(self, name: str) -> Any:
        self.take("(")
        values = [self.expression()]
        while self.peek() == ",":
            self.take()
            values.append(self.expression())
        self.take(")")
        if name not in FUNCTIONS:
            raise ValueError(f"function {name} of the pseudo-code is not known")
        return FUNCTIONS[name](*values)

    def joined(self) -> int:
        """{ high, low }: widths come from the types."""
        total = 0
        while True:
            start = self.at
            value = self.expression()
            text = "".join(part for _, part in self.parts[start : self.at])
            written = re.match(r"(\d+)'", text) or re.search(r"[a-z]+(\d+)$", text)
            assert written is not None, text
            total = total << int(written[1]) | as_bits(value, int(written[1]))
            if self.take() == "}":
                return total

    def suffixed(self, value: Any) -> Any:
        path = self.path()
        return Cell(as_bits(value, 128), 128).get(path) if path else value

    def path(self) -> list[Any]:
        steps: list[Any] = []
        while self.peek() in (".", "["):
            if self.take() == ".":
                steps.append(self.take())
                continue
            high = self.expression()
            low = high
            if self.peek() == ":":
                self.take()
                low = self.expression()
            self.take("]")
            steps.append((int(high), int(low)))
        return steps

    def assign(self) -> None:
        if self.peek() == "{":
            return self.assign_pair()
        name = self.take()
        path = self.path()
        sign = self.take()
        value = self.expression()
        cell = self.state.setdefault(name, Cell())
        if sign != "=":
            before = cell.get(path) if path else getattr(cell, "number", cell.bits)
            value = _BINARY[sign[0]](before, value)
        cell.put(path, value)
        if not path:  # a variable keeps its number, so that a negative one stays negative
            cell.number = value  # type: ignore[attr-defined]
        elif hasattr(cell, "number"):
            del cell.number
        return None

    def assign_pair(self) -> None:
        """{ D1.u1, D0.u64 } = value"""
        self.take("{")
        targets = []
        while True:
            name, path = self.take(), self.path()
            targets.append((name, path))
            if self.take() == "}":
                break
        self.take("=")
        value = self.expression()
        for name, path in reversed(targets):
            width = int(path[0][1:])
            self.state.setdefault(name, Cell()).put(path, value & (1 << width) - 1)
            value >>= width


def _number(text: str) -> Any:
    if "'" in text:
        return int(re.sub(r"[UIB]$", "", text.partition("'")[2]))
    if "." in text:
        return np.float32(text[:-1]) if text.endswith("F") else np.float64(text)
    return int(re.sub(r"(ULL|LL|U)$", "", text), 0)


class _Break(Exception):
    pass


def evaluate(text: str, state: dict[str, Cell]) -> None:
    """Run pseudo-code on registers by name (S0, S1, S2, D0, D1, VCC, SCC, EXEC, laneId, ...)."""
    lines = [re.sub(r"//.*", "", line).strip().rstrip(";").strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("declare")]
    with np.errstate(all="ignore"):
        _run(lines, 0, state, True)


def _value(text: str, state: dict[str, Cell]) -> Any:
    return Reader(tokens(text), state).expression()


def _run(lines: list[str], at: int, state: dict[str, Cell], active: bool) -> int:
    """Statements from `at` to the end of their block; returns where that is."""
    while at < len(lines):
        line = lines[at]
        if line in ("endif", "endfor", "else") or line.startswith("elsif"):
            return at
        at += 1
        if line.startswith("if "):
            at = _conditional(lines, at - 1, state, active)
        elif line.startswith("for "):
            found = re.fullmatch(r"for (\w+) in (.+?) : (.+?) do", line)
            assert found is not None, line
            end = _run(lines, at, state, False)
            if active:
                for count in range(_value(found[2], state), _value(found[3], state) + 1):
                    state[found[1]] = Cell(count)
                    try:
                        _run(lines, at, state, True)
                    except _Break:
                        break
            at = end + 1
        elif line == "break":
            if active:
                raise _Break
        elif active:
            Reader(tokens(line), state).assign()
    return at


def _conditional(lines: list[str], at: int, state: dict[str, Cell], active: bool) -> int:
    done = False
    while True:
        line = lines[at]
        if line == "endif":
            return at + 1
        found = re.fullmatch(r"(?:if|elsif) (.+) then", line)
        chosen = active and not done and (found is None or bool(_value(found[1], state)))
        done = done or chosen
        at = _run(lines, at + 1, state, chosen)
