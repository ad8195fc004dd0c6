"""Products with weights in FP8 (E4M3) on a GPU of compute capability 9.0, inputs rounded to FP8.

    Fp8RowLinear     a scale for each output: weights with one scale, or one for each row
    Fp8BlockLinear   a scale for each block of 128 x 128

FlashInfer's `bmm_fp8` takes one scale for all rows of the input and one for the whole weight, which
query, key and value of one product do not share. torch's `scaled_mm` takes one for each row of
both, by cuBLASLt or CUTLASS, so it computes the first kind. Its sums are accumulated in the tensor
cores alone, as those of bmm_fp8 are.
"""

from typing import Any, Final

import torch
from torch.nn.functional import ScalingType, scaled_mm

from worker.cuda.layers.flashinfer_kernels import is_hopper
from worker.layers.linear import Linear

LARGEST: Final = torch.finfo(torch.float8_e4m3fn).max
BLOCK: Final = 128
"""Rows and columns of a weight that share a scale in an Fp8BlockLinear."""
_VECTOR: Final = 16
_FEW_COLUMNS: Final = 4096
_MOST_COLUMNS: Final = 65536


def has_fp8_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether products in FP8 run on this GPU, with activations of `dtype`."""
    return dtype == torch.bfloat16 and is_hopper(device)


def takes_rows(out_features: int, in_features: int) -> bool:
    """Return whether Fp8RowLinear computes a weight of this shape: whole vectors of 16 bytes."""
    return not out_features % _VECTOR and not in_features % _VECTOR and in_features < _MOST_COLUMNS


class Fp8RowLinear(Linear):
    """A weight with a scale for each output; each row of the input gets one of its own."""

    def __init__(
        self,
        weight: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None = None,
        input_scale: float | None = None,
    ) -> None:
        """weight: float8_e4m3fn [out, in]. scales: float32 [out]. bias: bfloat16 [out].

        input_scale: of all inputs, as the checkpoint has it; None for one of each row, its largest
            magnitude over that of FP8.
        """
        assert takes_rows(*weight.shape)
        self._columns = weight.t()
        self._scales = scales.view(1, -1)
        self._bias = bias
        self._round = RowRounding(input_scale)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        codes, scales = self._round(x)
        product: torch.Tensor = scaled_mm(
            codes,
            self._columns,
            scales,
            ScalingType.RowWise,
            self._scales,
            ScalingType.RowWise,
            output_dtype=x.dtype,
            use_fast_accum=True,
        )
        # cuBLAS has no product of few rows with a bias for some weights, and refuses it.
        return product if self._bias is None else product.add_(self._bias)


class Fp8BlockLinear(Linear):
    """A weight with a scale for each block, by FlashInfer's kernel.

    It rounds the input, with a scale for 128 columns of a row, and sums every 128 columns in
    float32. library: the module flashinfer.
    """

    def __init__(
        self,
        library: Any,
        weight: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> None:
        """weight: float8_e4m3fn [out, in], both multiples of 128. bias: bfloat16 [out].

        scales: float32 [out / 128, in / 128].
        """
        assert not any(size % BLOCK for size in weight.shape)
        self._multiply = library.gemm.fp8_blockscale_gemm_sm90
        self._weight = weight
        self._scales = scales
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(x.shape[0], self._weight.shape[0])
        # An input in FP8 would need its scales in a layout that the library does not say.
        self._multiply(x.contiguous(), self._weight, None, self._scales, out=out)
        return out if self._bias is None else out.add_(self._bias)


class RowRounding:
    """Rounds rows to FP8 as a Triton kernel, one launch."""

    def __init__(self, scale: float | None) -> None:
        """scale: of all rows; None for one of each row."""
        self._scale = scale

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes and scales of x [N, in]: float8_e4m3fn [N, in] and float32 [N, 1]."""
        from worker.cuda.kernels.rows import round_row

        num_rows, size = x.shape
        assert x.stride(1) == 1
        codes = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
        scales = x.new_empty(num_rows, 1, dtype=torch.float32)
        round_row[(num_rows,)](
            x,
            codes,
            scales,
            x.stride(0),
            size,
            0.0 if self._scale is None else self._scale,
            fixed=self._scale is not None,
            largest=LARGEST,
            block=1 << (size - 1).bit_length(),
            num_warps=4 if size <= _FEW_COLUMNS else 16,
        )
        return codes, scales
