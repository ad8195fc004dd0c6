"""Towers over tiles: squares of one size, each a sequence of its own.

    pixels   [tiles, channels, size, size]
    tower    patches + positions, then layers in which the patches of a tile see each other
             (CLIP: Radford et al., 2021; SigLIP: Zhai et al., 2023)
    output   [tiles * embeds of a tile, hidden size of the language model]

An image has one tile, or several where its model cuts it up.
"""

from dataclasses import dataclass
from typing import Final

from worker.models.config_reader import ConfigReader
from worker.models.vision.spec import (
    CHANNELS,
    PROJECTOR,
    TOWER,
    VisionActivation,
    VisionSpec,
    read_activation,
    with_bias,
)

_LARGEST_SIDE: Final = 1 << 14


TileGrid = tuple[int, int]
"""Patches of a tile: rows and columns."""


@dataclass(frozen=True, kw_only=True)
class TowerRope:
    """Rotary positions by the row and the column of a patch (Pixtral: Agrawal et al., 2024).

    The first half of a head's pairs of numbers turns with the row, the second with the column.

    theta: base of the frequencies.
    alternates: whether rows and columns have the frequencies of a head in turn, beginning with the
        rows; else both have those that rows have then.
    interleaved_in: kinds of files in which the numbers of a pair are adjacent, as
        `HeadRows.rope_interleaved_in`.
    """

    theta: float
    alternates: bool = False
    interleaved_in: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TowerSpec:
    """A vision transformer with norms before attention and MLP.

    image_size: pixels of a side of the tiles that the table of positions is for, without a table
        of the largest square tile. Those behind the last whole patch are not read.
    has_class_token: CLIP: a token before the patches.
    has_first_norm: a norm behind the positions.
    has_patch_bias, has_biases: biases of the patches; of attention and MLP.
    has_rms_norms: RMSNorm instead of LayerNorm.
    is_gated: whether the MLP has a gate, to which the activation is applied.
    takes_other_sizes: tiles may be smaller or larger; a patch has the position that is at the same
        fraction of the side (Dehghani et al., Patch n' Pack, 2023).
    rope: in place of a table of positions. Tiles then have any sides, and together at most the
        patches of the largest.
    """

    image_size: int
    patch_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    norm_eps: float
    activation: VisionActivation
    has_class_token: bool = False
    has_first_norm: bool = False
    has_patch_bias: bool = True
    has_biases: bool = True
    has_rms_norms: bool = False
    is_gated: bool = False
    takes_other_sizes: bool = False
    rope: TowerRope | None = None

    @property
    def side(self) -> int:
        """Patches of a side of a tile of `image_size`."""
        return self.image_size // self.patch_size

    @property
    def grid(self) -> TileGrid:
        """The patches of a tile of `image_size`."""
        return self.side, self.side

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_numbers(self) -> int:
        """Numbers of the pixels of a patch."""
        return CHANNELS * self.patch_size**2

    def num_tokens(self, grid: TileGrid) -> int:
        """Return the tokens of a tile of these patches."""
        return grid[0] * grid[1] + self.has_class_token

    def weights(self, num_layers: int, has_last_norm: bool) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the weights of the lowest layers by name, without TOWER."""
        size, inner = self.hidden_size, self.intermediate_size
        patch = (size, CHANNELS, self.patch_size, self.patch_size)
        found: dict[str, tuple[int, ...]] = {"embeddings.patch_embedding.weight": patch}
        if self.has_patch_bias:
            found["embeddings.patch_embedding.bias"] = (size,)
        if self.rope is None:
            positions = self.num_tokens(self.grid)
            found["embeddings.position_embedding.weight"] = (positions, size)
        if self.has_class_token:
            found["embeddings.class_embedding"] = (size,)
        if self.has_first_norm:
            found |= self._norm("pre_layrnorm")
        for layer in range(num_layers):
            prefix = f"encoder.layers.{layer}."
            for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
                found |= with_bias(f"{prefix}self_attn.{name}", (size, size), self.has_biases)
            found |= self._norm(f"{prefix}layer_norm1") | self._norm(f"{prefix}layer_norm2")
            for name in ("gate", "fc1") if self.is_gated else ("fc1",):
                found |= with_bias(f"{prefix}mlp.{name}", (inner, size), self.has_biases)
            found |= with_bias(f"{prefix}mlp.fc2", (size, inner), self.has_biases)
        if has_last_norm:
            found |= self._norm("post_layernorm")
        return found

    def _norm(self, name: str) -> dict[str, tuple[int, ...]]:
        return with_bias(name, (self.hidden_size,), not self.has_rms_norms)


@dataclass(frozen=True, kw_only=True)
class PatchMerge:
    """An RMSNorm, then a product that makes a square of scale x scale patches one (Mistral 3)."""

    scale: int
    norm_eps: float


@dataclass(frozen=True, kw_only=True)
class MlpProjector:
    """Two products with an activation between them, for each patch (Liu et al., LLaVA-1.5, 2023).

    feature_layers: layers below each of the residuals that it reads side by side.
    drops_first_token: whether the first token of a tile, CLIP's class token, is left out.
    merge: what makes fewer patches of those of the tower, which has no class token then.
    """

    feature_layers: tuple[int, ...]
    drops_first_token: bool
    activation: VisionActivation
    bias: bool
    merge: PatchMerge | None = None

    @property
    def scale(self) -> int:
        """Patches of a side of the square that becomes a row of output."""
        return 1 if self.merge is None else self.merge.scale


@dataclass(frozen=True, kw_only=True)
class ShuffleProjector:
    """A product for each square of scale x scale patches, side by side (Idefics 3, 2024)."""

    scale: int


@dataclass(frozen=True, kw_only=True)
class PoolProjector:
    """The mean of each square of patches, an RMSNorm (1 + weight), and a product (Gemma 3, 2025).

    scale: patches of a side of a square.
    """

    scale: int


@dataclass(frozen=True, kw_only=True)
class TileSpec(VisionSpec):
    """A vision part over tiles.

    max_tiles: most tiles of an image.
    """

    tower: TowerSpec
    projector: MlpProjector | ShuffleProjector | PoolProjector
    max_tiles: int = 1

    @property
    def hidden_size(self) -> int:
        return self.tower.hidden_size

    @property
    def num_heads(self) -> int:
        return self.tower.num_heads

    @property
    def feature_layers(self) -> tuple[int, ...]:
        if isinstance(self.projector, MlpProjector):
            return self.projector.feature_layers
        return (self.tower.num_layers,)

    @property
    def num_layers(self) -> int:
        """Layers of the tower that are computed."""
        return max(self.feature_layers)

    @property
    def has_last_norm(self) -> bool:
        """Whether the projector reads the norm of the residual."""
        return not isinstance(self.projector, MlpProjector)

    def embeds_per_tile(self, grid: TileGrid) -> int:
        """Return the rows of output of a tile of these patches."""
        scale, num_extra = self.projector.scale, 0
        if isinstance(self.projector, MlpProjector):
            num_extra = self.tower.has_class_token - self.projector.drops_first_token
        return (grid[0] // scale) * (grid[1] // scale) + num_extra

    def is_tile(self, height: int, width: int) -> bool:
        """Return whether a tile may have these sides, in pixels."""
        tower, scale = self.tower, self.projector.scale
        rows, columns = height // tower.patch_size, width // tower.patch_size
        if tower.rope is None and not (
            height == width and (width == tower.image_size or tower.takes_other_sizes)
        ):
            return False
        return min(rows, columns) >= scale and not rows % scale and not columns % scale

    @property
    def most_tokens(self) -> int:
        return self.max_tiles * self.tower.num_tokens(self.tower.grid)

    @property
    def max_embeds(self) -> int:
        return self.max_tiles * self.embeds_per_tile(self.tower.grid)

    def weights(self) -> dict[str, tuple[int, ...]]:
        tower, out = self.tower, self.output_size
        size = tower.hidden_size
        found = tower.weights(self.num_layers, self.has_last_norm)
        projector: dict[str, tuple[int, ...]]
        match self.projector:
            case MlpProjector(feature_layers=layers, bias=bias, merge=merge):
                projector = with_bias("linear_1", (out, size * len(layers)), bias)
                projector |= with_bias("linear_2", (out, out), bias)
                if merge is not None:
                    projector["norm.weight"] = (size,)
                    merged = "patch_merger.merging_layer.weight"
                    projector[merged] = (size, size * merge.scale**2)
            case ShuffleProjector(scale=scale):
                projector = {"modality_projection.proj.weight": (out, size * scale**2)}
            case PoolProjector():
                projector = {
                    "mm_input_projection_weight": (size, out),
                    "mm_soft_emb_norm.weight": (size,),
                }
        return {
            **{TOWER + name: shape for name, shape in found.items()},
            **{PROJECTOR + name: shape for name, shape in projector.items()},
        }

    def is_unused(self, name: str) -> bool:
        """Return whether files may have a tensor of this name that nothing reads.

        Layers above the last one that is read, norms and pooling behind it, and tables of indices.
        """
        own = name.removeprefix(TOWER)
        if own.startswith("encoder.layers."):
            number = own.split(".")[2]
            return number.isdigit() and self.num_layers <= int(number) < self.tower.num_layers
        return own.startswith(("head.", "post_layernorm.", "embeddings.position_ids"))

    @property
    def patch_numbers(self) -> int:
        return self.tower.patch_numbers

    @property
    def inner_numbers(self) -> int:
        return (2 if self.tower.is_gated else 1) * self.tower.intermediate_size

    @property
    def output_flops(self) -> int:
        size, out = self.tower.hidden_size, self.output_size
        match self.projector:
            case MlpProjector(feature_layers=layers, merge=merge):
                merging = 0 if merge is None else (merge.scale * size) ** 2
                return 2 * ((size * len(layers) + out) * out + merging)
            case ShuffleProjector(scale=scale):
                return 2 * scale**2 * size * out
            case PoolProjector():
                return 2 * size * out

    @property
    def mixing_flops(self) -> int:
        size, of_mlp = self.tower.hidden_size, 3 if self.tower.is_gated else 2
        return 2 * size * (size + of_mlp * self.tower.intermediate_size)

    def activation_bytes(self, itemsize: int, attention_numbers: int) -> int:
        """Return what `VisionSpec` counts, and cosines and sines of rotary positions."""
        of_token = 0 if self.tower.rope is None else 4 * self.tower.head_dim
        return super().activation_bytes(itemsize, attention_numbers) + self.most_tokens * of_token

    def unit_bytes(self, itemsize: int, num_rows: int) -> int:
        """Return the bytes of the results of the products of this many tokens, at most."""
        tower, rows = self.tower, min(num_rows, self.most_tokens)
        of_mlp = (3 if tower.is_gated else 2) * tower.intermediate_size
        widest = max(of_mlp, 2 * tower.patch_numbers) + 4 * tower.hidden_size
        of_rotation = 0 if tower.rope is None else self.rotation_bytes(itemsize, num_rows)
        return max(itemsize * rows * widest, of_rotation)

    @property
    def pixel_bytes(self) -> int:
        """Return the bytes of the pixels of the largest image."""
        return 4 * self.max_tiles * CHANNELS * self.tower.image_size**2


def read_tower(
    config: ConfigReader, *, has_class_token: bool = False, takes_other_sizes: bool = False
) -> TowerSpec:
    """Return the tower of CLIP, which has a class token, or of SigLIP by its configuration.

    Raises ModelError for sizes that do not fit each other and for an unknown activation.
    """
    config.must_be("num_channels", CHANNELS)
    size, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if size % heads:
        raise config.refusal(
            "num_attention_heads", heads, f"heads must divide hidden_size = {size}"
        )
    patch = config.integer("patch_size", most=_LARGEST_SIDE)
    image = config.integer("image_size", least=patch, most=_LARGEST_SIDE)
    return TowerSpec(
        image_size=image,
        patch_size=patch,
        hidden_size=size,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=config.integer("num_hidden_layers"),
        num_heads=heads,
        norm_eps=config.number("layer_norm_eps", 1e-6),
        activation=read_activation(config, "hidden_act"),
        has_class_token=has_class_token,
        has_first_norm=has_class_token,
        has_patch_bias=not has_class_token,
        takes_other_sizes=takes_other_sizes,
    )


def feature_layers(
    config: ConfigReader, key: str, num_layers: int, default: int
) -> tuple[int, ...]:
    """Return the layers below the residuals that a key selects, by a number or a list of them.

    0 is the residual before the first layer; negative ones count from the last, -1.
    """
    value = config.get(key)
    values = [default] if value is None else value if isinstance(value, list) else [value]
    if not values or any(
        type(each) is not int or not -num_layers - 1 <= each <= num_layers for each in values
    ):
        raise config.refusal(key, value, f"numbers from {-num_layers - 1} to {num_layers}")
    return tuple(each % (num_layers + 1) for each in values)
