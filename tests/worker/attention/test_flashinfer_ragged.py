"""Attention of encoders on FlashInfer's ragged wrapper: masks, results, and refused misuse."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.fakes.fake_device import FakeDevice, on_host
from tests.fakes.fake_flashinfer import FakeFlashInfer
from tests.fakes.fake_paged_wrapper import ContractError
from tests.fakes.fake_ragged_wrapper import FakeRagged, visible_keys
from worker.attention.backend import AttentionInputs, AttentionShape
from worker.attention.kv_cache import KVCache, kv_cache_geometry, scratch_layout
from worker.cuda.accelerator import Accelerator
from worker.cuda.attention.flashinfer import load_library
from worker.cuda.attention.flashinfer_group import Options
from worker.cuda.attention.flashinfer_latent import create_flashinfer
from worker.cuda.attention.flashinfer_ragged import (
    FlashInferRaggedAttention,
    padded_dim,
    ragged_parts,
)
from worker.models.rotary import rotate
from worker.reference.attention import dense_attention

BF16, CUDA = torch.bfloat16, torch.device("cuda")
STEPS = [[23, 1, 40, 5, 130], [1], [3, 2], [65, 64, 66]]


@pytest.mark.parametrize("window", [None, 1, 2, 5, 65])
@pytest.mark.parametrize("length", [1, 2, 4, 5, 6, 64, 65, 66, 129, 200])
def test_each_query_sees_its_window_once(length: int, window: int | None) -> None:
    """Beside a longer sequence, so that both parts exist."""
    lengths = np.array([length, 300], dtype=np.int32)
    found, first = torch.zeros(length, length, dtype=torch.bool), 0
    for part in ragged_parts(lengths, window):
        count = int(part.counts[0])
        assert part.may_split or part.counts.max() < (window or 1)
        found[first : first + count] = visible_keys(count, length, part.causal, part.window_left)
        first += count
    assert first == length
    place = torch.arange(length)
    expected = (place[:, None] - place).abs() < (length if window is None else window)
    assert torch.equal(found, expected)


class Setup:
    """A backend with a layer of each window, on a fake device or a GPU."""

    def __init__(
        self, shape: AttentionShape, windows: list[int | None], is_real: bool = False
    ) -> None:
        self.device: Any = Accelerator(CUDA) if is_real else FakeDevice()
        self.library = load_library() if is_real else FakeFlashInfer(self.device)
        self.is_real = is_real
        layout = scratch_layout(windows)
        geometry = kv_cache_geometry(layout, shape.num_kv_heads, shape.head_dim, BF16, 2)
        self.cache = KVCache(geometry, layout, 64, 16)
        store: Any = None  # pages are not written
        self.backend: Any = create_flashinfer(
            self.cache, shape, BF16, self.device, self.library, store, Options()
        )
        assert isinstance(self.backend, FlashInferRaggedAttention)

    def sent(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(CUDA) if self.is_real else self.device.adopt(tensor)

    def plan(self, lengths: list[int]) -> None:
        counts = np.array(lengths, dtype=np.int32)
        starts = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(counts, out=starts[1:])
        table = np.zeros((len(counts), 1), dtype=np.int32)
        step = AttentionInputs(starts, counts, table, np.zeros(starts[-1], dtype=np.int64))
        self.backend.plan([step])


@pytest.mark.parametrize("head_dim", [32, 64])
@pytest.mark.parametrize("heads", [(4, 4), (4, 1)], ids=str)
def test_results_are_those_of_the_definition(heads: tuple[int, int], head_dim: int) -> None:
    check_results(*heads, head_dim, is_real=False)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [32, 64])
@pytest.mark.parametrize("heads", [(4, 4), (4, 1)], ids=str)
def test_results_on_a_gpu(heads: tuple[int, int], head_dim: int) -> None:
    check_results(*heads, head_dim, is_real=True)


def check_results(num_heads: int, kv_heads: int, head_dim: int, is_real: bool) -> None:
    """Run several steps with one backend, layers with and without a window, strided inputs."""
    shape = AttentionShape(num_heads, kv_heads, head_dim, head_dim**-0.5, bidirectional=True)
    windows: list[int | None] = [None, 9, 9]
    setup = Setup(shape, windows, is_real)
    generator = torch.Generator().manual_seed(0)
    for lengths in STEPS:
        total = sum(lengths)
        setup.plan(lengths)
        for layer, window in enumerate(windows):
            fused = torch.randn(total, num_heads + 2 * kv_heads, head_dim, generator=generator)
            angles = torch.randn(total, head_dim // 2, generator=generator)
            rotation = torch.stack((angles.cos(), angles.sin()), 1)
            fused = fused.to(BF16)
            query, key, value = fused.clone().split([num_heads, kv_heads, kv_heads], 1)
            turned = (rotate(each, rotation).float() for each in (query, key))
            expected = _definition(*turned, value.float(), lengths, shape, window)
            own = setup.sent(fused).split([num_heads, kv_heads, kv_heads], 1)
            found = setup.backend.run(layer, *own, setup.sent(rotation))
            assert is_real or setup.device.holds(found)
            assert found.is_contiguous()
            found = found.cpu() if is_real else on_host(found)
            assert torch.allclose(found.float(), expected, atol=0.02, rtol=0.02)


def _definition(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: list[int],
    shape: AttentionShape,
    window: int | None,
) -> torch.Tensor:
    parts, start = [], 0
    for length in lengths:
        own = slice(start, start + length)
        k, v = key[own].transpose(0, 1), value[own].transpose(0, 1)
        parts.append(dense_attention(query[own], k, v, shape, window))
        start += length
    return torch.cat(parts)


@pytest.mark.parametrize(
    ("head_dim", "size"), [(32, 64), (64, 64), (80, 128), (256, 256), (288, 0)]
)
def test_narrow_heads_are_padded(head_dim: int, size: int) -> None:
    assert padded_dim(head_dim) == size


# ---- what the fake refuses -----------------------------------------------------------------------


class Calls:
    """Correct arguments of a wrapper, of two texts of 6 and 9 tokens."""

    def __init__(self) -> None:
        self.device = device = FakeDevice()
        wrapper = FakeFlashInfer(device).BatchPrefillWithRaggedKVCacheWrapper(
            device.zeros(1 << 20, torch.uint8), "NHD", backend="fa2"
        )
        self.wrapper: FakeRagged = wrapper
        self.planning: dict[str, Any] = {
            "qo_indptr": torch.tensor([0, 6, 15], dtype=torch.int32),
            "kv_indptr": torch.tensor([0, 6, 15], dtype=torch.int32),
            "num_qo_heads": 4,
            "num_kv_heads": 2,
            "head_dim_qk": 64,
            "causal": False,
            "window_left": -1,
            "sm_scale": 0.125,
            "q_data_type": BF16,
            "kv_data_type": BF16,
            "o_data_type": BF16,
        }

        def random(heads: int) -> torch.Tensor:
            return device.adopt(torch.randn(15, heads, 64).to(BF16))

        self.running = {"q": random(4), "k": random(2), "v": random(2), "out": random(4)}

    def all(self) -> None:
        self.wrapper.plan(**self.planning)
        self.wrapper.run(**self.running)


def test_correct_calls_pass() -> None:
    Calls().all()


@pytest.mark.parametrize(
    ("where", "name", "change", "named"),
    [
        ("planning", "qo_indptr", lambda each: each.long(), "qo_indptr is int32"),
        ("planning", "qo_indptr", lambda each: each[:2], "each row has queries and keys"),
        ("planning", "qo_indptr", lambda each: each * 0, "there are queries"),
        ("planning", "kv_indptr", lambda each: each * 0, "each row has keys"),
        ("planning", "window_left", lambda each: 3, "without a causal mask is not split"),
        ("planning", "head_dim_qk", lambda each: 32, "there are kernels for these heads"),
        ("planning", "kv_data_type", lambda each: torch.float8_e4m3fn, "keys are as the queries"),
        ("planning", "pos_encoding_mode", lambda each: "ROPE_LLAMA", "positions are in the keys"),
        ("running", "q", lambda each: each[:14], "q has the planned shape"),
        ("running", "k", lambda each: each[:14], "k has the planned shape"),
        ("running", "v", lambda each: each.float(), "v has the planned dtype"),
        ("running", "k", lambda each: torch.zeros(15, 2, 64, dtype=BF16), "k is on the device"),
        ("running", "out", lambda each: None, "out is given"),
    ],
)
def test_the_fake_refuses_misuse(
    where: str, name: str, change: Callable[[Any], Any], named: str
) -> None:
    calls = Calls()
    arguments = getattr(calls, where)
    arguments[name] = change(arguments.get(name))
    with pytest.raises(ContractError, match=named):
        calls.all()


def test_a_plan_waits_for_the_copy_of_the_one_before() -> None:
    calls = Calls()
    calls.all()
    with pytest.raises(ContractError, match="before the copy of the schedule"):
        calls.all()
