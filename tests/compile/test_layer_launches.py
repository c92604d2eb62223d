"""Launches of a decoder layer: within the limit for one request, and as the page says."""

import json

from ci import layer_launches


def test_the_committed_count_is_current() -> None:
    assert json.loads(layer_launches.TARGET.read_text()) == layer_launches.report()


def test_at_most_eleven_for_one_request() -> None:
    """Beside the two products that are the engine's."""
    for row in layer_launches.report():
        if row["requests"] == 1:
            assert row["launches"] <= 11, row
