"""A vision encoder whose output is the pixels themselves, and messages of steps with images."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from proto.messages.multimodal import EncoderSlice, MultiModalFeature, SharedPixels
from proto.messages.prepared_model import VisionFacts
from proto.messages.sampling_params import SamplingParams
from proto.messages.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from worker.models.vision.encoder import Pixels
from worker.step.model_runner import ModelRunner

IMAGE_TOKEN = 90
VISION = VisionFacts(
    architecture="LlavaForConditionalGeneration", image_token_id=IMAGE_TOKEN, max_embeds=100
)
NUM_PAGES = 20
"""Blocks of a sequence in each group of the messages, unless they say otherwise."""


class PixelEncoding:
    """The encoding of an image whose pixels are its rows."""

    def __init__(self, rows: torch.Tensor, shares: list[float]) -> None:
        self._rows = rows
        self.shares = shares
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True

    def advance(self, share: float) -> None:
        assert 0 < share <= 1
        assert not self.shares or share > self.shares[-1]
        self.shares.append(share)

    @property
    def output(self) -> torch.Tensor:
        assert self.shares[-1] == 1.0, "the output is not complete"
        return self._rows


class PixelEncoder:
    """Encodes pixels [num_embeds, hidden] as their rows, and records the shares of the slices."""

    def __init__(self) -> None:
        self.shares: list[list[float]] = []
        self.encodings: list[PixelEncoding] = []
        self.grids: list[tuple[int, ...]] = []

    def begin(self, pixels: Pixels, grid: tuple[int, ...]) -> PixelEncoding:
        if len(pixels.shape) != 2:
            raise ValueError("it has no rows")
        self.shares.append([])
        self.grids.append(grid)
        self.encodings.append(PixelEncoding(pixels[:, :], self.shares[-1]))
        return self.encodings[-1]


def save_image(
    folder: Path, rows: NDArray[np.float32], offset: int, length: int, number: int = 1
) -> MultiModalFeature:
    """Save pixels and return the image at a place of a prompt. number: tells images apart."""
    name = f"0.{number}"
    rows.astype("<f4").tofile(folder / name)
    return MultiModalFeature(
        offset=offset,
        length=length,
        num_embeds=len(rows),
        mm_hash=bytes([number]) * 32,
        pixels=SharedPixels(name, rows.shape),
        grid=(1, number),
    )


def blocks_of(seq_id: int, num_groups: int = 1, num_pages: int = NUM_PAGES) -> list[list[int]]:
    """Return the blocks of a sequence, one list for each group; those of seq_id 1 come first."""
    first = 1 + num_pages * num_groups * (seq_id - 1)
    starts = range(first, first + num_pages * num_groups, num_pages)
    return [list(range(start, start + num_pages)) for start in starts]


def new_request(seq_id: int, prompt: list[int], **fields: Any) -> NewRequestData:
    """Return a greedy sequence whose whole prompt is computed, unless the fields differ."""
    return NewRequestData(
        **{
            "seq_id": seq_id,
            "prompt_token_ids": prompt,
            "output_token_ids": [],
            "sampling_params": SamplingParams(max_tokens=99, temperature=0.0),
            "seed": 0,
            "choice": 0,
            "block_ids": blocks_of(seq_id),
            "num_computed_tokens": 0,
            "num_scheduled_tokens": len(prompt),
            **fields,
        }
    )


def step_of(
    new: Sequence[NewRequestData] = (), cached: CachedRequestData | None = None, **fields: Any
) -> SchedulerOutput:
    cached = cached or CachedRequestData()
    counts = [each.num_scheduled_tokens for each in new] + cached.num_scheduled_tokens
    return SchedulerOutput(
        **{
            "epoch": 1,
            "step": 1,
            "new_requests": list(new),
            "cached_requests": cached,
            "total_num_scheduled_tokens": sum(counts),
            "finished_seq_ids": [],
            "preempted_seq_ids": [],
            **fields,
        }
    )


def going_on(seq_id: int, computed: int, count: int, **fields: Any) -> SchedulerOutput:
    """Return a step that continues a sequence."""
    return step_of(
        cached=CachedRequestData([seq_id], [computed], [count], [None], [], []), **fields
    )


def whole(index: int, feature: MultiModalFeature, seq_id: int = 1) -> EncoderSlice:
    return EncoderSlice(seq_id, index, 0, feature.num_embeds, feature)


def generate(
    runner: ModelRunner,
    steps: Sequence[SchedulerOutput],
    prompt_tokens: int,
    num_outputs: int,
    seq_id: int = 1,
) -> list[int]:
    """Run the steps of a prompt, then decode; return the tokens."""
    tokens: list[int] = []
    for step in steps:
        output = runner.execute(step)
        assert output.failed_seq_ids == []
        assert output.failed_mm_hashes == []
        for sampled in output.sampled_token_ids:
            tokens += sampled
    while len(tokens) < num_outputs:
        output = runner.execute(going_on(seq_id, prompt_tokens + len(tokens) - 1, 1))
        (sampled,) = output.sampled_token_ids
        tokens += sampled
    return tokens
