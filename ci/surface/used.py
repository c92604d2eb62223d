"""What this package imports, subclasses, reads and calls of vLLM, found in its syntax trees.

A key is "module:name"; a call's key adds ".method".
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from pathlib import Path

from .syntax import Function, decorators, flattened, signature

# Classes of objects that our code holds without importing their class: what a function returns,
# what a module-level object is, and what an attribute of a known class is.
_MOE = "vllm.model_executor.layers.fused_moe"
OBJECTS = {
    "vllm.config:get_current_vllm_config": "vllm.config:VllmConfig",
    "vllm.distributed:get_pp_group": "vllm.distributed.parallel_state:GroupCoordinator",
    "vllm.distributed:get_tp_group": "vllm.distributed.parallel_state:GroupCoordinator",
    "vllm.forward_context:get_forward_context": "vllm.forward_context:ForwardContext",
    "vllm.model_executor.models:ModelRegistry": (
        "vllm.model_executor.models.registry:_ModelRegistry"
    ),
    "vllm.multimodal:MULTIMODAL_REGISTRY": "vllm.multimodal.registry:MultiModalRegistry",
    "vllm.platforms:current_platform": "vllm.platforms.interface:Platform",
}
ATTRIBUTES = {
    ("vllm.config:VllmConfig", "cache_config"): "vllm.config:CacheConfig",
    ("vllm.config:VllmConfig", "compilation_config"): "vllm.config:CompilationConfig",
    ("vllm.config:VllmConfig", "load_config"): "vllm.config:LoadConfig",
    ("vllm.config:VllmConfig", "model_config"): "vllm.config:ModelConfig",
    ("vllm.config:VllmConfig", "parallel_config"): "vllm.config:ParallelConfig",
    ("vllm.config:VllmConfig", "scheduler_config"): "vllm.config:SchedulerConfig",
    ("vllm.config:VllmConfig", "speculative_config"): "vllm.config:SpeculativeConfig",
    ("vllm.config:SpeculativeConfig", "draft_model_config"): "vllm.config:ModelConfig",
    (f"{_MOE}.runner.moe_runner:MoERunner", "moe_config"): f"{_MOE}.config:FusedMoEConfig",
    (f"{_MOE}.runner.moe_runner:MoERunner", "routed_experts"): (
        f"{_MOE}.routed_experts:RoutedExperts"
    ),
    (f"{_MOE}.config:FusedMoEConfig", "moe_parallel_config"): (
        f"{_MOE}.config:FusedMoEParallelConfig"
    ),
    (f"{_MOE}.routed_experts:RoutedExperts", "expert_map_manager"): (
        f"{_MOE}.expert_map_manager:ExpertMapManager"
    ),
}
# Local variables that are always called so.
VARIABLES = {
    "runner": f"{_MOE}.runner.moe_runner:MoERunner",
    "vllm_config": "vllm.config:VllmConfig",
}


@dataclass
class OwnClass:
    """A class of this package: methods with signatures, bases as keys of ours or of vLLM."""

    methods: dict[str, str] = field(default_factory=dict)
    bases: list[str] = field(default_factory=list)


@dataclass
class Usage:
    """What the package uses: keys "module:name"; ours start with `inkling_portable`."""

    required: set[str] = field(default_factory=set)
    # Each group needs one existing member per version; "ours" is a fallback written here.
    groups: list[tuple[str, ...]] = field(default_factory=list)
    # Members read or called, by class; a `?` marks those behind getattr or hasattr.
    members: dict[str, set[str]] = field(default_factory=dict)
    classes: dict[str, OwnClass] = field(default_factory=dict)
    # (key, positional arguments, keywords, file:line). A constructor's key is the class, a method's
    # the class and ".name"; with a class of ours the call is to `super()`.
    calls: list[tuple[str, int, tuple[str, ...], str]] = field(default_factory=list)

    def names(self) -> set[str]:
        optional = {k for group in self.groups for k in group if k != "ours"}
        return self.required | optional | set(self.members)

    def vllm_bases(self, own: str) -> list[str]:
        """vLLM classes above a class of ours, nearest first."""
        found: list[str] = []
        for base in self.classes[own].bases if own in self.classes else []:
            found += [base] if base.startswith("vllm") else self.vllm_bases(base)
        return list(dict.fromkeys(found))

    def methods(self, own: str) -> dict[str, str]:
        """Methods of a class of ours, inherited ones of ours included."""
        if own not in self.classes:
            return {}
        found: dict[str, str] = {}
        for base in reversed(self.classes[own].bases):
            found |= self.methods(base)
        return found | self.classes[own].methods

    def overrides(self) -> dict[str, set[str]]:
        """For each vLLM class that we subclass, the names that our subclasses define."""
        found: dict[str, set[str]] = {}
        for own in self.classes:
            for base in self.vllm_bases(own):
                found.setdefault(base, set()).update(self.methods(own))
        return found


class _Reader(ast.NodeVisitor):
    """Collects the use of vLLM in one file of the package."""

    def __init__(self, module: str, usage: Usage, exported: dict[str, str]) -> None:
        self.module, self.usage, self.exported = module, usage, exported
        self.bound: dict[str, str] = {}  # imported name -> key
        self.held: dict[str, str] = dict(VARIABLES)  # variable -> key of its class
        self.either: dict[str, tuple[str, ...]] = {}  # variable -> keys it may stand for
        self.guarded = 0
        self.own = ""

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.split(".")[0] == "vllm":
                parent, _, last = alias.name.rpartition(".")
                self.bound[alias.asname or alias.name] = f"{parent}:{last}"

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if module.split(".")[0] not in ("vllm", "inkling_portable"):
            return
        for alias in node.names:
            key = f"{module}:{alias.name}"
            key = self.exported.get(key, key)
            self.bound[alias.asname or alias.name] = key
            if key.startswith("vllm") and not self.guarded:
                self.usage.required.add(key)

    def visit_Try(self, node: ast.Try) -> None:
        catches = " ".join(ast.unparse(h.type) if h.type else "Exception" for h in node.handlers)
        if not re.search(r"ImportError|ModuleNotFoundError|Exception", catches):
            self.generic_visit(node)
            return
        handled = [n for h in node.handlers for n in flattened(h.body)]
        for statement in flattened(node.body):
            for alias in statement.names if isinstance(statement, ast.ImportFrom) else ():
                assert isinstance(statement, ast.ImportFrom)
                if (statement.module or "").split(".")[0] == "vllm":
                    name = alias.asname or alias.name
                    options = [f"{statement.module}:{alias.name}", *_fallbacks(name, handled)]
                    self.usage.groups.append(tuple(dict.fromkeys(options)))
        self.guarded += 1
        for tried in node.body:
            self.visit(tried)
        self.guarded -= 1
        for after in [*node.handlers, *node.orelse, *node.finalbody]:
            self.visit(after)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outer = dict(self.held)
        for argument in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]:
            for part in ast.walk(argument.annotation) if argument.annotation else ():
                key = self.bound.get(part.id, "") if isinstance(part, ast.Name) else ""
                if key.startswith("vllm"):
                    self.held[argument.arg] = key
        self.generic_visit(node)
        self.held = outer

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        options = node.value.values if isinstance(node.value, ast.BoolOp) else []
        keys = tuple(key for value in options if (key := self._probed(value)))
        for target in node.targets:
            if isinstance(target, ast.Name):
                if keys:
                    self.either[target.id] = keys
                kind = self._class_of(node.value)
                if kind:
                    self.held[target.id] = kind
                else:
                    self.held.pop(target.id, None)

    def _class_of(self, node: ast.expr) -> str | None:
        """Key of the vLLM class whose object (or which itself) an expression is."""
        if isinstance(node, ast.Name):
            bound = self.bound.get(node.id, "")
            itself = bound if bound.startswith("vllm") and node.id[0].isupper() else None
            return self.held.get(node.id) or OBJECTS.get(bound) or itself
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return OBJECTS.get(self.bound.get(node.func.id, ""))
        if isinstance(node, ast.Attribute):
            return ATTRIBUTES.get((self._class_of(node.value) or "", node.attr))
        if isinstance(node, ast.IfExp):
            return self._class_of(node.body) or self._class_of(node.orelse)
        return None

    def _module_name(self, node: ast.expr, name: str) -> str | None:
        """Key of `name` in an imported vLLM module; None where `node` is no such module."""
        key = self.bound.get(ast.unparse(node), "")
        is_module = key.split(":")[0].split(".")[0] in ("vllm", "") and key and key not in OBJECTS
        if not is_module or not key.rpartition(":")[2].islower():
            return None
        return f"{key.replace(':', '.').lstrip('.')}:{name}"

    def _probed(self, node: ast.expr) -> str | None:
        """Key of `getattr(module, "name", default)` or `module.name` on a vLLM module."""
        if isinstance(node, ast.Attribute):
            return self._module_name(node.value, node.attr)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            return self._module_name(node.args[0], str(getattr(node.args[1], "value", "")))
        return None

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        keys = [self._probed(v) for v in node.values]
        if isinstance(node.op, ast.Or) and any(keys):
            self.usage.groups.append(tuple(key or "ours" for key in keys))
        else:
            self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        kind, key = self._class_of(node.value), self._probed(node)
        if kind:
            self.usage.members.setdefault(kind, set()).add(node.attr)
        elif key and not self.guarded:
            self.usage.required.add(key)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        if ast.unparse(function) in ("getattr", "hasattr"):
            kind, key = self._class_of(node.args[0]), self._probed(node)
            if kind:
                member = f"{getattr(node.args[1], 'value', '')}?"
                self.usage.members.setdefault(kind, set()).add(member)
            elif key:
                self.usage.groups.append((key, "ours"))
        name = ast.unparse(function)
        called = self.either.get(name) or (self.bound.get(name, ""),)
        if isinstance(function, ast.Attribute):
            kind = self._class_of(function.value)
            parent = (
                f"{self.own}.{function.attr}" if ast.unparse(function.value) == "super()" else ""
            )
            called = (f"{kind}.{function.attr}" if kind else self._probed(function) or parent,)
        keywords = tuple(k.arg for k in node.keywords if k.arg)
        complete = len(keywords) == len(node.keywords) and not any(
            isinstance(a, ast.Starred) for a in node.args
        )
        for key in called if complete else ():
            if key.startswith("vllm") or (self.own and key.startswith(self.own)):
                where = f"{self.module}:{node.lineno}"
                self.usage.calls.append((key, len(node.args), keywords, where))
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        own = OwnClass()
        for base in node.bases:
            text = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
            own.bases.append(self.bound.get(text, f"{self.module}:{text}"))
        for item in flattened(node.body):
            if isinstance(item, Function):
                is_value = bool(decorators(item) & {"property", "cached_property"})
                own.methods.setdefault(
                    item.name, "property" if is_value else signature(item, bound=True)
                )
        outer, self.own = self.own, f"{self.module}:{node.name}"
        self.usage.classes[self.own] = own
        self.generic_visit(node)
        self.own = outer


def _fallbacks(name: str, handled: list[ast.stmt]) -> list[str]:
    """What an except block offers instead of `name`: keys of vLLM, or "ours"."""
    found = []
    for statement in handled:
        if isinstance(statement, ast.ImportFrom):
            found += [
                f"{statement.module}:{a.name}"
                for a in statement.names
                if (a.asname or a.name) == name
            ]
        elif re.search(rf"^(return|continue|pass)|\b{name}\b", ast.unparse(statement)):
            found.append("ours")
    return found


def package_usage(package: Path) -> Usage:
    """Everything that files below `package` import, subclass, read and call of vLLM."""
    engine = f"{package.name}.model.engine"
    first = _Reader(engine, Usage(), {})
    first.visit(ast.parse((package / "model" / "engine.py").read_text()))
    exported = {f"{engine}:{n}": key for n, key in first.bound.items() if key.startswith("vllm")}
    usage = Usage()
    for file in sorted(package.rglob("*.py")):
        dotted = ".".join(file.relative_to(package.parent).with_suffix("").parts)
        reader = _Reader(dotted.removesuffix(".__init__"), usage, exported)
        reader.visit(ast.parse(file.read_text()))
    return usage
