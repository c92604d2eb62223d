"""Image patches and dMel levels against transformers' processors and the written-out rules.

transformers' image processor needs torchvision; its answers stand in tests/facts/image_pixels.json
(ci/record_images.py). Its audio extractor runs as it is.
"""

import io
import json
import math
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers.audio_utils import mel_filter_bank

from inkling_portable.model import preprocess
from inkling_portable.model.config import AudioConfig, VisionConfig
from inkling_portable.model.preprocess import (
    AudioSettings,
    ImageSettings,
    audio_settings,
    check_length,
    dmel_levels,
    image_patches,
    image_settings,
    mel_filters,
)
from tests.media import picture, ruled_pixels, tone, transformers_levels

FACTS = json.loads((Path(__file__).parents[1] / "facts" / "image_pixels.json").read_text())
VISION = VisionConfig(64, 40, 2, 3, 4, 1e-6)
AUDIO = AudioConfig(64, 80, 16, -7.0, 2.0, 1e-6)
AS_IS = ImageSettings(rescale_image_frac=1.0)


# --- images --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", FACTS["cases"], ids=lambda c: f"{c['height']}x{c['width']}")
def test_pixels_equal_transformers(case):
    image = Image.fromarray(picture(case["height"], case["width"]))
    got = image_patches(image, AS_IS)
    assert list(got.shape) == case["shape"]
    samples = got.flatten()[:: case["step"]].double()
    assert (samples - torch.tensor(case["samples"]).double()).abs().max() <= 5e-7
    assert got.double().sum().item() == pytest.approx(case["sum"], abs=2e-7 * got.numel())
    squares = got.double().square().sum().item()
    assert squares == pytest.approx(case["sum_of_squares"], rel=1e-6)


@pytest.mark.parametrize(("width", "height"), [(23, 50), (40, 40), (90, 61)])
@pytest.mark.parametrize("upscale", [False, True])
def test_each_pixel_lands_where_the_rule_says(width, height, upscale):
    pixels = picture(height, width)
    patches = image_patches(pixels, ImageSettings() if upscale else AS_IS)
    expected = ruled_pixels(pixels, 40, upscale)
    assert patches.shape == expected.shape
    assert np.abs(patches.double().numpy() - expected).max() < 5e-7
    # The corner is padding, as the spec prints it.
    assert patches[-1, 0, -1, -1].tolist() == pytest.approx(
        [-1.80686, -1.76710, -1.49444], abs=1e-5
    )


@pytest.mark.parametrize(
    ("height", "width", "frac", "resized", "tokens"),
    [
        (80, 80, 1.0, (80, 80), 6),
        (81, 79, 1.0, (81, 79), 6),
        (40, 40, 1.0, (40, 40), 2),
        (37, 123, 1.0, (37, 123), 4),
        (120, 160, 1.0, (120, 160), 15),
        (1, 1, 1.0, (1, 1), 1),
        (100, 60, 2.0, (200, 120), 20),
        (1500, 1000, 2.0, (2048, 1365), 1820),
        (3000, 20, 2.0, (3000, 20), 75),
        (1025, 513, 2.0, (2048, 1025), 1352),
        (1, 2000, 0.25, (1, 500), 13),
    ],
)
def test_resize_rule_and_token_counts(height, width, frac, resized, tokens):
    settings = ImageSettings(rescale_image_frac=frac)
    assert settings.resized(width, height) == resized[::-1]
    assert settings.tokens(width, height) == tokens
    assert image_patches(Image.new("RGB", (width, height)), settings).shape[0] == tokens


def test_resizing_is_pils_lanczos_on_eight_bits():
    image = Image.fromarray(picture(50, 31))
    again = image.resize((62, 100), resample=Image.Resampling.LANCZOS)
    assert torch.equal(image_patches(image, ImageSettings()), image_patches(again, AS_IS))


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1", "I", "F"])
def test_every_mode_is_converted_to_rgb(mode):
    image = Image.fromarray(picture(20, 30)).convert(mode)
    expected = image_patches(image.convert("RGB"), AS_IS)
    assert torch.equal(image_patches(image, AS_IS), expected)


@pytest.mark.parametrize("mode", ["I;16", "I;16B"])
def test_sixteen_bits_of_grey_keep_their_range(mode):
    """Every value, against fractions: the nearest of 256 steps from black to white."""
    values = np.arange(1 << 16, dtype=">u2" if mode == "I;16B" else "<u2").reshape(256, 256)
    image = Image.frombytes(mode, (256, 256), values.tobytes())
    nearest = [round(Fraction(v * 255, 65535)) for v in range(1 << 16)]
    grey = np.array(nearest, np.uint8).reshape(256, 256, 1).repeat(3, -1)
    assert torch.equal(image_patches(image, AS_IS), image_patches(grey, AS_IS))
    file = io.BytesIO()
    Image.frombytes("I;16", (256, 256), values.astype("<u2").tobytes()).save(file, "PNG")
    assert torch.equal(image_patches(Image.open(file), AS_IS), image_patches(grey, AS_IS))


def test_arrays_and_tensors_equal_pil_images():
    pixels = picture(45, 33)
    expected = image_patches(Image.fromarray(pixels), AS_IS)
    assert torch.equal(image_patches(pixels, AS_IS), expected)
    assert torch.equal(image_patches(torch.from_numpy(pixels), AS_IS), expected)
    assert image_patches(pixels, AS_IS, torch.bfloat16).equal(expected.bfloat16())


def test_other_patch_sizes():
    settings = ImageSettings(patch_size=8, temporal_patch_size=1, rescale_image_frac=1.0)
    patches = image_patches(picture(20, 16), settings)
    assert patches.shape == (9, 1, 8, 8, 3)
    assert torch.equal(patches[0, 0], image_patches(picture(8, 8), settings)[0, 0])


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (Image.new("RGB", (0, 5)), "found 0x5; send a non-empty image"),
        (np.zeros((0, 5, 3), np.uint8), r"found shape \(0, 5, 3\)"),
        (np.zeros((5, 5, 3), np.float32), "found float32 of shape"),
        (np.zeros((5, 5), np.uint8), r"found uint8 of shape \(5, 5\)"),
        (np.zeros((3, 5, 5), np.uint8), r"found uint8 of shape \(3, 5, 5\)"),
        (Image.new("I", (2, 2), 256), "between 0 and 255; found 256 to 256; scale it to 8 bits"),
        (Image.new("F", (2, 2), -0.5), "between 0 and 255; found -0.5 to -0.5; scale"),
        (Image.new("F", (2, 2), math.nan), "between 0 and 255; found nan"),
        ("picture.png", "found str"),
        (b"\x89PNG", "found bytes"),
        (None, "found NoneType"),
    ],
)
def test_images_that_are_none(image, message):
    with pytest.raises(ValueError, match=message):
        image_patches(image, ImageSettings())


def test_an_image_that_is_too_large_is_refused_before_it_is_resized(monkeypatch):
    monkeypatch.setattr(Image.Image, "resize", None)
    with pytest.raises(ValueError, match=r"at most 100 tokens; 1000x1000 pixels take 2550; send"):
        image_patches(Image.new("RGB", (1000, 1000)), ImageSettings(max_tokens=100))


def test_a_truncated_file_is_refused(tmp_path):
    path = tmp_path / "cut.png"
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[:4000])
    with pytest.raises(ValueError, match="needs intact data"), Image.open(path) as image:
        image_patches(image, ImageSettings())


def test_image_settings_follow_the_processor_file():
    assert image_settings(VISION, {}) == ImageSettings()
    given = {
        "size": {"height": 40, "width": 40},
        "rescale_image_frac": 1.0,
        "rescale_image_max_upscaled_long_edge": 512,
        "image_mean": [0.5, 0.5, 0.5],
    }
    wanted = ImageSettings(
        mean=(0.5, 0.5, 0.5), rescale_image_frac=1.0, rescale_image_max_upscaled_long_edge=512
    )
    assert image_settings(VISION, given) == wanted
    assert image_settings(VISION, {"image_processor": given}) == wanted
    # transformers' own default is null, which serving reads as "not said".
    assert image_settings(VISION, {"rescale_image_frac": None}) == ImageSettings()
    assert image_settings(VISION, {}, max_tokens=7, mean=None) == ImageSettings(max_tokens=7)
    with pytest.raises(ValueError, match="cuts images into 14x14 but vision_config into 40x40"):
        image_settings(VISION, {"size": {"height": 14, "width": 14}})
    for wrong in (0, -1.0, math.nan, math.inf, "2", True):
        with pytest.raises(ValueError, match="rescale_image_frac needs a positive finite number"):
            image_settings(VISION, {"rescale_image_frac": wrong})
    for wrong in (0, "2048"):
        with pytest.raises(ValueError, match="long_edge needs a positive number of pixels"):
            image_settings(VISION, {"rescale_image_max_upscaled_long_edge": wrong})
    for wrong in (0, 1.5, "9"):
        with pytest.raises(ValueError, match="max_image_tokens needs a whole number above 0"):
            image_settings(VISION, {}, max_tokens=wrong)
        with pytest.raises(ValueError, match="max_audio_tokens needs a whole number above 0"):
            audio_settings(AUDIO, {}, max_tokens=wrong)


# --- audio ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "frames"), [(800, 1), (801, 2), (16_000, 20), (12_345, 16), (1, 1), (16_001, 21)]
)
def test_levels_equal_transformers(samples, frames):
    got = dmel_levels(tone(samples), AudioSettings())
    expected = transformers_levels(tone(samples))
    assert got.dtype == torch.int32
    assert got.shape == expected.shape == (frames, 80)
    assert torch.equal(got, expected)
    assert AudioSettings().tokens(samples) == frames


def test_loud_and_silent_clips_equal_transformers():
    for wave in (np.zeros(4000, np.float32), np.ones(4000, np.float32), 1e4 * tone(4000)):
        assert torch.equal(dmel_levels(wave, AudioSettings()), transformers_levels(wave))
    assert int(dmel_levels(1e4 * tone(4000), AudioSettings()).max()) == 15


def test_long_clips_are_transformed_in_pieces(monkeypatch):
    wave = tone(40_000)
    expected = dmel_levels(wave, AudioSettings())
    monkeypatch.setattr(preprocess, "FRAMES_AT_ONCE", 7)
    assert torch.equal(dmel_levels(wave, AudioSettings()), expected)


@given(rate=st.sampled_from([8000, 16_000]), bins=st.sampled_from([4, 40, 80]))
def test_mel_filters_equal_transformers(rate, bins):
    n_fft = rate // 10
    expected = mel_filter_bank(
        num_frequency_bins=n_fft // 2 + 1,
        num_mel_filters=bins,
        min_frequency=0.0,
        max_frequency=rate / 2,
        sampling_rate=rate,
        norm="slaney",
        mel_scale="slaney",
    )
    got = mel_filters(rate, n_fft, bins).double().numpy()
    assert np.abs(got - expected.T).max() <= 1e-8


@pytest.mark.parametrize(("value", "level"), [(-4.5, 4), (-2.1, 8), (2.0, 15), (5.0, 15), (-9, 3)])
def test_levels_of_known_energies(value, level, monkeypatch):
    """With filters that pass one bin, a constant amplitude gives a known log energy.

    Magnitudes end at 1e-5, hence -9 comes out as -5.
    """
    settings = AudioSettings(mel_bins=1, hop_length=4, window_size=4, n_fft=4)
    monkeypatch.setattr(preprocess, "mel_filters", lambda *_: torch.tensor([[1.0, 0.0, 0.0]]))
    # The periodic Hann window of 4 samples sums to 2: amplitude a has a DC magnitude of 2a.
    wave = np.full(4, 10.0**value / 2)
    assert dmel_levels(wave, settings).tolist() == [[level]]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (np.zeros(0, np.float32), "needs at least one sample"),
        (np.array([0.0, np.nan]), "found NaN or infinity"),
        (np.array([0.0, np.inf]), "found NaN or infinity"),
        (np.zeros((2, 100), np.float32), r"found shape \(2, 100\)"),
        (np.array(1.0), r"found shape \(\)"),
        (np.zeros(100, np.int16), "found int16"),
        (torch.zeros(100, dtype=torch.int32), "found torch.int32"),
        (np.array(["a"], dtype=object), "found object"),
        ([0.0, 1.0], "found list"),
        (None, "found NoneType"),
    ],
)
def test_audio_that_is_none(samples, message):
    with pytest.raises(ValueError, match=message):
        dmel_levels(samples, AudioSettings())


def test_the_length_of_a_clip_is_known_before_it_is_resampled():
    """A gigabyte that 16 kHz would make of a thousand samples a minute is never made."""
    settings = AudioSettings(max_tokens=20)  # one second
    assert check_length(44_100, 44_100, settings) == check_length(8000, 8000, settings) == 20
    for samples, rate in [(46_305, 44_100), (2, 1), (10**9, 1)]:
        with pytest.raises(ValueError, match="audio may take at most 20 tokens"):
            check_length(samples, rate, settings)
    for rate in (0, -1, 2**31 - 1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="audio needs a rate above 0 and up to 768000 Hz"):
            check_length(1, rate, settings)


def test_a_clip_that_is_too_long_is_refused():
    limit = r"at most 10 tokens \(0.5 s\); this clip takes 11 \(0.55 s\); send a shorter one"
    with pytest.raises(ValueError, match=limit):
        dmel_levels(np.zeros(8001, np.float32), AudioSettings(max_tokens=10))


def test_audio_settings_follow_the_files():
    assert audio_settings(AUDIO, {}) == AudioSettings()
    own_range = AudioConfig(64, 80, 16, -6.0, 1.0, 1e-6)
    assert audio_settings(own_range, {}) == AudioSettings(low=-6.0, high=1.0)
    # In the Hugging Face dialect the processor file has the range.
    bare = AudioConfig(64, 80, 16, None, None, 1e-6)
    assert audio_settings(bare, {"dmel_min_value": -5.0}) == AudioSettings(low=-5.0)
    assert audio_settings(AUDIO, {}, max_tokens=9) == AudioSettings(max_tokens=9)
    extractor = {"sampling_rate": 8000, "audio_token_duration_s": 0.1}
    assert audio_settings(AUDIO, {"feature_extractor": extractor}) == AudioSettings(
        sampling_rate=8000, hop_length=800
    )
    for wrong, message in (
        ({"num_dmel_bins": 8}, "says num_dmel_bins 8 but audio_config 16"),
        ({"feature_extractor": {"feature_size": 64}}, "says feature_size 64 but audio_config 80"),
        ({"audio_token_duration_s": 0.0333}, "audio_token_duration_s needs to come to a whole"),
        ({"n_fft": 100}, "audio needs 0 < hop <= window <= n_fft"),
    ):
        with pytest.raises(ValueError, match=message):
            audio_settings(AUDIO, wrong)


def test_time_for_a_4k_photo():
    """150 ms of one core for 3840x2160 pixels; the bound is double, for a busy machine."""
    pixels = np.random.default_rng(0).integers(0, 256, (2160, 3840, 3), dtype=np.uint8)
    photo, settings = Image.fromarray(pixels), ImageSettings()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times = []
        for _ in range(5):
            started = time.process_time()
            image_patches(photo, settings)
            times.append(time.process_time() - started)
    finally:
        torch.set_num_threads(threads)
    assert min(times) <= 0.300
