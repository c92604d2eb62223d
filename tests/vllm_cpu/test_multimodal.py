"""Images and audio through vLLM's engine equal transformers fed the same pixels and levels."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from inkling_portable import plugin
from inkling_portable.commands.tiny import write_tiny
from inkling_portable.model import warm_up
from inkling_portable.model.multimodal import largest_square
from inkling_portable.model.preprocess import (
    AudioSettings,
    ImageSettings,
    dmel_levels,
    image_patches,
)
from inkling_portable.model.warm_up_steps import Bounds
from tests import hf_oracle, nursery
from tests.media import picture, ruled_pixels, tone, transformers_levels
from tests.vllm_cpu.conftest import SOFT_BOUND, Engine, dense, prompt, soften_head

PATCH = 16


@pytest.fixture(scope="module")
def omni(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("omni")
    write_tiny(folder, preset="omni", dtype="float32", force=True)
    soften_head(folder)
    return folder


class Prompt:
    """A prompt of text ids, pictures (uint8 arrays) and clips (float arrays), in order."""

    def __init__(self, folder: Path, *parts: list[int] | np.ndarray) -> None:
        config = json.loads((folder / "config.json").read_text())
        image, audio = ((config[f"{m}_bos_token_id"], config[f"{m}_token_id"])
                        for m in ("image", "audio"))  # fmt: skip
        self.ids: list[int] = []
        self.expanded: list[int] = []
        self.data: dict[str, list[Any]] = {}
        pixels: list[Tensor] = []
        levels: list[Tensor] = []
        for part in parts:
            if isinstance(part, list):
                self.ids += part
                self.expanded += part
            elif part.dtype == np.uint8:
                pixels.append(torch.from_numpy(ruled_pixels(part, PATCH, upscale=True)))
                self._add("image", Image.fromarray(part), *image, len(pixels[-1]))
            else:
                levels.append(transformers_levels(part))
                self._add("audio", part, *audio, len(levels[-1]))
        self.features: dict[str, Tensor] = {}
        if pixels:
            self.features["pixel_values"] = torch.cat(pixels).float()
        if levels:
            self.features["audio_input_ids"] = torch.cat(levels)[None]

    def _add(self, modality: str, item: Any, opener: int, slot: int, count: int) -> None:
        self.ids.append(opener)
        self.expanded += [opener] + [slot] * count
        self.data.setdefault(modality, []).append(item)

    @property
    def input(self) -> dict[str, Any]:
        return {"prompt_token_ids": list(self.ids), "multi_modal_data": self.data}


class Truth:
    """transformers in float64, and in float32 for what that costs, on a `Prompt`'s features."""

    def __init__(self, folder: Path) -> None:
        self.single, faults = hf_oracle.load(folder, torch.float32)
        assert not any(faults.values()), faults
        self.double, _ = hf_oracle.load(folder, torch.float64)
        self._known: dict[Prompt, tuple[Tensor, float]] = {}

    def logprobs(self, asked: Prompt) -> tuple[Tensor, float]:
        """[len(expanded), vocabulary] of the token after each one, and the bound on it."""
        if asked not in self._known:
            self._known[asked] = self._logprobs(asked)
        return self._known[asked]

    def _logprobs(self, asked: Prompt) -> tuple[Tensor, float]:
        double = {k: v.double() if v.is_floating_point() else v
                  for k, v in asked.features.items()}  # fmt: skip
        wanted = hf_oracle.logits(self.double, asked.expanded, **double).log_softmax(-1)
        single = hf_oracle.logits(self.single, asked.expanded, **asked.features).log_softmax(-1)
        return wanted, min(2 * (single - wanted).abs().max().item(), SOFT_BOUND)

    def check_next(self, found: Tensor, asked: Prompt) -> None:
        """Assert the log-probabilities [vocabulary] of the token after the prompt."""
        wanted, bound = self.logprobs(asked)
        assert (found - wanted[-1]).abs().max() <= bound


@pytest.fixture(scope="module")
def truth(omni: Path) -> Truth:
    return Truth(omni)


@pytest.fixture(scope="module")
def engines(omni: Path) -> Iterator[Callable[..., Engine]]:
    built: dict[str, Engine] = {}

    def get(**options: Any) -> Engine:
        key = repr(sorted(options.items()))
        if key not in built:
            built[key] = Engine(omni, **options)
        return built[key]

    yield get
    built.clear()


def run(engine: Engine, asked: list[Prompt], **sampling: Any) -> list[Any]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, ignore_eos=True, **sampling)
    return engine.llm.generate([a.input for a in asked], params, use_tqdm=False)


def next_logprobs(engine: Engine, asked: list[Prompt]) -> list[Tensor]:
    outputs = run(engine, asked, max_tokens=1, logprobs=-1)
    return [dense(out.outputs[0].logprobs)[0] for out in outputs]


@pytest.fixture(scope="module")
def cases(omni: Path) -> dict[str, Prompt]:
    """Every way of mixing: the 16-pixel patches of these pictures take 6 to 30 tokens each."""
    folder = omni
    a, b = picture(20, 27), picture(31, 45)
    clip, long_clip = tone(4_321), tone(30_000, seed=1)
    return {
        "image": Prompt(folder, prompt(7), a, prompt(9)),
        "image first": Prompt(folder, a, prompt(3)),
        "image last": Prompt(folder, prompt(5), b),
        "one pixel": Prompt(folder, prompt(4), picture(1, 1), prompt(4)),
        "audio": Prompt(folder, prompt(6), clip, prompt(5)),
        "image and audio": Prompt(folder, prompt(4), b, prompt(6), long_clip, prompt(5)),
        "audio and image": Prompt(folder, clip, prompt(2), a, prompt(2)),
        "two images": Prompt(folder, prompt(3), a, prompt(3), b, prompt(3)),
        "neighbours": Prompt(folder, prompt(3), a, a, clip, clip, b, prompt(3)),
    }


CUTS = {
    "one shot": {"block_size": 16},
    # Smaller than any picture: openers, slots and text all fall on borders of chunks.
    "chunks of 5": {"block_size": 16, "max_num_batched_tokens": 5, "max_num_seqs": 5},
    "chunks of 24, pages of 128": {"block_size": 128, "max_num_batched_tokens": 24,
                                   "max_num_seqs": 8},
}  # fmt: skip


@pytest.mark.parametrize("cut", CUTS)
def test_prompt_logprobs(
    engines: Callable[..., Engine], truth: Truth, cases: dict[str, Prompt], cut: str
) -> None:
    # One after the other, so that chunks fall where the sizes say.
    for name, asked in cases.items():
        (out,) = run(engines(**CUTS[cut]), [asked], max_tokens=1, prompt_logprobs=-1, logprobs=-1)
        assert list(out.prompt_token_ids) == asked.expanded
        wanted, bound = truth.logprobs(asked)
        found = torch.cat((dense(out.prompt_logprobs[1:]), dense(out.outputs[0].logprobs)))
        assert found.shape == wanted.shape
        assert (found - wanted).abs().max() <= bound, name


def test_mixed_requests_at_once(
    engines: Callable[..., Engine], truth: Truth, cases: dict[str, Prompt], omni: Path
) -> None:
    asked = [*cases.values(), Prompt(omni, prompt(40))]
    engine = engines(block_size=16)
    engine.forget_prefixes()
    for found, one in zip(next_logprobs(engine, asked), asked, strict=True):
        truth.check_next(found, one)


def test_greedy_continuation(
    engines: Callable[..., Engine], truth: Truth, cases: dict[str, Prompt]
) -> None:
    asked = cases["image and audio"]
    (out,) = run(engines(block_size=16), [asked], max_tokens=5)
    for token in out.outputs[0].token_ids:
        assert token == int(truth.logprobs(asked)[0][-1].argmax())
        asked = copy(asked)
        asked.expanded = [*asked.expanded, token]


def test_prefix_hits_know_the_picture(
    engines: Callable[..., Engine], truth: Truth, omni: Path
) -> None:
    engine = engines(block_size=16)
    engine.forget_prefixes()
    first, second = picture(60, 90), picture(60, 90)[::-1].copy()

    def hits(image: np.ndarray, tail: list[int]) -> int:
        asked = Prompt(omni, prompt(10), image, prompt(30), tail)
        (out,) = run(engine, [asked], max_tokens=1, logprobs=-1)
        truth.check_next(dense(out.outputs[0].logprobs)[0], asked)
        return out.num_cached_tokens

    assert hits(first, [1, 2, 3]) == 0
    # The same ids with another picture must not hit behind its opener.
    assert hits(second, [1, 2, 3]) == 0
    assert hits(first, [4, 5]) >= 96


# Behind 10 ids and an opener, 96 patches or 38 frames, in which whole pages of 16 end.
HITS = {"picture": picture(60, 90), "clip": tone(30_000, seed=1)}


@pytest.mark.parametrize("chunk", [1024, 24])
@pytest.mark.parametrize("kind", HITS)
def test_prefix_hit_that_ends_within(
    engines: Callable[..., Engine], truth: Truth, omni: Path, kind: str, chunk: int
) -> None:
    """What is left of it comes from its own rows, and the convolutions go on where they were."""
    engine = engines(block_size=16, max_num_batched_tokens=chunk, max_num_seqs=8)
    engine.forget_prefixes()
    alone, more = (Prompt(omni, prompt(10), HITS[kind], tail) for tail in ([], prompt(5)))
    for asked in (alone, more):
        (out,) = run(engine, [asked], max_tokens=1, logprobs=-1)
        truth.check_next(dense(out.outputs[0].logprobs)[0], asked)
    assert 11 < out.num_cached_tokens < len(alone.expanded)


def test_a_repeated_picture_is_processed_once(
    engines: Callable[..., Engine], truth: Truth, omni: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from inkling_portable.model import multimodal

    calls: list[Any] = []
    real = multimodal.image_patches
    monkeypatch.setattr(
        multimodal, "image_patches", lambda *args: calls.append(args) or real(*args)
    )
    engine = engines(block_size=16)
    image = picture(33, 47)
    for tail in ([1], [2]):
        asked = Prompt(omni, prompt(3), image, prompt(2), tail)
        (found,) = next_logprobs(engine, [asked])
        truth.check_next(found, asked)
    assert len(calls) == 1


def test_a_request_may_set_the_scale(
    engines: Callable[..., Engine], truth: Truth, omni: Path
) -> None:
    asked = Prompt(omni, prompt(3), picture(40, 50), prompt(3))
    pixels = torch.from_numpy(ruled_pixels(picture(40, 50), PATCH, upscale=False)).float()
    slots = asked.expanded[4:-3]
    asked.expanded = asked.expanded[:4] + slots[: len(pixels)] + asked.expanded[-3:]
    asked.features = {"pixel_values": pixels}
    engine = engines(block_size=16)
    out = engine.llm.generate(
        [{**asked.input, "mm_processor_kwargs": {"rescale_image_frac": 1.0}}],
        use_tqdm=False,
        sampling_params=_one_token(),
    )[0]
    assert list(out.prompt_token_ids) == asked.expanded
    found = dense(out.outputs[0].logprobs)[0]
    truth.check_next(found, asked)


def _one_token() -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=1, logprobs=-1)


NOISE = np.full(1_000, np.nan, dtype=np.float32)
BAD = {
    "no pixels": ({"image": Image.new("RGB", (0, 4))}, "at least one pixel; found 0x4"),
    "too many patches": ({"image": Image.new("RGB", (900, 900))}, "at most 900 tokens; 900x900"),
    "float image": ({"image": np.zeros((4, 4, 3), np.float32)}, "found float32 of shape"),
    "no samples": ({"audio": np.zeros(0, np.float32)}, "at least one sample"),
    "NaN samples": ({"audio": NOISE}, "found NaN or infinity"),
    "long clip": ({"audio": np.zeros(800 * 51, np.float32)}, "at most 50 tokens"),
    "two channels": ({"audio": np.zeros((2, 900), np.float32)}, r"found shape \(2, 900\)"),
    "whole numbers": ({"audio": np.zeros(900, np.int16)}, "found int16"),
    "second image": ({"image": [Image.new("RGB", (4, 4))] * 2}, "found 1 for 2"),
    "wrong modality": ({"audio": tone(900)}, "found 0 for 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_a_sentence_and_harms_nobody(
    engines: Callable[..., Engine], truth: Truth, cases: dict[str, Prompt], omni: Path, name: str
) -> None:
    limits = {"max_image_tokens": 900, "max_audio_tokens": 50}
    engine = engines(block_size=16, mm_processor_kwargs=limits)
    data, message = BAD[name]
    opener = Prompt(omni, picture(1, 1)) if "image" in data else Prompt(omni, tone(1))
    ids = prompt(3) if name == "wrong modality" else opener.ids
    with pytest.raises(ValueError, match=message):
        engine.llm.generate([{"prompt_token_ids": ids, "multi_modal_data": data}],
                            use_tqdm=False, sampling_params=_one_token())  # fmt: skip
    asked = cases["image"]
    (found,) = next_logprobs(engine, [asked])
    truth.check_next(found, asked)


def test_unknown_options_are_refused(
    engines: Callable[..., Engine], cases: dict[str, Prompt], omni: Path
) -> None:
    asked = cases["image"]
    wrong = {**asked.input, "mm_processor_kwargs": {"max_image_tokens": 10**9}}
    with pytest.raises(ValueError, match=r"takes rescale_image_frac, .*; found max_image_tokens"):
        engines(block_size=16).llm.generate([wrong], use_tqdm=False, sampling_params=_one_token())
    with pytest.raises(ValueError, match="found max_pixels; leave the rest out"):
        Engine(omni, mm_processor_kwargs={"max_pixels": 1})


def processor_of(folder: Path, **options: Any) -> Any:
    from vllm.config import ModelConfig
    from vllm.multimodal import MULTIMODAL_REGISTRY

    plugin.register()  # as vLLM does before it reads a config
    config = ModelConfig(str(folder), dtype="float32", max_model_len=1024, **options)
    return MULTIMODAL_REGISTRY.create_processor(config)


def edited(folder: Path, into: Path, edit: Callable[[dict[str, Any]], Any]) -> Path:
    """A copy of a checkpoint's small files with another config.json."""
    for file in folder.glob("*.json"):
        (into / file.name).write_text(file.read_text())
    config = json.loads((folder / "config.json").read_text())
    edit(config)
    (into / "config.json").write_text(json.dumps(config))
    return into


def test_ids_come_from_the_config_or_the_tokenizer(omni: Path, tmp_path: Path) -> None:
    given = processor_of(omni).info
    config = json.loads((omni / "config.json").read_text())
    assert given.openers["image"] == config["image_bos_token_id"]
    assert given.slots["audio"] == config["audio_token_id"]
    names = ("image_bos_token_id", "image_token_id", "audio_bos_token_id", "audio_token_id")
    bare = edited(omni, tmp_path, lambda config: [config.pop(name) for name in names])
    found = processor_of(bare).info
    assert (found.openers, found.slots) == (given.openers, given.slots)


def test_media_follow_the_towers(omni: Path, tmp_path: Path) -> None:
    def remove(config: dict[str, Any]) -> None:
        config["audio_config"]["decoder_dmodel"] = None

    info = processor_of(edited(omni, tmp_path, remove)).info
    assert info.get_supported_mm_limits() == {"image": None}
    assert set(info.get_mm_max_tokens_per_item(1000, {"image": 1})) == {"image"}


@pytest.mark.parametrize("limit", [1, 2, 50, 900, 1024])
def test_profiled_inputs_are_the_largest_allowed(omni: Path, limit: int) -> None:
    options = {"max_image_tokens": limit, "max_audio_tokens": limit}
    processor = processor_of(omni, mm_processor_kwargs=options)
    ids = processor.get_dummy_mm_inputs({"image": 1, "audio": 1})["prompt_token_ids"]
    slots = processor.info.slots
    assert ids.count(slots["audio"]) == limit
    # No square takes exactly as many patches; the next larger one would take too many.
    found = ids.count(slots["image"])
    settings = processor.info.image_settings()
    side = largest_square(settings, limit)
    assert found == settings.tokens(side, side) <= limit or side == 1
    assert settings.tokens(side + 1, side + 1) > limit


def test_hugging_face_naming(
    truth: Truth, cases: dict[str, Prompt], omni: Path, tmp_path: Path
) -> None:
    truth.single.save_pretrained(tmp_path, save_original_format=False)
    assert "model.vision_tower.final_norm.weight" in load_file(tmp_path / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json", "processor_config.json"):
        shutil.copy(omni / name, tmp_path)
    asked = cases["image and audio"]
    (found,) = next_logprobs(Engine(tmp_path), [asked])
    truth.check_next(found, asked)


def test_media_can_be_switched_off(omni: Path, truth: Truth) -> None:
    engine = Engine(omni, limit_mm_per_prompt={"image": 0, "audio": 0})
    words = Prompt(omni, prompt(20))
    (found,) = next_logprobs(engine, [words])
    truth.check_next(found, words)
    with pytest.raises(ValueError, match="text-only"):
        run(engine, [Prompt(omni, picture(4, 4))], max_tokens=1)


def test_our_class_serves(engines: Callable[..., Engine]) -> None:
    engine = engines(block_size=16)
    assert engine.on_model(lambda model: type(model).__module__) == (
        "inkling_portable.model.multimodal"
    )


def vllms_own() -> dict[str, Any]:
    """Patches of pictures by their sizes and levels of clips by theirs, as vLLM makes them."""
    from vllm.transformers_utils.processors.inkling import (
        InklingAudioFeatureExtractor,
        InklingImageProcessor,
    )

    images = {size: InklingImageProcessor(patch_size=40).preprocess(Image.fromarray(picture(*size)))
              for size in [(1, 1), (30, 45), (80, 40), (37, 123)]}  # fmt: skip
    clips = {n: InklingAudioFeatureExtractor()([tone(n)]) for n in (1, 800, 801, 12_345)}
    return {
        "images": {k: v["vision_patches_bthwc"].float().numpy() for k, v in images.items()},
        "clips": {k: v["dmel_bins"][0].int().numpy() for k, v in clips.items()},
    }


def test_preprocessing_equals_vllms_own() -> None:
    # In a process of its own: it imports numba, and an engine that starts after that fails in
    # vLLM 0.32 while it looks through all modules for kernels.
    theirs = nursery.call(vllms_own)
    for (height, width), patches in theirs["images"].items():
        ours = image_patches(Image.fromarray(picture(height, width)), ImageSettings())
        assert ours.shape == patches.shape
        # Theirs is rounded to bfloat16, values are below 2.7.
        assert (ours - torch.from_numpy(patches)).abs().max() <= 2**-7
    for samples, levels in theirs["clips"].items():
        assert torch.equal(dmel_levels(tone(samples), AudioSettings()), torch.from_numpy(levels))


def test_towers_run_before_the_server_is_ready(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one row, with rows that 16 divides and with others: Triton tells those apart."""
    seen: dict[str, set[int]] = {}

    def watched(model: Any) -> None:
        for tower in (model.visual, model.audio):
            real = tower.forward

            def noted(rows: Tensor, real: Any = real, name: str = type(tower).__name__) -> Tensor:
                found: Tensor = real(rows)
                seen.setdefault(name, set()).add(len(found))
                return found

            monkeypatch.setattr(tower, "forward", noted)
        warm_up.warm_up(model, model.vllm_config, Bounds(17, 2, 1, 64))

    engines().on_model(watched)
    assert seen == {"VisionTower": {1, 2, 16}, "AudioTower": {1, 2, 16}}
