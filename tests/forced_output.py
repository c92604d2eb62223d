"""A logits processor that has a random model say what a test wants to see answered.

`vllm serve --logits-processors tests.forced_output:ForcedOutput`; a request gives the ids as
`vllm_xargs={"say": [..], "avoid": [..]}`. An id that a grammar forbids stays forbidden, and one to
avoid is said only where nothing else may be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

PREFERENCE = 1e6


class ForcedOutput(AdapterLogitsProcessor):
    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(
        self, params: Any
    ) -> Callable[[list[int], torch.Tensor], torch.Tensor] | None:
        say = (params.extra_args or {}).get("say")
        if not say:
            return None
        ids = [int(token) for token in say]
        avoid = [int(token) for token in (params.extra_args or {}).get("avoid", ())]

        def prefer(so_far: list[int], logits: torch.Tensor) -> torch.Tensor:
            logits[avoid] -= PREFERENCE
            if len(so_far) < len(ids):
                logits[ids[len(so_far)]] += 2 * PREFERENCE
            return logits

        return prefer
