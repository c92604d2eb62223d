"""Processes that begin with vLLM imported: forked from one that did nothing but import it.

On a CPU vLLM spawns every rank and every engine core anew, and each imports torch, transformers and
vLLM, for some 12 seconds of one core. The process of the tests cannot be forked instead, because it
may hold the process groups of another engine; a fork server can, and so can what it forked.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing import context
from typing import Any

_plain = multiprocessing.get_context


class Process(context.ForkServerProcess):
    """One with the environment of the process that starts it, not with the fork server's."""

    def start(self) -> None:
        self._environment = dict(os.environ)
        super().start()

    def _bootstrap(self, *given: Any, **more: Any) -> Any:
        os.environ.clear()
        os.environ.update(self._environment)
        return super()._bootstrap(*given, **more)  # type: ignore[misc]


class Nursery(context.ForkServerContext):
    Process = Process  # type: ignore[assignment]


NURSERY = Nursery()
NURSERY.set_forkserver_preload(
    ["tests.nursery", "vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker",
     "vllm.v1.executor.multiproc_executor", "inkling_portable.model.inkling"]
)  # fmt: skip


def get_context(method: str | None = None) -> context.BaseContext:
    """As the library's, with the nursery for "spawn", and within it "fork"."""
    if method != "spawn":
        return _plain(method)
    return NURSERY if multiprocessing.parent_process() is None else _plain("fork")


multiprocessing.get_context = get_context  # type: ignore[assignment]


def _answer(answer: Any, function: Callable[..., Any], given: tuple[Any, ...]) -> None:
    answer.send(function(*given))


def call(function: Callable[..., Any], *given: Any) -> Any:
    """The result of a function in a process of its own; RuntimeError when that ends without one."""
    here, there = NURSERY.Pipe(duplex=False)
    process = NURSERY.Process(target=_answer, args=(there, function, given))
    process.start()
    there.close()
    try:
        return here.recv()
    except EOFError as error:
        raise RuntimeError(f"{function.__name__} failed in its process, as printed") from error
    finally:
        process.join()
