"""Try launch settings of the routed experts' CUDA kernels on this GPU, and keep the best ones.

    python -m benchmarks.experts --tune ...

What wins is left in place, so that the table which follows is made with it, and is told, so that
the functions of `routed_experts_mma` can be given it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from benchmarks.experts import MODELS, TOP_K, calls_for, realistic, tokens_of
from benchmarks.timing import median_us
from inkling_portable.backends.cuda import compiled
from inkling_portable.backends.cuda import routed_experts_mma as module
from inkling_portable.backends.cuda.routed_experts_mma import Stream, Tiles
from inkling_portable.backends.triton.routed_experts import Matrix, matrix
from inkling_portable.formats import ARRANGED

# Warps; warps that share columns, tiles of 16 rows and parts of the columns of the first product;
# tiles and parts of the second one; stages, blocks of an SM, warps that bring codes.
FEW = ((8, 8, 1, 2, 1, 1, 3, 2, 1), (8, 8, 1, 2, 1, 1, 2, 2, 1), (8, 8, 1, 2, 1, 1, 2, 3, 1),
       (8, 8, 1, 2, 1, 1, 3, 2, 2), (4, 4, 1, 4, 1, 1, 4, 3, 1), (4, 4, 1, 4, 1, 1, 2, 3, 1),
       (4, 4, 1, 4, 1, 1, 2, 4, 1), (6, 6, 1, 2, 1, 1, 3, 2, 1), (6, 6, 1, 4, 1, 1, 3, 3, 1),
       (16, 16, 1, 1, 1, 1, 3, 1, 1), (16, 16, 1, 1, 1, 1, 2, 1, 1), (16, 8, 1, 2, 1, 1, 3, 1, 2),
       (8, 8, 1, 2, 1, 2, 2, 2, 4), (8, 8, 1, 2, 1, 2, 3, 1, 4), (8, 8, 1, 2, 1, 4, 2, 2, 4),
       (4, 4, 1, 2, 1, 2, 2, 2, 3))  # fmt: skip
MANY = ((4, 2, 2), (4, 2, 3), (8, 1, 2), (8, 1, 3), (4, 1, 4), (4, 1, 3), (8, 2, 1))


def trials(tokens: int, up: Matrix, down: Matrix) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """(what is tried, replaced names of the module, settings)."""
    if tokens <= module.few_most(down.inner):
        for warps, warps_k, tall, parts, down_tall, down_parts, *rest in FEW:
            one = Stream(warps, warps_k, tall, up.inner // parts, down_tall,
                         down.inner // down_parts, *rest)  # fmt: skip
            if one.shared(up, down, TOP_K * tokens):
                yield "few", {"stream_settings": lambda *_, one=one: (one,)}, one
    for groups in (2, 4, 8) if tokens >= 128 else ():
        several = [Tiles(warps, tall, groups, resident) for warps, tall, resident in MANY]
        # One product at a time beside the other's first settings.
        pairs = [(one, several[0]) for one in several] + [(several[0], one) for one in several[1:]]
        for pair in pairs:
            yield (
                "many",
                {"few_most": lambda _: 0, "many_tiles": lambda _, up, pair=pair: pair[not up]},
                pair,
            )


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

    def resident(self, *_: Any) -> int:
        return 0


def compile_ahead(call: Callable[[], Any], replaced: list[dict[str, Any]]) -> None:
    """Compile what `call` launches under each replacement, in as many processes as there are cores.

    The processes compile only; the GPU is this one's.
    """
    asked: dict[tuple[Any, ...], None] = {}
    original = module.kernel

    def record(path: Any, name: str, macros: Any, device: int) -> Any:
        asked[path, macros] = None
        return _Unlaunched()

    for names in replaced:
        before = {name: getattr(module, name) for name in names}
        vars(module).update({**names, "kernel": record})
        call()
        vars(module).update({**before, "kernel": original})
    arch = compiled.arch_of()
    work = [(compiled.source_of(path), macros, arch) for path, macros in asked
            if (macros, arch) not in _cubins]  # fmt: skip
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("fork")) as pool:
        for (_, macros, _), cubin in zip(work, pool.map(_attempt, work), strict=True):
            if cubin:
                _cubins[(macros, arch)] = cubin
    compiled.compile_source = _kept


def tune(model: str, weights: dict[str, Any], tokens: int) -> dict[str, str]:
    """Leave the best settings for this step in place; returns them by product, with their time."""
    sets = realistic(tokens_of(MODELS[model][0], tokens, calls_for(tokens)))
    calls = [lambda one=one: module.routed_experts(**weights, **one) for one in sets]
    form = weights["format"].removesuffix(ARRANGED)
    up, down = (matrix(name, weights[name], weights[f"{name}_scale"], weights[f"{name}_global"],
                       form, sets[0]["x"]) for name in ("w13", "w2"))  # fmt: skip
    found: dict[str, tuple[float, dict[str, Any], Any]] = {}
    tried = list(trials(tokens, up, down))
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
    best = min(found.values(), key=lambda one: one[0])
    vars(module).update(best[1])
    return {what: f"{taken:.1f} us with {one}" for what, (taken, _, one) in found.items()}
