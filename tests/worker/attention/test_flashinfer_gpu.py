"""The FlashInfer backend on a GPU against float64, in the cases of test_flashinfer.py.

Without prebuilt kernels the library compiles them on first use, which takes minutes. The tests of
graphs and of plans ahead of the device run on the strict fake as well.
"""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.fakes.fake_device import FakeDevice
from tests.fakes.fake_flashinfer import FakeFlashInfer
from tests.worker.attention.flashinfer_cases import (
    CASES,
    DECODES,
    LATENT,
    MIXED,
    SHARING,
    case_of,
    sharing_two_pages,
)
from tests.worker.attention.steps import LAYER, Step
from tests.worker.reference.torch_kernels import store_by_index
from worker.attention.backend import AttentionInputs
from worker.cuda.accelerator import Accelerator
from worker.cuda.attention.flashinfer import load_library
from worker.cuda.attention.flashinfer_group import Options
from worker.cuda.attention.flashinfer_latent import create_flashinfer
from worker.cuda.attention.kv_store import TritonStore
from worker.cuda.attention.paged_batch import pad_decodes

CUDA = torch.device("cuda", 0)
LONG_SLEEP = 50_000_000
"""Cycles: tens of milliseconds, many steps of the host."""


class Gpu:
    """The device, its library and its kernel for K and V."""

    def __init__(self) -> None:
        self.accelerator: Any = Accelerator(CUDA)
        self.library: Any = load_library()
        self.store: Any = TritonStore()

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the device."""
        return tensor.to(CUDA)

    def keep_busy(self) -> None:
        """Queue work that takes longer than the host needs to queue the next."""
        torch.cuda._sleep(LONG_SLEEP)


class StrictFake(Gpu):
    """A fake device that runs queued work only when waited for, and a fake library that refuses
    misuse.
    """

    def __init__(self) -> None:
        self.accelerator = FakeDevice()
        self.library = FakeFlashInfer(self.accelerator)
        self.store = store_by_index

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        adopted: torch.Tensor = self.accelerator.adopt(tensor)
        return adopted

    def keep_busy(self) -> None: ...


on_gpu = pytest.mark.parametrize(
    "device", [pytest.param(Gpu, marks=pytest.mark.gpu)], indirect=True, ids=["gpu"]
)
on_both = pytest.mark.parametrize(
    "device",
    [pytest.param(Gpu, marks=pytest.mark.gpu), StrictFake],
    indirect=True,
    ids=["gpu", "fake"],
)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Gpu:
    found: Gpu = request.param()
    return found


class OnDevice:
    """A step whose cache and tensors are on the device."""

    def __init__(self, device: Gpu, step: Step, **options: Any) -> None:
        self.step = step
        self._fetch = device.accelerator.fetch
        self._cache = copy.copy(step.kv_cache)
        self._cache.buffer = device.adopt(step.kv_cache.buffer)
        case = step.case
        self.backend = create_flashinfer(
            self._cache,
            case.shape,
            case.dtype,
            device.accelerator,
            device.library,
            device.store,
            Options(**options),
        )
        query, key, value = step.qkv(slice(None))
        self.parts = [
            None if each is None else device.adopt(each)
            for each in (query, key, value, step.rotation)
        ]
        self._sinks = None if step.sinks is None else device.adopt(step.sinks)

    def plan(self, inputs: AttentionInputs) -> None:
        self.backend.plan(self.step.of_all_groups(inputs))

    def run(self, parts: list[torch.Tensor | None] | None = None) -> torch.Tensor:
        """Queue the step; q and k are copied, because the backend rotates them in place."""
        query, key, value, rotation = parts or self.parts
        assert query is not None
        assert key is not None
        assert rotation is not None
        return self.backend.run(LAYER, query.clone(), key.clone(), value, rotation, self._sinks)

    def result(self) -> torch.Tensor:
        """Wait for the output of the whole step, float64 on the host."""
        self.plan(self.step.inputs)
        return self.on_host(self.run()).double()

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        fetched: torch.Tensor = self._fetch(tensor)
        return fetched

    def expected(self) -> torch.Tensor:
        """Expected output in float64 over the K and V that the device wrote."""
        self.step.kv_cache.buffer.copy_(self.on_host(self._cache.buffer))
        return self.step.expected()


@on_gpu
@pytest.mark.parametrize("name", CASES)
def test_output_equals_float64(device: Gpu, name: str) -> None:
    there = OnDevice(device, Step(CASES[name]))
    result = there.result()
    exact = there.expected()
    assert result.isfinite().all()
    assert (result - exact).norm() < 5e-3 * exact.norm()


@on_both
def test_a_decode_has_the_same_bits_alone_where_sequences_are_not_split(device: Gpu) -> None:
    step = Step(case_of(((1500, 1), *((300, 1),) * 20)))
    there = OnDevice(device, step, batch_invariant=True)
    together = there.result()[:1]
    of_all = step.inputs
    there.plan(
        AttentionInputs(
            of_all.query_start[:2],
            of_all.seq_lens[:1],
            of_all.block_table[:1],
            of_all.slot_mapping[:1],
        )
    )
    alone = there.run([None if each is None else each[:1] for each in there.parts])
    assert torch.equal(there.on_host(alone).double(), together)


@on_gpu
@pytest.mark.parametrize("cascade_from", [0, 1])
def test_sinks_take_part_in_the_softmax(device: Gpu, cascade_from: int) -> None:
    there = OnDevice(device, Step(case_of(MIXED, sinks=True)), cascade_from=cascade_from)
    result = there.result()
    exact = there.expected()
    assert (result - exact).norm() < 5e-3 * exact.norm()


@on_gpu
def test_keys_and_values_of_eight_bits(device: Gpu) -> None:
    there = OnDevice(device, Step(case_of(MIXED, kv_dtype=torch.float8_e4m3fn)))
    result = there.result()
    exact = there.expected()
    assert (result - exact).norm() < 1e-2 * exact.norm()


@on_gpu
@pytest.mark.parametrize("name", SHARING)
def test_cascade_attention_equals_separate_attention(device: Gpu, name: str) -> None:
    results = []
    for cascade_from in (0, 1):
        there = OnDevice(device, Step(case_of(SHARING[name])), cascade_from=cascade_from)
        there.plan(sharing_two_pages(there.step))
        results.append(there.on_host(there.run()).double())
    assert (results[1] - results[0]).norm() < 5e-3 * results[0].norm()


@on_gpu
@pytest.mark.parametrize("num_heads", [16, 20, 128])
def test_latents_of_long_chunks_and_splits_equal_float64(device: Gpu, num_heads: int) -> None:
    """Chunks begin at any token, where a mask that rounds loses a query's own key."""
    chunks = tuple((57 + 13 * n, 70 + n) for n in range(6))
    sequences = (*chunks, (9000, 1), (5000, 33))
    there = OnDevice(device, Step(case_of(sequences, **LATENT | {"num_heads": num_heads})))
    result = there.result()
    exact = there.expected()
    errors = (result - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert errors.max() < 2e-2
    assert (result - exact).norm() < 5e-3 * exact.norm()


@on_both
@pytest.mark.parametrize("fields", [{}, {"sinks": True}, {"window": 3000}], ids=str)
@torch.inference_mode()
def test_a_long_sequence_among_short_ones(device: Gpu, fields: dict[str, Any]) -> None:
    """40 decodes and one with 5,000 tokens before it, eager and by a graph.

    The graph is captured with a plan in which all are short.
    """
    short = tuple((11 + 7 * n, 1) for n in range(40))
    step = Step(case_of(((5000, 1), *short), num_heads=16, num_kv_heads=8, **fields))
    size = len(step.inputs.seq_lens)
    outputs = []
    for capture_sizes in ((), (size,)):
        there = OnDevice(device, step, capture_sizes=capture_sizes, capture_pages=1500)
        if capture_sizes:
            few = replace(
                step.inputs,
                seq_lens=np.minimum(step.inputs.seq_lens, 9),
                block_table=np.zeros_like(step.inputs.block_table),
            )
            for inputs in (few, step.inputs, few):
                there.plan(inputs)
                there.run()
            graph, output = device.accelerator.capture(there.run)
            for inputs in (step.inputs, few, step.inputs):
                there.plan(inputs)
                graph.replay()
            result = there.on_host(output).double()
        else:
            result = there.result()
        exact = there.expected()
        errors = (result - exact).norm(dim=-1) / exact.norm(dim=-1).clamp(min=1e-3)
        assert result.isfinite().all()
        assert errors.max() < 2e-2
        outputs.append(result)
    # The same chunks, so the same sums.
    assert torch.equal(*outputs)


@on_both
@pytest.mark.parametrize("fields", [{}, LATENT], ids=["values", "latents"])
@torch.inference_mode()
def test_plans_made_ahead_of_the_device_do_not_interfere(
    device: Gpu, fields: dict[str, Any]
) -> None:
    sequences = tuple((40 * n, 1 + n % 3) for n in range(1, 9))
    there = OnDevice(device, Step(case_of(sequences, **fields)))
    rows = [0, 7, 3, 5, 1, 6, 2, 4] * 5

    def run(row: int) -> torch.Tensor:
        tokens = slice(*there.step.inputs.query_start[row : row + 2])
        there.plan(there.step.only(row))
        return there.run([None if each is None else each[tokens] for each in there.parts])

    alone = {row: there.on_host(run(row)) for row in rows}
    device.keep_busy()
    results = [run(row) for row in rows]
    for row, result in zip(rows, results, strict=True):
        assert torch.equal(there.on_host(result), alone[row])


@on_both
@pytest.mark.parametrize("fields", [{}, {"sinks": True}, LATENT], ids=["", "sinks", "latents"])
@torch.inference_mode()
def test_a_replayed_graph_uses_the_latest_plan(device: Gpu, fields: dict[str, Any]) -> None:
    step = Step(case_of(tuple((before + 100, 1) for before, _ in DECODES), **fields))
    there = OnDevice(device, step, capture_sizes=(4,), capture_pages=64)
    parts = [
        None if each is None else torch.cat((each, torch.zeros_like(each[:1])))
        for each in there.parts
    ]
    long = pad_decodes(step.inputs, 4)
    short = replace(long, seq_lens=np.minimum(long.seq_lens, 9))
    for inputs in (long, short):
        there.plan(inputs)
        there.run(parts)
    there.plan(short)
    graph, output = device.accelerator.capture(lambda: there.run(parts))
    for _ in range(3):
        there.plan(long)
        graph.replay()
        result, exact = there.on_host(output), there.expected()
        assert (result[:3].double() - exact).norm() < 5e-3 * exact.norm()
        assert not result[3].any()
