"""Towers over the patches of an image of any size (Wang et al., Qwen2-VL, 2024; Qwen2.5-VL, 2025).

    pixels   [rows * columns, channels, patch, patch]; the patches of a square follow each other:

                 0  1 | 4  5          squares of 2 x 2, which become a row of output each
                 2  3 | 6  7

    tower    patches, with a table of positions (Qwen3-VL) or without, then layers that rotate
             queries and keys: half of a head by the row of a patch, half by its column
    output   for each square one row, and for DeepStack more of them, side by side

In Qwen2.5-VL most layers have windows: the patches of a square of the image see each other.
"""

import math
from dataclasses import dataclass, replace
from typing import Final, Literal, Self

from proto.errors import ModelError, shown
from worker.models.config_reader import ConfigReader
from worker.models.rope import mrope_axes
from worker.models.vision.spec import (
    CHANNELS,
    TOWER,
    VisionActivation,
    VisionConfig,
    VisionSpec,
    read_activation,
    with_bias,
)

_FLOAT32: Final = 4
_PLACE_BYTES: Final = 16
"""Of row and column of a patch."""
_TAP_VECTORS: Final = 14
"""Vectors of a patch while its position is interpolated between four: these twice, and results."""
_MAX_ASPECT_RATIO: Final = 200
"""Of images; the image processor refuses longer ones."""
_DEFAULT_PIXELS: Final = (56 * 56, 28 * 28 * 1280)
"""Least and most pixels of an image where the settings of the image processor leave them out."""
_THETA: Final = 10_000.0


@dataclass(frozen=True, kw_only=True)
class GridSpec(VisionSpec):
    """A vision part over the grid of an image.

    patch_size: pixels of a side. frames: how often the product of a patch reads its pixels.
    patch_bias: of this product. merge: patches of a side of the square that becomes a row.
    depth, size, heads: layers of the tower, numbers of a token, heads of a layer.
    norm: before attention and MLP. mlp: products of the MLP by name; three with a gate.
    theta: base of the rotary frequencies of rows and columns.
    window: patches of a side of the windows of layers that are not in full_layers; 0: none.
    position_side: rows and columns of the table of positions, between which those of other grids
        are interpolated; 0 without a table.
    merger: the names of the merger's norm and of its two products.
    stacked_layers: of DeepStack, layers whose outputs are merged for the first layers of the
        language model.
    most_embeds: rows of output of the largest image.
    """

    patch_size: int
    frames: int
    patch_bias: bool
    merge: int
    depth: int
    size: int
    heads: int
    norm: Literal["rms", "layer"]
    mlp: tuple[str, ...]
    intermediate_size: int
    activation: VisionActivation
    merger: tuple[str, str, str]
    most_embeds: int
    theta: float = _THETA
    window: int = 0
    full_layers: tuple[int, ...] = ()
    position_side: int = 0
    stacked_layers: tuple[int, ...] = ()

    @property
    def mrope_merge(self) -> int:
        return self.merge

    @property
    def hidden_size(self) -> int:
        return self.size

    @property
    def num_heads(self) -> int:
        return self.heads

    @property
    def head_size(self) -> int:
        return self.size // self.num_heads

    @property
    def is_gated(self) -> bool:
        """Whether the MLP has a gate."""
        return len(self.mlp) == 3

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The last one, then those below the residuals after the layers of DeepStack."""
        return (self.depth, *(layer + 1 for layer in self.stacked_layers))

    @property
    def row_numbers(self) -> int:
        return self.output_size * len(self.feature_layers)

    @property
    def most_tokens(self) -> int:
        return self.most_embeds * self.merge**2

    @property
    def max_embeds(self) -> int:
        return self.most_embeds

    def at_most(self, num_embeds: int) -> Self:
        return replace(self, most_embeds=min(self.most_embeds, num_embeds))

    @property
    def mergers(self) -> list[tuple[str, int]]:
        """The prefix of the names of each merger, and the numbers that its norm joins."""
        stacked = range(len(self.stacked_layers))
        joined = self.size * self.merge**2
        return [
            (f"{TOWER}merger.", self.size),
            *((f"{TOWER}deepstack_merger_list.{index}.", joined) for index in stacked),
        ]

    def weights(self) -> dict[str, tuple[int, ...]]:
        size, inner = self.size, self.intermediate_size
        patch = (size, CHANNELS, self.frames, self.patch_size, self.patch_size)
        patches = with_bias("patch_embed.proj", patch)
        if not self.patch_bias:
            del patches["patch_embed.proj.bias"]
        found = patches
        if self.position_side:
            found["pos_embed.weight"] = (self.position_side**2, size)
        for layer in range(self.depth):
            prefix = f"blocks.{layer}."
            found |= self._norm(f"{prefix}norm1", size) | self._norm(f"{prefix}norm2", size)
            found |= with_bias(f"{prefix}attn.qkv", (3 * size, size))
            found |= with_bias(f"{prefix}attn.proj", (size, size))
            for name in self.mlp[:-1]:
                found |= with_bias(f"{prefix}mlp.{name}", (inner, size))
            found |= with_bias(f"{prefix}mlp.{self.mlp[-1]}", (size, inner))
        named = {TOWER + name: shape for name, shape in found.items()}
        joined = size * self.merge**2
        norm, first, second = self.merger
        for prefix, normed in self.mergers:
            named |= self._norm(prefix + norm, normed)
            named |= with_bias(prefix + first, (joined, joined))
            named |= with_bias(prefix + second, (self.output_size, joined))
        return named

    def _norm(self, name: str, size: int) -> dict[str, tuple[int, ...]]:
        return with_bias(name, (size,)) if self.norm == "layer" else {f"{name}.weight": (size,)}

    @property
    def patch_numbers(self) -> int:
        return CHANNELS * self.frames * self.patch_size**2

    @property
    def inner_numbers(self) -> int:
        return self.intermediate_size * (len(self.mlp) - 1)

    @property
    def output_flops(self) -> int:
        joined = self.size * self.merge**2
        return 2 * joined * (joined + self.output_size) * len(self.feature_layers)

    @property
    def mixing_flops(self) -> int:
        return 2 * self.size * (self.size + self.intermediate_size * len(self.mlp))

    def activation_bytes(self, itemsize: int, attention_numbers: int) -> int:
        """Return what `VisionSpec` counts, and the rotations and places of all patches."""
        of_patch = self.head_size * _FLOAT32 + _PLACE_BYTES
        return super().activation_bytes(itemsize, attention_numbers) + self.most_tokens * of_patch

    def unit_bytes(self, itemsize: int, num_rows: int) -> int:
        """Return the most of what `VisionSpec` counts, rotations, and interpolated positions."""
        most = max(super().unit_bytes(itemsize, num_rows), self.rotation_bytes(itemsize, num_rows))
        if not self.position_side:
            return most
        rows = min(num_rows, self.most_tokens)
        return max(most, _FLOAT32 * rows * (_TAP_VECTORS * self.size + self.patch_numbers))

    @property
    def pixel_bytes(self) -> int:
        return _FLOAT32 * self.most_tokens * CHANNELS * self.patch_size**2


def read_grid(
    config: VisionConfig,
    *,
    interleaved: bool,
    norm: Literal["rms", "layer"],
    mlp: tuple[str, ...],
    merger: tuple[str, str, str],
    patch_bias: bool,
    size: str = "hidden_size",
    output: str = "out_hidden_size",
    intermediate: int | None = None,
    window: int = 0,
    full_layers: tuple[int, ...] = (),
    position_side: int = 0,
    stacked_layers: tuple[int, ...] = (),
) -> GridSpec:
    """Return the vision part of a configuration.

    interleaved: how the language model's dimensions are divided among the three positions of an
    image's tokens. size, output: keys of the sizes of the tower and of its output. intermediate:
    of the MLP, None for that of the configuration. Other arguments as in GridSpec.
    Raises ModelError for settings that do not fit each other or are not supported.
    """
    tower = config.tower
    tower.must_be("in_channels", CHANNELS)
    hidden, heads = tower.integer(size), tower.integer("num_heads")
    if hidden % (4 * heads):
        raise tower.refusal(
            "num_heads", heads, f"{size} = {hidden} must be a multiple of 4 times it"
        )
    if tower.get(output) != config.output_size:
        reason = f"the language model has hidden_size = {config.output_size}"
        raise tower.refusal(output, tower.get(output), reason)
    rope = ConfigReader(tower.mapping("rope_parameters"), "config.json: rope_parameters")
    rope.must_be("rope_type", "axial")
    _check_mrope(config, interleaved)
    patch, merge = tower.integer("patch_size", most=1 << 10), tower.integer("spatial_merge_size")
    frames = tower.integer("temporal_patch_size", most=16)
    for key, value in (("patch_size", patch), ("merge_size", merge)):
        config.images.must_be(key, value)
    config.images.must_be("temporal_patch_size", frames)
    return GridSpec(
        architecture=config.architecture,
        output_size=config.output_size,
        patch_size=patch,
        frames=frames,
        patch_bias=patch_bias,
        merge=merge,
        depth=tower.integer("depth"),
        size=hidden,
        heads=heads,
        norm=norm,
        mlp=mlp,
        intermediate_size=intermediate or tower.integer("intermediate_size"),
        activation=read_activation(tower, "hidden_act"),
        merger=merger,
        most_embeds=_most_embeds(config.images, patch * merge),
        theta=rope.number("rope_theta", _THETA),
        window=window,
        full_layers=full_layers,
        position_side=position_side,
        stacked_layers=stacked_layers,
    )


def layer_numbers(config: ConfigReader, key: str) -> tuple[int, ...]:
    """Return the numbers of layers of a tower that a key lists."""
    values, depth = config.get(key), config.integer("depth")
    if not isinstance(values, list) or not all(
        type(each) is int and 0 <= each < depth for each in values
    ):
        raise config.refusal(key, values, f"numbers of the {depth} layers are needed")
    return tuple(values)


def _check_mrope(config: VisionConfig, interleaved: bool) -> None:
    """Raise ModelError unless the language model rotates by three positions in the model's way."""
    text = config.text
    key = "rope_scaling" if text.mapping("rope_scaling") else "rope_parameters"
    rope = ConfigReader(text.mapping(key), f"config.json: {key}")
    axes = mrope_axes(rope)
    if not axes:
        raise rope.refusal("mrope_section", None, "images need it")
    head = text.integer(
        "head_dim", text.integer("hidden_size") // text.integer("num_attention_heads")
    )
    factor = text.number("partial_rotary_factor", 1.0)  # of GGUF files
    factor = rope.number("partial_rotary_factor", factor)
    if len(axes) != int(head * factor) // 2:
        reason = f"{int(head * factor) // 2} frequencies rotate"
        raise rope.refusal("mrope_section", rope.get("mrope_section"), reason)
    if rope.flag("mrope_interleaved", False) != interleaved:
        value = rope.get("mrope_interleaved")
        raise rope.refusal("mrope_interleaved", value, f"{interleaved} is supported")


def _most_embeds(images: ConfigReader, side: int) -> int:
    """Return the rows of output of the largest image.

    The image processor scales an image to at most `longest_edge` pixels and at least
    `shortest_edge`, and its sides to multiples of `side`: down in the first case, up in the second.
    A side is never shorter than one of these.
    """
    edges = images.mapping("size")
    given = []
    for key, edge, default in zip(
        ("min_pixels", "max_pixels"),
        ("shortest_edge", "longest_edge"),
        _DEFAULT_PIXELS,
        strict=True,
    ):
        value = images.get(key)
        value = edges.get(edge, default) if value is None else value
        if type(value) is not int or not 0 < value < 1 << 40:
            raise ModelError(f"preprocessor_config.json: {edge} = {shown(repr(value))}")
        given.append(value)
    least, most = given
    ratio = math.sqrt(_MAX_ASPECT_RATIO)
    line = math.isqrt(_MAX_ASPECT_RATIO * most) // side + 1
    enlarged = (math.sqrt(least) * ratio / side + 1) * (math.sqrt(least) / ratio / side + 1)
    return max(most // side**2, line, math.ceil(enlarged))
