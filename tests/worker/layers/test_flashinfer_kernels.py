"""Norms, gates and rotary embedding on the strict fake FlashInfer, and the misuse it refuses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.fakes.fake_device import FakeDevice, on_host
from tests.fakes.fake_flashinfer_rows import FakeRowKernels
from tests.fakes.fake_paged_wrapper import ContractError
from worker.cuda.layers.flashinfer_kernels import FlashInferNorm, FlashInferRotary, flashinfer_gate
from worker.layers.norm import NormWeight
from worker.models.rotary import rotate
from worker.reference.layers import TorchNorm, torch_gate

BF16 = torch.bfloat16
EPS = 1e-5


class Device:
    """A fake device with the fake library."""

    def __init__(self) -> None:
        self.device = FakeDevice()
        self.library = FakeRowKernels(self.device)

    def random(self, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        generator = torch.Generator().manual_seed(sum(shape))
        return self.device.adopt(torch.randn(shape, generator=generator).to(dtype))

    def norm(self, weight: torch.Tensor) -> FlashInferNorm:
        return FlashInferNorm(self.library, TorchNorm(NormWeight(weight, EPS)))


def near(found: torch.Tensor, exact: torch.Tensor) -> bool:
    """Equal up to one rounding."""
    return torch.allclose(on_host(found).double(), exact, rtol=2.0**-7, atol=1e-5)


def exact_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = on_host(x).double()
    scale = (wide.square().mean(-1, keepdim=True) + EPS).rsqrt()
    return wide * scale * on_host(weight).double()


def test_a_norm_of_rows_and_of_heads_inside_a_product() -> None:
    setup = Device()
    x, weight = setup.random(5, 96), setup.random(96)
    assert near(setup.norm(weight)(x), exact_norm(x, weight))
    heads, of_head = setup.random(3, 6 * 64).view(3, 6, 64)[:, 2:4], setup.random(64)
    found = setup.norm(of_head)(heads)
    assert near(found, exact_norm(heads, of_head))
    assert setup.library.num_calls == {"rmsnorm": 2}


def test_unsupported_norms_fall_back_to_our_kernels() -> None:
    setup = Device()
    weight = setup.random(64).float() + 1.0
    heads = setup.random(3, 4, 64)
    assert near(setup.norm(weight)(heads), exact_norm(heads, weight))
    x = setup.random(3, 64, dtype=torch.float32)
    assert near(setup.norm(setup.random(64))(x), exact_norm(x, setup.random(64)))
    gate_up = setup.random(2, 2 * 20)
    gate = flashinfer_gate(setup.library, "silu", torch_gate("silu"))
    first, second = on_host(gate_up).double().chunk(2, dim=1)
    assert near(gate(gate_up), F.silu(first) * second)
    assert not setup.library.num_calls


@pytest.mark.parametrize("name", ["silu", "gelu_tanh"])
def test_a_gate(name: Any) -> None:
    setup = Device()
    gate_up = setup.random(4, 2 * 48)
    found = flashinfer_gate(setup.library, name, torch_gate(name))(gate_up)
    gate, up = on_host(gate_up).double().chunk(2, dim=1)
    inner = F.silu(gate) if name == "silu" else F.gelu(gate, approximate="tanh")
    assert near(found, inner * up)
    assert setup.library.num_calls.total() == 1


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_queries_and_keys_are_rotated_in_place(head_dim: int) -> None:
    setup = Device()
    fused = setup.random(5, 7 * head_dim).view(5, 7, head_dim)
    before = on_host(fused).clone()
    angles = torch.randn(5, head_dim // 2, generator=torch.Generator().manual_seed(1))
    rotation = torch.stack((angles.cos(), angles.sin()), dim=1)
    turn = FlashInferRotary(setup.library, setup.device)
    turn(fused[:, :4], fused[:, 4:6], setup.device.adopt(rotation))
    turned = rotate(before.double(), rotation.double())
    assert near(fused[:, :6], turned[:, :6])
    assert torch.equal(on_host(fused)[:, 6], before[:, 6])
    assert setup.library.num_calls == {"rope": 1}


def test_buffers_grow_for_a_longer_step() -> None:
    setup = Device()
    turn = FlashInferRotary(setup.library, setup.device)
    count = 9000
    query, key = (setup.device.adopt(torch.ones(count, 1, 64, dtype=BF16)) for _ in range(2))
    rotation = torch.zeros(count, 2, 32)
    rotation[:, 0] = torch.arange(count)[:, None] / 100
    turn(query, key, setup.device.adopt(rotation))
    assert near(key[:, 0, :1], rotation[:, 0, :1].to(BF16).double())


def positions(setup: Device, **changed: Any) -> dict[str, Any]:
    """Arguments of a correct rotary call, with some of them changed."""
    adopt = setup.device.adopt
    return {
        "positions": adopt(torch.arange(3)),
        "query": setup.random(3, 128),
        "key": setup.random(3, 64),
        "head_size": 64,
        "cos_sin_cache": setup.random(3, 64, dtype=torch.float32),
    } | changed


Plant = Callable[[Device], object]
VIOLATIONS: dict[str, tuple[str, Plant]] = {
    "a weight of another dtype": (
        "one dtype|16 bits",
        lambda d: d.library.rmsnorm(
            d.random(2, 64), d.random(64, dtype=torch.float32), out=d.random(2, 64)
        ),
    ),
    "float16 beside bfloat16": (
        "one dtype",
        lambda d: d.library.rmsnorm(
            d.random(2, 64), d.random(64, dtype=torch.float16), out=d.random(2, 64)
        ),
    ),
    "no place for the result": (
        "has its place",
        lambda d: d.library.rmsnorm(d.random(2, 64), d.random(64)),
    ),
    "a result of another shape": (
        "input's shape",
        lambda d: d.library.rmsnorm(d.random(2, 64), d.random(64), out=d.random(3, 64)),
    ),
    "a column of a norm": (
        "follow one another",
        lambda d: d.library.rmsnorm(d.random(64, 2).t(), d.random(64), out=d.random(2, 64)),
    ),
    "host memory": (
        "on the device",
        lambda d: d.library.rmsnorm(
            torch.zeros(2, 64, dtype=BF16), d.random(64), out=d.random(2, 64)
        ),
    ),
    "a half that begins between two vectors": (
        "16 bytes",
        lambda d: d.library.silu_and_mul(d.random(2, 40), out=d.random(2, 20)),
    ),
    "a gate of rows that are apart": (
        "contiguous",
        lambda d: d.library.silu_and_mul(d.random(2, 256)[:, :128], out=d.random(2, 64)),
    ),
    "a table of 16 bits": (
        "float32",
        lambda d: d.library.apply_rope_with_cos_sin_cache_inplace(
            **positions(d, cos_sin_cache=d.random(3, 64))
        ),
    ),
    "a position behind the table": (
        "in the table",
        lambda d: d.library.apply_rope_with_cos_sin_cache_inplace(
            **positions(d, positions=d.device.adopt(torch.arange(1, 4)))
        ),
    ),
    "neighbours in place of halves": (
        "halves",
        lambda d: d.library.apply_rope_with_cos_sin_cache_inplace(**positions(d, is_neox=False)),
    ),
    "positions of the host": (
        "on the device",
        lambda d: d.library.apply_rope_with_cos_sin_cache_inplace(
            **positions(d, positions=torch.arange(3))
        ),
    ),
    "keys of other tokens": (
        "has a position",
        lambda d: d.library.apply_rope_with_cos_sin_cache_inplace(
            **positions(d, key=d.random(2, 64))
        ),
    ),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_misuse_is_refused_by_the_fake(name: str) -> None:
    what, plant = VIOLATIONS[name]
    with pytest.raises(ContractError, match=what):
        plant(Device())


def test_the_calls_behind_the_violations_are_accepted() -> None:
    setup = Device()
    setup.library.apply_rope_with_cos_sin_cache_inplace(**positions(setup))
    setup.library.rmsnorm(setup.random(2, 64), setup.random(64), out=setup.random(2, 64))
    setup.library.silu_and_mul(setup.random(2, 128), out=setup.random(2, 64))
