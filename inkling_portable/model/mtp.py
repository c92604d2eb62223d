"""The draft model: up to eight chained multi-token-prediction depths, each one dense decoder block.

Depth k reads the hidden row of the depth before it (the trunk's normed output for depth 0) beside
the embedding of the next token, which passes the backbone's embedding norm first: the depths were
trained on those rows. Embedding and unembedding are the target's, attached by vLLM's loader.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor, nn

from inkling_portable.model import checkpoint, loading, skinny, warm_up
from inkling_portable.model.engine import (
    QuantizationConfig,
    ReplicatedLinear,
    SupportsMultiModalEmbeddings,
    VllmConfig,
    checkpoint_folder,
    maybe_prefix,
    merge_multimodal,
)
from inkling_portable.model.hf_configs import describe
from inkling_portable.model.inkling import DecoderLayer, Embedding, InklingForCausalLM, shard_of
from inkling_portable.model.logits import InklingLogits
from inkling_portable.model.norm import Norm
from inkling_portable.model.settings import Settings, settle
from inkling_portable.model.warm_up_steps import Call

# Replaced by the target's modules; vLLM 0.26 looks at their weights before it does that.
SHARED = frozenset({"model.embed_tokens.weight", "lm_head.weight"})


class Depth(nn.Module):
    """Two norms, one projection from both inputs to one, one decoder block."""

    def __init__(
        self, settings: Settings, depth: int, quant_config: QuantizationConfig | None, prefix: str
    ) -> None:
        super().__init__()
        hidden = settings.text.hidden_size
        self.ops = settings.ops()
        self.eps = settings.text.norm_eps
        self.hidden_norm, self.embed_norm = Norm(hidden), Norm(hidden)
        self.input_proj = ReplicatedLinear(
            2 * hidden, hidden, bias=False, return_bias=False, quant_config=quant_config,
            prefix=f"{prefix}.input_proj",
        )  # fmt: skip
        self.transformer_block = DecoderLayer(
            settings, settings.config.mtp_attention(depth), True, quant_config,
            f"{prefix}.transformer_block",
        )  # fmt: skip

    def forward(self, both: Tensor, positions: Tensor, norm: Tensor | None) -> Tensor:
        """both [T, 2H], positions [T]; norm [H] or None -> hidden rows [T, H], normed by `norm`."""
        residual = self.input_proj(both)
        block = self.transformer_block
        normed, residual = self.ops.rms_norm(residual, block.attn_norm.weight, self.eps, None)
        normed, residual = block(normed, residual, positions, norm)
        return residual if norm is None else normed


class Depths(nn.Module):
    """All depths that a step drafts with."""

    def __init__(
        self, settings: Settings, count: int, quant_config: QuantizationConfig | None, prefix: str
    ) -> None:
        super().__init__()
        hidden = settings.text.hidden_size
        self.ops = settings.ops()
        self.eps = settings.text.norm_eps
        self.embed_tokens = Embedding(0, hidden)
        self.backbone_embed_norm = Norm(hidden)
        self.layers = nn.ModuleDict({
            str(depth): Depth(settings, depth, quant_config, f"{prefix}.layers.{depth}")
            for depth in range(count)
        })  # fmt: skip
        mtp = settings.config.require_mtp()
        self.chain_norm = Norm(hidden) if mtp.chain_norm else None

    def embed_input_ids(
        self, input_ids: Tensor, multimodal_embeddings: Any = None, *,
        is_multimodal: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """ids [T] -> [T, H] after the backbone's norm; tower rows replace their slots unnormed."""
        rows = self.ops.embed_norm(
            input_ids, self.embed_tokens.weight, self.backbone_embed_norm.weight, self.eps
        )
        if multimodal_embeddings is None or len(multimodal_embeddings) == 0:
            return rows
        assert is_multimodal is not None
        return merge_multimodal(rows, multimodal_embeddings, is_multimodal)

    def forward(
        self, input_ids: Tensor, positions: Tensor, hidden: Tensor, inputs_embeds: Tensor | None,
        step: int,
    ) -> Tensor:  # fmt: skip
        """Run the depth of draft step `step`; all rows [T] are of the trunk's positions."""
        depth: Any = self.layers[str(step % len(self.layers))]
        hidden_gain, embed_gain = depth.hidden_norm.weight, depth.embed_norm.weight
        if inputs_embeds is None:
            both = self.ops.embed_norm_chain(
                hidden, input_ids, self.embed_tokens.weight, self.backbone_embed_norm.weight,
                hidden_gain, embed_gain, self.eps,
            )  # fmt: skip
        else:
            both = self.ops.concat_norms(hidden, inputs_embeds, hidden_gain, embed_gain, self.eps)
        norm = None if self.chain_norm is None else self.chain_norm.weight
        return depth(both, positions, norm)

    def warm_up_calls(self) -> list[Call]:
        """One depth of each kind, fed with ids and with embeddings; see `warm_up.warm_up`."""
        blocks: dict[int, Any] = {int(k): d.transformer_block for k, d in self.layers.items()}
        kinds = {block.attn.geometry: step for step, block in blocks.items()}

        def draft(step: int) -> Call:
            def run(ids: Tensor, positions: Tensor, rows: Tensor) -> None:
                self(ids, positions, rows, None, step)
                self(ids, positions, rows, self.embed_input_ids(ids), step)

            block = blocks[step]
            return Call(run, (block.attn, block.conv_state), name=block.name)

        return [draft(step) for step in kinds.values()]


class InklingMTP(nn.Module, SupportsMultiModalEmbeddings):
    """The draft as vLLM's speculators call it."""

    hf_to_vllm_mapper = InklingForCausalLM.hf_to_vllm_mapper
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = (
        InklingForCausalLM.packed_modules_mapping
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        spec = vllm_config.speculative_config
        self.vllm_config = vllm_config
        self.config = spec.draft_model_config.hf_config
        self.settings = settle(vllm_config, describe(self.config))
        mtp = self.settings.config.require_mtp()
        # Draft step k uses depth k: more depths than draft tokens would never run.
        self.depths = min(mtp.num_depths, spec.num_speculative_tokens or mtp.num_depths)
        self.model = Depths(
            self.settings, self.depths, self.settings.linear_quant, maybe_prefix(prefix, "model")
        )
        self.lm_head = Embedding(0, self.settings.text.hidden_size)
        self.logits_processor = InklingLogits(self.settings.text)
        skinny.take_over(self)
        warm_up.when_bound(self, vllm_config)

    def embed_input_ids(
        self, input_ids: Tensor, multimodal_embeddings: Any = None, *,
        is_multimodal: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return self.model.embed_input_ids(
            input_ids, multimodal_embeddings, is_multimodal=is_multimodal
        )

    def forward(
        self, input_ids: Tensor, positions: Tensor, hidden_states: Tensor,
        intermediate_tensors: Any = None, inputs_embeds: Tensor | None = None,
        spec_step_idx: int = 0,
    ) -> Tensor:  # fmt: skip
        """ids, positions [T], hidden rows of the depth before [T, H] -> this depth's [T, H]."""
        return self.model(input_ids, positions, hidden_states, inputs_embeds, spec_step_idx)

    def compute_logits(self, hidden_states: Tensor, spec_step_idx: int = 0) -> Tensor | None:
        """No norm stands between a depth and the head."""
        return self.logits_processor(self.lm_head, hidden_states)

    def get_top_tokens(self, hidden_states: Tensor, spec_step_idx: int = 0) -> Tensor:
        """Most likely valid id of every row, without gathering whole rows of logits."""
        return self.logits_processor.get_top_tokens(self.lm_head, hidden_states)

    def warm_up_calls(self) -> list[Call]:
        return self.model.warm_up_calls()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Check and fill the depths in use; the file may stand outside the checkpoint's index."""
        folder = checkpoint_folder(self.vllm_config, draft=True)
        files = loading.read_headers(folder) if folder else loading.Files()
        if not files.shapes:
            weights = list(weights)
            files.note_stream(weights)
        config = self.settings.config
        wanted = checkpoint.plan_draft(
            config, files.shapes, shard_of(self, self.settings), self.depths
        )
        depths = config.require_mtp().num_depths
        checkpoint.check(wanted, files.shapes, files.file_of, depths, files.types)
        allow, ranks = self.settings.allow_nonfinite, self.settings.ranks
        filled = loading.load(self, weights, wanted, files, allow, SHARED, draft=True, ranks=ranks)
        return filled | SHARED
