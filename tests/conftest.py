"""Settings shared by every suite: Hypothesis profiles.

`fast` runs 25 fixed examples per property and is what every push runs; `deep` runs 1,000 random
ones (`HYPOTHESIS_PROFILE=deep`). Deadlines are off because a first call may compile a kernel.
"""

import os

from hypothesis import HealthCheck, settings

_SLOW_INPUTS = [HealthCheck.too_slow, HealthCheck.data_too_large]

settings.register_profile(
    "fast",
    max_examples=25,
    derandomize=True,
    deadline=None,
    suppress_health_check=_SLOW_INPUTS,
    print_blob=True,
)
settings.register_profile(
    "deep",
    max_examples=1000,
    deadline=None,
    suppress_health_check=_SLOW_INPUTS,
    print_blob=True,
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))
