"""Images in the scheduler: what a step encodes, and which tokens it may compute."""

import pytest
from msgspec.structs import replace

from engine_core.request import RequestStatus
from proto.messages.engine_io import FinishReason
from proto.messages.multimodal import SharedPixels
from proto.settings.config import LoRAConfig
from tests.fakes.engine_harness import EngineHarness, scheduled
from tests.fakes.images import encoder_limits, picture, with_pictures
from tests.fakes.lora import lora_request
from tests.fakes.paged_runner import undisturbed

PARKED = RequestStatus.WAITING_FOR_ENCODER
RUNNING = RequestStatus.RUNNING


class ImageHarness(EngineHarness):
    """An engine whose model reads images."""

    def __init__(self, limits=None, **settings):
        limits = {"max_input_tokens": 1000, **(limits or {})}
        settings.setdefault("block_size", 4)
        super().__init__(encoder=encoder_limits(**limits), **settings)
        self.encoder_inputs = self.scheduler._encoder_inputs
        self.cache = self.encoder_inputs.cache

    def add_parts(self, *parts, max_tokens=3, **fields):
        """Add a request with text and (number, rows) of pictures."""
        prompt, features = with_pictures(parts)
        return self.add_one(prompt, max_tokens, mm_features=features, **fields)

    def finish(self, *requests):
        """Run to the end, and check the tokens."""
        self.run()
        for request in requests:
            count = len(self.tokens_of(request))
            assert count
            wanted = undisturbed(request.prompt_token_ids, count, request.choice)
            assert self.tokens_of(request) == wanted
        self.assert_idle()


def slices(output):
    """Return (seq_id, index, start, end) of the encoder work of a step."""
    return [
        (piece.seq_id, piece.index, piece.start, piece.end)
        for piece in output.scheduled_encoder_inputs
    ]


def text(number, first=0):
    return list(range(first, first + number))


def test_a_budget_cuts_chunks_before_the_first_image_that_does_not_fit():
    """Three prompts of 800 tokens with 600 rows from the 100th on, 1024 rows a step."""
    engine = ImageHarness(
        {"max_embeds": 600, "max_input_tokens": 1024, "splits": False, "cache_size": 1200},
        block_size=16,
    )
    one, two, three = (
        engine.add_parts(text(100, 10 * number), (number, 600), text(98)) for number in range(3)
    )
    output = engine.step()
    assert scheduled(output) == {one.seq_id: 800, two.seq_id: 100, three.seq_id: 100}
    assert slices(output) == [(one.seq_id, 0, 0.0, 600.0)]
    output = engine.step()
    assert scheduled(output) == {one.seq_id: 1, two.seq_id: 700}
    assert slices(output) == [(two.seq_id, 0, 0.0, 600.0)]
    assert three.status is RUNNING
    assert engine.scheduler.step_limit == "encoder"
    engine.finish(one, two, three)


def test_an_image_is_encoded_over_several_steps_and_the_text_before_it_computed():
    engine = ImageHarness({"max_input_tokens": 3})
    request = engine.add_parts(text(5), (1, 7), text(2))
    steps = [engine.step() for _ in range(3)]
    assert [scheduled(step) for step in steps] == [
        {request.seq_id: 5},
        {},
        {request.seq_id: 11},
    ]
    seq_id = request.seq_id
    assert [slices(step) for step in steps] == [
        [(seq_id, 0, 0.0, 3.0)],
        [(seq_id, 0, 3.0, 6.0)],
        [(seq_id, 0, 6.0, 7.0)],
    ]
    assert steps[0].new_requests[0].mm_features == request.mm_features
    engine.finish(request)


def test_a_request_that_begins_with_an_image_is_passed_by_others():
    engine = ImageHarness({"max_input_tokens": 2})
    waits = engine.add_parts((1, 5), text(3))
    others = [engine.add_one(text(6, 100)), engine.add_parts(text(3, 200), (2, 2))]
    output = engine.step()
    assert waits.status is PARKED
    assert scheduled(output) == {others[0].seq_id: 6, others[1].seq_id: 3}
    assert slices(output) == [(waits.seq_id, 0, 0.0, 2.0)]
    assert engine.scheduler.pop_stats().num_deferred == 1
    engine.step()
    output = engine.step()
    assert waits.seq_id in scheduled(output), "its image is complete by this step"
    engine.finish(waits, *others)


def test_one_image_at_a_time_is_encoded_in_part():
    engine = ImageHarness({"max_input_tokens": 4})
    requests = [engine.add_parts((number, 6), text(2)) for number in range(3)]
    first, second, third = (request.seq_id for request in requests)
    assert [slices(engine.step()) for _ in range(5)] == [
        [(first, 0, 0.0, 4.0)],
        [(first, 0, 4.0, 6.0), (second, 0, 0.0, 2.0)],
        [(second, 0, 2.0, 6.0)],
        [(third, 0, 0.0, 4.0)],
        [(third, 0, 4.0, 6.0)],
    ]
    engine.finish(*requests)


def test_images_of_running_requests_go_first():
    engine = ImageHarness({"max_input_tokens": 4, "splits": False, "max_embeds": 4})
    running = engine.add_parts(text(3), (1, 4), text(1), (2, 4))
    engine.step()
    waits = engine.add_parts((3, 4), text(2))
    assert slices(engine.step()) == [(running.seq_id, 1, 0.0, 4.0)]
    assert waits.status is PARKED
    assert slices(engine.step()) == [(waits.seq_id, 0, 0.0, 4.0)]
    engine.finish(running, waits)


@pytest.mark.parametrize("splits", [False, True])
def test_a_parked_request_is_not_passed_for_ever(splits):
    """In each step another request is added whose text before its image is computed at once."""
    engine = ImageHarness({"max_input_tokens": 4, "splits": splits, "max_embeds": 4})
    for number in range(6):
        engine.add_parts(text(3, 10 * number), (number + 1, 4))
    engine.step()
    waits = engine.add_parts((50, 4), text(2))
    for number in range(8):
        engine.add_parts(text(3, 100 + 10 * number), (number + 10, 4))
        output = engine.step()
        if waits.seq_id in scheduled(output):
            break
    assert number == 5, "four images of running requests pass it"
    engine.finish(waits)


def test_an_image_of_two_requests_is_encoded_once():
    """Also if its text is another, so that no prefix is shared, and twice in one prompt."""
    engine = ImageHarness()
    one = engine.add_parts(text(3), (1, 6), text(2), (1, 6), text(1))
    two = engine.add_parts(text(3, 50), (1, 6), text(2))
    engine.finish(one, two)
    assert engine.runner.encoder.num_encoded == 1
    three = engine.add_parts(text(2, 70), (1, 6))
    engine.finish(three)
    assert engine.runner.encoder.num_encoded == 1
    stats = engine.scheduler.pop_stats().encoder
    assert (stats.num_queries, stats.num_hits, stats.num_rows) == (3, 2, 6.0)
    assert stats.usage == pytest.approx(0.006)
    assert engine.scheduler.pop_stats().encoder.num_queries == 0


def test_a_model_without_images_has_no_encoder():
    engine = EngineHarness()
    assert engine.scheduler._encoder_inputs is None
    assert engine.scheduler.pop_stats().encoder is None
    assert engine.scheduler.reset_encoder_cache()


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_outputs_are_given_back_once_computed_past(async_scheduling):
    engine = ImageHarness({"cache_size": 12, "max_embeds": 6}, async_scheduling=async_scheduling)
    request = engine.add_parts((1, 6), (2, 6), (3, 6), (4, 6), text(3), max_tokens=5)
    engine.finish(request)
    assert engine.runner.encoder.num_encoded == 4
    assert engine.cache.num_free_rows == 0


def test_requests_make_progress_with_a_cache_for_one_image():
    engine = ImageHarness({"cache_size": 6, "max_embeds": 6, "max_input_tokens": 2})
    requests = [
        engine.add_parts((number, 6), text(2), (number + 1, 6), (number, 6), text(2))
        for number in range(4)
    ]
    engine.finish(*requests)


def test_without_chunked_prefill_a_prompt_waits_for_all_of_its_images():
    engine = ImageHarness(
        {"cache_size": 8, "max_embeds": 6, "max_input_tokens": 3}, enable_chunked_prefill=False
    )
    one = engine.add_parts(text(2), (1, 4), text(2), (2, 4))
    other = engine.add_parts(text(2, 50), (3, 4), text(2), (4, 4))
    too_many = engine.add_parts(text(1, 90), (5, 6), text(2), (6, 6))
    assert scheduled(engine.step()) == {too_many.seq_id: 1}, "its images are not kept together"
    assert one.seq_id not in scheduled(engine.step())
    assert scheduled(engine.step())[one.seq_id] == one.num_prompt_tokens
    engine.finish(one, other, too_many)


def test_a_victim_gives_the_budget_of_the_step_back():
    """Its image was begun in this step; another running request's is encoded instead."""
    engine = ImageHarness(
        {"max_input_tokens": 4, "splits": False, "max_embeds": 4},
        scheduling_policy="priority",
        num_blocks=9,
        enable_prefix_caching=False,
        long_prefill_token_threshold=4,
    )
    victim = engine.add_parts(text(12), (1, 4), priority=2)
    engine.step()
    engine.add_one(text(8, 50), 3, priority=0)
    other = engine.add_parts(text(8, 70), (2, 4), priority=1)
    outputs = [engine.step() for _ in range(3)]
    assert outputs[2].preempted_seq_ids == [victim.seq_id]
    assert slices(outputs[2]) == [(other.seq_id, 0, 0.0, 4.0)]
    engine.finish(victim, other)


def test_an_image_goes_on_although_its_request_is_preempted():
    engine = ImageHarness({"max_input_tokens": 1})
    request = engine.add_parts(text(3), (1, 4), text(1))
    engine.step()
    engine.scheduler.reset_prefix_cache(preempting=True)
    assert slices(engine.step())[0][2:] == (1.0, 2.0)
    engine.finish(request)
    assert engine.runner.encoder.num_encoded == 1


@pytest.mark.parametrize("begins_with_text", [False, True])
def test_the_end_of_a_request_stops_the_encoding_of_its_image(begins_with_text):
    engine = ImageHarness({"max_input_tokens": 1})
    request = engine.add_parts(text(3 * begins_with_text), (1, 4), text(1))
    engine.step()
    engine.scheduler.abort_request(request.request_id)
    assert engine.scheduler.has_work, "workers still hold its activations"
    output = engine.step()
    assert not output.has_result
    assert output.free_encoder_mm_hashes == [picture(1, 4).mm_hash]
    engine.assert_idle()


def test_an_image_of_another_request_goes_on_after_an_abort():
    engine = ImageHarness({"max_input_tokens": 1})
    first = engine.add_parts((1, 4), text(1))
    second = engine.add_parts((1, 4), text(2))
    engine.step()
    engine.scheduler.abort_request(first.request_id)
    assert slices(engine.step()) == [(first.seq_id, 0, 1.0, 2.0)]
    engine.finish(second)


def test_new_workers_encode_again():
    engine = ImageHarness({"max_input_tokens": 3})
    done = engine.add_parts(text(2), (1, 3), text(2), max_tokens=6)
    engine.step()
    begun, waits = engine.add_parts(text(1), (2, 4)), engine.add_parts((3, 4))
    engine.step()
    assert waits.status is PARKED
    engine.lose_workers()
    assert waits.status is RequestStatus.WAITING
    engine.finish(done, begun, waits)
    assert engine.runner.encoder.num_encoded == 3


@pytest.mark.parametrize("ends_with_text", [False, True])
@pytest.mark.parametrize("num_before", [0, 3, 4, 6])
def test_prefix_hits_end_before_in_and_after_an_image(num_before, ends_with_text):
    """A hit that ends in the image needs its output again; one that ends after it does not."""
    engine = ImageHarness({"cache_size": 6, "max_embeds": 6})
    tail = text(5, 300) if ends_with_text else []
    first = engine.add_parts(text(num_before), (1, 6), tail)
    engine.finish(first)
    engine.finish(engine.add_parts((2, 6)))  # its output takes the place of the other one
    again = engine.add_parts(text(num_before), (1, 6), tail)
    engine.step()
    hit = again.num_cached_tokens
    assert hit == (first.num_prompt_tokens - 1) // 4 * 4
    engine.finish(again)
    assert engine.runner.encoder.num_encoded == (3 if hit < first.mm_end else 2)


def test_text_before_an_image_is_shared_and_nothing_after_another_image():
    engine = ImageHarness()
    engine.finish(engine.add_parts(text(8), (1, 6), text(8)))
    other = engine.add_parts(text(8), (2, 6), text(8))
    engine.step()
    assert other.num_cached_tokens == 8
    shifted = engine.add_parts(text(9), (1, 6), text(8))
    engine.step()
    assert shifted.num_cached_tokens == 8
    engine.finish(other, shifted)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("budget", [10, 13, 24])
def test_an_image_seen_in_both_directions_is_never_cut(budget, async_scheduling):
    engine = ImageHarness(
        {"is_bidirectional": True, "max_embeds": 8, "max_input_tokens": 4},
        max_num_batched_tokens=budget,
        async_scheduling=async_scheduling,
    )
    requests = [
        engine.add_parts(text(number), (number, 8), text(3), (9, 8), text(number), max_tokens=9)
        for number in range(1, 5)
    ]
    engine.finish(*requests)  # the worker checks each chunk


def test_requests_that_decode_leave_room_for_an_image_that_cannot_be_cut():
    engine = ImageHarness(
        {"is_bidirectional": True, "max_embeds": 8},
        max_num_batched_tokens=12,
        max_prefill_slowdown=1.1,
    )
    engine.step_seconds = lambda output: 0.1 * output.total_num_scheduled_tokens
    decoding = [engine.add_one(text(2, 10 * number), max_tokens=200) for number in range(9)]
    engine.add_one(text(1, 600), max_tokens=1)
    for _ in range(5):
        engine.step()
    assert sum(request.status is RUNNING for request in decoding) == 5, "12 tokens, 8 of an image"
    engine.scheduler.abort_request(decoding[0].request_id)
    for request in decoding[5:]:
        engine.scheduler.abort_request(request.request_id)
    waits = engine.add_parts((1, 8), text(1))
    for _ in range(6):
        engine.step()
    assert waits.num_output_tokens


def test_prompts_are_throttled_while_an_image_that_cannot_be_cut_is_encoded():
    """Only the step that computes its tokens is longer, and by these."""
    engine = ImageHarness(
        {"is_bidirectional": True, "max_embeds": 300, "max_input_tokens": 40},
        max_num_batched_tokens=512,
        max_prefill_slowdown=1.1,
    )
    engine.step_seconds = lambda output: 0.1 * output.total_num_scheduled_tokens
    engine.finish(engine.add_one(text(2), max_tokens=4))
    engine.add_one(text(2, 10), max_tokens=200)
    for _ in range(3):
        engine.step()
    waits = engine.add_parts((1, 200), text(1))
    engine.add_one(text(400, 100), max_tokens=1)
    counts = []
    while not waits.num_output_tokens:
        counts.append(engine.step().total_num_scheduled_tokens)
    assert counts[4] > 200, "its output is complete by the fifth step"
    assert max(counts[:4]) < 100
    assert max(counts[4:]) < 300


def test_slices_leave_decoding_requests_their_pace():
    """A step of 0.1 s may take twice as long; alone half a second."""
    engine = ImageHarness({"max_input_tokens": None}, max_prefill_slowdown=2.0)
    engine.runner.encoder.row_seconds = 0.01
    engine.step_seconds = lambda output: 0.1 if output.total_num_scheduled_tokens else 0.0
    engine.finish(engine.add_one(text(4)))
    decoding = engine.add_one(text(2), max_tokens=40)
    for _ in range(3):
        engine.step()
    request = engine.add_parts((1, 60), text(1))
    rows = [engine.step().scheduled_encoder_inputs[0].end for _ in range(4)]
    assert rows == pytest.approx([1.0, 11.0, 21.0, 31.0], abs=0.2)
    engine.scheduler.abort_request(decoding.request_id)
    assert engine.step().scheduled_encoder_inputs[0].end == 60.0
    engine.finish(request)


@pytest.mark.parametrize("begins_with_text", [False, True])
def test_a_step_with_encoder_work_and_a_prompt_is_no_longer_than_one_with_either(begins_with_text):
    """A request decodes in steps of 0.1 s, which may take twice as long."""
    engine = ImageHarness(
        {"max_input_tokens": None, "max_embeds": 300},
        max_prefill_slowdown=2.0,
        max_num_batched_tokens=512,
    )
    engine.runner.encoder.row_seconds = 0.002
    engine.step_seconds = lambda output: 0.1 + 0.0005 * (output.total_num_scheduled_tokens - 1)
    engine.finish(engine.add_parts(text(50), (9, 20), max_tokens=40))
    engine.add_one(text(2, 100), max_tokens=200)
    engine.step()
    engine.step()
    engine.add_one(text(60, 300), max_tokens=1)
    for _ in range(6):
        engine.step()
    prompt = engine.add_one(text(170, 500), max_tokens=1)
    engine.step()
    assert prompt.num_computed_tokens > 150, "without images it has all the time"
    engine.step()
    engine.add_parts(text(4 * begins_with_text, 800), (1, 250), text(1))
    engine.add_one(text(900), max_tokens=1)
    engine.step()
    for _ in range(3):
        output = engine.step()
        seconds = engine.step_seconds(output) + engine.runner.encoder.seconds(output)
        assert output.scheduled_encoder_inputs
        assert output.total_num_scheduled_tokens > 40, "the prompt goes on"
        assert seconds < 0.23


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_an_image_that_fails_at_once_does_not_count_as_encoded_fast(async_scheduling):
    """Neither do its slices in a step that was sent before the workers said so."""
    engine = ImageHarness(
        {"max_input_tokens": None}, max_prefill_slowdown=2.0, async_scheduling=async_scheduling
    )
    engine.runner.encoder.row_seconds = 0.01
    engine.step_seconds = lambda output: 0.1 if output.total_num_scheduled_tokens else 0.0
    engine.add_one(text(2), max_tokens=60)
    engine.add_parts(text(1, 10), (1, 20), max_tokens=1)
    for _ in range(12):
        engine.step()
    engine.runner.encoder.broken.add(picture(2, 60).mm_hash)
    failed = engine.add_parts(text(1, 20), (2, 60))
    while engine.finish_reason_of(failed) is None:
        engine.step()
    engine.step()
    engine.add_parts(text(1, 30), (3, 60))
    (piece,) = engine.step().scheduled_encoder_inputs
    assert piece.end == pytest.approx(10.0, abs=0.5)


def test_requests_admitted_while_a_prompt_waits_for_its_image_keep_their_pace():
    """When it goes on, its prompt and one that was admitted meanwhile do not take whole steps."""
    engine = ImageHarness(
        {"max_input_tokens": 1}, max_num_batched_tokens=16, long_prefill_token_threshold=8
    )
    waits = engine.add_parts(text(3), (1, 6), text(100, 100), max_tokens=2)
    engine.step()
    prompt = engine.add_one(text(120, 300), max_tokens=2)
    decoding = [engine.add_one([number], max_tokens=60) for number in range(3)]
    while waits.num_computed_tokens < waits.mm_end:
        engine.step()
    while prompt.num_prompt_tokens > prompt.num_computed_tokens:
        running = [request for request in decoding if request.status is RUNNING]
        output = engine.step()
        assert {request.seq_id for request in running} <= scheduled(output).keys()
    assert decoding[0].num_output_tokens > 5
    engine.finish(waits, prompt, *decoding)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_an_image_that_cannot_be_encoded_ends_its_requests(async_scheduling):
    engine = ImageHarness({"max_input_tokens": 4}, async_scheduling=async_scheduling)
    engine.runner.encoder.broken.add(picture(2, 4).mm_hash)
    running = engine.add_parts(text(4), (1, 2), (2, 4), text(4))
    waits = engine.add_parts((2, 4), text(1))
    other = engine.add_parts(text(3, 80), (3, 4))
    engine.run()
    for request, number in ((running, 2), (waits, 1)):
        (output,) = engine.outputs[request.request_id, 0]
        assert output.finish_reason is FinishReason.ERROR
        assert output.error.kind == "internal"
        assert f"image {number} of the prompt" in output.error.message
    engine.finish(other)
    engine.runner.encoder.broken.clear()
    again = engine.add_parts(text(4), (1, 2), (2, 4), text(4))
    engine.step()
    assert again.num_cached_tokens == 8, "what was before the image is found, and nothing else"
    engine.finish(again)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_text_before_an_image_that_cannot_be_encoded_stays_cached(async_scheduling):
    """Although the rows that took the image have logits of NaN in this step and the next."""
    engine = ImageHarness(async_scheduling=async_scheduling)
    engine.runner.encoder.broken.add(picture(1, 4).mm_hash)
    failed = engine.add_parts(text(12), (1, 4), text(4), max_tokens=8)
    engine.run()
    assert engine.finish_reason_of(failed) is FinishReason.ERROR
    other = engine.add_parts(text(12), (2, 4))
    engine.step()
    assert other.num_cached_tokens == 12
    engine.finish(other)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("num_rows", [2, 100])
@pytest.mark.parametrize("num_before", [0, 6])
@pytest.mark.parametrize("begin", [0, 50])
def test_a_lost_file_of_a_front_end_ends_no_request_of_another(
    begin, num_before, num_rows, async_scheduling
):
    """The image is encoded again from the file of the other front end, and taken for its tokens."""
    engine = ImageHarness({"max_input_tokens": num_rows}, async_scheduling=async_scheduling)
    first = engine.add_parts(text(num_before), (1, 6), text(4), max_tokens=6)
    prompt, features = with_pictures([text(num_before, begin), (1, 6), text(5)])
    features = [replace(each, pixels=SharedPixels("other", (3, 2, 2))) for each in features]
    engine.runner.encoder.lost_files.add(first.mm_features[0].pixels.name)
    second = engine.add_one(prompt, 6, mm_features=features, front_end=1)
    engine.run()
    assert engine.finish_reason_of(first) is FinishReason.ERROR
    assert engine.finish_reason_of(second) is FinishReason.LENGTH
    engine.finish(second)
    assert not engine.runner.encoder.failed


def test_a_lost_file_ends_no_request_that_is_preempted_with_its_row_in_flight():
    engine = ImageHarness(async_scheduling=True)
    first = engine.add_parts((1, 6), text(4), max_tokens=6)
    prompt, features = with_pictures([text(2, 50), (1, 6), text(5)])
    features = [replace(each, pixels=SharedPixels("other", (3, 2, 2))) for each in features]
    engine.runner.encoder.lost_files.add(first.mm_features[0].pixels.name)
    second = engine.add_one(prompt, 6, mm_features=features, front_end=1)
    engine.send()
    engine.scheduler.reset_prefix_cache(preempting=True)
    engine.finish(second)
    assert engine.finish_reason_of(first) is FinishReason.ERROR
    assert engine.finish_reason_of(second) is FinishReason.LENGTH


def test_requests_that_found_what_was_computed_without_an_image_end_too():
    """With overlapped steps others are admitted before the result says that it failed."""
    engine = ImageHarness(async_scheduling=True)
    engine.runner.encoder.broken.add(picture(1, 6).mm_hash)
    first = engine.add_parts((1, 6), text(8))
    engine.send()
    second = engine.add_parts((1, 6), text(8), text(3))
    engine.send()
    assert second.num_cached_tokens >= 8
    engine.receive()
    assert [engine.finish_reason_of(each) for each in (first, second)] == [FinishReason.ERROR] * 2
    engine.run()
    engine.assert_idle()


def test_a_paused_engine_encodes_nothing_for_requests_that_have_not_begun():
    engine = ImageHarness({"max_input_tokens": 1})
    first, second = engine.add_parts((1, 2), text(1)), engine.add_parts((2, 4), text(1))
    engine.step()
    engine.scheduler.pause("finish_running")
    engine.step()
    for _ in range(3):
        assert not engine.scheduler.has_work or not slices(engine.step())
    assert {first.status, second.status} == {RequestStatus.WAITING_FOR_RESUME}
    engine.scheduler.resume()
    engine.finish(first, second)


def test_a_frozen_engine_encodes_nothing():
    engine = ImageHarness({"max_input_tokens": 1})
    request = engine.add_parts((1, 4), text(1))
    engine.step()
    engine.scheduler.pause("freeze")
    assert not engine.scheduler.has_work
    engine.scheduler.resume()
    engine.finish(request)


@pytest.mark.parametrize("num_before", [0, 4])
def test_an_image_that_crashes_the_workers_is_tried_alone_and_given_up(num_before):
    engine = ImageHarness({"max_input_tokens": 1}, crashes_until_isolated=3)
    bad = engine.add_parts(text(num_before, 200), (7, 4), text(1))
    other = engine.add_parts((8, 4), text(1))
    tried_alone = 0
    for epoch in range(2, 8):
        for _ in range(20):
            output = engine.send()
            names = {piece.feature.mm_hash[-1] for piece in output.scheduled_encoder_inputs}
            if 7 in names:
                break
            engine.receive()
        tried_alone += names == {7} and other.seq_id not in scheduled(output)
        engine.lose_workers(epoch)
        if engine.finish_reason_of(bad) is not None:
            break
    assert engine.finish_reason_of(bad) is FinishReason.ERROR
    assert tried_alone >= 2
    engine.finish(other)


def test_choices_and_beams_share_an_image():
    engine = ImageHarness({"max_input_tokens": 2})
    prompt, features = with_pictures([text(3), (1, 5), text(2)])
    choices = engine.add(prompt, 4, n=3, mm_features=features)
    beams = engine.add(prompt, 4, n=2, beam_width=2, mm_features=features)
    engine.run()
    for request in choices:
        assert engine.tokens_of(request) == undisturbed(prompt, 4, request.choice)
    assert all(engine.finish_reason_of(row) is FinishReason.LENGTH for row in beams)
    assert engine.runner.encoder.num_encoded == 1
    engine.assert_idle()


def test_a_session_keeps_its_images():
    """A turn that has lost its KV needs them again."""
    engine = ImageHarness()
    request = engine.add_parts(text(3), (1, 5), max_tokens=2, resumable=True)
    for _ in range(3):
        engine.step()
    engine.scheduler.reset_prefix_cache(preempting=True)
    assert engine.scheduler.reset_encoder_cache()
    engine.add_session_input(request, text(4, 400), 2, last=True)
    engine.run()
    assert engine.runner.encoder.num_encoded == 2
    engine.assert_idle()


def test_equal_prompts_wait_for_one_that_waits_for_its_image():
    """However many steps the encoder takes."""
    engine = ImageHarness({"max_input_tokens": 1}, max_num_batched_tokens=64)
    first = engine.add_parts(text(6), (1, 30), text(4))
    engine.step()
    second = engine.add_parts(text(6), (1, 30), text(4))
    for _ in range(20):
        engine.step()
    assert second.status is RequestStatus.WAITING_FOR_PREFIX
    engine.finish(first, second)
    assert second.num_cached_tokens == 40


def test_a_reset_is_refused_while_an_output_is_needed():
    engine = ImageHarness({"max_input_tokens": 1})
    request = engine.add_parts((1, 3), text(1))
    engine.step()
    assert not engine.scheduler.reset_encoder_cache()
    engine.finish(request)
    assert engine.scheduler.reset_encoder_cache()
    assert engine.scheduler.has_work
    assert engine.step().free_encoder_mm_hashes == [picture(1, 3).mm_hash]
    engine.finish(engine.add_parts((1, 3), text(2, 9)))
    assert engine.runner.encoder.num_encoded == 2


@pytest.mark.parametrize("is_cancelled", [False, True])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_encoder_time_counts_in_the_share_of_a_tenant(async_scheduling, is_cancelled):
    """Of a cancelled request, too; an equal prompt of another tenant then goes first."""
    engine = ImageHarness(
        {"max_input_tokens": 6}, max_num_seqs=1, async_scheduling=async_scheduling
    )
    engine.runner.encoder.row_seconds = 0.1
    engine.step_seconds = lambda output: 0.001 * output.total_num_scheduled_tokens
    engine.finish(engine.add_one(text(20, 500), max_tokens=1, tenant=3))
    with_image = engine.add_parts((1, 6), text(200), tenant=1)
    if is_cancelled:
        engine.send()
        engine.scheduler.abort_request(with_image.request_id)
        while engine.in_flight:
            engine.collect(engine.in_flight.popleft())
    engine.run()
    engine.finish(engine.add_one(text(208, 300), tenant=2))
    one, two = (engine.add_one(text(30, 50 * tenant), tenant=tenant) for tenant in (1, 2))
    engine.step()
    assert (one.status, two.status) == (RequestStatus.WAITING, RUNNING)
    engine.finish(one, two)


def test_an_image_that_is_encoded_again_for_its_request_is_charged_once():
    engine = ImageHarness({"cache_size": 6, "max_embeds": 6})
    usage = engine.scheduler._usage
    request = engine.add_parts(text(2), (1, 6), text(2), max_tokens=20, tenant=1)
    engine.step()
    before = usage.served(1)
    engine.scheduler.reset_prefix_cache(preempting=True)
    assert engine.scheduler.reset_encoder_cache()
    engine.step()
    assert engine.runner.encoder.num_encoded == 2
    assert usage.served(1) - before == 0
    engine.finish(request)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 5])
def test_requests_that_wait_for_their_images_leave_places_to_others(max_num_seqs, async_scheduling):
    """Half of the places at least, while the encoder is busy with the first image."""
    engine = ImageHarness(
        {"max_input_tokens": 1, "cache_size": 90},
        max_num_seqs=max_num_seqs,
        async_scheduling=async_scheduling,
    )
    with_images = [
        engine.add_parts(
            text(3, 10 * number), (number, 40), text(2), (10 + number, 40), (20 + number, 30)
        )
        for number in range(5)
    ]
    engine.step()
    others = [engine.add_one(text(5, 100 + 10 * number), max_tokens=3) for number in range(5)]
    for _ in range(25):
        engine.step()
    assert all(engine.finish_reason_of(each) is not None for each in others)
    assert sum(each.status is RUNNING for each in with_images) == max_num_seqs // 2
    engine.finish(*with_images)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("num_rows", [4, 6])
def test_a_request_that_waits_for_two_images_keeps_both(num_rows, async_scheduling):
    """Its first image is computed over several steps, and another request then needs rows."""
    engine = ImageHarness(
        {"cache_size": 12, "max_embeds": 6, "max_input_tokens": num_rows},
        max_num_seqs=3,
        max_num_batched_tokens=8,
        long_prefill_token_threshold=2,
        async_scheduling=async_scheduling,
    )
    other = engine.add_parts(text(12, 100), (3, 6), text(2))
    engine.step()
    waits = engine.add_parts((1, 6), (2, 6), text(3))
    for _ in range(5):
        engine.step()
    assert waits.status is RUNNING
    engine.finish(other, waits)
    assert engine.runner.encoder.num_encoded == 3


def with_adapters(num_resident=8):
    """Settings of adapters, as many of which as `num_resident` are held; one runs at a time."""
    return {
        "lora": LoRAConfig(enable_lora=True, max_loras=1, max_cpu_loras=num_resident),
        "max_num_seqs": 8,
    }


def test_an_image_is_encoded_apart_with_an_adapter_that_changes_it():
    """And with a scale; another adapter finds the output that requests without one have."""
    engine = ImageHarness(**with_adapters())
    adapters = [
        {},
        {"lora_request": lora_request(1)},
        {"lora_request": lora_request(2, changes_images=True)},
        {"lora_request": lora_request(2, changes_images=True, scale=0.5)},
        {"lora_request": lora_request(2, changes_images=True)},
    ]
    encoded, requests = [], []
    for fields in adapters:
        request = engine.add_parts(text(5), (1, 4), text(2), **fields)
        requests.append(request)
        begun = []
        while engine.finish_reason_of(request) is None:
            begun += engine.step().scheduled_encoder_inputs
        encoded.append([(piece.lora_int_id, piece.lora_scale) for piece in begun])
    assert encoded == [[(0, 1.0)], [], [(2, 1.0)], [(2, 0.5)], []]
    hashes = [request.mm_features[0].mm_hash for request in requests]
    assert hashes[0] == hashes[1] == picture(1, 4).mm_hash
    assert len({*hashes}) == 3
    assert hashes[2] == hashes[4]
    assert requests[1].num_cached_tokens == requests[3].num_cached_tokens == 0
    assert requests[4].num_cached_tokens > 0
    engine.finish(*requests)


def test_a_request_that_waits_for_its_image_asks_again_for_an_adapter_that_was_evicted():
    """The workers hold one, which another request needs while a third one's image is encoded."""
    engine = ImageHarness({"max_input_tokens": 2}, **with_adapters(num_resident=1))
    first = engine.add_parts((9, 12), text(3))
    waits = engine.add_parts((1, 4), text(3), lora_request=lora_request(1, changes_images=True))
    while waits.status is not PARKED:
        engine.step()
    assert engine.adapters.held == {1}
    passes = engine.add_one(text(6, 200), 2, lora_request=lora_request(2))
    while engine.finish_reason_of(passes) is None:
        engine.step()
    assert (first.status, waits.status) == (PARKED, RequestStatus.WAITING_FOR_ADAPTER)
    assert engine.adapters.held == {2}
    engine.finish(first, waits, passes)
    assert engine.adapters.loads == [1, 2, 1]
