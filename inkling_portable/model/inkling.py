"""The decoder and the entry classes that vLLM builds."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from inkling_portable import __version__
from inkling_portable.model import checkpoint, loading, lora, skinny, warm_up
from inkling_portable.model.attention import InklingAttention
from inkling_portable.model.config import AttentionGeometry
from inkling_portable.model.engine import (
    IntermediateTensors,
    ParallelLMHead,
    QuantizationConfig,
    SupportsLoRA,
    SupportsPP,
    VllmConfig,
    WeightsMapper,
    checkpoint_folder,
    get_pp_group,
    logger,
    make_empty_intermediate_tensors_factory,
    make_layers,
    maybe_prefix,
    on_accelerator,
    receive_on_cpu,
    token_scores,
)
from inkling_portable.model.experts import MoE, SinkLinears
from inkling_portable.model.hf_configs import describe
from inkling_portable.model.logits import InklingLogits
from inkling_portable.model.mlp import DenseMLP
from inkling_portable.model.norm import Norm
from inkling_portable.model.settings import Settings, settle
from inkling_portable.model.short_conv import ATTENTION, MLP, BranchEnd, ConvState
from inkling_portable.model.warm_up_steps import Call, both_sides
from inkling_portable.registry import reference_warnings, unproven


class DecoderLayer(nn.Module):
    """Two branches, attention and MLP. Each ends in a convolution fused with what follows it."""

    def __init__(
        self, settings: Settings, geometry: AttentionGeometry, dense: bool,
        quant_config: QuantizationConfig | None, prefix: str,
    ) -> None:  # fmt: skip
        super().__init__()
        hidden = settings.text.hidden_size
        self.conv_state = ConvState(settings, geometry, f"{prefix}.conv_state")
        self.attn_norm = Norm(hidden)
        self.attn = InklingAttention(
            settings, geometry, self.conv_state, quant_config, f"{prefix}.attn"
        )
        self.mlp_norm = Norm(hidden)
        mlp = DenseMLP if dense else MoE
        self.mlp = mlp(settings, quant_config, f"{prefix}.mlp")
        self.attn_sconv = BranchEnd(settings, self.conv_state, ATTENTION)
        self.mlp_sconv = BranchEnd(settings, self.conv_state, MLP)
        kind = "local" if geometry.window else "global"
        self.name = f"{prefix} ({kind}, {'dense' if dense else 'sparse'})"

    def forward(
        self, normed: Tensor, residual: Tensor, positions: Tensor, next_norm: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """normed, residual [T, H]; next_norm [H]: what norms this layer's output, None for nothing.

        -> (normed [T, H], or [0, H] without a norm; residual [T, H]).
        """
        branch = self.attn(normed, positions)
        normed, residual = self.attn_sconv(branch, None, residual, self.mlp_norm.weight)
        first, second = self.mlp(normed)
        return self.mlp_sconv(first, second, residual, next_norm)


class Embedding(nn.Module):
    """The table, whole on every rank: the op that gathers also norms, and nothing is summed."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width), requires_grad=False)


class InklingModel(nn.Module):
    """Embedding, the layers of this pipeline stage, final norm."""

    def __init__(
        self, settings: Settings, quant_config: QuantizationConfig | None, prefix: str
    ) -> None:
        super().__init__()
        text = settings.text
        self.settings = settings
        self.ops = settings.ops()
        self.eps = text.norm_eps
        self.first, self.last = get_pp_group().is_first_rank, get_pp_group().is_last_rank
        if not self.first and not on_accelerator():
            receive_on_cpu()
        if self.first:
            self.embed_tokens = Embedding(text.padded_vocab_size, text.hidden_size)
            self.embed_norm = Norm(text.hidden_size)

        def build(prefix: str) -> DecoderLayer:
            layer = int(prefix.rpartition(".")[2])
            return DecoderLayer(
                settings, text.attention(layer), text.layer_is_dense(layer), quant_config, prefix
            )

        self.start_layer, self.end_layer, self.layers = make_layers(
            text.num_layers, build, prefix=f"{prefix}.layers"
        )
        if self.last:
            self.norm = Norm(text.hidden_size)
        # A tuple, since slicing a module list builds a new one. Beside each layer stands what norms
        # its output; a stage that is not the last sends the bare residual on.
        stage = tuple(self.layers[self.start_layer : self.end_layer])
        norms = (*(layer.attn_norm for layer in stage[1:]), self.norm if self.last else None)
        self._stage = tuple(zip(stage, norms, strict=True))

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """ids [T] -> [T, H], after the embedding's norm."""
        return self.ops.embed_norm(
            input_ids, self.embed_tokens.weight, self.embed_norm.weight, self.eps
        )

    def forward(
        self, input_ids: Tensor | None, positions: Tensor,
        intermediate_tensors: IntermediateTensors | None, inputs_embeds: Tensor | None = None,
    ) -> Tensor | IntermediateTensors:  # fmt: skip
        """-> hidden rows after the final norm [T, H]; before the last stage, the residual."""
        if not self.first:
            assert intermediate_tensors is not None
            residual = intermediate_tensors["hidden_states"]
        elif inputs_embeds is not None:
            residual = inputs_embeds  # normed already; tower rows bypass the norm
        else:
            assert input_ids is not None
            residual = self.embed_input_ids(input_ids)
        entry = self._stage[0][0].attn_norm.weight
        normed, residual = self.ops.rms_norm(residual, entry, self.eps, None)
        for layer, norm in self._stage:
            normed, residual = layer(
                normed, residual, positions, None if norm is None else norm.weight
            )
        if not self.last:
            return IntermediateTensors({"hidden_states": residual})
        return normed

    def warm_up_calls(self) -> list[Call]:
        """One layer of each kind, and what stands before the first; see `warm_up.warm_up`."""
        kinds = {
            (layer.attn.geometry, type(layer.mlp), norm is None): (layer, norm)
            for layer, norm in self._stage
        }

        def branches(layer: DecoderLayer, norm: Norm | None) -> Call:
            def run(ids: Tensor, positions: Tensor, rows: Tensor) -> None:
                second = rows if isinstance(layer.mlp, MoE) else None
                layer.attn_sconv(layer.attn(rows, positions), None, rows, layer.mlp_norm.weight)
                layer.mlp_sconv(rows, second, rows, None if norm is None else norm.weight)

            return Call(run, (layer.attn, layer.conv_state), name=layer.name)

        def enter(ids: Tensor, positions: Tensor, rows: Tensor) -> None:
            first = self.embed_input_ids(ids) if self.first else rows
            self.ops.rms_norm(first, self._stage[0][0].attn_norm.weight, self.eps, None)

        calls = [Call(enter), *(branches(*kind) for kind in kinds.values())]
        # The first sparse layer of a quantised checkpoint has experts in BF16, of other kernels.
        mlps = {(type(layer.mlp), getattr(layer.mlp, "format", "")): layer
                for layer, _ in self._stage}  # fmt: skip
        for layer in mlps.values():
            calls += [dataclasses.replace(c, name=layer.name) for c in layer.mlp.warm_up_calls()]
        return calls


class InklingForCausalLM(lora.TakesAdapters, nn.Module, SupportsPP, SupportsLoRA):
    """The text model as vLLM serves it; the multimodal class adds towers to it."""

    # Names under which configs of quantised checkpoints and adapters know the modules.
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_substr={
            ".w13_dn": ".gate_up_proj",
            ".w2_md": ".down_proj",
            ".shared_experts.": ".sink_experts.",
            ".self_attn.q_proj": ".attn.wq_du",
            ".self_attn.k_proj": ".attn.wk_dv",
            ".self_attn.v_proj": ".attn.wv_dv",
            ".self_attn.r_proj": ".attn.wr_du",
            ".self_attn.o_proj": ".attn.wo_ud",
        },
        orig_to_new_prefix={
            "model.llm.unembed": "lm_head",
            "model.llm.embed_norm": "model.embed_norm",
            "model.llm.embed": "model.embed_tokens",
            "model.llm.": "model.",
            "model.language_model.": "model.",
        },
    )
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        "qkvr": ["wq_du", "wk_dv", "wv_dv", "wr_du"],
        "w13": ["w1", "w3"],
    }
    embedding_modules: ClassVar[dict[str, str]] = {"lm_head": "output_embeddings"}

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        began = time.monotonic()
        self.vllm_config = vllm_config
        self.config = vllm_config.model_config.hf_config
        self.settings = settle(vllm_config, describe(self.config))
        text = self.settings.text
        linear_quant = self.settings.linear_quant
        self.model = InklingModel(self.settings, linear_quant, maybe_prefix(prefix, "model"))
        if self.model.last:
            self.lm_head = ParallelLMHead(
                text.padded_vocab_size, text.hidden_size,
                org_num_embeddings=text.padded_vocab_size, quant_config=linear_quant,
                prefix=maybe_prefix(prefix, "lm_head"),
            )  # fmt: skip
        self.logits_processor = InklingLogits(text)
        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory(
            ["hidden_states"], text.hidden_size
        )
        skinny.take_over(self)
        _announce(self, time.monotonic() - began)
        warm_up.when_bound(self, vllm_config)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.embed_input_ids(input_ids)

    def forward(
        self, input_ids: Tensor | None, positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None, **_: Any,
    ) -> Tensor | IntermediateTensors:  # fmt: skip
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Hidden rows [n, H] -> logits [n, valid ids]."""
        with self.head_for(hidden_states):
            return self.logits_processor(self.lm_head, hidden_states)

    def warm_up_calls(self) -> list[Call]:
        calls, few = self.model.warm_up_calls(), self.logits_processor.few
        if few and self.model.last:
            head = Call(
                lambda ids, positions, rows: self.compute_logits(rows[:few]), name="the head"
            )
            calls.append(head)
        if self.model.last:
            calls.append(Call(self._score_tokens, name="the head"))
        return calls

    def _score_tokens(self, ids: Tensor, positions: Tensor, rows: Tensor) -> None:
        """Once: the engine's kernel for as many tokens as a request may ask log-probabilities of.

        Its logits are as the head returns them: without padding columns, between which they lie.
        """
        score = token_scores() if rows.shape[0] == 1 else None
        if score is None:
            return
        vocab, most = self.settings.text.vocab_size, self.vllm_config.model_config.max_logprobs
        logits = rows.new_zeros(1, vocab + -vocab % 64)[:, :vocab]
        for count in both_sides(1 + min(most if most >= 0 else vocab, 1024)):
            score(logits, ids.new_zeros(1, count))

    def tower_shapes(self) -> dict[str, checkpoint.Shape]:
        """Shapes of tower parameters, named as in this module; a text model has none."""
        return {}

    def adapter_targets(
        self, routed: Sequence[str]
    ) -> tuple[dict[str, lora.Target], Collection[str]]:
        known = lora.targets(self.settings.text, routed)
        stage = [f"model.layers.{i}." for i in range(self.model.start_layer, self.model.end_layer)]
        if self.model.last:
            stage.append("lm_head")
        return known, {name for name in known if name.startswith(tuple(stage))}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Check the checkpoint's files, then fill every parameter. Raises CheckpointError."""
        folder = checkpoint_folder(self.vllm_config)
        files = loading.read_headers(folder) if folder else loading.Files()
        if not files.shapes:
            weights = list(weights)  # a stream without files: names are known only afterwards
            files.note_stream(weights)
        model = self.model
        wanted = checkpoint.plan(
            self.settings.config, files.shapes, shard_of(self, self.settings),
            range(model.start_layer, model.end_layer), model.first, model.last,
            self.tower_shapes(),
        )  # fmt: skip
        checkpoint.check(wanted, files.shapes, files.file_of, types=files.types)
        settings = self.settings
        return loading.load(
            self, weights, wanted, files, settings.allow_nonfinite, ranks=settings.ranks
        )


def shard_of(module: nn.Module, settings: Settings) -> checkpoint.Shard:
    """The share of a checkpoint that this rank's parameters hold."""
    head = getattr(module, "lm_head", None)
    shard = checkpoint.Shard(
        settings.rank, settings.tp, head_rows=None if head is None else head.weight.shape[0]
    )
    moes = {m.layer: m for m in module.modules() if isinstance(m, MoE)}
    return dataclasses.replace(
        shard,
        # Where a layer lies on another pipeline stage, its tensors are only looked for.
        layers={layer: checkpoint.Experts(layout=settings.expert_layout(layer))
                for layer in range(settings.text.num_layers)}
        | {layer: moe.share() for layer, moe in moes.items()},
        sink_linears=any(isinstance(m.sink_experts, SinkLinears) for m in moes.values()),
    )  # fmt: skip


def _announce(model: InklingForCausalLM, seconds: float) -> None:
    """Say once who serves, who computes each op, and which ops ended on the slow reference.

    seconds: what choosing, self-test and building took; kernels report their own, see `warm_up`.
    """
    if model.settings.rank or not model.model.first:
        return
    ops = model.settings.ops()
    logger.info(
        "inkling_portable %s serves Inkling (%s) on %s", __version__, type(model).__name__,
        ops.target.key,
    )  # fmt: skip
    by_provider: dict[str, list[str]] = {}
    for name, providers in model.settings.chosen().items():
        by_provider.setdefault(", then ".join(providers), []).append(name)
    for provider, names in by_provider.items():
        logger.info("inkling_portable: %s computes %s", provider, ", ".join(names))
    for format in sorted({m.format for m in model.modules() if isinstance(m, MoE)}):
        if format != model.settings.facts.weights:
            [name] = model.settings.expert_ops(format).serving("routed_experts")
            logger.info("inkling_portable: %s computes routed_experts of %s", name, format)
    outcome = model.settings.self_test
    if outcome.agreed or outcome.failed or outcome.off:
        logger.info("inkling_portable: %s", outcome)
    logger.info("inkling_portable: layers are built after %.1f s", seconds)
    unsure = unproven(ops.target)
    for sentence in ([unsure] if unsure else []) + reference_warnings(ops.target, ops.decisions):
        logger.warning("%s", sentence)
