"""Requests, aborts and admin calls of front ends, valid and invalid."""

import math
from dataclasses import replace

import msgspec
import pytest

from engine_core import frontend_io
from engine_core.frontend_io import InputProcessor
from engine_core.validation import RequestLimits
from proto.messages.engine_io import (
    MAX_CHOICES,
    Abort,
    AdminCall,
    AdminReply,
    AgentHint,
    FinishReason,
    TurnEnded,
)
from proto.messages.grammar import GrammarSource
from proto.messages.logit_edits import LogitEdits
from proto.messages.multimodal import MultiModalFeature, SharedPixels
from proto.messages.sampling_params import RepetitionDetection, SamplingParams, ThinkingRule
from tests.fakes.engine_harness import EOS
from tests.fakes.images import encoder_limits, with_pictures
from tests.fakes.input_harness import LIMITS, InputProcessorHarness
from tests.fakes.kv_connector import FakeConnector
from tests.fakes.messages import request

GRAMMAR = GrammarSource("regex", "a", field="guided_regex")
THINKING = ThinkingRule(begun=True, start="<t>", end="</t>", end_token_ids=(1,))


def test_a_request_is_accepted_and_queued_with_all_its_choices():
    harness = InputProcessorHarness()
    harness.receive(request(9, n=3), front_end=2)
    assert harness.outputs.accepted == [(2, 9)]
    assert [each.choice for each in harness.engine.scheduler.waiting] == [0, 1, 2]
    assert len({each.seq_id for each in harness.engine.scheduler.waiting}) == 3
    assert {each.front_end_index for each in harness.engine.scheduler.waiting} == {2}


@pytest.mark.parametrize(
    ("bad", "param", "words"),
    [
        (request(prompt=()), "prompt", "no tokens"),
        (request(prompt=(1, 1000)), "prompt", "1000"),
        (request(prompt=(-1,)), "prompt", "-1"),
        (request(prompt=range(61)), "max_tokens", "61 tokens"),
        (request(max_tokens=62), "max_tokens", "64"),
        (request(max_tokens=0), "max_tokens", "0"),
        (request(n=0), "n", "0"),
        (request(n=MAX_CHOICES + 1), "n", str(MAX_CHOICES)),
        (request(n=10**9), "n", str(10**9)),
        (request(seed=-1), "seed", "64 bits"),
        (request(deadline=math.nan), "deadline", "not a number"),
        (request(queue_deadline=math.nan), "queue_deadline", "not a number"),
        (request(resumable=True, deadline=1e9), "deadline", "session"),
        (request(cache_salt="\ud800"), "cache_salt", "text"),
        (request(prompt_embeds=bytes(24)), "prompt_embeds", "--enable-prompt-embeds"),
        (request(temperature=math.nan), "temperature", "nan"),
        (request(stop_token_ids=(1000,)), "stop_token_ids", "1000"),
        (request(output_token_ids=((1,),), n=2), "output_token_ids", "n is 2"),
        (request(output_token_ids=((1000,),)), "output_token_ids", "1000"),
        (request(output_token_ids=((1,) * 5,)), "output_token_ids", "max_tokens"),
        (request(finished_choices=(1,)), "finished_choices", "1"),
        (request(resumable=True, n=2), "n", "n = 2"),
        (request(resumable=True, beam_width=1), "n", "beam search"),
        (request(resumable=True, prompt_logprobs=0), "prompt_logprobs", "session"),
        (request(beam_width=2), "n", "beam search"),
        (request(beam_width=2, n=2, finished_choices=(1,)), "finished_choices", "beam search"),
        (request(beam_width=1, output_token_ids=((1,),)), "output_token_ids", "beam search"),
        (request(beam_width=1, logprobs=0), "logprobs", "beam search"),
        (request(beam_width=1, prompt_logprobs=0), "prompt_logprobs", "beam search"),
        (request(beam_width=1, edits=LogitEdits(presence_penalty=1.0)), "edits", "beam search"),
        (
            request(beam_width=1, repetition=RepetitionDetection(max_pattern_size=2, min_count=2)),
            "repetition_detection",
            "beam search",
        ),
        (request(edits=LogitEdits(presence_penalty=3.5)), "presence_penalty", "got 3.5"),
        (request(edits=LogitEdits(bad_words=((10**6,),))), "bad_words", "vocabulary"),
        (request(logprob_token_ids=(1,)), "logprob_token_ids", "logprobs"),
        (
            request(repetition=RepetitionDetection(max_pattern_size=10**9, min_count=2)),
            "repetition_detection",
            "max_pattern_size",
        ),
        (
            msgspec.structs.replace(
                request(), sampling_params=SamplingParams(max_tokens=1, eos_token_ids=(1000,))
            ),
            "eos_token_ids",
            "1000",
        ),
    ],
)
def test_a_bad_request_is_refused_by_name_with_one_output(bad, param, words):
    harness = InputProcessorHarness()
    harness.receive(bad)
    ((front_end, output),) = harness.outputs.outputs
    assert (front_end, output.request_id) == (0, 1)
    assert output.finish_reason is FinishReason.ERROR
    assert (output.error.kind, output.error.param) == ("invalid_request", param)
    assert words in output.error.message
    assert harness.outputs.accepted == []
    harness.engine.assert_idle()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt_embeds": bytes(23)}, "23 bytes, 3 tokens take 24"),
        ({"prompt": (0, 1, 0)}, "prompt does"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"resumable": True}, "session"),
    ],
)
def test_embeddings_of_another_size_or_with_tokens_are_refused(changes, words):
    harness = InputProcessorHarness(replace(LIMITS, embedding_bytes=8))
    harness.receive(request(**{"prompt": (0, 0, 0), "prompt_embeds": bytes(24)} | changes))
    ((_, output),) = harness.outputs.outputs
    assert output.error.param == "prompt_embeds"
    assert words in output.error.message


VISION = encoder_limits(max_embeds=4).vision


@pytest.mark.parametrize(
    "grid", [(), (2, 4), (2, 2, 4), (1, 4, 4), (1, 3, 4), (0, 4, 2), (1, -4, -2)]
)
def test_images_with_a_grid_of_other_rows_are_refused(grid):
    harness = InputProcessorHarness(
        replace(LIMITS, vision=msgspec.structs.replace(VISION, mrope_merge=2))
    )
    harness.receive(image_request((1, 2), grid=grid))
    ((_, output),) = harness.outputs.outputs
    assert f"2 rows, and a grid of {list(grid)}" in output.error.message
    harness.receive(image_request((1, 2), grid=(1, 4, 2), offset=0, length=3))
    assert "and a grid of" in harness.outputs.outputs[-1][1].error.message, "it has a marker"
    harness.receive(image_request((1, 2), grid=(1, 4, 2), offset=1, length=2))
    assert len(harness.outputs.accepted) == 1


def image_request(*parts, **changes):
    """Return a request with text and pictures (number, rows), with changes of the last picture."""
    prompt, features = with_pictures(parts)
    for name in [name for name in changes if name in MultiModalFeature.__struct_fields__]:
        features[-1] = msgspec.structs.replace(features[-1], **{name: changes.pop(name)})
    return request(prompt=tuple(prompt), mm_features=features, **changes)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (image_request((1, 3), offset=-1), "out of place"),
        (image_request([1], (1, 3), length=6), "out of place"),
        (image_request((1, 3), length=0, num_embeds=0), "out of place"),
        (image_request((1, 3), (2, 3), offset=4), "image 2 of the prompt has the tokens"),
        (image_request((1, 3), num_embeds=2), "2 rows for 3 tokens"),
        (image_request([1], (1, 3), offset=2, length=2), "3 rows for 2 tokens"),
        (image_request((1, 5)), "5 rows, the model takes 1 to 4"),
        (image_request((1, 3), mm_hash=b"short"), "5 bytes"),
        (image_request((1, 3), pixels=SharedPixels("../passwd", (1,))), "no pixels"),
        (image_request((1, 3), pixels=SharedPixels("..", (1,))), "no pixels"),
        (image_request((1, 3), pixels=SharedPixels("", (1,))), "no pixels"),
        (image_request((1, 3), pixels=SharedPixels("a", (3, 0))), "no pixels"),
        (image_request((1, 3), pixels=SharedPixels("a", ())), "no pixels"),
    ],
)
def test_images_that_are_not_where_their_tokens_are_get_refused(bad, words):
    harness = InputProcessorHarness(replace(LIMITS, vision=VISION))
    harness.receive(bad)
    ((_, output),) = harness.outputs.outputs
    assert (output.error.kind, output.error.param) == ("invalid_request", "messages")
    assert words in output.error.message
    harness.engine.assert_idle()


def test_images_need_a_model_that_reads_them():
    harness = InputProcessorHarness()
    harness.receive(image_request((1, 3)))
    ((_, output),) = harness.outputs.outputs
    assert "text only" in output.error.message
    harness = InputProcessorHarness(
        replace(LIMITS, vision=VISION), encoder=encoder_limits(max_embeds=4)
    )
    harness.receive(image_request([5], (1, 3), (2, 4), [6], n=2))
    assert harness.outputs.accepted
    harness.engine.run()
    harness.engine.assert_idle()


def test_the_longest_possible_request_is_taken():
    harness = InputProcessorHarness()
    harness.receive(request(prompt=range(60)))
    assert harness.outputs.accepted


@pytest.mark.interpreted
def test_an_unforeseen_error_ends_that_request_only(monkeypatch, caplog):
    """Its text is only logged: it may contain paths, addresses, or another client's text."""
    harness = InputProcessorHarness()
    add_request = harness.engine.scheduler.add_request

    def fail_at_choice_1(each):
        if each.choice == 1:
            raise RuntimeError("no idea")
        add_request(each)

    monkeypatch.setattr(harness.engine.scheduler, "add_request", fail_at_choice_1)
    harness.receive(request(1, n=2))
    ((_, output),) = harness.outputs.outputs
    assert output.error.kind == "internal"
    assert "no idea" not in repr(output)
    assert "no idea" in caplog.text
    harness.engine.assert_idle()
    harness.receive(request(2))
    assert harness.outputs.accepted == [(0, 2)]


def test_a_request_sent_twice_does_not_disturb_itself(caplog):
    harness = InputProcessorHarness()
    traced = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
    harness.receive(request(1, trace_headers=traced))
    harness.receive(request(1, trace_headers=traced))
    assert "trace_id=4bf92f3577b34da6a3ce929d0e0e4736" in caplog.text
    assert harness.engine.scheduler.num_unfinished == 1
    assert harness.outputs.accepted == [(0, 1)]
    assert harness.outputs.outputs == []


def test_an_id_can_be_reused_after_the_request():
    harness = InputProcessorHarness()
    harness.receive(request(1))
    harness.receive(Abort(1, 1, "disconnect"))
    harness.receive(request(1))
    assert harness.engine.scheduler.num_unfinished == 1


def test_a_resumed_request_that_is_complete_ends_at_once():
    harness = InputProcessorHarness()
    harness.receive(
        request(
            n=5,
            output_token_ids=((1, 2, 3, 4), (7, EOS), (7, 8), (7,), (7, 42)),
            finished_choices=(3,),
            stop_token_ids=(42,),
        )
    )
    outputs = {output.choice: output for _, output in harness.outputs.outputs}
    assert [each.choice for each in harness.engine.scheduler.waiting] == [2]
    assert outputs.keys() == {0, 1, 4}
    assert outputs[0].finish_reason is FinishReason.LENGTH
    assert outputs[1].finish_reason is outputs[4].finish_reason is FinishReason.STOP
    assert [outputs[each].stop_reason for each in (0, 1, 4)] == [None, None, 42]
    assert [outputs[each].token_index for each in (0, 1, 4)] == [4, 2, 2]
    assert all(not each.new_token_ids and not each.events for each in outputs.values())
    assert harness.outputs.accepted == [(0, 1)]


def test_an_abort_can_name_a_choice():
    harness = InputProcessorHarness()
    harness.receive(request(1, n=3))
    harness.receive(Abort(1, 1, "stop_string", 1))
    assert [each.choice for each in harness.engine.scheduler.waiting] == [0, 2]
    harness.receive(Abort(1, 1, "disconnect"))
    harness.receive(Abort(1, 1, "disconnect"))
    harness.engine.assert_idle()
    assert harness.outputs.outputs == []


def test_a_turn_that_ended_is_passed_on_and_a_stop_string_ends_one_like_any_other():
    harness = InputProcessorHarness(scheduling_policy="continuum", pin_policy="fixed")
    agent = AgentHint("session")
    harness.receive(msgspec.structs.replace(request(1, prompt=range(40)), agent=agent))
    harness.engine.step()
    harness.receive(Abort(1, 1, "stop_string", 0))
    (pin,) = harness.engine.scheduler._retained_prefixes
    assert (pin.agent_session, pin.request_id) == ("session", 1)
    harness.receive(TurnEnded(1, 1, "session", "shell"))
    harness.receive(TurnEnded(1, 7, "nobody's", "shell"))
    assert harness.engine.scheduler.agent_sessions._sessions["session"].tool == "shell"


def test_calls_are_answered():
    harness = InputProcessorHarness()
    harness.receive(AdminCall(1, 5, "reset_prefix_cache"), front_end=1)
    harness.receive(AdminCall(1, 6, "check_integrity"))
    assert harness.outputs.replies == [(1, AdminReply(1, 5, True)), (0, AdminReply(1, 6, True))]


def test_the_encoder_cache_is_reset_by_call_unless_a_request_needs_it():
    harness = InputProcessorHarness(
        replace(LIMITS, vision=VISION), encoder=encoder_limits(max_embeds=4, max_input_tokens=1)
    )
    harness.receive(image_request((1, 3)))
    harness.engine.step()
    harness.receive(AdminCall(1, 5, "reset_encoder_cache"))
    harness.engine.run()
    harness.receive(AdminCall(1, 6, "reset_encoder_cache"))
    refused, done = (reply for _, reply in harness.outputs.replies)
    assert (refused.ok, done) == (False, AdminReply(1, 6, True))
    assert "encoder outputs" in refused.detail


def test_pause_and_resume_by_call():
    harness = InputProcessorHarness()
    harness.receive(request(1))
    harness.engine.step()
    harness.receive(AdminCall(1, 5, "pause", "freeze"))
    assert not harness.engine.scheduler.has_work
    harness.receive(AdminCall(1, 6, "pause"))
    assert harness.engine.scheduler.has_work
    harness.receive(request(2))
    harness.engine.step()
    assert len(harness.engine.scheduler.running) == 1
    harness.receive(AdminCall(1, 7, "resume"))
    harness.engine.step()
    assert len(harness.engine.scheduler.running) == 2
    assert harness.outputs.replies == [(0, AdminReply(1, each, True)) for each in (5, 6, 7)]


def test_a_pause_can_abort_unfinished_requests():
    """In any state: each choice gets one final output, and later requests wait for the resume."""
    harness = InputProcessorHarness()
    harness.receive(request(1, max_tokens=30), front_end=2)
    harness.receive(request(2, n=2, beam_width=2, max_tokens=30))
    harness.engine.step()
    harness.engine.step()
    harness.receive(request(3, n=3), front_end=2)
    harness.receive(AdminCall(1, 5, "pause", ends_unfinished=True))
    ended = [
        (front_end, each.request_id, each.choice)
        for front_end, each in harness.outputs.outputs
        if each.finish_reason is FinishReason.ABORT
    ]
    assert sorted(ended) == [(0, 2, 0), (0, 2, 1), (2, 1, 0), (2, 3, 0), (2, 3, 1), (2, 3, 2)]
    assert {(2, 1), (0, 2), (2, 3)} <= set(harness.outputs.accepted)
    assert harness.engine.scheduler.num_unfinished == 0
    harness.engine.run()
    harness.engine.assert_idle()
    harness.receive(request(4))
    assert (
        not harness.engine.scheduler.has_work
        or not harness.engine.step().total_num_scheduled_tokens
    )
    harness.receive(AdminCall(1, 6, "resume"))
    harness.engine.run()
    harness.engine.assert_idle()


def test_is_paused_by_call():
    harness = InputProcessorHarness()
    for call_id, name in enumerate(("get_pause", "pause", "get_pause", "resume", "get_pause")):
        harness.receive(AdminCall(1, call_id, name))
    asked = [reply for _, reply in harness.outputs.replies[::2]]
    assert [(each.value, each.detail) for each in asked] == [
        (0, ""),
        (1, "finish_running"),
        (0, ""),
    ]


def test_the_number_of_unfinished_choices_by_call():
    harness = InputProcessorHarness()
    harness.receive(request(1, n=3))
    harness.receive(request(2))
    harness.engine.step()
    harness.receive(Abort(1, 1, "stop_string", 0))
    harness.receive(AdminCall(1, 5, "get_num_unfinished"))
    assert harness.outputs.replies == [(0, AdminReply(1, 5, True, value=3))]


def test_priorities_are_refused_where_nothing_heeds_them():
    harness = InputProcessorHarness()
    harness.receive(request(1, priority=-1))
    ((_, output),) = harness.outputs.outputs
    assert output.error.param == "priority"
    assert "--scheduling-policy priority" in output.error.message
    harness.input_processor = InputProcessor(
        harness.engine.scheduler,
        harness.engine.kv_cache,
        harness.outputs,
        RequestLimits(vocab_size=1000, max_model_len=64, priorities=True),
    )
    harness.receive(request(1, priority=-1))
    assert harness.outputs.accepted == [(0, 1)]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"grammar": GRAMMAR}, "guided_regex"),
        ({"thinking": THINKING}, "thinking_token_budget"),
        ({"grammar": GRAMMAR, "thinking": THINKING}, "guided_regex"),
    ],
)
def test_without_structured_output_the_field_that_needs_it_is_refused(fields, field):
    harness = InputProcessorHarness()
    harness.receive(request(**fields))
    ((_, output),) = harness.outputs.outputs
    assert output.error.kind == "invalid_request"
    assert output.error.param == field
    assert field in output.error.message
    assert "this model" in output.error.message


def test_calls_that_fail_say_why(monkeypatch):
    monkeypatch.setattr(frontend_io, "check", lambda _: ["lost block: 3", "lost block: 4"])
    harness = InputProcessorHarness()
    harness.receive(request())
    harness.engine.step()
    harness.receive(AdminCall(1, 5, "reset_prefix_cache"))
    harness.receive(AdminCall(1, 6, "check_integrity"))
    (_, reset), (_, integrity) = harness.outputs.replies
    assert (reset.ok, reset.detail) == (False, "1 requests are unfinished")
    assert (integrity.ok, integrity.detail) == (False, "lost block: 3\nlost block: 4")


def test_resetting_at_the_cost_of_running_requests_by_call():
    harness = InputProcessorHarness()
    harness.receive(request())
    harness.engine.step()
    harness.receive(AdminCall(1, 5, "reset_prefix_cache", reset_running_requests=True))
    assert harness.outputs.replies == [(0, AdminReply(1, 5, True))]
    assert harness.engine.scheduler.running == []
    assert harness.engine.scheduler.num_unfinished == 1


def test_an_admin_call_resets_the_connector():
    harness = InputProcessorHarness(connector=FakeConnector())
    harness.receive(AdminCall(1, 5, "reset_prefix_cache"))
    assert harness.engine.connector.resets == 0
    harness.receive(AdminCall(1, 6, "reset_prefix_cache", reset_external=True))
    harness.engine.connector.busy = True
    harness.receive(AdminCall(1, 7, "reset_prefix_cache", reset_external=True))
    assert harness.engine.connector.resets == 2
    assert [reply.ok for _, reply in harness.outputs.replies] == [True, True, False]
    assert "copies" in harness.outputs.replies[-1][1].detail
