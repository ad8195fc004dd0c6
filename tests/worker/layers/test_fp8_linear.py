"""Products in FP8: rounding by Triton in its interpreter, products on strict fakes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import ScalingType

from tests.fakes.fake_device import FakeDevice, on_host
from tests.fakes.fake_flashinfer_modules import FakeModules
from tests.fakes.fake_flashinfer_rows import FakeRowKernels
from tests.fakes.fake_fp8 import E4M3, FakeScaledMm, TorchRowRounding, on_fake_hopper
from tests.fakes.fake_paged_wrapper import ContractError
from tests.fakes.triton import interpret_kernels
from worker.cuda.layers.fp8_linear import Fp8BlockLinear, Fp8RowLinear, RowRounding, takes_rows

BF16, F32 = torch.bfloat16, torch.float32
ROUNDED = 0.04
"""Of the norm of a product: what rounding the input to 4 significant bits loses."""


def random(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("scale", [None, 0.01])
@pytest.mark.parametrize("size", [48, 128])
def test_rounding(size: int, scale: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some differ, as the interpreter knows neither 448 nor carries, and no NaN."""
    interpret_kernels(monkeypatch)
    x = random(5, 2 * size)[:, :size]
    x[2] = 0
    codes, scales = RowRounding(scale)(x)
    assert codes.dtype == E4M3
    assert codes.is_contiguous()
    assert scales.shape == (5, 1)
    wanted, wanted_scales = TorchRowRounding(scale)(x)
    assert torch.allclose(scales, wanted_scales)
    found, exact = codes.float(), wanted.float()
    assert (found == exact).float().mean() > 0.85
    assert ((found - exact).abs() <= exact.abs() / 2).all()


class Setup:
    """A fake Hopper device, and random weights on it with the numbers they stand for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, modules: FakeModules | None = None) -> None:
        self.device = FakeDevice()
        self.library = FakeRowKernels(self.device, modules)
        self.scaled_mm = on_fake_hopper(monkeypatch, self.library)
        self.adopt = self.device.adopt

    def codes(self, outputs: int, inputs: int) -> torch.Tensor:
        return (random(outputs, inputs, dtype=F32) * 50).to(E4M3)


@pytest.mark.parametrize("scale", [None, 0.02])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("num_rows", [1, 9])
def test_a_scale_of_each_output(
    num_rows: int, biased: bool, scale: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup, codes = Setup(monkeypatch), None
    codes, scales = setup.codes(48, 64), random(48, dtype=F32).abs() * 0.01 + 0.001
    bias = random(48) if biased else None
    linear = Fp8RowLinear(
        setup.adopt(codes),
        setup.adopt(scales),
        None if bias is None else setup.adopt(bias),
        scale,
    )
    x = random(num_rows, 64)
    exact = x.double() @ (codes.double() * scales[:, None]).t()
    if bias is not None:
        exact = exact + bias.double()
    found = on_host(linear(setup.adopt(x))).double()
    assert (found - exact).norm() < ROUNDED * exact.norm()
    residual = random(num_rows, 48)
    summed = linear.add_to(setup.adopt(residual.clone()), setup.adopt(x))
    assert torch.allclose(on_host(summed).double(), residual.double() + found, atol=0.05)
    assert setup.scaled_mm.num_calls == 2


@pytest.mark.parametrize("num_rows", [1, 5])
def test_a_scale_of_each_block(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the input lie apart, as those of one part of a fused product."""
    setup = Setup(monkeypatch, FakeModules())
    codes, scales, bias = (
        setup.codes(256, 384),
        random(2, 3, dtype=F32).abs() * 0.01 + 0.001,
        random(256),
    )
    linear = Fp8BlockLinear(
        setup.library, setup.adopt(codes), setup.adopt(scales), setup.adopt(bias)
    )
    x = random(num_rows, 3 * 384)[:, 384:768]
    with pytest.raises(ContractError, match="fp8_blockscale_gemm_90 is loaded before"):
        linear(setup.adopt(x))
    assert setup.library._modules is not None
    setup.library._modules.loaded.add("fp8_blockscale_gemm_90")
    wide = scales.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    exact = x.double() @ (codes.double() * wide).t() + bias.double()
    found = on_host(linear(setup.adopt(x))).double()
    assert (found - exact).norm() < ROUNDED * exact.norm()


@pytest.mark.parametrize(
    ("shape", "taken"),
    [((48, 64), True), ((40, 64), False), ((48, 72), False), ((16, 65536), False)],
)
def test_products_need_whole_vectors(shape: tuple[int, int], taken: bool) -> None:
    assert takes_rows(*shape) is taken


# ---- what the fakes refuse -----------------------------------------------------------------------


class Calls:
    """Correct arguments of both products, by name, for a test to change one."""

    def __init__(self) -> None:
        self.device = device = FakeDevice()
        adopt = device.adopt
        self.scaled_mm: dict[str, Any] = {
            "mat_a": adopt(random(4, 64).to(E4M3)),
            "mat_b": adopt(random(32, 64).to(E4M3)).t(),
            "scale_a": adopt(torch.ones(4, 1)),
            "scale_recipe_a": ScalingType.RowWise,
            "scale_b": adopt(torch.ones(1, 32)),
            "scale_recipe_b": ScalingType.RowWise,
            "bias": adopt(random(32)),
            "output_dtype": BF16,
            "use_fast_accum": True,
        }
        self.blocks: dict[str, Any] = {
            "input": adopt(random(4, 256)),
            "weight": adopt(random(384, 256).to(E4M3)),
            "weight_scale": adopt(torch.ones(3, 2)),
            "out": adopt(random(4, 384)),
        }

    def run(self, which: str) -> torch.Tensor:
        arguments = getattr(self, which)
        if which == "scaled_mm":
            return FakeScaledMm(self.device)(**arguments)
        return FakeRowKernels(self.device).gemm.fp8_blockscale_gemm_sm90(**arguments)


def be(make: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    return lambda old: make(*args, **kwargs)


@pytest.mark.parametrize(
    ("which", "name", "change", "named"),
    [
        ("scaled_mm", "mat_a", lambda a: a.float().bfloat16(), "both are float8_e4m3fn"),
        ("scaled_mm", "mat_a", lambda a: a[:, ::2], "shapes can be multiplied"),
        ("scaled_mm", "mat_a", lambda a: a[:0], "there are rows"),
        ("scaled_mm", "mat_b", lambda b: b.contiguous(), "b has its columns one after the other"),
        ("scaled_mm", "mat_b", lambda b: b[:, :24], "sizes of b are multiples of 16"),
        ("scaled_mm", "scale_a", be(torch.ones, 1, 1), "scale_a is on the device"),
        ("scaled_mm", "scale_a", lambda scale: scale[:1], "each row of a has a scale"),
        ("scaled_mm", "scale_b", lambda scale: scale.t(), "each column of b has a scale"),
        ("scaled_mm", "scale_b", lambda scale: scale.double(), "scales are float32"),
        ("scaled_mm", "scale_recipe_b", lambda _: ScalingType.TensorWise, "rows have scales"),
        ("scaled_mm", "bias", lambda bias: bias.float(), "a bias has the dtype of the result"),
        ("scaled_mm", "output_dtype", lambda _: torch.float16, "the result is bfloat16"),
        ("blocks", "input", lambda x: x.half(), "input is torch.bfloat16"),
        ("blocks", "input", lambda x: x.to(E4M3), "input is torch.bfloat16"),
        ("blocks", "input", lambda x: x.t().contiguous().t(), "input is rows without gaps"),
        ("blocks", "input_scale", be(torch.ones, 4, 2), "the library rounds the input"),
        ("blocks", "weight", lambda weight: weight[:320], "tiles of up to 128 divide the outputs"),
        ("blocks", "weight", lambda weight: weight[:, :192].contiguous(), "can be multiplied"),
        ("blocks", "weight_scale", lambda scale: scale.half(), "scales is torch.float32"),
        (
            "blocks",
            "weight_scale",
            lambda scale: scale.repeat_interleave(128, 0, output_size=384),
            "each whole block has a scale",
        ),
        ("blocks", "out", lambda out: out.half(), "out is torch.bfloat16"),
        ("blocks", "out", lambda out: out[:, ::2], "out is rows without gaps"),
    ],
)
def test_the_fakes_refuse_misuse(
    which: str,
    name: str,
    change: Callable[[Any], Any],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRTLLM_DG_ENABLED", "0")
    calls = Calls()
    calls.run(which)
    arguments = getattr(calls, which)
    arguments[name] = change(arguments.get(name))
    with pytest.raises(ContractError, match=named):
        calls.run(which)


def test_the_fake_refuses_kernels_that_are_compiled_in_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRTLLM_DG_ENABLED", raising=False)
    with pytest.raises(ContractError, match="nothing is compiled"):
        Calls().run("blocks")
