"""Computes a vision part: pixels of an image to rows that take the place of token embeddings.

An image is encoded in many small units, each a range of rows in a stage of a layer:

    patches    pixels of the rows, their product, positions
    keys       norm, queries, keys and values of the rows                       for each layer
    attention  of the rows to what they see                                     for each layer
    mixing     its product, MLP, right after the attention of these rows        for each layer
    outputs    the projector's rows

`Encoding.advance` computes some of them, so a step may stop anywhere. The units are the same
however they are divided into slices, and so are all bits of the output, as long as the number of
threads does not change. A unit has rows of one tile, or whole tiles where these are small.

tiles.py and grids.py have the two kinds of encoders.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Protocol

import torch

from worker.attention.backend import Rotation
from worker.layers.linear import Linear
from worker.layers.norm import Norm
from worker.layers.tower_attention import TileHeads, TowerAttention
from worker.models.layer_device import LayerDevice
from worker.models.rotary import rotate
from worker.models.vision.spec import VisionActivation, VisionSpec

_UNIT_BYTES: Final = 384
"""Bytes of a number of each row of a unit on a device whose results are there when a call returns:
192 rows of bfloat16, 96 of float32. Enough for products and attention to be fast, and some ten
milliseconds of two cores."""
_UNIT_TOKENS: Final = 4096
"""Tokens of a tile up to which a unit has these rows; with more, of which each row sees all, it has
fewer, so that its attention takes no longer."""
_LEAST_ROWS: Final = 16
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

    def norm(self, name: str, eps: float) -> Norm:
        """Read the LayerNorm NAME.weight, NAME.bias, or without a bias the RMSNorm."""
        ...

    def centred_rms_norm(self, name: str, eps: float) -> Norm:
        """Read the RMSNorm that multiplies by 1 + NAME.weight."""
        ...


class Pixels(Protocol):
    """Pixels of an image, float32 of four dimensions: a tensor, or as one in a file.

    A unit reads the part that it needs. Raises OSError or ValueError if it cannot be read.
    """

    @property
    def shape(self) -> Sequence[int]:
        """The size of each dimension."""
        ...

    def __getitem__(self, part: tuple[slice, ...], /) -> torch.Tensor:
        """Read a part: a range of each dimension."""
        ...


def unit_rows(device: LayerDevice, dtype: torch.dtype) -> int:
    """Return the rows of a unit on a device. dtype: of activations."""
    return _UNIT_BYTES // dtype.itemsize if device.has_results else _ALL_ROWS


def tower_attention(spec: VisionSpec, dtype: torch.dtype, device: LayerDevice) -> TowerAttention:
    """Return the attention of a vision part's layers on a device."""
    return device.tower_attention(spec.num_heads, spec.hidden_size // spec.num_heads, dtype)


def vision_activation(
    name: VisionActivation, device: LayerDevice, is_gated: bool = False
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return an activation. is_gated: of | gate | up |, the gate's times up."""
    plain: Callable[[torch.Tensor], torch.Tensor]
    match name:
        case "quick_gelu":
            plain = _quick_gelu
        case "relu":
            plain = torch.relu
        case _:
            return device.gate(name, is_gated)
    if not is_gated:
        return plain

    def times_up(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return plain(gate) * up

    return times_up


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(_QUICK * x)


@dataclass(frozen=True, slots=True)
class Layout:
    """How the tokens of an image lie in a tower.

    num_tiles, num_tokens: tiles, whose tokens do not see those of others, and tokens of each.
    num_embeds: rows of output of each tile. rows_per_line: units of these begin at its multiples.
    windows: where the windows of a tile begin, and the number of tokens: in layers with windows a
        token sees those of its own. Empty without such layers.
    rotations: of queries and keys, float32 [num_tokens, 2, size of a head / 2]; None: none.
    embed_order: int64 [num_embeds], places of the rows of a tile; None: in their order.
    places: row and column of each patch, int64 [num_tokens, 2]. sides: rows and columns of patches.
    """

    num_tiles: int
    num_tokens: int
    num_embeds: int
    rows_per_line: int = 1
    windows: Sequence[int] = ()
    rotations: Rotation | None = None
    embed_order: torch.Tensor | None = None
    places: torch.Tensor | None = None
    sides: tuple[int, int] = (0, 0)


class TowerLayer:
    """A layer of a tower with its weights.

    norms: before attention and MLP. qkv: to query, key and value heads. out: of the attention.
    inner, activation, down: the MLP. has_windows: tokens see those of their own window only.
    """

    def __init__(
        self,
        norms: Sequence[Norm],
        qkv: Linear,
        out: Linear,
        inner: Linear,
        activation: Callable[[torch.Tensor], torch.Tensor],
        down: Linear,
        has_windows: bool = False,
    ) -> None:
        self.has_windows = has_windows
        self._norm1, self._norm2 = norms
        self._qkv, self._out, self._inner, self._down = qkv, out, inner, down
        self._activation = activation

    def compute_keys(
        self,
        residual: torch.Tensor,
        heads: TileHeads,
        tiles: slice,
        rows: slice,
        rotations: Rotation | None,
    ) -> None:
        """Give `heads` the queries, keys and values of these rows [tiles, rows, hidden].

        rotations: of a tile; None: of none.
        """
        own = residual[tiles, rows].flatten(0, 1)
        qkv = self._qkv(self._norm1(own))
        if rotations is not None:
            turned = qkv[:, : 2 * own.shape[1]].view(len(own), -1, 2 * rotations.shape[2])
            of_rows = rotations[rows].repeat(tiles.stop - tiles.start, 1, 1)
            turned.copy_(rotate(turned, of_rows))
        heads.write(tiles, rows, qkv)

    def attend(
        self, heads: TileHeads, tiles: slice, rows: slice, windows: Sequence[int]
    ) -> torch.Tensor:
        """Return the attention of rows to what they see; `heads` has all rows of their tiles.

        windows: as in Layout.
        """
        return heads.attend(tiles, rows, windows if self.has_windows else ())

    def mix(self, residual: torch.Tensor, tiles: slice, rows: slice, mixed: torch.Tensor) -> None:
        """Add the product of the attention, and the MLP, to rows [tiles, rows, hidden]."""
        own = residual[tiles, rows].view(-1, residual.shape[-1])
        own.copy_(self._out.add_to(own, mixed))
        own.copy_(self._down.add_to(own, self._activation(self._inner(self._norm2(own)))))


class VisionEncoder(ABC):
    """The vision part of a model with its weights.

    spec: its arithmetic. dtype: of weights, activations and output. max_embeds: most rows of output
    of an image. layers: of the tower, those that are computed.
    """

    def __init__(
        self, spec: VisionSpec, weights: VisionWeights, layers: Sequence[TowerLayer]
    ) -> None:
        self.spec = spec
        self.dtype = weights.dtype
        self.max_embeds = spec.max_embeds
        self.device = weights.device.torch_device
        self.unit_rows = unit_rows(weights.device, weights.dtype)
        self.attention = tower_attention(spec, weights.dtype, weights.device)
        self.layers = list(layers)

    def begin(self, pixels: Pixels, grid: tuple[int, ...] = ()) -> "Encoding":
        """Return the encoding of an image, of which nothing is computed yet.

        pixels: as the image processor makes them; they must stay as they are until the output is
        complete. grid: as in MultiModalFeature. Raises ValueError for pixels of a shape
        that the model does not take.
        """
        return Encoding(self, pixels, self.layout(pixels, grid))

    @abstractmethod
    def layout(self, pixels: Pixels, grid: tuple[int, ...]) -> Layout:
        """Return how the tokens of an image lie in the tower. The arguments are as in `begin`."""

    @abstractmethod
    def write_patches(
        self,
        pixels: Pixels,
        layout: Layout,
        tiles: slice,
        rows: slice,
        residual: torch.Tensor,
    ) -> None:
        """Write the residual [tiles, rows, hidden] before the first layer, of these rows."""

    @abstractmethod
    def project(
        self, features: Sequence[torch.Tensor], layout: Layout, rows: slice
    ) -> torch.Tensor:
        """Return rows of output of tiles, [tiles * rows, numbers of a row].

        features: of these tiles, [tiles, tokens, hidden], the residuals of `spec.feature_layers`.
        """


class Encoding:
    """An image that is being encoded; it holds what was computed so far.

    num_embeds: rows of its output.
    """

    def __init__(self, encoder: VisionEncoder, pixels: Pixels, layout: Layout) -> None:
        self._encoder = encoder
        self._layout = layout
        self.num_embeds = layout.num_tiles * layout.num_embeds
        spec, num_rows = encoder.spec, layout.num_tiles * layout.num_tokens
        widest = max((end - first for first, end in pairwise(layout.windows)), default=0)
        self._attention_flops = [
            spec.attention_flops(widest if layer.has_windows else layout.num_tokens)
            for layer in encoder.layers
        ]
        of_layers = len(encoder.layers) * (spec.key_flops + spec.mixing_flops)
        of_token = spec.patch_flops + of_layers + sum(self._attention_flops)
        self._total = num_rows * of_token + self.num_embeds * spec.output_flops
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

    def close(self) -> None:
        """End an encoding that will not be completed: what it holds is freed with it."""
        self._work.close()

    @property
    def output(self) -> torch.Tensor:
        """Rows [num_embeds, numbers of a row] in the encoder's dtype, once all work is done."""
        assert self._done == self._total, "the image is not encoded yet"
        return self._output

    def _compute(self, pixels: Pixels) -> Generator[int, None, None]:
        """Compute the units in their order; yield the FLOPs of each, about."""
        encoder, spec, layout = self._encoder, self._encoder.spec, self._layout
        size, dtype, device = spec.hidden_size, encoder.dtype, encoder.device
        shape = layout.num_tiles, layout.num_tokens
        residual = torch.empty(*shape, size, dtype=dtype, device=device)
        heads = encoder.attention.tiles(*shape, dtype, device)
        output_shape = layout.num_tiles, layout.num_embeds, spec.row_numbers
        output = torch.empty(*output_shape, dtype=dtype, device=device)
        self._output = output.flatten(0, 1)
        blocks = list(self._blocks(layout.num_tokens, 1))
        for tiles, rows in blocks:
            encoder.write_patches(pixels, layout, tiles, rows, residual[tiles, rows])
            yield spec.patch_flops * _num_rows(tiles, rows)
        features: dict[int, torch.Tensor] = {}
        for number, layer in enumerate(encoder.layers):
            if number in spec.feature_layers:
                features[number] = residual.clone()
            for tiles, rows in blocks:
                layer.compute_keys(residual, heads, tiles, rows, layout.rotations)
                yield spec.key_flops * _num_rows(tiles, rows)
            for tiles, rows in blocks:
                mixed = layer.attend(heads, tiles, rows, layout.windows)
                yield self._attention_flops[number] * _num_rows(tiles, rows)
                layer.mix(residual, tiles, rows, mixed)
                yield spec.mixing_flops * _num_rows(tiles, rows)
        features[len(encoder.layers)] = residual
        read = [features[number] for number in spec.feature_layers]
        order = layout.embed_order
        for tiles, rows in self._blocks(layout.num_embeds, layout.rows_per_line):
            projected = encoder.project([each[tiles] for each in read], layout, rows)
            places = rows if order is None else order[rows]
            output[tiles, places] = projected.view(-1, rows.stop - rows.start, spec.row_numbers)
            yield spec.output_flops * _num_rows(tiles, rows)

    def _blocks(self, num_rows: int, multiple: int) -> Iterator[tuple[slice, slice]]:
        """Yield tiles and rows of them, all of the image's, about unit_rows at a time.

        num_rows: of a tile. Rows of a part of a tile begin and end at multiples of `multiple`.
        """
        most, num_tiles = self._encoder.unit_rows, self._layout.num_tiles
        if self._layout.num_tokens > _UNIT_TOKENS:
            fewer = most * _UNIT_TOKENS // self._layout.num_tokens
            most = min(most, max(fewer, _LEAST_ROWS))
        if num_rows <= most:
            step = most // num_rows
            for first in range(0, num_tiles, step):
                yield slice(first, min(first + step, num_tiles)), slice(0, num_rows)
            return
        step = max(1, most // multiple) * multiple
        for tile in range(num_tiles):
            for first in range(0, num_rows, step):
                yield slice(tile, tile + 1), slice(first, min(first + step, num_rows))


def _num_rows(tiles: slice, rows: slice) -> int:
    count: int = (tiles.stop - tiles.start) * (rows.stop - rows.start)
    return count
