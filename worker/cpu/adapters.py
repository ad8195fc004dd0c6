"""Adapters of a step's rows by the C++ kernels, csrc/layers/adapters.cpp."""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from weakref import ref

import numpy as np
import torch

from worker.cpu.kernel_structures import (
    AdapterRowsStructure,
    AdaptersRun,
    LowRankPartStructure,
    LowRankStructure,
    StepAdaptersStructure,
)
from worker.cpu.kernels import DTYPE_CODES, Kernels
from worker.host.large_pages import WeightArena
from worker.host.memory_nodes import LARGE_PAGE
from worker.layers.adapters import Adapter, AdapterRows, LowRankPart, LowRankUpdate, StepAdapters
from worker.layers.scratch import ByteBuffer

_LANES: Final = 16
"""TOKEND_LORA_LANES of csrc/layers/adapters.h."""


@dataclass(frozen=True, slots=True)
class KernelUpdate(LowRankUpdate):
    """A LowRankUpdate whose matrices are packed for the kernel, and described to it."""

    structure: LowRankStructure | None = None
    parts_array: ctypes.Array[LowRankPartStructure] | None = None


class KernelAdapters(StepAdapters):
    """StepAdapters whose products are added by the kernel, of all adapters in one call."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()
        self._kernels = kernels
        self._memory = ByteBuffer()
        # Maps of one large page: adapters come and go, and neighbours share none but the last.
        self._arena = WeightArena(map_bytes=LARGE_PAGE)
        self._arrays: dict[int, tuple[ref[Adapter], ctypes.Array[ctypes.c_void_p]]] = {}
        self._latest: StepDescription | None = None

    def laid_out(self, update: LowRankUpdate) -> LowRankUpdate:
        parts = tuple(
            LowRankPart(part.outputs, part.ranks, self._packed(part.up.t()))
            for part in update.parts
        )
        down = self._packed(update.down)
        array = (LowRankPartStructure * len(parts))(
            *(
                LowRankPartStructure(
                    part.outputs.start,
                    len(part.outputs),
                    part.ranks.start,
                    len(part.ranks),
                    part.up.data_ptr(),
                )
                for part in parts
            )
        )
        gain, shift = update.gain, update.shift
        sizes = [len(each) for each in (gain, shift) if each is not None]
        structure = LowRankStructure(
            dtype=DTYPE_CODES[update.down.dtype],
            in_features=update.down.shape[1],
            rank=update.down.shape[0],
            down=down.data_ptr(),
            num_parts=len(parts),
            parts=ctypes.addressof(array),
            out_features=max(sizes, default=0),
            gain=None if gain is None else gain.data_ptr(),
            shift=None if shift is None else shift.data_ptr(),
        )
        return KernelUpdate(down, parts, gain, shift, structure, array)

    def _matrix_bytes(self, lanes: int, length: int, dtype: torch.dtype) -> int:
        return math.prod(_packed_shape(lanes, length, dtype)) * dtype.itemsize

    def _packed(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return a packed matrix in large pages, from which it is read a third faster."""
        tiles = packed(matrix)
        memory = self._arena.allocate(tiles.nbytes)
        return memory.view(tiles.dtype).view(tiles.shape).copy_(tiles)

    def forget(self) -> None:
        self._latest = None

    def add(self, product: int, x: torch.Tensor, y: torch.Tensor) -> None:
        if any(product in group.adapter.products for group in self.groups):
            self._add(self.description(len(x)), product, x, y)

    def add_update(
        self, update: LowRankUpdate, group: AdapterRows, x: torch.Tensor, y: torch.Tensor
    ) -> None:
        adapter = Adapter(products={0: update})
        rows = AdapterRows(adapter, group.rows, group.scales)
        self._add(StepDescription([rows], [_products_array(adapter, 1)], len(x)), 0, x, y)

    def description(self, num_rows: int) -> "StepDescription":
        """Return the adapters of the running step of `num_rows` rows for a kernel."""
        latest = self._latest
        if latest is None or latest.groups is not self.groups or latest.num_rows != num_rows:
            arrays = [self._array_of(group.adapter) for group in self.groups]
            latest = self._latest = StepDescription(self.groups, arrays, num_rows)
        return latest

    def scratch(self, description: "StepDescription") -> int:
        """Return the address of memory for a kernel's call."""
        return self._memory.address(self._kernels.adapters_bytes(description.structure))

    def _array_of(self, adapter: Adapter) -> ctypes.Array[ctypes.c_void_p]:
        """Return the addresses of an adapter's products."""
        found = self._arrays.get(id(adapter))
        if found is None or found[0]() is not adapter:
            alive = {key: each for key, each in self._arrays.items() if each[0]() is not None}
            found = ref(adapter), _products_array(adapter, self.num_products)
            self._arrays = alive | {id(adapter): found}
        return found[1]

    def _add(
        self, description: "StepDescription", product: int, x: torch.Tensor, y: torch.Tensor
    ) -> None:
        assert x.dtype == y.dtype
        assert x.stride(1) == y.stride(1) == 1
        assert len(x) == len(y) == description.num_rows
        run = AdaptersRun(
            adapters=ctypes.addressof(description.structure),
            product=product,
            dtype=DTYPE_CODES[x.dtype],
            x_stride=x.stride(0),
            x=x.data_ptr(),
            y_stride=y.stride(0),
            y=y.data_ptr(),
            scratch=self.scratch(description),
        )
        self._kernels.adapters_add(run)


class StepDescription:
    """The adapters of a step of `num_rows` rows, as kernels read them; valid while it lives."""

    def __init__(
        self,
        groups: Sequence[AdapterRows],
        arrays: Sequence[ctypes.Array[ctypes.c_void_p]],
        num_rows: int,
    ) -> None:
        self.groups = groups
        self.num_rows = num_rows
        self.multiplies_outputs = any(group.adapter.multiplies_outputs for group in groups)
        self._arrays = arrays
        self._places = np.full(num_rows, -1, dtype=np.int64)
        rows = []
        for number, (group, array) in enumerate(zip(groups, arrays, strict=True)):
            count = len(group.rows)
            assert group.rows.dtype == torch.int64
            assert group.scales.dtype == torch.float32
            self._places[group.rows.numpy()] = (number << 32) + np.arange(count)
            rows.append(
                AdapterRowsStructure(
                    ctypes.addressof(array), count, group.rows.data_ptr(), group.scales.data_ptr()
                )
            )
        self._rows = (AdapterRowsStructure * len(rows))(*rows)
        largest = max(
            (
                update.structure.rank
                for group in groups
                for update in group.adapter.products.values()
                if isinstance(update, KernelUpdate) and update.structure is not None
            ),
            default=0,
        )
        self.structure = StepAdaptersStructure(
            num_groups=len(rows),
            groups=ctypes.addressof(self._rows),
            max_rank=-(-largest // _LANES) * _LANES,
            places=self._places.ctypes.data,
        )


def _products_array(adapter: Adapter, num_products: int) -> ctypes.Array[ctypes.c_void_p]:
    array = (ctypes.c_void_p * num_products)()
    for number, update in adapter.products.items():
        assert isinstance(update, KernelUpdate)
        assert update.structure is not None
        array[number] = ctypes.addressof(update.structure)
    return array


def _packed_shape(lanes: int, length: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Return tiles, groups of neighbours along the length, lanes of a tile, size of a group."""
    group = 2 if dtype == torch.bfloat16 else 1
    return -(-lanes // _LANES), -(-length // group), _LANES, group


def packed(matrix: torch.Tensor) -> torch.Tensor:
    """Return [lanes, length] as tiles of lanes; see csrc/layers/adapters.h."""
    lanes, length = matrix.shape
    num_tiles, num_groups, _, group = _packed_shape(lanes, length, matrix.dtype)
    padded = matrix.new_zeros(num_tiles * _LANES, num_groups * group)
    padded[:lanes, :length] = matrix
    tiles = padded.view(num_tiles, _LANES, num_groups, group)
    return tiles.permute(0, 2, 1, 3).contiguous()
