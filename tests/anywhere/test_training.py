"""The trainer's model computes what the references compute, in its own batched way."""

from pathlib import Path

import pytest
import torch

from inkling_portable.registry import Facts, resolve
from inkling_portable.target import Target
from tests.plain_inkling import PlainInkling
from training import nano
from training.batched import BatchedInkling

BOUND = 1e-10
"""Both in float64, on hidden states of deviation 1."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights before training, with nothing left neutral."""
    made = tmp_path_factory.mktemp("nano")
    weights = nano.fresh_weights(nano.config(), seed=1)
    noise = torch.Generator().manual_seed(2)
    for name, x in weights.items():
        scale = 0.3 if "sconv" in name else 0.1
        weights[name] = x + scale * torch.randn(x.shape, generator=noise)
    nano.write(made, weights)
    return made


def test_batched_equals_the_references(folder: Path) -> None:
    """Rows longer than window, extent and log floor; trunk, logits and every MTP depth."""
    weights = {name: x.double() for name, x in nano.read(folder).items()}
    length = 288
    ops = resolve(Target.parse("cpu"), Facts(), {})
    plain = PlainInkling(folder, ops, torch.float64, requests=2, length=length)
    ids = torch.randint(0, 820, (2, length), generator=torch.Generator().manual_seed(3))
    model = BatchedInkling(nano.config(), weights, torch.float64)
    with torch.no_grad():
        wanted = plain.forward([0, 1], ids.tolist()).unflatten(0, (2, length))
        found = model.trunk(ids)
        assert (found - wanted).abs().max() < BOUND
        assert (
            model.logits(found)[..., :820] - plain.logits(wanted.flatten(0, 1)).view(2, length, -1)
        ).abs().max() < BOUND
        for depth in range(nano.DEPTHS):
            end = length - 1 - depth
            tokens = [row[1 + depth :].tolist() for row in ids]
            rows = plain.draft_hidden(depth, [0, 1], wanted[:, :end].flatten(0, 1), tokens, [0, 0])
            wanted = rows.unflatten(0, (2, end))
            found = model.draft(depth, found, ids)
            assert (found[:, :end] - wanted).abs().max() < BOUND
