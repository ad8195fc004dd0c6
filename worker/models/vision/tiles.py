"""Encoders of images that are one tile, or are cut into tiles."""

from collections.abc import Mapping, Sequence
from typing import Final

import torch

from worker.attention.backend import Rotation
from worker.layers.norm import Norm
from worker.models.vision.encoder import (
    Layout,
    Pixels,
    TowerLayer,
    VisionEncoder,
    VisionWeights,
    vision_activation,
)
from worker.models.vision.spec import PROJECTOR, TOWER
from worker.models.vision.tile_spec import (
    MlpProjector,
    PatchMerge,
    PoolProjector,
    ShuffleProjector,
    TileGrid,
    TileSpec,
    TowerSpec,
)


def _tower_norm(spec: TowerSpec, name: str, weights: VisionWeights) -> Norm:
    return weights.norm(TOWER + name, spec.norm_eps)


def tower_rotation(tower: TowerSpec, grid: TileGrid) -> Rotation | None:
    """Return the rotation of each patch of a tile; None without rotary positions."""
    rope, head_dim = tower.rope, tower.head_dim
    if rope is None:
        return None
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    of_rows, of_columns = frequencies[0::2], frequencies[int(rope.alternates) :: 2]
    rows, columns = (torch.arange(count, dtype=torch.float32)[:, None] for count in grid)
    by_row = (rows * of_rows)[:, None].expand(-1, grid[1], -1)
    by_column = (columns * of_columns)[None].expand(grid[0], -1, -1)
    angles = torch.cat([by_row, by_column], dim=-1).flatten(0, 1)
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def _layer(spec: TowerSpec, number: int, weights: VisionWeights) -> TowerLayer:
    prefix = f"{TOWER}encoder.layers.{number}."
    attention = f"{prefix}self_attn."
    inner = ("gate", "fc1") if spec.is_gated else ("fc1",)
    return TowerLayer(
        [
            _tower_norm(spec, f"encoder.layers.{number}.layer_norm{index}", weights)
            for index in (1, 2)
        ],
        weights.linear(*(f"{attention}{name}_proj" for name in "qkv")),
        weights.linear(f"{attention}out_proj"),
        weights.linear(*(f"{prefix}mlp.{name}" for name in inner)),
        vision_activation(spec.activation, weights.device, spec.is_gated),
        weights.linear(f"{prefix}mlp.fc2"),
    )


class _SquareProjection:
    """Output rows of squares of patches, of which a line of the output has whole ones.

    norm: of the patches.
    """

    def __init__(self, scale: int, norm: Norm) -> None:
        self._scale, self._norm = scale, norm

    def rows_per_line(self, grid: TileGrid) -> int:
        return grid[1] // self._scale

    def squares(self, residual: torch.Tensor, rows: slice, grid: TileGrid) -> torch.Tensor:
        """Return the normed patches [output rows, scale, scale, hidden] of each output row."""
        scale, line, size = self._scale, grid[1] // self._scale, residual.shape[-1]
        lines = slice(rows.start // line, rows.stop // line)
        patches = residual[:, lines.start * scale * grid[1] : lines.stop * scale * grid[1]]
        normed = self._norm(patches.reshape(-1, size))
        cut = normed.view(-1, lines.stop - lines.start, scale, line, scale, size)
        return cut.permute(0, 1, 3, 2, 4, 5).flatten(0, 2)


class _Merge(_SquareProjection):
    """PatchMerge with its weights."""

    def __init__(self, merge: PatchMerge, weights: VisionWeights) -> None:
        super().__init__(merge.scale, weights.norm(f"{PROJECTOR}norm", merge.norm_eps))
        self._product = weights.linear(f"{PROJECTOR}patch_merger.merging_layer")

    def merge(self, residual: torch.Tensor, rows: slice, grid: TileGrid) -> torch.Tensor:
        """Return the merged patches [output rows, hidden]."""
        squares = self.squares(residual, rows, grid)
        return self._product(squares.permute(0, 3, 1, 2).flatten(1))


class _MlpProjection:
    """MlpProjector with its weights."""

    def __init__(self, spec: TileSpec, weights: VisionWeights) -> None:
        projector = spec.projector
        assert isinstance(projector, MlpProjector)
        self._merge: _Merge | None = None
        if projector.merge is not None:
            self._merge = _Merge(projector.merge, weights)
        self._skipped = int(projector.drops_first_token)
        self._first, self._second = (
            weights.linear(f"{PROJECTOR}{name}") for name in ("linear_1", "linear_2")
        )
        self._activation = vision_activation(projector.activation, weights.device)

    def rows_per_line(self, grid: TileGrid) -> int:
        return 1 if self._merge is None else self._merge.rows_per_line(grid)

    def project(
        self, features: Sequence[torch.Tensor], rows: slice, grid: TileGrid
    ) -> torch.Tensor:
        if self._merge is not None:
            patches = self._merge.merge(features[0], rows, grid)
        else:
            tokens = slice(rows.start + self._skipped, rows.stop + self._skipped)
            patches = torch.cat([each[:, tokens] for each in features], dim=-1).flatten(0, 1)
        return self._second(self._activation(self._first(patches)))


class _ShuffleProjection(_SquareProjection):
    """ShuffleProjector with its weights."""

    def __init__(self, spec: TileSpec, weights: VisionWeights) -> None:
        scale = spec.projector.scale
        super().__init__(scale, _tower_norm(spec.tower, "post_layernorm", weights))
        self._product = weights.linear(f"{PROJECTOR}modality_projection.proj")

    def project(
        self, features: Sequence[torch.Tensor], rows: slice, grid: TileGrid
    ) -> torch.Tensor:
        return self._product(self.squares(features[0], rows, grid).flatten(1))


class _PoolProjection(_SquareProjection):
    """PoolProjector with its weights."""

    def __init__(self, spec: TileSpec, weights: VisionWeights) -> None:
        super().__init__(spec.projector.scale, _tower_norm(spec.tower, "post_layernorm", weights))
        name = f"{PROJECTOR}mm_soft_emb_norm"
        self._pooled_norm = weights.centred_rms_norm(name, spec.tower.norm_eps)
        self._product = weights.transposed_linear(f"{PROJECTOR}mm_input_projection_weight")

    def project(
        self, features: Sequence[torch.Tensor], rows: slice, grid: TileGrid
    ) -> torch.Tensor:
        squares = self.squares(features[0], rows, grid)
        pooled = squares.mean(dim=(1, 2), dtype=torch.float32).to(squares.dtype)
        return self._product(self._pooled_norm(pooled))


_PROJECTIONS: Final[
    Mapping[type, type[_MlpProjection] | type[_ShuffleProjection] | type[_PoolProjection]]
] = {
    MlpProjector: _MlpProjection,
    ShuffleProjector: _ShuffleProjection,
    PoolProjector: _PoolProjection,
}


class TileEncoder(VisionEncoder):
    """The vision part of a TileSpec.

    Pixels are [tiles, channels, height, width]; a tensor of one tile may lack the first dimension.
    """

    spec: TileSpec

    def __init__(self, spec: TileSpec, weights: VisionWeights) -> None:
        tower = spec.tower
        layers = [_layer(tower, each, weights) for each in range(spec.num_layers)]
        super().__init__(spec, weights, layers)
        self._patches = weights.linear(f"{TOWER}embeddings.patch_embedding")
        self._positions: torch.Tensor | None = None
        if tower.rope is None:
            self._positions = weights.tensor(f"{TOWER}embeddings.position_embedding.weight")
        self._class_token: torch.Tensor | None = None
        if tower.has_class_token:
            assert self._positions is not None
            token = weights.tensor(f"{TOWER}embeddings.class_embedding")
            self._class_token = token + self._positions[0]
        self._first_norm: Norm | None = None
        if tower.has_first_norm:
            self._first_norm = _tower_norm(tower, "pre_layrnorm", weights)
        self._projector = _PROJECTIONS[type(spec.projector)](spec, weights)

    def layout(self, pixels: Pixels, grid: tuple[int, ...]) -> Layout:
        spec, patch, shape = self.spec, self.spec.tower.patch_size, tuple(_tiles(pixels).shape)
        if len(shape) == 4 and shape[1] == 3 and spec.is_tile(*shape[2:]):
            sides = shape[2] // patch, shape[3] // patch
            num_tokens = spec.tower.num_tokens(sides)
            if 1 <= shape[0] <= spec.max_tiles and shape[0] * num_tokens <= spec.most_tokens:
                rotations = tower_rotation(spec.tower, sides)
                return Layout(
                    num_tiles=shape[0],
                    num_tokens=num_tokens,
                    num_embeds=spec.embeds_per_tile(sides),
                    rows_per_line=self._projector.rows_per_line(sides),
                    rotations=None if rotations is None else rotations.to(self.device),
                    sides=sides,
                )
        raise ValueError(
            f"pixels of shape {list(shape)}: at most {spec.max_tiles} tiles of "
            f"3 x {spec.tower.image_size} x {spec.tower.image_size} are needed"
        )

    def project(
        self, features: Sequence[torch.Tensor], layout: Layout, rows: slice
    ) -> torch.Tensor:
        return self._projector.project(features, rows, layout.sides)

    def write_patches(
        self, pixels: Pixels, layout: Layout, tiles: slice, rows: slice, residual: torch.Tensor
    ) -> None:
        pixels = _tiles(pixels)
        tower, (num_tiles, num_rows, size) = self.spec.tower, residual.shape
        patch = tower.patch_size
        grid = pixels.shape[-2] // patch, pixels.shape[-1] // patch
        columns = grid[1]
        skipped = int(tower.has_class_token)
        if skipped and rows.start == 0:
            assert self._class_token is not None
            residual[:, 0] = self._class_token
        # Rows of patches that contain these; a convolution leaves pixels behind the last patch out.
        first, end = max(0, rows.start - skipped), rows.stop - skipped
        lines = slice(first // columns, -(-end // columns))
        height, width = slice(lines.start * patch, lines.stop * patch), slice(0, columns * patch)
        area = pixels[tiles, slice(0, 3), height, width]
        cut = area.reshape(num_tiles, 3, -1, patch, columns, patch).permute(0, 2, 4, 1, 3, 5)
        numbers = cut.reshape(num_tiles, -1, tower.patch_numbers)
        numbers = numbers[:, first - lines.start * columns : end - lines.start * columns]
        numbers = numbers.to(self.device, self.dtype)
        products = self._patches(numbers.reshape(-1, tower.patch_numbers))
        products = products.view(num_tiles, -1, size)
        target = residual[:, num_rows - (end - first) :]
        if self._positions is None:
            target.copy_(products)
        else:
            positions = self._positions[self.position_ids(grid)[first:end] + skipped]
            torch.add(products, positions, out=target)
        if self._first_norm is not None:
            residual.copy_(self._first_norm(residual.reshape(-1, size)).view(residual.shape))

    def position_ids(self, grid: TileGrid) -> torch.Tensor:
        """Return the row of the table of positions for each patch of a square tile, without class
        tokens.

        Of a tile of another size, those at the same fractions of the sides, as transformers' code
        for Idefics 3 rounds them.
        """
        own, side = self.spec.tower.side, grid[0]
        if not self.spec.tower.takes_other_sizes:
            return torch.arange(side * side, device=self.device)
        boundaries = torch.arange(1 / own, 1.0, 1 / own)
        step = 1.0 / torch.tensor([side])
        fractions = (torch.arange(side, dtype=torch.float32) * step).clamp(max=1.0 - 1e-6)
        index = torch.bucketize(fractions, boundaries, right=True)
        return (index[:, None] * own + index).view(-1).to(self.device)


def _tiles(pixels: Pixels) -> Pixels:
    """Return pixels with a dimension of tiles."""
    return pixels[None] if isinstance(pixels, torch.Tensor) and pixels.dim() == 3 else pixels
