"""Products in FP8 on a FakeDevice, strict: torch's scaled_mm and FlashInfer's product by blocks.

What the libraries would do with a violation is in its message. torch's contract is that of
aten/src/ATen/native/cuda/ScaledBlas.cpp on compute capability 9.0, FlashInfer's that of 0.6.18's
fp8_blockscale_gemm_sm90_binding.cu and fp8_blockscale_gemm_kernel.cuh, of which its docstring and
checks differ in three places: the layout of an input's scales, scales of each row of the weight
(taken, and read as those of blocks), and an output in float16 (written as bfloat16).
"""

import os
from typing import Any

import torch
from torch.nn.functional import ScalingType

from tests.fakes.fake_device import FakeDevice, on_host
from tests.fakes.fake_flashinfer_modules import FakeModules
from tests.fakes.fake_paged_wrapper import demand

E4M3 = torch.float8_e4m3fn
BF16 = torch.bfloat16
BLOCK = 128
LARGEST = torch.finfo(E4M3).max


class FakeScaledMm:
    """torch.nn.functional.scaled_mm, with a scale of each row of both."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.num_calls = 0

    def __call__(
        self,
        mat_a: torch.Tensor,
        mat_b: torch.Tensor,
        scale_a: torch.Tensor,
        scale_recipe_a: ScalingType,
        scale_b: torch.Tensor,
        scale_recipe_b: ScalingType,
        *,
        bias: torch.Tensor | None = None,
        output_dtype: torch.dtype,
        use_fast_accum: bool,
    ) -> torch.Tensor:
        self.num_calls += 1
        for name, each in (("a", mat_a), ("b", mat_b), ("scale_a", scale_a), ("scale_b", scale_b)):
            demand(self._device.holds(each), f"{name} is on the device")
            demand(each.dim() == 2, f"{name} is a matrix")
        demand(mat_a.dtype == mat_b.dtype == E4M3, "both are float8_e4m3fn")
        (rows, inner), outputs = mat_a.shape, mat_b.shape[1]
        demand(rows > 0, "there are rows")
        demand(mat_b.shape[0] == inner, "shapes can be multiplied")
        demand(mat_a.stride() == (inner, 1), "a has its rows one after the other")
        demand(mat_b.stride() == (1, inner), "b has its columns one after the other")
        demand(not inner % 16 and not outputs % 16, "sizes of b are multiples of 16")
        demand(scale_recipe_a == scale_recipe_b == ScalingType.RowWise, "rows have scales")
        demand(scale_a.dtype == scale_b.dtype == torch.float32, "scales are float32")
        demand(scale_a.shape == (rows, 1), "each row of a has a scale")
        demand(scale_b.shape == (1, outputs), "each column of b has a scale")
        demand(scale_a.is_contiguous() and scale_b.is_contiguous(), "scales have no gaps")
        demand(output_dtype == BF16, "the result is bfloat16")
        if bias is not None:
            demand(self._device.holds(bias), "the bias is on the device")
            demand(bias.dtype == output_dtype, "a bias has the dtype of the result")
            demand(bias.shape == (outputs,) and bias.is_contiguous(), "each output has a bias")
        result = self._device.adopt(torch.empty(rows, outputs, dtype=output_dtype))

        def run() -> None:
            product = on_host(mat_a).double() @ on_host(mat_b).double()
            product *= on_host(scale_a).double() * on_host(scale_b).double()
            on_host(result).copy_(product if bias is None else product + on_host(bias).double())

        self._device.kernel(run)
        return result


class FakeGemm:
    """The module flashinfer.gemm."""

    def __init__(self, device: FakeDevice, modules: FakeModules | None = None) -> None:
        self._device = device
        self._modules = modules
        self.num_calls = 0

    def fp8_blockscale_gemm_sm90(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        input_scale: torch.Tensor | None = None,
        weight_scale: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        self.num_calls += 1
        if self._modules is not None:
            self._modules.need("fp8_blockscale_gemm_90")
        demand(os.environ.get("TRTLLM_DG_ENABLED") == "0", "nothing is compiled during a step")
        demand(input_scale is None, "the library rounds the input")
        demand(out is not None and weight_scale is not None, "result and scales are given")
        assert out is not None
        assert weight_scale is not None
        for name, each, dtype in (
            ("input", input, BF16),
            ("weight", weight, E4M3),
            ("scales", weight_scale, torch.float32),
            ("out", out, BF16),
        ):
            demand(self._device.holds(each), f"{name} is on the device")
            demand(each.dtype == dtype, f"{name} is {dtype}")
            demand(each.dim() == 2 and each.is_contiguous(), f"{name} is rows without gaps")
            demand(not each.storage_offset() * each.itemsize % 16, f"{name} begins at 16 bytes")
        (rows, inner), outputs = input.shape, len(weight)
        demand(weight.shape[1] == inner, "shapes can be multiplied")
        demand(not inner % BLOCK, "columns are whole blocks")
        demand(not outputs % BLOCK, "tiles of up to 128 divide the outputs")
        demand(
            weight_scale.shape == (outputs // BLOCK, inner // BLOCK), "each whole block has a scale"
        )
        demand(out.shape == (rows, outputs), "out is [rows, outputs]")
        demand(out_dtype in (None, BF16), "the result is bfloat16")

        def run() -> None:
            blocks = on_host(input).float().view(rows, -1, BLOCK)
            largest = blocks.abs().amax(2, keepdim=True)
            scales = torch.where(largest > 0, largest / LARGEST, 1.0)
            codes = (blocks / scales).to(E4M3).double().view(rows, -1)
            each = on_host(weight_scale).double()
            wide = each.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            numbers = on_host(weight).double() * wide
            inputs = codes.view(rows, -1, BLOCK) * scales.double()
            on_host(out).copy_(inputs.view(rows, -1) @ numbers.t())

        self._device.kernel(run)
        return out


class TorchRowRounding:
    """`RowRounding` in plain torch, for tensors on host or device."""

    def __init__(self, scale: float | None) -> None:
        self._scale = scale

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = x.float()
        scales = wide.abs().amax(1, keepdim=True).clamp_min(1e-12) / LARGEST
        if self._scale is not None:
            scales = torch.full_like(scales, self._scale)
        return (wide / scales).clamp(-LARGEST, LARGEST).to(E4M3), scales


def on_fake_hopper(monkeypatch: Any, library: Any) -> FakeScaledMm:
    """Let GpuFormat multiply in FP8 by `library`, a FakeFlashInfer, and a scaled_mm beside it."""
    from worker.cuda import formats as gpu_format
    from worker.cuda.layers import fp8_linear

    product = FakeScaledMm(library.device)
    monkeypatch.setattr(fp8_linear, "scaled_mm", product)
    monkeypatch.setattr(fp8_linear, "RowRounding", TorchRowRounding)
    monkeypatch.setattr(fp8_linear, "is_hopper", lambda device: True)
    monkeypatch.setattr(gpu_format, "usable_flashinfer", lambda: library)
    monkeypatch.setenv("TRTLLM_DG_ENABLED", "0")
    return product
