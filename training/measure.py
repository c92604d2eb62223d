"""How often the model in training is right, without generating: one pass over right answers.

A greedy decoder writes the whole right answer exactly when every token of it is the most likely
one after the right ones before it. What drafting would gain is counted the same way.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inkling_portable.commands import eval_media
from inkling_portable.commands.eval_tasks import TASKS, case
from training.batched import BatchedInkling, Media
from training.conversations import Batch, case_transcript, together
from training.tokenizer import vocabulary_size


@dataclass(frozen=True)
class Questions:
    """Cases of one task: ids [N, L], padded, and the range of the answer in each."""

    task: str
    ids: Tensor
    spans: list[tuple[int, int]]
    media: Media | None = None

    def on(self, device: str) -> Questions:
        media = None if self.media is None else Media(*(x.to(device) for x in self.media))
        return Questions(self.task, self.ids.to(device), self.spans, media)


def questions(task: str, count: int, seed: int, multiple: int = 32) -> Questions:
    """`count` cases of a task as rows whose length is a multiple of the window."""
    draw = case if task in TASKS else eval_media.case
    made = [case_transcript(draw(task, index, seed)) for index in range(count)]
    length = -(-max(len(one.ids) for one, _ in made) // multiple) * multiple
    batch = together([one for one, _ in made], length)
    ids = torch.from_numpy(batch.ids.astype(np.int64))
    spans = [(start, len(one.ids)) for one, start in made]
    return Questions(task, ids, spans, media_of(batch))


def media_of(batch: Batch) -> Media | None:
    """The pictures and sounds of a batch as the model takes them, on the CPU."""
    if batch.patches is None or batch.levels is None or batch.places is None:
        return None
    patches = torch.from_numpy(batch.patches)
    both = patches[:, None].expand(-1, 2, -1, -1, -1)
    return Media(both, torch.from_numpy(batch.levels), torch.from_numpy(batch.places))


def all_questions(count: int, seed: int, towers: bool) -> list[Questions]:
    names = [*TASKS, *(eval_media.TASKS if towers else ())]
    return [questions(task, count, seed) for task in names]


@torch.no_grad()
def measure(
    model: BatchedInkling, asked: list[Questions], depths: int, rows: int = 64
) -> dict[str, float]:
    """Share of right answers by task, and the mean number of tokens a step with drafts."""
    valid = vocabulary_size()
    shares: dict[str, float] = {}
    gained = steps = 0
    for one in asked:
        right = 0
        # The places of media count over all rows.
        step = rows if one.media is None else len(one.ids)
        for first in range(0, len(one.ids), step):
            ids = one.ids[first : first + step]
            entering = model.rows(ids, one.media)
            hidden = model.trunk(entering)
            best = [model.logits(hidden)[..., :valid].argmax(-1).cpu()]
            for depth in range(depths):
                hidden = model.draft(depth, hidden, entering)
                best.append(model.logits(hidden)[..., :valid].argmax(-1).cpu())
            known = ids.cpu()
            for row, (start, end) in enumerate(one.spans[first : first + step]):
                right += bool((best[0][row, start - 1 : end - 1] == known[row, start:end]).all())
                more, taken = drafted(known[row].tolist(), [b[row].tolist() for b in best[1:]],
                                      start, end)  # fmt: skip
                gained, steps = gained + more, steps + taken
        shares[one.task] = right / len(one.ids)
    shares["tokens per step"] = gained / max(steps, 1)
    return shares


def drafted(ids: list[int], drafts: list[list[int]], start: int, end: int) -> tuple[int, int]:
    """Tokens and steps of writing ids[start:end] when drafts[k][p] guesses ids[p + 2 + k].

    The first token comes from the prompt's own step and is not counted.
    """
    steps, place = 0, start
    while place + 1 < end:
        row, gained = place - 1, 1
        for guesses in drafts:
            target = row + 1 + gained
            if target >= end or guesses[row] != ids[target]:
                break
            gained += 1
        steps += 1
        place += gained
    return place - start, steps
