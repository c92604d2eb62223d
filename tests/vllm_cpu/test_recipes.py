"""The recipe's strategies: vLLM's own parser takes every line, and understands it as it is meant.

And what a connector that moves caches between servers has to move.
"""

from __future__ import annotations

import shlex
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from ci import many_gpus
from inkling_portable.commands._options import OptionError
from inkling_portable.recipes import STRATEGIES, main, render

DOCS = Path(__file__).resolve().parents[2] / "docs" / "many-gpus.md"


def parsed(arguments: list[str]) -> Namespace:
    """What `vllm` understands; it exits where it does not."""
    from vllm.entrypoints.cli.serve import cmd_init
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    commands = parser.add_subparsers(dest="subparser")
    for command in cmd_init():
        command.subparser_init(commands)
    return parser.parse_args(arguments)


# Strategy: (processes, TP, DP, DP here, experts spread, nodes).
MEANT: dict[str, tuple[int, int, int, int | None, bool, int]] = {
    "single_node_tp": (1, 8, 1, None, False, 1),
    "single_node_tep": (1, 8, 1, None, True, 1),
    "multi_node_tp": (2, 16, 1, None, False, 2),
    "multi_node_tep": (2, 16, 1, None, True, 2),
    "multi_node_tp_dp": (2, 8, 2, 1, False, 1),
    "multi_node_dep": (2, 1, 16, 8, True, 1),
    "pd_cluster": (2, 8, 1, None, False, 1),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_vllm_understands(strategy: str) -> None:
    lines = render(strategy, "thinkingmachines/Inkling", 8, 2, "10.0.0.1")
    processes, tp, dp, local, spread, nodes = MEANT[strategy]
    assert len(lines) == processes
    for node, line in enumerate(lines):
        found = parsed(line)
        assert found.model_tag == "thinkingmachines/Inkling"
        assert (found.tensor_parallel_size, found.data_parallel_size) == (tp, dp)
        assert (found.data_parallel_size_local, found.enable_expert_parallel) == (local, spread)
        assert (found.nnodes, found.reasoning_parser) == (nodes, "inkling")
        later = bool(node) and strategy != "pd_cluster"
        assert bool(found.headless) == later
        if nodes > 1:
            assert (found.node_rank, found.master_addr) == (node, "10.0.0.1")
        elif dp > 1:
            assert found.data_parallel_start_rank == (node * dp // 2 or None)
            assert found.data_parallel_address == "10.0.0.1"
        if strategy == "multi_node_dep":
            assert found.additional_config == {"inkling_portable": {"routed_experts": "engine"}}
    ports = [parsed(line).port for line in lines]
    if strategy == "pd_cluster":
        assert len(set(ports)) == 2
        roles = [parsed(line).kv_transfer_config.kv_role for line in lines]
        assert roles == ["kv_producer", "kv_consumer"]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
def test_any_size(ranks: int) -> None:
    """On one node and on every number of them; what has no such size is refused in a sentence."""
    for strategy in ("single_node_tp", "single_node_tep", "pd_cluster"):
        for line in render(strategy, "m", ranks, 2, "h"):
            assert parsed(line).tensor_parallel_size == ranks
    for nodes in (n for n in (1, 2, 4, 8, 16) if n <= ranks):
        for strategy, tp, dp in (("multi_node_tp", ranks, 1), ("multi_node_tep", ranks, 1),
                                 ("multi_node_tp_dp", ranks // nodes, nodes),
                                 ("multi_node_dep", 1, ranks)):  # fmt: skip
            lines = [parsed(line) for line in render(strategy, "m", ranks // nodes, nodes, "h")]
            assert len(lines) == nodes
            sizes = {(line.tensor_parallel_size, line.data_parallel_size) for line in lines}
            assert sizes == {(tp, dp)}, strategy
    with pytest.raises(OptionError, match=f"--gpus and --nodes give {ranks + 16}; see --help"):
        main(["single_node_tp", "--gpus", str(ranks + 16)])


@pytest.mark.parametrize(
    ("option", "words"),
    [("--head=a b", "--head needs an address, of one word and nothing else; found 'a b'"),
     ("--head=--evil", "--head needs an address"), ("--head=node0:1234", "found 'node0:1234'"),
     ("--head=", "found ''"), ("--model=", "--model needs a name or folder"),
     ("--model=--help", "found '--help'")],
)  # fmt: skip
def test_what_is_no_name(option: str, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        main(["multi_node_tp", option])


@pytest.mark.parametrize("head", ["node-1.rack.example", "10.0.0.1", "fd00::12"])
def test_addresses(head: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["multi_node_tp", "--head", head, "--model", "~/Inkling"]) == 0
    assert f"--master-addr {head}" in capsys.readouterr().out


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_document_has_the_lines(strategy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([strategy]) == 0
    printed = capsys.readouterr().out
    text = DOCS.read_text()
    assert printed in text.replace(" \\\n  ", " "), f"inkling-portable recipe {strategy}"
    assert all(parsed(shlex.split(line)[1:]) for line in printed.splitlines())


def test_the_document_is_the_generated_one() -> None:
    """When an assumption has changed: `python ci/many_gpus.py`."""
    assert many_gpus.rendered(DOCS.read_text()) == DOCS.read_text()
    for rows in (1, 16, 512):
        for ranks in (4, 8):
            assert many_gpus.lamport_us(rows, ranks) < many_gpus.portable_us(rows, ranks)


def test_an_unknown_strategy_is_named() -> None:
    with pytest.raises(ValueError, match="no strategy is called 'tp'; use one of single_node_tp"):
        render("tp", "m", 8, 1, "h")


# --- what travels from prefill to decode ---------------------------------------------------------


def connector(name: str) -> Any:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    return KVConnectorFactory._registry[name]()


def test_the_recipes_connector_takes_caches_of_several_kinds() -> None:
    """One that does not makes vLLM give up the hybrid cache, in which the convolution's state is.

    test_transfer.py has NIXL's move caches.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA

    assert issubclass(connector("NixlConnector"), SupportsHMA)
    assert not issubclass(connector("ExampleConnector"), SupportsHMA)


@pytest.mark.parametrize("model", ["Inkling", "Inkling-Small"])
@pytest.mark.parametrize("tp", [1, 8, 16])
def test_what_travels(model: str, tp: int) -> None:
    """Every layer has a convolution cache in a group of its own kind, with pages like the others'.

    A connector addresses blocks by group: whoever moves all groups of a request moves the state.
    """
    from inkling_portable.commands.fit_cache import layer_caches, plan
    from inkling_portable.commands.released_configs import released
    from inkling_portable.model.config import parse

    config = parse(released(model))
    caches = layer_caches(config, tp=tp, block=16, kv_bytes=2)
    layers = config.text.num_layers
    assert [cache.kind for cache in caches].count("conv") == layers
    assert len(caches) == 2 * layers
    groups = plan(caches).groups
    assert {group.cache.kind for group in groups} == {"conv", "local", "global"}
    assert len({group.cache.page for group in groups}) == 1
