"""The chat surface: messages to token ids, and generated text to reasoning, content and calls.

Everything but `serving.py` is free of vLLM.
"""
