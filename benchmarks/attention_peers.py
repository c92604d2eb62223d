"""vLLM's own relative attention, called in place: the FA4 fork and the kernels of its AMD copy.

Nothing here is imported unless vLLM is; a peer that cannot be imported is absent from the table
and its reason is printed.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch

Peer = Callable[[dict[str, Any]], None]


PEERS = ("fa4 x1", "fa4 x32", "fa4 x64", "fa4 x128", "amd", "fa4 no bias")


def peers(window: int, extent: int, names: Iterable[str] = PEERS) -> dict[str, Peer]:
    """Name -> a function of the contract's arguments that writes `out`."""
    found: dict[str, Peer] = {}
    makers = {f"fa4 x{n}": _fa4(n) for n in (1, 32, 64, 128)}
    makers |= {"amd": _amd, "fa4 no bias": _fa4_plain}
    for name in names:
        try:
            found[name] = makers[name](window, extent)
        except Exception as error:
            print(f"peer {name} is absent: {type(error).__name__}: {error}", file=sys.stderr)
    return found


def _common(call: dict[str, Any], window: int) -> dict[str, Any]:
    return {
        "q": call["q"], "k": call["k_cache"], "v": call["v_cache"],
        "cu_seqlens_q": call["q_starts"], "seqused_k": call["kv_lens"],
        "max_seqlen_q": 1 << max(0, call["max_q"] - 1).bit_length(),
        "page_table": call["pages"], "softmax_scale": call["scale"], "causal": True,
        "window_size": (window - 1, 0) if window else (None, None), "return_lse": False,
        "out": call["out"],
    }  # fmt: skip


def _fa4(splits: int) -> Callable[[int, int], Peer]:
    def make(window: int, extent: int) -> Peer:
        from vllm.models.inkling.nvidia.ops import fa4_rel_attention
        from vllm.vllm_flash_attn.cute import flash_attn_varlen_func

        score_mod = fa4_rel_attention._get_score_mod(extent)

        def run(call: dict[str, Any]) -> None:
            flash_attn_varlen_func(
                **_common(call, window), num_splits=splits, score_mod=score_mod,
                aux_tensors=[call["rel"]],
            )  # fmt: skip

        return run

    return make


def _fa4_plain(window: int, extent: int) -> Peer:
    """FA4 without any bias: what a free bias would reach. Its result is another function."""
    from vllm.vllm_flash_attn.cute import flash_attn_varlen_func

    def run(call: dict[str, Any]) -> None:
        flash_attn_varlen_func(**_common(call, window), num_splits=1)

    return run


def _amd(window: int, extent: int) -> Peer:
    if not torch.version.hip and "vllm.platforms.rocm" not in sys.modules:
        # The module asks the driver of an AMD GPU when imported; only one function is needed.
        stub = types.ModuleType("vllm.platforms.rocm")
        stub.on_gfx950 = lambda: False  # type: ignore[attr-defined]
        sys.modules["vllm.platforms.rocm"] = stub
    from vllm.models.inkling.amd.ops.fa4_rel_attention import inkling_fa4_rel_attention

    def run(call: dict[str, Any]) -> None:
        inkling_fa4_rel_attention(
            call["q"], call["k_cache"], call["v_cache"], block_table=call["pages"],
            cache_seqlens=call["kv_lens"], cu_seqlens_q=call["q_starts"],
            max_seqlen_q=call["max_q"], softmax_scale=call["scale"], causal=True,
            window_size=(window - 1, 0) if window else (-1, -1), rel_extent=extent,
            rel_logits=call["rel"], max_kv_len=call["max_kv"], out=call["out"],
        )  # fmt: skip

    return run
