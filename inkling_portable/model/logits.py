"""From hidden rows to logits of valid ids: one function for the model and its drafts.

The trained scale divides the logits by the width multiplier. Applied to the logits, it also scales
an adapter's contribution, and vLLM's own head honours `head_dtype`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from inkling_portable.model.config import TextConfig
from inkling_portable.model.engine import (
    LogitsProcessor,
    ParallelLMHead,
    all_gather,
    on_accelerator,
)


class InklingLogits(LogitsProcessor):
    """Logits [T, vocab_size] of hidden rows [T, H]; padding rows of the head are cut off."""

    def __init__(self, text: TextConfig) -> None:
        super().__init__(
            text.padded_vocab_size,
            org_vocab_size=text.vocab_size,
            scale=1.0 / text.logit_divisor,
        )
        # On a GPU the factor can ride in the product, before its only rounding.
        self.factor_in_product = on_accelerator()
        self.few_rows: Callable[..., Tensor] | None = None
        self.few = 0
        """The op for few rows, and how many it gets."""

    def forward(
        self, lm_head: ParallelLMHead, hidden_states: Tensor, *args: object, **kwargs: object
    ) -> Tensor | None:
        # The LoRA wrapper calls this with itself as self: it has neither the field nor our class.
        if (
            getattr(self, "factor_in_product", False)
            and not args
            and not kwargs
            and _plain(lm_head, hidden_states)
            and getattr(self, "head_dtype", None) in (None, hidden_states.dtype)
        ):
            weight = lm_head.weight
            if self.few_rows is not None and hidden_states.shape[0] <= self.few:
                logits = self.few_rows(hidden_states, weight, self.scale)
            else:
                logits = torch.addmm(
                    weight.new_zeros(1), hidden_states, weight.t(), beta=0.0, alpha=self.scale
                )
            if lm_head.tp_size > 1:
                logits = self._gather_logits(logits)
            return None if logits is None else logits[..., : self.org_vocab_size]
        logits = LogitsProcessor.forward(self, lm_head, hidden_states, *args, **kwargs)
        if logits is None or kwargs.get("skip_gather"):
            return logits
        # The LoRA wrapper leaves the padding rows in, which would then be sampled.
        return logits[..., : self.org_vocab_size]

    def get_top_tokens(
        self, lm_head: ParallelLMHead, hidden_states: Tensor, embedding_bias: Tensor | None = None
    ) -> Tensor:
        """Most likely valid id [T] of every row; ranks exchange one (value, id) pair per row.

        vLLM's own version leaves the head's stored padding rows in the race.
        """
        logits = lm_head.quant_method.apply(lm_head, hidden_states, bias=embedding_bias)
        start = lm_head.shard_indices.org_vocab_start_index
        valid = min(max(self.org_vocab_size - start, 0), logits.shape[-1])
        logits[:, valid:] = float("-inf")
        value, token = logits.max(dim=-1)
        token = token + start
        if lm_head.tp_size == 1:
            return token
        # Ids stay exact in float32, up to 2**24.
        pairs = all_gather(torch.stack([value.float(), token.float()], dim=-1), dim=-1)
        pairs = pairs.view(-1, lm_head.tp_size, 2)
        winner = pairs[..., 0].argmax(dim=-1, keepdim=True)
        return pairs[..., 1].gather(1, winner).squeeze(1).long()


def _plain(lm_head: ParallelLMHead, hidden: Tensor) -> bool:
    weight = getattr(lm_head, "weight", None)
    return weight is not None and weight.ndim == 2 and weight.dtype == hidden.dtype
