"""What one vLLM offers: definitions, signatures and members, read from a wheel or a folder."""

from __future__ import annotations

import ast
import re
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from .syntax import Function, decorators, flattened, signature


@lru_cache(maxsize=1024)
def _parse(text: str) -> ast.Module:
    """Versions share many files, and the tests read one version many times."""
    return ast.parse(text)


class Source:
    """Python files below `vllm/` of a wheel or of an unpacked folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._zip = zipfile.ZipFile(path) if path.is_file() else None
        self._folder = path.parent if path.name == "vllm" else path
        self._parsed: dict[str, ast.Module | None] = {}

    def text(self, name: str) -> str | None:
        if self._zip is not None:
            return self._zip.read(name).decode() if name in self._names else None
        file = self._folder / name
        return file.read_text() if file.is_file() else None

    @cached_property
    def _names(self) -> set[str]:
        return set(self._zip.namelist()) if self._zip is not None else set()

    @cached_property
    def version(self) -> str:
        """Public version, without the local part (`+cpu`)."""
        if self._zip is not None:
            metadata = [n for n in self._names if re.fullmatch(r"vllm[^/]*dist-info/METADATA", n)]
            texts = [self._zip.read(n).decode() for n in metadata]
        else:
            texts = [f.read_text() for f in self._folder.glob("vllm*.dist-info/METADATA")]
        found = {re.findall(r"(?m)^Version: ([0-9.]+)", text)[0] for text in texts}
        if not found:
            text = self.text("vllm/_version.py") or ""
            found = set(re.findall(r"__version__ = version = '([0-9.]+)'", text))
        if len(found) != 1:
            raise SystemExit(f"{self.path} needs one vLLM version; found {sorted(found) or 'none'}")
        return found.pop().rstrip(".")

    def module(self, dotted: str) -> ast.Module | None:
        if dotted not in self._parsed:
            name = dotted.replace(".", "/")
            text = self.text(f"{name}.py")
            if text is None:
                text = self.text(f"{name}/__init__.py")
            self._parsed[dotted] = None if text is None else _parse(text)
        return self._parsed[dotted]

    def is_package(self, dotted: str) -> bool:
        return self.text(f"{dotted.replace('.', '/')}/__init__.py") is not None


@dataclass(frozen=True)
class Definition:
    """Where a name is defined; node None is a module, a pass statement lies outside vLLM."""

    module: str
    name: str
    node: ast.stmt | None


class Surface:
    """Facts about names of one vLLM."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._bindings: dict[str, dict[str, ast.stmt]] = {}

    def _bound(self, module: str) -> dict[str, ast.stmt]:
        """Top-level names of a module; `*` imports under `*<module>`."""
        if module in self._bindings:
            return self._bindings[module]
        found: dict[str, ast.stmt] = {}
        tree = self.source.module(module)
        for node in flattened(tree.body if tree else []):
            if isinstance(node, ast.ImportFrom):
                target = self._absolute(module, node)
                found.update(
                    {(f"*{target}" if a.name == "*" else a.asname or a.name): node
                     for a in node.names}
                )  # fmt: skip
            elif isinstance(node, ast.ClassDef | Function) and "overload" not in decorators(node):
                found[node.name] = node
            elif isinstance(node, ast.Assign):
                found.update({t.id: node for t in node.targets if isinstance(t, ast.Name)})
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found[node.target.id] = node
        self._bindings[module] = found
        return found

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        drop = node.level - (1 if self.source.is_package(module) else 0)
        base = parts[: len(parts) - drop]
        return ".".join([*base, *([node.module] if node.module else [])])

    def find(self, module: str, name: str) -> Definition | None:
        """The definition of module.name, through re-exports, lazy tables and submodules."""
        if module.split(".")[0] != "vllm":
            return Definition(module, name, ast.Pass())
        bound = self._bound(module)
        node = bound.get(name)
        if isinstance(node, ast.ImportFrom):
            alias = next(a for a in node.names if (a.asname or a.name) == name)
            return self.find(self._absolute(module, node), alias.name)
        if node is not None:
            return Definition(module, name, node)
        if self.source.module(f"{module}.{name}") is not None:
            return Definition(f"{module}.{name}", "", None)
        for other in bound:
            if other.startswith("*") and (found := self.find(other[1:], name)):
                return found
        return self._lazy(module, name)

    def _lazy(self, module: str, name: str) -> Definition | None:
        """Names served by a module's __getattr__ from a table `{"LLM": ".entrypoints.llm:LLM"}`."""
        if "__getattr__" not in self._bound(module):
            return None
        for node in self._bound(module).values():
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
                for key, value in zip(node.value.keys, node.value.values, strict=True):
                    pair = (getattr(key, "value", None), getattr(value, "value", None))
                    if pair[0] == name and isinstance(pair[1], str) and ":" in pair[1]:
                        target, attribute = pair[1].split(":")
                        prefix = module if target.startswith(".") else ""
                        return self.find(prefix + target, attribute)
        return None

    def _mro(self, at: Definition) -> list[Definition]:
        """The class and its bases inside vLLM, depth first, each once."""
        if not isinstance(at.node, ast.ClassDef):
            return []
        found = [at]
        for base in at.node.bases:
            expression = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(expression, ast.Name):
                target = self.find(at.module, expression.id)
                if target is not None:
                    found += [d for d in self._mro(target) if d not in found]
        return found

    def _fields(self, node: ast.ClassDef) -> dict[str, str]:
        """Fields of a dataclass body that its constructor takes: name -> "" or "=" (default)."""
        fields = {}
        for item in flattened(node.body):
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                excluded = "ClassVar" in ast.unparse(item.annotation) or (
                    item.value is not None and "init=False" in ast.unparse(item.value)
                )
                if not excluded:
                    fields[item.target.id] = "=" if item.value is not None else ""
        return fields

    def _constructor(self, mro: list[Definition]) -> str:
        for i, at in enumerate(mro):
            assert isinstance(at.node, ast.ClassDef)
            for item in flattened(at.node.body):
                if isinstance(item, Function) and item.name == "__init__":
                    return signature(item, bound=True)
            if decorators(at.node) & {"dataclass", "config"}:
                fields: dict[str, str] = {}
                for base in reversed(mro[i:]):
                    assert isinstance(base.node, ast.ClassDef)
                    if decorators(base.node) & {"dataclass", "config"}:
                        fields |= self._fields(base.node)
                return f"({', '.join(name + mark for name, mark in fields.items())})"
        return "()"

    def _member(self, mro: list[Definition], name: str) -> str | None:
        """A method's signature, or "property", "field" (class body), "attribute" (set on self)."""
        for at in mro:
            assert isinstance(at.node, ast.ClassDef)
            for item in flattened(at.node.body):
                if isinstance(item, Function) and item.name == name:
                    if decorators(item) & {"property", "cached_property"}:
                        return "property"
                    if "overload" not in decorators(item):
                        return signature(item, bound=True)
                targets = item.targets if isinstance(item, ast.Assign) else [
                    getattr(item, "target", None)]  # fmt: skip
                if any(isinstance(t, ast.Name) and t.id == name for t in targets):
                    return "field"
            for inner in ast.walk(at.node):
                if (
                    isinstance(inner, ast.Attribute) and inner.attr == name
                    and isinstance(inner.ctx, ast.Store)
                    and isinstance(inner.value, ast.Name) and inner.value.id == "self"
                ):  # fmt: skip
                    return "attribute"
        return None

    def _only_by_name(self, mro: list[Definition], name: str) -> bool:
        """Whether a method is called, and always with keywords, in the files of its class.

        A private method that is may be overridden with keywords alone.
        """
        calls = [
            node
            for module in {at.module for at in mro}
            for node in ast.walk(self.source.module(module) or ast.Module([], []))
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == name
        ]
        return bool(calls) and not any(call.args for call in calls)

    def _abstract(self, mro: list[Definition]) -> list[str]:
        seen: dict[str, bool] = {}
        for at in mro:
            assert isinstance(at.node, ast.ClassDef)
            for item in flattened(at.node.body):
                if isinstance(item, Function):
                    seen.setdefault(item.name, "abstractmethod" in decorators(item))
        return sorted(name for name, abstract in seen.items() if abstract)

    def fact(self, key: str, members: Iterable[str], subclassed: bool) -> dict[str, Any] | None:
        """Facts of "module:name", or None where this vLLM has no such name."""
        module, name = key.split(":")
        at = self.find(module, name)
        if at is None:
            return None
        found: dict[str, Any] = {}
        if at.module != module:
            found["at"] = f"{at.module}:{at.name}".rstrip(":")
        mro = self._mro(at)
        if isinstance(at.node, ast.ClassDef):
            found |= {"kind": "class", "params": self._constructor(mro)}
            found["members"] = {m: self._member(mro, m) for m in members}
            if subclassed:
                found["abstract"] = self._abstract(mro)
                for member, text in found["members"].items():
                    private = member.startswith("_") and not member.startswith("__")
                    if text and text[0] == "(" and private and self._only_by_name(mro, member):
                        found["members"][member] = f"{text} by name"
        elif isinstance(at.node, Function):
            found |= {"kind": "function", "params": signature(at.node, bound=False)}
        else:
            found["kind"] = "module" if at.node is None else "value"
        return found
