"""Random batches as the engine builds them: mixed requests, paged caches, padding rows."""

from dataclasses import dataclass

import torch
from torch import Tensor

from inkling_portable.inputs import Draw

NAN = float("nan")


@dataclass
class Batch:
    """Requests of one step; `rows` counts padding rows too."""

    lengths: list[int]  # new tokens of each request; zero is allowed
    contexts: list[int]  # tokens each request had before
    q_starts: Tensor
    kv_lens: Tensor
    requests: Tensor
    positions: Tensor

    @property
    def rows(self) -> int:
        return len(self.requests)

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def draw_batch(draw: Draw, max_context: int = 70, max_new: int = 20) -> Batch:
    """Up to four requests of up to `max_new` new tokens each, then up to three padding rows."""
    count = draw.integer(0, 4)
    kinds = [draw.choice(("decode", "verify", "prefill", "empty")) for _ in range(count)]
    longest = {"decode": (1, 1), "verify": (2, 9), "prefill": (1, max_new), "empty": (0, 0)}
    lengths = [draw.integer(*longest[kind]) for kind in kinds]
    # Multiples of eight meet the borders of small pages.
    steps = [draw.choice((1, 8)) for _ in kinds]
    contexts = [step * draw.integer(0, max_context // step) for step in steps]
    return make_batch(lengths, contexts, padding=draw.integer(0, 3))


def make_batch(lengths: list[int], contexts: list[int], padding: int = 0) -> Batch:
    """The batch with exactly these requests."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    requests = [b for b, n in enumerate(lengths) for _ in range(n)] + [-1] * padding
    positions = [c + i for n, c in zip(lengths, contexts, strict=True) for i in range(n)] + [
        0
    ] * padding
    return Batch(
        lengths,
        contexts,
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor([n + c for n, c in zip(lengths, contexts, strict=True)], dtype=torch.int32),
        torch.tensor(requests, dtype=torch.int32),
        torch.tensor(positions, dtype=torch.int64),
    )


@dataclass
class Paged:
    """One cache group: its pages, the slot of each row, and where its written rows are."""

    page: int
    count: int
    pages: Tensor
    slots: Tensor

    def cache(
        self, draw: Draw, heads: int, width: int, dtype: torch.dtype, kind: str = "normal"
    ) -> Tensor:
        """A cache [pages, page, heads, width], token-major or head-major as the engine's."""
        if draw.choice((True, False)):
            return draw.tensor((self.count, heads, self.page, width), dtype, kind).transpose(1, 2)
        # One buffer holds the keys and the values: a view with a gap after every row.
        return draw.tensor((self.count, self.page, heads, 2 * width), dtype, kind)[..., :width]


def draw_pages(draw: Draw, batch: Batch, page: int, window: int = 0, share: bool = False) -> Paged:
    """A block table for `batch` in which pages are shuffled and pages behind `window` are freed.

    Page 0 is the engine's null page: freed entries point at it, and no token lives there. With
    `share` a request may begin on whole pages that the request before it computes in this step.
    """
    needed = [-(-int(n) // page) for n in batch.kv_lens]
    width = max([1, *needed])
    count = 1 + sum(needed) + 1
    order = (1 + torch.arange(count - 1)).tolist()
    shift = draw.integer(0, max(0, len(order) - 1))
    order = order[shift:] + order[:shift]
    order = order[::-1] if draw.choice((True, False)) else order
    table = torch.zeros(max(1, len(needed)), width, dtype=torch.int32)[: len(needed)]
    for b, n in enumerate(needed):
        first = max(0, batch.contexts[b] - (window - 1)) // page if window else 0
        for i in range(n):
            block = order.pop()
            table[b, i] = block if i >= first else 0
    for b in range(1, len(needed) if share else 0):
        whole, rest = divmod(batch.contexts[b], page)
        if rest == 0 and int(batch.kv_lens[b - 1]) >= batch.contexts[b] and draw.choice((0, 1)):
            table[b, :whole] = table[b - 1, :whole]
    slots = torch.full((batch.rows,), -1, dtype=torch.int64)
    for t in range(batch.tokens):
        position, b = int(batch.positions[t]), int(batch.requests[t])
        slots[t] = int(table[b, position // page]) * page + position % page
    return Paged(page, count, table, slots)


def poison(x: Tensor, batch: Batch) -> Tensor:
    """`x` with its padding rows set to NaN, so that a leak of one shows."""
    x = x.clone()
    x[batch.tokens :] = NAN
    return x
