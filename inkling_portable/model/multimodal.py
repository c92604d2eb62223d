"""The multimodal entry: the text model, the towers, and vLLM's view of images and audio.

A prompt holds one opener token per picture or clip; the processor puts one slot token behind it for
every patch or frame, and the towers' rows replace the slots' embeddings. Token ids come from the
config or the tokenizer, never from constants, so small vocabularies work.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from inkling_portable.model import checkpoint
from inkling_portable.model.config import InklingConfig
from inkling_portable.model.encoder_graphs import GraphedImages, joined
from inkling_portable.model.engine import (
    MULTIMODAL_REGISTRY,
    BaseDummyInputsBuilder,
    BaseProcessingInfo,
    MediaProcessor,
    MultiModalDataParser,
    MultiModalFieldConfig,
    PromptReplacement,
    PromptUpdateDetails,
    SupportsMultiModal,
    VllmConfig,
    WeightsMapper,
    audio_resampler,
    processor_file,
)
from inkling_portable.model.hf_configs import describe
from inkling_portable.model.inkling import InklingForCausalLM
from inkling_portable.model.preprocess import (
    AudioSettings,
    ImageSettings,
    audio_settings,
    check_length,
    dmel_levels,
    image_patches,
    image_settings,
)
from inkling_portable.model.towers import AudioTower, VisionTower
from inkling_portable.model.warm_up_steps import Call

OPENERS = {"image": "<|content_image|>", "audio": "<|content_audio_input|>"}
SLOTS = {"image": "<|unused_200054|>", "audio": "<|unused_200053|>"}

REQUEST_OPTIONS = ("rescale_image_frac", "rescale_image_max_upscaled_long_edge")
"""What a request may set in mm_processor_kwargs; limits belong to the server."""

SERVER_OPTIONS = (*REQUEST_OPTIONS, "max_image_tokens", "max_audio_tokens")
"""What --mm-processor-kwargs may set."""


class ProcessingInfo(BaseProcessingInfo):
    """What the checkpoint and the server's options say about media."""

    @cached_property
    def described(self) -> InklingConfig:
        return describe(self.get_hf_config())

    @cached_property
    def _file(self) -> dict[str, Any]:
        return processor_file(self.ctx.model_config)

    @cached_property
    def _server_options(self) -> Mapping[str, Any]:
        options = self.ctx.get_mm_config().mm_processor_kwargs or {}
        return _known(options, SERVER_OPTIONS, "--mm-processor-kwargs")

    def image_settings(self, options: Mapping[str, Any] | None = None) -> ImageSettings | None:
        """None without a vision tower; `options` are a request's."""
        if self.described.vision is None:
            return None
        request = _known(options or {}, REQUEST_OPTIONS, "mm_processor_kwargs of a request")
        said = {**self._server_options, **request}
        chosen = {name: said.get(name) for name in REQUEST_OPTIONS}
        limit = self._server_options.get("max_image_tokens")
        return image_settings(self.described.vision, self._file, max_tokens=limit, **chosen)

    @cached_property
    def audio_settings(self) -> AudioSettings | None:
        """None without an audio tower."""
        if self.described.audio is None:
            return None
        limit = self._server_options.get("max_audio_tokens")
        return audio_settings(self.described.audio, self._file, max_tokens=limit)

    @cached_property
    def openers(self) -> dict[str, int]:
        """Token id that announces an item, by modality."""
        config = self.described
        return self._ids(OPENERS, {"image": config.image_opener, "audio": config.audio_opener})

    @cached_property
    def slots(self) -> dict[str, int]:
        """Token id whose embedding a tower's row replaces, by modality."""
        config = self.described
        return self._ids(SLOTS, {"image": config.image_token, "audio": config.audio_token})

    def _ids(self, names: Mapping[str, str], given: Mapping[str, int | None]) -> dict[str, int]:
        vocabulary = self.get_tokenizer().get_vocab()
        ids: dict[str, int] = {}
        for modality in self.get_supported_mm_limits():
            name, said = names[modality], given[modality]
            found = said if said is not None else vocabulary.get(name)
            if found is None:
                raise ValueError(
                    f"{modality} input needs the token {name}; the tokenizer has none and the "
                    "config names no id for it; add the token or the id"
                )
            ids[modality] = int(found)
        return ids

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        towers = {"image": self.described.vision, "audio": self.described.audio}
        return {modality: None for modality, tower in towers.items() if tower is not None}

    def get_mm_max_tokens_per_item(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> Mapping[str, int]:
        settings = {"image": self.image_settings(), "audio": self.audio_settings}
        return {name: min(s.max_tokens, seq_len) for name, s in settings.items() if s is not None}

    def get_data_parser(self) -> MultiModalDataParser:
        audio = self.audio_settings
        parser = DataParser(
            target_sr=None if audio is None else audio.sampling_rate,
            target_channels=1,
            audio_resample_method=audio_resampler(),
            expected_hidden_size=self._get_expected_hidden_size(),
        )
        parser.settings = audio
        return parser


class DataParser(MultiModalDataParser):
    """vLLM's parser, which resamples clips that come with a rate and averages their channels."""

    settings: AudioSettings | None = None

    def _parse_audio_data(self, data: Any) -> Any:
        if getattr(data, "ndim", 1) != 1:
            # vLLM would take the first axis for a batch, whatever was meant.
            raise ValueError(
                f"audio needs one channel of shape [samples]; found shape {tuple(data.shape)}; "
                "average the channels, and send several clips as a list"
            )
        for clip in [data] if isinstance(data, tuple) else data if isinstance(data, list) else []:
            if isinstance(clip, tuple) and self.settings is not None:
                wave, rate = clip
                if rate is not None:
                    check_length(max(wave.shape, default=0), rate, self.settings)
        return super()._parse_audio_data(data)


class DummyInputs(BaseDummyInputsBuilder[ProcessingInfo]):
    """The largest inputs allowed, for vLLM's memory profile."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return "".join(text * mm_counts.get(modality, 0) for modality, text in OPENERS.items())

    def get_dummy_mm_data(
        self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Mapping[str, Any]
    ) -> dict[str, Any]:
        data: dict[str, Any] = {}
        most = self.info.get_mm_max_tokens_per_item(seq_len, mm_counts)
        images, audio = self.info.image_settings(), self.info.audio_settings
        if images is not None and mm_counts.get("image"):
            side = largest_square(images, most["image"])
            data["image"] = self._get_dummy_images(
                width=side, height=side, num_images=mm_counts["image"],
                overrides=mm_options.get("image"),
            )  # fmt: skip
        if audio is not None and mm_counts.get("audio"):
            data["audio"] = self._get_dummy_audios(
                length=most["audio"] * audio.hop_length, num_audios=mm_counts["audio"],
                overrides=mm_options.get("audio"),
            )  # fmt: skip
        return data


class Processor(MediaProcessor):
    """Decoded media to tower inputs, openers to openers with slots."""

    info: ProcessingInfo

    def check_openers(self, ids: list[int], counts: Mapping[str, int]) -> None:
        for modality, opener in self.info.openers.items():
            found, wanted = ids.count(opener), counts.get(modality, 0)
            if found != wanted:
                raise ValueError(
                    f"a prompt needs one {OPENERS[modality]} for each {modality} item; found "
                    f"{found} for {wanted}; make the two agree"
                )

    def media_tensors(
        self, media: Mapping[str, list[Any]], options: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """Patches and levels of all items one after the other, and how many each item has."""
        fields: dict[str, Tensor] = {}
        images, audio = self.info.image_settings(options), self.info.audio_settings
        dtype = self.info.ctx.model_config.dtype
        if images is not None and (pictures := list(media.get("images") or ())):
            # The time slots of a still picture are equal: one travels.
            patches = [image_patches(picture, images, dtype)[:, :1] for picture in pictures]
            fields["pixel_values"] = torch.cat(patches)
            fields["num_patches"] = torch.tensor([len(part) for part in patches])
        if audio is not None and (clips := list(media.get("audios") or ())):
            levels = [dmel_levels(clip, audio) for clip in clips]
            fields["audio_levels"] = torch.cat(levels)
            fields["num_frames"] = torch.tensor([len(part) for part in levels])
        return fields

    def _get_mm_fields_config(
        self, hf_inputs: Mapping[str, Any], hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        none = torch.empty(0, dtype=torch.int64)
        patches, frames = hf_inputs.get("num_patches", none), hf_inputs.get("num_frames", none)
        return {
            "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", patches),
            "num_patches": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
            "audio_levels": MultiModalFieldConfig.flat_from_sizes("audio", frames),
            "num_frames": MultiModalFieldConfig.batched("audio", keep_on_cpu=True),
        }

    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Mapping[str, Any], out_mm_kwargs: Any
    ) -> Sequence[PromptReplacement]:
        counts = out_mm_kwargs.get_data()
        names = {"image": "num_patches", "audio": "num_frames"}
        return [
            self._replacement(modality, counts[name])
            for modality, name in names.items()
            if counts.get(name) is not None
        ]

    def _replacement(self, modality: str, sizes: Any) -> PromptReplacement:
        opener, slot = self.info.openers[modality], self.info.slots[modality]

        def expand(item: int) -> PromptUpdateDetails:
            return PromptUpdateDetails.select_token_id([opener] + [slot] * int(sizes[item]), slot)

        return PromptReplacement(modality=modality, target=[opener], replacement=expand)


@MULTIMODAL_REGISTRY.register_processor(Processor, info=ProcessingInfo, dummy_inputs=DummyInputs)
class InklingForConditionalGeneration(InklingForCausalLM, SupportsMultiModal, GraphedImages):
    """The text model with the towers that the checkpoint has, on the first pipeline stage."""

    hf_to_vllm_mapper = InklingForCausalLM.hf_to_vllm_mapper | WeightsMapper(
        orig_to_new_prefix={"model.visual.": "visual.", "model.audio.": "audio."}
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config, ops = self.settings.config, self.settings.ops()
        self.visual = self.audio = None
        if self.model.first and config.vision is not None:
            self.visual = VisionTower(config.vision, ops)
        if self.model.first and config.audio is not None:
            self.audio = AudioTower(config.audio, ops)

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        """Text of one item in a prompt. Raises ValueError for other media."""
        if modality in OPENERS:
            return OPENERS[modality]
        raise ValueError(f"Inkling reads images and audio; found {modality}; send frames as images")

    def tower_shapes(self) -> dict[str, checkpoint.Shape]:
        return {
            name: tuple(parameter.shape)
            for name, parameter in self.named_parameters()
            if name.startswith(("visual.", "audio."))
        }

    def get_language_model(self) -> torch.nn.Module:
        """This module itself: the towers stand beside the decoder, not around it."""
        return self

    def warm_up_calls(self) -> list[Call]:
        return [*super().warm_up_calls(), Call(self._run_towers, name="the towers")]

    def _run_towers(self, ids: Tensor, positions: Tensor, rows: Tensor) -> None:
        """Triton's forms of a number of rows. The engine's own profile runs one tower, or none."""
        count = rows.shape[0]
        if count not in (1, 2, 16):
            return
        if self.visual is not None:
            size, weight = self.visual.config.patch_size, self.visual.final_norm.weight
            self.visual(weight.new_zeros(count, 1, size, size, self.visual.config.channels))
        if self.audio is not None:
            self.audio(ids.new_zeros(count, self.audio.config.mel_bins, dtype=torch.int32))

    def embed_multimodal(self, **fields: Any) -> tuple[Tensor, ...]:
        """One `[slots, H]` per item, in the order of the items of the one modality given."""
        if fields.get("pixel_values") is not None:
            assert self.visual is not None
            weight = self.visual.final_norm.weight
            rows, sizes = joined(fields["pixel_values"], fields.get("num_patches"))
            return self.visual(rows.to(weight.device, weight.dtype)).split(sizes)
        if fields.get("audio_levels") is not None:
            assert self.audio is not None
            rows, sizes = joined(fields["audio_levels"], fields.get("num_frames"))
            return self.audio(rows.to(self.audio.final_norm.weight.device)).split(sizes)
        return ()

    def embed_input_ids(
        self,
        input_ids: Tensor,
        multimodal_embeddings: Sequence[Tensor] | None = None,
        *,
        is_multimodal: Tensor | None = None,
    ) -> Tensor:
        """ids [T] -> [T, H]; rows where `is_multimodal` [T] come from the towers, in order."""
        rows = self.model.embed_input_ids(input_ids)
        if multimodal_embeddings is None or len(multimodal_embeddings) == 0:
            return rows
        assert is_multimodal is not None
        rows[is_multimodal] = torch.cat(tuple(multimodal_embeddings)).to(rows.dtype)
        return rows


def largest_square(settings: ImageSettings, tokens: int) -> int:
    """Side of the largest square picture that takes at most `tokens`, at least 1."""
    sides = range(1, settings.patch_size * (tokens + 1))
    return max(1, bisect_right(sides, tokens, key=lambda side: settings.tokens(side, side)))


def _known(options: Mapping[str, Any], names: Sequence[str], where: str) -> Mapping[str, Any]:
    unknown = sorted(set(options) - set(names))
    if unknown:
        raise ValueError(
            f"{where} takes {', '.join(names)}; found {', '.join(unknown)}; leave the rest out"
        )
    return options
