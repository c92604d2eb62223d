# `make demo` serves a tiny Inkling on this machine; `make test` runs every suite that needs no GPU.
# Both make the environment `.venv` first. Variables:
#   PYTHON       the Python to build the environment with, 3.11 or newer
#   TRITON       for compile-with: the version with which every kernel is compiled, without a GPU
#   TORCH_INDEX  package index with CPU builds of torch, where pip's own settings are not wanted

PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup demo test lint compile-with clean

setup:
	@$(PYTHON) ci/setup.py

demo: setup
	@$(BIN)/python -m inkling_portable demo

test:
	@PYTHON=$(PYTHON) ci/run cpu

lint: setup
	@$(BIN)/ruff check --output-format concise .
	@$(BIN)/mypy

compile-with: setup
	@$(BIN)/python ci/compile_with.py $(TRITON)

clean:
	rm -rf .venv build dist .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -rf inkling_portable.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
