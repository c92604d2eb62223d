"""vLLM's real engine on a CPU, in this process, and transformers beside it.

Engines are built once per set of options and share the checkpoint. The engine runs in-process so
that a test can look at the model that serves.
"""

from __future__ import annotations

import os

# Read by vLLM and torch when they are imported. A second thread would spin while a neighbour on
# the same two cores works.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
# By default vLLM wants a memory node of its own for every rank on a CPU.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from inkling_portable.commands.tiny import write_tiny
from tests import hf_oracle, nursery  # noqa: F401  (the nursery takes the place of spawning)

ROOT = Path(__file__).resolve().parents[2]

AS_A_USER = {
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "PYTHONPATH": f"{ROOT / 'tests' / 'forking'}:{ROOT}",
}
"""Of a server: the engine in processes of its own, unlike that of other tests, but forked ones."""

LARGEST_BOUND = 1e-5
"""No bound is ever above this; a prototype of the same model reached 3.3e-6."""

SOFT_BOUND = 5e-6
"""The bound on log-probabilities of a checkpoint whose head is softened, see `soften_head`."""

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_batched_tokens": 1024,
    "max_num_seqs": 32,
    "kv_cache_memory_bytes": 64 << 20,
    "gpu_memory_utilization": 0.1,
    "block_size": 16,
    "max_logprobs": -1,
    "seed": 0,
    "disable_log_stats": False,
}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `text` preset in float32."""
    folder = tmp_path_factory.mktemp("text")
    write_tiny(folder, preset="text", dtype="float32", force=True)
    return folder


def soften_head(folder: Path) -> None:
    """Divide the unembedding of a checkpoint by four, which is exact and which errors follow.

    With the preset's own head (log-probabilities down to -14.5) no float32 model is within 5e-6 of
    the truth: transformers' is 6.2e-6 to 7.8e-6 from its float64 run over four prompts of 60 to
    200 ids, ours 6.3e-6 to 8.1e-6. With the engine's linear layers in float64 ours would be at
    4.8e-6 to 5.1e-6, with all operations but those at 5.5e-6 to 6.0e-6, and with every sum in
    float64 and only what is stored in float32 at 2.7e-6 to 3.4e-6.
    """
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["model.llm.unembed.weight"] /= 4
    save_file(weights, file, metadata={"format": "pt"})


@dataclass(frozen=True)
class Answer:
    """What follows every id of one prompt, as log-probabilities [len(ids), vocabulary]."""

    single: Tensor
    double: Tensor
    largest_bound: float = LARGEST_BOUND

    @property
    def bound(self) -> float:
        """Twice what the same arithmetic in float32 costs transformers on this prompt.

        Shorter prompts are beginnings of a long one and share its bound: from the one or two rows
        of a short prompt alone, the cost would be a matter of luck.
        """
        own = (self.single.double() - self.double).abs().max().item()
        return min(2 * own, self.largest_bound)

    def check(self, found: Tensor, rows: slice, what: str) -> None:
        """Assert that `found` is as near to the float64 truth as the bound says, and to eager."""
        assert found.shape == self.double[rows].shape
        error = (found.double() - self.double[rows]).abs().max().item()
        assert error <= self.bound, f"{what}: {error:.2e} from float64, bound {self.bound:.2e}"
        apart = (found - self.single[rows]).abs().max().item()
        assert apart <= LARGEST_BOUND, f"{what}: {apart:.2e} from eager float32"


class Oracle:
    """Transformers in float32 and in float64."""

    def __init__(self, folder: Path, largest_bound: float = LARGEST_BOUND) -> None:
        self.single, faults = hf_oracle.load(folder, torch.float32)
        assert not any(faults.values()), faults
        self.double, _ = hf_oracle.load(folder, torch.float64)
        self.largest_bound = largest_bound
        self._answers: dict[tuple[int, ...], Answer] = {}

    def answer(self, ids: list[int]) -> Answer:
        key = tuple(ids)
        if key not in self._answers:
            rows = (hf_oracle.logits(m, ids).log_softmax(-1) for m in (self.single, self.double))
            self._answers[key] = Answer(*rows, self.largest_bound)
        return self._answers[key]

    def assert_greedy(self, ids: list[int], tokens: list[int]) -> None:
        """Assert that `tokens` are the most likely ones, each after all before it, in one pass."""
        rows = hf_oracle.logits(self.single, ids + tokens)[len(ids) - 1 : -1]
        assert tokens == rows.argmax(-1).tolist(), f"after {len(ids)} tokens"


@pytest.fixture(scope="session")
def oracle(checkpoint: Path) -> Oracle:
    return Oracle(checkpoint)


class Engine:
    """One LLM; prompts are token ids."""

    def __init__(self, folder: Path, **options: Any) -> None:
        from vllm import LLM

        self.llm = LLM(str(folder), **{**OPTIONS, **options})

    def generate(self, prompts: list[list[int]], **sampling: Any) -> list[Any]:
        from vllm import SamplingParams

        params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **sampling})
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        return self.llm.generate(inputs, params, use_tqdm=False)

    def computed(self, prompts: list[list[int]], **sampling: Any) -> list[Any]:
        """As `generate`, with every row of every prompt computed and none taken from a prefix.

        Prompts of one batch that begin alike would share pages within a step, so each has a salt.
        """
        from vllm import SamplingParams

        self.forget_prefixes()
        params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **sampling})
        inputs = [{"prompt_token_ids": ids, "cache_salt": str(i)} for i, ids in enumerate(prompts)]
        outputs = self.llm.generate(inputs, params, use_tqdm=False)
        assert [out.num_cached_tokens for out in outputs] == [0] * len(prompts)
        return outputs

    def prompt_logprobs(self, prompts: list[list[int]]) -> list[Tensor]:
        """Per prompt, log-probabilities [len - 1, vocabulary] of every next token inside it."""
        outputs = self.computed(prompts, max_tokens=1, prompt_logprobs=-1)
        return [dense(out.prompt_logprobs[1:]) for out in outputs]

    def next_logprobs(self, prompts: list[list[int]]) -> list[Tensor]:
        """Per prompt, log-probabilities [vocabulary] of the token after it."""
        outputs = self.generate(prompts, max_tokens=1, logprobs=-1)
        return [dense(out.outputs[0].logprobs)[0] for out in outputs]

    def greedy(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        return [list(o.outputs[0].token_ids) for o in self.generate(prompts, max_tokens=count)]

    def on_model(self, function: Callable[[Any], Any]) -> Any:
        """The result of a function of the model that serves."""
        return self.llm.apply_model(function)[0]

    def counter(self, name: str) -> float:
        """A counter of the engine's metrics, summed over its labels."""
        return sum(m.value for m in self.llm.get_metrics() if m.name == name)

    def forget_prefixes(self) -> None:
        assert self.llm.reset_prefix_cache()


def dense(rows: list[dict[int, Any]]) -> Tensor:
    table = torch.full((len(rows), max(len(row) for row in rows)), float("nan"))
    for i, row in enumerate(rows):
        for token, entry in row.items():
            table[i, token] = entry.logprob
    return table


@pytest.fixture(scope="session")
def engines(checkpoint: Path) -> Iterator[Callable[..., Engine]]:
    """A function from options to an engine over the shared checkpoint, built once per options."""
    built: dict[str, Engine] = {}

    def get(**options: Any) -> Engine:
        from vllm.distributed import model_parallel_is_initialized

        if not model_parallel_is_initialized():
            built.clear()  # a start that was refused took the process groups of all with it
        key = repr(sorted(options.items()))
        if key not in built:
            built[key] = Engine(checkpoint, **options)
        return built[key]

    yield get
    built.clear()


def prompt(length: int, seed: int = 0, vocabulary: int = 440) -> list[int]:
    """A reproducible prompt of ordinary token ids: the beginning of an endless one."""
    draw = random.Random(seed)
    return [draw.randrange(vocabulary) for _ in range(length)]
