"""Filtering and drawing on a device equals filtering and drawing on the host.

The kernels run in Triton's interpreter and are compiled for Hopper without a GPU.
"""

from typing import Any

import numpy as np
import pytest
import torch

from tests.fakes.fake_cuda import FakeCuda
from tests.fakes.fake_device import on_host
from tests.fakes.triton import interpret_kernels, need_triton
from tests.worker.ahead_of_time import Kernel, compiled
from tests.worker.reference.filters import check_kept, filter_by_sorting
from tests.worker.reference.torch_kernels import draw_by_torch
from tests.worker.sampling.filtered_cases import FILTERED, filtered_case, kept_tokens, rows_of
from tests.worker.sampling.settings import backend_of, each_backend
from worker.batch.transfers import HostTransfers
from worker.cuda.sampling import device_filters
from worker.cuda.sampling.device_kernels import TritonDraw
from worker.cuda.sampling.device_sampler import DeviceDraw
from worker.cuda.transfers import QueuedTransfers
from worker.reference.sampling import ROUNDS, TorchBackend
from worker.sampling.row_params import RowParams

pytestmark = pytest.mark.suite("devices")

VOCAB_SIZE = 3001


@pytest.fixture(params=["torch", "triton"])
def draw(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> TritonDraw:
    if request.param == "torch":
        return draw_by_torch
    interpret_kernels(monkeypatch)
    return TritonDraw()


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


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.bfloat16) for name in CASES), ("both", torch.float32)]
)
def test_drawn_tokens_equal_those_of_the_host(
    name: str, dtype: torch.dtype, draw: TritonDraw
) -> None:
    logits, rows = logits_of(4, dtype), rows_of(4, **CASES[name])
    found = DeviceDraw(HostTransfers(), draw).draw_tokens(logits, rows)
    assert found.tolist() == on_the_host(logits, rows)


@pytest.mark.parametrize("name", ["top-k of some", "both", "all, and greedy"])
def test_dropped_logits_are_masked_on_request(name: str, draw: TritonDraw) -> None:
    """Survivals of drafts are probabilities among the tokens that the filters keep."""
    logits, rows = logits_of(4, torch.float32), rows_of(4, **CASES[name])
    wanted = logits.clone()
    random = np.flatnonzero(rows["temperature"] > 0)
    filter_by_sorting(wanted, random, rows[random])
    drawing = DeviceDraw(HostTransfers(), draw)
    tokens = drawing.draw_tokens(logits.clone(), rows)
    assert torch.equal(drawing.draw_tokens(logits, rows, masks_dropped=True), tokens)
    assert torch.equal(logits, wanted)


def test_a_drawn_token_does_not_depend_on_its_row(draw: TritonDraw) -> None:
    logits, rows = logits_of(3, torch.float32), rows_of(3, top_p=0.9)
    order = np.array([2, 0])
    sampling = DeviceDraw(HostTransfers(), draw)
    all_tokens = sampling.draw_tokens(logits, rows)
    assert sampling.draw_tokens(logits[order], rows[order]).tolist() == all_tokens[order].tolist()


@pytest.mark.parametrize("name", CASES)
def test_drawing_does_not_wait_for_the_device(name: str) -> None:
    logits, rows = logits_of(7, torch.bfloat16), rows_of(7, **CASES[name])
    with FakeCuda() as cuda:
        sampling = DeviceDraw(QueuedTransfers(cuda.device), draw_by_torch)
        found = sampling.draw_tokens(cuda.device.adopt(logits), rows)
    assert cuda.device.completed == 0
    assert on_host(found).tolist() == on_the_host(logits, rows)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret_kernels(monkeypatch)


@pytest.mark.parametrize("kind", ["bfloat16", "whole numbers", "flat, a few best"])
def test_the_kernels_keep_exactly_the_tokens_of_the_definition(
    kind: str, interpreted: None
) -> None:
    vocab_size = 97 if kind == "whole numbers" else 1031
    logits, rows = filtered_case(9, vocab_size, kind, **FILTERED)
    check_kept(logits, kept_tokens(logits, rows), rows)


def test_a_row_of_equal_logits_keeps_the_lowest_ids(interpreted: None) -> None:
    logits = torch.full((5, 1031), -2.5)
    logits[4, 1:] = float("-inf")
    rows = rows_of(
        5, top_k=(0, 9, 0, 9, 5), top_p=(0.25, 1.0, 1.0, 0.5, 0.5), min_p=(0, 0, 1.0, 0, 0)
    )
    kept = kept_tokens(logits, rows) & (logits > float("-inf"))
    assert kept.sum(dim=1).tolist() == [258, 9, 1031, 5, 1]
    assert all(row[:count].all() for row, count in zip(kept, kept.sum(dim=1), strict=True))


def test_cuts_do_not_depend_on_other_rows(interpreted: None) -> None:
    logits, rows = filtered_case(2, 9000, "bfloat16", top_p=(0.9, 1.0), top_k=(0, 40))
    together = kept_tokens(logits, rows)
    check_kept(logits, together, rows)
    assert torch.equal(kept_tokens(logits[1:2], rows[1:2]), together[1:2])


@each_backend
def test_the_cut_of_a_large_vocabulary_is_that_of_the_host(  # type: ignore[no-untyped-def]
    variant, interpreted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The interpreter needs a hundredth of a second for each program.
    monkeypatch.setattr(device_filters, "_CHUNK", 1 << 15)
    monkeypatch.setattr(device_filters, "_CANDIDATES", 1 << 14)
    backend = backend_of(variant)
    logits, rows = filtered_case(1, 128_256, "bfloat16", temperature=1.0, top_p=0.9)
    host = logits.clone()
    backend.filter(host, np.arange(1), rows)
    kept = kept_tokens(logits, rows) & (logits > float("-inf"))
    differing = kept != (host > float("-inf"))
    # Two float32 sums of 128,256 terms in different orders differ by about 1e-5.
    assert float(logits.double().softmax(dim=1)[differing].sum()) < 1e-4


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_rows_of_nan_and_infinity_end(interpreted: None) -> None:
    """The engine ends such sequences; their draws only must not hang or read elsewhere."""
    logits = torch.randn(5, 97, generator=torch.Generator().manual_seed(0))
    logits[0, 5] = float("nan")
    logits[1] = float("nan")
    logits[2, 7] = float("inf")
    logits[3] = float("-inf")
    rows = rows_of(5, top_k=20, top_p=0.9)
    found = DeviceDraw(HostTransfers(), TritonDraw()).draw_tokens(logits, rows)
    assert all(0 <= token < 97 for token in found.tolist())
    one = DeviceDraw(HostTransfers(), TritonDraw()).draw_tokens(logits[4:], rows[4:])
    assert one.tolist() == found[4:].tolist() == on_the_host(logits[4:], rows[4:])


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
    cuts = {"filter_of_row": "*i64", "cuts": "*i32"}
    name = "sampling.draw_chunk"
    kernels = [
        Kernel(
            name,
            signature,
            constants | {"filter_of_row": None, "cuts": None, "filtered": False},
        ),
        Kernel(name, signature | cuts, constants | {"filtered": True}),
    ]
    assert ["div.rn.f32" in ptx for ptx in compiled(kernels)] == [False, True]
