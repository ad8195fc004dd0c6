"""The arithmetic of a vision part: a tower over the patches of an image, and a projector behind it.

    pixels   of patches
    tower    patches + positions, then layers in which they see each other
             (Dosovitskiy et al., 2020)
    output   [rows, hidden size of the language model]

tile_spec.py and grid_spec.py have the two kinds of towers. Families (llava.py and its neighbours)
make a VisionSpec of a configuration; encoder.py computes it. Without torch: `deploy` reads it, too.
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Self

from proto.messages.prepared_model import VISION_PREFIX
from worker.models.config_reader import ConfigReader

TOWER: Final = f"{VISION_PREFIX}tower."
PROJECTOR: Final = f"{VISION_PREFIX}projector."
"""How the names of a vision part's tensors begin in a prepared folder."""
_PARTS: Final = (
    (re.compile(r"(?:model\.)?(?:vision_tower|vision_model)\.(?:vision_model\.)?"), TOWER),
    (re.compile(r"(?:model\.)?visual\."), TOWER),
    (re.compile(r"(?:model\.)?(?:multi_modal_projector|connector)\."), PROJECTOR),
)
"""How names begin in folders of any version of transformers, and what that becomes."""
PART_MARK: Final = "/"
"""Where a file divides a tensor, its parts are NAME/0, NAME/1 and so on in a prepared folder."""
TOWER_KEY: Final = "vision_config"
SETTINGS_KEY: Final = "vision_projector"
"""Keys of a prepared config.json: the tower's configuration, and settings beside it."""

VisionActivation = Literal["gelu", "gelu_tanh", "quick_gelu", "silu", "relu"]
ACTIVATIONS: Final[dict[str, VisionActivation]] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
"""Activations by their names in configurations. quick_gelu: x * sigmoid(1.702 x)."""
CHANNELS: Final = 3


@dataclass(frozen=True, kw_only=True)
class VisionSpec(ABC):
    """The vision part of a model.

    architecture: of the whole model. output_size: the hidden size of the language model.
    is_bidirectional: as in VisionFacts.
    """

    architecture: str
    output_size: int
    is_bidirectional: bool = False

    @property
    def mrope_merge(self) -> int:
        """As in VisionFacts."""
        return 0

    @property
    @abstractmethod
    def hidden_size(self) -> int:
        """Numbers of a token in the tower."""

    @property
    @abstractmethod
    def num_heads(self) -> int:
        """Heads of a layer of the tower."""

    @property
    @abstractmethod
    def feature_layers(self) -> tuple[int, ...]:
        """Layers below each of the residuals that the projector reads, in its order."""

    @property
    def row_numbers(self) -> int:
        """Numbers of a row of output."""
        return self.output_size

    @property
    @abstractmethod
    def most_tokens(self) -> int:
        """Tokens of the tower for the largest image."""

    @property
    @abstractmethod
    def max_embeds(self) -> int:
        """Most rows of output of an image."""

    def at_most(self, num_embeds: int) -> Self:
        """Return the spec for images of at most that many rows, where images differ."""
        return self

    @abstractmethod
    def weights(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every weight that is read, by its name in a prepared folder."""

    def is_unused(self, name: str) -> bool:
        """Return whether files may have a tensor of this name that nothing reads."""
        return False

    @property
    @abstractmethod
    def patch_numbers(self) -> int:
        """Numbers that the product of a patch reads."""

    @property
    @abstractmethod
    def inner_numbers(self) -> int:
        """Numbers of a token within the MLP, those of a gate included."""

    @property
    @abstractmethod
    def output_flops(self) -> int:
        """FLOPs of the projector for a row of output, about."""

    @property
    def patch_flops(self) -> int:
        """FLOPs of the product of a patch."""
        return 2 * self.patch_numbers * self.hidden_size

    @property
    def key_flops(self) -> int:
        """FLOPs of queries, keys and values of a token in a layer."""
        return 6 * self.hidden_size**2

    def attention_flops(self, num_seen: int) -> int:
        """Return the FLOPs of a layer's attention for a token that sees this many."""
        return 4 * self.hidden_size * num_seen

    @property
    @abstractmethod
    def mixing_flops(self) -> int:
        """FLOPs of the rest of a layer for a token, about."""

    def weight_bytes(self, itemsize: int) -> int:
        """Return the bytes of the weights. itemsize: bytes of a number."""
        return itemsize * sum(math.prod(shape) for shape in self.weights().values())

    def activation_bytes(self, itemsize: int, attention_numbers: int) -> int:
        """Return the bytes that encoding the largest image keeps between slices, but its output.

        Residuals that the projector reads, and what attention keeps of all tokens.
        attention_numbers: of each token.
        """
        numbers = len({*self.feature_layers}) * self.hidden_size + attention_numbers
        return itemsize * self.most_tokens * numbers

    def unit_bytes(self, itemsize: int, num_rows: int) -> int:
        """Return the bytes of the results of the products of this many tokens, at most."""
        rows = min(num_rows, self.most_tokens)
        widest = 2 * max(self.inner_numbers, self.patch_numbers) + 4 * self.hidden_size
        return itemsize * rows * widest

    def rotation_bytes(self, itemsize: int, num_rows: int) -> int:
        """Return the bytes for rotating queries and keys of this many tokens.

        Queries, keys and values with the norm before them; then queries and keys in float32, their
        halves, and these joined in float32 and in the dtype of the activations.
        """
        rows = min(num_rows, self.most_tokens)
        return rows * self.hidden_size * (6 * itemsize + 24)

    @property
    @abstractmethod
    def pixel_bytes(self) -> int:
        """Return the bytes of the pixels of the largest image."""

    def output_bytes(self, itemsize: int) -> int:
        """Return the bytes of the output of the largest image."""
        return itemsize * self.max_embeds * self.row_numbers


def with_bias(
    name: str, shape: tuple[int, ...], has_bias: bool = True
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a weight and of the bias that it may have."""
    weight = {f"{name}.weight": shape}
    return weight | {f"{name}.bias": shape[:1]} if has_bias else weight


@dataclass(frozen=True)
class VisionConfig:
    """What a family reads to make a VisionSpec.

    architecture: of the whole model. tower, settings: the values of TOWER_KEY and SETTINGS_KEY.
    text: config.json of the language model. images: settings of the image processor.
    """

    architecture: str
    tower: ConfigReader
    settings: ConfigReader
    text: ConfigReader
    images: ConfigReader

    @classmethod
    def of(
        cls, architecture: str, config: Mapping[str, Any], images: Mapping[str, Any]
    ) -> "VisionConfig":
        """Return what a prepared config.json and preprocessor_config.json say."""
        text = ConfigReader(config, "config.json")
        return cls(
            architecture,
            ConfigReader(text.mapping(TOWER_KEY), f"config.json: {TOWER_KEY}"),
            ConfigReader(text.mapping(SETTINGS_KEY), "config.json"),
            text,
            ConfigReader(images, "preprocessor_config.json"),
        )

    @property
    def output_size(self) -> int:
        return self.text.integer("hidden_size")


def read_activation(config: ConfigReader, key: str) -> VisionActivation:
    """Return the activation that a key names; raises ModelError for an unknown one."""
    name = config.get(key)
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise config.refusal(key, name, f"supported: {', '.join(map(repr, ACTIVATIONS))}")
    return ACTIVATIONS[name]


@dataclass(frozen=True, kw_only=True)
class GgufSettings:
    """What a GGUF file of a vision part means in a Hugging Face folder.

    projector: settings beside the tower. images, processor: of preprocessor_config.json and
    processor_config.json. tower: further keys of vision_config.
    tensor_name: returns the name that a tensor has in a prepared folder, None for an unknown one.
        None: names are those of CLIP.
    """

    projector: Mapping[str, Any]
    images: Mapping[str, Any]
    processor: Mapping[str, Any]
    tower: Mapping[str, Any] = field(default_factory=dict)
    tensor_name: Callable[[str], str | None] | None = None


@dataclass(frozen=True, kw_only=True)
class VisionGguf:
    """A kind of GGUF files of a family of vision parts, beside those of its language model.

    projector: value of clip.projector_type. architecture: of the whole model.
    texts: architectures of the language model's file. image_token: its token for a row of the
        output.
    settings: makes GgufSettings of the keys behind `clip.vision.`, the patches of a tile's side,
        and the patches of a side that become one row.
    merge: these patches, where a file does not say.
    markers: further keys of config.json that are token ids, and the texts of these tokens.
    is_marked: recognises the names of the tensors of this kind among those of others with the same
        projector; None if there are no others.
    """

    projector: str
    architecture: str
    texts: tuple[str, ...]
    image_token: str
    settings: Callable[[Mapping[str, Any], int, int], GgufSettings]
    merge: int = 4
    markers: Mapping[str, str] = field(default_factory=dict)
    is_marked: Callable[[Collection[str]], bool] | None = None


@dataclass(frozen=True, kw_only=True)
class VisionFamily:
    """What the file of a family of vision parts says of it, as FAMILY.

    models: architectures of config.json, and the models that have them, for people.
    tower_types: values of `model_type` in vision_config; empty for any. Others load as text.
    settings: keys of config.json beside the tower that the arithmetic reads.
    tensor_names: beginnings of names of a tower's tensors in a folder, as regular expressions, and
        what they become where a family does not have the names of CLIP.
    spec: returns the arithmetic; raises ModelError naming what is not supported.
    gguf: the kinds of its GGUF files that are supported.
    """

    models: Mapping[str, str]
    settings: tuple[str, ...]
    spec: Callable[[VisionConfig], VisionSpec]
    tower_types: tuple[str, ...] = ()
    tensor_names: Mapping[str, str] = field(default_factory=dict)
    gguf: tuple[VisionGguf, ...] = ()

    def prepared_name(self, name: str) -> str | None:
        """Return the name in a prepared folder of a tensor of a folder; None of another part.

        It is the same for all versions of transformers that wrote the file.
        """
        for pattern, prefix in _PARTS:
            if match := pattern.match(name):
                rest = name[match.end() :]
                return prefix + (self._name_in_tower(rest) if prefix == TOWER else rest)
        return None

    def _name_in_tower(self, name: str) -> str:
        for old, new in self.tensor_names.items():
            if match := re.match(old, name):
                return match.expand(new) + name[match.end() :]
        return name
