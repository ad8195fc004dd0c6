"""Images in the steps of a runner: their rows in place of embeddings, and what tokens see.

A fake encoder gives known rows, so a prompt with images must do what the same prompt does that is
given as embeddings. tests/worker/test_images.py has vision models.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from proto.messages.multimodal import EncoderSlice, MultiModalFeature, SharedPixels
from proto.messages.prepared_model import VisionFacts
from proto.messages.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from tests.fakes.prepared_models import prepare_checkpoint
from tests.fakes.real_engine import BLOCK, load, runner_of
from tests.fakes.tiny_checkpoints import save_tiny
from tests.fakes.vision import (
    IMAGE_TOKEN,
    NUM_PAGES,
    VISION,
    PixelEncoder,
    blocks_of,
    generate,
    going_on,
    new_request,
    save_image,
    step_of,
    whole,
)
from worker.batch.input_batch import InputBatch, PromptImages, build_inputs
from worker.models.decoder import Decoder
from worker.step.encoder_cache import EncoderCache
from worker.step.model_runner import ModelRunner

NUM_OUTPUTS = 6
IMG = IMAGE_TOKEN
PROMPT = [5, 6, 7, 40, IMG, IMG, IMG, IMG, IMG, 41, 8, 40, IMG, IMG, 42, IMG, IMG, 41, 9, 10, 11]
"""An image of five rows in a run, and one of four in two runs, with markers."""


class Images:
    """A tiny model with an encoder, and a prompt with two images."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = save_tiny("llama", folder / "model")
        prepared = prepare_checkpoint(folder / "model", folder / "prepared")
        self.decoder: Decoder = load(prepared)
        draw = np.random.default_rng(3)
        hidden = self.decoder.spec.hidden_size
        self.rows = [draw.standard_normal((count, hidden)).astype(np.float32) for count in (5, 4)]
        self.features = [
            save_image(folder, self.rows[0], 3, 7, 1),
            save_image(folder, self.rows[1], 11, 7, 2),
        ]

    def runner(self) -> ModelRunner:
        cache = EncoderCache(PixelEncoder(), str(self.folder))  # type: ignore[arg-type]
        return runner_of(self.decoder, 4 * NUM_PAGES, vision=VISION, encoder_cache=cache)

    @property
    def embeds(self) -> bytes:
        """The prompt as embeddings."""
        embedding: Any = self.model.get_input_embeddings()  # type: ignore[operator]
        with torch.no_grad():
            rows: NDArray[np.float32] = embedding(torch.tensor(PROMPT)).numpy()
        rows[np.array(PROMPT) == IMG] = np.concatenate(self.rows)
        return rows.astype("<f4").tobytes()

    def expected(self) -> list[int]:
        """The answer to the prompt given as embeddings."""
        runner = self.runner()
        given = request(1, prompt_embeds=self.embeds)
        return answer(runner, [step_of([given])])


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Images:
    return Images(tmp_path_factory.mktemp("images"))


def request(seq_id: int, **fields: Any) -> NewRequestData:
    return new_request(seq_id, PROMPT, **fields)


def answer(runner: ModelRunner, steps: Sequence[SchedulerOutput], seq_id: int = 1) -> list[int]:
    return generate(runner, steps, len(PROMPT), NUM_OUTPUTS, seq_id)


def test_images_take_the_place_of_embeddings(images: Images) -> None:
    """In one step; the tokens of the prompt without images give another answer."""
    slices = [whole(index, each) for index, each in enumerate(images.features)]
    step = step_of([request(1, mm_features=images.features)], scheduled_encoder_inputs=slices)
    expected = images.expected()
    assert answer(images.runner(), [step]) == expected
    assert answer(images.runner(), [step_of([request(1)])]) != expected


@pytest.mark.parametrize("size", [1, 2, 3, 7, 12])
def test_images_in_chunks(images: Images, size: int) -> None:
    """Chunks that begin and end anywhere, each after the images that it needs are encoded."""
    first, second = images.features
    first_chunk = request(1, mm_features=images.features, num_scheduled_tokens=size)
    steps = [step_of([first_chunk], scheduled_encoder_inputs=[whole(0, first)])]
    for start in range(size, len(PROMPT), size):
        slices = [whole(1, second)] if start == size else []
        count = min(size, len(PROMPT) - start)
        steps.append(going_on(1, start, count, scheduled_encoder_inputs=slices))
    assert answer(images.runner(), steps) == images.expected()


def test_steps_that_only_encode(images: Images) -> None:
    """Of a sequence that the worker does not have yet, and of one that waits for its image."""
    runner = images.runner()
    part = EncoderSlice(1, 0, 0, 2, images.features[0])
    output = runner.execute(step_of(scheduled_encoder_inputs=[part]))
    assert output.seq_ids == []
    assert output.encoder_seconds > 0.0
    steps = [
        step_of(
            [request(1, mm_features=images.features, num_scheduled_tokens=11)],
            scheduled_encoder_inputs=[EncoderSlice(1, 0, 2, 5, images.features[0])],
        ),
        step_of(scheduled_encoder_inputs=[EncoderSlice(1, 1, 0, 3, images.features[1])]),
        step_of(scheduled_encoder_inputs=[EncoderSlice(1, 1, 3, 4, images.features[1])]),
        going_on(1, 11, len(PROMPT) - 11),
    ]
    assert answer(runner, steps) == images.expected()


def test_a_preempted_sequence_takes_its_images_again(images: Images) -> None:
    runner, expected = images.runner(), images.expected()
    slices = [whole(index, each) for index, each in enumerate(images.features)]
    begin = request(1, mm_features=images.features)
    tokens = runner.execute(step_of([begin], scheduled_encoder_inputs=slices)).sampled_token_ids
    runner.execute(step_of(preempted_seq_ids=[1]))
    known = len(PROMPT) + 1
    resumed = CachedRequestData([1], [0], [known], [blocks_of(2)], [1], tokens)
    again = runner.execute(step_of(cached=resumed)).sampled_token_ids
    assert [*tokens[0], *again[0]] == expected[:2]


def test_a_prefix_hit_may_end_inside_an_image(images: Images) -> None:
    """A second sequence reads the blocks of the first, and encodes nothing."""
    runner, expected = images.runner(), images.expected()
    slices = [whole(index, each) for index, each in enumerate(images.features)]
    begin = request(1, mm_features=images.features)
    runner.execute(step_of([begin], scheduled_encoder_inputs=slices))
    for hit in (2 * BLOCK, 4 * BLOCK):
        own = blocks_of(2)[0]
        shared = blocks_of(1)[0][: hit // BLOCK]
        second = replace(
            request(2, mm_features=images.features),
            block_ids=[shared + own[len(shared) :]],
            num_computed_tokens=hit,
            num_scheduled_tokens=len(PROMPT) - hit,
        )
        found = answer(runner, [step_of([second])], seq_id=2)
        assert found == expected, hit
        runner.execute(step_of(finished_seq_ids=[2]))


def test_a_failed_image_fails_its_sequence_and_no_other(images: Images) -> None:
    """A sequence beside it that takes the other image only has its own answer."""
    runner, (first, second) = images.runner(), images.features
    lost = replace(first, mm_hash=b"l" * 32, pixels=replace(first.pixels, name="0.none"))
    requests = [
        request(1, mm_features=[lost, second]),
        request(2, mm_features=images.features),
    ]
    output = runner.execute(
        step_of(
            requests,
            scheduled_encoder_inputs=[whole(0, lost), whole(1, second), whole(0, first, 2)],
        )
    )
    assert output.failed_mm_hashes == [lost.mm_hash]
    assert output.failed_seq_ids == [1]
    assert output.sampled_token_ids[1] == images.expected()[:1]


def test_tokens_of_an_image_see_it_whole() -> None:
    """Adjacent image tokens are a run, as the mask of transformers' Gemma 3 has it."""
    vision = replace(VISION, is_bidirectional=True)
    features = [feature_at(3, 7, 5), feature_at(11, 7, 4)]
    prompt = PromptImages.of(PROMPT, features, vision)
    assert prompt.attend_end is not None
    assert prompt.attend_end.tolist() == [
        *(1, 2, 3, 4, 9, 9, 9, 9, 9, 10, 11),
        *(12, 14, 14, 15, 17, 17, 18, 19, 20, 21),
    ]
    assert PromptImages.of(PROMPT, features, VISION).attend_end is None


def test_adjacent_tokens_of_two_images_do_not_see_each_other() -> None:
    """The engine may compute the second one in a later step."""
    vision = replace(VISION, is_bidirectional=True)
    prompt = PromptImages.of(
        [5, IMG, IMG, IMG, IMG, IMG, 6], [feature_at(1, 2, 2), feature_at(3, 3, 3)], vision
    )
    assert prompt.attend_end is not None
    assert prompt.attend_end.tolist() == [1, 3, 3, 6, 6, 6, 7]


def feature_at(offset: int, length: int, num_embeds: int) -> MultiModalFeature:
    return MultiModalFeature(
        offset, length, num_embeds, bytes(32), SharedPixels("0.1", (num_embeds,))
    )


def batch_of(vision: VisionFacts) -> InputBatch:
    return InputBatch(3, 4 * NUM_PAGES, BLOCK, vision=vision)


def test_a_step_says_what_its_tokens_see() -> None:
    """A decode beside a chunk that begins inside an image; steps without images say nothing."""
    batch = batch_of(replace(VISION, is_bidirectional=True))
    features = [feature_at(3, 7, 5), feature_at(11, 7, 4)]
    plain = replace(request(2), prompt_token_ids=[1, 2, 3], num_scheduled_tokens=3)
    begin = step_of([plain])
    (row,) = batch.apply(begin)
    assert build_inputs(begin, np.array([row]), batch).attention[0].attend_end is None
    batch.append_sampled(np.array([row]), np.array([4]))
    image = request(
        1, mm_features=features, num_computed_tokens=6, num_scheduled_tokens=len(PROMPT) - 6
    )
    both = step_of([image], CachedRequestData([2], [3], [1], [None], [], []))
    inputs = build_inputs(both, batch.apply(both), batch)
    (attention,) = inputs.attention
    assert attention.attend_end is not None
    assert attention.attend_end.dtype == np.int32
    assert attention.attend_end.tolist() == [
        *(9, 9, 9, 10, 11, 12, 14, 14, 15, 17, 17, 18, 19, 20, 21),
        4,
    ]
    assert [(each.first_token, each.rows) for each in inputs.images] == [
        (0, slice(2, 5)),
        (6, slice(0, 2)),
        (9, slice(2, 4)),
    ]
    text = going_on(1, 18, 3)
    inputs = build_inputs(text, batch.apply(text), batch)
    assert inputs.attention[0].attend_end is None
    assert inputs.images == ()


def test_causal_models_get_no_attend_end() -> None:
    batch = batch_of(VISION)
    step = step_of([request(1, mm_features=[feature_at(3, 7, 5), feature_at(11, 7, 4)])])
    inputs = build_inputs(step, batch.apply(step), batch)
    assert inputs.attention[0].attend_end is None
    assert len(inputs.images) == 3


MROPE = replace(VISION, mrope_merge=2)


def grid_at(offset: int, height: int, width: int) -> MultiModalFeature:
    """Return an image of this many rows and columns of squares of four patches."""
    plain = feature_at(offset, height * width, height * width)
    return replace(plain, grid=(1, 2 * height, 2 * width))


def test_tokens_of_an_image_have_three_positions() -> None:
    """As transformers counts them; text goes on behind the longer side."""
    prompt = [1, 2, *[IMG] * 6, 3, *[IMG] * 3, 4, 5]
    images = PromptImages.of(prompt, [grid_at(2, 2, 3), grid_at(9, 3, 1)], MROPE)
    assert images.rotary_positions_at(0, 16).tolist() == [
        [0, 1, *[2] * 6, 5, *[6] * 3, 9, 10, 11, 12],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8, 9, 10, 11, 12],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, *[6] * 3, 9, 10, 11, 12],
    ]
    for first in range(16):
        for end in range(first, 17):
            part = images.rotary_positions_at(first, end)
            assert part.tolist() == images.rotary_positions_at(0, 17)[:, first:end].tolist()
    assert PromptImages.of(prompt, [grid_at(2, 2, 3)], VISION).rotary_positions is None


def test_a_step_has_three_positions_only_where_they_differ() -> None:
    """A chunk with an image beside a text, a decode after an image, and text alone."""
    batch = batch_of(MROPE)
    prompt = [1, 2, *[IMG] * 6, 3]
    plain = replace(request(2), prompt_token_ids=[1, 2, 3], num_scheduled_tokens=3)
    begin = step_of([plain])
    (row,) = batch.apply(begin)
    assert build_inputs(begin, np.array([row]), batch).rotary_positions is None
    batch.append_sampled(np.array([row]), np.array([4]))
    image = new_request(1, prompt, mm_features=[grid_at(2, 2, 3)])
    both = step_of([image], CachedRequestData([2], [3], [1], [None], [], []))
    rows = batch.apply(both)
    inputs = build_inputs(both, rows, batch)
    assert inputs.positions.tolist() == [*range(9), 3]
    assert inputs.rotary_positions is not None
    assert inputs.rotary_positions.tolist() == [
        [0, 1, *[2] * 6, 5, 3],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 3],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 3],
    ]
    batch.append_sampled(rows, np.array([7, 8]))
    decode = step_of(cached=CachedRequestData([1, 2], [9, 4], [1, 1], [None] * 2, [], []))
    inputs = build_inputs(decode, batch.apply(decode), batch)
    assert inputs.positions.tolist() == [9, 4]
    assert inputs.rotary_positions is not None
    assert inputs.rotary_positions.tolist() == [6, 4]
    finished = step_of(
        cached=CachedRequestData([2], [4], [1], [None], [], []), finished_seq_ids=[1]
    )
    assert build_inputs(finished, batch.apply(finished), batch).rotary_positions is None
