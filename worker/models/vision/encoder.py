"""Computes a vision part: pixels of an image to rows that take the place of token embeddings.

An image is encoded in many small units, each a range of rows in a stage of a layer:

    patches    pixels of the rows, their product, positions
    keys       norm, queries, keys and values of the rows, rotary positions     for each layer
    mixing     attention of the rows to their whole tile, its product, MLP      for each layer
    outputs    the projector's rows

`Encoding.advance` computes some of them, so a step may stop anywhere. The units are the same
however they are divided into slices, and so are all bits of the output, as long as the number of
threads does not change. A unit has rows of one tile, or whole tiles where these are small.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Final, Protocol

import torch

from worker.attention.backend import Rotation
from worker.layers.linear import Linear
from worker.layers.norm import Norm
from worker.layers.tower_attention import TileHeads, TowerAttention
from worker.models.layer_device import LayerDevice
from worker.models.rotary import rotate
from worker.models.vision.spec import (
    PROJECTOR,
    TOWER,
    MlpProjector,
    PatchMerge,
    PoolProjector,
    ShuffleProjector,
    TileGrid,
    TowerSpec,
    VisionActivation,
    VisionSpec,
)

_UNIT_ROWS: Final = 64
"""Rows of a unit on a device whose results are there when a call returns: enough for a product to
be fast, and a few milliseconds of one core."""
_ALL_ROWS: Final = 1 << 20
"""Rows of a unit on other devices, which compute an image as a whole."""
_QUICK: Final = 1.702


class VisionWeights(Protocol):
    """Gives a vision part its weights, by their names in a prepared folder.

    The loader implements it for files (worker/loader/vision.py).

    device: makes what computes the part besides its weights. dtype: of weights and activations.
    """

    device: LayerDevice
    dtype: torch.dtype

    def tensor(self, name: str) -> torch.Tensor:
        """Read a tensor."""
        ...

    def linear(self, *names: str) -> Linear:
        """Read the products NAME.weight, one below the other, with their biases if any."""
        ...

    def transposed_linear(self, name: str) -> Linear:
        """Read the product with a matrix that is stored as [in, out]."""
        ...

    def layer_norm(self, name: str, eps: float) -> Norm:
        """Read the LayerNorm NAME.weight, NAME.bias."""
        ...

    def rms_norm(self, name: str, eps: float) -> Norm:
        """Read the RMSNorm NAME.weight."""
        ...

    def centred_rms_norm(self, name: str, eps: float) -> Norm:
        """Read the RMSNorm that multiplies by 1 + NAME.weight."""
        ...


class Pixels(Protocol):
    """Pixels of an image, float32 [tiles, channels, height, width]: a tensor, or as one in a file.

    A unit reads the part that it needs. Raises OSError or ValueError if it cannot be read.
    """

    @property
    def shape(self) -> Sequence[int]:
        """The size of each dimension."""
        ...

    def __getitem__(self, part: tuple[slice, ...], /) -> torch.Tensor:
        """Read a part: a range of each dimension."""
        ...


def unit_rows(device: LayerDevice) -> int:
    """Return the rows of a unit on a device."""
    return _UNIT_ROWS if device.has_results else _ALL_ROWS


def tower_attention(spec: VisionSpec, dtype: torch.dtype, device: LayerDevice) -> TowerAttention:
    """Return the attention of a vision part's layers on a device."""
    tower = spec.tower
    return device.tower_attention(tower.num_heads, tower.head_dim, dtype)


def _activation(
    name: VisionActivation, device: LayerDevice, is_gated: bool = False
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return an activation, or f(gate) * up as `Gate`, which quick_gelu and relu do not have."""
    match name:
        case "quick_gelu":
            return lambda x: x * torch.sigmoid(_QUICK * x)
        case "relu":
            return torch.relu
        case _:
            return device.gate(name, is_gated)


def _tower_norm(spec: TowerSpec, name: str, weights: VisionWeights) -> Norm:
    read = weights.rms_norm if spec.has_rms_norms else weights.layer_norm
    return read(TOWER + name, spec.norm_eps)


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


class _Layer:
    """A layer of a tower with its weights."""

    def __init__(self, spec: TowerSpec, number: int, weights: VisionWeights) -> None:
        prefix = f"{TOWER}encoder.layers.{number}."
        attention = f"{prefix}self_attn."
        self._head_dim = spec.head_dim
        self._norm1, self._norm2 = (
            _tower_norm(spec, f"encoder.layers.{number}.layer_norm{each}", weights)
            for each in (1, 2)
        )
        self._qkv = weights.linear(*(f"{attention}{name}_proj" for name in "qkv"))
        self._out = weights.linear(f"{attention}out_proj")
        inner = ("gate", "fc1") if spec.is_gated else ("fc1",)
        self._fc1 = weights.linear(*(f"{prefix}mlp.{name}" for name in inner))
        self._fc2 = weights.linear(f"{prefix}mlp.fc2")
        self._activation = _activation(spec.activation, weights.device, spec.is_gated)

    def compute_keys(
        self,
        residual: torch.Tensor,
        heads: TileHeads,
        tiles: slice,
        rows: slice,
        rotation: Rotation | None = None,
    ) -> None:
        """Give `heads` the queries, keys and values of these rows [tiles, rows, hidden].

        rotation: of all rows of a tile.
        """
        own = residual[tiles, rows].flatten(0, 1)
        qkv = self._qkv(self._norm1(own))
        if rotation is not None:
            turning = qkv[:, : 2 * own.shape[1]].view(len(own), -1, self._head_dim)
            turning.copy_(rotate(turning, rotation[rows].repeat(tiles.stop - tiles.start, 1, 1)))
        heads.write(tiles, rows, qkv)

    def mix(self, residual: torch.Tensor, heads: TileHeads, tiles: slice, rows: slice) -> None:
        """Add attention and MLP to these rows; `heads` has all rows of their tiles."""
        own = residual[tiles, rows].view(-1, residual.shape[-1])
        own.copy_(self._out.add_to(own, heads.attend(tiles, rows)))
        inner = self._activation(self._fc1(self._norm2(own)))
        own.copy_(self._fc2.add_to(own, inner))


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
        super().__init__(merge.scale, weights.rms_norm(f"{PROJECTOR}norm", merge.norm_eps))
        self._product = weights.linear(f"{PROJECTOR}patch_merger.merging_layer")

    def merge(self, residual: torch.Tensor, rows: slice, grid: TileGrid) -> torch.Tensor:
        """Return the merged patches [output rows, hidden]."""
        squares = self.squares(residual, rows, grid)
        return self._product(squares.permute(0, 3, 1, 2).flatten(1))


class _MlpProjection:
    """MlpProjector with its weights."""

    def __init__(self, spec: VisionSpec, weights: VisionWeights) -> None:
        projector, hidden = spec.projector, spec.tower.hidden_size
        assert isinstance(projector, MlpProjector)
        size, out = hidden * len(projector.feature_layers), spec.output_size
        self.flops_per_row = 2 * (size + out) * out
        self._merge: _Merge | None = None
        if projector.merge is not None:
            self._merge = _Merge(projector.merge, weights)
            self.flops_per_row += 2 * (projector.scale * hidden) ** 2
        self._skipped = int(projector.drops_first_token)
        self._first, self._second = (
            weights.linear(f"{PROJECTOR}{name}") for name in ("linear_1", "linear_2")
        )
        self._activation = _activation(projector.activation, weights.device)

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

    def __init__(self, spec: VisionSpec, weights: VisionWeights) -> None:
        scale = spec.projector.scale
        super().__init__(scale, _tower_norm(spec.tower, "post_layernorm", weights))
        self.flops_per_row = 2 * scale**2 * spec.tower.hidden_size * spec.output_size
        self._product = weights.linear(f"{PROJECTOR}modality_projection.proj")

    def project(
        self, features: Sequence[torch.Tensor], rows: slice, grid: TileGrid
    ) -> torch.Tensor:
        return self._product(self.squares(features[0], rows, grid).flatten(1))


class _PoolProjection(_SquareProjection):
    """PoolProjector with its weights."""

    def __init__(self, spec: VisionSpec, weights: VisionWeights) -> None:
        super().__init__(spec.projector.scale, _tower_norm(spec.tower, "post_layernorm", weights))
        size, name = spec.tower.hidden_size, f"{PROJECTOR}mm_soft_emb_norm"
        self.flops_per_row = 2 * size * spec.output_size
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


class VisionEncoder:
    """The vision part of a model with its weights.

    spec: its arithmetic. dtype: of weights, activations and output. max_embeds: most rows of output
    of an image.
    """

    def __init__(self, spec: VisionSpec, weights: VisionWeights) -> None:
        tower, device = spec.tower, weights.device
        self.spec = spec
        self.dtype = weights.dtype
        self.max_embeds = spec.max_embeds
        self.device = device.torch_device
        self.unit_rows = unit_rows(device)
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
        self.attention = tower_attention(spec, weights.dtype, device)
        self.layers = [_Layer(tower, each, weights) for each in range(spec.num_layers)]
        self.projector = _PROJECTIONS[type(spec.projector)](spec, weights)

    def begin(self, pixels: Pixels, grid: tuple[int, ...] = ()) -> "Encoding":
        """Return the encoding of an image, of which nothing is computed or read yet.

        pixels: a tensor of one tile may lack the first dimension. They must stay as they are until
        the output is complete. grid: not needed by these models.
        Raises ValueError for pixels of a shape that the model does not take.
        """
        if isinstance(pixels, torch.Tensor) and pixels.dim() == 3:
            pixels = pixels[None]
        spec, patch, shape = self.spec, self.spec.tower.patch_size, tuple(pixels.shape)
        if len(shape) == 4 and shape[1] == 3 and spec.is_tile(*shape[2:]):
            grid_of_tile = shape[2] // patch, shape[3] // patch
            num_tokens = shape[0] * spec.tower.num_tokens(grid_of_tile)
            if 1 <= shape[0] <= spec.max_tiles and num_tokens <= spec.most_tokens:
                return Encoding(self, pixels, grid_of_tile)
        raise ValueError(
            f"pixels of shape {list(shape)}: at most {spec.max_tiles} tiles of "
            f"3 x {spec.tower.image_size} x {spec.tower.image_size} are needed"
        )

    def write_patches(
        self, pixels: Pixels, tiles: slice, rows: slice, residual: torch.Tensor
    ) -> None:
        """Write the residual [tiles, rows, hidden] before the first layer, of these tiles' rows."""
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


class Encoding:
    """An image that is being encoded; it holds what was computed so far.

    num_embeds: rows of its output.
    """

    def __init__(self, encoder: VisionEncoder, pixels: Pixels, grid: TileGrid) -> None:
        spec, tower = encoder.spec, encoder.spec.tower
        self._encoder = encoder
        self._grid = grid
        self._num_tiles, self._num_tokens = pixels.shape[0], tower.num_tokens(grid)
        self._embeds_per_tile = spec.embeds_per_tile(grid)
        self.num_embeds = self._num_tiles * self._embeds_per_tile
        size = tower.hidden_size
        self._patch_flops = 2 * tower.patch_numbers * size
        self._key_flops = 6 * size * size
        of_mlp = (3 if tower.is_gated else 2) * tower.intermediate_size
        self._mixing_flops = 2 * size * (size + of_mlp + 2 * self._num_tokens)
        of_token = self._patch_flops + spec.num_layers * (self._key_flops + self._mixing_flops)
        of_outputs = self.num_embeds * encoder.projector.flops_per_row
        self._total = self._num_tiles * self._num_tokens * of_token + of_outputs
        self._done = 0
        self._work = self._compute(pixels)
        self._output: torch.Tensor

    @torch.inference_mode()
    def advance(self, share: float) -> None:
        """Compute until at least this share of the work is done, 0 < share <= 1."""
        goal = self._total if share >= 1.0 else share * self._total
        while self._done < goal:
            self._done += next(self._work)
        if self._done == self._total:
            self._work.close()  # frees what it holds

    @property
    def output(self) -> torch.Tensor:
        """Rows [num_embeds, output size] in the encoder's dtype, once all work is done."""
        assert self._done == self._total, "the image is not encoded yet"
        return self._output

    def _compute(self, pixels: Pixels) -> Generator[int, None, None]:
        """Compute the units in their order; yield the FLOPs of each, about."""
        encoder, spec = self._encoder, self._encoder.spec
        size, dtype, device = spec.tower.hidden_size, encoder.dtype, encoder.device
        shape = self._num_tiles, self._num_tokens
        residual = torch.empty(*shape, size, dtype=dtype, device=device)
        heads = encoder.attention.tiles(*shape, dtype, device)
        output_shape = self._num_tiles, self._embeds_per_tile, spec.output_size
        output = torch.empty(*output_shape, dtype=dtype, device=device)
        self._output = output.flatten(0, 1)
        blocks = list(self._blocks(self._num_tokens, 1))
        for tiles, rows in blocks:
            encoder.write_patches(pixels, tiles, rows, residual[tiles, rows])
            yield self._patch_flops * _num_rows(tiles, rows)
        features: dict[int, torch.Tensor] = {}
        rotation = tower_rotation(spec.tower, self._grid)
        if rotation is not None:
            rotation = rotation.to(device)
        for number, layer in enumerate(encoder.layers):
            if number in spec.feature_layers:
                features[number] = residual.clone()
            for tiles, rows in blocks:
                layer.compute_keys(residual, heads, tiles, rows, rotation)
                yield self._key_flops * _num_rows(tiles, rows)
            for tiles, rows in blocks:
                layer.mix(residual, heads, tiles, rows)
                yield self._mixing_flops * _num_rows(tiles, rows)
        features[spec.num_layers] = residual
        projector = encoder.projector
        read = [features[number] for number in spec.feature_layers]
        for tiles, rows in self._blocks(self._embeds_per_tile, projector.rows_per_line(self._grid)):
            projected = projector.project([each[tiles] for each in read], rows, self._grid)
            own = output[tiles, rows]
            own.copy_(projected.view(own.shape))
            yield projector.flops_per_row * _num_rows(tiles, rows)

    def _blocks(self, num_rows: int, multiple: int) -> Iterator[tuple[slice, slice]]:
        """Yield tiles and rows of them, all of the image's, about unit_rows at a time.

        num_rows: of a tile. Rows of a part of a tile begin and end at multiples of `multiple`.
        """
        most = self._encoder.unit_rows
        if num_rows <= most:
            step = most // num_rows
            for first in range(0, self._num_tiles, step):
                yield slice(first, min(first + step, self._num_tiles)), slice(0, num_rows)
            return
        step = max(1, most // multiple) * multiple
        for tile in range(self._num_tiles):
            for first in range(0, num_rows, step):
                yield slice(tile, tile + 1), slice(first, min(first + step, num_rows))


def _num_rows(tiles: slice, rows: slice) -> int:
    count: int = (tiles.stop - tiles.start) * (rows.stop - rows.start)
    return count
