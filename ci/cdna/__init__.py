"""Run the gfx942 and gfx950 code that Triton emits for this package's kernels, on a CPU.

    with executing("gfx942") as executed:
        rms_norm(x, weight, 1e-6, None)     # Triton compiles, numpy runs the instructions

A test tool: slow, exact where AMD's ISA documents are exact, and an error wherever they or this
executor do not say what an instruction does. It also reports what hardware hides: accesses
outside the given tensors, uninitialised registers and LDS, loads used before their s_waitcnt,
LDS races between waves, barriers that not all waves reach, loops that do not end.
"""
