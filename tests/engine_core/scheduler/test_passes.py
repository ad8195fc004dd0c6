"""Scheduled requests, their tokens, and their order."""

import pytest

from proto.messages.engine_io import FinishReason
from tests.fakes.engine_harness import EngineHarness, scheduled
from tests.fakes.paged_runner import undisturbed


def prompt(length: int, first: int = 0) -> list[int]:
    """Return tokens that are unique to `first`."""
    return [(first * 37 + position) % 1000 for position in range(length)]


@pytest.mark.parametrize("prompt_logprobs", [None, 5])
def test_first_step_takes_every_short_prompt_whole(prompt_logprobs):
    engine = EngineHarness(max_num_seqs=16)
    requests = [
        engine.add_one(prompt(10, each), prompt_logprobs=prompt_logprobs) for each in range(10)
    ]
    output = engine.scheduler.schedule()
    assert [new.seq_id for new in output.new_requests] == [each.seq_id for each in requests]
    assert [new.num_scheduled_tokens for new in output.new_requests] == [10] * 10
    assert output.cached_requests.seq_ids == []
    assert output.finished_seq_ids == []
    assert output.total_num_scheduled_tokens == 100
    assert engine.scheduler.running == requests
    assert len(engine.scheduler.waiting) == 0


def test_unfinished_counts_waiting_and_running():
    engine = EngineHarness(max_num_seqs=5)
    for each in range(10):
        engine.add_one(prompt(10, each), max_tokens=1 + each)
    counts = []
    while engine.scheduler.num_unfinished:
        counts.append(engine.scheduler.num_unfinished)
        engine.step()
    assert counts[0] == 10
    assert counts == sorted(counts, reverse=True)


def test_long_prefill_threshold_leaves_room_for_others():
    engine = EngineHarness(
        max_num_batched_tokens=1024, long_prefill_token_threshold=400, enable_prefix_caching=False
    )
    requests = [engine.add_one(prompt(800, each)) for each in range(3)]
    counts = [list(scheduled(engine.step()).values()) for _ in range(3)]
    assert counts == [[400, 400, 224], [400, 400, 224], [1, 1, 352]]
    assert [len(engine.tokens_of(each)) for each in requests] == [2, 2, 1]


def test_chunked_prompt_gives_no_token_before_it_is_complete():
    engine = EngineHarness(max_num_batched_tokens=64)
    request = engine.add_one(prompt(200), max_tokens=3)
    counts = []
    for _ in range(4):
        assert engine.tokens_of(request) == []
        counts.append(scheduled(engine.step())[request.seq_id])
    assert counts == [64, 64, 64, 8]
    engine.run()
    assert engine.tokens_of(request) == undisturbed(prompt(200), 3)


def test_without_chunking_no_request_overtakes_a_prompt_that_does_not_fit():
    engine = EngineHarness(max_num_batched_tokens=1024, enable_chunked_prefill=False)
    lengths = (800, 800, 10, 10)
    requests = [engine.add_one(prompt(length, each)) for each, length in enumerate(lengths)]
    assert scheduled(engine.step()) == {requests[0].seq_id: 800}
    assert scheduled(engine.step()) == {
        requests[0].seq_id: 1,
        requests[1].seq_id: 800,
        requests[2].seq_id: 10,
        requests[3].seq_id: 10,
    }


def test_without_chunking_a_prompt_longer_than_any_step_is_computed_all_the_same():
    engine = EngineHarness(max_num_batched_tokens=64, enable_chunked_prefill=False)
    short = engine.add_one(prompt(10, 1), max_tokens=8)
    long = engine.add_one(prompt(200, 2), max_tokens=2)
    engine.run()
    assert engine.tokens_of(short) == undisturbed(prompt(10, 1), 8)
    assert engine.tokens_of(long) == undisturbed(prompt(200, 2), 2)
    engine.assert_idle()


def test_max_num_seqs_limits_running_requests():
    engine = EngineHarness(max_num_seqs=3)
    requests = [engine.add_one(prompt(10, each), max_tokens=2) for each in range(7)]
    assert len(scheduled(engine.step())) == 3
    engine.run()
    assert all(engine.finish_reason_of(each) is FinishReason.LENGTH for each in requests)
    assert max(len(scheduled(step)) for step in engine.runner.steps) == 3


def test_a_budget_below_max_num_seqs_serves_every_running_request():
    engine = EngineHarness(max_num_seqs=24, max_num_batched_tokens=16)
    requests = [engine.add_one(prompt(5 + 7 * each, each), max_tokens=20) for each in range(24)]
    while engine.scheduler.num_unfinished:
        running = {each.seq_id for each in engine.scheduler.running}
        output = engine.step()
        assert running <= scheduled(output).keys()
        assert 0 < output.total_num_scheduled_tokens <= 16
    for each in requests:
        assert engine.tokens_of(each) == undisturbed(each.prompt_token_ids, 20)


def test_two_steps_in_flight_do_not_compute_a_token_twice():
    engine = EngineHarness(max_num_batched_tokens=1024, max_num_seqs=2)
    first, second = (engine.add_one(prompt(512, each)) for each in range(2))
    third = engine.add_one(prompt(512, 3))
    step_0 = engine.scheduler.schedule()
    assert scheduled(step_0) == {first.seq_id: 512, second.seq_id: 512}
    step_1 = engine.scheduler.schedule()
    assert scheduled(step_1) == {}
    engine.collect(step_0)
    engine.collect(step_1)
    assert scheduled(engine.step()) == {first.seq_id: 1, second.seq_id: 1}
    assert third in list(engine.scheduler.waiting)


def test_a_next_turn_computes_only_new_tokens():
    engine = EngineHarness()
    first = engine.add_one(prompt(100), max_tokens=200)
    engine.run()
    turn = prompt(100) + engine.tokens_of(first)
    second = engine.add_one(turn, max_tokens=1)
    # The KV of the last token was never computed, but 299 tokens fill 18 blocks of 16.
    output = engine.step()
    assert scheduled(output) == {second.seq_id: 300 % 16}
    assert output.new_requests[0].num_computed_tokens == 288
    assert second.num_cached_tokens == 288
    assert len(engine.tokens_of(second)) == 1


def test_a_continuing_decode_sends_blocks_only_when_it_needs_one():
    engine = EngineHarness(block_size=4)
    engine.add_one(prompt(3), max_tokens=9)
    engine.run()
    new_blocks = [step.cached_requests.new_block_ids for step in engine.runner.steps[1:-1]]
    needed = [each for (each,) in new_blocks if each is not None]
    assert len(new_blocks) == 8
    assert len(needed) == 2  # for positions 4 and 8


def test_a_step_keeps_to_the_scheduled_tokens() -> None:
    engine = EngineHarness(max_num_batched_tokens=64, max_num_scheduled_tokens=24)
    engine.add_one(list(range(60)))
    steps = [engine.scheduler.schedule().total_num_scheduled_tokens for _ in range(2)]
    assert steps == [24, 24]


def test_a_request_that_skips_reading_the_prefix_cache_computes_its_prompt() -> None:
    engine = EngineHarness()
    prompt = list(range(100))
    for skips, cached in ((False, 0), (False, 96), (True, 0), (False, 96)):
        request = engine.add_one(prompt, 1, skip_reading_prefix_cache=skips)
        engine.step()
        assert request.num_cached_tokens == cached
