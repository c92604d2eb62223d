"""How often the model in training is right, without generating: one pass over right answers.

A greedy decoder writes the whole right answer exactly when every token of it is the most likely
one after the right ones before it. What drafting would gain is counted the same way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inkling_portable.commands.eval_tasks import TASKS, case
from training.batched import BatchedInkling
from training.conversations import case_ids
from training.tokenizer import special_ids, vocabulary_size


@dataclass(frozen=True)
class Questions:
    """Cases of one task: ids [N, L], padded, and the range of the answer in each."""

    task: str
    ids: Tensor
    spans: list[tuple[int, int]]


def questions(task: str, count: int, seed: int, multiple: int = 32) -> Questions:
    """`count` cases of a task as rows whose length is a multiple of the window."""
    made = [case_ids(case(task, index, seed)) for index in range(count)]
    length = -(-max(len(ids) for ids, _ in made) // multiple) * multiple
    rows = torch.full((count, length), special_ids()["<|endoftext|>"])
    for row, (ids, _) in zip(rows, made, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    return Questions(task, rows, [(start, len(ids)) for ids, start in made])


def all_questions(count: int, seed: int) -> list[Questions]:
    return [questions(task, count, seed) for task in TASKS]


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
        for first in range(0, len(one.ids), rows):
            ids = one.ids[first : first + rows]
            hidden = model.trunk(ids)
            best = [model.logits(hidden)[..., :valid].argmax(-1).cpu()]
            for depth in range(depths):
                hidden = model.draft(depth, hidden, ids)
                best.append(model.logits(hidden)[..., :valid].argmax(-1).cpu())
            known = ids.cpu()
            for row, (start, end) in enumerate(one.spans[first : first + rows]):
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
