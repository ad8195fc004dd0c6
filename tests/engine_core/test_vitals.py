"""Whether the engine owes a step, while copies of a KV connector are under way."""

from engine_core.vitals import owes_step
from tests.fakes.offload_rig import OffloadRig

PROMPT = list(range(37))


def test_a_store_that_is_never_reported_does_not_hide_that_nobody_steps() -> None:
    """Somebody runs, or has room, while blocks are held."""
    rig = OffloadRig(finishes=lambda job: None)
    request = rig.add_one(PROMPT, 20)
    rig.step()
    rig.step()
    assert rig.half.under_way
    assert rig.kv_cache.holds.num_blocks
    assert owes_step(rig.scheduler)
    second = rig.add_one([*range(300, 320)], 2)
    assert owes_step(rig.scheduler)
    for each in (request, second):
        rig.run_until_over(each)
    while rig.scheduler.has_work:
        rig.step()
    assert rig.half.under_way
    assert not owes_step(rig.scheduler), "idle"
    assert rig.kv_cache.holds.num_alone
    rig.add_one(PROMPT[:20], 1)
    assert owes_step(rig.scheduler), "there is room for it"


def test_who_waits_for_room_that_a_copy_gives_back_owes_nothing() -> None:
    rig = OffloadRig(num_blocks=12, finishes=lambda job: None)
    first = rig.add_one(PROMPT, 1)
    rig.run_until_over(first)
    assert rig.kv_cache.holds.num_alone == 9
    rig.add_one([*range(300, 340)], 1)
    while rig.scheduler.external.wants_step:
        rig.step()
    assert rig.step().total_num_scheduled_tokens == 0
    assert rig.scheduler.has_work
    assert not owes_step(rig.scheduler)
    rig.finishes = lambda job: True
    rig.finish_some()
    assert owes_step(rig.scheduler)
    rig.settle()
    rig.assert_at_rest()


def test_who_is_loaded_for_owes_nothing_until_somebody_runs() -> None:
    rig = OffloadRig()
    rig.generate(PROMPT)
    rig.forget_device()
    rig.finishes = lambda job: None
    rig.add_one(PROMPT, 2)
    while rig.scheduler.has_work:
        rig.step()
    assert rig.scheduler.external.is_loading
    assert not owes_step(rig.scheduler)
    rig.add_one([*range(300, 320)], 9)
    rig.step()
    assert rig.scheduler.running
    assert owes_step(rig.scheduler)
    rig.finishes = lambda job: True
    rig.settle()
    rig.assert_at_rest()
