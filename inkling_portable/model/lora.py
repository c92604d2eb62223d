"""Adapters (LoRA): what one may hold, and what vLLM's manager of them is told and corrected.

vLLM picks an adapter's tensors by module name, drops those that no module asks for, and copies
short tensors into the corner of longer ones. So an adapter is checked as a whole before it is
taken in: every tensor belongs to a module of this model, in full, or the adapter is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from inkling_portable.model.config import TextConfig
from inkling_portable.model.engine import on_accelerator

Target = tuple[int, tuple[int, ...]]
"""Input width of a module, and the output widths that an adapter may have been trained with."""


class AdapterError(ValueError):
    """An adapter that cannot be served: one sentence naming the tensor and a remedy."""


HALVES = ("gate_proj", "up_proj")  # Hugging Face's, which are one module here, gate_up_proj


def targets(text: TextConfig, routed: Sequence[str] = ()) -> dict[str, Target]:
    """Modules that an adapter may change, under the names of this model's modules.

    `routed`: names of the routed experts' parts below "model.layers.i.mlp.", per expert gate, down
    and up, where the engine's experts take adapters.
    """
    hidden = text.hidden_size
    # The head may have been trained with or without its padding rows.
    out: dict[str, Target] = {"lm_head": (hidden, (text.padded_vocab_size, text.vocab_size))}
    for layer in range(text.num_layers):
        where = f"model.layers.{layer}."
        geometry = text.attention(layer)
        names = ("wq_du", "wk_dv", "wv_dv", "wr_du")
        for name, rows in zip(names, geometry.qkvr_sizes, strict=True):
            out[f"{where}attn.{name}"] = (hidden, (rows,))
        out[f"{where}attn.wo_ud"] = (geometry.q_size, (hidden,))
        if text.layer_is_dense(layer):
            out[f"{where}mlp.gate_up_proj"] = (hidden, (2 * text.dense_width,))
            out |= {f"{where}mlp.{half}": (hidden, (text.dense_width,)) for half in HALVES}
            out[f"{where}mlp.down_proj"] = (text.dense_width, (hidden,))
            continue
        sinks = text.num_sinks * text.expert_width
        out[f"{where}mlp.sink_experts.w1"] = out[f"{where}mlp.sink_experts.w3"] = (hidden, (sinks,))
        out[f"{where}mlp.sink_experts.w2"] = (sinks, (hidden,))
        for i, name in enumerate(routed):
            down = i % 3 == 1
            widths = (text.expert_width, hidden) if down else (hidden, text.expert_width)
            out[f"{where}mlp.{name}"] = (widths[0], widths[1:])
    return out


def check(weights: Mapping[str, Any], known: Mapping[str, Target]) -> None:
    """Check an adapter's weights: module name -> object with rank, lora_a [r, in], lora_b [out, r].

    Raises:
        AdapterError: the first module that this model does not have or cannot change, the first
            missing half, the first wrong shape, or an adapter without tensors.
    """
    if not weights:
        raise AdapterError("the adapter has no tensors; save it again with its weights")
    for name, pair in weights.items():
        if name not in known:
            raise AdapterError(
                f"the adapter changes {name}, which {_reason(name)}; train without it, or merge "
                "the adapter into the weights"
            )
        columns, widths = known[name]
        for half, tensor, wanted in (
            ("lora_A", pair.lora_a, [[pair.rank, columns]]),
            ("lora_B", pair.lora_b, [[rows, pair.rank] for rows in widths]),
        ):
            if tensor is None:
                raise AdapterError(f"the adapter has no {half} for {name}; save it again whole")
            if list(tensor.shape) not in wanted:
                raise AdapterError(
                    f"tensor {half} of {name} needs shape {' or '.join(map(str, wanted))}; found "
                    f"{list(tensor.shape)}; correct the adapter or its adapter_config.json"
                )


def join_halves(loras: MutableMapping[str, Any], largest_rank: int) -> None:
    """Make a dense MLP's gate and up rows one pair of its alternating projection.

    Each half keeps a rank of its own. Raises AdapterError for a sum above `largest_rank`.
    """
    split = (name.rpartition(".") for name in loras if ".experts." not in name)
    for where in {where for where, _, last in split if last in HALVES}:
        joined = f"{where}.gate_up_proj"
        found = {row: loras.pop(f"{where}.{half}", None) for row, half in enumerate(HALVES)}
        pairs = {row: pair for row, pair in found.items() if pair is not None}
        rank = sum(pair.rank for pair in pairs.values())
        if joined in loras:
            raise AdapterError(f"the adapter has both {joined} and a half of it; save it anew")
        if rank > largest_rank:
            found_rank = f"found --max-lora-rank {largest_rank}; set it to {rank}"
            raise AdapterError(f"{joined} needs rank {rank} for its two halves; {found_rank}")
        first, start = next(iter(pairs.values())), 0
        rows = first.lora_b.new_zeros(len(first.lora_b), 2, rank)
        for row, pair in pairs.items():
            rows[:, row, start : start + pair.rank] = pair.lora_b * pair.scaling
            start += pair.rank
        lora_a, lora_b = torch.cat([pair.lora_a for pair in pairs.values()]), rows.flatten(0, 1)
        loras[joined] = type(first)(joined, rank, first.lora_alpha, lora_a, lora_b, 1.0)


@contextmanager
def left_out(model: torch.nn.Module) -> Iterator[None]:
    """Run layers without adapters: what the engine noted of them is of another step's rows."""
    wrappers = {id(w): w for m in model.modules() if (w := getattr(m, "punica_wrapper", None))}
    notes = [getattr(w, name, None) for w in wrappers.values()
             for name in ("token_mapping_meta", "prompt_mapping_meta")]  # fmt: skip
    flags = [(f := note.no_lora_flag_cpu, f.clone()) for note in notes if note is not None]
    try:
        [flag.fill_(True) for flag, _ in flags]
        yield
    finally:
        [flag.copy_(before) for flag, before in flags]


def _reason(name: str) -> str:
    if ".mlp.experts" in name:
        return "is a routed expert, and the experts that serve here take no adapters"
    return "is no module that takes adapters in this model as it is served"


class TakesAdapters:
    """Mixin of a model to which vLLM gives its adapter manager, as the attribute `lora_manager`.

    vLLM assigns the attribute once it has wrapped the layers, in every version from 0.26 on.
    """

    _lora_manager: Any = None
    _adapters_of_rows: Any = None

    def adapter_targets(self, routed: Sequence[str]) -> tuple[dict[str, Target], Collection[str]]:
        """What `targets` says of the whole model, and which of it this pipeline stage holds."""
        raise NotImplementedError

    @property
    def lora_manager(self) -> Any:
        return self._lora_manager

    @lora_manager.setter
    def lora_manager(self, manager: Any) -> None:
        self._lora_manager = manager
        if manager is None:
            return
        known = self._taken(manager)
        take, assign = manager.add_adapter, manager.set_adapter_mapping

        def add_adapter(adapter: Any) -> Any:
            # The adapters of vLLM's own warm-up are packed already.
            if not any(pair.is_packed for pair in adapter.loras.values()):
                check(adapter.loras, known)
                join_halves(adapter.loras, manager.lora_config.max_lora_rank)
            return take(adapter)

        def set_adapter_mapping(mapping: Any) -> None:
            self._adapters_of_rows = mapping
            assign(mapping)

        manager.add_adapter, manager.set_adapter_mapping = add_adapter, set_adapter_mapping
        # vLLM lets only these names pass to `add_adapter`; a stage counts its own layers alone.
        names = {name.rpartition(".")[2] for name in known}
        manager.supported_lora_modules += sorted(names.difference(manager.supported_lora_modules))
        if not on_accelerator():
            reserve_slot_of_no_adapter(manager)

    @contextmanager
    def head_for(self, hidden: Tensor) -> Iterator[None]:
        """Inside, the head's adapters are those of the rows `hidden` [n, H].

        vLLM names the adapter of every row that it samples from, and leaves these in place for the
        log-probabilities of a prompt: requests of one step get each other's adapters, or stop the
        engine. Sampled rows are a copy; a prompt's are a slice of the step, which knows its place.
        """
        step, rows = self._adapters_of_rows, len(hidden)
        alone = hidden.untyped_storage().nbytes() == hidden.nbytes
        if step is None or (alone and rows == len(step.prompt_mapping)):
            yield
            return
        start = hidden.storage_offset() // hidden.shape[-1]
        wanted = replace(step, prompt_mapping=step.index_mapping[start : start + rows])
        self._lora_manager.set_adapter_mapping(wanted)
        try:
            yield
        finally:
            self._lora_manager.set_adapter_mapping(step)

    def _taken(self, manager: Any) -> dict[str, Target]:
        """The targets without those whose layer vLLM was told, or had, to leave unwrapped."""
        parts = [name for names in manager.packed_modules.values() for name in names]
        experts: list[str] = next(
            (n for m, n in manager.packed_modules.items() if m.endswith(".experts")), []
        )
        known, here = self.adapter_targets([name.split(".mlp.", 1)[1] for name in experts])
        for half in HALVES:
            parts += [name.replace(".gate_up_proj", f".{half}") for name in manager.modules]
        wrapped = {*manager.modules, *parts}
        return {name: t for name, t in known.items() if name in wrapped or name not in here}


def reserve_slot_of_no_adapter(manager: Any) -> None:
    """Add a slot of zeros behind the last one of every wrapped layer.

    vLLM's adapter ops for a CPU index the slots with -1 for a row without an adapter, which is
    the last slot; with all slots taken, such rows would get that adapter.
    """
    for layer in manager.modules.values():
        for name in ("lora_a_stacked", "lora_b_stacked"):
            slots = getattr(layer, name)
            alone = isinstance(slots, Tensor)
            setattr(layer, name, _grown(slots) if alone else tuple(map(_grown, slots)))


def _grown(stacked: Tensor) -> Tensor:
    return torch.cat([stacked, torch.zeros_like(stacked[:1])])
