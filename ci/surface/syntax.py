"""Helpers on Python syntax trees that both sides share.

A signature is text: `(a, b=, *, c, **d)` as called on an instance or class; `=` marks a default.
A method that its callers only call with keywords has " by name" after it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

Function = ast.FunctionDef | ast.AsyncFunctionDef


def flattened(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a body and of the if, try and with blocks inside it."""
    for statement in body:
        yield statement
        for part in ("body", "orelse", "finalbody"):
            if isinstance(statement, ast.If | ast.Try | ast.With):
                yield from flattened(getattr(statement, part, []))
        for handler in getattr(statement, "handlers", []):
            yield from flattened(handler.body)


def decorators(node: Function | ast.ClassDef) -> set[str]:
    """Last names of the decorators: `functools.cached_property` is `cached_property`."""
    calls = (d.func if isinstance(d, ast.Call) else d for d in node.decorator_list)
    return {ast.unparse(d).rsplit(".", 1)[-1] for d in calls}


def signature(node: Function, bound: bool) -> str:
    """Parameters as text; `bound` leaves out self or cls."""
    args = node.args
    ordered = [*args.posonlyargs, *args.args]
    first_default = len(ordered) - len(args.defaults)
    parts = [a.arg + ("=" if i >= first_default else "") for i, a in enumerate(ordered)]
    if args.posonlyargs:
        parts.insert(len(args.posonlyargs), "/")
    if bound and "staticmethod" not in decorators(node):
        parts = parts[1:]
    if args.vararg:
        parts.append("*" + args.vararg.arg)
    elif args.kwonlyargs:
        parts.append("*")
    parts += [
        a.arg + ("=" if default is not None else "")
        for a, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    if args.kwarg:
        parts.append("**" + args.kwarg.arg)
    return f"({', '.join(parts)})"
