"""A vision encoder whose output is the pixels themselves, and images in messages."""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from proto.messages.multimodal import MultiModalFeature, SharedPixels
from proto.messages.prepared_model import VisionFacts

IMAGE_TOKEN = 90
VISION = VisionFacts(
    architecture="LlavaForConditionalGeneration", image_token_id=IMAGE_TOKEN, max_embeds=100
)


class PixelEncoding:
    """The encoding of an image whose pixels are its rows."""

    def __init__(self, rows: torch.Tensor, shares: list[float]) -> None:
        self._rows = rows
        self.shares = shares

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
        self.grids: list[tuple[int, ...]] = []

    def begin(self, pixels: torch.Tensor, grid: tuple[int, ...]) -> PixelEncoding:
        if pixels.dim() != 2:
            raise ValueError("it has no rows")
        self.shares.append([])
        self.grids.append(grid)
        return PixelEncoding(pixels, self.shares[-1])


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
