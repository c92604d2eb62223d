"""The start-up check on loaded weights: one line if all is well, else a sentence."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from inkling_portable import agreement
from inkling_portable.inputs import SeededDraw
from inkling_portable.model import self_check
from inkling_portable.model.engine import CacheLayer
from inkling_portable.registry import SelectionError, contract
from tests.vllm_cpu.conftest import Engine

OPS = {"embed_norm", "rms_norm", "conv_sources", "qkvr_prep", "rel_attention", "conv_residual_norm",
       "gate_logits", "route", "swiglu", "sink_experts", "routed_experts"}  # fmt: skip


def checked(engine: Engine) -> str:
    def run(model: Any) -> str:
        caches = [layer.kv_cache for layer in model.modules() if isinstance(layer, CacheLayer)]
        kept = [cache.clone() for cache in caches]
        line = self_check.check(model, model.vllm_config)
        assert all(torch.equal(a, b) for a, b in zip(kept, caches, strict=True)), "pages were lent"
        assert line is not None
        return line

    return engine.on_model(run)


def test_a_sound_model_gets_one_line(engines: Callable[..., Engine]) -> None:
    line = checked(engines())
    found = re.fullmatch(r"self-check: (\d+) ops agree with their contracts on the loaded "
                         r"weights, in (.*); nearest .* at \d+ %; (\d+\.\d) s", line)  # fmt: skip
    assert found and int(found[1]) >= 18 and float(found[3]) < 3, line
    for kind in ("(local, dense)", "(local, sparse)", "(global, sparse)"):
        assert kind in found[2]


@pytest.mark.parametrize("form", ["bf16", "nvfp4", "mxfp4", "fp8"])
def test_experts_of_every_format_are_held_to_their_contract(form: str) -> None:
    """Models keep codes of 8 bits as floating numbers, contracts draw them as bytes."""
    op = contract("routed_experts")
    given = next(drawn for seed in range(200) if (drawn := op.inputs(SeededDraw(seed)))["format"]
                 == form and len(drawn["x"]) > 4)  # fmt: skip
    for name in {"nvfp4": ("w13_scale", "w2_scale"), "fp8": ("w13", "w2")}.get(form, ()):
        given[name] = given[name].view(torch.float8_e4m3fn)
    less = self_check._less(given, 0)
    found, share = agreement.held(op, op.reference, less)
    assert found == [] and share <= 1 and len(less["x"]) == 4


@pytest.mark.parametrize("op", sorted(OPS - {"routed_experts"}))
def test_a_faulty_kernel_is_refused(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    """One number of what a kernel returns or writes is off: the server does not start."""

    def run(model: Any) -> str:
        for ops in {id(m.ops): m.ops for m in model.modules() if hasattr(m, "ops")}.values():
            kernel = getattr(ops, op)

            def faulty(*args: Any, kernel: Any = kernel, **given: Any) -> Any:
                found = kernel(*args, **given)
                outputs = found if isinstance(found, tuple) else (found,)
                written = {"rel_attention": "out", "conv_sources": "out"}.get(op)
                spoilt = outputs[0] if written is None else given.get(written)
                if spoilt is not None:
                    flat = spoilt.view(-1)
                    at = int(flat.abs().argmax())
                    flat[at] = flat[at] * 1.01 + 1
                return found

            monkeypatch.setattr(ops, op, faulty)
        with pytest.raises(SelectionError) as refused:
            self_check.check(model, model.vllm_config)
        return str(refused.value)

    said = engines().on_model(run)
    assert re.match(rf"{op} by reference in (the embedding|model\.layers\.\d+ \((local|global), "
                    r"(dense|sparse)\)) breaks its contract on the loaded weights, ",
                    said)  # fmt: skip
    assert said.endswith(f"ask for {op}=reference, or serve all the same with "
                         "INKLING_PORTABLE_SELF_CHECK=off")  # fmt: skip


def test_what_leaves_it_out(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(model: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(model.vllm_config.load_config, "load_format", "dummy")
            assert self_check.check(model, model.vllm_config) is None
        with monkeypatch.context() as patch:
            facts = dataclasses.replace(model.settings.facts, batch_invariant=True)
            patch.setattr(model, "settings", dataclasses.replace(model.settings, facts=facts))
            assert self_check.check(model, model.vllm_config) is None
        monkeypatch.setenv(self_check.VARIABLE, "off")
        assert self_check.check(model, model.vllm_config) is None

    engines().on_model(run)
