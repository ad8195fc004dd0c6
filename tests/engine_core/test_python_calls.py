"""Python calls of the engine in a decode step, counted: of its sources, not of compiled code."""

import pytest

from tests.fakes.engine_harness import EngineHarness
from tests.python_calls import check_calls, counted_calls, same_version


@same_version
@pytest.mark.suite("quick")
def test_a_decode() -> None:
    harness = EngineHarness(block_size=16)
    for number in range(8):
        harness.add([number] * 4, ignore_eos=True)
    for _ in range(3):
        harness.step()
    with counted_calls() as scheduled:
        step = harness.scheduler.schedule()
    assert step.cached_requests.num_scheduled_tokens == [1] * 8
    result = harness.runner.execute(step)
    with counted_calls() as updated:
        harness.record_outputs(harness.scheduler.update_from_output(step, result))
    check_calls("engine: a decode of 8 requests", scheduled + updated)
