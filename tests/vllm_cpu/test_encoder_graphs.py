"""The vision tower behind vLLM's own encoder graph manager: buckets, packing, what fills them up.

A CPU has no CUDA graphs: where the manager would capture one, a stand-in computes the same again.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from vllm.model_executor.models.interfaces import supports_encoder_cudagraph
from vllm.v1.worker import encoder_cudagraph
from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

from inkling_portable.backends.reference import towers as reference
from inkling_portable.model.config import VisionConfig
from inkling_portable.model.encoder_graphs import LARGEST, SMALLEST, GraphedImages
from inkling_portable.model.multimodal import InklingForConditionalGeneration
from inkling_portable.model.towers import VisionTower

OPS = SimpleNamespace(norm_gelu=reference.norm_gelu, dmel_embed_norm=reference.dmel_embed_norm)


class Pictures(GraphedImages):
    def __init__(self) -> None:
        self.visual = VisionTower(VisionConfig(96, 8, 2, 3, 4, 1e-6), OPS)
        generator = torch.Generator().manual_seed(5)
        for parameter in self.visual.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data = noise / parameter.shape[-1] ** 0.5


class Replay:
    """What a graph does: read the buffers, write the output."""

    def __init__(self, model: Pictures, inputs: dict[str, Tensor], output: Tensor) -> None:
        self.model, self.inputs, self.output = model, inputs, output

    def replay(self) -> None:
        self.output.copy_(self.model.encoder_cudagraph_forward(self.inputs))


class Manager(EncoderCudaGraphManager):
    """vLLM's manager without a GPU. Rows behind the pictures are NaN, so that they would show."""

    used: list[int]

    def _capture_budget_graph(self, token_budget: int, *args: Any, **kwargs: Any) -> None:
        inputs = self.model.prepare_encoder_cudagraph_capture_inputs(
            token_budget, self.max_batch_size, self.max_frames_per_batch, self.device, self.dtype,
            "default", (),
        ).values  # fmt: skip
        output = torch.empty_like(self.model.encoder_cudagraph_forward(inputs))
        self._get_graph_set()[token_budget] = encoder_cudagraph.BudgetGraphMetadata(
            token_budget, self.max_batch_size, self.max_frames_per_batch,
            Replay(self.model, inputs, output), inputs, output,
        )  # fmt: skip

    @staticmethod
    def _copy_padded_buffer(dst: Tensor, src: Tensor) -> None:
        dst.fill_(float("nan"))
        dst[: src.shape[0]].copy_(src)

    def _run_budget_graph(self, mm_kwargs: Any, token_budget: int, **kwargs: Any) -> Any:
        self.used.append(token_budget)
        return super()._run_budget_graph(mm_kwargs, token_budget, **kwargs)


def manager(rows: int = 256, budgets: tuple[int, ...] = ()) -> Manager:
    compilation = SimpleNamespace(
        encoder_cudagraph_token_budgets=list(budgets),
        encoder_cudagraph_max_vision_items_per_batch=0,
        encoder_cudagraph_max_frames_per_batch=None,
    )
    multimodal = SimpleNamespace(get_limit_per_prompt=lambda _: 0, mm_encoder_tp_mode="weights")
    config = SimpleNamespace(
        compilation_config=compilation,
        model_config=SimpleNamespace(multimodal_config=multimodal),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=rows),
    )
    made = Manager(config, torch.device("cpu"), torch.float32, Pictures())  # type: ignore[arg-type]
    made.used = []
    made.capture(graph_pool=object())
    return made


@pytest.fixture(scope="module")
def graphs() -> Manager:
    return manager()


def pictures(sizes: list[int]) -> tuple[dict[str, Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(sum(sizes))
    parts = [torch.randn(size, 1, 8, 8, 3, generator=generator) for size in sizes]
    return {"pixel_values": torch.cat(parts), "num_patches": torch.tensor(sizes)}, parts


def test_the_engine_finds_every_answer() -> None:
    assert supports_encoder_cudagraph(Pictures())
    model = InklingForConditionalGeneration.__new__(InklingForConditionalGeneration)
    torch.nn.Module.__init__(model)
    assert supports_encoder_cudagraph(model)


@settings(max_examples=30)
@given(sizes=st.lists(st.integers(1, 300), min_size=1, max_size=9))
def test_pictures_in_buckets_equal_pictures_alone(graphs: Manager, sizes: list[int]) -> None:
    """Some in one bucket, some over several, some larger than the largest one."""
    fields, parts = pictures(sizes)
    graphs.used.clear()
    found = graphs.execute(fields)
    for rows, part in zip(found, parts, strict=True):
        alone = graphs.model.visual(part)
        # A matrix product of another height may add in another order.
        assert rows.shape == alone.shape and (rows - alone).abs().max() <= 5e-6
    assert set(graphs.used) <= {64, 128, 256}
    assert bool(graphs.used) == any(size <= 256 for size in sizes)


def test_buckets() -> None:
    """Powers of two up to what a step can take, or what the user says."""
    range_of = Pictures().get_encoder_cudagraph_budget_range
    for rows, most in ((8, SMALLEST), (8192, 8192), (100_000, LARGEST)):
        config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=rows))
        assert range_of(config) == (SMALLEST, most)  # type: ignore[arg-type]
    made = manager(budgets=(100, 70))
    assert made.token_budgets == [70, 100]
    fields, _ = pictures([60, 90])
    made.execute(fields)
    assert made.used == [70, 100]


def test_output_outlives_the_next_replay(graphs: Manager) -> None:
    """A graph writes where it wrote before; what the engine holds must not change."""
    fields, _ = pictures([20])
    [first] = graphs.execute(fields)
    kept = first.clone()
    graphs.execute(pictures([33])[0])
    assert torch.equal(first, kept)


def test_without_a_tower_it_is_a_sentence() -> None:
    bare = Pictures()
    bare.visual = None
    with pytest.raises(ValueError, match="cudagraph_mm_encoder needs a vision tower"):
        bare.get_encoder_cudagraph_config()
