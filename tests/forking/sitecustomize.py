"""For a server whose PYTHONPATH begins with this folder: its processes are forked, not spawned.

They begin with all that `vllm serve` imported, as in tests/nursery.py, and not with 12 seconds of
importing it again. `make demo` starts a server as users do.
"""

import multiprocessing
from multiprocessing import context

_plain = multiprocessing.get_context


def get_context(method: str | None = None) -> context.BaseContext:
    """As the library's, with "fork" for "spawn"."""
    return _plain("fork" if method == "spawn" else method)


multiprocessing.get_context = get_context  # type: ignore[assignment]
