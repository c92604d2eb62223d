"""The multimodal entry: the text model with towers in front."""

from inkling_portable.model.inkling import InklingForCausalLM


class InklingForConditionalGeneration(InklingForCausalLM):
    """Serves the decoder of a multimodal checkpoint."""
