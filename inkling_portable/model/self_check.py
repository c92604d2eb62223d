"""Start-up self-check on the loaded weights: one layer of each kind, over the bound caches.

The self-test holds kernels to their contracts on drawn inputs, before there is a layer. Here the
parts that the warm-up runs get a small seeded batch in cache pages of their own, and every op that
they call is computed by its contract too, from the same inputs; the pages are put back as they
were. Left out: dummy weights, batch invariance, the engine's own layers, and sums over ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from inkling_portable import agreement, self_test
from inkling_portable.backends.reference.batch import Batch, draw_pages, make_batch
from inkling_portable.inputs import SeededDraw
from inkling_portable.model.attention import AttentionMetadata
from inkling_portable.model.engine import VllmConfig, logger, set_forward_context
from inkling_portable.model.short_conv import ConvMetadata, ConvState
from inkling_portable.registry import Resolved, SelectionError, contract, op_names

VARIABLE = "INKLING_PORTABLE_SELF_CHECK"
LEAST_PAGES = 512
"""Of a cache that is large enough; the engine may bind a smaller one before, to see what fits."""


@torch.inference_mode()
def check(model: Any, vllm_config: VllmConfig) -> str | None:
    """Log and return one line on `model`, target or draft; None where the check is left out.

    Raises SelectionError with the layer, the op and the kernel that breaks its contract.
    """
    dummies = vllm_config.load_config.load_format == "dummy"
    # vLLM's own products, which contracts use under batch invariance, know no float64.
    if dummies or self_test.switched_off(VARIABLE) or model.settings.facts.batch_invariant:
        return None
    began, device, text = time.monotonic(), next(model.parameters()).device, model.settings.text
    draw, dtype, most = SeededDraw(1), torch.get_default_dtype(), vllm_config.model_config
    # A prompt, a step beyond window and biases, and a chunk behind a short context; then padding.
    reach = min(max(text.window, text.rel_extent) + 30, 1100, most.max_model_len - 1)
    batch = make_batch([40, 1, 3], [0, reach, 13], padding=4)
    ids = torch.arange(batch.rows, device=device) * 7 % text.vocab_size
    rows = draw.tensor((batch.rows, text.hidden_size), model.settings.dtype).to(device)
    shares, part, end = dict[str, float](), "", 0  # of what is allowed, by kernel and part

    def noted(ops: Resolved, name: str, kernel: Any) -> Any:
        chosen = ops.serving(name)

        def call(*args: Any) -> Any:
            op, where = contract(name), f"{name} by {', then '.join(chosen)} in {part}"
            given = _less(dict(zip(op.signature.parameters, args, strict=False)), end)
            if not given.get("group"):  # or every rank had to sum once more, in step
                found, share = agreement.held(op, kernel, given)
                shares[where] = max(share, shares.get(where, 0.0))
                if found:
                    raise SelectionError(
                        f"{where} breaks its contract on the loaded weights, {found[0]}; ask for "
                        f"{name}=reference, or serve all the same with {VARIABLE}=off"
                    )
            return kernel(*args)

        return call

    torch.set_default_dtype(torch.float32)  # what contracts are written for
    try:
        with ExitStack() as patched:
            every = [m.ops for m in model.modules() if isinstance(getattr(m, "ops", 0), Resolved)]
            for ops in {id(ops): ops for ops in every}.values():
                for name in op_names():
                    if kernel := getattr(ops, name):
                        patched.enter_context(patch.object(ops, name, noted(ops, name, kernel)))
            for call in (call for call in model.warm_up_calls() if not call.engine):
                part = call.name
                with (
                    _pages(call.caches, batch, draw, device) as (end, step),
                    set_forward_context(step, vllm_config, num_tokens=batch.rows),
                ):
                    call.run(ids, batch.positions.to(device), rows)
    finally:
        torch.set_default_dtype(dtype)
    worst = max(shares, key=lambda where: shares[where])
    parts = dict.fromkeys(where.partition(" in ")[2] for where in shares)
    line = (f"self-check: {len(shares)} ops agree with their contracts on the loaded weights, in "
            f"{', '.join(parts)}; nearest to its bound is {worst}, at {100 * shares[worst]:.0f} %; "
            f"{time.monotonic() - began:.1f} s")  # fmt: skip
    logger.info("inkling_portable: %s", line)
    return line


def _less(given: dict[str, Any], end: int) -> dict[str, Any]:
    """The same call without the pages, rows of tables and experts that it does not use."""
    given = {n: v[:end] if isinstance(v, Tensor) and v.dim() == 4 else v for n, v in given.items()}
    if "table" in given:
        given["table"] = given["table"][given["ids"]]
        given["ids"] = torch.arange(len(given["ids"]), device=given["ids"].device)
    if "w13_global" in given:  # all experts of a layer would be 10 GB in float64
        given |= {name: given[name][:4] for name in ("x", "ids", "weights")}
        # Experts of other ranks have ids outside of ours, and keep such ones.
        ids, mine = given["ids"].long(), len(given["w13"])
        used = ids[(ids >= 0) & (ids < mine)].unique()
        place = used.new_full((mine + 1,), len(used)).index_copy_(
            0, used, torch.arange(len(used), device=used.device)
        )
        given["ids"] = place[torch.where((ids < 0) | (ids > mine), mine, ids)].int()
        for name in ("w13", "w2", "w13_scale", "w2_scale", "w13_global", "w2_global"):
            held = given[name] if given[name] is None else given[name][used]
            # References take codes of 8 bits as bytes; floating numbers become wider ones.
            eight = held is not None and held.element_size() == 1
            given[name] = held.view(torch.uint8) if eight else held
    return given


@contextmanager
def _pages(
    caches: tuple[Any, ...], batch: Batch, draw: SeededDraw, device: torch.device
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Lend pages, filled with drawn values; the end of them, and what describes the step."""
    step, lent, end = dict[str, Any](), [], 0
    q_starts, kv_lens = batch.q_starts.to(device), batch.kv_lens.to(device)
    most = max(batch.lengths), int(batch.kv_lens.max())
    for layer in caches:
        conv, page, start = isinstance(layer, ConvState), layer.kv_cache.shape[2], end
        drawn = draw_pages(draw, batch, page, layer.taps if conv else layer.geometry.window)
        # Two caches may lie in one memory, so no page is used by both.
        end += drawn.count
        lent.append((layer.kv_cache[start:end], layer.kv_cache[start:end].clone()))
        for part in (layer.kv_cache,) if conv else (layer.keys, layer.values):
            values = draw.tensor((drawn.count, *part.shape[1:]), torch.float32)
            part[start:end].copy_(values.to(device, part.dtype))
        pages = torch.where(drawn.pages > 0, drawn.pages + start, 0).to(device)
        slots = torch.where(drawn.slots >= 0, drawn.slots + start * page, -1).to(device)
        step[layer.prefix] = AttentionMetadata(pages, q_starts, kv_lens, slots, *most)
        if conv:
            sources = slots.new_full((batch.rows, layer.taps - 1), -1)
            cells = slots.new_zeros(layer.cells, dtype=torch.int32)
            layer.ops.conv_sources(q_starts, kv_lens, pages, slots, page, cells, sources)
            step[layer.prefix] = ConvMetadata(slots, sources)
    try:
        yield end, step
    finally:
        for cache, kept in lent:
            cache.copy_(kept)
