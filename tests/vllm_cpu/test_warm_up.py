"""The warm-up of a served model: it reaches every op of the layers and leaves no trace."""

from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from inkling_portable.model import inkling, warm_up
from inkling_portable.model.engine import CacheLayer
from inkling_portable.model.experts import MoE
from inkling_portable.model.warm_up_steps import Bounds, row_counts
from tests.vllm_cpu.conftest import Engine, prompt

SMALL = Bounds(rows=40, requests=8, fresh=3, length=64)
# Towers run when the engine profiles their inputs; their kernels have one form each.
ELSEWHERE = {"embed_norm_chain", "concat_norms", "norm_gelu", "dmel_embed_norm"}


def caches_of(model: Any) -> list[CacheLayer]:
    return [layer for layer in model.modules() if isinstance(layer, CacheLayer)]


def test_warm_up_leaves_no_trace(engines: Callable[..., Engine]) -> None:
    engine = engines()
    before = engine.greedy([prompt(40), prompt(7, seed=1)], 6)

    def run(model: Any) -> None:
        kept = [layer.kv_cache.clone() for layer in caches_of(model)]
        assert kept and all(cache.isfinite().all() for cache in kept)
        warm_up.warm_up(model, model.vllm_config, SMALL)
        for layer, cache in zip(caches_of(model), kept, strict=True):
            assert torch.equal(layer.kv_cache, cache), layer.prefix

    engine.on_model(run)
    engine.forget_prefixes()
    assert engine.greedy([prompt(40), prompt(7, seed=1)], 6) == before


def test_every_op_of_a_step_runs_at_every_size(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What serving calls, the warm-up calls: for each row count, and for each kind of batch."""

    def run(model: Any) -> dict[str, set[tuple[int, ...]]]:
        seen: dict[str, set[tuple[int, ...]]] = {}
        parts = [m for m in model.modules() if hasattr(m, "ops")]
        for ops in {id(m.ops): m.ops for m in parts}.values():
            for name, function in list(vars(ops).items()):
                if not callable(function):
                    continue

                def noted(*args: Any, name: str = name, function: Any = function) -> Any:
                    key = (args[0].shape[0],)
                    if name == "rel_attention":
                        key = (args[0].shape[0], args[6].shape[0], args[7], args[8])
                    seen.setdefault(name, set()).add(key)
                    return function(*args)

                monkeypatch.setattr(ops, name, noted)
        warm_up.warm_up(model, model.vllm_config, SMALL)
        return seen

    seen = engines().on_model(run)
    for name in ("embed_norm", "rms_norm", "qkvr_prep", "conv_residual_norm", "gate_logits",
                 "route", "swiglu"):  # fmt: skip
        assert {key[0] for key in seen[name]} >= set(range(1, 41)), name
    batches = seen["rel_attention"]
    assert {batch for _, batch, _, _ in batches} >= {1, 2, 4, 8}
    assert {fresh for _, _, fresh, _ in batches} >= {1, 2, 3, 4, 8, 16, 32}
    assert all(longest == 64 for _, batch, fresh, longest in batches if fresh == 3), "bound of MTP"


def test_experts_of_each_format_run(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other formats have other kernels, in the engine and here."""

    def run(model: Any) -> None:
        sparse = [module for module in model.modules() if isinstance(module, MoE)]
        before = len(model.warm_up_calls())
        monkeypatch.setattr(sparse[0], "format", "nvfp4")
        own = len(sparse[0].warm_up_calls())
        assert own and len(model.warm_up_calls()) == before + own

    engines().on_model(run)


def test_what_stands_beside_the_engines_experts_runs_alone() -> None:
    """Those of data-parallel ranks are not warmed up; gate and sinks are, at once and in parts."""
    moe: Any = MoE.__new__(MoE)
    torch.nn.Module.__init__(moe)
    moe.own, moe.most_together, moe.top_k, moe.route_scale = False, 4, 2, 1.0
    moe.ops, moe.gate, moe.sink_experts = MagicMock(), MagicMock(), MagicMock()
    moe.ops.route.return_value = ("weights", "ids", "gammas")
    whole, beside = moe.warm_up_calls()
    assert whole.engine and not beside.engine
    for rows in (torch.zeros(4, 8), torch.zeros(5, 8)):
        beside.run(None, None, rows)
        moe.sink_experts.assert_called_with(rows, "gammas")
    assert [len(call.args[0]) for call in moe.ops.gated_sinks.call_args_list] == [4]


@pytest.mark.parametrize("most", [1, 5, 80, 81, 8192, 10_000])
def test_row_counts(most: int) -> None:
    """All small ones, the largest, and nothing above it; no gap wider than half of what it is."""
    counts = row_counts(most)
    assert counts[0] == 1 and counts[-1] == most and len(counts) < 140
    assert set(counts) >= set(range(1, min(most, 80) + 1))
    assert all(b - a <= max(1, a / 2 + 1) for a, b in pairwise(counts))


def bare_cache() -> CacheLayer:
    """A cache outside the engine's registry of layers."""

    class Cache(CacheLayer):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.when_bound = lambda: None
            self._bound = torch.empty(0)

        def on_bound(self, cache: torch.Tensor) -> None:
            pass

        get_kv_cache_spec = None  # type: ignore[assignment]

    return Cache()


def test_the_last_cache_to_be_bound_starts_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Any] = []
    monkeypatch.setattr(warm_up, "on_accelerator", lambda: True)
    monkeypatch.setattr(warm_up, "warm_up", lambda model, config: runs.append(model))

    model = torch.nn.ModuleList([bare_cache(), bare_cache()])
    warm_up.when_bound(model, None)  # type: ignore[arg-type]
    model[0].kv_cache = torch.zeros(3, 1, 16, 8)
    assert runs == []
    model[1].kv_cache = torch.zeros(5, 1, 16, 8)
    assert runs == [model]
    model[1].kv_cache = torch.zeros(7, 1, 16, 8)  # more blocks, the same kernels
    assert runs == [model]
    model[0].kv_cache = torch.zeros(3, 1, 32, 8)  # larger pages: other kernels
    assert runs == [model, model]


def test_what_was_noted_of_adapters_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dummy run's notes are of more rows than a step here has: kernels would leave its rows."""
    meta = import_module("vllm.lora.ops.triton_ops.lora_kernel_metadata").LoRAKernelMeta
    notes = [meta.make(2, 64, "cpu") for _ in range(2)]
    for note in notes:
        note.prepare_tensors(torch.ones(40, dtype=torch.int32))
    layer = torch.nn.Linear(2, 2)
    layer.punica_wrapper = SimpleNamespace(
        token_mapping_meta=notes[0], prompt_mapping_meta=notes[1]
    )  # type: ignore[assignment]

    def flags() -> list[bool]:
        return [bool(note.meta_args(1, False)[5]) for note in notes]

    seen: list[list[bool]] = []
    monkeypatch.setattr(warm_up, "warm_up", lambda model, config: seen.append(flags()))
    monkeypatch.setattr(warm_up, "check", lambda model, config: seen.append(flags()))
    monkeypatch.setattr(warm_up, "on_accelerator", lambda: True)
    cache = bare_cache()
    warm_up.when_bound(torch.nn.ModuleList([layer, layer, cache]), None)  # type: ignore[arg-type]
    cache.kv_cache = torch.zeros(warm_up.LEAST_PAGES, 1, 16, 8)
    assert seen == [[True, True]] * 2
    # The engine does not note a mapping again that equals its last one.
    assert flags() == [False, False] and notes[0].num_tokens_per_lora[0] == 40


def test_tokens_are_scored_as_often_as_requests_may_ask(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's kernel for logprobs has a form for each power of two of tokens."""
    asked: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = []

    def score(logits: torch.Tensor, ids: torch.Tensor) -> None:
        asked.append((tuple(logits.shape), logits.stride(), tuple(ids.shape)))

    monkeypatch.setattr(inkling, "token_scores", lambda: score)

    def run(model: Any) -> torch.Tensor:
        rows = torch.zeros(1, model.settings.text.hidden_size, dtype=model.settings.dtype)
        logits: torch.Tensor = model.compute_logits(rows)
        monkeypatch.setattr(model.vllm_config.model_config, "max_logprobs", 20)  # vLLM's default
        head = next(call for call in model.warm_up_calls() if call.name == "the head")
        for count in (1, 2, 3):
            ids = torch.zeros(count, dtype=torch.int64)
            head.run(ids, ids, rows.expand(count, -1))
        return logits

    logits = engines().on_model(run)
    counts = [ids[1] for _, _, ids in asked]
    assert {(shape, stride[0] % 16) for shape, stride, _ in asked} == {
        (tuple(logits.shape), logits.stride(0) % 16)
    }
    # Up to 20 tokens and the chosen one.
    assert set(counts) == {1, 2, 3, 4, 5, 8, 9, 16, 17, 21} and len(counts) == len(set(counts))
