"""How the weights of linear layers are held in memory, and how they get there from the files.

DenseFormat has numbers of the activations' dtype. A device has formats of its own
(worker/cpu/formats.py, worker/cuda/formats.py), and `Device.weight_format` decides which one a
model gets.

A format is used in two steps: its `read_…` methods run in a reader thread and take weights out of
the files; what they return runs in the thread that computes and builds the layer. An embedding
whose head is another weight is not converted on a CPU: lookups read the mapped file.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from proto.settings.config import CpuWeights, DType, ModelConfig
from worker.layers.activation import Activation
from worker.layers.embedding import EmbeddingTable, dense_table, mapped_table
from worker.layers.experts import ExpertRanks, Experts, StackedWeights
from worker.layers.linear import Linear
from worker.loader.block_types import BLOCK_TYPES
from worker.loader.files import check_scales
from worker.loader.kernel_choices import KernelChoice
from worker.loader.source import WeightSource
from worker.models.layer_device import LayerDevice

_NUM_NAMED: Final = 4
_DTYPE_OF_WEIGHTS: Final[dict[CpuWeights, DType]] = {"bf16": "bfloat16", "f32": "float32"}
EMBEDDING: Final = "embedding.weight"
HEAD: Final = "head.weight"
PACKED: Final = "packed"
"""Weights as the file has them, in blocks or codes, among those of `WeightFormat.memory`."""
DENSE_NAMES: Final = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


@dataclass(frozen=True)
class Product:
    """Names of weights that are multiplied as one, one below the other, and of their biases.

    row_fraction: rows that are multiplied, of those of a step; an expert's are a part of them.
    is_one_head: it multiplies the columns of one head, beside equal products of all others.
    is_expert: it is one of a mixture, beside equal products of all others.
    """

    weights: tuple[str, ...]
    biases: tuple[str, ...] = ()
    row_fraction: float = 1.0
    is_one_head: bool = False
    is_expert: bool = False

    @property
    def is_in_part(self) -> bool:
        """Whether it multiplies a part of the rows, or of the columns, of a step."""
        return self.is_one_head or self.is_expert


@dataclass(frozen=True)
class ExpertProducts:
    """The products of a layer's experts: gate_up and down of each.

    ranks: which of the layer's experts these are.
    """

    gate_up: tuple[Product, ...]
    down: tuple[Product, ...]
    activation: Activation
    ranks: ExpertRanks


BuildLinear = Callable[[], Linear]
BuildExperts = Callable[[], Experts]
BuildEnds = Callable[[], tuple[EmbeddingTable, Linear]]


class WeightFormat(Protocol):
    """How the weights of one model are held in memory."""

    @property
    def name(self) -> str:
        """Part of the KV cache's fingerprint: another name means other arithmetic."""

    @property
    def memory(self) -> Counter[str]:
        """Bytes of the weights built so far, by format."""

    @property
    def dense_names(self) -> list[str]:
        """Weights that are dense although the format would quantise them."""

    def is_batch_invariant(self, dtype: torch.dtype) -> bool:
        """Return whether a row has the same bits in a step of any number of rows.

        dtype: of the activations.
        """

    @property
    def shared_forms(self) -> frozenset[str]:
        """Those of `memory` whose weights several workers can have in the same memory."""

    @property
    def arithmetic(self) -> set[str]:
        """What tells the products built so far apart in a KV fingerprint, beside `name`."""

    def choose_kernels(self, dtype: torch.dtype, folder: str) -> list[KernelChoice]:
        """Let the fastest kernels multiply with the weights that were built so far.

        dtype: of the activations. folder: where times of products are kept.
        """

    def read_product(self, source: WeightSource, product: Product) -> BuildLinear:
        """Read a product from the files; safe in several threads at once."""

    def read_experts(self, source: WeightSource, experts: ExpertProducts) -> BuildExperts:
        """Read the experts of a layer from the files; safe in several threads at once."""

    def read_ends(self, source: WeightSource, *, tied: bool) -> BuildEnds:
        """Read embedding and head from the files. tied: the embedding is the head, too."""

    def product_bytes(self, source: WeightSource, product: Product) -> Counter[str]:
        """Return what `read_product` and its build would add to `memory`, without reading."""

    def ends_bytes(self, source: WeightSource, *, tied: bool) -> Counter[str]:
        """Return what `read_ends` and its build would add to `memory`, without reading."""


class DenseFormat:
    """Numbers of the dtype that `source` reads."""

    shared_forms = frozenset[str]()

    def __init__(self, dtype: torch.dtype) -> None:
        self.name = DENSE_NAMES[dtype]
        self.dtype = dtype
        self.memory: Counter[str] = Counter()
        self.dense_names: list[str] = []

    @property
    def arithmetic(self) -> set[str]:
        return set()

    def is_batch_invariant(self, dtype: torch.dtype) -> bool:
        return False  # libraries choose products by the number of rows

    def choose_kernels(self, dtype: torch.dtype, folder: str) -> list[KernelChoice]:
        return []

    def read_product(self, source: WeightSource, product: Product) -> BuildLinear:
        weight, bias = source.read(*product.weights), read_bias(source, product)
        return lambda: self.build(source.device, weight, bias)

    def read_experts(self, source: WeightSource, experts: ExpertProducts) -> BuildExperts:
        """Read the experts as stacked tensors."""
        gate_up, down = read_stack(source, experts.gate_up), read_stack(source, experts.down)
        gate_up_bias = read_stacked_bias(source, experts.gate_up)
        down_bias = read_stacked_bias(source, experts.down)

        def build() -> Experts:
            self.memory[self.name] += gate_up.nbytes + down.nbytes
            stacked = StackedWeights(gate_up, down, gate_up_bias, down_bias)
            return source.device.stacked_experts(stacked, experts.activation, experts.ranks)

        return build

    def read_ends(self, source: WeightSource, *, tied: bool) -> BuildEnds:
        if tied:
            both = source.read(EMBEDDING)
            return lambda: self._build_tied(source.device, both)
        head, table = source.read(HEAD), read_table(source, self.memory)
        return lambda: (table, self.build(source.device, head, None))

    def product_bytes(self, source: WeightSource, product: Product) -> Counter[str]:
        rows, columns = source.joined_shape(*product.weights)
        return Counter({self.name: rows * columns * self.dtype.itemsize})

    def ends_bytes(self, source: WeightSource, *, tied: bool) -> Counter[str]:
        size = self.product_bytes(source, Product((head_name(tied=tied),)))
        if not tied:
            return size + table_bytes(source)
        return size + size if source.device.copies_weight(self.dtype) else size

    def build(self, device: LayerDevice, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Return the layer of a weight [out, in], which must not change afterwards."""
        self.memory[self.name] += weight.nbytes
        return device.linear(weight, bias)

    def _build_tied(
        self, device: LayerDevice, table: torch.Tensor
    ) -> tuple[EmbeddingTable, Linear]:
        """Return embedding and head; a head that copies the weight leaves the table beside it."""
        if device.copies_weight(table.dtype):
            self.memory[self.name] += table.nbytes
        return dense_table(table), self.build(device, table, None)


def head_name(*, tied: bool) -> str:
    """Return the name of the head's weight."""
    return EMBEDDING if tied else HEAD


def read_table(source: WeightSource, memory: Counter[str]) -> EmbeddingTable:
    """Read the embedding of a model whose head is another weight, and count its memory.

    Rows that stay in the mapped file take no memory of their own.
    """
    if _stays_mapped(source):
        source.prefetch(EMBEDDING)
        if source.type_of(EMBEDDING) not in BLOCK_TYPES:
            return mapped_table(source.read_rows(EMBEDDING)[0], source.dtype)
        blocks = source.read_blocks(EMBEDDING)
        check_scales(source.name_in_file(EMBEDDING), blocks.type, blocks.data)
        stored = blocks.data.reshape(blocks.rows, -1)
        return source.device.block_table(blocks.type, stored, blocks.columns, source.dtype)
    table = source.read(EMBEDDING)
    memory[DENSE_NAMES[table.dtype]] += table.nbytes
    return dense_table(table)


def table_bytes(source: WeightSource) -> Counter[str]:
    """Return what `read_table` would count, without reading."""
    if _stays_mapped(source):
        return Counter()
    rows, columns = source.joined_shape(EMBEDDING)
    return Counter({DENSE_NAMES[source.dtype]: rows * columns * source.dtype.itemsize})


def _stays_mapped(source: WeightSource) -> bool:
    """Return whether the rows of the embedding stay in the mapped file."""
    device = source.device
    if source.type_of(EMBEDDING) not in BLOCK_TYPES:
        return device.maps_tables
    return device.maps_blocks and not source.has_factors(EMBEDDING)


def read_stack(source: WeightSource, products: Sequence[Product]) -> torch.Tensor:
    """Return the weights [products, out, in] of equal products."""
    stacked = source.read(*(name for product in products for name in product.weights))
    return stacked.view(len(products), -1, stacked.shape[1])


def read_stacked_bias(source: WeightSource, products: Sequence[Product]) -> torch.Tensor | None:
    """Return the biases [products, out] of equal products; None without any."""
    biases = [name for product in products for name in product.biases]
    return source.read(*biases).view(len(products), -1) if biases else None


def read_bias(source: WeightSource, product: Product) -> torch.Tensor | None:
    """Return the biases [out] of a product; None without any."""
    return source.read(*product.biases) if product.biases else None


def activation_dtype(config: ModelConfig) -> DType:
    """Return the dtype of the activations; dense weights fix it to their own."""
    return _DTYPE_OF_WEIGHTS.get(config.cpu_weights, config.dtype)


def describe_dense_weights(weight_format: WeightFormat) -> str:
    """Return a line about weights that are dense for lack of a kernel; "" if there are none."""
    names = weight_format.dense_names
    if not names:
        return ""
    more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
    return (
        f"{len(names)} weights are dense, as the kernels have no whole blocks for them: "
        f"{', '.join(sorted(names)[:_NUM_NAMED])}{more}"
    )
