"""vLLM's own experts, called in place: its fused layer with Humming, Marlin and its emulation.

The layer is built as vLLM builds it, filled with the benchmark's weights, and repacked by its own
code; what is timed is its method's `apply`, from the router's weights and ids to the combined sum.
The emulation is what vLLM 0.33 takes on an MI300X: for MXFP4 it unpacks all experts to bfloat16 on
every call, by a kernel of Quark's, and for NVFP4 it unpacks in its product. vLLM is imported only
when a peer is made.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl

from inkling_portable.backends.triton.routed_experts_decode import e2m1_pair, e8m0_scale

Peer = Callable[[dict[str, Any]], torch.Tensor]
BACKENDS = ("humming", "marlin")


def peers(
    weights: dict[str, Any], top_k: int, kernels: bool, emulation: bool
) -> dict[str, Callable[[], Peer]]:
    """Name -> what makes a function of a call's x, ids and weights; for NVFP4 and MXFP4.

    Making one raises where vLLM refuses, as its emulation of MXFP4 does without Quark: "whole
    stack" is the same work with an unpacking kernel of ours.
    """
    if weights["format"] not in ("nvfp4", "mxfp4"):
        return {}
    names = (("emulation",) if emulation else ()) + (BACKENDS if kernels else ())
    found: dict[str, Callable[[], Peer]] = {
        name: partial(_layer, name, weights, top_k) for name in names
    }
    if emulation and weights["format"] == "mxfp4":
        found["whole stack"] = partial(whole_stack, weights)
    return found


def _start() -> None:
    """vLLM's process groups of one rank and its workspace."""
    from vllm.distributed import (
        init_distributed_environment,
        initialize_model_parallel,
        parallel_state,
    )
    from vllm.utils.network_utils import get_open_port
    from vllm.v1.worker import workspace

    if parallel_state.model_parallel_is_initialized():
        return
    init_distributed_environment(1, 0, f"tcp://127.0.0.1:{get_open_port()}", 0, "nccl")
    initialize_model_parallel(1, 1)
    workspace.init_workspace_manager(torch.device("cuda:0"))


def _layer(backend: str, weights: dict[str, Any], top_k: int) -> Peer:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.config.kernel import KernelConfig
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.fused_moe import FusedMoEFactory
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config
    from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4Config

    config: Any = VllmConfig(kernel_config=KernelConfig(moe_backend=backend))
    experts, hidden, packed = weights["w2"].shape
    nvfp4 = weights["format"] == "nvfp4"
    quantization: Any = Mxfp4Config()
    if not nvfp4 and backend == "humming":  # which asks for activations
        config.model_config = SimpleNamespace(quantization_config=None, dtype=torch.bfloat16,
                                              hf_config=None)  # fmt: skip
    if nvfp4:
        quantization = ModelOptNvFp4Config(is_checkpoint_nvfp4_serialized=True)

    def select(hidden_states: Any, gating_output: Any, topk: int, renormalize: bool) -> Any:
        raise RuntimeError("the benchmark routes by itself")

    with set_current_vllm_config(config), torch.device("cuda"):
        _start()
        torch.set_default_dtype(torch.bfloat16)
        try:
            runner: Any = FusedMoEFactory(
                num_experts=experts, top_k=top_k, hidden_size=hidden, intermediate_size=2 * packed,
                renormalize=False, prefix="model.layers.0.mlp.experts",
                quant_config=quantization, custom_routing_function=select,
                router_logits_dtype=torch.float32, activation="silu", reduce_results=False,
            )  # fmt: skip
        finally:
            torch.set_default_dtype(torch.float32)
        layer = runner.routed_experts

        def halves(t: torch.Tensor) -> torch.Tensor:
            return torch.cat([t[:, 0::2], t[:, 1::2]], dim=1)

        layer.w13_weight.data.copy_(halves(weights["w13"]))
        layer.w2_weight.data.copy_(weights["w2"])
        layer.w13_weight_scale.data.view(torch.uint8).copy_(halves(weights["w13_scale"]))
        layer.w2_weight_scale.data.view(torch.uint8).copy_(weights["w2_scale"])
        if nvfp4:
            layer.w13_weight_scale_2.data.copy_(weights["w13_global"][:, None].expand(-1, 2))
            layer.w2_weight_scale_2.data.copy_(weights["w2_global"])
            layer.w13_input_scale.data.fill_(1.0)
            layer.w2_input_scale.data.fill_(1.0)
        layer.quant_method.process_weights_after_loading(layer)

    def run(call: dict[str, Any]) -> torch.Tensor:
        with set_current_vllm_config(config), set_forward_context(None, config):
            found: torch.Tensor = layer.quant_method.apply(
                layer=layer, x=call["x"], topk_weights=call["weights"], topk_ids=call["ids"],
                shared_experts=None, shared_experts_input=None,
            )  # fmt: skip
        return found

    return run


@triton.jit
def _dequantise(
    codes: Any, scales: Any, out: Any, SCALED: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    scale = e8m0_scale(tl.load(scales + i // SCALED))
    even, odd = e2m1_pair(tl.load(codes + i), scale, tl.float32)
    pair = tl.join(even, odd) * 2.0**63
    tl.store(out + i[:, None] * 2 + tl.arange(0, 2)[None, :], pair)


def whole_stack(weights: dict[str, Any]) -> Peer:
    """All experts to bfloat16 on every call, then vLLM's Triton kernels for bfloat16.

    In Quark's place ours unpacks at the speed of memory, so the incumbent is flattered.
    """
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe import fused_experts

    config: Any = VllmConfig()
    order = torch.arange(weights["w13"].shape[1], device="cuda")
    order = torch.cat([order[0::2], order[1::2]])
    packed = {
        "w13": (weights["w13"][:, order].contiguous(), weights["w13_scale"][:, order].contiguous()),
        "w2": (weights["w2"], weights["w2_scale"]),
    }

    def dense(name: str) -> torch.Tensor:
        codes, scales = packed[name]
        shape = (*codes.shape[:2], codes.shape[2] * 2)
        out = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        _dequantise[(codes.numel() // 1024,)](codes, scales, out, SCALED=16, BLOCK=1024)
        return out

    def run(call: dict[str, Any]) -> torch.Tensor:
        with set_current_vllm_config(config):
            found: torch.Tensor = fused_experts(
                call["x"], dense("w13"), dense("w2"), call["weights"], call["ids"]
            )
        return found

    return run
