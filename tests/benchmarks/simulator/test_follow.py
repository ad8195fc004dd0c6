"""Following a trace: with its policy and settings the scheduler makes the same decisions."""

import msgspec
import pytest

from proto.messages.sched_trace import Dropped, PinEnd, Result, Step, TurnEnd
from tests.benchmarks.simulator.follow import Follower
from tests.fakes.drafts import SyntheticDrafts
from tests.fakes.images import encoder_limits
from tests.fakes.traced_engine import (
    TracedEngine,
    agents_load,
    images_load,
    random_load,
    recording_of,
)


@pytest.mark.parametrize(
    ("num_blocks", "settings"),
    [
        (20, {}),
        (20, {"async_scheduling": True, "scheduling_policy": "priority"}),
        (30, {"watermark": 0.1, "scheduler_reserve_full_isl": True}),
        (30, {"long_prefill_token_threshold": 24, "max_num_seqs": 3}),
    ],
)
def test_the_same_admissions_and_preemptions(num_blocks: int, settings: dict) -> None:
    num_preempted = num_admitted = 0
    for seed in range(2):
        engine = TracedEngine(num_blocks, **settings)
        random_load(seed, engine)
        verdict = Follower(engine.recording).run()
        assert verdict.difference == ""
        assert verdict.num_steps == len(engine.of(Step))
        num_preempted += verdict.num_preempted
        num_admitted += verdict.num_admitted
    assert num_admitted > 60
    assert num_preempted > 5


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("acceptance", [0.0, 0.6, 1.0])
def test_drafts_are_followed(acceptance: float, is_async: bool) -> None:
    """With as many tokens, of which as many are accepted; also room for those of a draft model."""
    num_accepted = 0
    for seed in range(2):
        drafting = SyntheticDrafts(acceptance, seed=seed, has_draft_model=True)
        engine = TracedEngine(30, drafting=drafting, async_scheduling=is_async)
        random_load(seed, engine)
        assert any(line.decision.lookahead for line in engine.of(Step))
        verdict = Follower(engine.recording).run()
        assert verdict.difference == ""
        assert verdict.num_steps == len(engine.of(Step))
        num_accepted += sum(sum(line.accepted) for line in engine.of(Result))
    assert num_accepted > 20


@pytest.mark.parametrize("is_bidirectional", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_images_are_followed(is_async: bool, is_bidirectional: bool) -> None:
    """With the same parts of images in each step, by their measured times."""
    num_parts = num_found = 0
    for seed in range(2):
        encoder = encoder_limits(max_embeds=12, cache_size=30, is_bidirectional=is_bidirectional)
        engine = TracedEngine(30, encoder=encoder, async_scheduling=is_async)
        images_load(seed, engine)
        verdict = Follower(engine.recording).run()
        assert verdict.difference == ""
        num_parts += sum(len(line.decision.encoded) for line in engine.of(Step))
        hits = [hit for line in engine.of(Step) for hit in line.decision.hits]
        num_found += sum(hit.local_tokens > 0 for hit in hits)
    assert num_parts > 30
    assert num_found > 10


def test_pauses_restarts_and_resets_are_followed() -> None:
    engine = TracedEngine()
    scheduler = engine.harness.scheduler
    for seed in range(4):
        engine.harness.add_one([seed] * 50, 12)
    engine.step()
    scheduler.pause("finish_running")
    engine.harness.add_one([9] * 50, 12)
    engine.step()
    scheduler.resume()
    engine.step()
    engine.harness.lose_workers()
    engine.step()
    engine.step()
    scheduler.reset_prefix_cache(preempting=True)
    engine.finish()
    verdict = Follower(engine.recording).run()
    assert verdict.difference == ""
    assert verdict.num_steps == len(engine.of(Step))


@pytest.mark.parametrize("settings", [{}, {"pin_policy": "fixed"}, {"async_scheduling": True}])
def test_jobs_and_pins_are_followed(settings: dict) -> None:
    """Pins granted after an answer was read, and pins that expire between steps."""
    num_hits, reasons = 0, set()
    for seed in range(4):
        engine = TracedEngine(24, scheduling_policy="continuum", **settings)
        agents_load(seed, engine)
        verdict = Follower(engine.recording).run()
        assert verdict.difference == ""
        assert verdict.num_steps == len(engine.of(Step))
        reasons |= {each.reason for each in engine.of(PinEnd)}
        num_hits += engine.harness.scheduler.pop_stats().num_pins_hit
    assert num_hits > 5
    assert {"expired", "room"} <= reasons


def test_tool_lines_affect_decisions() -> None:
    """Without these lines the decisions of the same trace differ."""
    differences = []
    for seed in range(4):
        engine = TracedEngine(24, scheduling_policy="continuum")
        agents_load(seed, engine)
        lines = [each for each in engine.lines if not isinstance(each, TurnEnd)]
        differences.append(Follower(recording_of(engine.header, lines)).run().difference)
    assert any(differences)


def test_a_modified_decision_is_found() -> None:
    engine = TracedEngine()
    random_load(2, engine)
    index, line = next(
        (at, each)
        for at, each in enumerate(engine.lines)
        if isinstance(each, Step) and len(each.decision.running) > 1
    )
    running = line.decision.running[::-1]
    decision = msgspec.structs.replace(line.decision, running=running)
    engine.lines[index] = msgspec.structs.replace(line, decision=decision)
    verdict = Follower(engine.recording).run()
    assert verdict.difference.startswith(f"step {line.step}: running is ")
    assert verdict.num_steps == line.step - 1


def test_another_pool_size_changes_decisions() -> None:
    engine = TracedEngine(20)
    random_load(0, engine)
    wider = msgspec.structs.replace(engine.header, num_blocks=400)
    assert Follower(recording_of(wider, engine.lines)).run().difference


def test_following_ends_at_missing_lines() -> None:
    engine = TracedEngine()
    random_load(0, engine)
    engine.lines.insert(20, Dropped(num_lines=3))
    assert Follower(engine.recording).run().difference == "3 lines are missing"
