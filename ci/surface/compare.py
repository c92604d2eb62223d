"""Where the facts of one vLLM do not fit this package: missing names, refused calls, overrides.

Each problem is one line that names the place, what is needed and what was found.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from .used import Usage

Facts = Mapping[str, Any]

# Members that exist at run time but in no class body or `self.x = ...`, with the reason.
UNSEEN = {
    ("vllm.model_executor.layers.vocab_parallel_embedding:ParallelLMHead", "weight"): (
        "registered by its quantisation method"
    ),
}
_MISSING = object()


def parsed(text: str) -> inspect.Signature:
    """inspect's form of a signature text."""
    kind: Any = inspect.Parameter.POSITIONAL_OR_KEYWORD
    found: list[inspect.Parameter] = []
    text = text.removesuffix(" by name")
    for part in text[1:-1].split(", ") if text != "()" else []:
        if part == "/":
            found = [p.replace(kind=inspect.Parameter.POSITIONAL_ONLY) for p in found]
        elif part == "*":
            kind = inspect.Parameter.KEYWORD_ONLY
        elif part.startswith("**"):
            found.append(inspect.Parameter(part[2:], inspect.Parameter.VAR_KEYWORD))
        elif part.startswith("*"):
            found.append(inspect.Parameter(part[1:], inspect.Parameter.VAR_POSITIONAL))
            kind = inspect.Parameter.KEYWORD_ONLY
        else:
            default = None if part.endswith("=") else inspect.Parameter.empty
            found.append(inspect.Parameter(part.rstrip("="), kind, default=default))
    # Fields of a dataclass can have a default before one without; order is not checked there.
    required = [p for p in found if p.default is inspect.Parameter.empty]
    ordered = required + [p for p in found if p not in required]
    ordered.sort(key=lambda p: p.kind)
    return inspect.Signature(ordered)


def binds(signature: str, positional: int, keywords: Mapping[str, Any]) -> str | None:
    """None when a call with these arguments fits, else Python's reason."""
    try:
        parsed(signature).bind(*range(positional), **keywords)
    except TypeError as error:
        return str(error)
    return None


def problems(facts: Facts, usage: Usage) -> list[str]:
    """Everything about one vLLM that does not fit the package."""
    return [
        *_names(facts, usage),
        *_members(facts, usage),
        *_abstract(facts, usage),
        *_calls(facts, usage),
        *_overrides(facts, usage),
    ]


def unused_bridges(versions: Mapping[str, Facts], usage: Usage) -> list[str]:
    """Optional names and members that no version has: a bridge to nowhere, or a misspelling."""
    optional = {key for group in usage.groups for key in group if key != "ours"}
    found = [
        f"{key} is in no version; remove the bridge"
        for key in sorted(optional)
        if not any(facts.get(key) for facts in versions.values())
    ]
    for key, members in sorted(usage.members.items()):
        for member in sorted(m.rstrip("?") for m in members if m.endswith("?")):
            seen = any(_member(facts, key, member) for facts in versions.values())
            if not seen and (key, member) not in UNSEEN:
                found.append(f"{key}.{member} is in no version; remove the probe")
    return found


def _member(facts: Facts, key: str, member: str) -> str | None:
    found: str | None = ((facts.get(key) or {}).get("members") or {}).get(member)
    return found


def _names(facts: Facts, usage: Usage) -> list[str]:
    found = []
    for key in sorted(usage.names()):
        if facts.get(key, _MISSING) is _MISSING:
            found.append(f"{key} has no fact; record it with `python -m ci.surface`")
    for key in sorted(usage.required):
        if facts.get(key, _MISSING) is None:
            found.append(f"{key} is imported unconditionally; this vLLM lacks it")
    for group in usage.groups:
        if "ours" not in group and not any(facts.get(key) for key in group):
            found.append(f"one of {', '.join(group)} is needed; this vLLM has none")
    return found


def _members(facts: Facts, usage: Usage) -> list[str]:
    found = []
    for key, members in sorted(usage.members.items()):
        for member in sorted(members):
            probed = member.endswith("?") or f"{member}?" in members
            if not probed and (key, member) not in UNSEEN and not _member(facts, key, member):
                found.append(f"{key}.{member} is used; this vLLM lacks it")
    return found


def _abstract(facts: Facts, usage: Usage) -> list[str]:
    """Concrete classes of ours are those that no class of ours extends."""
    extended = {base for own in usage.classes.values() for base in own.bases}
    found = []
    for own in sorted(set(usage.classes) - extended):
        for base in usage.vllm_bases(own):
            wanted = set((facts.get(base) or {}).get("abstract", ()))
            for method in sorted(wanted - set(usage.methods(own))):
                found.append(f"{own} lacks {method}, which {base} declares abstract")
    return found


def _calls(facts: Facts, usage: Usage) -> list[str]:
    found = []
    for key, positional, keywords, where in usage.calls:
        signature = called_signature(facts, usage, key)
        if signature is not None:
            reason = binds(signature, positional, dict.fromkeys(keywords))
            if reason:
                found.append(f"{where} calls {key}{signature}: {reason}")
    return found


def called_signature(facts: Facts, usage: Usage, key: str) -> str | None:
    """The signature behind a call's key; None when it is not vLLM's or has no signature."""
    name, _, method = key.rpartition(":")[2].partition(".")
    owner = f"{key.rpartition(':')[0]}:{name}"
    if owner in usage.classes:  # super().method of a class of ours
        bases = usage.classes[owner].bases
        if any(method in usage.methods(base) for base in bases):
            return None
        signatures = (_member(facts, base, method) for base in usage.vllm_bases(owner))
        return next((s for s in signatures if s and s.startswith("(")), None)
    if method:
        found = _member(facts, owner, method)
    else:
        found = (facts.get(owner) or {}).get("params")
    return found if found and found.startswith("(") else None


def _overrides(facts: Facts, usage: Usage) -> list[str]:
    """A method of ours must accept whatever callers of vLLM's method may pass."""
    found = []
    for own in sorted(usage.classes):
        ours = usage.methods(own)
        for base in usage.vllm_bases(own):
            for method, mine in sorted(ours.items()):
                theirs = _member(facts, base, method)
                is_call = theirs is not None and theirs.startswith("(") and mine.startswith("(")
                if method == "__init__" or not is_call:
                    continue
                assert theirs is not None
                for positional, keywords in _ways_to_call(theirs):
                    reason = binds(mine, positional, keywords)
                    if reason:
                        found.append(f"{own}.{method}{mine} overrides {theirs}: {reason}")
                        break
    return found


def _ways_to_call(signature: str) -> list[tuple[int, dict[str, None]]]:
    """(positional arguments, keywords): everything by position, everything by name, the least.

    One for a method that vLLM calls by name only.
    """
    named = [p for p in parsed(signature).parameters.values() if p.kind not in (2, 4)]
    only_keyword = dict.fromkeys(p.name for p in named if p.kind == p.KEYWORD_ONLY)
    plain = [p for p in named if p.kind != p.KEYWORD_ONLY]
    first = [p for p in plain if p.kind == p.POSITIONAL_ONLY]
    rest = dict.fromkeys(p.name for p in plain[len(first) :])
    needed = [p for p in plain if p.default is p.empty]
    needed_keyword = {
        p.name: None for p in named if p.kind == p.KEYWORD_ONLY and p.default is p.empty
    }
    by_name = (len(first), rest | only_keyword)
    if signature.endswith(" by name"):
        return [by_name]
    return [
        (len(plain), only_keyword),
        by_name,
        (len(needed), needed_keyword),
    ]
