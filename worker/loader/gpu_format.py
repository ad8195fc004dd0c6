"""How a GPU holds the weights of quantised Hugging Face checkpoints.

    FP8                  as it is, on compute capability 9.0 (worker/layers/fp8_linear.py)
    4 and 8 bits, NF4    codes, scales and zeros as they are (worker/layers/triton_codes.py)
    all others           numbers of the activations' dtype

Embedding, head, experts of mixtures, and products of single heads are converted, too: they are
looked up or multiplied as stacked tensors.
"""

from collections import Counter
from collections.abc import Sequence
from enum import Enum, auto
from itertools import groupby
from typing import Final

import torch

from proto.errors import ModelError
from proto.prepared_model import FP8, TensorIndex
from worker.layers.flashinfer_kernels import usable_flashinfer
from worker.layers.fp8_linear import (
    BLOCK,
    Fp8BlockLinear,
    Fp8RowLinear,
    has_fp8_products,
    takes_rows,
)
from worker.layers.kernel_weights import BLOCK_COLUMNS
from worker.layers.linear import Linear
from worker.layers.triton_codes import CodedWeight, TritonCodedLinear
from worker.loader.formats import BuildLinear, DenseFormat, PackedFormat, Product
from worker.loader.source import WeightSource


class _Holding(Enum):
    """How the weights of a product are held.

    NUMBERS: converted, as all others of their kind. CONVERTED: although their kind may stay as it
    is, because kernels do not take these shapes.
    """

    CODES = auto()
    FP8_ROWS = auto()
    FP8_BLOCKS = auto()
    NUMBERS = auto()
    CONVERTED = auto()


_CODED: Final = ("INT4_32", "INT4_128", "INT8_32", "INT8_128", "NF4")
_NAN: Final = 0x7F
"""The code of NaN in E4M3, without its sign."""


def multiplies_blocks(index: TensorIndex, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether weights of a model are in FP8 with scales that Fp8BlockLinear takes."""
    blocks = (entry.options for entry in index.tensors if entry.type == FP8)
    found = any(
        each["rows"] == each["columns"] == BLOCK and "none_inputs" not in each for each in blocks
    )
    return found and has_fp8_products(device, dtype)


class GpuFormat(DenseFormat):
    """DenseFormat, except weights that kernels multiply as the checkpoint has them."""

    def read_product(self, source: WeightSource, product: Product) -> BuildLinear:
        names = product.weights
        holding = self._holding(source, product)
        if holding is _Holding.CONVERTED:
            self.dense_names.extend(f"{name} ({source.type_of(name)})" for name in names)
        if holding in (_Holding.NUMBERS, _Holding.CONVERTED):
            return super().read_product(source, product)
        bias = source.read(*product.biases) if product.biases else None
        if holding is _Holding.CODES:
            weights = self._read_coded(source, names)
            size = sum(weight.nbytes for weight in weights)
            return self._counted(PackedFormat.name, size, TritonCodedLinear(weights, bias))
        codes, scales = self._read_fp8(source, names)
        if holding is _Holding.FP8_ROWS:
            given = [source.input_scale(name) for name in names]
            largest = None if None in given else max(scale for scale in given if scale)
            linear: Linear = Fp8RowLinear(codes, scales, bias, largest)
        else:
            scales = scales[::BLOCK].contiguous()
            linear = Fp8BlockLinear(usable_flashinfer(), codes, scales, bias)
        return self._counted("fp8", codes.nbytes + scales.nbytes, linear)

    def product_bytes(self, source: WeightSource, product: Product) -> Counter[str]:
        holding = self._holding(source, product)
        if holding in (_Holding.NUMBERS, _Holding.CONVERTED):
            return super().product_bytes(source, product)
        if holding is _Holding.CODES:
            return Counter({PackedFormat.name: sum(map(source.code_bytes, product.weights))})
        rows, columns = source.joined_shape(*product.weights)
        num_scales = rows if holding is _Holding.FP8_ROWS else rows * columns // BLOCK**2
        return Counter({"fp8": rows * columns + 4 * num_scales})

    def _holding(self, source: WeightSource, product: Product) -> _Holding:
        names = product.weights
        if product.is_one_head or not self._is_quantised(source, names):
            return _Holding.NUMBERS
        if self._is_coded(source, names):
            return _Holding.CODES
        if self._has_fp8_rows(source, names):
            return _Holding.FP8_ROWS
        if self._has_fp8_blocks(source, names):
            return _Holding.FP8_BLOCKS
        return _Holding.CONVERTED

    def _counted(self, form: str, num_bytes: int, linear: Linear) -> BuildLinear:
        def build() -> Linear:
            self.memory[form] += num_bytes
            return linear

        return build

    def _is_quantised(self, source: WeightSource, names: Sequence[str]) -> bool:
        """Return whether all weights are of a kind that may stay as it is on this device."""
        types = {source.type_of(name) for name in names}
        if types <= set(_CODED):
            return all(map(source.has_parts, names))
        return (
            types == {FP8}
            and has_fp8_products(source.device, self.dtype)
            and all(map(source.rounds_inputs, names))
        )

    def _is_coded(self, source: WeightSource, names: Sequence[str]) -> bool:
        return all(
            source.type_of(name) != FP8
            and not source.splits_block(name, BLOCK_COLUMNS[source.type_of(name)])
            for name in names
        )

    def _read_coded(self, source: WeightSource, names: Sequence[str]) -> list[CodedWeight]:
        """Read weights; neighbours with the same form become one."""
        found, device = [], source.device
        for _, alike in groupby(names, source.code_form):
            own = list(alike)
            parts = [source.read_codes(name) for name in own]
            zeros = [part.zeros for part in parts if part.zeros is not None]
            order, table = source.column_order(own[0]), parts[0].table
            found.append(
                CodedWeight(
                    torch.cat([part.codes for part in parts]).to(device),
                    torch.cat([part.scales for part in parts]).t().contiguous().to(device),
                    torch.cat(zeros).t().contiguous().to(device) if zeros else None,
                    None if table is None else table.to(device),
                    parts[0].group,
                    None if order is None else order.to(device),
                )
            )
        return found

    def _has_fp8_rows(self, source: WeightSource, names: Sequence[str]) -> bool:
        """Return whether every row of the weights has one scale."""
        shape = source.joined_shape(*names)
        blocks = [source.fp8_block(name) for name in names if source.type_of(name) == FP8]
        return (
            len(blocks) == len(names)
            and all(columns == shape[1] for columns, _ in blocks)
            and takes_rows(*shape)
        )

    def _has_fp8_blocks(self, source: WeightSource, names: Sequence[str]) -> bool:
        """Return whether every block of 128 x 128 has one scale, and FlashInfer is there."""
        return (
            all(source.type_of(name) == FP8 for name in names)
            and all(source.fp8_block(name) == (BLOCK, BLOCK) for name in names)
            and source.joined_shape(*names)[1] % BLOCK == 0
            and usable_flashinfer() is not None
        )

    def _read_fp8(
        self, source: WeightSource, names: Sequence[str]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes [out, in] and the scales of each row, [out, groups], on the device."""
        codes, scales = [], []
        for name in names:
            stored, own, order = source.read_fp8(name)
            raw = stored.contiguous().view(torch.uint8)
            if ((raw & _NAN) == _NAN).any():
                raise ModelError(f"tensor {source.name_in_file(name)}: a number is NaN")
            rows = slice(None) if order is None else torch.from_numpy(order)
            codes.append(raw[rows])
            scales.append(own[rows])
        joined = torch.cat(codes).view(torch.float8_e4m3fn).to(source.device)
        return joined, torch.cat(scales).to(source.device)
