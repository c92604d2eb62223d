"""Kernels are compiled for AMD's chips here: they must be real Triton functions."""

import os

os.environ["TRITON_INTERPRET"] = "0"
