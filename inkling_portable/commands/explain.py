"""Print which kernel every op gets on a machine, and why the others were passed over.

Works for this machine and for any described one, without importing torch for the latter.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict, replace

from inkling_portable import code_objects, draft_costs, self_test
from inkling_portable.backends.evidence import MEASURED
from inkling_portable.commands._options import OptionParser, positive
from inkling_portable.commands.fit import RELEASED
from inkling_portable.commands.released_configs import released
from inkling_portable.model.config import ConfigError, parse
from inkling_portable.registry import (
    KV_DTYPES,
    MODELS,
    Decision,
    Facts,
    SelectionError,
    choose,
    parse_overrides,
    reference_warnings,
    switches,
    unproven,
)
from inkling_portable.target import Target, TargetError

# As vLLM 0.26 to 0.33 name them, together.
MOE_BACKENDS = (
    "aiter", "aiter_mega_moe", "aiter_triton_mxfp4_bf16", "aiter_triton_mxfp4_mxfp4",
    "auto", "b12x", "batched_triton", "cutlass", "deep_gemm", "deep_gemm_mega_moe",
    "emulation", "flashinfer_b12x", "flashinfer_cutedsl", "flashinfer_cutlass",
    "flashinfer_moe_ep_cutedsl", "flashinfer_moe_ep_mega_cutedsl",
    "flashinfer_moe_ep_mega_deep_gemm", "flashinfer_trtllm", "flydsl", "hpc", "humming",
    "marlin", "rdna3", "triton", "triton_unfused",
)  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    p = OptionParser(prog="inkling-portable explain", description=__doc__)
    p.add_argument(
        "--target",
        metavar="T",
        help="cpu, a chip such as h200 or mi300x, or vendor:arch[/units], with "
        "+library[=version]..., usual ones if none is named; this machine if left out",
    )
    p.add_argument("--weights", choices=("nvfp4", "mxfp4", "bf16", "fp8"), default="bf16")
    p.add_argument("--model", choices=sorted(MODELS), default="large")
    p.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel size")
    p.add_argument("--lora", action="store_true", help="adapters are enabled")
    p.add_argument("--kv-cache-dtype", default="auto", metavar="D", help="vLLM's option")
    p.add_argument(
        "--batch-invariant", action="store_true", help="VLLM_BATCH_INVARIANT=1 will be set"
    )
    p.add_argument(
        "--moe-backend", choices=MOE_BACKENDS, default="auto", metavar="B", help="vLLM's option"
    )
    p.add_argument(
        "--ask",
        metavar="OP=PROVIDER,...",
        help="requests as in INKLING_PORTABLE; that variable if left out",
    )
    p.add_argument(
        "--self-test",
        action="store_true",
        help="run the start-up self-test of the chosen kernels now; else what is remembered of it "
        "counts",
    )
    p.add_argument("--acceptance", metavar="A,...", help="say how many MTP drafts pay, given the "
                   "share of steps in which each came true, as vLLM logs it")  # fmt: skip
    p.add_argument("--step-ms", metavar="T,...", help="measured steps with 0, 1, ... drafts; else "
                   "their bytes count")  # fmt: skip
    p.add_argument(
        "--context", type=positive, default=8192, metavar="N", help="tokens (for drafts)"
    )
    p.add_argument("--json", action="store_true", help="machine-readable output")
    p.add_argument(
        "--strict",
        action="store_true",
        help="exit with 1 if an op falls to the slow reference on an accelerator",
    )
    return p


def facts_of(options: argparse.Namespace) -> Facts:
    """The facts that the options describe; ConfigError for a split that no server would take."""
    base = MODELS[options.model]
    parse(released(RELEASED[options.model])).text.check_tensor_parallel(options.tp)
    if options.kv_cache_dtype not in KV_DTYPES:
        raise SelectionError(f"--kv-cache-dtype needs to be {', '.join(KV_DTYPES[:-1])} or "
                             f"{KV_DTYPES[-1]}; found {options.kv_cache_dtype}")  # fmt: skip
    return replace(
        base,
        weights=options.weights,
        tp=options.tp,
        lora=options.lora,
        kv_dtype=options.kv_cache_dtype,
        batch_invariant=options.batch_invariant,
        moe_backend=options.moe_backend,
        **switches(os.environ),
    )


def lines(decisions: tuple[Decision, ...]) -> list[str]:
    """The table, one line for each offer; offers that read alike share one."""
    verdicts = {"chosen": "YES", "refused": "no", "later": "-", "only if asked": "ask"}
    op_width = max(len(d.op) for d in decisions)
    provider_width = max(len(d.provider) for d in decisions)
    shown, last = [], ""
    said = {(d.op, d.provider, d.verdict, d.reason): d for d in decisions}
    for d in said.values():
        name = "" if d.op == last else d.op
        last = d.op
        row = (
            f"{name:{op_width}}  {d.provider:{provider_width}}  {verdicts[d.verdict]:3}  {d.reason}"
        )
        shown.append(row.rstrip())
    return shown


def drafts_that_pay(options: argparse.Namespace) -> list[str]:
    """The table of `draft_costs` for --acceptance; SelectionError for what is no number."""
    if options.json:
        raise SelectionError("--acceptance prints a table for people; leave --json out")
    try:
        acceptance, measured = (
            [float(part) for part in text.split(",")] if text else []
            for text in (options.acceptance, options.step_ms)
        )
    except ValueError as error:
        raise SelectionError(f"--acceptance and --step-ms need numbers; {error}") from error
    config = parse(released(RELEASED[options.model]))
    machine, depths = (config, options.weights, options.tp), config.require_mtp().num_depths
    if len(acceptance) > depths:
        raise SelectionError(f"--acceptance needs at most {depths} shares, one for each draft that "
                             f"the model makes; found {len(acceptance)}")  # fmt: skip
    if measured:
        return draft_costs.table(acceptance, measured, "step, ms")
    cell = {"fp8": 1, "fp8_e4m3": 1, "float32": 4}.get(options.kv_cache_dtype, 2)
    costs = [draft_costs.step_bytes(*machine, options.context, k, cell) for k in range(1 + depths)]
    return draft_costs.table(acceptance, [cost / 1e9 for cost in costs], "step, GB")


def main(argv: list[str]) -> int:
    """Returns 0, 1 with --strict and a slow op, or 2 for a request that cannot be met."""
    options = parser().parse_args(argv)
    try:
        described = Target.parse(options.target) if options.target else Target.detect()
        target = described.with_usual_libraries() if options.target else described
        facts = facts_of(options)
        text = options.ask if options.ask is not None else os.environ.get("INKLING_PORTABLE")
        if (text or "").strip() == "off":
            print("INKLING_PORTABLE=off: vLLM's own model serves, and nothing here is chosen")
            return 0
        if options.step_ms is not None and options.acceptance is None:
            raise SelectionError("--step-ms says what drafts cost; give --acceptance as well")
        if options.acceptance is not None:
            print("\n".join(drafts_that_pay(options)))
            return 0
        source = "INKLING_PORTABLE" if options.ask is None else "--ask"
        requests = tuple(sorted(parse_overrides(None, text, source).items()))
        outcome = None
        if not options.target:
            outcome = (self_test.run if options.self_test else self_test.recall)(
                target, facts, requests
            )
            facts = replace(facts, failed=outcome.failed)
        elif options.self_test:
            raise SelectionError("--self-test runs kernels on this machine; leave --target out")
        decisions = choose(target, facts, requests)
    except (TargetError, SelectionError, ConfigError) as error:
        print(f"inkling-portable explain: {error}", file=sys.stderr)
        return 2
    warnings = reference_warnings(target, decisions)
    if options.json:
        rows = [
            {
                "op": d.op,
                "provider": d.provider,
                "verdict": d.verdict,
                "reason": d.reason,
                "code": d.offer.code,
                "verified": d.offer.verified,
                "measured_on": MEASURED.get((d.op, d.provider), ()),
            }
            for d in decisions
        ]
        print(
            json.dumps(
                {
                    "target": str(target),
                    "facts": asdict(facts),
                    "decisions": rows,
                    "warnings": warnings,
                    "unproven": unproven(target),
                    "self_test": None if outcome is None else str(outcome),
                },
                indent=1,
            )
        )
    else:
        assumed = "" if target is described else " (libraries assumed; name yours to be sure)"
        print(f"target {target}{assumed}")
        if unsure := unproven(target):
            print(f"note: {unsure}")
        if facts.batch_invariant:
            print("batch-invariant: tiles and sums do not depend on the batch")
        print("\n".join(lines(decisions)))
        if target.vendor == "rocm" and (executed := code_objects.summary(target.arch)):
            print(executed)
        if outcome is not None and (outcome.off or outcome.agreed or outcome.unknown):
            print(outcome)
        for warning in warnings:
            print(f"warning: {warning}")
    return 1 if options.strict and warnings else 0
