"""Ranks for tests: processes in one gloo group that stay and are fed one case after another."""

from __future__ import annotations

import multiprocessing as mp
import pickle
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch


def _serve(rank: int, size: int, store: str, pipe: Any) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    while True:
        function, arguments = pickle.loads(pipe.recv_bytes())
        try:
            answer: tuple[bool, Any] = (True, function(rank, size, *arguments))
        except Exception as error:
            answer = (False, error)
        # By value: nothing of a case stays shared with the test.
        pipe.send_bytes(pickle.dumps(answer))


class Ranks:
    """`size` forked processes. Functions are module-level, `function(rank, size, *arguments)`."""

    def __init__(self, size: int, folder: Path) -> None:
        self.size = size
        context = mp.get_context("fork")
        store = str(folder / f"store{size}")
        self._pipes, self._processes = [], []
        for rank in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, size, store, theirs), daemon=True
            )  # fmt: skip
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def outcomes(self, function: Callable[..., Any], *arguments: Any, seconds: float = 300
                 ) -> list[Any]:  # fmt: skip
        """What every rank returned or raised; None for one that died or did not answer in time."""
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((function, arguments)))
        found: list[Any] = []
        for pipe in self._pipes:
            try:
                found.append(pickle.loads(pipe.recv_bytes())[1] if pipe.poll(seconds) else None)
            except EOFError:
                found.append(None)
        return found

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What every rank returned; raises what the first of them raised."""
        found = self.outcomes(function, *arguments)
        for answer in found:
            if isinstance(answer, Exception):
                raise answer
        return found

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
