"""Drafts in the scheduler: who gets one, how long it may be, and what its result changes."""

from typing import Any

import numpy as np
import pytest

from engine_core.kv_cache import integrity
from engine_core.kv_cache.manager import NO_PREFIX
from engine_core.request import Request, RequestStatus
from engine_core.scheduler.features.speculative_decoding import is_drafted_for
from engine_core.scheduler.features.tenant_usage import OUTPUT_WEIGHT
from engine_core.scheduler.result import ImpossibleResultError
from proto.messages.engine_io import FinishReason, LogprobsArrays
from proto.messages.lifecycle import RECURRENT_STATE, KVGroup
from proto.messages.model_runner_output import ModelRunnerOutput, RowLogprobs
from proto.messages.scheduler_output import SchedulerOutput
from tests.fakes.drafts import SyntheticDrafts, hashed_answer
from tests.fakes.engine_harness import EngineHarness, scheduled
from tests.fakes.paged_runner import undisturbed

PROMPT = [1, 2, 3, 4, 5, 6]


class Eager(SyntheticDrafts):
    """Proposes `length` right tokens for every request."""

    def __init__(self, length: int) -> None:
        super().__init__(1.0, most=length)
        self.length = length

    def fill_drafts(
        self, requests: list[Request], limits: list[int], num_other_tokens: int
    ) -> None:
        self.num_other_tokens.append(num_other_tokens)
        for request in requests:
            request.spec_token_ids = hashed_answer(request, self.length)


def engine_with(length: int = 4, **settings: Any) -> EngineHarness:
    return EngineHarness(**{"block_size": 4, "drafting": Eager(length), **settings})  # type: ignore[arg-type]


def drafted(output: SchedulerOutput) -> dict[int, int]:
    return {seq_id: len(draft) for seq_id, draft in output.drafts.items()}


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("is_async", [False, True])
def test_answers_are_those_without_drafts(acceptance: float, is_async: bool) -> None:
    drafting = SyntheticDrafts(acceptance)
    engine = EngineHarness(block_size=4, drafting=drafting, async_scheduling=is_async)
    requests = [
        *engine.add([*PROMPT, 7], 30, ignore_eos=True, n=3),
        *engine.add(PROMPT, 40, ignore_eos=True),
    ]
    steps = engine.run()
    for request in requests:
        wanted = undisturbed(request.prompt_token_ids, request.max_tokens, request.choice)
        assert engine.tokens_of(request) == wanted
        assert engine.finish_reason_of(request) is FinishReason.LENGTH
    stats = engine.scheduler.pop_stats()
    assert stats.num_draft_tokens == drafting.num_drafted > 80
    assert stats.num_accepted_tokens == drafting.num_accepted == sum(stats.accepted_per_pos)
    sent = [each.num_accepted_drafts for outputs in engine.outputs.values() for each in outputs]
    assert sum(sent) == drafting.num_accepted
    assert stats.num_drafts < stats.num_draft_tokens
    assert engine.scheduler.pop_stats().num_drafts == 0
    if acceptance == 1.0:
        assert drafting.num_accepted > 0.9 * drafting.num_drafted
        assert is_async or steps < 20
    if acceptance == 0.0:
        assert drafting.num_accepted == 0
    assert drafting.num_known == {}
    assert integrity.check(engine.kv_cache) == []


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({}, 9),
        ({"max_num_batched_tokens": 6}, 5),
        ({"max_num_seqs": 4}, 3),
        ({"long_prefill_token_threshold": 3}, 2),
        ({"max_model_len": len(PROMPT) + 6}, 4),
    ],
)
def test_a_draft_is_cut_to_the_room_of_a_step(settings: dict[str, Any], most: int) -> None:
    engine = engine_with(9, **settings)
    request = engine.add_one(PROMPT, 100, ignore_eos=True)
    while request.num_output_tokens < 1:
        engine.step()
    assert drafted(engine.send()) == {request.seq_id: most}


@pytest.mark.parametrize("max_tokens", range(1, 8))
def test_no_position_is_computed_that_max_tokens_excludes(max_tokens: int) -> None:
    engine = engine_with(9)
    request = engine.add_one(PROMPT, max_tokens, ignore_eos=True)
    engine.run()
    assert engine.tokens_of(request) == undisturbed(PROMPT, max_tokens)
    drafts = [drafted(step) for step in engine.runner.steps[1:] if step.total_num_scheduled_tokens]
    wanted = {1: [], 2: [{}]}.get(max_tokens, [{request.seq_id: max_tokens - 2}])
    assert drafts == wanted, "the last draft is followed by the last token"


def test_prompts_go_before_drafts() -> None:
    engine = engine_with(9, max_num_batched_tokens=16)
    first = engine.add_one(PROMPT, 40, ignore_eos=True)
    engine.step()
    second = engine.add_one(list(range(100, 130)), 4, ignore_eos=True)
    assert scheduled(engine.step()) == {first.seq_id: 1, second.seq_id: 15}
    assert scheduled(engine.step()) == {first.seq_id: 1, second.seq_id: 15}
    assert drafted(engine.step()) == {first.seq_id: 9, second.seq_id: 2}
    assert engine.scheduler._speculation._drafting.num_other_tokens == [0]  # type: ignore[union-attr]


def test_no_request_is_preempted_for_a_draft() -> None:
    engine = engine_with(4, num_blocks=5)
    first = engine.add_one(PROMPT, 5, ignore_eos=True)
    second = engine.add_one([9, *PROMPT], 5, ignore_eos=True)
    engine.step()
    output = engine.step()
    assert scheduled(output) == {first.seq_id: 1, second.seq_id: 1}, "their blocks end"
    assert output.preempted_seq_ids == []
    engine.run()
    assert engine.tokens_of(first) == undisturbed(PROMPT, 5)


def test_a_request_that_leaves_the_plan_leaves_without_its_draft() -> None:
    engine = engine_with(2, num_blocks=8, max_num_seqs=8)
    requests = [engine.add_one([*PROMPT, 9, each], 12, ignore_eos=True) for each in (1, 2, 3)]
    while not (output := engine.step()).preempted_seq_ids:
        pass
    assert not set(output.preempted_seq_ids) & set(output.spec_decode_seq_ids)
    for request in requests:
        assert request.spec_token_ids == [], "consumed, or lost"
    engine.run()
    for request in requests:
        assert engine.tokens_of(request) == undisturbed(request.prompt_token_ids, 12)


def test_a_stop_token_in_a_draft_ends_the_request_there() -> None:
    answer = undisturbed(PROMPT, 8)
    plain = EngineHarness(block_size=4)
    engine = engine_with(6)
    ended = []
    for each in (plain, engine):
        request = each.add_one(PROMPT, 20, stop_token_ids=(answer[3],), logprobs=0)
        each.run()
        ended.append((each.tokens_of(request), each.finish_reason_of(request), request.stop_reason))
        assert request.num_computed_tokens == request.num_tokens - 1
    assert ended[0] == ended[1] == (answer[:4], FinishReason.STOP, answer[3])
    cached = [list(each.kv_cache.pool.index.items()) for each in (plain, engine)]
    assert len(cached[0]) == len(cached[1]), "nothing behind the end is findable"
    assert engine.scheduler.pop_stats().num_discarded_tokens == 4


@pytest.mark.parametrize(("place", "accepted"), [(1, 1), (3, 3), (5, 4)])
def test_only_accepted_tokens_that_the_request_got_are_counted(place: int, accepted: int) -> None:
    """The draft is the answer's tokens 1 to 4; the one at this place ends the request."""
    answer = undisturbed(PROMPT, 8)
    engine = engine_with(4)
    engine.add_one(PROMPT, 20, stop_token_ids=(answer[place],))
    engine.run()
    stats = engine.scheduler.pop_stats()
    assert stats.num_draft_tokens == 4
    assert stats.accepted_per_pos == [int(position < accepted) for position in range(4)]
    drafting = engine.scheduler._speculation._drafting
    assert drafting.num_accepted == accepted  # type: ignore[union-attr]
    assert drafting.num_drafted == min(accepted, 4)  # type: ignore[union-attr]


@pytest.mark.parametrize("is_async", [False, True])
def test_one_sequence_at_a_time_may_have_drafts(is_async: bool) -> None:
    """No position of max_num_seqs is spare: drafts use those that are planned for them."""
    engine = EngineHarness(
        block_size=4,
        max_num_seqs=1,
        num_draft_positions=4,
        drafting=SyntheticDrafts(0.7),
        async_scheduling=is_async,
    )
    requests = [engine.add_one([*PROMPT, each], 20, ignore_eos=True) for each in (1, 2)]
    engine.run()
    assert max(step.total_num_scheduled_tokens for step in engine.runner.steps[1:]) > 1
    longest = max(len(draft) for step in engine.runner.steps for draft in step.drafts.values())
    assert longest == 4
    for request in requests:
        assert engine.tokens_of(request) == undisturbed(request.prompt_token_ids, 20)


def test_a_reset_forgets_outputs_and_not_requests() -> None:
    drafting = SyntheticDrafts(0.7)
    drafting.forget_outputs = lambda: forgotten.append(dict(drafting.num_known))  # type: ignore[method-assign]
    forgotten: list[dict[int, int]] = []
    engine = EngineHarness(block_size=4, drafting=drafting)
    request = engine.add_one(PROMPT, 9, ignore_eos=True)
    engine.step()
    engine.scheduler.reset_prefix_cache(preempting=True)
    assert forgotten == [{request.seq_id: request.num_tokens}]
    engine.run()
    assert engine.tokens_of(request) == undisturbed(PROMPT, 9)


def test_logprobs_end_with_the_token_that_ends_the_request() -> None:
    answer = undisturbed(PROMPT, 8)
    engine = engine_with(5)
    request = engine.add_one(PROMPT, 20, stop_token_ids=(answer[2],), logprobs=1)
    engine.step()
    output = engine.scheduler.schedule()
    rows = np.arange(12, dtype="<i4")
    arrays = LogprobsArrays(1, 2, rows.tobytes(), rows.astype("<f4").tobytes(), rows[:6].tobytes())
    result = ModelRunnerOutput(
        1, output.step, [request.seq_id], [answer[1:7]], [RowLogprobs(request.seq_id, arrays)]
    )
    usage = engine.scheduler._usage
    usage.register_request(request)  # so that its tenant is not forgotten
    before = usage.served(request.tenant)
    ((sent,),) = engine.scheduler.update_from_output(output, result).values()
    assert sent.new_token_ids == answer[1:3]
    assert sent.finish_reason is FinishReason.STOP
    assert sent.logprobs == LogprobsArrays(
        1, 2, rows[:4].tobytes(), rows[:4].astype("<f4").tobytes(), rows[:2].tobytes()
    )
    assert usage.served(request.tenant) - before == OUTPUT_WEIGHT, "for one token beside the first"


def test_tokens_that_contradict_the_draft_are_no_result() -> None:
    engine = engine_with(3)
    request = engine.add_one(PROMPT, 20, ignore_eos=True)
    engine.step()
    output = engine.scheduler.schedule()
    (draft,) = output.scheduled_spec_decode_tokens
    result = ModelRunnerOutput(1, output.step, [request.seq_id], [[draft[0] + 1, 5]])
    with pytest.raises(ImpossibleResultError, match="other tokens than those that were drafted"):
        engine.scheduler.update_from_output(output, result)


def test_drafts_are_never_findable() -> None:
    engine = EngineHarness(block_size=2, drafting=SyntheticDrafts(0.0, most=6))
    request = engine.add_one(PROMPT, 20, ignore_eos=True)
    while engine.scheduler.num_unfinished:
        engine.send()
        assert len(engine.kv_cache.pool.index) <= request.num_tokens // 2
        engine.receive()


def test_a_window_frees_by_the_confirmed_length() -> None:
    engine = EngineHarness(
        block_size=1, windows=(4,), drafting=SyntheticDrafts(0.0, most=6), num_blocks=40
    )
    request = engine.add_one(PROMPT, 20, ignore_eos=True)
    engine.step()
    num_steps = 0
    while engine.scheduler.num_unfinished:
        confirmed = request.num_computed_tokens
        output = engine.send()
        (table,) = engine.kv_cache.block_ids(request.seq_id)
        seen = table[confirmed - 3 : confirmed]
        assert 0 not in seen, f"{confirmed} tokens are confirmed: {table}"
        num_steps += bool(output.drafts)
        engine.receive()
    assert num_steps > 10
    assert engine.tokens_of(request) == undisturbed(PROMPT, 20)


def test_a_request_waits_for_the_result_of_its_draft_and_no_other_does() -> None:
    engine = engine_with(3, async_scheduling=True)
    first = engine.add_one(PROMPT, 40, ignore_eos=True)
    other = engine.add_one([*PROMPT, 7], 40, ignore_eos=True, n=1, logprobs=0)
    engine.scheduler._speculation._drafting.length = 0  # type: ignore[union-attr]
    engine.send()
    engine.send()
    engine.receive()
    assert first.num_output_placeholders == other.num_output_placeholders == 1
    first.spec_token_ids = hashed_answer(first, 3)
    engine.scheduler._speculation.is_active = True
    answer = undisturbed(PROMPT, 10)
    engine.scheduler._speculation._drafting.fill_drafts = lambda requests, limits, others: None  # type: ignore[union-attr]
    output = engine.send()
    assert output.drafts == {first.seq_id: answer[2:4]}, "the first token is in flight already"
    assert first.num_output_placeholders == 1 + 3
    engine.receive()
    assert scheduled(engine.send()) == {other.seq_id: 1}
    engine.receive()
    assert first.num_output_tokens == 5, "both drafts were accepted"
    assert scheduled(engine.send()) == {first.seq_id: 1, other.seq_id: 1}


def test_beams_and_pooled_requests_are_not_drafted_for() -> None:
    engine = engine_with(3)
    beam = engine.add(PROMPT, 4, n=2, temperature=0.0, beam_width=2, eos_token_ids=())[0]
    assert not is_drafted_for(beam)
    engine.run()
    assert not any(step.drafts for step in engine.runner.steps)
    assert not engine.scheduler._speculation._drafting.num_known  # type: ignore[union-attr]


def test_a_model_with_states_has_drafts_from_text_only() -> None:
    """A proposal of the workers, of a draft model or a head, is not used."""
    groups = [KVGroup(None), KVGroup(None, kind=RECURRENT_STATE)]
    engine = engine_with(3, groups=groups, num_state_slots=20)
    request = engine.add_one(PROMPT, 10, ignore_eos=True)
    engine.step()
    engine.scheduler._result_pass.keep_proposal(request.seq_id, 2, [1, 2], [0.9, 0.8])
    engine.run()
    drafts = [draft for step in engine.runner.steps for draft in step.drafts.values()]
    assert drafts
    assert [1, 2] not in drafts
    assert engine.tokens_of(request) == undisturbed(PROMPT, 10)


def test_a_paused_or_waiting_request_keeps_no_draft() -> None:
    engine = engine_with(3)
    request = engine.add_one(PROMPT, 10, ignore_eos=True)
    engine.step()
    request.spec_token_ids = [5, 6]
    engine.scheduler.begin_worker_epoch(2)
    assert request.spec_token_ids == []
    assert request.status is RequestStatus.PREEMPTED
    assert engine.kv_cache.get_computed_blocks(request) is NO_PREFIX


def test_requests_released_behind_drafts_wait_for_positions() -> None:
    """Choices that begin when the first one has the prompt: drafts took no position of theirs."""
    engine = engine_with(7, max_num_seqs=8)
    requests = engine.add(PROMPT, 12, ignore_eos=True, n=8)
    engine.run()
    steps = engine.runner.steps
    assert [len(scheduled(step)) for step in steps][:3] == [1, 1, 8]
    assert any(step.drafts for step in steps)
    for step in steps:
        assert len(scheduled(step)) + sum(map(len, step.drafts.values())) <= 8
    for request in requests:
        wanted = undisturbed(PROMPT, request.max_tokens, request.choice)
        assert engine.tokens_of(request) == wanted
