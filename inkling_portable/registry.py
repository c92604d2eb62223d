"""Ops, offers and the one function that chooses between them.

An *op* is a contract: the reference that carries `@op(...)`. An *offer* is a table row: a provider
can compute an op where its `needs` hold. `choose` turns (target, facts, overrides) into decisions
and imports no kernel, so it answers for any machine; `resolve` loads what was chosen and returns
bound functions. Both run once, when a layer is built; nothing is chosen during a forward pass.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from inkling_portable.backends.evidence import MEASURED
from inkling_portable.target import Target

if TYPE_CHECKING:
    from inkling_portable.inputs import Draw
    from inkling_portable.numerics import Tolerance

Predicate = Callable[[Target, "Facts"], "str | None"]
Gather = Callable[[Any], "list[Any]"]  # one picklable value of every rank, in rank order
TABLES = ("cuda", "rocm", "engine", "triton", "reference")


KV_DTYPES = ("auto", "bfloat16", "float16", "float32", "fp8", "fp8_e4m3")
"""What `--kv-cache-dtype` may say: attention reads keys and values in these."""


class SelectionError(ValueError):
    """A request that cannot be obeyed; the message says what would have been accepted."""


@dataclass(frozen=True)
class Facts:
    """What is asked of a machine: the settled settings of model and engine.

    Widths are of the whole model, not of one rank. `page_size` is 0 until the cache is bound;
    `step_rows` are the most that a step can have.
    `failed` has what must not be chosen, and why: the code of every offer that failed the
    self-test on this machine, the key of every offer that some rank refuses.
    """

    model: str = "large"
    dtype: str = "bfloat16"
    weights: str = "bf16"
    hidden: int = 6144
    heads: int = 64
    kv_heads: int = 8
    local_heads: int = 64
    local_kv_heads: int = 16
    head_dim: int = 128
    d_rel: int = 16
    rel_extent: int = 1024
    window: int = 512
    conv_taps: int = 4
    experts: int = 256
    expert_width: int = 3072
    top_k: int = 6
    sinks: int = 2
    tp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1
    lora: bool = False
    page_size: int = 0
    step_rows: int = 8192
    kv_dtype: str = "auto"
    batch_invariant: bool = False
    moe_backend: str = "auto"
    rocm_aiter: bool | None = True
    gfx950_gluon: bool = True
    failed: tuple[tuple[str, str], ...] = ()


def switches(environ: Mapping[str, str]) -> dict[str, Any]:
    """The facts that vLLM's switches of AITER and of its Gluon attention state.

    vLLM has AITER off unless it is set; None if it is not, as that keeps nobody from asking for a
    kernel of AITER's that vLLM does not call. A second one turns off its experts alone.
    """
    asked = [environ.get(f"VLLM_ROCM_USE_AITER{part}", "").lower() for part in ("", "_MOE")]
    off = any(value not in ("true", "1", "") for value in asked)
    return {
        "rocm_aiter": not off if off or asked[0] else None,
        "gfx950_gluon": environ.get("INKLING_GFX950_GLUON", "1") == "1",
    }


MODELS = {
    "large": Facts(),
    "small": Facts(model="small", hidden=4096, heads=32, local_heads=32, local_kv_heads=8,
                   expert_width=2048),
}  # fmt: skip


# --- contracts -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Op:
    """One contract. `reference` is both its schema and its arithmetic."""

    name: str
    reference: Callable[..., Any]
    inputs: Callable[[Draw], dict[str, Any]]
    tolerances: tuple[Tolerance, ...]  # one for all outputs, or one each in their order
    mutates: tuple[str, ...]

    def tolerances_of(self, outputs: int) -> tuple[Tolerance, ...]:
        """One tolerance for each of `outputs`; a single declared one serves all."""
        return self.tolerances * (outputs if len(self.tolerances) == 1 else 1)

    @property
    def signature(self) -> inspect.Signature:
        return inspect.signature(self.reference, eval_str=True)

    @property
    def digest(self) -> str:
        """Hash of the contract's source: recordings carry it, so that stale ones are noticed."""
        return hashlib.sha256(inspect.getsource(self.reference).encode()).hexdigest()[:16]


def op(
    *,
    inputs: Callable[[Draw], dict[str, Any]],
    tolerance: Tolerance | tuple[Tolerance, ...],
    mutates: tuple[str, ...] = (),
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare a reference to be a contract.

    Outputs are the returned tensors followed by the arguments named in `mutates`; `tolerance` is
    one for all of them or one for each.
    """

    def declare(reference: Callable[..., Any]) -> Callable[..., Any]:
        kinds = tolerance if isinstance(tolerance, tuple) else (tolerance,)
        contract = Op(reference.__name__, reference, inputs, kinds, mutates)
        reference.op = contract  # type: ignore[attr-defined]
        return reference

    return declare


@cache
def contract(name: str) -> Op:
    """The contract of an op, found through its row in the reference table."""
    for row in table("reference"):
        if row.op == name:
            found: Op = row.load().op  # type: ignore[attr-defined]
            return found
    raise SelectionError(f"there is no op {name!r}; ops are {', '.join(op_names())}")


# --- offers --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Offer:
    """One table row. `code` is "module:attribute" and is imported only when chosen."""

    op: str
    provider: str
    code: str
    requires: tuple[Predicate, ...] = ()
    when: str | None = None  # "module:attribute" of a test on host integers; several rows may chain
    only_if_asked: bool | Predicate = False  # a predicate says why it waits to be asked for
    note: str = ""
    # Or "signature only": calls of a library that nothing here can run; or "executed": the code of
    # that library was run by the CPU executor of ci/cdna.
    verified: str = "run"
    # "module:attribute" of what ranks run together before the row may serve them, for rows that own
    # memory shared between ranks: (target, facts, group, gather) -> None or a sentence.
    prepare: str | None = None
    # Whether a row's result never depends on the rest of the batch; or "module:attribute" of the
    # function for which that holds, which serves under batch invariance.
    invariant: bool | str = False

    def under(self, facts: Facts) -> Offer:
        """The row as these facts use it."""
        if facts.batch_invariant and isinstance(self.invariant, str):
            return replace(self, code=self.invariant)
        return self

    def refusal(self, target: Target, facts: Facts) -> str | None:
        if facts.batch_invariant and not self.invariant:
            return "sums in an order that depends on the batch; batch invariance needs a fixed one"
        for predicate in self.requires:
            reason = predicate(target, facts)
            if reason is not None:
                return reason
        failed = dict(facts.failed)
        return failed.get(self.code) or failed.get(self.key)

    @property
    def is_layer(self) -> bool:
        """Whether a layer of the engine serves, or other ops do, so that there is no function."""
        return ":" not in self.code

    @property
    def key(self) -> str:
        """Names the row: one function may stand in several."""
        return f"{self.op}={self.provider} {self.code}"

    def waits(self, target: Target, facts: Facts) -> str | None:
        """Why this row, though it would do, is taken only by those who ask for it."""
        if callable(self.only_if_asked):
            return self.only_if_asked(target, facts)
        return f"ask with {self.op}={self.provider}" if self.only_if_asked else None

    def load(self) -> Callable[..., Any]:
        function: Callable[..., Any] = _load(self.code)
        return function

    def vote(self, target: Target, facts: Facts, group: str, gather: Gather) -> str | None:
        """Run `prepare` together with the other ranks; None, or why this rank refuses."""
        try:
            return _load(self.prepare)(target, facts, group, gather) if self.prepare else None
        except Exception as error:  # whatever it is, the next row may serve
            text = " ".join(str(error).split())[:200]
            return f"cannot be prepared ({type(error).__name__}: {text})"


def offers_in(package: str) -> Callable[..., Offer]:
    """The row constructor of a table; relative code names are completed with `package`."""

    def offer(op: str, provider: str, code: str, *requires: Predicate, when: str | None = None,
              **options: Any) -> Offer:  # fmt: skip
        def complete(name: str) -> str:
            return f"{package}{name}" if name.startswith(".") else name

        if isinstance(options.get("invariant"), str):
            options["invariant"] = complete(options["invariant"])
        if options.get("prepare"):
            options["prepare"] = complete(options["prepare"])
        return Offer(
            op, provider, complete(code), requires, complete(when) if when else None, **options
        )

    return offer


_FACT_NAMES = frozenset(f.name for f in fields(Facts))


def needs(**wanted: Any) -> Predicate:
    """A predicate over target, facts and library versions.

    `vendor`, `arch`, `features` speak of the target; names of Facts of the facts (a value or a
    tuple of values); every other name of a library, `_` for `-`, with a version range or "".
    """

    def predicate(target: Target, facts: Facts) -> str | None:
        for name, want in wanted.items():
            reason = _refuse_one(name, want, target, facts)
            if reason:
                return reason
        return None

    return predicate


def _refuse_one(name: str, want: Any, target: Target, facts: Facts) -> str | None:
    if name in ("vendor", "arch"):
        allowed = want if isinstance(want, tuple) else (want,)
        found = getattr(target, name)
        return None if found in allowed else f"needs {' or '.join(allowed)}; this is {found}"
    if name == "features":
        missing = sorted(set(want if isinstance(want, tuple) else (want,)) - target.features)
        return f"needs the feature {missing[0]}; this target does not state it" if missing else None
    if name in _FACT_NAMES:
        allowed = want if isinstance(want, tuple) else (want,)
        found = getattr(facts, name)
        if found in allowed:
            return None
        return f"needs {name} {' or '.join(map(str, allowed))}; asked is {found}"
    library = name.replace("_", "-")
    found = target.lib(library)
    if found is None:
        return f"needs {library}{' ' + want if want else ''}, which is not installed"
    if want and found and not _version_in(found, want):
        return f"needs {library} {want}; found {found}"
    return None


def _version_in(version: str, wanted: str) -> bool:
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    # A local part (0.32.0+cpu) says how a wheel was built, not which version it is.
    return SpecifierSet(wanted, prereleases=True).contains(Version(version).public)


def table(name: str) -> tuple[Offer, ...]:
    """The rows of one backend; importing a table imports no kernel."""
    rows: tuple[Offer, ...] = importlib.import_module(f"inkling_portable.backends.{name}").OFFERS
    return rows


def op_names() -> tuple[str, ...]:
    return tuple(dict.fromkeys(row.op for row in table("reference")))


def ordered_rows(op_name: str, target: Target) -> tuple[Offer, ...]:
    """The rows of an op in the order in which a target tries them.

    Own vendor's table, then triton, then reference. Among these, evidence comes first: a row
    with a committed measurement on this chip, then the engine's own kernels, then rows of ours
    that nobody has measured there. The sort is stable, so inside a class table order holds.
    """
    tables = [t for t in TABLES if t == target.vendor or t not in ("cuda", "rocm")]
    rows = [row for t in tables for row in table(t) if row.op == op_name]

    def rank(row: Offer) -> int:
        if row.provider == "reference":
            return 3
        if target.key in MEASURED.get((row.op, row.provider), ()):
            return 0
        return 1 if row.provider == "vllm" or row.is_layer else 2

    return tuple(sorted(rows, key=rank))


# --- choosing ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decision:
    """One offer and its verdict: "chosen", "refused", "later" (would do) or "only if asked"."""

    op: str
    provider: str
    verdict: str
    reason: str
    offer: Offer = field(repr=False, compare=False)


def parse_overrides(
    additional_config: Mapping[str, Any] | None, env: str | None, source: str = "INKLING_PORTABLE"
) -> dict[str, str]:
    """The user's requests: `--additional-config`'s "inkling_portable", then the variable `source`.

    The variable is `off`, `on`, `reference` or a comma list of op=provider, `*` for every op. The
    first place that speaks wins as a whole. Raises SelectionError for anything unreadable.
    """
    block = (additional_config or {}).get("inkling_portable")
    if block is not None:
        if not isinstance(block, Mapping):
            raise SelectionError(
                '--additional-config needs {"inkling_portable": {"op": "provider"}}; '
                f"found {block!r}"
            )
        requests = {k: v for k, v in block.items() if k not in SETTINGS}
        if requests:
            return _checked_requests(requests, "--additional-config")
    text = (env or "").strip()
    if text in ("", "on", "off"):
        return {}
    if text == "reference":
        return {"*": "reference"}
    pairs = {}
    for part in text.split(","):
        name, equals, provider = (s.strip() for s in part.partition("="))
        if not equals or not name or not provider:
            raise SelectionError(
                f"{source}={text!r} is not understood at {part!r}; write off, reference, "
                "or op=provider[,op=provider], with * for every op"
            )
        if name in pairs:
            raise SelectionError(f"{source}={text!r} asks for {name} twice; name a provider once")
        pairs[name] = provider
    return _checked_requests(pairs, source)


# Keys of the "inkling_portable" object that are settings and not ops.
SETTINGS = ("allow_nonfinite",)


def _checked_requests(requests: Mapping[str, Any], source: str) -> dict[str, str]:
    for name, provider in requests.items():
        if name != "*" and name not in op_names():
            raise SelectionError(f"{source} names the unknown op {name!r}; ops are "
                                 f"{', '.join(op_names())}")  # fmt: skip
        known = _providers(name)
        if not isinstance(provider, str) or provider not in known:
            raise SelectionError(f"{source} asks for {name}={provider}, but {name} is offered by "
                                 f"{', '.join(known)} only")  # fmt: skip
    return dict(requests)


def _providers(op_name: str) -> list[str]:
    rows = [row for t in TABLES for row in table(t) if op_name in ("*", row.op)]
    return sorted({row.provider for row in rows})


@cache
def choose(
    target: Target, facts: Facts, requests: tuple[tuple[str, str], ...] = ()
) -> tuple[Decision, ...]:
    """Decide every op for a target: pure, and the only chooser.

    Raises SelectionError when a request cannot be obeyed or an op has no acceptable row.
    """
    asked = dict(requests)
    decisions: list[Decision] = []
    for name in op_names():
        decisions += _choose_one(name, target, facts, asked)
    return tuple(decisions)


def _choose_one(
    name: str, target: Target, facts: Facts, asked: Mapping[str, str]
) -> list[Decision]:
    rows = [row.under(facts) for row in ordered_rows(name, target)]
    want = asked.get(name)
    if want is None and "*" in asked and any(r.provider == asked["*"] for r in rows):
        want = asked["*"]
    family: tuple[str, ...] = ()
    if name == "routed_experts" and want is None and facts.moe_backend != "auto":
        # `--moe-backend X` names a family: the engine's kernel of it first, our row second.
        family = ("engine", facts.moe_backend, facts.moe_backend.partition("_")[0])
    decisions: list[Decision] = []
    complete = False
    for row in rows:
        reason = row.refusal(target, facts)
        if want is not None and row.provider != want:
            verdict, reason = "later", reason or f"{name}={want} was asked for"
        elif family and row.provider not in family:
            verdict, reason = "later", reason or f"--moe-backend {facts.moe_backend} was asked for"
        elif reason is not None:
            verdict = "refused"
        elif complete:
            verdict, reason = "later", "would do; an earlier row was chosen"
        elif want is None and not family and (waits := row.waits(target, facts)):
            verdict, reason = "only if asked", waits
        else:
            verdict, reason = "chosen", row.note
            complete = row.when is None
        decisions.append(Decision(name, row.provider, verdict, reason or "", row))
    if not complete:
        refusals = "; ".join(
            f"{d.provider}: {d.reason}" for d in decisions if d.verdict == "refused"
        )
        accepted = [d.provider for d in decisions if d.verdict in ("later", "only if asked")
                    and d.offer.refusal(target, facts) is None]  # fmt: skip
        request = f"no kernel of {name} can serve"
        if want or family:
            request = f"{name}={want}" if want else f"--moe-backend {facts.moe_backend}"
            request += " cannot be obeyed"
        nearest = f"accepted would be {', '.join(dict.fromkeys(accepted)) or 'nothing'}"
        if facts.batch_invariant and not accepted:
            nearest = "leave batch invariance (VLLM_BATCH_INVARIANT) out"
        raise SelectionError(f"{request} on {target.key} ({refusals or 'no such row'}); {nearest}")
    return decisions


# --- binding -------------------------------------------------------------------------------------


class Resolved:
    """The outcome: one plain function per op as attributes, and `decisions`, the log.

    `routed_experts` and `skinny_linear` are None where the engine's own layers were chosen, and
    `gated_sinks` is where its parts were.
    """

    def __init__(self, target: Target, facts: Facts, decisions: tuple[Decision, ...]) -> None:
        self.target, self.facts, self.decisions = target, facts, decisions
        for name in op_names():
            setattr(
                self,
                name,
                _bind([d.offer for d in decisions if d.op == name and d.verdict == "chosen"]),
            )

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., Any]: ...

    def serving(self, op: str) -> tuple[str, ...]:
        """Providers chosen for `op`, in the order in which they are tried."""
        return tuple(d.provider for d in self.decisions if (d.op, d.verdict) == (op, "chosen"))

    @property
    def digest(self) -> str:
        """Equal on ranks that decided equally."""
        chosen = [(d.op, d.offer.code) for d in self.decisions if d.verdict == "chosen"]
        return hashlib.sha256(repr(chosen).encode()).hexdigest()[:16]


def resolve(target: Target, facts: Facts, requests: Mapping[str, str] | None = None) -> Resolved:
    """Bind every op for a target. Cached by its arguments; raises SelectionError."""
    return _resolve(target, facts, tuple(sorted((requests or {}).items())))


@cache
def _resolve(target: Target, facts: Facts, requests: tuple[tuple[str, str], ...]) -> Resolved:
    return Resolved(target, facts, choose(target, facts, requests))


COMPILED = ("sm90", "sm100", "gfx942", "gfx950")
"""The chips for which the suites compile every kernel."""


def unproven(target: Target) -> str | None:
    """What to say of a chip for which nothing here is known to compile; None for the others."""
    if target.vendor == "cpu" or target.arch in COMPILED:
        return None
    return (f"kernels are compiled and checked for {', '.join(COMPILED)}; for {target.arch} they "
            "never were, so the self-test at start decides which of these run")  # fmt: skip


def reference_warnings(target: Target, decisions: Iterable[Decision]) -> list[str]:
    """On an accelerator: sentences naming the ops that ended on the slow reference, and why."""
    if target.vendor == "cpu":
        return []
    decisions = list(decisions)
    slow = [d.op for d in decisions if d.verdict == "chosen" and d.provider == "reference"]
    by_reason: dict[str, list[str]] = {}
    for name in dict.fromkeys(slow):
        refused = [f"{d.provider}: {d.reason}" for d in decisions
                   if d.op == name and d.verdict == "refused"]  # fmt: skip
        reason = "; ".join(dict.fromkeys(refused)) or "no other provider"
        by_reason.setdefault(reason, []).append(name)
    return [
        f"on the slow reference: {', '.join(names)} ({reason})"
        for reason, names in by_reason.items()
    ]


def _load(code: str) -> Any:
    module, _, attribute = code.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _bind(offers: list[Offer]) -> Callable[..., Any] | None:
    if offers[0].is_layer:
        return None  # the model builds the engine's layer; there is no function to call
    functions: list[tuple[Any, Callable[..., Any]]] = []
    for offer in offers:
        function = offer.load()
        check_schema(contract(offer.op), function, offer.code)
        functions.append((_load(offer.when) if offer.when else None, function))
    if functions[0][0] is None:
        return functions[0][1]
    *chain, (_, last) = functions

    def chained(*args: Any, **kwargs: Any) -> Any:
        for test, function in chain:
            if test(*args, **kwargs):
                return function(*args, **kwargs)
        return last(*args, **kwargs)

    return chained


def check_schema(expected: Op, function: Callable[..., Any], code: str) -> None:
    """Raise SelectionError if a provider's signature differs from the contract's."""

    def schema(signature: inspect.Signature) -> list[str]:
        parts = [
            f"{p.name}: {inspect.formatannotation(p.annotation)}"
            for p in signature.parameters.values()
        ]
        return [*parts, f"-> {inspect.formatannotation(signature.return_annotation)}"]

    found = schema(inspect.signature(function, eval_str=True))
    wanted = schema(expected.signature)
    if found != wanted:
        at = next((f"{w!r} became {f!r}" for w, f in zip(wanted, found, strict=False) if w != f),
                  f"{len(wanted)} parts became {len(found)}")  # fmt: skip
        raise SelectionError(f"{code} does not have the schema of op {expected.name}: {at}")
