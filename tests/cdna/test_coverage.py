"""Every instruction that the executor knows has a test of its own."""

from ci.cdna import launch  # noqa: F401  (it registers the instructions)
from ci.cdna.machine import HANDLERS
from tests.cdna import test_instructions, test_pseudo_code
from tests.cdna.hand_written import TESTED


def test_every_instruction_has_a_test() -> None:
    assert test_instructions.GENERATOR is not None  # its tests are marked when it is imported
    tested = {*test_pseudo_code.TESTED, *TESTED}
    assert sorted(set(HANDLERS) - tested) == []
    assert sorted(set(TESTED) - set(HANDLERS)) == []
    assert len(test_pseudo_code.TESTED) > 350
