"""Which class serves, who chose it, and that requests about ops are obeyed or refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from inkling_portable import plugin
from tests.vllm_cpu.conftest import Engine, Oracle, prompt

RESOLVE = """
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.model_executor.models import ModelRegistry
for name in ("InklingForCausalLM", "InklingForConditionalGeneration", "InklingMTPModel"):
    print("resolved", name, ModelRegistry.models[name].module_name)
"""


def resolved(value: str) -> dict[str, str]:
    """Module of each architecture in a fresh interpreter with INKLING_PORTABLE=value."""
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE], env={**os.environ, "INKLING_PORTABLE": value},
        capture_output=True, text=True, check=True, cwd="/",
    )  # fmt: skip
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("resolved ")]
    return {name: module for _, name, module in lines}


def test_the_plugin_is_what_resolves() -> None:
    assert resolved("on") == {
        name: code.partition(":")[0] for name, code in plugin.ARCHITECTURES.items()
    }


def test_off_leaves_the_class_in_the_tree() -> None:
    assert set(resolved("off").values()) == {"vllm.models.inkling"}


def test_our_class_serves_without_remote_code(engines: Callable[..., Engine]) -> None:
    engine = engines(block_size=16)
    assert engine.on_model(lambda model: type(model).__module__) == "inkling_portable.model.inkling"
    config = engine.llm.llm_engine.vllm_config.model_config
    assert type(config.hf_config).__module__ == "inkling_portable.model.hf_configs"
    assert not config.trust_remote_code


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
