"""The stream of a request: repeated, lost and merged outputs, and stop strings."""

import pytest
from tokenizers import Tokenizer

from api_server.generation.request_stream import Choice, RequestStream, StreamNotifier, Timeline
from api_server.metrics.metric_sheet import MetricSheet
from api_server.metrics.metrics import Metrics
from api_server.text.stop_strings import StopStrings
from api_server.text.tokenizer import ModelTokenizer
from proto.errors import ErrorInfo, InternalRequestError, InvalidRequestError
from proto.messages.engine_io import EngineCoreEvent, EngineCoreOutput, EventType, FinishReason
from tests.fakes.events import first_events
from tests.fakes.fake_engine import fake_logprobs


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("toy", MetricSheet.of_one())


@pytest.fixture
def make(tokenizer: Tokenizer, metrics: Metrics):
    def stream(stop: list[str] | None = None, min_tokens: int = 0, n: int = 1) -> RequestStream:
        model = ModelTokenizer(tokenizer)
        choices = [
            Choice(index, model.detokenizer(()), StopStrings(stop) if stop else None, min_tokens)
            for index in range(n)
        ]
        return RequestStream(7, [5, 6, 7], choices, StreamNotifier(), metrics, Timeline(100.0))

    return stream


def output(tokens: list[int], index: int, finish: FinishReason | None = None, **fields):
    fields.setdefault("events", () if index else first_events(2, 100.1, 100.2))
    return EngineCoreOutput(7, fields.pop("choice", 0), index, tokens, finish, **fields)


def sample(metrics: Metrics, name: str) -> float:
    for line in metrics.render().decode().splitlines():
        if line.startswith(f"vllm:{name}") and not line.startswith("#"):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"no sample {name}")


def test_repeated_tokens_count_once(make, metrics, tokenizer):
    ids = tokenizer.encode(" one two three").ids
    stream = make()
    stream.process_output(output(ids[:2], 0), 101.0)
    stream.process_output(output(ids[:2], 0), 102.0)
    stream.process_output(output(ids[1:4], 1), 103.0)
    assert stream.choices[0].token_ids == ids[:4]
    assert stream.choices[0].pop_delta().text == tokenizer.decode(ids[:4])
    assert sample(metrics, "time_to_first_token_seconds_count") == 1
    assert sample(metrics, "inter_token_latency_seconds_count") == 1
    assert sample(metrics, "inter_token_latency_seconds_sum") == 2.0
    assert sample(metrics, "generation_tokens_total") == 4
    assert sample(metrics, "request_queue_time_seconds_count") == 1
    assert stream.num_cached_tokens == 2


def test_a_repeat_that_ends_the_choice_ends_it(make):
    stream = make()
    stream.process_output(output([40, 41], 0), 101.0)
    stream.process_output(output([40, 41], 0, FinishReason.LENGTH), 102.0)
    assert stream.finished
    assert stream.choices[0].pop_delta().finish_reason == "length"


def test_a_gap_is_an_error(make):
    stream = make()
    stream.process_output(output([40], 0), 101.0)
    with pytest.raises(InternalRequestError, match="lost"):
        stream.process_output(output([42], 2), 102.0)


def test_repeated_logprobs_are_dropped_with_their_tokens(make):
    stream = make()
    stream.process_output(output([40], 0, logprobs=fake_logprobs([40], 1)), 101.0)
    stream.process_output(output([40, 41], 0, logprobs=fake_logprobs([40, 41], 1)), 102.0)
    assert [token.token_id for token in stream.choices[0].pop_delta().tokens] == [40, 41]


def test_stop_string_cuts_tokens_text_and_logprobs(make, tokenizer, metrics):
    ids = tokenizer.encode("abcde zz").ids
    assert len(ids) > 5
    stream = make(stop=["de"])
    engine_goes_on = stream.process_output(output(ids, 0, logprobs=fake_logprobs(ids, 0)), 101.0)
    delta = stream.choices[0].pop_delta()
    assert engine_goes_on
    assert delta.text == "abc"
    assert delta.finish_reason == "stop"
    assert delta.stop_reason == "de"
    assert tokenizer.decode(delta.token_ids) == "abcde"
    assert [token.token_id for token in delta.tokens] == delta.token_ids
    assert sample(metrics, "generation_tokens_total") == len(delta.token_ids)
    assert not stream.process_output(output(ids, len(ids), FinishReason.LENGTH), 102.0)
    assert not stream.choices[0].has_delta


def test_accepted_drafts_are_those_of_the_tokens_that_count(make, tokenizer):
    """Repeated tokens keep what they were, those behind a stop string are none."""
    ids = tokenizer.encode("abcde zz").ids
    stream = make(stop=["zz"])
    choice = stream.choices[0]
    stream.process_output(output(ids[:1], 0), 101.0)
    stream.process_output(output(ids[1:4], 1, num_accepted_drafts=2), 102.0)
    assert choice.accepted_drafts(0, 4) == [False, True, True, False]
    stream.process_output(output(ids[2:4], 2, num_accepted_drafts=1), 103.0)
    assert choice.accepted_drafts(0, 4) == [False, True, True, False], "all of them repeated"
    stream.process_output(output(ids[3:6], 3, num_accepted_drafts=2), 104.0)
    assert choice.accepted_drafts(3, 6) == [False, True, False]
    stream.process_output(output([*ids[6:], 40, 41], 6, num_accepted_drafts=9), 105.0)
    assert choice.finished
    num_tokens = choice.pop_delta().num_tokens
    assert num_tokens < len(ids) + 2
    assert choice.accepted_drafts(6, num_tokens) == [True] * (num_tokens - 6)


def test_stop_string_before_a_stop_token_wins(make, tokenizer):
    ids = [*tokenizer.encode("abcde").ids, 2]
    stream = make(stop=["cd"])
    assert not stream.process_output(output(ids, 0, FinishReason.STOP), 101.0), (
        "the engine ended the choice, too"
    )
    delta = stream.choices[0].pop_delta()
    assert (delta.text, delta.stop_reason) == ("ab", "cd")


def test_stop_strings_are_ignored_before_min_tokens(make, tokenizer):
    ids = tokenizer.encode("e e e e").ids
    stream = make(stop=["e"], min_tokens=len(ids) - 1)
    stream.process_output(output(ids, 0), 101.0)
    assert stream.choices[0].pop_delta().text == tokenizer.decode(ids)[:-1]


def test_a_stop_token_has_no_text_but_counts(make, tokenizer):
    ids = tokenizer.encode("text!").ids
    stream = make()
    stream.process_output(output(ids, 0, FinishReason.STOP, stop_reason=ids[-1]), 101.0)
    delta = stream.choices[0].pop_delta()
    assert delta.text == tokenizer.decode(ids[:-1])
    assert delta.num_tokens == len(ids)
    assert delta.stop_reason == ids[-1]


def test_held_back_text_is_emitted_at_the_end(make, tokenizer):
    ids = tokenizer.encode("to sto").ids
    stream = make(stop=["stop"])
    stream.process_output(output(ids, 0, FinishReason.LENGTH), 101.0)
    assert stream.choices[0].pop_delta().text == "to sto"


def test_slow_readers_get_merged_deltas(make, tokenizer):
    ids = tokenizer.encode("slow reader").ids
    stream = make()
    for index, token_id in enumerate(ids):
        stream.process_output(output([token_id], index), 101.0 + index)
    delta = stream.choices[0].pop_delta()
    assert delta.text == "slow reader"
    assert delta.token_ids == ids
    assert not stream.choices[0].has_delta


def test_errors_of_the_engine(make):
    stream = make(n=2)
    error = ErrorInfo("invalid_request", "too much", "prompt")
    stream.process_output(output([], 0, error=error), 101.0)
    assert isinstance(stream.error, InvalidRequestError)
    assert stream.error.param == "prompt"
    assert stream.finished


def test_an_error_without_a_message_is_an_error(make):
    stream = make()
    stream.process_output(output([40], 0, FinishReason.ERROR), 101.0)
    assert isinstance(stream.error, InternalRequestError)


def test_an_abort_by_the_engine_keeps_the_partial_output(make):
    stream = make()
    stream.process_output(output([40], 0, FinishReason.ABORT), 101.0)
    assert stream.error is None
    assert stream.finished
    assert stream.choices[0].finish_reason is FinishReason.ABORT


def test_choices_end_independently(make):
    stream = make(n=2)
    stream.process_output(output([40], 0, FinishReason.LENGTH, choice=1), 101.0)
    assert not stream.finished
    stream.process_output(output([41], 0, FinishReason.LENGTH), 101.0)
    assert stream.finished
    assert stream.num_completion_tokens == 2


def test_a_preemption_lasts_until_the_choice_is_scheduled_again(make):
    """In the same engine or in the next one; each choice has its own."""
    stream = make(n=2)
    queued, scheduled, preempted = EventType.QUEUED, EventType.SCHEDULED, EventType.PREEMPTED
    for index, (choice, *events) in enumerate(
        [
            (0, (queued, 100.0), (scheduled, 101.0)),
            (0, (preempted, 103.0), (scheduled, 104.5)),
            (1, (queued, 100.0), (scheduled, 104.5)),
            (0, (preempted, 106.0)),
            (0, (queued, 107.0), (scheduled, 108.0), (preempted, 109.0)),
        ]
    ):
        sent = tuple(EngineCoreEvent(*each) for each in events)
        stream.process_output(output([], 0, choice=choice, events=sent), 110.0 + index)
    assert (stream.timeline.queued, stream.timeline.scheduled) == (100.0, 101.0)
    assert stream.timeline.preemptions(110.0) == [[1.5, 2.0, 1.0], []]
    assert sample(stream.metrics, "request_queue_time_seconds_count") == 1
    assert sample(stream.metrics, "request_queue_time_seconds_sum") == 1.0
