"""Every kernel in every configuration that served shapes get, on three inputs, keeps its contract.

Two processes execute all of it; each test waits for its own results. More seeds:
`python -m ci.amd_sweep --seeds 30`.
"""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from ci.amd_inputs import cases
from ci.amd_sweep import SEEDS, Result, jobs, processes, served, start
from ci.cdna.launch import CHIPS
from ci.cdna.machine import HANDLERS
from tests.cdna.conftest import SUMMARY

Results = dict[tuple[str, str, int], Future[Result]]


@pytest.fixture(scope="module")
def results() -> Iterator[Results]:
    pool = processes()
    yield start(pool, jobs(list(CHIPS), SEEDS))
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize(("chip", "name"), [(c, case.name) for c in CHIPS for case in cases(c)])
def test_configuration_keeps_the_contract(chip: str, name: str, results: Results) -> None:
    done = [future.result() for (of, on, _), future in results.items() if (of, on) == (name, chip)]
    assert done
    for result in done:
        assert result.faults == [], f"seed {result.seed}"


@pytest.mark.parametrize("chip", CHIPS)
def test_no_served_configuration_is_left_out(chip: str, results: Results) -> None:
    reached = set()
    for (_, on, _), future in results.items():
        if on == chip:
            reached |= future.result().configurations
    assert sorted(served(chip) - reached, key=str) == []


def test_coverage_is_told(results: Results) -> None:
    ran: Counter[str] = Counter()
    for future in results.values():
        ran += future.result().instructions
    assert set(ran) <= set(HANDLERS)
    assert len(ran) > 200
    SUMMARY.append(f"{len(results)} executions; of {len(HANDLERS)} instructions, each with a test "
                   f"of its own, kernels ran {len(ran)}")  # fmt: skip
