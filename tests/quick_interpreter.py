"""Make Triton's interpreter patch its language once per launch, not once per helper call.

The interpreter replaces the functions of `triton.language` whenever a jitted function is entered,
nested calls included, although the launch has already done so; that is most of the time of a kernel
made of small helpers. `install()` skips the repetitions and changes no arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_scopes: dict[frozenset[int], Any] = {}


class _Scope:
    """The outermost patch: undoing it undoes the nested ones, and the next launch patches again."""

    def restore(self) -> None:
        for scope in reversed(_scopes.values()):
            scope.restore()
        _scopes.clear()


class _Nothing:
    def restore(self) -> None:
        pass


def install() -> None:
    """Idempotent. Does nothing where the interpreter has no such function."""
    import triton.language as tl
    from triton.runtime import interpreter

    original: Callable[..., Any] | None = getattr(interpreter, "_patch_lang", None)
    if original is None or getattr(original, "patches_once", False):
        return

    def patch(fn: Any) -> Any:
        languages = frozenset(id(v) for v in fn.__globals__.values() if v is tl or v is tl.core)
        if languages in _scopes:
            return _Nothing()
        outermost = not _scopes
        _scopes[languages] = original(fn)
        return _Scope() if outermost else _Nothing()

    patch.patches_once = True  # type: ignore[attr-defined]
    interpreter._patch_lang = patch
