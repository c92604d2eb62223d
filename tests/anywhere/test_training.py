"""The trainer's model computes what the references compute, in its own batched way."""

from pathlib import Path

import pytest
import torch

from inkling_portable.commands import eval_media
from inkling_portable.model.towers import AudioTower, VisionTower
from inkling_portable.registry import Facts, resolve
from inkling_portable.target import Target
from tests.plain_inkling import PlainInkling
from training import nano
from training.batched import BatchedInkling
from training.conversations import case_transcript, together
from training.measure import media_of

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
        rows = model.rows(ids)
        found = model.trunk(rows)
        assert (found - wanted).abs().max() < BOUND
        assert (
            model.logits(found)[..., :820] - plain.logits(wanted.flatten(0, 1)).view(2, length, -1)
        ).abs().max() < BOUND
        for depth in range(nano.DEPTHS):
            end = length - 1 - depth
            tokens = [row[1 + depth :].tolist() for row in ids]
            drafted = plain.draft_hidden(
                depth, [0, 1], wanted[:, :end].flatten(0, 1), tokens, [0, 0]
            )
            wanted = drafted.unflatten(0, (2, end))
            found = model.draft(depth, found, rows)
            assert (found[:, :end] - wanted).abs().max() < BOUND


def test_towers_equal_those_that_serve() -> None:
    """Pictures and sounds of two conversations, where they stand among the rows."""
    config = nano.config(towers=True)
    weights = {name: x.double() for name, x in nano.fresh_weights(config, seed=4).items()}
    model = BatchedInkling(config, weights, torch.float64)
    shown = [case_transcript(eval_media.case(task, 0))[0] for task in eval_media.TASKS]
    batch = together(shown, 96)
    media = media_of(batch)
    assert media is not None and [len(x) for x in media] == [40, 8, 48]
    media = media._replace(patches=media.patches.double())
    ops = resolve(Target.parse("cpu"), Facts(), {})
    assert config.vision is not None and config.audio is not None
    towers = [(VisionTower(config.vision, ops), "visual", media.patches),
              (AudioTower(config.audio, ops), "audio", media.levels)]  # fmt: skip
    wanted = []
    with torch.no_grad():
        for tower, prefix, inputs in towers:
            start = f"model.{prefix}."
            own = {n.removeprefix(start): x for n, x in weights.items() if n.startswith(start)}
            tower.double().load_state_dict(own)
            wanted.append(tower(inputs))
        ids = torch.from_numpy(batch.ids.astype("int64"))
        rows = model.rows(ids, media)
        plain = model.rows(ids)
    slots = torch.zeros(ids.shape, dtype=torch.bool).flatten()
    slots[media.places] = True
    raw = nano.raw_config(towers=True)
    image = ids.flatten() == raw["image_token_id"]
    assert torch.equal(slots, image | (ids.flatten() == raw["audio_token_id"]))
    assert (rows.flatten(0, 1)[image] - wanted[0]).abs().max() < BOUND
    assert (rows.flatten(0, 1)[slots & ~image] - wanted[1]).abs().max() < BOUND
    assert torch.equal(rows.flatten(0, 1)[~slots], plain.flatten(0, 1)[~slots])
