"""The towers and their two ops against transformers' towers and against the plain formulas."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.inkling.configuration_inkling import (
    InklingAudioConfig,
    InklingVisionConfig,
)
from transformers.models.inkling.modeling_inkling import (
    InklingAudioModel,
    InklingVisionModel,
    plan_out_scales,
)

from inkling_portable.backends.reference import towers as reference
from inkling_portable.model import towers
from inkling_portable.model.config import AudioConfig, VisionConfig
from inkling_portable.model.vision_plan import Stage, candidate_scales, choose_scales, plan_stages

OPS = SimpleNamespace(norm_gelu=reference.norm_gelu, dmel_embed_norm=reference.dmel_embed_norm)


def randomised(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """`model` with seeded weights, norms near 1 so that every stage stays in GELU's bend."""
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        is_norm = "norm" in name.split(".")[-2]
        parameter.data = 1 + 0.2 * noise if is_norm else noise / parameter.shape[-1] ** 0.5
    return model.to(dtype).eval()


def loaded(tower: torch.nn.Module, theirs: torch.nn.Module, names: dict[str, str]) -> None:
    """Give `tower` the weights of transformers' one; all names and shapes must match."""
    state = {}
    for name, value in theirs.state_dict().items():
        for old, new in names.items():
            name = name.replace(old, new)
        state[name] = value
    tower.to(next(theirs.parameters()).dtype).load_state_dict(state)


def vision_pair(patch: int, temporal: int, stages: int, width: int, dtype: torch.dtype):
    theirs = randomised(
        InklingVisionModel(
            InklingVisionConfig(
                text_hidden_size=width,
                patch_size=patch,
                temporal_patch_size=temporal,
                num_channels=3,
                num_hidden_layers=stages,
            )
        ),
        dtype,
    )
    ours = towers.VisionTower(VisionConfig(width, patch, temporal, 3, stages, 1e-6), OPS)
    names = {"encoder_layers": "layers"} | {
        f"{i}.{theirs_name}": f"{ours_name}_{i}"
        for i in range(stages)
        for theirs_name, ours_name in (("projection", "linear"), ("layer_norm", "norm"))
    }
    loaded(ours, theirs, names)
    return ours, theirs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("patch", "temporal", "stages"),
    [(40, 2, 4), (8, 2, 4), (8, 2, 2), (8, 2, 1), (6, 2, 3), (12, 4, 3), (10, 2, 3), (7, 3, 2)],
)
def test_vision_tower_equals_transformers(patch, temporal, stages, dtype):
    ours, theirs = vision_pair(patch, temporal, stages, 96, dtype)
    generator = torch.Generator().manual_seed(patch)
    patches = torch.randn(5, temporal, patch, patch, 3, generator=generator).to(dtype)
    with torch.no_grad():
        expected = theirs(patches).last_hidden_state.reshape(5, 96)
    assert (ours(patches) - expected).abs().max().item() <= 1e-6


@pytest.mark.parametrize("temporal", [1, 2, 4])
def test_one_time_slot_stands_for_all_of_a_still_picture(temporal):
    config = VisionConfig(96, 8, temporal, 3, 4, 1e-6)
    ours = randomised(towers.VisionTower(config, OPS), torch.float32)
    still = torch.randn(5, 1, 8, 8, 3)
    everywhere = ours(still.expand(-1, temporal, -1, -1, -1))
    # A matrix product of another height may add in another order.
    assert (ours(still) - everywhere).abs().max() <= 5e-6


def test_vision_tower_of_the_released_checkpoints():
    assert plan_stages(40, 2, 3, 4, 6144) == (
        Stage(1, 5, 75, 128),
        Stage(1, 2, 512, 320),
        Stage(1, 4, 5120, 4800),
        Stage(2, 1, 9600, 6144),
    )
    tower = towers.VisionTower(VisionConfig(4096, 40, 2, 3, 4, 1e-6), OPS)
    assert {name: tuple(p.shape) for name, p in tower.named_parameters()} == {
        "layers.linear_0.weight": (128, 75),
        "layers.norm_0.weight": (128,),
        "layers.linear_1.weight": (320, 512),
        "layers.norm_1.weight": (320,),
        "layers.linear_2.weight": (4800, 5120),
        "layers.norm_2.weight": (4800,),
        "layers.linear_3.weight": (4096, 9600),
        "final_norm.weight": (4096,),
    }


def test_fold_orders_time_row_column_channel():
    x = torch.arange(2 * 4 * 4 * 3).reshape(1, 2, 4, 4, 3)
    merged = towers.fold(x, 2, 2)
    assert merged.shape == (1, 1, 2, 2, 24)
    for dt, dy, dx, c in itertools.product(range(2), range(2), range(2), range(3)):
        channel = ((dt * 2 + dy) * 2 + dx) * 3 + c
        assert merged[0, 0, 1, 0, channel] == x[0, dt, 2 + dy, dx, c]


def test_many_patches_pass_in_bounded_pieces(monkeypatch):
    ours, _ = vision_pair(8, 2, 4, 96, torch.float32)
    patches = torch.randn(11, 2, 8, 8, 3)
    expected = ours(patches)
    monkeypatch.setattr(towers, "PATCHES_AT_ONCE", 3)
    with Largest() as largest:
        pieces = ours(patches)
    # A matrix product of another height may add in another order.
    assert (pieces - expected).abs().max() <= 5e-6
    # The widest intermediate of three patches: 2 frames x 4 x 4 cells of 64 channels.
    assert largest.numel == max(3 * 2 * 4 * 4 * 64, expected.numel())


@pytest.mark.parametrize("room", [16, 20, 100])
def test_fewer_patches_at_once_where_memory_ran_out(
    monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """An error in a step would end the engine, and every request in it."""
    tower = randomised(towers.VisionTower(VisionConfig(32, 4, 2, 3, 2, 1e-6), OPS), torch.float64)
    patches = torch.rand(150, 1, 4, 4, 3, dtype=torch.float64)
    want, embed = tower(patches), tower._embed

    def scarce(part: torch.Tensor) -> torch.Tensor:
        if len(part) > room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return embed(part)

    monkeypatch.setattr(tower, "_embed", scarce)
    torch.testing.assert_close(tower(patches), want, rtol=1e-12, atol=1e-12)
    room = 3
    with pytest.raises(torch.OutOfMemoryError):
        tower(patches)


@given(
    patch=st.integers(2, 64),
    temporal=st.sampled_from([1, 2, 3, 4, 6]),
    stages=st.integers(1, 8),
    channels=st.sampled_from([1, 3]),
)
def test_plan_equals_transformers_up_to_ties(patch, temporal, stages, channels):
    ours = [(s.time, s.side) for s in choose_scales(patch, temporal, channels, stages)]
    theirs = [(int(s[0]), int(s[1])) for s in plan_out_scales(temporal, patch, stages, channels)]

    def cost(scales: list[tuple[int, int]]) -> float:
        step = math.log(patch * patch * temporal * channels) / stages
        return sum(abs(i * step - math.log(t * s * s)) for i, (t, s) in enumerate(scales))

    assert ours == sorted(ours)
    assert ours[0] == (1, 1)
    assert ours[-1] == (temporal, patch)
    # Equal distances are common on a line; transformers' solver may then even return them out of
    # order, which builds no tower. In such cases the choice must be as good as theirs.
    assert ours == theirs or cost(ours) == pytest.approx(cost(theirs), abs=1e-6)


def test_plan_multiplies_up_to_the_whole_patch():
    for patch, temporal, stages in itertools.product((2, 7, 12, 40), (1, 2, 6), range(1, 9)):
        plan = plan_stages(patch, temporal, 3, stages, 128)
        assert len(plan) == stages
        assert math.prod(stage.time for stage in plan) == temporal
        assert math.prod(stage.side for stage in plan) == patch
        assert plan[-1].out_features == 128
        for before, after in itertools.pairwise(plan):
            assert after.in_features == before.out_features * after.time * after.side**2
    widths = [scale.channels for scale in candidate_scales(40, 2, 3)]
    assert widths == [3, 128, 320, 1216, 4800, 9600]


@pytest.mark.parametrize("sizes", [(1, 2, 3, 4), (40, 0, 3, 4), (40, 2, 0, 4), (40, 2, 3, 0)])
def test_plan_refuses_impossible_sizes(sizes):
    with pytest.raises(ValueError, match="the vision tower needs"):
        plan_stages(*sizes, 128)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("mel", "levels", "frames"), [(80, 16, 21), (4, 2, 1), (80, 16, 0)])
def test_audio_tower_equals_transformers(mel, levels, frames, dtype):
    config = InklingAudioConfig(n_mel_bins=mel, mel_vocab_size=levels, text_hidden_size=96)
    theirs = randomised(InklingAudioModel(config), dtype)
    ours = towers.AudioTower(AudioConfig(96, mel, levels, -7.0, 2.0, 1e-6), OPS)
    loaded(ours, theirs, {"embed_audio_tokens.embed_audio_tokens": "encoder", "norm": "final_norm"})
    generator = torch.Generator().manual_seed(mel)
    bins = torch.randint(0, levels, (frames, mel), generator=generator, dtype=torch.int32)
    with torch.no_grad():
        expected = theirs(bins[None]).last_hidden_state[0]
    assert ours(bins).shape == (frames, 96)
    if frames:
        # The order of summation differs; 80 terms of size 1 move by a few units of 1e-7.
        bound = 2e-6 if dtype == torch.float32 else 0.0
        assert (ours(bins) - expected).abs().max().item() <= bound


class Largest(TorchDispatchMode):
    """Records the size of the largest storage that any operation allocates."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in tensors((args, kwargs))}
        for tensor in tensors(result):
            if tensor.untyped_storage().data_ptr() not in known:
                self.numel = max(self.numel, tensor.numel())
        return result


def tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("frames", [100, 79_000])
def test_audio_memory_does_not_grow_with_the_mel_bins(frames, monkeypatch):
    monkeypatch.setattr(reference, "SUMMED_AT_ONCE", 1 << 18)
    width, largest = 32, {}
    for mel in (4, 80):
        bins = torch.randint(0, 16, (frames, mel), dtype=torch.int32)
        table = torch.randn(mel * 16, width)
        with Largest() as seen:
            out = reference.dmel_embed_norm(bins, table, torch.ones(width), 1e-6)
        assert out.shape == (frames, width)
        largest[mel] = seen.numel
    # The levels are widened to 64 bits piece by piece; all else is one row per frame.
    assert largest[80] <= max(frames * width, (1 << 18) // width * 80)


def test_dmel_sum_against_the_formula_in_float64():
    generator = torch.Generator().manual_seed(3)
    bins = torch.randint(0, 16, (9, 80), generator=generator)
    table = torch.randn(80 * 16, 64, generator=generator, dtype=torch.float64)
    weight = torch.randn(64, generator=generator, dtype=torch.float64)
    rows = torch.stack([sum(table[m * 16 + int(b)] for m, b in enumerate(frame)) for frame in bins])
    expected = rows / (rows.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    got = reference.dmel_embed_norm(bins, table, weight, 1e-6)
    assert (got - expected).abs().max() < 1e-13


def test_norm_gelu_against_the_formula_in_float64():
    x = torch.linspace(-4, 4, 3 * 64, dtype=torch.float64).reshape(3, 64)
    weight = torch.linspace(0.5, 1.5, 64, dtype=torch.float64)
    scaled = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    expected = scaled * (1 + torch.erf(scaled / math.sqrt(2))) / 2
    assert (reference.norm_gelu(x, weight, 1e-6) - expected).abs().max() < 1e-14
