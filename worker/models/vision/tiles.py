"""Encoders of images that are squares of one size, or are cut into such tiles."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Final

import torch

from worker.layers.norm import Norm
from worker.models.vision.encoder import (
    Layout,
    TowerLayer,
    VisionEncoder,
    VisionWeights,
    vision_activation,
)
from worker.models.vision.spec import PROJECTOR, TOWER
from worker.models.vision.tile_spec import (
    MlpProjector,
    PoolProjector,
    ShuffleProjector,
    TileSpec,
    TowerSpec,
)


def _layer(spec: TowerSpec, number: int, weights: VisionWeights) -> TowerLayer:
    prefix = f"{TOWER}encoder.layers.{number}."
    attention = f"{prefix}self_attn."
    return TowerLayer(
        [weights.norm(f"{prefix}layer_norm{index}", spec.norm_eps) for index in (1, 2)],
        weights.linear(*(f"{attention}{name}_proj" for name in "qkv")),
        weights.linear(f"{attention}out_proj"),
        weights.linear(f"{prefix}mlp.fc1"),
        vision_activation(spec.activation, weights.device),
        weights.linear(f"{prefix}mlp.fc2"),
    )


class _Projection(ABC):
    """A projector with its weights. rows_per_line: as in Layout, of tiles of some side."""

    def rows_per_line(self, side: int) -> int:
        return 1

    @abstractmethod
    def project(self, features: Sequence[torch.Tensor], rows: slice, line: int) -> torch.Tensor:
        """Return rows of output as VisionEncoder.project does. line: rows_per_line of the tiles."""


class _MlpProjection(_Projection):
    """MlpProjector with its weights."""

    def __init__(self, spec: TileSpec, weights: VisionWeights) -> None:
        projector = spec.projector
        assert isinstance(projector, MlpProjector)
        self._skipped = int(projector.drops_first_token)
        self._first, self._second = (
            weights.linear(f"{PROJECTOR}{name}") for name in ("linear_1", "linear_2")
        )
        self._activation = vision_activation(projector.activation, weights.device)

    def project(self, features: Sequence[torch.Tensor], rows: slice, line: int) -> torch.Tensor:
        tokens = slice(rows.start + self._skipped, rows.stop + self._skipped)
        joined = torch.cat([each[:, tokens] for each in features], dim=-1)
        return self._second(self._activation(self._first(joined.flatten(0, 1))))


class _SquareProjection(_Projection):
    """Output rows of squares of patches, of which a line of the output has whole ones."""

    def __init__(self, spec: TileSpec, weights: VisionWeights) -> None:
        assert isinstance(spec.projector, ShuffleProjector | PoolProjector)
        self._scale = spec.projector.scale
        self._norm = weights.norm(f"{TOWER}post_layernorm", spec.tower.norm_eps)

    def rows_per_line(self, side: int) -> int:
        return side // self._scale

    def squares(self, residual: torch.Tensor, rows: slice, line: int) -> torch.Tensor:
        """Return the normed patches [output rows, scale, scale, hidden] of each output row."""
        scale, size = self._scale, residual.shape[-1]
        lines, per_line = slice(rows.start // line, rows.stop // line), scale * scale * line
        patches = residual[:, lines.start * per_line : lines.stop * per_line]
        normed = self._norm(patches.reshape(-1, size))
        cut = normed.view(-1, lines.stop - lines.start, scale, line, scale, size)
        return cut.permute(0, 1, 3, 2, 4, 5).flatten(0, 2)


class _ShuffleProjection(_SquareProjection):
    """ShuffleProjector with its weights."""

    def __init__(self, spec: TileSpec, weights: VisionWeights) -> None:
        super().__init__(spec, weights)
        self._product = weights.linear(f"{PROJECTOR}modality_projection.proj")

    def project(self, features: Sequence[torch.Tensor], rows: slice, line: int) -> torch.Tensor:
        return self._product(self.squares(features[0], rows, line).flatten(1))


class _PoolProjection(_SquareProjection):
    """PoolProjector with its weights."""

    def __init__(self, spec: TileSpec, weights: VisionWeights) -> None:
        super().__init__(spec, weights)
        name = f"{PROJECTOR}mm_soft_emb_norm"
        self._pooled_norm = weights.centred_rms_norm(name, spec.tower.norm_eps)
        self._product = weights.transposed_linear(f"{PROJECTOR}mm_input_projection_weight")

    def project(self, features: Sequence[torch.Tensor], rows: slice, line: int) -> torch.Tensor:
        squares = self.squares(features[0], rows, line)
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

    Pixels are [tiles, channels, height, width], or of one tile.
    """

    spec: TileSpec

    def __init__(self, spec: TileSpec, weights: VisionWeights) -> None:
        tower = spec.tower
        layers = [_layer(tower, each, weights) for each in range(spec.num_layers)]
        super().__init__(spec, weights, layers)
        self._patches = weights.linear(f"{TOWER}embeddings.patch_embedding")
        self._positions = weights.tensor(f"{TOWER}embeddings.position_embedding.weight")
        self._class_token: torch.Tensor | None = None
        self._first_norm: Norm | None = None
        if tower.has_class_token:
            token = weights.tensor(f"{TOWER}embeddings.class_embedding")
            self._class_token = token + self._positions[0]
            self._first_norm = weights.norm(f"{TOWER}pre_layrnorm", tower.norm_eps)
        self._projector = _PROJECTIONS[type(spec.projector)](spec, weights)

    def layout(self, pixels: torch.Tensor, grid: tuple[int, ...]) -> Layout:
        pixels = _tiles(pixels)
        tower = self.spec.tower
        side = pixels.shape[-1] // tower.patch_size
        projector = self.spec.projector
        scale = 1 if isinstance(projector, MlpProjector) else projector.scale
        if (
            pixels.dim() != 4
            or pixels.shape[1] != 3
            or pixels.shape[2] != pixels.shape[3]
            or (pixels.shape[3] != tower.image_size and not tower.takes_other_sizes)
            or not 1 <= len(pixels) <= self.spec.max_tiles
            or not scale <= side
            or side % scale
            or len(pixels) * self.spec.embeds_per_tile(side) > self.max_embeds
        ):
            raise ValueError(
                f"pixels of shape {list(pixels.shape)}: at most {self.spec.max_tiles} tiles of "
                f"3 x {tower.image_size} x {tower.image_size} are needed"
            )
        return Layout(
            num_tiles=len(pixels),
            num_tokens=tower.num_tokens(side),
            num_embeds=self.spec.embeds_per_tile(side),
            rows_per_line=self._projector.rows_per_line(side),
        )

    def project(
        self, features: Sequence[torch.Tensor], layout: Layout, rows: slice
    ) -> torch.Tensor:
        return self._projector.project(features, rows, layout.rows_per_line)

    def write_patches(
        self,
        pixels: torch.Tensor,
        layout: Layout,
        tiles: slice,
        rows: slice,
        residual: torch.Tensor,
    ) -> None:
        pixels = _tiles(pixels)[tiles]
        tower, (num_tiles, num_rows, size) = self.spec.tower, residual.shape
        patch, side = tower.patch_size, pixels.shape[-1] // tower.patch_size
        skipped = int(tower.has_class_token)
        if skipped and rows.start == 0:
            assert self._class_token is not None
            residual[:, 0] = self._class_token
        # Rows of patches that contain these; a convolution leaves pixels behind the last patch out.
        first, end = max(0, rows.start - skipped), rows.stop - skipped
        lines = slice(first // side, -(-end // side))
        area = pixels[:, :, lines.start * patch : lines.stop * patch, : side * patch]
        cut = area.reshape(num_tiles, 3, -1, patch, side, patch).permute(0, 2, 4, 1, 3, 5)
        numbers = cut.reshape(num_tiles, -1, tower.patch_numbers)
        numbers = numbers[:, first - lines.start * side : end - lines.start * side]
        numbers = numbers.to(self.device, self.dtype)
        products = self._patches(numbers.reshape(-1, tower.patch_numbers))
        positions = self._positions[self.position_ids(side)[first:end] + skipped]
        target = residual[:, num_rows - (end - first) :]
        torch.add(products.view(num_tiles, -1, size), positions, out=target)
        if self._first_norm is not None:
            residual.copy_(self._first_norm(residual.reshape(-1, size)).view(residual.shape))

    def position_ids(self, side: int) -> torch.Tensor:
        """Return the row of the table of positions for each patch of a tile, without class tokens.

        Of a tile of another size, those at the same fractions of the sides, as transformers' code
        for Idefics 3 rounds them.
        """
        own = self.spec.tower.side
        if not self.spec.tower.takes_other_sizes:
            return torch.arange(side * side, device=self.device)
        boundaries = torch.arange(1 / own, 1.0, 1 / own)
        step = 1.0 / torch.tensor([side])
        fractions = (torch.arange(side, dtype=torch.float32) * step).clamp(max=1.0 - 1e-6)
        index = torch.bucketize(fractions, boundaries, right=True)
        return (index[:, None] * own + index).view(-1).to(self.device)


def _tiles(pixels: torch.Tensor) -> torch.Tensor:
    """Return pixels with a dimension of tiles."""
    return pixels[None] if pixels.dim() == 3 else pixels
