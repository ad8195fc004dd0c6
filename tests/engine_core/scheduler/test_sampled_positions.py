"""Rows that sample several positions of a step, as with speculative decoding, without a drafter.

known tokens       |-- prompt --|- outputs -|
computed after     |------------------------|d|d|      samples three positions: 1 to 3 tokens
"""

import pytest

from engine_core.kv_cache import integrity
from engine_core.scheduler.features.tenant_usage import OUTPUT_WEIGHT
from engine_core.scheduler.result import ImpossibleResultError
from engine_core.scheduler.step_plan import num_sampled_positions
from proto.messages.model_runner_output import ModelRunnerOutput
from tests.fakes.engine_harness import EngineHarness, scheduled


@pytest.mark.parametrize(
    ("num_known", "num_computed", "expected"), [(10, 9, 0), (10, 4, 0), (10, 10, 1), (10, 12, 3)]
)
def test_a_position_is_sampled_from_the_last_known_token_on(num_known, num_computed, expected):
    assert num_sampled_positions(num_known, num_computed) == expected


def with_drafts(stop_token_ids=(), **settings):
    """Return a decoding request, and a step in which it has two drafts."""
    engine = EngineHarness(block_size=4, **settings)
    params = {"ignore_eos": True, "stop_token_ids": stop_token_ids}
    request = engine.add_one([1, 2, 3, 4, 5, 6], max_tokens=20, **params)
    first = engine.scheduler.schedule()
    engine.scheduler.update_from_output(first, engine.runner.execute(first))
    request.spec_token_ids += [51, 52]
    return engine, request, engine.scheduler.schedule()


def answer(engine, request, output, tokens):
    result = ModelRunnerOutput(1, output.step, [request.seq_id], [tokens])
    return engine.scheduler.update_from_output(output, result)


@pytest.mark.parametrize("num_accepted", [0, 1, 2])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_row_brings_one_token_for_each_accepted_draft_and_one_more(num_accepted, is_async):
    engine, request, output = with_drafts(async_scheduling=is_async)
    assert scheduled(output) == {request.seq_id: 3}
    assert request.num_output_placeholders == (3 if is_async else 0)
    tokens = [*[51, 52, 53][:num_accepted], 99]
    before = request.num_tokens
    ((sent,),) = answer(engine, request, output, tokens).values()
    assert sent.new_token_ids == tokens
    assert sent.num_accepted_drafts == num_accepted
    assert request.num_tokens == before + len(tokens)
    assert request.num_output_placeholders == 0
    assert request.spec_token_ids == []
    assert request.num_computed_tokens == request.num_tokens - 1, "rejected drafts have no KV"
    assert not request.is_prefilling
    assert scheduled(engine.scheduler.schedule()) == {request.seq_id: 1}
    assert integrity.check(engine.kv_cache) == []


@pytest.mark.parametrize(
    ("stop", "num_tokens", "num_accepted"), [(51, 1, 1), (52, 2, 2), (99, 3, 2)]
)
def test_tokens_behind_the_end_are_no_accepted_drafts(stop, num_tokens, num_accepted):
    engine, request, output = with_drafts(stop_token_ids=(stop,))
    ((sent,),) = answer(engine, request, output, [51, 52, 99]).values()
    assert sent.new_token_ids == [51, 52, 99][:num_tokens]
    assert sent.num_accepted_drafts == num_accepted


@pytest.mark.parametrize("num_accepted", [0, 1, 2])
def test_a_tenant_is_charged_for_each_token(num_accepted):
    engine, request, output = with_drafts()
    usage = engine.scheduler._usage
    before = usage.served(request.tenant)
    answer(engine, request, output, [*[51, 52][:num_accepted], 99])
    engine.scheduler.schedule()  # charges one token for the step
    charged = usage.served(request.tenant) - before
    assert charged == OUTPUT_WEIGHT * (num_accepted + 1)


@pytest.mark.parametrize("tokens", [[], [51, 52, 53, 54]])
def test_a_row_brings_at_least_one_token_and_none_too_many(tokens):
    engine, request, output = with_drafts()
    with pytest.raises(ImpossibleResultError, match=f"has {len(tokens)} tokens"):
        answer(engine, request, output, tokens)


def test_a_row_with_drafts_decodes_however_many_tokens_it_computes():
    engine, request, output = with_drafts(max_prefill_slowdown=3.0)
    result = ModelRunnerOutput(1, output.step, [request.seq_id], [[51, 99]], compute_seconds=0.5)
    engine.scheduler.update_from_output(output, result)
    throttle = engine.scheduler._prefill_throttle
    assert throttle._decode_seconds == {3: 0.5}, "a step of three rows and no prompt tokens"
