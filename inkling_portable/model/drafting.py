"""Drafting where vLLM's V1 runner does it (a CPU): every depth runs over all rows.

Depth k at position p is given the token at p + 1 + k. As in vLLM's GPU speculator, a step runs each
depth over the trunk's rows, the tokens shifted one further per depth, so that every depth keeps its
own history of the whole sequence. Tokens behind the last known one are drafts of the depth before.
Rows that were given a draft which did not come true are run again in the next step, in front of the
new rows: at most one fewer than there are depths, so that many rows are remembered per request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inkling_portable.model.config import ConfigError
from inkling_portable.model.engine import (
    CommonAttentionMetadata,
    VllmConfig,
    set_forward_context,
)

SLOT = -1
"""Stands for a token whose embedding is an image's or a clip's, which no draft can have."""


@dataclass
class Rows:
    """Consecutive rows of one request, the last one at position `end - 1`."""

    end: int
    tokens: list[int]  # what depth 0 is given: the token behind each row, SLOT for a tower's row
    hidden: Tensor  # [n, H] the trunk's
    embeds: Tensor | None  # [n, H] of the tokens, for models with towers

    def last(self, count: int) -> Rows:
        """A copy of the last `count` rows, or of all if there are fewer."""
        at = max(0, len(self.tokens) - count)
        embeds = None if self.embeds is None else self.embeds[at:].clone()
        return Rows(self.end, self.tokens[at:], self.hidden[at:].clone(), embeds)

    def then(self, new: Rows) -> Rows:
        """These rows and the ones directly behind them."""
        embeds = None
        if self.embeds is not None and new.embeds is not None:
            embeds = torch.cat([self.embeds, new.embeds])
        hidden = torch.cat([self.hidden, new.hidden])
        return Rows(new.end, self.tokens + new.tokens, hidden, embeds)


@dataclass
class History:
    """A request between two steps: rows that may have to run again, and what they were given."""

    rows: Rows
    guesses: list[int]  # tokens behind the rows' own, given to later depths

    def again(self, new: Rows) -> int:
        """How many of the last rows must run again, now that `new` rows and their tokens are known.

        A guess at distance j behind the rows reached those from the last `len(guesses) - j` on. One
        that is still open may be drafted otherwise this time, so it counts as wrong.
        """
        for j, guess in enumerate(self.guesses):
            if j >= len(new.tokens) or guess != new.tokens[j]:
                return min(len(self.guesses) - j, len(self.rows.tokens))
        return 0


class EveryDepth:
    """What replaces the drafting of the proposer class that follows in the bases."""

    # Of the class that follows.
    model: Any
    draft_attn_groups: Sequence[Any]
    supports_mm_inputs: bool
    _per_group_block_tables: dict[int, Tensor]

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner: Any = None) -> None:
        spec, parallel = vllm_config.speculative_config, vllm_config.parallel_config
        if spec.num_speculative_tokens > 1 and not hasattr(spec, "use_multi_module_mtp"):
            raise ConfigError(
                "drafting with several MTP depths on a CPU needs a scheduler that keeps the pages "
                "of rows that run again; this vLLM has none; set num_speculative_tokens to 1 or "
                "install 0.32"
            )
        if parallel.data_parallel_size > 1:
            raise ConfigError(
                "drafting on a CPU needs data parallel size 1, because ranks would have to agree "
                f"on each depth's batch; found {parallel.data_parallel_size}; start one server "
                "per rank"
            )
        if spec.disable_padded_drafter_batch:
            raise ConfigError(
                "drafting on a CPU reads the batch with rejected rows in it; found "
                "disable_padded_drafter_batch; leave it out"
            )
        super().__init__(vllm_config, device, runner)  # type: ignore[call-arg]
        self.vllm_config, self.runner = vllm_config, runner
        self.histories: dict[str, History] = {}

    def initialize_attn_backend(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_attn_backend(*args, **kwargs)  # type: ignore[misc]
        # The runner stops drafting for a whole batch when its longest request comes near the limit,
        # which would leave holes in all histories. Rows here never lie behind the trunk's.
        spec = self.vllm_config.speculative_config
        longest = self.vllm_config.model_config.max_model_len + spec.num_speculative_tokens
        self.runner.effective_drafter_max_model_len = longest

    @torch.inference_mode()
    def propose(
        self, num_speculative_tokens: int, target_token_ids: Tensor, target_positions: Tensor,
        target_hidden_states: Tensor, next_token_ids: Tensor,
        token_indices_to_sample: Tensor | None, common_attn_metadata: CommonAttentionMetadata,
        sampling_metadata: Any, mm_embed_inputs: tuple[list[Tensor], Tensor] | None = None,
        num_rejected_tokens_gpu: Tensor | None = None, slot_mappings: Any = None,
    ) -> Tensor:  # fmt: skip
        """Drafts [B, num_speculative_tokens] behind the sampled token of each of B requests.

        target_* hold the trunk's rows [T], rejected ones included; next_token_ids [B].
        """
        depths: int = self.model.depths
        batch = self.runner.input_batch
        names = list(batch.req_ids)
        starts = common_attn_metadata.query_start_loc_cpu.tolist()
        rejected = [0] * len(names)
        if num_rejected_tokens_gpu is not None:
            rejected = num_rejected_tokens_gpu.tolist()
        ends = [end - out for end, out in zip(starts[1:], rejected, strict=True)]
        firsts = target_positions[torch.tensor(starts[:-1])].tolist()

        given = [*target_token_ids.tolist()[1:], 0]
        sampled = next_token_ids.tolist()
        for i, (start, end) in enumerate(zip(starts[:-1], ends, strict=True)):
            position = firsts[i] + end - start
            # Behind a chunk of a prompt stands the prompt's next token; nothing was sampled.
            known = position < batch.num_tokens_no_spec[i]
            given[end - 1] = int(batch.token_ids_cpu[i, position]) if known else sampled[i]
        media, slots = mm_embed_inputs or (None, None)
        embeds = self._embed(given, media, slots)
        if slots is not None:
            given = [SLOT if slot else id_ for id_, slot in zip(given, slots.tolist(), strict=True)]

        packed: list[Rows] = []
        remembered: list[Rows] = []
        for i, name in enumerate(names):
            part = slice(starts[i], ends[i])
            new = Rows(firsts[i] + ends[i] - starts[i], given[part], target_hidden_states[part],
                       None if embeds is None else embeds[part])  # fmt: skip
            history = self.histories.get(name)
            if history is None or history.rows.end != firsts[i]:
                packed.append(new)
                remembered.append(new.last(depths - 1))
                continue
            packed.append(history.rows.last(history.again(new)).then(new))
            remembered.append(history.rows.then(new).last(depths - 1))

        drafts = self._run(packed, sampling_metadata)
        alive = self.runner.requests
        self.histories = {name: h for name, h in self.histories.items() if name in alive}
        for i, name in enumerate(names):
            self.histories[name] = History(remembered[i], drafts[i, :-1].tolist())
        return drafts[:, :num_speculative_tokens]

    def _embed(self, tokens: list[int], media: Any, slots: Tensor | None) -> Tensor | None:
        """Rows [T, H] of the tokens, or None where depths look tokens up by themselves."""
        if not self.supports_mm_inputs:
            return None
        rows: Tensor = self.model.embed_input_ids(
            torch.tensor(tokens), multimodal_embeddings=media, is_multimodal=slots
        )
        return rows

    def _run(self, packed: list[Rows], sampling: Any) -> Tensor:
        """Drafts [B, depths], each depth's from its last row of a request."""
        depths: int = self.model.depths
        counts = torch.tensor([len(rows.tokens) for rows in packed])
        last = counts.cumsum(0) - 1
        positions = torch.cat([torch.arange(r.end - len(r.tokens), r.end) for r in packed])
        tokens = torch.tensor([token for rows in packed for token in rows.tokens])
        hidden = torch.cat([rows.hidden for rows in packed])
        embeds = None
        if self.supports_mm_inputs:
            embeds = torch.cat([rows.embeds for rows in packed if rows.embeds is not None])
        step = self._metadata(positions, counts, [rows.end for rows in packed])

        drafts, probabilities = [], []
        for depth in range(depths):
            with set_forward_context(step, self.vllm_config, num_tokens=len(tokens)):
                hidden = self.model(
                    input_ids=None if embeds is not None else tokens, positions=positions,
                    hidden_states=hidden, inputs_embeds=embeds, spec_step_idx=depth,
                )  # fmt: skip
            drafted, chances = self._sample_draft_tokens_for_step(  # type: ignore[attr-defined]
                hidden[last], sampling, spec_step_idx=depth
            )
            drafts.append(drafted)
            if chances is not None:
                probabilities.append(chances)
            if depth + 1 == depths:
                break
            tokens = tokens.roll(-1)
            tokens[last] = drafted
            if embeds is not None:
                embeds = embeds.roll(-1, 0)
                embeds[last] = self.model.embed_input_ids(drafted)
        self._last_draft_probs = None
        if probabilities:
            self._last_draft_probs = torch.stack(probabilities, dim=1).contiguous()
        return torch.stack(drafts, dim=1)

    def _metadata(self, positions: Tensor, counts: Tensor, ends: list[int]) -> dict[str, Any]:
        """Metadata of the packed rows by layer; each cache group has its own pages and page size.

        positions [T]; per request the number of rows (counts [B]) and the length after them.
        """
        starts = torch.zeros(len(counts) + 1, dtype=torch.int32)
        starts[1:] = counts.cumsum(0)
        request = torch.repeat_interleave(counts)
        step: dict[str, Any] = {}
        for group in self.draft_attn_groups:
            builder = group.get_metadata_builder()
            page = builder.kv_cache_spec.block_size
            table = self._per_group_block_tables[group.kv_cache_group_id][: len(counts)]
            common = CommonAttentionMetadata(
                query_start_loc=starts, query_start_loc_cpu=starts,
                seq_lens=torch.tensor(ends, dtype=torch.int32), num_reqs=len(counts),
                num_actual_tokens=len(positions), max_query_len=int(counts.max()),
                max_seq_len=max(ends), block_table_tensor=table,
                slot_mapping=table[request, positions // page].long() * page + positions % page,
            )  # fmt: skip
            metadata = builder.build(0, common)
            step.update(dict.fromkeys(group.layer_names, metadata))
        return step
