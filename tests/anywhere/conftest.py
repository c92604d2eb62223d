"""Triton kernels run under Triton's CPU interpreter in this suite."""

import os

# Triton's decorator reads this once per function, so it must be set before a kernel is imported;
# pytest imports this file before any test of the folder. Nothing but Triton and `Target.detect`
# looks at it.
os.environ["TRITON_INTERPRET"] = "1"
