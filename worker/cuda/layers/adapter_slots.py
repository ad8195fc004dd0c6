"""Adapters of a step's rows on a GPU: slots of fixed addresses, and two kernels for a product.

The host holds all adapters in page-locked memory. A step has --max-loras of them at most, and as
many slots are on the device. An adapter that is in no slot is copied into the one that was used
least recently; the copy is queued behind the steps that were launched, which may read the slot.

    slot   [ table | gains and shifts | A of q | B of q | A of k | … ]   as long as the largest

An adapter takes what its ranks need, rounded up to 16 with zeros. The table has the rank of each
weight and where its A and B begin, and where the gain and shift of each product do.

Rows are sorted by slot, in blocks of 16 rows of one slot; rows without an adapter are in none:

    rows     | slot 2: 18 rows | slot 0: 2 rows |
    blocks   [0 … 15][16 17  -][18 19        -]

Sums are split by columns, never by rows, so a row has the same bits in every batch.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final
from weakref import ref

import numpy as np
import numpy.typing as npt
import torch

from worker.cuda.accelerator import Accelerator
from worker.cuda.transfers import QueuedTransfers
from worker.layers.adapters import (
    AdaptedLinear,
    AdaptedProduct,
    AdaptedWeight,
    Adapter,
    AdapterRows,
    LowRankUpdate,
    StepAdapters,
)
from worker.layers.embedding import Embedding
from worker.loader.adapters.files import READS

RANKS: Final = 16
"""Ranks of a tile; a matrix product of the device has 16 at least."""
ROWS: Final = 16
OUTPUTS: Final = 64
INPUTS: Final = 128
SPLIT_INPUTS: Final = 1024
"""Columns that a program sums: few rows alone would keep few multiprocessors busy."""
_ALIGNMENT: Final = 64
_SLOT_ALIGNMENT: Final = 256
_FIELDS: Final = 3
"""Of a weight in the table: rank, A and B. A product has one more, behind those of all weights."""


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@dataclass(frozen=True, kw_only=True)
class SlotAdapter(Adapter):
    """An adapter as it is copied into a slot.

    content: page-locked memory, uint8. has_factors: whether it multiplies outputs.
    """

    content: torch.Tensor
    has_factors: bool

    @property
    def num_bytes(self) -> int:
        return self.content.nbytes

    @property
    def multiplies_outputs(self) -> bool:
        return self.has_factors


@dataclass(frozen=True, slots=True)
class ProductSlots:
    """Where a product is in all slots.

    weights: those that adapters may change. entry: of the first one in the table. factor_field: of
    the product there. num_outputs: of the product. tiles: int32 [tiles, 4], on
    the device, as in kernels/adapters.py.
    """

    weights: Sequence[AdaptedWeight]
    entry: int
    factor_field: int
    num_outputs: int
    tiles: torch.Tensor

    @property
    def num_inputs(self) -> int:
        return self.weights[0].num_inputs


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step that have adapters, sorted by slot, on the device.

    rows: int32 [n]. scales: float32 [n]. slots, firsts, ends: int32 [blocks], the slot of each
    block and its rows [first, end) in this order; unused blocks are empty.
    """

    rows: torch.Tensor
    scales: torch.Tensor
    slots: torch.Tensor
    firsts: torch.Tensor
    ends: torch.Tensor

    @staticmethod
    def view(flat: torch.Tensor, num_rows: int, num_blocks: int) -> "StepRows":
        """Return the rows in int32 [2 num_rows + 3 num_blocks]."""
        rows, scales, *blocks = flat.split_with_sizes([num_rows] * 2 + [num_blocks] * 3)
        return StepRows(rows, scales.view(torch.float32), *blocks)


@dataclass(slots=True)
class _Memory:
    """What `reserve` takes. slots: uint8 [slots, bytes], of which the others are views.

    max_rank: a multiple of RANKS. adapters: slot → its adapter, the least recently used first.
    """

    slots: torch.Tensor
    table: torch.Tensor
    factors: torch.Tensor
    numbers: torch.Tensor
    products: list[ProductSlots | None]
    num_fields: int
    max_rank: int
    adapters: dict[int, Callable[[], SlotAdapter | None]]
    transfers: QueuedTransfers
    accelerator: Accelerator


class SlotAdapters(StepAdapters):
    """StepAdapters whose products are added by Triton.

    create_accelerator: called when memory is reserved. Products ask for the rows of the running
    step, and the first one has them copied to the device.
    """

    changes_layers_only = True

    def __init__(self, create_accelerator: Callable[[], Accelerator]) -> None:
        super().__init__()
        self._create_accelerator = create_accelerator
        self._memory: _Memory | None = None
        self._latest: tuple[Sequence[AdapterRows], int, StepRows] | None = None
        self._fixed: torch.Tensor | None = None
        self._captured: StepRows | None = None

    # ---- Memory ----

    def update_bytes(
        self, rank: int, changed: Sequence[tuple[int, int]], num_outputs: int, dtype: torch.dtype
    ) -> int:
        ranks = _padded(rank, RANKS)
        numbers = sum(ranks * sum(shape) for shape in changed)
        fields = _FIELDS * len(changed) + 1
        return numbers * dtype.itemsize + 8 * num_outputs + 8 * fields

    def reserve(
        self,
        products: Sequence[AdaptedProduct],
        max_adapters: int,
        max_rank: int,
        dtype: torch.dtype,
    ) -> None:
        accelerator = self._create_accelerator()
        transfers = QueuedTransfers(accelerator)
        num_weights = sum(len(product.weights) for product in products)
        num_fields = _FIELDS * num_weights + len(products)
        entry, size, found = 0, 0, list[ProductSlots | None]()
        for number, product in enumerate(products):
            weights = product.weights
            if not weights:
                size += 8
                found.append(None)
                continue
            tiles = [
                (place, output, weight.outputs.start, weight.outputs.stop)
                for place, weight in enumerate(weights)
                for output in range(weight.outputs.start, weight.outputs.stop, OUTPUTS)
            ]
            (there,) = transfers.to_device([np.array(tiles, dtype=np.int32)])
            own = accelerator.zeros(there.numel(), torch.int32).copy_(there)
            field = _FIELDS * num_weights + number
            found.append(ProductSlots(weights, entry, field, product.num_outputs, own))
            entry += len(weights)
            shapes = [(len(weight.outputs), weight.num_inputs) for weight in weights]
            size += self.update_bytes(max_rank, shapes, product.num_outputs, dtype)
        size = _padded(size + 2 * _ALIGNMENT, _SLOT_ALIGNMENT)
        slots = accelerator.zeros(max_adapters * size, torch.uint8).view(max_adapters, size)
        self._memory = _Memory(
            slots=slots,
            table=slots.view(torch.int64),
            factors=slots.view(torch.float32),
            numbers=slots.view(dtype),
            products=found,
            num_fields=num_fields,
            max_rank=_padded(max_rank, RANKS),
            adapters=dict.fromkeys(range(max_adapters), _nothing),
            transfers=transfers,
            accelerator=accelerator,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return 0 if self._memory is None else self._memory.slots.nbytes

    def packed(self, adapter: Adapter) -> Generator[str | None, None, Adapter]:
        memory = self._reserved
        dtype = memory.numbers.dtype
        table = np.zeros(memory.num_fields, dtype=np.int64)
        matrices: list[tuple[int, torch.Tensor]] = []  # and where each begins, in bytes
        factors: list[tuple[int, torch.Tensor]] = []
        end = table.nbytes
        for number, update in adapter.products.items():
            product = memory.products[number]
            assert product is not None, "the adapter changes a product that has no slot"
            if update.gain is not None or update.shift is not None:
                table[product.factor_field] = end // 4
                for each in (update.gain, update.shift):
                    if each is not None:
                        factors.append((end, each))
                    end += 4 * product.num_outputs
        end = _padded(end, _ALIGNMENT)
        for number, update in adapter.products.items():
            product = memory.products[number]
            assert product is not None
            for place, down, up in _matrices(update, product):
                ranks = _padded(len(down), RANKS)
                fields = [ranks]
                for matrix in (down, up):
                    matrices.append((end, matrix))
                    fields.append(end // dtype.itemsize)
                    end += ranks * matrix.shape[1] * dtype.itemsize
                at = _FIELDS * (product.entry + place)
                table[at : at + _FIELDS] = fields
        yield READS  # page-locking takes longer than a slice
        content = memory.accelerator.pinned(end)
        content.zero_()
        yield None
        content.numpy()[: table.nbytes] = table.view(np.uint8)
        for begin, each in (*factors, *matrices):
            content[begin : begin + each.nbytes].view(each.dtype).copy_(each.reshape(-1))
            yield None
        return SlotAdapter(
            products={},
            digest=adapter.digest,
            rank=adapter.rank,
            effect=adapter.effect,
            content=content,
            has_factors=adapter.multiplies_outputs,
        )

    def forget(self) -> None:
        self._latest = None

    @property
    def _reserved(self) -> _Memory:
        assert self._memory is not None, "no memory is reserved for adapters"
        return self._memory

    def _slots_of(self, adapters: Sequence[SlotAdapter]) -> list[int]:
        """Return the slots of a step's adapters; queue the copies of those that are in none."""
        memory = self._reserved
        wanted = {id(adapter) for adapter in adapters}
        found = {}
        for slot, adapter_ref in memory.adapters.items():
            resident = adapter_ref()
            if resident is not None and id(resident) in wanted:
                found[id(resident)] = slot
        free = [slot for slot in memory.adapters if slot not in found.values()]
        free.sort(key=lambda slot: memory.adapters[slot]() is not None)
        slots = []
        for adapter in adapters:
            slot = found.get(id(adapter), -1)
            if slot < 0:
                assert free, "a step has more adapters than --max-loras"
                slot = free.pop(0)
                content = adapter.content
                memory.slots[slot, : len(content)].copy_(content, non_blocking=True)
            del memory.adapters[slot]
            memory.adapters[slot] = ref(adapter)
            slots.append(slot)
        return slots

    # ---- Steps ----

    @contextmanager
    def in_largest_step(self, num_rows: int) -> Iterator[None]:
        """Let all rows have an adapter, whose products are computed by themselves, too."""
        memory = self._reserved
        content = memory.accelerator.pinned(8 * memory.num_fields)
        blank = SlotAdapter(products={}, content=content, has_factors=True)
        rows = AdapterRows(blank, torch.arange(num_rows), torch.ones(num_rows))
        with self.running([rows]):
            yield
        self.forget()

    def reserve_graphs(self, num_rows: int) -> None:
        """Take fixed memory for the rows of graphs, of the largest of which these are the rows."""
        size = 2 * num_rows + 3 * self._num_blocks(num_rows)
        self._fixed = self._reserved.accelerator.zeros(size, torch.int32)
        self._latest = None

    @contextmanager
    def in_graph(self, num_rows: int) -> Iterator[None]:
        """Let products read the rows of the step that is replayed: around the capture of a graph.

        The memory has no rows with adapters after `fill_graph` without groups.
        """
        assert self._fixed is not None
        num_blocks = self._num_blocks(num_rows)
        flat = self._fixed[: 2 * num_rows + 3 * num_blocks]
        blank = SlotAdapter(products={}, content=flat, has_factors=False)
        nothing = torch.zeros(0, dtype=torch.int64)
        self._captured = StepRows.view(flat, num_rows, num_blocks)
        try:
            with self.running([AdapterRows(blank, nothing, nothing.float())]):
                yield
        finally:
            self._captured = None

    def fill_graph(self, num_rows: int) -> None:
        """Queue the copy of the running step's rows to where a graph of `num_rows` reads them."""
        latest, fixed = self._latest, self._fixed
        assert fixed is not None
        if latest is None or latest[0] is not self.groups or latest[1] != num_rows:
            num_blocks = self._num_blocks(num_rows)
            there = self._upload(num_rows, num_blocks)
            own = fixed[: len(there)].copy_(there)
            rows = StepRows.view(own, num_rows, num_blocks)
            self._latest = (self.groups, num_rows, rows)

    @property
    def multiplies_outputs(self) -> bool:
        """Whether an adapter of the running step does."""
        return any(group.adapter.multiplies_outputs for group in self.groups)

    def add(self, product: int, x: torch.Tensor, y: torch.Tensor) -> None:
        self._add(product, x, y, y)

    def add_to(
        self, linear: AdaptedLinear, residual: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor:
        own = linear.base(x) if self.multiplies_outputs else None
        residual = linear.base.add_to(residual, x)
        self._add(linear.product, x, residual, residual if own is None else own)
        return residual

    def embed(self, token_ids: torch.Tensor, hidden: torch.Tensor, embedding: Embedding) -> None:
        """Change nothing: such adapters are refused."""

    def change_logits(self, x: torch.Tensor, logits: torch.Tensor) -> None:
        """Change nothing: such adapters are refused."""

    def _num_blocks(self, num_rows: int) -> int:
        """Return the most blocks of rows with as many adapters as there are slots."""
        num_slots = min(len(self._reserved.adapters), num_rows)
        return min(num_rows, -(-num_rows // ROWS) + num_slots - 1)

    def _step_rows(self) -> StepRows:
        if self._captured is not None:
            return self._captured
        latest = self._latest
        if latest is None or latest[0] is not self.groups or latest[1] >= 0:
            num_rows = sum(len(group.rows) for group in self.groups)
            num_blocks = sum(-(-len(group.rows) // ROWS) for group in self.groups)
            flat = self._upload(num_rows, num_blocks)
            latest = self._latest = (self.groups, -1, StepRows.view(flat, num_rows, num_blocks))
        return latest[2]

    def _upload(self, num_rows: int, num_blocks: int) -> torch.Tensor:
        """Queue the copy of the running step's rows; return them flat, valid until the next call.

        num_rows, num_blocks: in the memory, as many as there are or more.
        """
        groups = self.groups
        adapters = []
        for group in groups:
            assert isinstance(group.adapter, SlotAdapter)
            adapters.append(group.adapter)
        slots = self._slots_of(adapters)
        (flat,) = self._reserved.transfers.to_device(
            [sorted_rows(groups, slots, num_rows, num_blocks)]
        )
        return flat

    def _add(
        self, product: int, x: torch.Tensor, y: torch.Tensor, of_product: torch.Tensor
    ) -> None:
        """Add the adapters' parts to y. of_product: what factors multiply."""
        slots = self._reserved.products[product]
        if slots is not None and len(x):
            assert x.stride(1) == y.stride(1) == of_product.stride(1) == 1
            assert x.dtype == self._reserved.numbers.dtype
            self._launch(slots, self._step_rows(), x, y, of_product)

    def _launch(
        self,
        product: ProductSlots,
        step: StepRows,
        x: torch.Tensor,
        y: torch.Tensor,
        of_product: torch.Tensor,
    ) -> None:
        from worker.cuda.kernels.adapters import expand_block, reduce_block

        memory, num_rows, num_blocks = self._reserved, len(step.rows), len(step.slots)
        num_weights, num_splits = len(product.weights), -(-product.num_inputs // SPLIT_INPUTS)
        width = num_weights * memory.max_rank
        reduced = x.new_empty(num_splits * num_rows * width, dtype=torch.float32)
        tiles = memory.max_rank // RANKS
        reduce_block[(num_blocks, num_splits, num_weights * tiles)](
            x,
            step.rows,
            step.slots,
            step.firsts,
            step.ends,
            memory.table,
            memory.numbers,
            reduced,
            x.stride(0),
            memory.table.stride(0),
            memory.numbers.stride(0),
            product.entry,
            num_rows,
            width,
            product.num_inputs,
            block_rows=ROWS,
            block_ranks=RANKS,
            block_inputs=INPUTS,
            split_inputs=SPLIT_INPUTS,
            tiles=tiles,
        )
        expand_block[(num_blocks, product.tiles.numel() // 4)](
            reduced,
            step.rows,
            step.scales,
            step.slots,
            step.firsts,
            step.ends,
            memory.table,
            memory.factors,
            memory.numbers,
            product.tiles,
            of_product,
            y,
            of_product.stride(0),
            y.stride(0),
            memory.table.stride(0),
            memory.factors.stride(0),
            memory.numbers.stride(0),
            product.entry,
            product.factor_field,
            num_rows,
            width,
            memory.max_rank,
            num_splits,
            product.num_outputs,
            block_rows=ROWS,
            block_outputs=OUTPUTS,
            block_ranks=RANKS,
        )


def sorted_rows(
    groups: Sequence[AdapterRows], slots: Sequence[int], num_rows: int, num_blocks: int
) -> npt.NDArray[np.int32]:
    """Return rows by slot and their blocks, as `StepRows.view` reads them.

    slots: of the groups. num_rows, num_blocks: as many as there are or more.
    """
    flat = np.zeros(2 * num_rows + 3 * num_blocks, dtype=np.int32)
    blocks = flat[2 * num_rows :].reshape(3, num_blocks)
    scales = flat[num_rows : 2 * num_rows].view(np.float32)
    first = block = 0
    for group, slot in zip(groups, slots, strict=True):
        end = first + len(group.rows)
        flat[first:end] = group.rows.numpy()
        scales[first:end] = group.scales.numpy()
        for begin in range(first, end, ROWS):
            blocks[:, block] = (slot, begin, min(begin + ROWS, end))
            block += 1
        first = end
    return flat


def _matrices(
    update: LowRankUpdate, product: ProductSlots
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield the place of each weight of a product that an update changes, its A and its B."""
    places = {weight.outputs.start: place for place, weight in enumerate(product.weights)}
    for part in update.parts:
        down = update.down[part.ranks.start : part.ranks.stop]
        yield places[part.outputs.start], down, part.up


def _nothing() -> None:
    """The adapter of a slot that none was copied into."""
