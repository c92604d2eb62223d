"""`vllm serve` lines for each strategy of vLLM's public recipes, one for every node or role."""

from __future__ import annotations

import json
import re
import shlex

from inkling_portable.commands._options import OptionParser, positive

STRATEGIES = ("single_node_tp", "single_node_tep", "multi_node_tp", "multi_node_tp_dp",
              "multi_node_dep", "multi_node_tep", "pd_cluster")  # fmt: skip
CHAT = ("--tokenizer-mode inkling --reasoning-parser inkling --tool-call-parser inkling "
        "--enable-auto-tool-choice")  # fmt: skip
# Experts that are spread over data-parallel ranks are exchanged by the engine's layer.
ENGINE = ("--additional-config", json.dumps({"inkling_portable": {"routed_experts": "engine"}}))
ROLES = ("kv_producer", "kv_consumer")
SPLITS = (1, 2, 4, 8, 16)
"""Tensor-parallel sizes that both released models can have."""
SPREAD = "--enable-expert-parallel"


def render(strategy: str, model: str, gpus: int, nodes: int, head: str) -> list[list[str]]:
    """Arguments of every `vllm` process: the first node first; of a cluster, prefill, then decode.

    gpus: of one node; head: address of the first node. Raises ValueError for another strategy.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"no strategy is called {strategy!r}; use one of {', '.join(STRATEGIES)}")
    base = ["serve", model, *CHAT.split()]
    spread = [SPREAD] if strategy.endswith("ep") else []
    if strategy.startswith("single"):
        return [[*base, "--tensor-parallel-size", str(gpus), *spread]]
    if strategy == "pd_cluster":
        links = [json.dumps({"kv_connector": "NixlConnector", "kv_role": role}) for role in ROLES]
        return [[*base, "--tensor-parallel-size", str(gpus), "--kv-transfer-config", link,
                 "--port", str(8100 + 100 * i)] for i, link in enumerate(links)]  # fmt: skip
    whole = strategy in ("multi_node_tp", "multi_node_tep")
    found = []
    for node in range(nodes):
        if whole:
            layout = ["--tensor-parallel-size", str(gpus * nodes), "--nnodes", str(nodes),
                      "--node-rank", str(node), "--master-addr", head]  # fmt: skip
        else:
            each = 1 if strategy == "multi_node_tp_dp" else gpus
            layout = ["--tensor-parallel-size", str(gpus // each),
                      "--data-parallel-size", str(each * nodes),
                      "--data-parallel-size-local", str(each), "--data-parallel-address", head,
                      "--data-parallel-rpc-port", "13345", *(ENGINE if spread else ())]  # fmt: skip
            layout += ["--data-parallel-start-rank", str(each * node)] if node else []
        found.append([*base, *layout, *spread, *(["--headless"] if node else [])])
    return found


def main(argv: list[str]) -> int:
    """The command `recipe`."""
    parser = OptionParser(prog="inkling-portable recipe", description=__doc__)
    parser.add_argument("strategy", choices=STRATEGIES)
    parser.add_argument("--model", default="thinkingmachines/Inkling-NVFP4")
    parser.add_argument("--gpus", type=positive, default=8, help="GPUs of one node")
    parser.add_argument("--nodes", type=positive, help="of multi_node ones, 2 where not given")
    parser.add_argument("--head", help="address of the first node of several, node0 if not given")
    asked = parser.parse_args(argv)
    for name in ("nodes", "head"):
        if getattr(asked, name) is not None and not asked.strategy.startswith("multi_node"):
            parser.error(f"--{name} needs a multi_node strategy; {asked.strategy} has lines of one "
                         f"node each, so leave --{name} out")  # fmt: skip
    head = "node0" if asked.head is None else asked.head
    for name, text, form in (("model", asked.model, r"[\w./~]\S*"),
                             ("head", head, r"\w[\w.-]*|[\da-fA-F:]*")):  # fmt: skip
        if not text or not re.fullmatch(form, text):
            parser.error(f"--{name} needs {'a name or folder' if name == 'model' else 'an address'}"
                         f", of one word and nothing else; found {text!r}")  # fmt: skip
    found = render(asked.strategy, asked.model, asked.gpus, asked.nodes or 2, head)
    ranks = int(found[0][found[0].index("--tensor-parallel-size") + 1])
    if ranks not in SPLITS:
        parser.error(f"tensor parallelism needs one of {SPLITS} ranks; --gpus and --nodes give "
                     f"{ranks}")  # fmt: skip
    for line in found:
        print("vllm", shlex.join(line))
    return 0
