"""A KV connector that keeps a prompt's blocks in this process, for two engines one after another.

What a prefill server would send to a decode server: the blocks of every group, by layer, as the
engine hands them to connectors. `LEFT_OUT` names groups that are forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

Prompt = tuple[int, ...]


@dataclass
class Loads(KVConnectorMetadata):
    """(prompt, the blocks of each group that its tokens go into) of this step."""

    wanted: list[tuple[Prompt, tuple[list[int], ...]]] = field(default_factory=list)


class MemoryConnector(KVConnectorBase_V1, SupportsHMA):
    """Scheduler's and worker's side at once: both live in this process."""

    KEPT: ClassVar[dict[Prompt, dict[str, list[torch.Tensor | None]]]] = {}
    LEFT_OUT: ClassVar[set[int]] = set()
    LOADED: ClassVar[list[int]] = []
    """Tokens of each load."""
    caches: ClassVar[dict[str, torch.Tensor]] = {}

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self.groups = [group.layer_names for group in kv_cache_config.kv_cache_groups]
        self.count = kv_cache_config.num_blocks
        self.block = vllm_config.cache_config.block_size
        self.loads = Loads()

    def layers(self) -> list[tuple[int, str]]:
        return [(i, name) for i, names in enumerate(self.groups) for name in names]

    def blocks_of(self, layer: str) -> torch.Tensor:
        """The layer's cache with its blocks as first axis."""
        cache = self.caches[layer]
        axis = [i for i, size in enumerate(cache.shape) if size == self.count]
        assert len(axis) == 1, (layer, cache.shape, self.count)
        return cache.movedim(axis[0], 0)

    # --- of the scheduler ---

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        prompt = tuple(request.prompt_token_ids)
        found = len(prompt) - 1 if prompt in self.KEPT else 0
        return max(0, found - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self.LOADED.append(num_external_tokens)
            self.loads.wanted.append((tuple(request.prompt_token_ids), blocks.get_block_ids()))

    def build_connector_meta(self, scheduler_output: Any) -> Loads:
        loads, self.loads = self.loads, Loads()
        return loads

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """Keep what the prompt left; a window's older blocks are gone by then."""
        kept = {
            name: [self.blocks_of(name)[i].clone() if i else None for i in block_ids[group]]
            for group, name in self.layers()
        }
        self.KEPT.setdefault(tuple(request.prompt_token_ids), kept)
        return False, None

    # --- of the worker ---

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        type(self).caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for prompt, block_ids in self._get_connector_metadata().wanted:
            for group, name in self.layers():
                if group in self.LEFT_OUT:
                    continue
                kept = self.KEPT[prompt][name]
                for source, target in zip(kept, block_ids[group], strict=False):
                    if source is not None and target:
                        self.blocks_of(name)[target] = source

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass
