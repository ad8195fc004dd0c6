"""What the kernels of products are told about tensors.

Owns the check of what they assume: they take addresses.
"""

import ctypes
from typing import Final

import torch

from worker.kernels import DTYPE_CODES, Part, Product

PRODUCT_DTYPES: Final = (torch.float32, torch.bfloat16)


def product_call(
    shape: tuple[int, int],
    x: torch.Tensor,
    bias: torch.Tensor | None,
    output: torch.Tensor,
    adds: bool,
) -> ctypes.Structure:
    """The call for a weight of `shape` = [out, in], good as long as the tensors live.

    x [N, in] and output [N, out]: float32 or bfloat16 each, rows a stride apart. bias: [out],
    contiguous, of either type. adds: whether the output is added to.
    """
    out_features, in_features = shape
    assert x.dtype in PRODUCT_DTYPES
    assert output.dtype in PRODUCT_DTYPES
    assert x.shape[1] == in_features
    assert x.stride(1) == 1
    assert output.shape == (x.shape[0], out_features)
    assert output.stride(1) == 1
    product = Product(
        x.shape[0],
        DTYPE_CODES[x.dtype],
        x.stride(0),
        x.data_ptr(),
        0,
        None,
        DTYPE_CODES[output.dtype],
        output.stride(0),
        output.data_ptr(),
        adds,
    )
    _describe_bias(product, out_features, bias)
    return product


def weight_part(
    form: int, weight: ctypes.Structure, out_features: int, bias: torch.Tensor | None
) -> ctypes.Structure:
    """Some outputs of a product that another kernel makes, as a `worker.kernels.Part`.

    form: a TokendForm of csrc/stack.h, which says what `weight` is. Valid as long as `weight`
    and `bias`, which is as in product_call, live.
    """
    part = Part(form, ctypes.addressof(weight), out_features)
    _describe_bias(part, out_features, bias)
    return part


def _describe_bias(call: ctypes.Structure, out_features: int, bias: torch.Tensor | None) -> None:
    if bias is not None:
        assert bias.dtype in PRODUCT_DTYPES
        assert bias.is_contiguous()
        assert bias.shape == (out_features,)
        call.bias_dtype, call.bias = DTYPE_CODES[bias.dtype], bias.data_ptr()
