"""The engine with grammars: requests that wait, masks, and deaths of workers in between."""

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from engine_core.request import RequestStatus
from engine_core.structured_output.compiler import QUICK_THREADS
from engine_core.structured_output.manager import CONTRADICTION
from engine_core.structured_output.matchers import CompilerFailedError
from engine_core.worker_group import WorkerFailedError
from proto.messages.engine_io import FinishReason
from proto.messages.grammar import GrammarSource
from proto.messages.sampling_params import ThinkingRule
from tests.fakes.drafts import SyntheticDrafts
from tests.fakes.engine_harness import EngineHarness
from tests.fakes.grammar_engine import LIMIT_SECONDS, GatedSandbox, GrammarEngine, NoSandbox
from tests.fakes.input_harness import InputProcessorHarness, refused
from tests.fakes.messages import request as make_message
from tests.fakes.paged_runner import undisturbed
from tests.fakes.toy_vocabulary import BYTE, EOS, SIZE, text_of, tokens_of

WORDS = GrammarSource("regex", "([a-c]{3} ){4}[0-9]{1,4}")
PATTERN = re.compile("([a-c]{3} ){4}[0-9]{1,4}")
SCHEMA = GrammarSource(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {"a": {"type": "string", "maxLength": 5}, "b": {"type": "boolean"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        }
    ),
)


@pytest.fixture(params=[False, True], ids=["synchronous", "overlapped"])
def engine(request: Any, tokenizer_folder: Any) -> Iterator[GrammarEngine]:
    made = GrammarEngine(tokenizer_folder, async_scheduling=request.param)
    yield made
    made.close()


def assert_nothing_is_left(engine: GrammarEngine) -> None:
    engine.harness.assert_idle()
    assert engine.num_constrained == 0


def test_outputs_match_their_grammars_beside_unconstrained_ones(engine):
    engine.send_request(1, WORDS)
    engine.send_request(2, SCHEMA, n=3)
    engine.send_request(3, None, max_tokens=30)
    engine.run()
    assert PATTERN.fullmatch(text_of(engine.tokens(1)))
    texts = [text_of(engine.tokens(2, choice)) for choice in range(3)]
    assert len(set(texts)) > 1
    assert all(set(json.loads(text)) == {"a", "b"} for text in texts)
    assert {engine.reason(1), *(engine.reason(2, each) for each in range(3))} == {FinishReason.STOP}
    assert [each for each in engine.runner.steps if each.constrained_seq_ids]
    assert_nothing_is_left(engine)


def test_chunks_of_a_prompt_are_not_masked(tokenizer_folder):
    engine = GrammarEngine(tokenizer_folder, max_num_batched_tokens=8)
    engine.send_request(1, WORDS, list(range(5, 35)))
    engine.run()
    engine.close()
    steps = [each for each in engine.runner.steps if each.total_num_scheduled_tokens]
    assert [bool(each.constrained_seq_ids) for each in steps[:5]] == [
        False,
        False,
        False,
        True,
        True,
    ]
    assert PATTERN.fullmatch(text_of(engine.tokens(1)))


def test_max_tokens_truncates_a_constrained_output(engine):
    engine.send_request(1, WORDS, max_tokens=3)
    engine.run()
    assert engine.reason(1) is FinishReason.LENGTH
    assert_nothing_is_left(engine)


def test_a_request_waits_for_its_grammar_and_others_do_not(engine):
    engine.send_request(1, WORDS, wait=False)
    engine.send_request(2, None, max_tokens=3)
    assert engine.outputs.accepted == [(0, 2)]
    engine.step()
    (waiting,) = [each for each in engine.harness.scheduler.waiting if each.request_id == 1]
    assert waiting.status is RequestStatus.WAITING_FOR_GRAMMAR
    engine.wait_for_reply(1)
    assert engine.outputs.accepted == [(0, 2), (0, 1)]
    engine.send_request(3, WORDS, wait=False)
    assert (0, 3) in engine.outputs.accepted  # it is known by now
    engine.run()
    assert_nothing_is_left(engine)


def test_a_grammar_that_fails_ends_its_request_before_it_was_accepted(engine):
    bad = GrammarSource("regex", "(", field="guided_regex")
    for request_id in (1, 2):  # the second time it is known
        engine.send_request(request_id, bad, n=2)
        _, output = engine.outputs.outputs[-1]
        assert output.request_id == request_id
        assert output.error.kind == "invalid_request"
        assert output.error.param == "guided_regex"
        assert output.error.message == (
            "guided_regex: the grammar cannot be used: invalid regular expression (: unclosed group"
        )
    assert engine.outputs.accepted == []
    assert_nothing_is_left(engine)


def test_a_request_aborted_during_compilation_is_forgotten(engine):
    engine.send_request(1, WORDS, wait=False)
    engine.harness.scheduler.abort_request(1)
    engine.send_request(2, WORDS)
    assert engine.outputs.accepted == [(0, 2)]
    engine.step()
    engine.harness.scheduler.abort_request(2)
    engine.run()
    assert_nothing_is_left(engine)


def test_a_grammar_is_dropped_with_the_last_request_that_waits_for_it(tokenizer_folder):
    sandbox = GatedSandbox()
    engine = GrammarEngine(tokenizer_folder, sandbox)
    for number in range(QUICK_THREADS):
        engine.send_request(number, GrammarSource("regex", f"running{number}"), wait=False)
        assert sandbox.entered.acquire(timeout=LIMIT_SECONDS)
    unwanted = GrammarSource("regex", "unwanted")
    engine.send_request(11, WORDS, wait=False)
    engine.send_request(12, WORDS, n=2, wait=False)
    engine.send_request(13, unwanted, n=2, wait=False)
    engine.send_request(14, unwanted, wait=False)
    for request_id, choice in ((11, None), (12, 0), (13, None), (14, None)):
        engine.harness.scheduler.abort_request(request_id, choice)
    sandbox.gate.release(QUICK_THREADS + 1)
    for request_id in (*range(QUICK_THREADS), 12):
        engine.wait_for_reply(request_id)
    engine.run()
    engine.close()
    assert "unwanted" not in sandbox.names
    assert PATTERN.fullmatch(text_of(engine.tokens(12, 1)))
    assert_nothing_is_left(engine)


def test_a_failure_of_the_host_is_an_internal_error(tokenizer_folder):
    class Failing(NoSandbox):
        def check(self, source, seconds):
            raise CompilerFailedError("a process was killed")

    engine = GrammarEngine(tokenizer_folder, Failing())
    engine.send_request(1, WORDS)
    engine.close()
    ((_, output),) = engine.outputs.outputs
    assert (output.error.kind, output.error.message) == ("internal", "a process was killed")
    assert_nothing_is_left(engine)


@pytest.mark.parametrize("num_steps", [1, 4, 9])
def test_new_workers_go_on_with_the_same_text(engine, num_steps):
    for request_id, grammar in ((1, WORDS), (2, SCHEMA), (3, None)):
        engine.send_request(request_id, grammar, max_tokens=40)
    engine.run()
    expected = [engine.tokens(each) for each in (1, 2, 3)]
    for request_id, grammar in ((11, WORDS), (12, SCHEMA), (13, None)):
        engine.send_request(request_id, grammar, [5, 6, request_id - 10], max_tokens=40)
    for _ in range(num_steps):
        engine.step()
    engine.lose_workers()
    engine.run()
    assert [engine.tokens(each) for each in (11, 12, 13)] == expected
    assert_nothing_is_left(engine)


@pytest.mark.parametrize("num_known", [0, 1, 5, 8])
def test_a_new_engine_goes_on_with_the_same_text(engine, num_known):
    engine.send_request(1, WORDS)
    engine.run()
    expected = engine.tokens(1)
    engine.send_request(2, WORDS, [5, 6, 1], (tuple(expected[:num_known]),))
    engine.run()
    assert expected[:num_known] + engine.tokens(2) == expected
    assert_nothing_is_left(engine)


def test_a_preempted_choice_keeps_its_grammar_state(tokenizer_folder):
    texts = []
    for num_blocks in (1000, 8):
        engine = GrammarEngine(tokenizer_folder, num_blocks=num_blocks, block_size=4)
        for request_id in (1, 2, 3):
            engine.send_request(request_id, WORDS, max_tokens=20)
        engine.run()
        texts.append([engine.tokens(each) for each in (1, 2, 3)])
        stats = engine.harness.scheduler.pop_stats()
        assert bool(stats.num_preemptions) is (num_blocks == 8)
        engine.close()
    assert texts[0] == texts[1]


def test_a_token_that_its_mask_forbids_ends_the_request_and_no_other(engine):
    engine.send_request(1, msgspec.structs.replace(WORDS, field="guided_regex"))
    engine.send_request(2, WORDS)
    engine.step()
    while not any(each.constrained_seq_ids for each in engine.harness.in_flight):
        engine.send()
    result = engine.compute()
    wrong = [[BYTE + ord("#")], *result.sampled_token_ids[1:]]
    engine.receive(msgspec.structs.replace(result, sampled_token_ids=wrong))
    assert engine.reason(1) is FinishReason.ERROR
    (last,) = engine.harness.outputs[1, 0][-1:]
    assert last.error.message == f"guided_regex: {CONTRADICTION}"
    assert last.error.param == "guided_regex"
    assert last.new_token_ids == []
    engine.run()
    assert PATTERN.fullmatch(text_of(engine.tokens(2)))


def test_no_grammar_output_before_its_masks_are_computed(engine):
    engine.send_request(1, WORDS)
    output = engine.send()
    result = engine.runner.execute(output)
    with pytest.raises(WorkerFailedError):
        engine.manager.find_violations(output, result)


def test_the_grammar_decides_the_end_of_the_output():
    for fields in (
        {"ignore_eos": True},
        {"min_tokens": 2},
        {"beam_width": 2, "n": 2, "temperature": 0.0},
        {"resumable": True},
        {"grammar": GrammarSource("regex", "x" * 70_000)},
    ):
        harness = InputProcessorHarness()
        harness.receive(make_message(**({"grammar": WORDS} | fields)))
        assert refused(harness) == [(1, "invalid_request")], fields


def test_an_engine_without_grammars_refuses_them():
    harness = InputProcessorHarness()
    harness.receive(make_message(grammar=WORDS))
    assert refused(harness) == [(1, "invalid_request")]
    harness = EngineHarness()
    request = harness.add_one([1, 2], max_tokens=3)
    assert harness.step().constrained_seq_ids == []
    harness.run()
    assert harness.tokens_of(request) == undisturbed([1, 2], 3)
    assert EOS not in harness.tokens_of(request)


THINKING = ThinkingRule(
    begun=True, start="<t>", end="</t>", end_token_ids=tuple(tokens_of("</t>")), budget=9
)


def serve_all(engine: GrammarEngine) -> dict[tuple[int, int], tuple[list[int], FinishReason]]:
    """Serve free, constrained and reasoning requests together; return their answers."""
    engine.send_request(1, WORDS)
    engine.send_request(2, SCHEMA, n=3)
    engine.send_request(3, None, max_tokens=30)
    engine.send_request(4, WORDS, thinking=THINKING)
    engine.send_request(5, None, max_tokens=30, thinking=THINKING)
    engine.run()
    return {
        key: (tokens, engine.harness.final[key]) for key, tokens in engine.harness.tokens.items()
    }


@pytest.fixture(scope="module")
def answers(tokenizer_folder) -> dict[tuple[int, int], tuple[list[int], FinishReason]]:
    plain = GrammarEngine(tokenizer_folder)
    found = serve_all(plain)
    plain.close()
    return found


def test_budgets_without_a_grammar_are_slow_for_their_own_choice_only(tokenizer_folder) -> None:
    engine = GrammarEngine(tokenizer_folder)
    engine.send_request(1, None, n=2, thinking=THINKING)
    engine.send_request(2, None, thinking=THINKING)
    first, *others = (row.cost for row in engine.manager._rows.values())
    first.add(1.0)
    assert first.is_slow
    assert len(others) == 2
    assert not any(cost.is_slow or cost.lock is first.lock for cost in others)
    engine.run()
    engine.close()


def drafts_of(answers: Any, acceptance: float) -> SyntheticDrafts:
    def answer(request: Any, num_tokens: int) -> list[int]:
        recorded, _ = answers[request.request_id, request.choice]
        first = request.num_output_tokens
        return recorded[first : first + num_tokens] or [5]

    return SyntheticDrafts(acceptance, answer, vocab_size=SIZE)


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("is_async", [False, True], ids=["synchronous", "overlapped"])
def test_constrained_answers_are_those_without_drafts(
    tokenizer_folder, answers, acceptance, is_async
):
    """Each token of a draft is masked, and a reasoning budget ends at the same token."""
    drafting = drafts_of(answers, acceptance)
    engine = GrammarEngine(tokenizer_folder, async_scheduling=is_async, drafting=drafting)
    assert serve_all(engine) == answers
    stats = engine.harness.scheduler.pop_stats()
    assert stats.num_draft_tokens == drafting.num_drafted > 20
    assert (stats.num_accepted_tokens > 10) is (acceptance > 0)
    if acceptance < 1 and not is_async:
        assert stats.num_invalid_draft_tokens > 10, "cut where the grammar refuses it"
    assert_nothing_is_left(engine)
    engine.close()


def test_a_forbidden_token_behind_a_draft_ends_the_request_there(tokenizer_folder, answers):
    engine = GrammarEngine(tokenizer_folder, drafting=drafts_of(answers, 1.0))
    engine.send_request(1, WORDS)
    engine.step()
    while not engine.send().drafts:
        engine.receive(engine.compute())
    (draft,) = engine.harness.in_flight[0].scheduled_spec_decode_tokens
    result = engine.compute()
    (row,) = result.sampled_token_ids
    row[:] = [draft[0], BYTE + ord("#")]
    before = engine.tokens(1).copy()
    engine.receive(result)
    assert engine.tokens(1) == [*before, draft[0]]
    assert engine.reason(1) is FinishReason.ERROR
    (*_, output) = engine.harness.outputs[1, 0]
    assert CONTRADICTION in output.error.message
    engine.run()
    assert_nothing_is_left(engine)
    engine.close()
