"""Typed reading of one block of config.json, with every refusal as one sentence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NoReturn


class ConfigError(ValueError):
    """A config that cannot be served as it stands: one sentence with cause and remedy."""


class Block:
    """One dictionary of a config and where it stands, for messages.

    A key whose value is null counts as absent, except for `has`. Readers take alternative
    spellings; the first that is present wins.
    """

    def __init__(self, raw: Any, where: str) -> None:
        if not isinstance(raw, Mapping) and hasattr(raw, "to_dict"):
            raw = raw.to_dict()
        if not isinstance(raw, Mapping):
            raise ConfigError(
                f"{where} needs to be an object; found {type(raw).__name__}; write it as key-value "
                "pairs"
            )
        self._raw = raw
        self.where = where

    def fail(self, name: str, found: Any, remedy: str) -> NoReturn:
        """Raise the sentence for field `name`; `found` None means that it is missing."""
        found_text = "is missing" if found is None else f"is {found!r}"
        raise ConfigError(f"{name} in {self.where} {found_text}; {remedy}")

    def has(self, name: str) -> bool:
        return name in self._raw

    def get(self, *names: str) -> Any:
        return next((self._raw[n] for n in names if self._raw.get(n) is not None), None)

    def block(self, name: str) -> Block:
        return Block(self.get(name), name)

    def require(self, *names: str) -> Any:
        value = self.get(*names)
        if value is None:
            self.fail(" or ".join(names), None, "add it as the original checkpoint has it")
        return value

    def refuse(self, name: str, supported: tuple[Any, ...], reason: str) -> None:
        """Refuse a value of `name` outside `supported`; absent is always allowed."""
        value = self.get(name)
        if value is None or any(value == ok and type(value) is type(ok) for ok in supported):
            return
        expected = f"it must be {supported[0]!r}" if supported else "it must be null"
        self.fail(name, value, f"{expected}: {reason}")

    def whole(self, *names: str, default: int | None = None, minimum: int = 1) -> int:
        """A whole number of at least `minimum`; without a default a missing field is an error."""
        value = self.optional_whole(*names, minimum=minimum)
        if value is not None:
            return value
        return self.require(*names) if default is None else default

    def optional_whole(self, *names: str, minimum: int = 1) -> int | None:
        value = self.get(*names)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            self.fail(self._spelling(names), value, f"use a whole number of at least {minimum}")
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        """A finite number above 0; without a default a missing field is an error."""
        value = self.optional_number(*names)
        if value is None:
            return self.require(*names) if default is None else default
        if value <= 0:
            self.fail(self._spelling(names), value, "use a number above 0")
        return value

    def optional_number(self, *names: str) -> float | None:
        value = self.get(*names)
        if value is None:
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):
            self.fail(self._spelling(names), value, "use a finite number")
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fail(name, value, "use true or false")
        return value

    def optional_ids(self, name: str, count: int, what: str) -> tuple[int, ...] | None:
        """Sorted distinct ids in 0 .. count - 1; an empty list is a statement, null is none."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple):
            self.fail(name, value, "use a list of ids")
        for item in value:
            is_id = isinstance(item, int) and not isinstance(item, bool)
            if not is_id or not 0 <= item < count:
                self.fail(name, value, f"list only ids of the {count} {what}, 0 to {count - 1}")
        return tuple(sorted(set(value)))

    def optional_kinds(
        self, name: str, count: int, kinds: Mapping[str, bool]
    ) -> tuple[int, ...] | None:
        """Indices whose kind maps to True, from a list of one kind per layer."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or len(value) != count:
            self.fail(name, value, f"use a list of {count} entries, one per layer")
        for item in value:
            if item not in kinds:
                self.fail(name, item, f"use {' or '.join(kinds)}")
        return tuple(i for i, item in enumerate(value) if kinds[item])

    def _spelling(self, names: tuple[str, ...]) -> str:
        return next(n for n in names if self._raw.get(n) is not None)
