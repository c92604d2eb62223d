"""Try launch settings of the routed experts' CUDA kernels on this GPU, and keep the best ones.

    python -m benchmarks.experts --tune ...

Settings are tried for one product at a time. What wins is left in place, so that the table which
follows is made with it, and is told, so that `routed_experts_mma`'s functions can be given it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from benchmarks.experts import MODELS, calls_for, realistic, tokens_of
from benchmarks.timing import median_us
from inkling_portable.backends.cuda import compiled
from inkling_portable.backends.cuda import routed_experts_mma as module
from inkling_portable.backends.cuda.routed_experts_mma import CHUNK, Tiles

# Warps along k and along rows, tiles of 16 rows, chunks of a step, blocks of an SM.
UP = ((4, 1, 2, 2, 3), (4, 1, 2, 1, 4), (4, 1, 2, 3, 2), (8, 1, 2, 1, 2), (8, 1, 1, 2, 2),
      (8, 1, 1, 3, 2), (8, 1, 1, 1, 3), (4, 1, 1, 2, 5), (4, 1, 1, 3, 4), (4, 1, 1, 4, 3),
      (4, 1, 1, 6, 3), (2, 1, 2, 2, 6), (2, 2, 2, 2, 3), (2, 1, 2, 3, 5), (4, 2, 2, 2, 1),
      (4, 1, 4, 1, 2))  # fmt: skip
DOWN = ((1, 4, 1, 3, 4), (1, 4, 1, 3, 3), (1, 4, 2, 1, 4), (1, 4, 2, 3, 2), (1, 2, 1, 3, 8),
        (1, 2, 2, 1, 8), (1, 8, 1, 3, 2), (1, 8, 2, 1, 2), (1, 8, 1, 1, 3))  # fmt: skip
TOKEN = ((1, 3, 3), (1, 3, 2), (1, 3, 4), (1, 1, 4), (1, 1, 5), (2, 3, 2), (2, 1, 3), (2, 1, 2))
MANY = ((1, 4, 2, 1, 2), (1, 4, 2, 1, 3), (1, 8, 1, 1, 2), (1, 8, 1, 1, 3), (1, 4, 1, 1, 4),
        (1, 4, 1, 1, 3), (1, 8, 2, 1, 1))  # fmt: skip


def tiles(rows: tuple[tuple[int, ...], ...], groups: int, inner: int) -> Iterator[Tiles]:
    """Settings whose warps share the chunks of `inner` evenly, whole steps each."""
    for warps_k, warps_m, tall, ahead, resident in rows:
        if inner // CHUNK % (warps_k * ahead) == 0:
            yield Tiles(warps_k, warps_m, tall, groups, ahead, resident)


def trials(tokens: int, hidden: int, width: int) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """(what is tried, replaced names of the module, settings)."""
    if tokens <= 256:
        for groups in (1,) if tokens <= 64 else (1, 2):
            for one in tiles(UP, groups, hidden):
                yield "up", {"FEW": 256, "up_tiles": lambda *_, one=one: one}, one
            for one in tiles(DOWN, groups, width) if tokens >= 9 else ():
                names = {"FEW": 256, "BY_TOKEN_TO": 0, "down_tiles": lambda *_, one=one: one}
                yield "down", names, one
        for tall, ahead, resident in TOKEN if tokens <= 36 else ():
            one = Tiles(1, 1, tall, 1, ahead, resident)
            names = {"FEW": 256, "BY_TOKEN_TO": tokens, "token_tiles": lambda *_, one=one: one}
            if width // CHUNK % ahead == 0:
                yield "down", names, one
    # Longer steps are for routed_experts_wgmma, whose settings are not tried here.
    for groups in (2, 4, 8) if 128 <= tokens < module.wgmma.FROM else ():
        ups, downs = (list(tiles(MANY, groups, inner)) for inner in (hidden, width))
        # One product at a time beside the other's first settings.
        pairs = [(up, downs[0]) for up in ups] + [(ups[0], down) for down in downs[1:]]
        for pair in pairs:
            names = {"FEW": 0, "BY_TOKEN_TO": 0,
                     "many_tiles": lambda _, is_up, pair=pair: pair[0 if is_up else 1]}  # fmt: skip
            yield "many", names, pair


_cubins: dict[tuple[Any, ...], bytes] = {}
_compile = compiled.compile_source


def _kept(source: str, macros: Any, arch: str) -> bytes:
    found = _cubins.get((macros, arch))
    return _compile(source, macros, arch) if found is None else found


def _attempt(work: tuple[str, Any, str]) -> bytes:
    try:
        return _compile(*work)
    except compiled.CompileError:  # told again when the setting's turn comes
        return b""


class _Unlaunched:
    def launch(self, *_: Any) -> None:
        pass


def compile_ahead(call: Callable[[], Any], replaced: list[dict[str, Any]]) -> None:
    """Compile what `call` launches under each replacement, in as many processes as there are cores.

    The processes compile only; the GPU is this one's.
    """
    asked: dict[Any, None] = {}
    original = module.kernel

    def record(path: Any, name: str, macros: Any, device: int) -> Any:
        asked[macros] = None
        return _Unlaunched()

    for names in replaced:
        before = {name: getattr(module, name) for name in names}
        vars(module).update({**names, "kernel": record})
        call()
        vars(module).update({**before, "kernel": original})
    arch, source = compiled.arch_of(), module.SOURCE.read_text()
    work = [(source, macros, arch) for macros in asked if (macros, arch) not in _cubins]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("fork")) as pool:
        for (_, macros, _), cubin in zip(work, pool.map(_attempt, work), strict=True):
            if cubin:
                _cubins[(macros, arch)] = cubin
    compiled.compile_source = _kept


def tune(model: str, weights: dict[str, Any], tokens: int) -> dict[str, str]:
    """Leave the best settings for this step in place; returns them by product, with their time."""
    hidden, width = MODELS[model]
    sets = realistic(tokens_of(hidden, tokens, calls_for(tokens)))
    calls = [lambda one=one: module.routed_experts(**weights, **one) for one in sets]
    found: dict[str, tuple[float, dict[str, Any], Any]] = {}
    tried = list(trials(tokens, hidden, width))
    compile_ahead(calls[0], [names for _, names, _ in tried])
    for what, names, one in tried:
        before = {name: getattr(module, name) for name in names}
        vars(module).update(names)
        try:
            calls[0]()
            taken = median_us(calls, 5)
            if what not in found or taken < found[what][0]:
                found[what] = (taken, names, one)
        except Exception as error:
            print(f"  {what} {one}: {type(error).__name__}: {error}", file=sys.stderr)
        vars(module).update(before)
    few = [found[what] for what in ("up", "down") if what in found]
    best = few
    if "many" in found and (not few or found["many"][0] < min(taken for taken, _, _ in few)):
        best = [found["many"]]
    for _, names, _ in best:
        vars(module).update(names)
    return {what: f"{taken:.1f} us with {one}" for what, (taken, _, one) in found.items()}
