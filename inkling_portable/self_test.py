"""Start-up self-test: every chosen kernel once against its contract, on the machine that serves.

What it finds is a fact for `resolve`: a default choice that fails gives way to the next offer, one
that was asked for stops the server. Results are remembered per kernel, versions and chip in vLLM's
cache folder. Only a pass is taken from there: a failure is looked at again at every start.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from inkling_portable import __version__
from inkling_portable.backends.hand_over import alone
from inkling_portable.inputs import SeededDraw
from inkling_portable.registry import Facts, Offer, Op, SelectionError, choose, contract, table
from inkling_portable.target import Target

VARIABLE = "INKLING_PORTABLE_SELF_TEST"
SEEDS = 40
"""Draws to look through for one that the kernel serves and that has rows in it."""

T = TypeVar("T")


class BrokenDeviceError(SelectionError):
    """A kernel left the device unusable: no other choice can be made in this process."""


@dataclass(frozen=True)
class Outcome:
    """What the self-test found. `failed` is what `Facts.failed` takes."""

    failed: tuple[tuple[str, str], ...] = ()
    agreed: int = 0
    remembered: int = 0
    unknown: int = 0  # never tested on this machine; only `recall` leaves any
    seconds: float = 0.0
    off: bool = False

    def __str__(self) -> str:
        if self.off:
            return f"self-test: off, by {VARIABLE}"
        parts = [f"{self.agreed} kernels agree with their contracts"]
        if self.remembered:
            parts[0] += f" ({self.remembered} remembered)"
        if self.unknown:
            parts.append(f"{self.unknown} not tested on this machine yet")
        parts += [f"{code.partition(':')[2]}: {why}" for code, why in self.failed]
        return "self-test: " + "; ".join(parts) + f"; {self.seconds:.1f} s"


def switched_off(variable: str = VARIABLE) -> bool:
    return os.environ.get(variable, "").strip().lower() in ("off", "0", "false")


@functools.cache
def run(target: Target, facts: Facts, requests: tuple[tuple[str, str], ...] = ()) -> Outcome:
    """Test whatever `choose` takes, until nothing untested is chosen. Once per process.

    Raises BrokenDeviceError. A failed request is `choose`'s to refuse, with `failed` in the facts.
    """
    if switched_off():
        return Outcome(off=True)
    return _look(target, facts, requests, test=True)


def recall(target: Target, facts: Facts, requests: tuple[tuple[str, str], ...] = ()) -> Outcome:
    """What is remembered of the kernels that `choose` takes, without running any."""
    return Outcome(off=True) if switched_off() else _look(target, facts, requests, test=False)


def _look(
    target: Target, facts: Facts, requests: tuple[tuple[str, str], ...], test: bool
) -> Outcome:
    began = time.monotonic()
    known, found = _read(cache_file()), dict[str, str | None]()
    verdicts: dict[str, str | None] = {}  # by code of the offer; None is a pass
    remembered = unknown = 0
    while True:
        failed = tuple((code, why) for code, why in verdicts.items() if why is not None)
        try:
            decisions = choose(target, replace(facts, failed=failed), requests)
        except SelectionError:
            break  # what was asked for has failed
        chosen = [d.offer for d in decisions if d.verdict == "chosen" and _is_kernel(d.offer)]
        untested = [offer for offer in chosen if offer.code not in verdicts]
        if not untested:
            break
        if test and target.vendor != "cpu":
            _make_ready([o for o in untested if key(o, target, facts) not in known], target, facts)
        for offer in untested:
            name = key(offer, target, facts)
            if name in known and (known[name] is None or not test):
                verdicts[offer.code] = known[name]
                remembered += known[name] is None
            elif test:
                verdicts[offer.code] = found[name] = try_offer(offer, target, facts)
            else:
                verdicts[offer.code] = None
                unknown += 1
    if found:
        _remember(cache_file(), found)
    return Outcome(failed, len(verdicts) - len(failed) - unknown, remembered, unknown,
                   time.monotonic() - began)  # fmt: skip


def _is_kernel(offer: Offer) -> bool:
    """References are what kernels are held to, and the engine's layers are no functions. Its own
    attention multiplies by zero what follows the last key, where contracts have NaN."""
    return not offer.is_layer and offer.provider not in ("reference", "vllm", "fa4")


# --- one kernel ----------------------------------------------------------------------------------


class _Served(SeededDraw):
    """Draws that prefer what is served: its dtype and head width, its 8-bit cache before those."""

    def __init__(self, seed: int, facts: Facts) -> None:
        import torch

        super().__init__(seed)
        eight = (torch.float8_e4m3fn,) if facts.kv_dtype.startswith("fp8") else ()
        self._preferred = (*eight, getattr(torch, facts.dtype), facts.head_dim)

    def choice(self, values: Sequence[T]) -> T:
        wanted = [value for like in self._preferred for value in values if value == like]
        return wanted[0] if wanted else super().choice(values)


def try_offer(offer: Offer, target: Target, facts: Facts) -> str | None:
    """None if the kernel keeps its contract on one small input, else the sentence for `choose`.

    Raises BrokenDeviceError.
    """
    from inkling_portable.agreement import disagreements

    op, last = contract(offer.op), "no drawn input has rows"
    with _plain_defaults():
        for itself, arguments in _attempts(op, facts):
            device = "cpu" if target.vendor == "cpu" else "cuda"
            try:
                with alone(itself):
                    reports = disagreements(op, offer.load(), arguments, device)
            except ValueError as refused:  # a shape or format that this kernel leaves to others
                last = str(refused)
                continue
            except Exception as error:  # whatever it is, another kernel may serve
                _check_device(offer, device)
                reports = [f"raised {type(error).__name__}: {str(error).strip()[:200]}"]
            return _sentence(reports[0]) if reports else None
    return _sentence(last)


def _drawn(op: Op, facts: Facts) -> Iterator[dict[str, Any]]:
    for seed in range(SEEDS):
        arguments = op.inputs(_Served(seed, facts))
        if all(getattr(value, "numel", lambda: 1)() for value in arguments.values()):
            yield arguments


def _attempts(op: Op, facts: Facts) -> Iterator[tuple[bool, dict[str, Any]]]:
    """Draws for the kernel itself, then, where it takes none, those that it leaves to others."""
    for itself in (True, False):
        for arguments in _drawn(op, facts):
            yield itself, arguments


def _make_ready(offers: Sequence[Offer], target: Target, facts: Facts) -> None:
    """Compile what their tests launch, side by side. What goes wrong here shows in the test."""
    if len(offers) < 2 or target.lib("triton") is None:
        return
    from inkling_portable.agreement import run as run_op
    from inkling_portable.compile_ahead import compiled_ahead

    with compiled_ahead(max(1, min(16, (os.cpu_count() or 1) // facts.tp))), _plain_defaults():
        for offer in offers:
            for itself, arguments in _attempts(contract(offer.op), facts):
                try:
                    with alone(itself):
                        run_op(offer.load(), contract(offer.op), arguments, device="cuda")
                except ValueError:
                    continue  # a shape that this kernel leaves to others
                except Exception:
                    break
                break


def _sentence(report: str) -> str:
    report = " ".join(report.split())
    return f"failed its self-test on this machine, {report} ({VARIABLE}=off skips the test)"


def _check_device(offer: Offer, device: str) -> None:
    import torch

    if device == "cpu":
        return
    try:
        torch.cuda.synchronize()
    except Exception as error:
        raise BrokenDeviceError(
            f"{offer.op}={offer.provider} left the device unusable in its self-test "
            f"({str(error).strip().splitlines()[0]}); ask for {offer.op}=reference"
        ) from error


@contextmanager
def _plain_defaults() -> Iterator[None]:
    """Models are built under other defaults of device and dtype than contracts are written for."""
    import torch

    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"), torch.inference_mode():
            yield
    finally:
        torch.set_default_dtype(dtype)


# --- what is remembered --------------------------------------------------------------------------


def cache_file() -> Path:
    """In vLLM's cache folder: VLLM_CACHE_ROOT, else `vllm` in XDG_CACHE_HOME or ~/.cache."""
    root = os.environ.get("VLLM_CACHE_ROOT")
    if not root:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        root = os.path.join(base, "vllm")
    return Path(root) / "inkling_portable" / "self_test.json"


def key(offer: Offer, target: Target, facts: Facts) -> str:
    """Changes with whatever may change the result: kernel, contract, chip, libraries, input."""
    # Read as files: `explain` asks without importing torch.
    codes = (offer.code, *(row.code for row in table("reference") if row.op == offer.op))
    sources = tuple(_sources(code.partition(":")[0]) for code in codes)
    parts = (codes, sources, str(target), __version__, facts.dtype, facts.kv_dtype,
             str(facts.head_dim))  # fmt: skip
    return f"{offer.op}={offer.provider} {hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}"


@functools.cache
def _sources(module: str) -> str:
    """Digest of the source files in a module's folder: kernels share helpers."""
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.origin:
        return ""
    digest = hashlib.sha256()
    for path in sorted(Path(spec.origin).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _read(path: Path) -> dict[str, str | None]:
    """Entries of the file; whatever is missing or damaged is as if never written."""
    try:
        stored = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(stored, dict):
        return {}
    return {k: v for k, v in stored.items() if v is None or isinstance(v, str)}


def _remember(path: Path, found: Mapping[str, str | None]) -> None:
    """Add entries; a folder that cannot be written costs the next start its time, no more."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump({**_read(path), **found}, file, indent=1)
        os.replace(file.name, path)
    except OSError:
        return
