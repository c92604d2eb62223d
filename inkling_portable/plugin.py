"""What vLLM calls in every process it starts: names our classes, imports none of them.

The three architectures keep their in-tree names, so vLLM's own lists of architectures go on
applying. `INKLING_PORTABLE=off` leaves the in-tree classes in place.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from typing import Any

logger = logging.getLogger("vllm.inkling_portable")

OLDEST, NEWEST = (0, 26), (0, 33)

ARCHITECTURES = {
    "InklingForCausalLM": "inkling_portable.model.inkling:InklingForCausalLM",
    "InklingForConditionalGeneration": (
        "inkling_portable.model.multimodal:InklingForConditionalGeneration"
    ),
    "InklingMTPModel": "inkling_portable.model.mtp:InklingMTP",
}


class VersionError(RuntimeError):
    """A vLLM outside the range that this plugin was checked against."""


def register() -> None:
    """Make vLLM serve Inkling with this package. May be called any number of times.

    Raises VersionError outside vLLM 0.26 to 0.33: the plugin reaches into interfaces that change
    between versions, and a wrong guess could be a wrong number. Raises SelectionError for an
    INKLING_PORTABLE that is not understood.
    """
    asked = os.environ.get("INKLING_PORTABLE", "").strip()
    if asked == "off":
        return
    import vllm

    check_version(vllm.__version__)
    if asked:
        from inkling_portable.registry import parse_overrides

        parse_overrides(None, asked)
    from vllm.model_executor.models import ModelRegistry

    for name, code in ARCHITECTURES.items():
        ModelRegistry.register_model(name, code)
    _register_configs()
    _register_quantisation()
    _register_drafting()
    _register_chat()
    _register_adapter_answers()
    _register_media_answers()
    # vLLM refuses adapters for any architecture called Inkling unless this says that the in-tree
    # model's fused collective is off. Our collectives choose by themselves whether an adapter's
    # partial sums suit them, so LAMPORT_RS_SCONV, which that collective really reads, stays free.
    os.environ.setdefault("INKLING_MULTIMEM_AR", "0")
    logger.debug("inkling_portable registered %s", ", ".join(ARCHITECTURES))


def check_version(version: str) -> None:
    """Raise VersionError unless `version` ("0.32.0+cpu") lies in the supported range."""
    parts = version.split("+")[0].split(".")
    try:
        found = (int(parts[0]), int(parts[1]))
    except (IndexError, ValueError):
        found = (0, 0)
    if not OLDEST <= found <= NEWEST:
        raise VersionError(
            f"inkling_portable needs vLLM 0.{OLDEST[1]} to 0.{NEWEST[1]}; found {version}; install "
            "a version in that range, or set INKLING_PORTABLE=off to serve the in-tree model"
        )


def _register_configs() -> None:
    from vllm.transformers_utils import config

    from inkling_portable.model import hf_configs

    config._CONFIG_REGISTRY.update(
        inkling_mm_model=hf_configs.InklingMMConfig,
        inkling_model=hf_configs.InklingTextConfig,
        inkling_text=hf_configs.InklingHfTextConfig,
    )


class ServingDefaults:
    """What vLLM asks for by architecture when a server starts."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Nothing: the model reads its config itself."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Refuse what cannot be honoured; have grammars apply from the first token on.

        Ours hold the reasoning too. vLLM's other way waits until it has ended, which for Inkling is
        when an answer has been opened: too late to require a call or a format.
        """
        from inkling_portable.model.hf_configs import describe
        from inkling_portable.model.unsupported import check

        config = describe(vllm_config.model_config.hf_config)
        check(vllm_config, config, vllm_config.parallel_config.tensor_parallel_size)
        vllm_config.structured_outputs_config.enable_in_reasoning = True


def _register_chat() -> None:
    """Our renderer and parsers under the names that the in-tree ones have."""
    from vllm.model_executor.models import config
    from vllm.reasoning import ReasoningParserManager
    from vllm.renderers import registry
    from vllm.tool_parsers import ToolParserManager

    ours = "inkling_portable.chat.serving"
    registry.RENDERER_REGISTRY.renderers["inkling"] = (ours, "PortableRenderer")
    ReasoningParserManager.register_lazy_module("inkling", ours, "InklingReasoningParser")
    ToolParserManager.register_lazy_module("inkling", ours, "InklingToolParser")
    # A parser that was already loaded would be found before ours.
    ReasoningParserManager.reasoning_parsers.pop("inkling", None)
    ToolParserManager.tool_parsers.pop("inkling", None)
    names = ("InklingForCausalLM", "InklingForConditionalGeneration")
    config.MODELS_CONFIG_MAP.update(dict.fromkeys(names, ServingDefaults))


OWN_QUANTISATION = "inkling_portable"


def own_quantisation() -> Any:
    """A config of the class that `_register_quantisation` makes."""
    _register_quantisation()
    from vllm.model_executor.layers.quantization import get_quantization_config

    return get_quantization_config(OWN_QUANTISATION)()


def _register_quantisation() -> None:
    """On a CPU, have vLLM take the block of a quantised Inkling as ours, in any precision.

    vLLM's own classes for ModelOpt and Quark refuse float32. There no layer of vLLM's reads
    quantised weights for us, so its class has nothing to do; elsewhere vLLM's own stay.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    import torch
    from vllm.model_executor.layers import quantization
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    if OWN_QUANTISATION in quantization.QUANTIZATION_METHODS:
        return

    class OwnQuantisation(QuantizationConfig):
        """Says only that a block is there; `model/weight_format.py` reads it."""

        @classmethod
        def override_quantization_method(
            cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
        ) -> Any:
            if not str(getattr(hf_config, "model_type", "")).startswith("inkling"):
                return None
            stored = str(hf_quant_cfg.get("quant_method", ""))
            # modelopt_fp4 is one of vLLM's names for what ModelOpt calls modelopt.
            if user_quant not in (None, OWN_QUANTISATION) and not user_quant.startswith(stored):
                raise ValueError(
                    f"the checkpoint's experts are stored by {stored}; found --quantization "
                    f"{user_quant}; leave it out"
                )
            return OWN_QUANTISATION

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
            return cls()

        def get_name(self) -> Any:
            return OWN_QUANTISATION

        def get_supported_act_dtypes(self) -> list[torch.dtype]:
            return [torch.float32, torch.bfloat16, torch.float16]

        @classmethod
        def get_min_capability(cls) -> int:
            return 0

        @staticmethod
        def get_config_filenames() -> list[str]:
            return []

        def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> None:
            return None

        def __reduce__(self) -> Any:
            return own_quantisation, ()  # to the engine's processes

    quantization.register_quantization_config(OWN_QUANTISATION)(OwnQuantisation)


def _register_drafting() -> None:
    """Have vLLM's V1 runner ask us which proposer drafts for Inkling, see `install_proposer`.

    The runner puts this question, and nothing else does, right before it builds a proposer; the
    model classes are imported later.
    """
    from vllm.config import SpeculativeConfig

    asked = SpeculativeConfig.use_step3p5_mtp
    if hasattr(asked, "__wrapped__"):
        return

    @functools.wraps(asked)
    def use_step3p5_mtp(self: Any) -> bool:
        draft = getattr(self.draft_model_config, "hf_config", None)
        if self.method != "mtp" or getattr(draft, "model_type", None) != "inkling_mtp":
            return bool(asked(self))
        from inkling_portable.model.engine import install_proposer

        return install_proposer()

    SpeculativeConfig.use_step3p5_mtp = use_step3p5_mtp


def _register_adapter_answers() -> None:
    """Have vLLM's HTTP server answer 400, and not 500, to an adapter that Inkling refuses.

    Its endpoint calls every failure of the engine to take an adapter in an internal error. Only a
    server has the endpoint, and it has imported it when it asks for plugins.
    """
    if "vllm.entrypoints.openai.models.serving" not in sys.modules:
        return
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels

    load = OpenAIServingModels.load_lora_adapter
    if hasattr(load, "__wrapped__"):
        return
    refused = "Call to add_lora method failed: "

    @functools.wraps(load)
    async def load_lora_adapter(self: Any, *args: Any, **kwargs: Any) -> Any:
        answer = await load(self, *args, **kwargs)
        error = getattr(answer, "error", None)
        ours = set(ARCHITECTURES).intersection(self.model_config.architectures)
        if ours and error is not None and error.message.startswith(refused):
            error.message = error.message.removeprefix(refused)
            if "out of memory" not in error.message:
                error.code, error.type = 400, "BadRequestError"
        return answer

    OpenAIServingModels.load_lora_adapter = load_lora_adapter


def _register_media_answers() -> None:
    """Have vLLM's HTTP server answer 400, and not 500, to media that it cannot or may not read.

    It passes on what libsndfile raises at a file of a known kind that it cannot read, what Pillow
    raises at a picture of very many pixels, and its own words on files that it may not open and on
    data URLs without base64; none is a ValueError. As above, only a server reads media, and has
    imported how.
    """
    if "vllm.multimodal.media.audio" not in sys.modules:
        return
    from vllm.multimodal.media.audio import AudioMediaIO
    from vllm.multimodal.media.connector import MediaConnector
    from vllm.multimodal.media.image import ImageMediaIO

    def with_sentence(load: Any) -> Any:
        @functools.wraps(load)
        def decode(*args: Any, **kwargs: Any) -> Any:
            if load.__name__ == "load_bytes" and not args[-1]:
                raise ValueError("media need a whole file; found no bytes; send it again")
            try:
                return load(*args, **kwargs)
            except Exception as error:
                kind = f"{type(error).__module__}.{type(error).__name__}"
                if kind.startswith("soundfile.") and isinstance(error, RuntimeError):
                    raise ValueError(f"audio needs a whole file; {error}; send it again") from error
                if kind == "PIL.Image.DecompressionBombError":
                    raise ValueError(f"an image needs fewer pixels; {error}; scale it") from error
                if load.__name__ == "_load_file_url" and kind == "builtins.RuntimeError":
                    raise ValueError(
                        "files are not read, since the server was started without "
                        "--allowed-local-media-path; send a data: URL"
                    ) from error
                if kind == "builtins.NotImplementedError":
                    raise ValueError(
                        "a data: URL needs base64, as in data:image/png;base64,..."
                    ) from error
                raise

        return decode

    if not hasattr(AudioMediaIO.load_bytes, "__wrapped__"):
        AudioMediaIO.load_bytes = with_sentence(AudioMediaIO.load_bytes)
        AudioMediaIO.load_file = with_sentence(AudioMediaIO.load_file)
        ImageMediaIO.load_bytes = with_sentence(ImageMediaIO.load_bytes)
        MediaConnector._load_data_url = with_sentence(MediaConnector._load_data_url)
        MediaConnector._load_file_url = with_sentence(MediaConnector._load_file_url)
