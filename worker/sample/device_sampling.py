"""Tokens of a step that stay on the device: the best ones, or filtered and drawn.

Owns the order of work for rows that want a token and nothing else; what is drawn equals
what the sampler of the host draws from the same logits.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from proto.sampling_params import GREEDY_TEMPERATURE
from worker.device.placement import Placement
from worker.sample.device_draw import KeyedDraw
from worker.sample.device_filters import FilterPlan, filter_on_device


@dataclass(frozen=True, slots=True)
class DrawnRows:
    """Settings of N rows; as SamplingRows has them."""

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int32]
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    seed: npt.NDArray[np.uint64]
    choice: npt.NDArray[np.uint32]
    position: npt.NDArray[np.uint32]


def hardest_rows(count: int) -> DrawnRows:
    """Rows that take the most memory: every filter, and a top-p over the whole vocabulary."""
    return DrawnRows(
        np.ones(count, np.float32),
        np.zeros(count, np.int32),
        np.full(count, 0.5, np.float32),
        np.full(count, 0.1, np.float32),
        np.zeros(count, np.uint64),
        np.zeros(count, np.uint32),
        np.zeros(count, np.uint32),
    )


class DeviceSampling:
    """From logits on a device to tokens on it, without waiting."""

    def __init__(self, placement: Placement, draw: KeyedDraw) -> None:
        self._placement = placement
        self._draw = draw

    def tokens(self, logits: torch.Tensor, rows: DrawnRows) -> torch.Tensor:
        """int64 [N] for logits [N, V] of any floating dtype, which stay as they are."""
        random = rows.temperature >= GREEDY_TEMPERATURE
        if not random.any():
            return logits.argmax(dim=1)
        filtering = random & ((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0))
        some = filtering.nonzero()[0]
        sent = self._placement.send(
            [
                np.where(random, rows.temperature, np.float32(0)),
                rows.seed.view(np.int64),
                rows.choice.astype(np.int64),
                rows.position.astype(np.int64),
                some,
                rows.temperature[some],
                rows.top_k[some].astype(np.int64),
                rows.top_p[some].astype(np.float64),
                rows.min_p[some].astype(np.float64),
            ]
        )
        keys, (index, *filters) = sent[:4], sent[4:]
        wide = logits.float().contiguous()
        if len(some):
            plan = FilterPlan.of(
                rows.top_k[some], rows.top_p[some], rows.min_p[some], logits.shape[1]
            )
            kept = filter_on_device(wide.index_select(0, index), plan, *filters)
            wide = wide.index_copy(0, index, kept)
        return self._draw(wide, *keys)
