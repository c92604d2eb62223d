"""Compilation without a GPU: kernels must be real Triton functions here, not interpreted ones."""

import os

# Set before any test module imports triton, whose decorator reads it once per function.
os.environ["TRITON_INTERPRET"] = "0"
