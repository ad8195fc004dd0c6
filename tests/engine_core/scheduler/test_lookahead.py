"""Proposals of a model in the workers: who is asked, the blocks they need, what becomes of them."""

from typing import Any

import pytest

from engine_core.kv_cache import integrity
from engine_core.kv_connector.base import Match
from engine_core.request import Request
from engine_core.scheduler.result import ImpossibleResultError
from engine_core.speculation.drafting import Drafting
from engine_core.speculation.worker_proposals import WorkerProposer
from proto.messages.engine_io import FinishReason
from tests.fakes.drafts import SyntheticDrafts
from tests.fakes.engine_harness import EngineHarness, scheduled
from tests.fakes.kv_connector import FakeConnector
from tests.fakes.paged_runner import undisturbed

PROMPT = [1, 2, 3, 4, 5, 6]


class AlwaysAsks(SyntheticDrafts):
    """Asks for `length` tokens of every request, and drafts nothing of its own."""

    def __init__(self, length: int) -> None:
        super().__init__(1.0, has_draft_model=True)
        self.length = length
        self.limits: list[list[int]] = []
        self.kept: list[tuple[int, list[int]]] = []

    def fill_drafts(
        self, requests: list[Request], limits: list[int], num_other_tokens: int
    ) -> None: ...

    def may_propose(self, num_requests: int, num_other_tokens: int) -> bool:
        return True

    def choose_proposals(
        self, requests: list[Request], limits: list[int], num_other_tokens: int
    ) -> tuple[list[int], float]:
        self.limits.append(limits)
        return [min(limit, self.length) for limit in limits], 0.25

    def keep_proposal(
        self, request: Request, num_asked: int, token_ids: Any, acceptance_probs: Any
    ) -> None:
        super().keep_proposal(request, num_asked, token_ids, acceptance_probs)
        self.kept.append((num_asked, token_ids))


def engine_with(length: int = 4, **settings: Any) -> EngineHarness:
    return EngineHarness(**{"block_size": 4, "drafting": AlwaysAsks(length), **settings})  # type: ignore[arg-type]


def with_draft_model(**settings: Any) -> EngineHarness:
    """An engine with real drafting, whose only drafter is the workers' model."""
    worker = WorkerProposer("draft_model")
    engine = EngineHarness(
        **{"block_size": 4, "drafting": Drafting([worker], 4, worker, 4), **settings}  # type: ignore[arg-type]
    )
    engine.step_seconds = lambda output: 0.01 * (1 + 0.02 * output.total_num_scheduled_tokens)
    return engine


def lookahead(output: Any) -> dict[int, int]:
    return dict(zip(output.lookahead_seq_ids, output.num_lookahead_tokens, strict=True))


@pytest.mark.parametrize("acceptance", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("is_async", [False, True])
def test_answers_are_those_without_a_draft_model(acceptance: float, is_async: bool) -> None:
    engine = with_draft_model(async_scheduling=is_async)
    engine.runner.draft_acceptance = acceptance
    requests = [
        *engine.add([*PROMPT, 7], 60, ignore_eos=True, n=2),
        *engine.add(PROMPT, 80, ignore_eos=True),
    ]
    steps = engine.run()
    for request in requests:
        wanted = undisturbed(request.prompt_token_ids, request.max_tokens, request.choice)
        assert engine.tokens_of(request) == wanted
        assert engine.finish_reason_of(request) is FinishReason.LENGTH
    stats = engine.scheduler.pop_stats()
    assert stats.num_draft_tokens > 4
    if acceptance == 1.0:
        assert stats.num_accepted_tokens > 0.6 * 220
        assert steps < (60 if is_async else 40)
    if acceptance == 0.0:
        assert stats.num_draft_tokens < 60, "noticed soon"
    engine.assert_idle()


@pytest.mark.parametrize("length", [1, 4, 9])
def test_blocks_cover_the_lookahead_and_later_tokens_use_them(length: int) -> None:
    """The runner asserts the first, and that no block in it is another's."""
    engine, plain = engine_with(length), EngineHarness(block_size=4)
    for each in (engine, plain):
        request = each.add_one(PROMPT, 30, ignore_eos=True)
        num_held = 0
        while each.scheduler.num_unfinished:
            output = each.step()
            (table,) = each.kv_cache.block_ids(request.seq_id) or [[]]
            num_held = max(num_held, len(table))
            assert len(each.kv_cache.pool.index) <= request.num_tokens // 4
            assert integrity.check(each.kv_cache) == []
            if table and lookahead(output):
                assert output.min_draft_acceptance_prob == 0.25
        assert num_held == 9, "as many as its tokens need"
        assert each.tokens_of(request) == undisturbed(PROMPT, 30)
    drafting = engine.scheduler._speculation._drafting
    assert drafting.num_proposed > 10  # type: ignore[union-attr]


def test_no_proposal_is_asked_that_no_token_could_use() -> None:
    """The last token of a request follows a draft, so with one token left there is none."""
    engine = engine_with(9)
    engine.add_one(PROMPT, 6, ignore_eos=True)
    engine.run()
    drafting = engine.scheduler._speculation._drafting
    assert drafting.limits == [[3], [2], [1]]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("settings", "most"),
    [({}, 9), ({"long_prefill_token_threshold": 6}, 5), ({"max_num_batched_tokens": 8}, 7)],
)
def test_lookahead_has_limits(settings: dict[str, Any], most: int) -> None:
    engine = engine_with(9, **settings)
    request = engine.add_one(PROMPT, 100, ignore_eos=True)
    while not lookahead(output := engine.step()):
        pass
    assert lookahead(output) == {request.seq_id: most}


def test_a_draft_model_has_a_length_of_its_own() -> None:
    engine = engine_with(4)
    engine.scheduler._speculation._drafting.max_proposal_len = 12  # type: ignore[union-attr]
    request = engine.add_one(PROMPT, 100, ignore_eos=True)
    engine.step()
    asked = [lookahead(engine.step()).get(request.seq_id, 0) for _ in range(8)]
    assert asked == [4, 4, 3, 2, 1, 0, 0, 0]


def test_prompts_have_no_lookahead() -> None:
    engine = engine_with(3, max_num_batched_tokens=8)
    first = engine.add_one(PROMPT, 40, ignore_eos=True)
    engine.step()
    second = engine.add_one(list(range(100, 112)), 9, ignore_eos=True)
    assert lookahead(engine.step()) == {first.seq_id: 3}
    output = engine.step()
    assert scheduled(output) == {first.seq_id: 1, second.seq_id: 5}
    assert lookahead(output) == {first.seq_id: 3}
    assert lookahead(engine.step()) == {first.seq_id: 3, second.seq_id: 3}


def test_no_request_is_preempted_delayed_or_refused_for_lookahead() -> None:
    """Steps are those without, and lookahead uses room in blocks that are there."""
    steps = []
    for length in (4, 0):
        engine = engine_with(length, num_blocks=7)
        engine.add_one(PROMPT, 9, ignore_eos=True)
        engine.add_one([9, *PROMPT], 9, ignore_eos=True)
        engine.add_one([8, *PROMPT], 9, ignore_eos=True)
        engine.run()
        steps.append([(scheduled(step), step.preempted_seq_ids) for step in engine.runner.steps])
        asked = [sum(step.num_lookahead_tokens) for step in engine.runner.steps]
        assert any(asked) == bool(length)
    assert steps[0] == steps[1]


def test_proposals_that_tokens_contradict_are_dropped_and_others_are_shortened() -> None:
    engine = with_draft_model()
    request = engine.add_one(PROMPT, 30, ignore_eos=True)
    engine.step()
    answer = undisturbed(PROMPT, 30)
    acceptance_probs = [0.9, 0.8, 0.7, 0.6]
    scheduler = engine.scheduler
    scheduler._result_pass.keep_proposal(request.seq_id, 4, answer[1:5], acceptance_probs)
    worker = scheduler._speculation._drafting._worker  # type: ignore[union-attr]
    request.all_token_ids += answer[1:3]
    worker.add_outputs(request, 2)
    draft = worker.propose(request, 9)
    assert draft.token_ids == answer[3:5]
    assert draft.acceptance_probs == pytest.approx([0.7 / 0.8, 0.6 / 0.8])
    request.all_token_ids.append(answer[3] + 1)
    worker.add_outputs(request, 1)
    assert worker.propose(request, 9) is None


def test_proposals_come_late_or_with_the_result_and_only_running_requests_have_some() -> None:
    engine = with_draft_model()
    engine.step_seconds = lambda output: 0.0  # no step is one that measures the time without
    requests = [engine.add_one([*PROMPT, each], 20, ignore_eos=True) for each in (1, 2, 3)]
    ended, preempted, other = requests
    engine.step()
    engine.scheduler.abort_request(ended.request_id)
    engine.scheduler._preemption.preempt_all(0.0)
    answers = [undisturbed(request.prompt_token_ids, 4)[1:] for request in requests]
    for request, answer in zip(requests, answers, strict=True):
        engine.scheduler._result_pass.keep_proposal(request.seq_id, 3, answer, [0.9] * 3)
    assert engine.step().drafts == {}, "lost with their blocks"
    answers = [undisturbed(request.prompt_token_ids, 5)[2:] for request in requests]
    for request, answer in zip(requests, answers, strict=True):
        engine.scheduler._result_pass.keep_proposal(request.seq_id, 3, answer, [0.9] * 3)
    assert engine.step().drafts == {preempted.seq_id: answers[1], other.seq_id: answers[2]}
    assert engine.scheduler.pop_stats().num_accepted_tokens == 6


@pytest.mark.parametrize(
    ("drafts", "acceptance_probs"),
    [
        ([[5]], [[0.5]]),
        ([[5], [1000]], [[0.5], [0.5]]),
        ([[5], [-1]], [[0.5], [0.5]]),
        ([[5], [6]], [[0.5]]),
        ([[5], [6]], [[0.5], [0.5, 0.4]]),
        ([[5], [6]], [[0.5], [float("nan")]]),
        ([[5], [6]], [[0.5], [1.5]]),
    ],
    ids=str,
)
def test_invalid_proposals_are_no_result(drafts: Any, acceptance_probs: Any) -> None:
    engine = EngineHarness()
    engine.add_one(PROMPT, 9)
    output = engine.scheduler.schedule()
    result = engine.runner.execute(output)
    result.draft_seq_ids.extend([0, 1])
    result.draft_token_ids.extend(drafts)
    result.draft_acceptance_probs.extend(acceptance_probs)
    with pytest.raises(ImpossibleResultError, match="invalid drafts"):
        engine.scheduler.update_from_output(output, result)


# KV of the draft model


def draft_kv(engine: EngineHarness, prompt: list[int], **params: object) -> int:
    """Run a request; return how many leading tokens had draft KV when it was admitted."""
    request = engine.add_one(prompt, 6, ignore_eos=True, **params)
    engine.run()
    return engine.scheduler._speculation._drafting.draft_kv[request.seq_id]  # type: ignore[union-attr]


@pytest.mark.parametrize("windows", [(None,), (6, None)])
def test_a_prefix_hit_has_draft_kv_where_proposals_were_made(windows: Any) -> None:
    engine = engine_with(windows=windows)
    prompt = list(range(16))
    assert draft_kv(engine, prompt) == 0
    assert draft_kv(engine, [*prompt, 50, 51]) == 16
    assert draft_kv(engine, [*prompt[:9], 60, 61, 62]) == 8
    assert draft_kv(engine, prompt, cache_salt="another") == 0
    engine.lose_workers()
    assert draft_kv(engine, prompt) == 0
    assert draft_kv(engine, prompt) == 12, "the last token is computed, in a block of its own"


def test_a_prefix_without_proposals_has_no_draft_kv() -> None:
    engine = engine_with(0)
    for _ in range(2):
        assert draft_kv(engine, list(range(16))) == 0


# A draft head


@pytest.mark.parametrize(("length", "cached"), [(32, 12), (16, 12), (17, 12), (12, 8), (4, 0)])
@pytest.mark.parametrize("windows", [(None,), (None, 6), (5,)])
def test_a_head_has_the_last_block_of_a_hit_computed_again(
    windows: Any, length: int, cached: int
) -> None:
    """Also where the whole prompt is cached; with a draft model of its own nothing is dropped."""
    for num_dropped in (1, 0):
        engine = EngineHarness(block_size=4, windows=windows, num_dropped_blocks=num_dropped)
        engine.add_one(list(range(16)), 2, ignore_eos=True)
        engine.run()
        prompt = [*range(16), *range(100, 200)][:length]
        request = engine.add_one(prompt, 3, ignore_eos=True)
        engine.run()
        whole = min(16, (length - 1) // 4 * 4)
        assert request.num_cached_tokens == (cached if num_dropped else whole)
        assert engine.tokens_of(request) == undisturbed(prompt, 3)


def test_a_head_has_the_last_block_of_a_load_computed_again() -> None:
    connector = FakeConnector(lambda request, num_local: Match(16 - num_local, False))
    engine = EngineHarness(block_size=4, connector=connector, num_dropped_blocks=1)
    request = engine.add_one(list(range(16)), 3, ignore_eos=True)
    engine.run()
    assert request.num_external_tokens == 12
    assert engine.tokens_of(request) == undisturbed(list(range(16)), 3)
