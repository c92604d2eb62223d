"""What the ranks of one model settle together before a layer is built, so that all choose alike.

They exchange partial sums inside ops and keep equal residuals. What one rank refuses, all refuse,
with that rank's reason; rows that share memory between ranks are prepared together and voted on.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

from inkling_portable.registry import (
    Decision,
    Facts,
    Gather,
    SelectionError,
    choose,
    op_names,
    ordered_rows,
)
from inkling_portable.target import Target

VARIABLE = "INKLING_PORTABLE_RANK_SECONDS"
PATIENCE = 600.0
"""Seconds that ranks wait for one another at start: a self-test may compile for minutes."""

Failed = tuple[tuple[str, str], ...]


class RankError(RuntimeError):
    """A rank died, or did not come within the stated time."""


def patience() -> float:
    """PATIENCE, or what the environment says. Raises SelectionError for what is no time."""
    text = os.environ.get(VARIABLE, "").strip()
    try:
        seconds = float(text or PATIENCE)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise SelectionError(f"{VARIABLE} needs seconds above 0 and below 1e9; found {text!r}; "
                             f"unset it for {PATIENCE:g}")  # fmt: skip
    return seconds


_rounds: dict[str, int] = {}


def gather(value: Any, group: Any) -> list[Any]:
    """One picklable value of every rank of a process group, in rank order.

    Through the group's store, since a collective of gloo waits as long as the group was made to
    wait, whoever is missing. Raises RankError, on every rank that is there, where one does not
    come within `patience()` seconds.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_process_group_store

    seconds, own, size = patience(), dist.get_rank(group), dist.get_world_size(group)
    name = str(group.group_name)
    _rounds[name] = _rounds.get(name, 0) + 1
    keys = [f"inkling_portable/{name}/{_rounds[name]}/{rank}" for rank in range(size)]
    deadline = time.monotonic() + seconds
    missing = "all"
    try:
        store = _get_process_group_store(group)
        store.set(keys[own], pickle.dumps(value).hex())
        found = []
        for rank, key in enumerate(keys):
            missing = str(rank)
            store.wait([key], timedelta(seconds=max(0.01, deadline - time.monotonic())))
            found.append(pickle.loads(bytes.fromhex(store.get(key).decode())))
    except RuntimeError as error:
        raise RankError(
            f"all {size} ranks need to settle their choices within {seconds:g} s; rank {own} "
            f"waited in vain for rank {missing}, which died or hangs; look into its log, or give "
            f"slow ranks more time with {VARIABLE}"
        ) from error
    return found


def agreed(
    target: Target, facts: Facts, requests: tuple[tuple[str, str], ...], group: str, gather: Gather
) -> Facts:
    """The facts with which every rank makes the same choices; called by all of them.

    `facts.failed` has this rank's own failures. Raises SelectionError, on every rank, where their
    settings differ, where a request cannot be obeyed on all of them, or where they would still
    choose differently; and what `gather` raises.
    """
    own = {**asdict(facts), "requests": requests}
    del own["failed"]
    _check_settings(gather(own))
    failed, refused = zip(*gather((facts.failed, _refused(target, facts))), strict=True)
    # What all refuse, each will refuse by itself; for other facts, such as formats, none may.
    alone = [tuple(r for r in own if not all(r[0] in dict(o) for o in refused)) for own in refused]
    facts = replace(facts, failed=(*united(failed), *united(alone)))
    prepared: set[str] = set()
    while True:
        decisions = _choose_together(target, facts, requests, gather)
        chosen = [d.offer for d in decisions if d.verdict == "chosen" and d.offer.prepare]
        fresh = [offer for offer in chosen if offer.key not in prepared]
        if not fresh:
            return facts
        offer = fresh[0]
        refused = united([((offer.key, why),) if why else ()
                          for why in gather(offer.vote(target, facts, group, gather))])  # fmt: skip
        prepared.add(offer.key)
        facts = replace(facts, failed=(*facts.failed, *refused))


def _check_settings(of_ranks: Sequence[dict[str, Any]]) -> None:
    for rank, found in enumerate(of_ranks):
        for name, value in of_ranks[0].items():
            if found[name] != value:
                raise SelectionError(
                    f"tensor-parallel ranks need the same {name}; rank 0 has {value!r} and rank "
                    f"{rank} {found[name]!r}; start all with the same options and environment"
                )


def _refused(target: Target, facts: Facts) -> Failed:
    """The rows that this rank refuses, self-tests apart."""
    rows = [row.under(facts) for name in op_names() for row in ordered_rows(name, target)]
    plain = replace(facts, failed=())
    found = ((row.key, row.refusal(target, plain)) for row in rows)
    return tuple((key, why) for key, why in found if why is not None)


def united(of_ranks: Sequence[Failed]) -> Failed:
    """Refusals of all ranks as one fact, the first one's sentence each."""
    found: dict[str, str] = {}
    for rank, failed in enumerate(of_ranks):
        for key, why in failed:
            everywhere = all(key in dict(other) for other in of_ranks)
            found.setdefault(key, why if everywhere else f"rank {rank}: {why}")
    return tuple(sorted(found.items()))


def _choose_together(
    target: Target, facts: Facts, requests: tuple[tuple[str, str], ...], gather: Gather
) -> tuple[Decision, ...]:
    refusal, chosen = None, list[Decision]()
    try:
        decisions = choose(target, facts, requests)
        chosen = [d for d in decisions if d.verdict == "chosen"]
    except SelectionError as error:
        decisions, refusal = (), str(error)
    names = [(d.op, d.provider) for d in chosen]
    digest = hashlib.sha256(repr([d.offer.key for d in chosen]).encode()).hexdigest()[:16]
    votes = gather((refusal, names, digest))
    for rank, (why, _, _) in enumerate(votes):
        if why is not None:
            raise SelectionError(refusal or f"rank {rank}: {why}")
    check_choices([(names, digest) for _, names, digest in votes])
    return decisions


def check_choices(of_ranks: Sequence[tuple[list[tuple[str, str]], str]]) -> None:
    """Raise SelectionError unless the (op, provider) pairs and the digests of all ranks agree."""
    for rank, (names, digest) in enumerate(of_ranks):
        if (names, digest) != of_ranks[0]:
            apart = sorted(set(names) ^ set(of_ranks[0][0])) or [("each op", "another kernel")]
            raise SelectionError(
                f"tensor-parallel ranks need the same choices; rank 0 (digest {of_ranks[0][1]}) "
                f"and rank {rank} ({digest}) differ in {', '.join('='.join(p) for p in apart)}; "
                "install the same libraries for both"
            )
