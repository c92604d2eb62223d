"""One definition of the Inkling model for vLLM, served on CUDA, ROCm and CPU.

Holds the version and nothing else: vLLM reads entry points in every process it starts, so
importing this package must cost next to nothing and must not import torch or vLLM.
"""

__version__ = "0.1.0"
