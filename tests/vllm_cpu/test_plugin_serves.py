"""Which class serves, who chose it, and that requests about ops are obeyed or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inkling_portable import plugin
from tests import nursery
from tests.vllm_cpu.conftest import Engine, Oracle, prompt


def resolve() -> dict[str, str]:
    """Module of each architecture."""
    from vllm.model_executor.models import ModelRegistry
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    names = ("InklingForCausalLM", "InklingForConditionalGeneration", "InklingMTPModel")
    return {name: ModelRegistry.models[name].module_name for name in names}


def resolved(monkeypatch: pytest.MonkeyPatch, value: str) -> dict[str, str]:
    """The same in a process that has loaded no plugins, with INKLING_PORTABLE=value."""
    monkeypatch.setenv("INKLING_PORTABLE", value)
    found: dict[str, str] = nursery.call(resolve)
    return found


def test_the_plugin_is_what_resolves(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolved(monkeypatch, "on") == {
        name: code.partition(":")[0] for name, code in plugin.ARCHITECTURES.items()
    }


def test_off_leaves_the_class_in_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(resolved(monkeypatch, "off").values()) == {"vllm.models.inkling"}


def test_our_class_serves_without_remote_code(engines: Callable[..., Engine]) -> None:
    engine = engines(block_size=16)
    assert engine.on_model(lambda model: type(model).__module__) == "inkling_portable.model.inkling"
    config = engine.llm.llm_engine.vllm_config.model_config
    assert type(config.hf_config).__module__ == "inkling_portable.model.hf_configs"
    # What memory between ranks is made for.
    rows = engine.on_model(lambda model: model.settings.facts.step_rows)
    assert rows == engine.llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens == 1024
    assert not config.trust_remote_code


def resolved_graphs(support: Any, mode: Any, rows: int) -> str:
    """The CUDA-graph mode that vLLM makes of an asked one, or why it stops.

    support: the least of a model's cache backends; rows: of a decoding request, drafts included.
    """
    from vllm.config import CompilationConfig

    try:
        config = CompilationConfig(cudagraph_mode=mode)
        found = config.resolve_cudagraph_mode_and_sizes(support, "", rows, use_v2_model_runner=True)
    except ValueError as error:
        return str(error)
    return str(found)


def test_graphs_resolve_as_those_of_the_class_in_the_tree() -> None:
    """For every mode that can be asked for, with and without drafts."""
    from vllm.config import CUDAGraphMode
    from vllm.config.vllm import default_breakable_cudagraph_architectures
    from vllm.models.inkling.nvidia.attention import FlashAttentionBackend
    from vllm.models.inkling.nvidia.sconv_swa_attn import InklingSconvMetadataBuilder

    from inkling_portable.model.attention import RelAttentionBackend
    from inkling_portable.model.short_conv import ConvBackend

    ours = [backend.get_builder_cls() for backend in (RelAttentionBackend, ConvBackend)]
    theirs = [FlashAttentionBackend.get_builder_cls(), InklingSconvMetadataBuilder]
    least, wanted = (
        min((b.get_cudagraph_support(None, None) for b in builders), key=lambda s: s.value)
        for builders in (ours, theirs)
    )
    for mode in CUDAGraphMode:
        for rows in (1, 2, 9):
            found = resolved_graphs(least, mode, rows)
            assert found == resolved_graphs(wanted, mode, rows), (mode, rows)
    usual = CUDAGraphMode.FULL_AND_PIECEWISE
    assert {resolved_graphs(least, usual, rows) for rows in (1, 9)} == {str(usual)}
    # Captures that break at attention are switched on by the name of what serves.
    assert set(plugin.ARCHITECTURES) & set(default_breakable_cudagraph_architectures())


def test_registering_again_changes_nothing() -> None:
    from vllm.model_executor.models import ModelRegistry

    plugin.register()
    before = {name: ModelRegistry.models[name] for name in plugin.ARCHITECTURES}
    plugin.register()
    assert before == {name: ModelRegistry.models[name] for name in plugin.ARCHITECTURES}


@pytest.mark.parametrize("version", ["0.25.9", "0.34.0", "1.0", "unknown"])
def test_other_versions_are_refused(version: str) -> None:
    with pytest.raises(plugin.VersionError, match=r"0\.26 to 0\.33.*INKLING_PORTABLE=off"):
        plugin.check_version(version)


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0+cpu", "0.33.1rc2"])
def test_versions_in_range_are_accepted(version: str) -> None:
    plugin.check_version(version)


def test_a_request_for_an_op_is_obeyed(engines: Callable[..., Engine], oracle: Oracle) -> None:
    engine = engines(additional_config={"inkling_portable": {"routed_experts": "reference"}})
    assert engine.on_model(lambda model: type(model.model.layers[1].mlp.experts).__name__) == (
        "OwnExperts"
    )
    ids = prompt(40)
    (found,) = engine.prompt_logprobs([ids])
    oracle.answer(ids).check(found, slice(0, -1), "experts of the reference")


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        ({"rel_atention": "reference"}, "unknown op 'rel_atention'.*rel_attention"),
        ({"rel_attention": "cuda"}, "rel_attention=cuda.*offered by.*reference"),
        ({"rms_norm": "triton"}, "rms_norm=triton cannot be obeyed on cpu.*reference"),
    ],
)
def test_a_request_that_cannot_be_obeyed_stops_the_start(
    checkpoint: Path, request_: dict[str, str], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        Engine(checkpoint, additional_config={"inkling_portable": request_})
