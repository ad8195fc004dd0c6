"""Beam searches beside features that keep KV: their beams are those of the reference search."""

import pytest

from tests.engine_core.scheduler.plain_beams import add, expected, outputs
from tests.fakes.engine_harness import EngineHarness
from tests.fakes.kv_connector import FakeConnector, always
from tests.fakes.offload_rig import OffloadRig

PROMPT = list(range(37))


@pytest.mark.parametrize("width", [1, 3])
def test_beams_load_an_offloaded_prompt_and_their_blocks_are_offloaded(width: int) -> None:
    rig = OffloadRig(size=4)
    rows = add(rig, PROMPT, width, 20)
    rig.run_until_idle()
    assert outputs(rig, rows) == expected(PROMPT, width, 20)
    assert len(rig.stores) > 1, "blocks of answers, too"
    rig.reset_prefix_cache()
    again = add(rig, PROMPT, width, 20)
    rig.run_until_idle()
    assert sum(len(slots) for job in rig.loads for slots in job.slots) >= 9
    assert outputs(rig, again) == expected(PROMPT, width, 20)
    (best, *_) = outputs(rig, again)
    rig.reset_prefix_cache()
    num_loads = len(rig.loads)
    following = rig.generate([*PROMPT, *best], 5)
    assert len(rig.loads) == num_loads + 1, "KV of the best beam is found"
    assert following.num_cached_tokens > len(PROMPT)
    rig.assert_idle()


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_beams_start_from_kv_that_a_connector_has(is_async: bool, fails: bool) -> None:
    """Within the first step or before it; a load that fails is computed."""
    connector = FakeConnector(
        always(16, is_async=is_async),
        fails=lambda load, blocks: set(blocks[2:]) if fails else set(),
    )
    engine = EngineHarness(block_size=4, connector=connector)
    rows = add(engine, PROMPT, 3, 12)
    for _ in range(200):
        if not engine.scheduler.num_unfinished:
            break
        engine.step()
        for seq_id in list(connector.under_way):
            report = connector.finish(seq_id, engine.runner)
            engine.record_outputs(engine.scheduler.update_from_connector(report))
    assert any(number for _, number in connector.allocated)
    assert outputs(engine, rows) == expected(PROMPT, 3, 12)
    engine.run()
    engine.assert_idle()
