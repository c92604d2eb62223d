"""From decoded media to what the towers read: image patches and dMel audio levels.

Takes decoded data only (a PIL image or an array, a waveform at the model's rate); fetching and
decoding stay with the engine and its allow lists. Images are resized with PIL, whose Lanczos filter
the checkpoints were trained with (torchvision's differs). Every refusal is a `ValueError`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from inkling_portable.model.config import AudioConfig, VisionConfig

PAD_PIXEL = -1.0
"""Value outside the picture, on the 0..255 scale, before normalisation."""

FRAMES_AT_ONCE = 1024
"""Audio frames transformed together, which bounds the memory that a long clip takes."""

POWER_FLOOR = 1e-10
"""Smallest power and smallest mel energy, so that silence has a logarithm."""


@dataclass(frozen=True)
class ImageSettings:
    """How a picture becomes patches; lengths in pixels, `max_tokens` in patches per picture."""

    patch_size: int = 40
    temporal_patch_size: int = 2
    mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)
    rescale_image_frac: float = 2.0
    rescale_image_max_upscaled_long_edge: int | None = 2048
    max_tokens: int = 16_384

    def __post_init__(self) -> None:
        frac, cap = self.rescale_image_frac, self.rescale_image_max_upscaled_long_edge
        if not _is_positive(frac):
            raise ValueError(
                f"rescale_image_frac needs a positive finite number; found {frac!r}; "
                "give 1.0 to keep images at their size"
            )
        if cap is not None and not _is_positive(cap):
            raise ValueError(
                "rescale_image_max_upscaled_long_edge needs a positive number of pixels; found "
                f"{cap!r}; leave it out for 2048"
            )
        _check_limit("max_image_tokens", self.max_tokens)
        if any(value <= 0 for value in self.std) or len(self.mean) != 3 or len(self.std) != 3:
            raise ValueError(
                "image_mean and image_std need three values each, std above 0; found "
                f"{self.mean} and {self.std}; correct the processor file"
            )

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Size (width, height) that a picture of this size is resampled to."""
        long_edge = max(width, height)
        target = long_edge * self.rescale_image_frac
        cap = self.rescale_image_max_upscaled_long_edge
        if cap is not None:
            target = min(target, max(cap, long_edge))
        ratio = target / long_edge
        if ratio == 1.0:
            return width, height
        return _half_up(width * ratio), _half_up(height * ratio)

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of patches of an already resized picture.

        A width that the patch divides still gets one more column, all padding: the checkpoints
        were trained with it.
        """
        return -(-height // self.patch_size), width // self.patch_size + 1

    def tokens(self, width: int, height: int) -> int:
        """Placeholder tokens for a picture of this size, before resizing."""
        rows, columns = self.grid(*self.resized(width, height))
        return rows * columns


@dataclass(frozen=True)
class AudioSettings:
    """How a waveform becomes dMel levels; lengths in samples, `max_tokens` in frames per clip."""

    sampling_rate: int = 16_000
    hop_length: int = 800
    window_size: int = 1600
    n_fft: int = 1600
    mel_bins: int = 80
    levels: int = 16
    low: float = -7.0
    high: float = 2.0
    max_tokens: int = 12_000

    def __post_init__(self) -> None:
        if not 0 < self.hop_length <= self.window_size <= self.n_fft:
            raise ValueError(
                "audio needs 0 < hop <= window <= n_fft; found "
                f"{self.hop_length}, {self.window_size} and {self.n_fft}; "
                "correct the processor file"
            )
        if self.mel_bins < 1 or self.levels < 2 or not self.low < self.high:
            raise ValueError(
                "dMel needs at least one bin, two levels and a range that rises; found "
                f"{self.mel_bins}, {self.levels} and {self.low}..{self.high}; correct audio_config"
            )
        _check_limit("max_audio_tokens", self.max_tokens)

    def tokens(self, samples: int) -> int:
        """Placeholder tokens for a clip of this many samples."""
        return -(-samples // self.hop_length)


def image_settings(
    vision: VisionConfig, processor: Mapping[str, Any], **limits: Any
) -> ImageSettings:
    """Settings from a vision config and the checkpoint's processor file.

    Args:
        vision: the checkpoint's vision tower.
        processor: contents of processor_config.json or preprocessor_config.json, or {}.
        limits: fields of `ImageSettings` that a server sets, None meaning "not said".

    Raises:
        ValueError: the files contradict each other, or a value is out of range.
    """
    given = processor.get("image_processor", processor)
    patch, size = vision.patch_size, given.get("size")
    if isinstance(size, Mapping) and "height" in size:
        size = size.get("height"), size.get("width")
        if size != (patch, patch):
            raise ValueError(
                f"the processor file cuts images into {size[0]}x{size[1]} but vision_config into "
                f"{patch}x{patch}; make the two agree"
            )
    chosen = {
        "mean": given.get("image_mean"),
        "std": given.get("image_std"),
        "rescale_image_frac": given.get("rescale_image_frac"),
        "rescale_image_max_upscaled_long_edge": given.get("rescale_image_max_upscaled_long_edge"),
    }
    settings = ImageSettings(patch, vision.temporal_patch_size)
    return _with(_with(settings, chosen), limits)


def audio_settings(
    audio: AudioConfig, processor: Mapping[str, Any], **limits: Any
) -> AudioSettings:
    """Settings from an audio config and the checkpoint's processor file.

    Args:
        audio: the checkpoint's audio tower.
        processor: contents of processor_config.json or preprocessor_config.json, or {}.
        limits: fields of `AudioSettings` that a server sets, None meaning "not said".

    Raises:
        ValueError: the files contradict each other, or a value is out of range.
    """
    given = processor.get("feature_extractor", processor)
    bins, levels = audio.mel_bins, audio.mel_levels
    for name, ours, theirs in (
        ("feature_size", bins, given.get("feature_size")),
        ("num_dmel_bins", levels, processor.get("num_dmel_bins")),
    ):
        if theirs is not None and theirs != ours:
            raise ValueError(
                f"the processor file says {name} {theirs} but audio_config {ours}; "
                "make the two agree"
            )
    rate = int(given.get("sampling_rate", AudioSettings.sampling_rate))
    hop = _whole(given.get("audio_token_duration_s", 0.05) * rate, "audio_token_duration_s")
    window = _whole(given.get("window_size_multiplier", 2.0) * hop, "window_size_multiplier")
    low = _first(processor.get("dmel_min_value"), audio.min_value, AudioSettings.low)
    high = _first(processor.get("dmel_max_value"), audio.max_value, AudioSettings.high)
    settings = AudioSettings(
        rate, hop, window, int(given.get("n_fft") or window), bins, levels, float(low), float(high)
    )
    return _with(settings, limits)


def image_patches(
    image: Any, settings: ImageSettings, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Normalised patches of one picture, row by row.

    Args:
        image: a PIL image, or uint8 [height, width, 3] as an array or tensor.

    Returns:
        `[tokens, time, patch, patch, 3]` of `dtype`; the time slots are views of one picture.

    Raises:
        ValueError: wrong type, no pixels, undecodable, or more than `settings.max_tokens` patches.
    """
    picture = _picture(image)
    width, height = picture.size
    if width < 1 or height < 1:
        raise ValueError(
            f"an image needs at least one pixel; found {width}x{height}; send a non-empty image"
        )
    size, count = settings.resized(width, height), settings.tokens(width, height)
    if count > settings.max_tokens:
        raise ValueError(
            f"an image may take at most {settings.max_tokens} tokens; {width}x{height} pixels take "
            f"{count}; send a smaller image or raise max_image_tokens in --mm-processor-kwargs"
        )
    try:
        picture = _eight_bits(picture).convert("RGB")
    except (OSError, SyntaxError) as error:
        raise ValueError(
            f"an image needs intact data; decoding failed with {error}; send the file again"
        ) from error
    if picture.size != size:
        picture = picture.resize(size, resample=Image.Resampling.LANCZOS)
    pixels = np.asarray(picture)
    patch, (rows, columns) = settings.patch_size, settings.grid(*size)
    # A row of patches at a time, for the float32 copy of a large picture would be gigabytes, and
    # flat, for broadcasting over three channels costs numpy as much as the arithmetic.
    line, wide = columns * patch, 3 * size[0]
    mean, std = (np.tile(np.array(x, np.float32), line) for x in (settings.mean, settings.std))
    out = torch.empty(rows, columns, patch, patch, 3, dtype=torch.float32)
    cells = out.numpy()
    band = np.empty((patch, 3 * line), dtype=np.float32)
    flat = pixels.reshape(size[1], wide)
    for row in range(rows):
        part = flat[row * patch : (row + 1) * patch]
        band[: len(part), :wide] = part
        band[:, wide:] = band[len(part) :] = PAD_PIXEL
        band /= 255
        band -= mean
        band /= std
        cells[row] = band.reshape(patch, columns, patch, 3).swapaxes(0, 1)
    still = out.to(dtype).reshape(rows * columns, 1, patch, patch, 3)
    return still.expand(-1, settings.temporal_patch_size, -1, -1, -1)


MOST_HZ = 768_000
"""The highest rate in use for audio; resampling from a much higher one takes memory for itself."""


def check_length(samples: int, rate: float, settings: AudioSettings) -> int:
    """Tokens of a clip of `samples` at `rate` Hz, known before it is resampled.

    A few bytes that call themselves one sample a second would become gigabytes. Raises ValueError
    for a clip that is too long, and for a rate that none has.
    """
    if not 0 < rate <= MOST_HZ:
        raise ValueError(
            f"audio needs a rate above 0 and up to {MOST_HZ} Hz; found {rate}; resample the clip"
        )
    count = settings.tokens(int(samples * settings.sampling_rate / rate))
    if count > settings.max_tokens:
        limit = settings.max_tokens
        seconds = settings.hop_length / settings.sampling_rate
        raise ValueError(
            f"audio may take at most {limit} tokens ({limit * seconds:g} s); this clip takes "
            f"{count} ({count * seconds:g} s); send a shorter one or raise max_audio_tokens in "
            "--mm-processor-kwargs"
        )
    return count


def dmel_levels(samples: Any, settings: AudioSettings) -> Tensor:
    """dMel levels of one clip: the log energy of each mel bin, as one of a few levels.

    Args:
        samples: floating-point mono waveform [n] at `settings.sampling_rate`, n >= 1; a tensor
            is read on its own device, and its levels stay there.

    Returns:
        int32 `[ceil(n / hop), mel_bins]`, values in [0, levels).

    Raises:
        ValueError: wrong type or rank, no samples, NaN or infinity, or a clip that is too long.
    """
    wave = _waveform(samples)
    check_length(wave.numel(), settings.sampling_rate, settings)
    if not bool(torch.isfinite(wave).all()):
        raise ValueError("audio needs finite samples; found NaN or infinity; repair the recording")
    return _levels(wave, settings)


def _levels(wave: Tensor, settings: AudioSettings) -> Tensor:
    """Levels of a checked clip, on its device; a CUDA graph can hold this part."""
    count = settings.tokens(wave.numel())
    before = settings.n_fft - settings.hop_length
    after = count * settings.hop_length - wave.numel()
    wave = torch.nn.functional.pad(wave, (before, after))
    frames = wave.unfold(0, settings.n_fft, settings.hop_length)
    filters, centres, window = _audio_tables(settings, wave.device)
    levels = torch.empty(count, settings.mel_bins, dtype=torch.int32, device=wave.device)
    for start in range(0, count, FRAMES_AT_ONCE):
        part = frames[start : start + FRAMES_AT_ONCE]
        power = torch.view_as_real(torch.fft.rfft(part * window)).square().sum(-1)
        magnitude = power.clamp_min(POWER_FLOOR).sqrt()
        energy = (filters @ magnitude.T).clamp_min(POWER_FLOOR).log10().T
        energy = energy.clamp(settings.low, settings.high)
        nearest = (energy.unsqueeze(-1) - centres).abs().argmin(dim=-1)
        levels[start : start + FRAMES_AT_ONCE] = nearest
    return levels


@lru_cache(maxsize=8)
def _audio_tables(settings: AudioSettings, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Mel filters, centres of the levels and the window of `settings`, on `device`."""
    filters = mel_filters(settings.sampling_rate, settings.n_fft, settings.mel_bins)
    centres = torch.linspace(settings.low, settings.high, settings.levels, dtype=torch.float64)
    window = _window(settings.window_size, settings.n_fft)
    return filters.to(device), centres.float().to(device), window.to(device)


@lru_cache(maxsize=8)
def mel_filters(sampling_rate: int, n_fft: int, mel_bins: int) -> Tensor:
    """Triangular filters on Slaney's mel scale with unit area: float32 [mel_bins, n_fft/2 + 1]."""
    top = _hertz_to_mel(sampling_rate / 2)
    corners = np.array([_mel_to_hertz(m) for m in np.linspace(0.0, top, mel_bins + 2)])
    bins = np.linspace(0.0, sampling_rate / 2, n_fft // 2 + 1)
    left, centre, right = corners[:-2, None], corners[1:-1, None], corners[2:, None]
    rising, falling = (bins - left) / (centre - left), (right - bins) / (right - centre)
    triangles = np.maximum(0.0, np.minimum(rising, falling))
    return torch.from_numpy((triangles * 2.0 / (right - left)).astype(np.float32))


# Slaney's scale: linear up to 1 kHz (15 mel), then 27 mel for each factor of 6.4.
_LINEAR_HERTZ_PER_MEL = 200.0 / 3.0
_CORNER_HERTZ = 1000.0
_CORNER_MEL = _CORNER_HERTZ / _LINEAR_HERTZ_PER_MEL
_LOG_STEP = math.log(6.4) / 27.0


def _hertz_to_mel(hertz: float) -> float:
    if hertz < _CORNER_HERTZ:
        return hertz / _LINEAR_HERTZ_PER_MEL
    return _CORNER_MEL + math.log(hertz / _CORNER_HERTZ) / _LOG_STEP


def _mel_to_hertz(mel: float) -> float:
    if mel < _CORNER_MEL:
        return mel * _LINEAR_HERTZ_PER_MEL
    return _CORNER_HERTZ * math.exp(_LOG_STEP * (mel - _CORNER_MEL))


@lru_cache(maxsize=8)
def _window(size: int, n_fft: int) -> Tensor:
    """Periodic Hann window [n_fft], centred in it when shorter."""
    before = (n_fft - size) // 2
    window = torch.hann_window(size, periodic=True, dtype=torch.float32)
    return torch.nn.functional.pad(window, (before, n_fft - size - before))


def _picture(image: Any) -> Image.Image:
    """A PIL image of what the engine hands over; arrays must be uint8 [height, width, 3]."""
    if isinstance(image, Image.Image):
        return image
    if isinstance(image, Tensor):
        image = image.cpu().numpy()
    if not isinstance(image, np.ndarray):
        found = type(image).__name__
    elif image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3:
        if image.size:
            return Image.fromarray(np.ascontiguousarray(image))
        raise ValueError(
            f"an image needs at least one pixel; found shape {image.shape}; send a non-empty image"
        )
    else:
        found = f"{image.dtype} of shape {image.shape}"
    raise ValueError(
        f"an image needs to be a PIL image or uint8 [height, width, 3]; found {found}; "
        "decode or convert it first"
    )


def _eight_bits(picture: Image.Image) -> Image.Image:
    """The picture itself, or one of 16-bit grey with its range 0..65535 put to 0..255.

    PIL's own conversion clips at 255, as it does for whole and real numbers of 32 bits ("I", "F"),
    whose range is not known: those are refused when they need it.
    """
    if picture.mode.startswith("I;16"):
        wide = np.asarray(picture).astype(np.uint32)
        return Image.fromarray(((wide + 128) // 257).astype(np.uint8))  # to the nearest, v / 257
    if picture.mode in ("I", "F"):
        values = np.asarray(picture)
        low, high = values.min(), values.max()
        if not 0 <= low <= high <= 255:
            raise ValueError(
                f"an image of 32-bit values needs them between 0 and 255; found {low:g} to "
                f"{high:g}; scale it to 8 bits first"
            )
    return picture


def _waveform(samples: Any) -> Tensor:
    """Float32 [n] of what the engine hands over, of the right type and rank."""
    if isinstance(samples, np.ndarray) and samples.dtype.kind == "f":
        wave = torch.from_numpy(np.array(samples, dtype=np.float32))
    elif isinstance(samples, Tensor) and samples.is_floating_point():
        wave = samples.detach().float()
    else:
        found = getattr(samples, "dtype", type(samples).__name__)
        raise ValueError(
            f"audio needs floating-point samples between -1 and 1; found {found}; "
            "decode it, or divide integer samples by their full scale"
        )
    if wave.dim() != 1:
        raise ValueError(
            f"audio needs one channel of shape [samples]; found shape {tuple(wave.shape)}; "
            "average the channels and send clips one by one"
        )
    if wave.numel() == 0:
        raise ValueError("audio needs at least one sample; found none; send a non-empty clip")
    return wave


def _with(settings: Any, chosen: Mapping[str, Any]) -> Any:
    """`settings` with every field that `chosen` names and does not leave None; lists as tuples."""
    names = {field.name for field in fields(settings)}
    said = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in chosen.items()
        if name in names and value is not None
    }
    return replace(settings, **said)


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value > 0


def _check_limit(name: str, value: Any) -> None:
    if not isinstance(value, int) or not _is_positive(value):
        raise ValueError(f"{name} needs a whole number above 0; found {value!r}; correct it")


def _half_up(length: float) -> int:
    return max(1, math.floor(length + 0.5))


def _whole(samples: float, name: str) -> int:
    if abs(samples - round(samples)) > 1e-6 or round(samples) < 1:
        raise ValueError(
            f"{name} needs to come to a whole number of samples; found {samples:g}; "
            "correct the processor file"
        )
    return round(samples)


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)
