"""Filtering and drawing on a device equals filtering and drawing on the host.

The kernel runs in Triton's interpreter and is compiled for Hopper without a GPU.
"""

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.fake_cuda import FakeCuda
from tests.fakes.fake_device import on_host
from tests.worker.ahead_of_time import Kernel, compiled
from tests.worker.reference.filters import filter_by_sorting
from tests.worker.reference.torch_kernels import draw_by_torch
from tests.worker.sampling.settings import backend_of, each_backend, row_params
from worker.device.transfers import DevicePlacement, HostPlacement
from worker.sampling.device_kernels import TritonDraw
from worker.sampling.device_sampler import DeviceDraw, KeyedDraw
from worker.sampling.row_params import FILTERS, RowParams, torch_columns
from worker.sampling.torch_backend import ROUNDS, FilterPlan, TorchBackend, filter_logits

VOCAB_SIZE = 3001


def need_triton() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")


@pytest.fixture(params=["torch", "triton"])
def draw(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> KeyedDraw:
    if request.param == "torch":
        return draw_by_torch
    need_triton()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return TritonDraw()


def rows_of(count: int, seed: int = 0, **columns: Any) -> RowParams:
    generator = np.random.default_rng(seed)
    fields = {
        "temperature": generator.uniform(0.3, 2.0, count),
        "seed": generator.integers(0, 1 << 64, count, dtype=np.uint64),
        "choice": generator.integers(0, 1 << 32, count, dtype=np.uint32),
        "position": generator.integers(0, 1 << 32, count, dtype=np.uint32),
    }
    return row_params(
        count, **fields | {name: np.resize(value, count) for name, value in columns.items()}
    )


def logits_of(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Random logits with many ties and with tokens of probability 0."""
    generator = torch.Generator().manual_seed(count)
    logits = (4 * torch.randn(count, VOCAB_SIZE, generator=generator)).to(dtype)
    logits[:, ::11] = float("-inf")
    return logits


def on_the_host(logits: torch.Tensor, rows: RowParams) -> list[int]:
    """Draw row by row on the host, filtered by sorting."""
    backend, logits, tokens = TorchBackend(), logits.float().clone(), []
    for row in range(len(logits)):
        at, params = np.array([row]), rows[row : row + 1]
        if params["temperature"][0] < 1e-5:
            tokens.append(int(logits[row].argmax()))
            continue
        filter_by_sorting(logits, at, params)
        tokens += backend.draw(logits, at, params).tolist()
    return tokens


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy and random": {"temperature": (0.0, 1.0)},
    "top-k": {"top_k": (1, 5, 40)},
    "top-k of some": {"top_k": (0, 5, 99999)},
    "top-p": {"top_p": (0.1, 0.6, 0.95)},
    "top-p of some": {"top_p": (1.0, 0.6)},
    "both": {"top_k": (3, 50), "top_p": (0.9, 0.5, 0.7)},
    "min-p": {"min_p": (0.0, 0.05, 0.5)},
    "all": {"top_k": (0, 20), "top_p": (0.9, 1.0, 0.7), "min_p": (0.0, 0.02)},
    "all, and greedy": {"temperature": (0.0, 0.7, 1.3), "top_k": 20, "top_p": 0.9, "min_p": 0.02},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_drawn_tokens_equal_those_of_the_host(
    name: str, dtype: torch.dtype, draw: KeyedDraw
) -> None:
    logits, rows = logits_of(7, dtype), rows_of(7, **CASES[name])
    found = DeviceDraw(HostPlacement(), draw).draw_tokens(logits, rows)
    assert found.tolist() == on_the_host(logits, rows)


def test_a_drawn_token_does_not_depend_on_its_row(draw: KeyedDraw) -> None:
    logits, rows = logits_of(6, torch.float32), rows_of(6, top_p=0.9)
    order = np.array([4, 0, 5])
    sampling = DeviceDraw(HostPlacement(), draw)
    all_tokens = sampling.draw_tokens(logits, rows)
    assert sampling.draw_tokens(logits[order], rows[order]).tolist() == all_tokens[order].tolist()


@pytest.mark.parametrize("name", CASES)
def test_drawing_does_not_wait_for_the_device(name: str) -> None:
    logits, rows = logits_of(7, torch.bfloat16), rows_of(7, **CASES[name])
    with FakeCuda() as cuda:
        sampling = DeviceDraw(DevicePlacement(cuda.device), draw_by_torch)
        found = sampling.draw_tokens(cuda.device.adopt(logits), rows)
    assert cuda.device.completed == 0
    assert on_host(found).tolist() == on_the_host(logits, rows)


def filtered(logits: torch.Tensor, rows: RowParams) -> torch.Tensor:
    """Filter as a device does."""
    columns = [rows["temperature"].copy(), *torch_columns(rows, FILTERS)]
    plan = FilterPlan.of(rows, logits.shape[1])
    return filter_logits(logits, plan, *map(torch.from_numpy, columns))


STEPS = st.sampled_from((0.0, 0.25, 1.0, 3.0))
"""Steps between logits: many are equal, and they have both signs."""


@st.composite
def filtered_rows(draw: st.DrawFn) -> tuple[torch.Tensor, RowParams]:
    count, size = draw(st.integers(1, 4)), draw(st.integers(1, 200))
    seed, step = draw(st.integers(0, 1 << 30)), draw(STEPS)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, size, generator=generator)
    if step:
        logits = (logits * 3).round() * step
    gone = torch.rand(count, size, generator=generator) < draw(st.sampled_from((0.0, 0.3)))
    gone[:, 0] = False
    share = st.one_of(st.sampled_from((1e-6, 0.5, 0.999999, 1.0)), st.floats(0.01, 1.0))
    settings = {
        "temperature": draw(st.lists(st.floats(0.1, 5.0), min_size=count, max_size=count)),
        "top_p": draw(st.lists(share, min_size=count, max_size=count)),
        "top_k": draw(st.sampled_from((0, 0, 3))),
        "min_p": draw(st.sampled_from((0.0, 0.0, 0.1))),
    }
    rows = rows_of(count, seed, **settings)
    rows["top_k"][1:] = 0  # rows without top-k take the search of the nucleus
    return logits.masked_fill(gone, float("-inf")), rows


@given(filtered_rows())
@settings(max_examples=150, deadline=None)
def test_the_device_keeps_the_tokens_that_the_host_keeps(
    case: tuple[torch.Tensor, RowParams],
) -> None:
    """Exactly the same tokens, including ties at the edge."""
    logits, rows = case
    host = logits.clone()
    filter_by_sorting(host, np.arange(len(logits)), rows)
    assert torch.equal(filtered(logits, rows), host)


@each_backend
def test_a_nucleus_of_a_large_vocabulary_equals_that_of_the_host(variant) -> None:  # type: ignore[no-untyped-def]
    backend = backend_of(variant)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, 50_000, generator=generator) * torch.linspace(6, 0.5, 8)[:, None]
    rows = rows_of(8, temperature=1.0, top_p=np.linspace(0.05, 0.97, 8))
    found = filtered(logits, rows)
    host = logits.clone()
    backend.filter(host, np.arange(8), rows)
    differing = (found != host).sum(dim=1)
    # The kernels' exponentials may differ in the last bit.
    assert int(differing.max()) <= (variant != "reference")
    assert int((found > float("-inf")).sum()) > 10_000


def test_the_kernel_compiles_for_a_gpu() -> None:
    need_triton()
    constants = {"sample_stream": 0, "rounds": ROUNDS, "counters": 512}
    signature = {
        "logits": "*fp32",
        "temperatures": "*fp32",
        "seeds": "*i64",
        "choices": "*i64",
        "positions": "*i64",
        "sums": "*fp64",
        "tokens": "*i64",
        "vocab_size": "i32",
        "stride": "i64",
        "num_chunks": "i32",
    }
    kernel = Kernel("worker.sampling.device_kernels:TritonDraw", signature, constants)
    assert compiled([kernel])
