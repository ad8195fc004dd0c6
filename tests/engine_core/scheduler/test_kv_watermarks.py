"""A nearly full pool: watermark, whole-prompt admission, thresholds, and cached refusals."""

import pytest

from engine_core.kv_cache.manager import NO_PREFIX
from engine_core.scheduler.admission_rules import WholeSequence
from tests.fakes.engine_harness import EngineHarness, scheduled
from tests.fakes.paged_runner import hashed_token, undisturbed


def small_pool(**settings):
    """Ten usable blocks of four tokens."""
    return EngineHarness(**{"num_blocks": 11, "block_size": 4, **settings})


def prompt(length, first):
    return [first * 50 + each for each in range(length)]


def blocks_in_use(engine):
    return 10 - engine.kv_cache.num_available_blocks


def test_the_watermark_stays_free_at_admission():
    engine = small_pool(watermark=0.2)
    first = engine.add_one(prompt(20, 0), max_tokens=6)
    second = engine.add_one(prompt(16, 1), max_tokens=2)
    third = engine.add_one(prompt(12, 2), max_tokens=2)
    assert scheduled(engine.step()).keys() == {first.seq_id}, "5 and 4 leave less than 2"
    assert list(engine.scheduler.waiting) == [second, third], "no request overtakes"
    engine.run()
    assert engine.scheduler.pop_stats().num_preemptions == 0
    engine.assert_idle()


def test_running_requests_may_use_the_watermark():
    engine = small_pool(watermark=0.2)
    request = engine.add_one(prompt(32, 0), max_tokens=9)
    engine.run()
    assert len(engine.tokens_of(request)) == 9
    engine.assert_idle()


def test_a_request_that_is_alone_is_admitted_below_the_watermark():
    engine = small_pool(watermark=0.5)
    request = engine.add_one(prompt(36, 0), max_tokens=2)
    assert scheduled(engine.step()) == {request.seq_id: 36}


def test_full_prompt_admission_needs_blocks_for_the_whole_prompt():
    settings = {"long_prefill_token_threshold": 4, "enable_prefix_caching": False}
    engine = small_pool(**settings)
    first, second = (engine.add_one(prompt(24, each), max_tokens=1) for each in range(2))
    assert scheduled(engine.step()).keys() == {first.seq_id, second.seq_id}
    engine = small_pool(scheduler_reserve_full_isl=True, **settings)
    first = engine.add_one(prompt(24, 0), max_tokens=1)
    second = engine.add_one(prompt(36, 1), max_tokens=1)
    assert scheduled(engine.step()).keys() == {first.seq_id}
    engine.run()
    assert engine.scheduler.pop_stats().num_preemptions == 0
    assert engine.tokens_of(second) == undisturbed(prompt(36, 1), 1)
    engine.assert_idle()


def test_only_running_prompts_reserve_future_blocks():
    """The next token of a decoding request is exempt, even if it needs a block."""
    engine = small_pool()
    decodes = engine.add_one(prompt(8, 0), max_tokens=5)
    engine.step()
    assert decodes.num_tokens - decodes.num_computed_tokens == 1
    rule = WholeSequence(engine.kv_cache, engine.scheduler.running)
    large, larger = (engine.add_one(prompt(length, 1)) for length in (32, 33))
    assert rule.admits(large, 1, NO_PREFIX), "two blocks are in use"
    assert not rule.admits(larger, 1, NO_PREFIX)
    decodes.num_computed_tokens -= 1
    assert not rule.admits(large, 32, NO_PREFIX), "two tokens are the end of a prompt"


def test_a_cached_prefix_in_use_counts_as_room():
    engine = small_pool(scheduler_reserve_full_isl=True)
    first = engine.add_one(prompt(24, 0), max_tokens=3)
    engine.step()
    second = engine.add_one(prompt(24, 0) + prompt(9, 1), max_tokens=1)
    assert scheduled(engine.step()) == {first.seq_id: 1, second.seq_id: 9}


def test_admission_stops_above_one_occupancy_and_resumes_below_another():
    engine = small_pool(stop_admission_above=0.7, resume_admission_below=0.4)
    lengths = (11, 12, 8)  # 3 + 3 + 2 blocks: eight of ten are more than 0.7
    first = [engine.add_one(prompt(length, each), 2) for each, length in enumerate(lengths)]
    late = engine.add_one(prompt(4, 7), max_tokens=1)
    assert scheduled(engine.step()).keys() == {each.seq_id for each in first}
    assert blocks_in_use(engine) == 8
    for request in first[1:]:
        engine.scheduler.abort_request(request.request_id)
    assert blocks_in_use(engine) == 3
    grows = engine.step()
    assert scheduled(grows) == {first[0].seq_id: 1, late.seq_id: 4}, "admission resumes below 0.4"


def test_admission_that_has_not_stopped_goes_on_between_the_thresholds():
    """Six of ten blocks are neither above 0.7 nor below 0.4."""
    engine = small_pool(stop_admission_above=0.7, resume_admission_below=0.4)
    first = [engine.add_one(prompt(11, each), 20, ignore_eos=True) for each in range(2)]
    engine.step()
    assert blocks_in_use(engine) == 6
    late = engine.add_one(prompt(4, 7), max_tokens=1)
    assert scheduled(engine.step()) == {first[0].seq_id: 1, first[1].seq_id: 1, late.seq_id: 4}


def test_admission_that_has_stopped_does_not_resume_between_the_thresholds():
    """Eight of ten blocks stop it; five and six are neither above 0.7 nor below 0.4."""
    engine = small_pool(stop_admission_above=0.7, resume_admission_below=0.4)
    stays = engine.add_one(prompt(19, 0), max_tokens=20, ignore_eos=True)
    leaves = engine.add_one(prompt(11, 1), max_tokens=20, ignore_eos=True)
    engine.step()
    assert blocks_in_use(engine) == 8
    late = engine.add_one(prompt(4, 7), max_tokens=1)
    assert scheduled(engine.step()) == {stays.seq_id: 1, leaves.seq_id: 1}
    engine.scheduler.abort_request(leaves.request_id)
    assert blocks_in_use(engine) == 5
    assert scheduled(engine.step()) == {stays.seq_id: 1}
    assert blocks_in_use(engine) == 6
    engine.scheduler.abort_request(stays.request_id)
    assert scheduled(engine.step()) == {late.seq_id: 4}


def test_admission_resumes_in_a_step_without_waiting_requests():
    """Three of ten blocks are below 0.4 while one request runs; at the next arrival it has five."""
    engine = small_pool(stop_admission_above=0.7, resume_admission_below=0.4)
    stays = engine.add_one(prompt(11, 0), max_tokens=20, ignore_eos=True)
    leaves = engine.add_one(prompt(19, 1), max_tokens=20)
    engine.step()
    assert blocks_in_use(engine) == 8
    engine.step()  # admission stops
    engine.scheduler.abort_request(leaves.request_id)
    while blocks_in_use(engine) < 5:
        engine.step()
    late = engine.add_one(prompt(4, 7), max_tokens=1)
    assert scheduled(engine.step()) == {stays.seq_id: 1, late.seq_id: 4}


def test_admission_resumes_when_no_request_is_left():
    engine = small_pool(stop_admission_above=0.7, resume_admission_below=0.4)
    full = engine.add_one(prompt(31, 0), max_tokens=20)
    engine.step()
    engine.add_one(prompt(4, 5), max_tokens=1)
    engine.step()
    assert list(engine.scheduler.waiting), "admission is stopped"
    for each in (full, *engine.scheduler.waiting):
        engine.scheduler.abort_request(each.request_id)
    first = engine.add_one(prompt(20, 1), max_tokens=2)
    second = engine.add_one(prompt(4, 7), max_tokens=1)
    assert scheduled(engine.step()) == {first.seq_id: 20, second.seq_id: 4}


def test_above_the_highest_threshold_the_youngest_is_preempted():
    engine = small_pool(
        resume_admission_below=0.5, stop_admission_above=0.6, preempt_above=0.8, max_num_seqs=3
    )
    old = engine.add_one(prompt(20, 0), max_tokens=12)
    young = engine.add_one(prompt(12, 1), max_tokens=12)
    engine.step()
    engine.step()
    assert blocks_in_use(engine) == 10
    output = engine.step()
    assert output.preempted_seq_ids == [young.seq_id]
    assert scheduled(output) == {old.seq_id: 1}
    assert young not in engine.scheduler.running
    assert scheduled(engine.step()).keys() == {old.seq_id}, "six of ten are not below 0.5"
    engine.run()
    for each in (old, young):
        assert engine.tokens_of(each) == undisturbed(each.prompt_token_ids, 12)
    engine.assert_idle()


def test_no_request_is_admitted_only_to_be_preempted_by_watermark():
    """Two blocks are in use and admission is open, but four more would exceed 0.5."""
    engine = small_pool(stop_admission_above=0.4, preempt_above=0.5)
    engine.add_one(prompt(7, 0), max_tokens=5)
    engine.step()
    late = engine.add_one(prompt(16, 1), max_tokens=1)
    for _ in range(3):
        assert late.seq_id not in scheduled(engine.step())
    engine.run()
    assert engine.scheduler.pop_stats().num_preemptions == 0
    engine.assert_idle()


def test_admission_goes_on_a_little_below_where_it_stopped():
    engine = small_pool(stop_admission_above=0.5)
    first = [engine.add_one(prompt(12, each), max_tokens=20) for each in range(2)]
    engine.step()
    late = engine.add_one(prompt(3, 7), max_tokens=1)
    assert blocks_in_use(engine) == 6, "more than 0.5: admission stops"
    assert late.seq_id not in scheduled(engine.step())
    engine.scheduler.abort_request(first[1].request_id)  # four blocks are less than 0.45
    assert late.seq_id in scheduled(engine.step())


def test_the_head_of_the_line_comes_in_when_a_running_prompt_is_aborted():
    """The number of free blocks is unchanged, but the aborted prompt no longer reserves any."""
    engine = small_pool(
        scheduler_reserve_full_isl=True, long_prefill_token_threshold=4, enable_prefix_caching=False
    )
    stays = engine.add_one(prompt(4, 0), max_tokens=12)
    long = engine.add_one(prompt(30, 1), max_tokens=1)
    engine.step()
    head = engine.add_one(prompt(24, 2), max_tokens=1)
    assert head.seq_id not in scheduled(engine.step())
    engine.scheduler.abort_request(long.request_id)
    assert head.seq_id in scheduled(engine.step())
    engine.run()
    assert engine.tokens_of(stays) == undisturbed(prompt(4, 0), 12)


def test_the_last_running_request_is_not_preempted_by_watermark():
    engine = small_pool(stop_admission_above=0.1, preempt_above=0.1)
    request = engine.add_one(prompt(30, 0), max_tokens=5)
    engine.run()
    assert request.num_preemptions == 0
    engine.assert_idle()


@pytest.mark.interpreted
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_request_without_free_blocks_is_looked_up_once(policy, monkeypatch):
    engine = small_pool(scheduling_policy=policy)
    first = engine.add_one(prompt(32, 0), max_tokens=8)
    engine.step()
    second = engine.add_one(prompt(32, 1), max_tokens=1)
    lookups = []
    lookup = engine.kv_cache.get_computed_blocks

    def counting(request):
        lookups.append(request)
        return lookup(request)

    monkeypatch.setattr(engine.kv_cache, "get_computed_blocks", counting)
    for _ in range(6):
        assert scheduled(engine.step()) == {first.seq_id: 1}
    assert lookups == [second]
    engine.scheduler.abort_request(first.request_id)
    assert scheduled(engine.step()) == {second.seq_id: 32}


def test_a_smaller_chunk_may_fit_where_a_larger_one_did_not():
    engine = small_pool(max_num_batched_tokens=16)
    first = engine.add_one(prompt(28, 0), max_tokens=2)
    second = engine.add_one(prompt(20, 1), max_tokens=1)
    assert scheduled(engine.step()) == {first.seq_id: 16}
    assert scheduled(engine.step()) == {first.seq_id: 12, second.seq_id: 4}


def test_a_request_is_looked_up_again_when_more_of_its_prefix_is_cached():
    """The running request generates the continuation of the prompt and fills an existing block."""
    engine = small_pool()
    begins = prompt(5, 0)
    first = engine.add_one(begins, max_tokens=6, ignore_eos=True)
    engine.step()
    head = engine.add_one([*begins, *undisturbed(begins, 3), *prompt(31, 1)], max_tokens=1)
    for _ in range(2):
        assert scheduled(engine.step()) == {first.seq_id: 1}, "one of ten blocks is cached"
    assert blocks_in_use(engine) == 2
    assert scheduled(engine.step()) == {first.seq_id: 1, head.seq_id: 31}
    assert head.num_cached_tokens == 8
    engine.run()
    assert engine.tokens_of(first) == undisturbed(begins, 6)


def test_choices_fork_the_prompt_of_one_that_has_ended_where_there_is_no_room_for_another():
    """The first one ends with its first token, without a prefix cache to keep its blocks."""
    first_of_all = 0

    def next_token(token_ids, choice):
        return 998 if choice == first_of_all else hashed_token(token_ids, choice)

    engine = small_pool(enable_prefix_caching=False, next_token=next_token)
    choices = engine.add(prompt(24, 0), 3, n=3, stop_token_ids=(998,))
    _, second, third = choices
    assert scheduled(engine.step()) == {choices[first_of_all].seq_id: 24}
    assert scheduled(engine.step()) == {second.seq_id: 1, third.seq_id: 1}, "six of ten blocks"
    engine.run()
    for each in (second, third):
        assert engine.tokens_of(each) == undisturbed(prompt(24, 0), 3, each.choice)


def test_a_request_is_looked_up_again_when_a_window_lost_prefix_blocks():
    """Of the blocks 10 to 13 that it hits, two are allocated to others, but not the last one.

    Without them it starts from nothing, and its first eight tokens need fewer blocks than the
    four that it found in the free queue and the four new ones.
    """
    engine = EngineHarness(
        num_blocks=19, block_size=2, windows=(9,), long_prefill_token_threshold=8
    )
    engine.add_one(prompt(36, 0), max_tokens=1)
    engine.run()
    goes_on = [*prompt(36, 0), 998]
    runners = [engine.add_one(each, max_tokens=9) for each in (goes_on, prompt(7, 2), prompt(5, 3))]
    engine.step()
    assert engine.scheduler.running == runners
    head = engine.add_one([*prompt(28, 0), *prompt(10, 4)], max_tokens=1)
    assert head.seq_id not in scheduled(engine.step())
    assert scheduled(engine.step())[head.seq_id] == 8
    assert head.num_cached_tokens == 0
    engine.run()
    engine.assert_idle()
