"""The engine as the model sees it: the one file that knows vLLM's versions (0.26 to 0.33).

Model files import vLLM's names from here under one spelling. A bridge is chosen by what is
present, never by a version number, and says with which version it can go. (`plugin.py` speaks to
vLLM's registries by itself, because importing this file costs what importing layers costs.)
"""

from __future__ import annotations

import functools
import os
from abc import abstractmethod
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed import (
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    get_tp_group,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers import fused_moe
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models import interfaces
from vllm.model_executor.models.interfaces import (
    SupportsEncoderCudaGraph,
    SupportsLoRA,
    SupportsMultiModal,
    SupportsPP,
)
from vllm.model_executor.models.utils import (
    WeightsMapper,
    _merge_multimodal_embeddings,
    make_empty_intermediate_tensors_factory,
    make_layers,
    maybe_prefix,
)
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFieldConfig
from vllm.multimodal.parse import MultiModalDataParser
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    PromptReplacement,
    PromptUpdateDetails,
)
from vllm.platforms import current_platform
from vllm.sequence import IntermediateTensors
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict
from vllm.utils.multi_stream_utils import maybe_execute_in_parallel
from vllm.utils.torch_utils import aux_stream, kv_cache_dtype_str_to_dtype
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from vllm.v1.worker.encoder_cudagraph_defs import (
    EncoderCudaGraphCaptureInputs,
    EncoderCudaGraphConfig,
    EncoderCudaGraphReplayBuffers,
    EncoderItemSpec,
)

__all__ = [
    "MULTIMODAL_REGISTRY",
    "AfterLoading",
    "AttentionCGSupport",
    "BaseDummyInputsBuilder",
    "BaseProcessingInfo",
    "CacheBackend",
    "CacheLayer",
    "ColumnParallelLinear",
    "CommonAttentionMetadata",
    "EncoderCudaGraphCaptureInputs",
    "EncoderCudaGraphConfig",
    "EncoderCudaGraphReplayBuffers",
    "EncoderItemSpec",
    "FullAttentionSpec",
    "IntermediateTensors",
    "KVCacheSpec",
    "LogitsProcessor",
    "MediaProcessor",
    "MergedColumnParallelLinear",
    "MetadataBuilder",
    "MultiModalDataParser",
    "MultiModalFieldConfig",
    "ParallelLMHead",
    "PromptReplacement",
    "PromptUpdateDetails",
    "QuantizationConfig",
    "ReplicatedLinear",
    "RowParallelLinear",
    "SlidingWindowSpec",
    "SupportsEncoderCudaGraph",
    "SupportsLoRA",
    "SupportsMultiModal",
    "SupportsMultiModalEmbeddings",
    "SupportsPP",
    "UnquantizedLinearMethod",
    "VllmConfig",
    "WeightsMapper",
    "all_gather",
    "all_reduce",
    "audio_resampler",
    "build_routed_experts",
    "cache_dtype",
    "checkpoint_folder",
    "cpu_group",
    "eager_break",
    "expert_parallel_size",
    "expert_shard",
    "fp8_dtype",
    "gather_from_ranks",
    "get_current_vllm_config",
    "get_pp_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size",
    "install_proposer",
    "kept_window",
    "logger",
    "make_empty_intermediate_tensors_factory",
    "make_layers",
    "maybe_prefix",
    "merge_multimodal",
    "most_rows",
    "on_accelerator",
    "processor_file",
    "receive_on_cpu",
    "set_forward_context",
    "step_metadata",
    "token_scores",
    "tp_group_name",
]

# vLLM configures handlers for loggers below "vllm" only.
logger = init_logger("vllm.inkling_portable")

F = TypeVar("F", bound=Callable[..., Any])

# Drafts that are given tower embeddings carry this marker. Goes with vLLM 0.26, which has none.
SupportsMultiModalEmbeddings: type = getattr(interfaces, "SupportsMultiModalEmbeddings", object)


def _no_break(function: F) -> F:
    return function


try:
    # CUDA graphs are captured in pieces around a decorated call, which must write into an
    # argument.
    from vllm.compilation.breakable_cudagraph import eager_break_during_capture as eager_break
except ImportError:  # every version in range has it on accelerators; a CPU build may drop it
    eager_break = _no_break


all_gather = tensor_model_parallel_all_gather
all_reduce = tensor_model_parallel_all_reduce


def on_accelerator() -> bool:
    """Whether weights live on a GPU (CUDA or ROCm)."""
    return bool(current_platform.is_cuda_alike())


BESIDE_TO = -1
"""Rows of a step whose sinks run beside the routed experts: none, it gains nothing on an H200."""


@functools.cache
def _fork_and_join() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(), torch.cuda.Event()


def side_by_side(rows: int, first: Callable[[], Any], second: Callable[[], Any]) -> tuple[Any, Any]:
    """(first(), second()): on two streams of a CUDA device for up to BESIDE_TO rows.

    vLLM's way with its shared experts, and its stream; one after the other in captures that break.
    """
    stream = aux_stream() if rows <= BESIDE_TO and current_platform.is_cuda() else None
    if stream is None:
        return first(), second()
    both: tuple[Any, Any] = maybe_execute_in_parallel(first, second, *_fork_and_join(), stream)
    return both


def token_scores() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """What scores tokens [n, k] by logits [n, ids] for requests with logprobs, if it is a kernel.

    Triton compiles it for every power of two of k; vLLM's own warm-up asks for two of them.
    """
    if not on_accelerator() or find_spec("vllm.v1.worker.gpu.sample.logprob") is None:
        return None
    from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

    score: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = compute_token_logprobs
    return score


def step_metadata() -> dict[str, Any] | None:
    """Metadata of this step by layer prefix; None in profiling and dummy runs without caches."""
    found = get_forward_context().attn_metadata
    return found if isinstance(found, dict) else None


def tp_group_name() -> str:
    """Name of the tensor-parallel process group for functional collectives; "" for one rank."""
    if get_tensor_model_parallel_world_size() == 1:
        return ""
    name: str = get_tp_group().device_group.group_name
    return name


def gather_from_ranks(value: Any) -> list[Any]:
    """One picklable value from every tensor-parallel rank, in rank order."""
    group = get_tp_group()
    found: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(found, value, group=group.cpu_group)
    return found


def cpu_group() -> torch.distributed.ProcessGroup:
    """The tensor-parallel ranks over gloo, for words and not for rows."""
    return get_tp_group().cpu_group


def receive_on_cpu() -> None:
    """Let pipeline stages behind the first one receive rows on a CPU. May be called again.

    vLLM makes the buffers for that in a warm-up which its CPU runner skips for models that are not
    compiled, and then insists on them (seen in 0.32).
    """
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    receive = CPUModelRunner.sync_and_gather_intermediate_tensors
    if getattr(receive, "makes_buffers", False):
        return

    def with_buffers(stage: Any, *args: Any, **kwargs: Any) -> IntermediateTensors:
        if stage.intermediate_tensors is None:
            stage.intermediate_tensors = stage.model.make_empty_intermediate_tensors(
                batch_size=stage.max_num_tokens, dtype=stage.model_config.dtype,
                device=stage.device,
            )  # fmt: skip
        return receive(stage, *args, **kwargs)

    with_buffers.makes_buffers = True  # type: ignore[attr-defined]
    CPUModelRunner.sync_and_gather_intermediate_tensors = with_buffers


def merge_multimodal(rows: torch.Tensor, tower_rows: Any, slots: torch.Tensor) -> torch.Tensor:
    """Text rows [T, H] with those at `slots` [T] (bool) replaced by tower rows, in order."""
    return _merge_multimodal_embeddings(
        inputs_embeds=rows, multimodal_embeddings=tower_rows, is_multimodal=slots
    )


# --- caches ---------------------------------------------------------------------------------------


class CacheBackend(AttentionBackend):
    """What vLLM's planner asks of a cache whose reader is an op of ours, not an attention impl."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16, torch.float32]
    # Content of one (head, token) cell: keys and values, so twice the head size, unless a backend
    # packs everything into the head size.
    cell_factor: ClassVar[int] = 2

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("this cache is read by an op, there is no attention impl")

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        # Ops that cannot give it refuse, so a server that starts has it.
        return True

    # The three methods below go with vLLM 0.26; later planners derive views from the spec.

    @classmethod
    def get_kv_cache_shape(
        cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:  # fmt: skip
        return (num_blocks, num_kv_heads, block_size, cls.cell_factor * head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        # Blocks outermost and tokens before heads, in memory.
        return (1, 0, 3, 2, 4) if include_num_layers_dimension else (0, 2, 1, 3)

    @classmethod
    def indexes_kv_by_block_stride(cls) -> bool:
        return True


class MetadataBuilder(AttentionMetadataBuilder):
    """Base of our builders: batches of one query length can be captured in CUDA graphs."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self, kv_cache_spec: KVCacheSpec, layer_names: list[str], vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.rows = most_rows(vllm_config)
        # The layers served by this builder, which know the ops that were chosen for them.
        context = vllm_config.compilation_config.static_forward_context
        self.layers = [context[name] for name in layer_names]

    def table(self, step: CommonAttentionMetadata) -> torch.Tensor:
        """The block table [B, P]; ValueError for lengths beyond P pages: no kernel looks."""
        pages, cache = step.block_table_tensor, self.layers[0].kv_cache
        if cache.numel() and step.max_seq_len > pages.shape[1] * cache.shape[2]:
            raise ValueError(f"{self.layers[0].prefix} needs a block table for {step.max_seq_len} "
                             f"tokens; found {pages.shape[1]} columns of {cache.shape[2]}; lower "
                             "--max-model-len")  # fmt: skip
        return pages


def most_rows(vllm_config: VllmConfig) -> int:
    """Upper bound on the padded rows of one step, drafts included."""
    scheduler = vllm_config.scheduler_config
    captured = vllm_config.compilation_config.max_cudagraph_capture_size or 0
    rows = max(scheduler.max_num_batched_tokens, captured)
    spec = vllm_config.speculative_config
    if spec is not None:
        # A drafting step may prepend up to one row per draft to every request.
        rows += scheduler.max_num_seqs * (spec.num_speculative_tokens or 0)
    return rows


def cache_dtype(vllm_config: VllmConfig) -> torch.dtype:
    """Element type of a bound cache of keys and values (`--kv-cache-dtype`): bytes for FP8."""
    found: torch.dtype = kv_cache_dtype_str_to_dtype(
        vllm_config.cache_config.cache_dtype, vllm_config.model_config
    )
    return found


def fp8_dtype() -> torch.dtype:
    """What the bytes of an FP8 cache are on this platform: e4m3, or e4m3fnuz on gfx942."""
    found: torch.dtype = current_platform.fp8_dtype()
    return found


class CacheLayer(nn.Module, AttentionLayerBase):
    """A layer that owns a paged cache. Subclasses implement `get_kv_cache_spec` and `backend`.

    vLLM assigns the bound cache, a view [blocks, heads, block, cell] with strides that are not in
    logical order, to `kv_cache` (through `bind_kv_cache` from 0.28 on, directly before).
    """

    backend: ClassVar[type[CacheBackend]]

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix
        self.when_bound: Callable[[], None] = lambda: None
        self._bound = torch.empty(0)
        context = get_current_vllm_config().compilation_config.static_forward_context
        if prefix in context:
            raise ValueError(f"two layers are called {prefix!r}; each cache needs its own prefix")
        context[prefix] = self

    @property
    def kv_cache(self) -> torch.Tensor:
        return self._bound

    @kv_cache.setter
    def kv_cache(self, cache: torch.Tensor) -> None:
        self._bound = cache
        if cache.numel():
            self.on_bound(cache)
            self.when_bound()

    def on_bound(self, cache: torch.Tensor) -> None:
        """Called with every non-empty cache that vLLM binds: derive views here, once."""
        raise NotImplementedError

    def get_attn_backend(self) -> type[AttentionBackend]:
        return self.backend


# --- experts --------------------------------------------------------------------------------------

# Its name in vLLM 0.26 was FusedMoE; goes with 0.26.
_fused_moe = getattr(fused_moe, "FusedMoEFactory", None) or fused_moe.FusedMoE


def build_routed_experts(
    *, experts: int, top_k: int, hidden: int, width: int, select: Callable[..., Any],
    quant_config: QuantizationConfig | None, prefix: str,
) -> Any:  # fmt: skip
    """vLLM's fused experts, returning each rank's partial sum.

    `select(hidden_states, gating_output, topk, renormalize) -> (weights fp32, ids)` chooses the
    experts. Weights live at `.routed_experts.w13_weight` [local, 2·width/tp, hidden], gate rows
    before up rows, and `.w2_weight` [local, hidden, width/tp].
    """
    runner = _fused_moe(
        num_experts=experts,
        top_k=top_k,
        hidden_size=hidden,
        intermediate_size=width,
        renormalize=False,
        quant_config=quant_config,
        prefix=prefix,
        custom_routing_function=select,
        router_logits_dtype=torch.float32,
        activation="silu",
        # The short convolution that follows sums over ranks, together with the sink experts' part.
        reduce_results=False,
    )
    if get_tensor_model_parallel_world_size() > 1 and not runner.moe_config.skip_final_all_reduce:
        raise ValueError(
            "Inkling's experts need partial sums per tensor-parallel rank; vLLM's all-to-all "
            "experts return complete ones; use tensor parallel size 1 with data-parallel "
            "attention, or no expert-parallel all-to-all backend"
        )
    return runner


class AfterLoading(QuantizeMethodBase):
    """What vLLM calls on a module of ours, its `quant_method`, when all weights are loaded."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self.finish = finish

    def create_weights(self, layer: nn.Module, *weight_args: Any, **extra: Any) -> None:
        raise NotImplementedError("the module made its own parameters")

    def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError("the module computes by itself")

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.finish()


def expert_shard(runner: Any) -> tuple[list[int], int, int]:
    """Experts of this rank: (global id of each local slot, rank and size of the width split)."""
    parallel = runner.moe_config.moe_parallel_config
    manager = runner.routed_experts.expert_map_manager
    if manager.expert_map is None:
        owned = list(range(manager.global_num_experts))
    else:
        slots = manager.expert_map.tolist()
        owned = [-1] * (max(slots) + 1)
        for expert, slot in enumerate(slots):
            if slot >= 0:
                owned[slot] = expert
    return owned, parallel.tp_rank, parallel.tp_size


def kept_window(vllm_config: VllmConfig, window: int) -> int:
    """Tokens whose cache a request keeps, of which a token sees `window`, itself among them.

    A server to which a prompt's caches are sent computes its last token again, which sees one token
    more than what the sender would go on with.
    """
    return window + (vllm_config.kv_transfer_config is not None)


def expert_parallel_size(vllm_config: VllmConfig) -> int:
    """Ranks over which whole experts are spread; 1 when experts are split by width."""
    parallel = vllm_config.parallel_config
    if not parallel.enable_expert_parallel:
        return 1
    size: int = (
        parallel.tensor_parallel_size
        * parallel.data_parallel_size
        * getattr(parallel, "prefill_context_parallel_size", 1)
    )
    return size


# --- checkpoints ----------------------------------------------------------------------------------


def checkpoint_folder(vllm_config: VllmConfig, draft: bool = False) -> Path | None:
    """The local folder with the model's safetensors files, or None when there is none to look at.

    vLLM's weight iterator gives tensors without their files; errors that name a file need this.
    """
    spec = vllm_config.speculative_config
    model = spec.draft_model_config if draft and spec is not None else vllm_config.model_config
    if os.path.isdir(model.model):
        return Path(model.model)
    try:
        from huggingface_hub import snapshot_download

        found = snapshot_download(
            model.model, revision=model.revision, local_files_only=True,
            cache_dir=vllm_config.load_config.download_dir,
        )  # fmt: skip
    except Exception:  # not a hub name, or a loader that streams: nothing to look at
        return None
    return Path(found)


# --- drafting -------------------------------------------------------------------------------------


def install_proposer() -> bool:
    """Let vLLM's V1 runner draft with every depth, over all rows; False on an accelerator.

    Without Triton, as on a CPU, only the V1 runner works, and none of its proposers knows several
    MTP depths with a history each, which its V2 runner's speculator gives them; one of them does
    know draft layers in several cache groups. It is replaced, by name, in the module that builds
    it. Goes when the V1 runner drafts as V2 does, or when V2 runs on every CPU (0.33: neither).
    """
    if on_accelerator():
        return False
    from vllm.v1.spec_decode.eagle import EagleProposer
    from vllm.v1.spec_decode.step3p5 import Step3p5MTPProposer
    from vllm.v1.worker import gpu_model_runner

    from inkling_portable.model.drafting import EveryDepth

    class Proposer(EveryDepth, Step3p5MTPProposer):
        # The head is the target's, and so is the config of everything but the architecture.
        _maybe_share_lm_head = EagleProposer._maybe_share_lm_head
        _create_draft_vllm_config = EagleProposer._create_draft_vllm_config

    if not issubclass(gpu_model_runner.Step3p5MTPProposer, EveryDepth):
        gpu_model_runner.Step3p5MTPProposer = Proposer
    return True


# --- media ----------------------------------------------------------------------------------------


class MediaProcessor(BaseMultiModalProcessor):
    """vLLM's multimodal processor over preprocessing of ours, without a Hugging Face processor.

    Subclasses implement `check_openers`, `media_tensors` and vLLM's `_get_mm_fields_config` and
    `_get_prompt_updates`.
    """

    @abstractmethod
    def check_openers(self, ids: list[int], counts: Mapping[str, int]) -> None:
        """Raise ValueError unless a prompt has one opener for each of `counts[modality]` items."""

    @abstractmethod
    def media_tensors(
        self, media: Mapping[str, list[Any]], options: Mapping[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Fields of decoded items (keys "images" and "audios"), for `_get_mm_fields_config`."""

    def apply(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        ids = self._ids(inputs.prompt)
        self.check_openers(ids, inputs.mm_data_items.get_all_counts())
        inputs.prompt = ids
        return super().apply(inputs, *args, **kwargs)

    def _apply_hf_processor_main(self, **given: Any) -> Any:
        from transformers.feature_extraction_utils import BatchFeature

        media: dict[str, Any] = {}
        for modality, items in given["mm_items"].items():
            if items.get_passthrough_data():
                raise ValueError(
                    f"{modality} input needs decoded media; found embeddings; send the media itself"
                )
            media.update(items.get_processor_data())
        # The second name goes with vLLM 0.30.
        options = given.get("hf_kwargs", given.get("hf_processor_mm_kwargs")) or {}
        fields = BatchFeature(self.media_tensors(media, options))
        # Up to vLLM 0.28 this also returned the prompt and whether slots were put in already.
        return (given["prompt"], fields, False) if "prompt" in given else fields

    def _ids(self, prompt: str | list[int]) -> list[int]:
        """vLLM 0.26 still hands over text; goes with it."""
        if isinstance(prompt, str):
            ids: list[int] = self.info.get_tokenizer().encode(prompt, add_special_tokens=False)
            return ids
        return prompt


def audio_resampler() -> str:
    """Name of the first of vLLM's resampling methods whose library is installed."""
    for method, library in (("pyav", "av"), ("soxr", "soxr"), ("scipy", "scipy")):
        if find_spec(library) is not None:
            return method
    return "pyav"  # which then says what to install


def processor_file(model_config: Any) -> dict[str, Any]:
    """The checkpoint's processor settings, {} if it has none; the newer file name wins."""
    for name in ("processor_config.json", "preprocessor_config.json"):
        found = get_hf_file_to_dict(name, model_config.model, model_config.revision)
        if found is not None:
            return dict(found)
    return {}


if TYPE_CHECKING:
    _: Any = (SupportsMultiModal,)
