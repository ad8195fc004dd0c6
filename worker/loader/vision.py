"""Reads the vision part of a prepared model: its settings, its memory, its weights."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from proto.errors import ModelError
from proto.messages.prepared_model import PreparedModel, TensorEntry, TensorIndex
from worker.layers.adapters import AdapterTargets, EncoderLinear
from worker.layers.linear import Linear
from worker.layers.norm import Norm, NormWeight
from worker.loader.files import TensorFiles, entries_by_name, read_vision_index
from worker.models.layer_device import LayerDevice
from worker.models.parts import HeadRows, WeightSpec
from worker.models.registry import read_config
from worker.models.vision import vision_spec
from worker.models.vision.encoder import VisionEncoder, VisionWeights, tower_attention, unit_rows
from worker.models.vision.grid_spec import GridSpec
from worker.models.vision.grids import GridEncoder
from worker.models.vision.spec import PART_MARK, VisionSpec
from worker.models.vision.tile_spec import TileSpec
from worker.models.vision.tiles import TileEncoder

IMAGES_FILE: Final = "preprocessor_config.json"
_FRAME: Final = 2
"""Dimension of frames in the product of a patch."""
_TABLES: Final = ("position_embedding.weight", "pos_embed.weight")
"""How the names of tables of positions end, which no product reads."""


def read_vision_spec(prepared: PreparedModel) -> VisionSpec:
    """Return the vision part of a prepared model that has one; no weight is read.

    Images have at most the rows that the manifest says. Raises ModelError naming a setting that is
    not supported.
    """
    assert prepared.vision is not None
    path = Path(prepared.folder, IMAGES_FILE)
    try:
        images = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: {error}") from None
    spec = vision_spec(prepared.vision.architecture, read_config(prepared), images)
    return spec.at_most(prepared.vision.max_embeds)


@dataclass(frozen=True)
class VisionBytes:
    """Memory of a vision part on one rank, in bytes.

    weights: as they are loaded. pixels: of the largest image. activations: of that image while it
    is encoded, pixels and output not included. output: its rows. row_numbers: of one of these.
    """

    weights: int
    pixels: int
    activations: int
    output: int
    row_numbers: int


def vision_bytes(prepared: PreparedModel, dtype: torch.dtype, device: LayerDevice) -> VisionBytes:
    """Return the memory that `load_vision` and its encodings take; no weight is read.

    Raises ModelError as `read_vision_spec` does.
    """
    spec, size = read_vision_spec(prepared), dtype.itemsize
    attention = tower_attention(spec, dtype, device)
    return VisionBytes(
        spec.weight_bytes(size),
        spec.pixel_bytes,
        spec.activation_bytes(size, attention.numbers_per_token)
        + spec.unit_bytes(size, unit_rows(device, dtype)),
        spec.output_bytes(size),
        spec.row_numbers,
    )


def adapted_vision_weights(spec: VisionSpec) -> dict[str, WeightSpec]:
    """Return the weights of a vision part that adapters may change: those of its products.

    Not of a patch, which has more dimensions. A rank has all of them.
    """
    return {
        name: WeightSpec(name=name, shape=shape, hugging_face=name, gguf=name)
        for name, shape in spec.weights().items()
        if len(shape) == 2 and name.endswith(".weight") and not name.endswith(_TABLES)
    }


def load_vision(
    prepared: PreparedModel,
    dtype: torch.dtype,
    device: LayerDevice,
    adapters: AdapterTargets | None = None,
) -> VisionEncoder:
    """Load the vision part of a prepared model, whole on each rank.

    dtype: of weights and activations. adapters: gets its products, unless those of a device change
    nothing but layers of the language model; None for a model without adapters.
    Raises ModelError for a setting that is not supported, and
    for a tensor that is missing, unknown, of another shape or of a type that cannot be read.
    """
    spec = read_vision_spec(prepared)
    if adapters is not None and adapters.step.changes_layers_only:
        adapters = None
    weights = _FileWeights(prepared, spec, dtype, device, adapters)
    encoder: VisionEncoder
    if isinstance(spec, GridSpec):
        encoder = GridEncoder(spec, weights)
    else:
        assert isinstance(spec, TileSpec)
        encoder = TileEncoder(spec, weights)
    weights.release()
    return encoder


def _head_rows(spec: VisionSpec) -> HeadRows | None:
    """Return the order of the rows of rotating heads in files; None for that of this program."""
    if not isinstance(spec, TileSpec) or spec.tower.rope is None:
        return None
    tower = spec.tower
    return HeadRows(tower.head_dim, tower.head_dim, spec.tower.rope.interleaved_in)


def _parts_by_name(index: TensorIndex) -> dict[str, list[TensorEntry]]:
    """Return the entry of each tensor, or those of its parts in order."""
    found: dict[str, list[TensorEntry]] = {}
    for name, entry in sorted(entries_by_name(index).items()):
        found.setdefault(name.partition(PART_MARK)[0], []).append(entry)
    return found


def _stored_shape(parts: Sequence[TensorEntry], rank: int) -> tuple[int, ...]:
    """Return the shape of a tensor of this rank, joined of its parts; the first part's if they do
    not fit each other.

    Parts of the same rank have rows of it, others its numbers at a place of _FRAME.
    """
    first = parts[0].shape
    if len(parts) == 1:
        return first
    if len(first) == rank and all(each.shape[1:] == first[1:] for each in parts):
        return (sum(each.shape[0] for each in parts), *first[1:])
    if len(first) == rank - 1 and all(each.shape == first for each in parts):
        return (*first[:_FRAME], len(parts), *first[_FRAME:])
    return first


class _FileWeights(VisionWeights):
    """Reads the tensors of a vision part and builds layers of them."""

    def __init__(
        self,
        prepared: PreparedModel,
        spec: VisionSpec,
        dtype: torch.dtype,
        device: LayerDevice,
        adapters: AdapterTargets | None,
    ) -> None:
        self._adapters, self._adapted = adapters, adapted_vision_weights(spec)
        index = read_vision_index(prepared)
        self._files, self._parts = TensorFiles(index), _parts_by_name(index)
        self._format = index.format
        self._shapes, self._head_rows = spec.weights(), _head_rows(spec)
        self.dtype, self.device = dtype, device
        for name, shape in self._shapes.items():
            parts = self._parts.get(name)
            if parts is None:
                raise ModelError(f"tensor {name} of shape {list(shape)} is missing")
            stored = _stored_shape(parts, len(shape))
            if stored != shape:
                raise ModelError(
                    f"tensor {name} has shape {list(stored)}, "
                    f"the configuration asks for {list(shape)}"
                )
        unknown = [
            name for name in self._parts if name not in self._shapes and not spec.is_unused(name)
        ]
        if unknown:
            raise ModelError(
                f"tensor {unknown[0]} is no part of {spec.architecture} with this configuration "
                f"({len(unknown)} such tensors)"
            )

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Read a copy of a tensor onto the device. dtype: None for that of the weights."""
        parts = [self._files.read(each) for each in self._parts[name]]
        rank = len(self._shapes[name])
        whole = torch.cat(parts) if parts[0].dim() == rank else torch.stack(parts, dim=_FRAME)
        return whole.to(self.device.torch_device, dtype or self.dtype, copy=True)

    def linear(self, *names: str) -> Linear:
        weights = [self._rows(f"{name}.weight") for name in names]
        biases = [self.tensor(each) for name in names if (each := f"{name}.bias") in self._shapes]
        weight = torch.cat([each.flatten(1) for each in weights])
        linear = self.device.linear(weight, torch.cat(biases) if biases else None)
        product = tuple(f"{name}.weight" for name in names)
        if self._adapters is None or product[0] not in self._adapted:
            return linear
        self._adapters.add_products([product])
        return EncoderLinear(linear, self._adapters.step, self._adapters.number(product))

    def _rows(self, name: str) -> torch.Tensor:
        """Read the matrix of a product; of queries and keys in the order of rotating heads."""
        weight = self.tensor(name)
        if self._head_rows is None or not name.endswith((".q_proj.weight", ".k_proj.weight")):
            return weight
        order = self._head_rows.order(len(weight), self._format)
        return weight if order is None else weight[torch.from_numpy(order).to(weight.device)]

    def transposed_linear(self, name: str) -> Linear:
        return self.device.linear(self.tensor(name).t().contiguous())

    def norm(self, name: str, eps: float) -> Norm:
        weight, bias = self.tensor(f"{name}.weight"), f"{name}.bias"
        if bias not in self._shapes:
            return self.device.norm(NormWeight(weight, eps))
        return self.device.norm(NormWeight(weight, eps, True, self.tensor(bias)))

    def centred_rms_norm(self, name: str, eps: float) -> Norm:
        # a GGUF file stores the sum
        weight = self.tensor(f"{name}.weight", torch.float32)
        return self.device.norm(NormWeight(weight if self._format == "gguf" else weight + 1.0, eps))

    def release(self) -> None:
        """Give back the pages of the files."""
        self._files.release()
