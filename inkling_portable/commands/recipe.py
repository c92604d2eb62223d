"""Print the `vllm serve` lines of a strategy of vLLM's recipes, one for every node."""

from inkling_portable.recipes import main as main
