"""Adapters through vLLM's engine equal merged weights in transformers; bad ones are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from inkling_portable.commands.tiny import write_tiny
from inkling_portable.model import checkpoint as names
from inkling_portable.model import lora
from inkling_portable.model.config import parse
from inkling_portable.model.experts import SinkLinears
from tests.vllm_cpu.conftest import SOFT_BOUND, Engine, Oracle, dense, prompt, soften_head

Pair = tuple[Tensor, Tensor]
LENGTHS = (1, 5, 17, 40, 103)
LAYER = "model.llm.layers"
Q, SINKS = f"{LAYER}.0.attn.wq_du", f"{LAYER}.1.mlp.shared_experts"


def stored(folder: Path) -> dict[str, Tensor]:
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


@dataclass
class Adapter:
    """Pairs A [r, in] and B [out, r] by module name, as a file and as merged weights."""

    pairs: dict[str, Pair]
    rank: int
    alpha: int

    def write(self, folder: Path, prefix: str = "base_model.model.") -> Path:
        tensors = {}
        for name, (a, b) in self.pairs.items():
            tensors[f"{prefix}{name}.lora_A.weight"] = a
            tensors[f"{prefix}{name}.lora_B.weight"] = b
        return write(folder, tensors, self.rank, self.alpha)

    def merge(self, tensors: dict[str, Tensor]) -> None:
        """Add the product of every pair to the weight of a checkpoint in the original naming."""
        for name, (a, b) in self.pairs.items():
            delta = (self.alpha / self.rank) * (b.double() @ a.double()).float()
            where, _, part = name.rpartition(".")
            if part in ("gate_proj", "up_proj"):
                tensors[f"{where}.w13_dn.weight"][part == "up_proj" :: 2] += delta
                continue
            if not where.endswith("shared_experts"):
                tensors[f"{name}.weight"] += delta
                continue
            whole = tensors[f"{where}.shared_{'w2' if part == 'w2' else 'w13'}_weight"]
            if part == "w2":  # columns of all sinks, sink after sink
                whole += delta.unflatten(1, (whole.shape[0], -1)).transpose(0, 1)
            else:
                rows = whole[:, 0::2] if part == "w1" else whole[:, 1::2]
                rows += delta.unflatten(0, (whole.shape[0], -1))


def write(folder: Path, tensors: dict[str, Tensor], rank: int, alpha: int = 8) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"r": rank, "lora_alpha": alpha, "target_modules": "all-linear", "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def draw(weights: dict[str, Tensor], keep: Callable[[str], bool], rank: int, alpha: int) -> Adapter:
    """Pairs whose products are a third as large as the weights that they are added to."""
    dice = torch.Generator().manual_seed(rank)
    pairs = {}
    for name, weight in weights.items():
        if keep(name):
            rows, columns = weight.shape
            a = torch.randn(rank, columns, generator=dice)
            b = torch.randn(rows, rank, generator=dice) * weight.std() * rank**0.5 / (3 * alpha)
            pairs[name] = (a, b)
    return Adapter(pairs, rank, alpha)


def adaptable(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Two-dimensional weights by the module name that an adapter uses."""
    out = {}
    for name, weight in tensors.items():
        if ".mtp." in name:
            continue
        where, _, last = name.rpartition(".")
        if last == "shared_w13_weight":
            out[f"{where}.w1"] = weight[:, 0::2].flatten(0, 1)
            out[f"{where}.w3"] = weight[:, 1::2].flatten(0, 1)
        elif last == "shared_w2_weight":
            out[f"{where}.w2"] = weight.transpose(0, 1).flatten(1)
        elif where.endswith(("wq_du", "wk_dv", "wv_dv", "wr_du", "wo_ud", "w13_dn", "w2_md",
                             "unembed")):  # fmt: skip
            out[where] = weight
    return out


@dataclass
class Served:
    """An adapter as requests name it, and transformers with it merged."""

    request: Any
    oracle: Oracle

    def check(self, ids: list[int], found: Tensor, rows: slice) -> None:
        """Assert that `found` is no further from float64 than twice what transformers is.

        Not compared with its float32: merged weights round elsewhere than a product of its own.
        """
        answer = self.oracle.answer(ids)
        error = (found.double() - answer.double[rows]).abs().max().item()
        assert error <= answer.bound, f"{len(ids)} tokens, {self.request}: {error:.2e}"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text preset with two KV heads in every layer, which two ranks can share."""
    folder = tmp_path_factory.mktemp("even")
    write_tiny(folder, preset="text", dtype="float32", force=True, num_key_value_heads=2)
    soften_head(folder)
    return folder


@pytest.fixture(scope="module")
def served(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Served]:
    """None, one adapter of every module, one of a few under Hugging Face names."""
    from vllm.lora.request import LoRARequest

    folder = tmp_path_factory.mktemp("adapters")
    tensors = stored(base)
    weights = adaptable(tensors)
    every = draw(weights, lambda name: True, 8, 16)
    w13 = weights[f"{LAYER}.0.mlp.w13_dn"]
    halves = {f"{LAYER}.0.mlp.gate_proj": w13[0::2], f"{LAYER}.0.mlp.up_proj": w13[1::2]}
    some = draw(
        weights | halves,
        lambda name: (".attn." in name and ".2." not in name) or name in halves or "w2_md" in name,
        4, 4,
    )  # fmt: skip
    assert len(every.pairs) == 4 * 5 + 2 + 3 * 3 + 1
    assert len(some.pairs) == 3 * 5 + 3
    hf = {"model.llm": "model", "attn": "self_attn", "wq_du": "q_proj", "wk_dv": "k_proj",
          "wv_dv": "v_proj", "wr_du": "r_proj", "wo_ud": "o_proj",
          "w2_md": "down_proj"}  # fmt: skip

    def spelled(name: str) -> str:
        for old, new in hf.items():
            name = name.replace(old, new)
        return name

    renamed = Adapter({spelled(n): pair for n, pair in some.pairs.items()}, some.rank, some.alpha)
    found = [Served(None, Oracle(base, SOFT_BOUND))]
    for number, (adapter, file) in enumerate(((every, every), (some, renamed)), start=1):
        path = file.write(folder / str(number))
        merged = folder / f"merged{number}"
        shutil.copytree(base, merged)
        for old in merged.glob("*.safetensors*"):
            old.unlink()
        changed = {n: t.clone() for n, t in tensors.items()}
        adapter.merge(changed)
        save_file(changed, merged / "model.safetensors")
        found.append(
            Served(LoRARequest(str(number), number, str(path)), Oracle(merged, SOFT_BOUND))
        )
    return found


def start(folder: Path, **options: Any) -> Engine:
    return Engine(folder, enable_lora=True, max_loras=2, max_lora_rank=8, max_model_len=256,
                  **options)  # fmt: skip


@pytest.fixture(scope="module")
def engine(base: Path) -> Engine:
    return start(base)


def run(
    engine: Engine, prompts: list[list[int]], requests: list[Any], **sampling: Any
) -> list[Any]:
    """The outputs of all prompts in one batch, each with its own adapter or None."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, ignore_eos=True, **sampling)
    inputs = [{"prompt_token_ids": ids} for ids in prompts]
    return engine.llm.generate(inputs, params, use_tqdm=False, lora_request=requests)


def test_adapters_and_base_in_one_batch(engine: Engine, served: list[Served]) -> None:
    check_one_batch(engine, served)


def check_one_batch(engine: Engine, served: list[Served]) -> None:
    # Both slots are taken, and neighbouring rows belong to different adapters.
    ids = prompt(LENGTHS[-1])
    plain, *others = (one.oracle.answer(ids).double for one in served)
    assert all((plain - other).abs().max() > 0.1 for other in others)
    cases = [(one, n) for n in LENGTHS for one in served]
    prompts, requests = [ids[:n] for _, n in cases], [one.request for one, _ in cases]
    found = run(engine, prompts, requests, max_tokens=5, logprobs=-1)
    for (one, n), out in zip(cases, found, strict=True):
        one.check(ids, dense(out.outputs[0].logprobs)[:1], slice(n - 1, n))
        one.oracle.assert_greedy(ids[:n], list(out.outputs[0].token_ids))


def test_prompt_logprobs_of_every_adapter(engine: Engine, served: list[Served]) -> None:
    # One alone, and all in a step, whose 9 requests could pass for the 9 rows of a prompt.
    ids = prompt(40, seed=3)
    cases = [(one, n) for n in (40, 9, 14) for one in served]
    for chosen in ([cases[1]], cases):
        prompts, requests = [ids[:n] for _, n in chosen], [one.request for one, _ in chosen]
        found = run(engine, prompts, requests, max_tokens=1, prompt_logprobs=-1, logprobs=-1)
        for (one, n), out in zip(chosen, found, strict=True):
            rows = dense(out.prompt_logprobs[1:]), dense(out.outputs[0].logprobs)
            one.check(ids, torch.cat(rows), slice(0, n))


def pair(name: str, rows: int, columns: int, rank: int = 4) -> dict[str, Tensor]:
    return {f"{name}.lora_A.weight": torch.ones(rank, columns),
            f"{name}.lora_B.weight": torch.ones(rows, rank)}  # fmt: skip


BAD = {
    "a layer that is not there": (
        pair(f"{LAYER}.9.attn.wq_du", 128, 128),
        r"changes model\.layers\.9\.attn\.wq_du, which is no module that takes adapters",
    ),
    "sinks of a dense layer": (
        pair(f"{LAYER}.0.mlp.shared_experts.w2", 128, 128),
        r"changes model\.layers\.0\.mlp\.sink_experts\.w2, which is no module",
    ),
    "a draft's layer": (pair("model.mtp.layers.0.attn.wq_du", 128, 128), "model.mtp.layers.0"),
    "routed experts": (
        pair(f"{LAYER}.1.mlp.experts.0.w1", 64, 128),
        r"received \['model\.layers\.1\.mlp\.experts\.0\.w1'",
    ),
    "a convolution": (pair(f"{LAYER}.0.attn.k_sconv", 64, 4), r"received \['.*k_sconv'"),
    "A too narrow": (pair(Q, 128, 127), r"lora_A of .*wq_du needs shape \[4, 128\]; found"),
    "B too short": (pair(Q, 100, 128), r"lora_B of .*wq_du needs shape \[128, 4\]; found \[100"),
    "sinks of one sink": (pair(f"{SINKS}.w1", 64, 128), r"w1 needs shape \[128, 4\]; found \[64"),
    "head of a short vocabulary": (
        pair("model.llm.unembed", 440, 128),
        r"lora_B of lm_head needs shape \[512, 4\] or \[500, 4\]; found \[440, 4\]",
    ),
    "another rank than configured": (pair(Q, 128, 128, rank=2), r"needs shape \[4, 128\]; found"),
    "both namings of an MLP": (
        pair(f"{LAYER}.0.mlp.w13_dn", 384, 128) | pair("model.layers.0.mlp.up_proj", 192, 128),
        "both model.layers.0.mlp.gate_up_proj and a half of it",
    ),
    "half an MLP too short": (
        pair("model.layers.0.mlp.gate_proj", 190, 128),
        r"lora_B of model\.layers\.0\.mlp\.gate_proj needs shape \[192, 4\]; found \[190, 4\]",
    ),
    "a dense half in a layer of experts": (
        pair("model.layers.1.mlp.gate_proj", 192, 128),
        "layers.1.mlp.gate_proj, which is no",
    ),
    "half a pair": (
        {f"{Q}.lora_A.weight": torch.ones(4, 128)},
        r"has no lora_B for model\.layers\.0\.attn\.wq_du",
    ),
    "no tensors": ({}, "the adapter has no tensors"),
    "a whole weight": ({f"{Q}.weight": torch.ones(128, 128)}, "unsupported LoRA weight"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_adapter_is_refused(
    engine: Engine, served: list[Served], tmp_path: Path, kind: str
) -> None:
    from vllm.lora.request import LoRARequest

    tensors, sentence = BAD[kind]
    path = write(tmp_path / "bad", tensors, 4)
    with pytest.raises(ValueError, match=sentence):
        engine.llm.llm_engine.add_lora(LoRARequest(kind, 100 + [*BAD].index(kind), str(path)))
    ids = prompt(7)
    served[0].oracle.assert_greedy(ids, engine.greedy([ids], 2)[0])


def test_routed_experts_that_the_engine_wraps_and_layers_that_it_leaves(base: Path) -> None:
    # A manager as on a GPU: it wrapped the experts of layer 1 and, of the attentions, layer 0's.
    text = parse(json.loads((base / "config.json").read_text())).text
    parts = [f"experts.{e}.{part}_proj" for e in range(8) for part in ("gate", "down", "up")]
    where = "model.layers.1.mlp."
    taken: list[Any] = []
    manager = SimpleNamespace(
        modules={"model.layers.0.attn.wo_ud": SimpleNamespace(
            lora_a_stacked=(torch.ones(2, 1, 4, 128),), lora_b_stacked=torch.ones(2, 1, 128, 4))},
        packed_modules={f"{where}experts": [where + part for part in parts]},
        add_adapter=taken.append,
        set_adapter_mapping=None,
        supported_lora_modules=[],
        lora_config=SimpleNamespace(max_lora_rank=8),
    )  # fmt: skip

    class Model(lora.TakesAdapters):
        def adapter_targets(self, routed: Sequence[str]) -> Any:
            known = lora.targets(text, routed)
            return known, {name for name in known if ".layers.3." not in name}

    Model().lora_manager = manager

    def add(name: str, rows: int, columns: int) -> None:
        pair = SimpleNamespace(rank=4, is_packed=False, lora_a=torch.ones(4, columns),
                               lora_b=torch.ones(rows, 4))  # fmt: skip
        manager.add_adapter(SimpleNamespace(loras={name: pair}))

    add(f"{where}experts.7.up_proj", 64, 128)
    add(f"{where}experts.7.down_proj", 128, 64)
    add("model.layers.0.attn.wo_ud", 128, 128)
    add("model.layers.3.attn.wo_ud", 128, 128)  # of another pipeline stage
    assert len(taken) == 4
    for name, sentence in (
        ("model.layers.1.attn.wo_ud", "is no module that takes adapters"),
        (f"{where}experts.8.up_proj", "is a routed expert"),
        (f"{where}experts.7.down_proj", r"lora_A of .*down_proj needs shape \[4, 64\]"),
    ):
        with pytest.raises(lora.AdapterError, match=sentence):
            add(name, 128, 128)
    (layer,) = manager.modules.values()
    assert layer.lora_a_stacked[0].flatten(1).sum(1).tolist() == [512, 512, 0]
    assert layer.lora_b_stacked.flatten(1).sum(1).tolist() == [512, 512, 0]


class Half(SimpleNamespace):
    """Stands for vLLM's pair of matrices."""

    def __init__(self, name: str, rank: int, alpha: int, a: Tensor, b: Tensor, scaling: float):
        super().__init__(rank=rank, lora_alpha=alpha, lora_a=a, lora_b=b, scaling=scaling)


def test_halves_of_an_mlp_join_in_alternating_rows() -> None:
    dice = torch.Generator().manual_seed(0)

    def half(rank: int, scaling: float) -> Half:
        a, b = torch.randn(rank, 5, generator=dice), torch.randn(3, rank, generator=dice)
        return Half("", rank, 8, a, b, scaling)

    def product(pair: Any) -> Tensor:
        return pair.scaling * (pair.lora_b @ pair.lora_a)

    gate, up = half(2, 3.0), half(4, 0.5)
    loras: dict[str, Any] = {"x.mlp.gate_proj": gate, "x.mlp.up_proj": up, "y.mlp.up_proj": up,
                             "z.mlp.experts.1.up_proj": up}  # fmt: skip
    lora.join_halves(loras, 6)
    assert set(loras) == {"x.mlp.gate_up_proj", "y.mlp.gate_up_proj", "z.mlp.experts.1.up_proj"}
    both, alone = loras["x.mlp.gate_up_proj"], loras["y.mlp.gate_up_proj"]
    assert (both.rank, alone.rank) == (6, 4)
    torch.testing.assert_close(product(both)[0::2], product(gate))
    torch.testing.assert_close(product(both)[1::2], product(up))
    torch.testing.assert_close(product(alone)[1::2], product(up))
    assert not product(alone)[0::2].any()
    loras = {"x.mlp.gate_proj": gate, "x.mlp.up_proj": up}
    with pytest.raises(lora.AdapterError, match="rank 5; set it to 6"):
        lora.join_halves(loras, 5)


@pytest.mark.parametrize("naming", ["original", "Hugging Face"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_sinks_of_every_rank(base: Path, ranks: int, naming: str) -> None:
    # Four ranks share two sinks, so that each rank has half of one.
    tensors = stored(base)
    config = parse(json.loads((base / "config.json").read_text()))
    full = adaptable(tensors)
    sinks = {name.rpartition(".")[2]: tensors[name] for name in tensors if SINKS in name}
    where = SINKS
    if naming == "Hugging Face":
        w13, where = sinks["shared_w13_weight"], "model.layers.1.mlp.shared_experts"
        sinks = {"gate_proj": w13[:, 0::2], "up_proj": w13[:, 1::2],
                 "down_proj": sinks["shared_w2_weight"]}  # fmt: skip
    total = full[f"{SINKS}.w1"].shape[0]
    share = total // ranks
    for rank in range(ranks):
        experts = names.Experts(rank=rank, size=ranks)
        shard = names.Shard(rank, ranks, experts, sink_linears=True)
        plan = names.plan(config, {f"{where}.x": ()}, shard, range(4))
        found = {"w13": torch.full((2 * share, 128), torch.nan),
                 "w2": torch.full((128, share), torch.nan)}  # fmt: skip
        for name, tensor in sinks.items():
            for copy in plan[f"{where}.{name}"].copies:
                found[copy.param.split(".")[-2]][copy.into] = tensor[copy.of]
        mine = slice(rank * share, (rank + 1) * share)
        assert torch.equal(found["w13"][:share], full[f"{SINKS}.w1"][mine])
        assert torch.equal(found["w13"][share:], full[f"{SINKS}.w3"][mine])
        assert torch.equal(found["w2"], full[f"{SINKS}.w2"][:, mine])


def test_sinks_of_a_step_take_nothing_from_the_host() -> None:
    """A CUDA graph copies nothing from the host; without a GPU, asking for a copy is an error."""
    with FakeTensorMode():
        x, up, inner = (torch.empty(5, n, device="cuda") for n in (8, 24, 6))
        sinks: Any = SimpleNamespace(run=6, w13=lambda x: up, w2=lambda x: x)
        sinks.sinks = torch.empty(2, dtype=torch.int64, device="cuda")
        sinks.ops = SimpleNamespace(swiglu=lambda gate_up, interleaved, weight: inner.repeat(2, 1))
        given = SinkLinears.forward(sinks, x, torch.empty(5, 2, device="cuda"))
        assert given.shape == (5, 12)


@pytest.fixture
def two_ranks(base: Path) -> Iterator[Engine]:
    built = start(base, tensor_parallel_size=2)
    yield built
    built.llm.llm_engine.engine_core.shutdown()


# Last: the end of an engine of several processes takes the process groups of others with it.
def test_adapters_on_two_ranks(two_ranks: Engine, served: list[Served]) -> None:
    check_one_batch(two_ranks, served)


@pytest.fixture
def two_stages(base: Path) -> Iterator[Engine]:
    built = start(base, pipeline_parallel_size=2, max_num_batched_tokens=256)
    yield built
    built.llm.llm_engine.engine_core.shutdown()


def test_adapters_in_two_pipeline_stages(two_stages: Engine, served: list[Served]) -> None:
    # Either stage has half of the modules that the first adapter changes.
    check_one_batch(two_stages, served)
