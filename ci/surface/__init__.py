"""What this package uses of vLLM, and what a vLLM offers, both read from source text alone.

    python -m ci.surface [WHEEL | FOLDER | VERSION ...]

writes the facts of each given vLLM (a wheel, an unpacked `vllm` folder, or a version to download;
none: the installed one) into tests/facts/vllm_surface.json. Nothing is imported, so a wheel for any
platform can be read on any machine; what does not fit is printed, so a new vLLM shows its breakage
within seconds. tests/anywhere/test_engine_surface.py compares both sides.
"""
