"""Encoders of images of any size, of GridSpec.

Where layers have windows, the squares of patches are computed in the order of the windows, and the
rows of the output are put back into the order of the image:

    image       squares 0 1 2 | 3      windows of 3 x 2 squares, or fewer at the edges
                        4 5 6 | 7
    computed    0 1 2 4 5 6 | 3 7
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from worker.layers.linear import Linear
from worker.layers.norm import Norm
from worker.models.vision.encoder import (
    Layout,
    Pixels,
    TowerLayer,
    VisionEncoder,
    VisionWeights,
    vision_activation,
)
from worker.models.vision.grid_spec import GridSpec
from worker.models.vision.spec import CHANNELS, TOWER

_NORM_EPS: Final = 1e-6
ALL: Final = slice(None)


class _Merger:
    """Two products for each square of patches.

    normed: numbers that its norm joins: of a patch, or of the patches of a square side by side.
    """

    def __init__(self, spec: GridSpec, prefix: str, normed: int, weights: VisionWeights) -> None:
        norm, first, second = spec.merger
        self._norm: Norm = weights.norm(prefix + norm, _NORM_EPS)
        self._first: Linear = weights.linear(prefix + first)
        self._second: Linear = weights.linear(prefix + second)
        self._activation = vision_activation("gelu", weights.device)
        self._normed = normed
        self._joined = spec.size * spec.merge**2

    def __call__(self, patches: torch.Tensor) -> torch.Tensor:
        """Return the rows of squares, for contiguous patches [squares * patches, hidden]."""
        normed = self._norm(patches.view(-1, self._normed)).view(-1, self._joined)
        return self._second(self._activation(self._first(normed)))


def _layer(spec: GridSpec, number: int, weights: VisionWeights) -> TowerLayer:
    prefix = f"{TOWER}blocks.{number}."
    *inner, down = (f"{prefix}mlp.{name}" for name in spec.mlp)
    return TowerLayer(
        [weights.norm(f"{prefix}norm{index}", _NORM_EPS) for index in (1, 2)],
        weights.linear(f"{prefix}attn.qkv"),
        weights.linear(f"{prefix}attn.proj"),
        weights.linear(*inner),
        vision_activation(spec.activation, weights.device, spec.is_gated),
        weights.linear(down),
        has_windows=bool(spec.window) and number not in spec.full_layers,
    )


class GridEncoder(VisionEncoder):
    """The vision part of a GridSpec.

    Pixels are [patches, channels, patch size, patch size], and the grid of an image is (1, rows,
    columns) of patches.
    """

    spec: GridSpec

    def __init__(self, spec: GridSpec, weights: VisionWeights) -> None:
        layers = [_layer(spec, each, weights) for each in range(spec.depth)]
        super().__init__(spec, weights, layers)
        self._patches = weights.linear(f"{TOWER}patch_embed.proj")
        self._positions: torch.Tensor | None = None
        if spec.position_side:
            self._positions = weights.tensor(f"{TOWER}pos_embed.weight")
        self._mergers = [_Merger(spec, *each, weights) for each in spec.mergers]

    def layout(self, pixels: Pixels, grid: tuple[int, ...]) -> Layout:
        spec = self.spec
        _, height, width = grid if len(grid) == 3 and grid[0] == 1 else (0, 0, 0)
        patch = (CHANNELS, spec.patch_size, spec.patch_size)
        num_embeds = height * width // spec.merge**2
        if (
            not 1 <= num_embeds <= self.max_embeds
            or height % spec.merge
            or width % spec.merge
            or tuple(pixels.shape) != (height * width, *patch)
        ):
            raise ValueError(
                f"pixels of shape {list(pixels.shape)} in a grid {list(grid)}: patches of "
                f"{list(patch)} are needed, for at most {self.max_embeds} rows"
            )
        order, windows = _window_order(height, width, spec)
        places = self.places(height, width, order)
        return Layout(
            num_tiles=1,
            num_tokens=height * width,
            num_embeds=num_embeds,
            windows=windows,
            rotations=self._rotations(places),
            places=torch.from_numpy(places),
            embed_order=None if order is None else torch.from_numpy(order).to(self.device),
            sides=(height, width),
        )

    def write_patches(
        self,
        pixels: Pixels,
        layout: Layout,
        tiles: slice,
        rows: slice,
        residual: torch.Tensor,
    ) -> None:
        spec = self.spec
        own = torch.cat([pixels[part, ALL, ALL, ALL] for part in _runs(rows, layout, spec.merge)])
        frames = own[:, :, None].expand(-1, -1, spec.frames, -1, -1)
        flat = frames.reshape(len(own), -1).to(self.device, self.dtype)
        products = self._patches(flat)
        if self._positions is not None:
            assert layout.places is not None
            height, width = layout.sides
            products += self._interpolated(layout.places[rows], height, width).to(self.dtype)
        residual[0] = products

    def project(
        self, features: Sequence[torch.Tensor], layout: Layout, rows: slice
    ) -> torch.Tensor:
        per_row = self.spec.merge**2
        patches = slice(rows.start * per_row, rows.stop * per_row)
        pairs = zip(self._mergers, features, strict=True)
        return torch.cat([merger(each[0, patches]) for merger, each in pairs], dim=1)

    def places(self, height: int, width: int, order: NDArray[np.int64] | None) -> NDArray[np.int64]:
        """Return row and column of each patch, int64 [patches, 2]. order: of the squares."""
        merge = self.spec.merge
        numbers = np.arange(height * width).reshape(height // merge, merge, width // merge, merge)
        squares = numbers.transpose(0, 2, 1, 3).reshape(-1, merge**2)
        flat = (squares if order is None else squares[order]).reshape(-1)
        return np.stack(np.divmod(flat, width), axis=1)

    def _rotations(self, places: NDArray[np.int64]) -> torch.Tensor:
        """Return `Layout.rotations`: the angles of rows, then those of columns."""
        half = self.spec.head_size // 2
        exponents = torch.arange(0, half, 2, dtype=torch.float32) / half
        frequencies = 1.0 / self.spec.theta**exponents
        angles = (torch.from_numpy(places).float()[:, :, None] * frequencies).flatten(1)
        return torch.stack((angles.cos(), angles.sin()), dim=1).to(self.device)

    def _interpolated(self, places: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """Return the positions [n, hidden] of patches, between the four nearest of the table.

        places: of the patches; the corners of the image are those of the table.
        """
        assert self._positions is not None
        side = self.spec.position_side
        sides = torch.tensor([height, width])
        found = places.float() * (side - 1) / (sides - 1).clamp(min=1)
        below = found.floor()
        share = found - below
        taps = torch.stack((below.long(), (below.long() + 1).clamp(max=side - 1)), dim=2)
        weights = torch.stack((1.0 - share, share), dim=2)
        index = (taps[:, 0, :, None] * side + taps[:, 1, None, :]).flatten(1)
        weight = (weights[:, 0, :, None] * weights[:, 1, None, :]).flatten(1)
        rows = self._positions[index.to(self.device)].float()
        return (rows * weight[..., None].to(self.device)).sum(1)


def _runs(rows: slice, layout: Layout, merge: int) -> Iterator[slice]:
    """Yield where patches lie in the file that are computed at these rows, run by run."""
    if layout.embed_order is None:
        yield rows
        return
    per_square = merge**2
    first, end = rows.start // per_square, -(-rows.stop // per_square)
    squares = layout.embed_order[first:end].numpy(force=True)
    begins = [0, *(np.flatnonzero(np.diff(squares) != 1) + 1).tolist(), len(squares)]
    for begin, stop in pairwise(begins):
        shift = (int(squares[begin]) - first - begin) * per_square
        of_run = max(rows.start, (first + begin) * per_square)
        yield slice(of_run + shift, min(rows.stop, (first + stop) * per_square) + shift)


def _window_order(
    height: int, width: int, spec: GridSpec
) -> tuple[NDArray[np.int64] | None, Sequence[int]]:
    """Return the order of the squares, int64, and `Layout.windows`; None and () without windows."""
    if not spec.window:
        return None, ()
    side, lines, columns = spec.window // spec.merge, height // spec.merge, width // spec.merge
    row, column = np.divmod(np.arange(lines * columns), columns)
    window = row // side * -(-columns // side) + column // side
    sizes = np.bincount(window) * spec.merge**2
    return np.argsort(window, kind="stable"), [0, *np.cumsum(sizes).tolist()]
