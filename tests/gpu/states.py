"""Recurrent layers on the device: bits of every step, and time against reading each state once."""

import functools
from typing import Any, Final

import numpy as np
import torch

from tests.gpu.hardware import Hardware, hardware, rehearsing
from tests.gpu.kernels import run_tests
from tests.gpu.report import Report, demand
from tests.gpu.timing import read_rate
from worker.attention.backend import AttentionInputs
from worker.attention.kv_cache import StateShape
from worker.layers.delta_rule import DeltaRuleShape, DeltaRuleWeights
from worker.layers.mamba2 import Mamba2Shape, Mamba2Weights
from worker.layers.scratch import ByteBuffer
from worker.layers.short_conv import ShortConvShape, ShortConvWeights

STATES: Final = "tests/worker/layers/test_recurrence_kernels_gpu.py"
BLOCK: Final = 16
MAX_LOGGED: Final = 16
NUM_DRAFTED: Final = 4
SHAPES: Final[dict[str, Any]] = {
    "Granite 4 micro": Mamba2Shape(
        num_heads=64, head_size=64, num_groups=1, state_size=128, num_taps=4
    ),
    "Qwen3-Next": DeltaRuleShape(
        num_key_heads=16, num_value_heads=32, key_size=128, value_size=128, num_taps=4
    ),
    "LFM2 1.2B": ShortConvShape(channels=2048, num_taps=3),
    "small": Mamba2Shape(num_heads=4, head_size=8, num_groups=2, state_size=8, num_taps=3),
}
"""A layer of each kind of the sizes of these models, and one for rehearsals."""


def states(report: Report) -> None:
    """Run the tests of recurrent layers, then compare and time layers of real sizes.

    Reports times in a graph beside that of reading and writing each state once, without a target.
    """
    if not rehearsing():
        with report.part("tests"):
            run_tests(report, ["-m", hardware().pytest_marks, STATES])
    gpu = hardware()
    rate = read_rate(gpu)
    report.figure("read GB/s", rate / 1e9)
    for name in gpu.sizes.recurrent:
        with report.part(name):
            _layer(report, gpu, name, rate)


@torch.inference_mode()
def _layer(report: Report, gpu: Hardware, name: str, rate: float) -> None:
    """Compare steps of a layer bit by bit, and time decodes, drafts and prompts."""
    shape, prompt = SHAPES[name], gpu.sizes.state_prompt
    rule = gpu.recurrence(shape, _weights(gpu, shape))
    most = max(gpu.sizes.state_batches)
    size = shape.state_floats + MAX_LOGGED * shape.logged_floats
    slots = gpu.states(StateShape((size,), MAX_LOGGED), 2 + most, 2 * prompt)
    slots.reserve_graphs(most * (1 + NUM_DRAFTED))
    rows = _inputs(gpu, shape, max(prompt, most * (1 + NUM_DRAFTED)))
    run = functools.partial(rule.run, states=slots, layer=0, memory=ByteBuffer())

    def part(first: int, end: int) -> list[torch.Tensor]:
        return [each[first:end] for each in rows]

    def plan(begins: list[int], counts: list[int], num_drafts: int = 0) -> None:
        slots.plan_step(_step(begins, counts, num_drafts))

    plan([0], [prompt])
    whole = run(part(0, prompt))
    tail = prompt // 2
    plan([0], [tail])
    chunks = [run(part(0, tail))]
    for position in range(tail, tail + 4):
        plan([position], [1])
        chunks.append(run(part(position, position + 1)))
    plan([tail + 4], [3], 2)
    chunks.append(run(part(tail + 4, tail + 7)))
    plan([tail + 7], [prompt - tail - 7])
    chunks.append(run(part(tail + 7, prompt)))
    found, wanted = (gpu.accelerator().fetch(each) for each in (torch.cat(chunks), whole))
    demand(bool(wanted.isfinite().all()), "outputs are not finite")
    demand(torch.equal(found, wanted), "a token's bits depend on the steps")
    report.figure(f"{name}: same bits in", f"{len(chunks)} steps")
    plan([0], [prompt])
    seconds = gpu.median_seconds(lambda: run(part(0, prompt)), rounds=5)
    report.figure(f"{name}: prompt of {prompt}, us a token", seconds / prompt * 1e6)
    positions = slots.buffer.view(torch.int32)[:, -1]
    state_bytes = 2 * 4 * shape.state_floats
    for batch in gpu.sizes.state_batches:
        for num_drafts in (0, NUM_DRAFTED):
            count = 1 + num_drafts
            positions.fill_(prompt)
            slots.plan_graph(_step([prompt] * batch, [count] * batch, num_drafts), batch * count)
            replay = gpu.captured(functools.partial(run, part(0, batch * count)))
            seconds = gpu.median_seconds(replay)
            what = f"{name}: batch {batch}" + (f", drafts of {num_drafts}" if num_drafts else "")
            share = batch * state_bytes / rate / seconds
            report.figure(what, {"us": seconds * 1e6, "share of state traffic": share})


def _step(begins: list[int], counts: list[int], num_drafts: int) -> AttentionInputs:
    """A step of sequences, each in a block and slot of its own: 1, 2, …"""
    ends = np.add(begins, counts, dtype=np.int32)
    start = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    table = np.arange(1, 1 + len(counts), dtype=np.int32)[:, None]
    drafts = np.full(len(counts), num_drafts, dtype=np.int32)
    return AttentionInputs(start, ends, table, np.zeros(start[-1], dtype=np.int64), drafts)


def _weights(gpu: Hardware, shape: Any) -> Any:
    """Random weights of a layer, under which states neither vanish nor grow."""

    def randn(*size: int) -> torch.Tensor:
        return 0.5 * torch.randn(*size, device=gpu.device)

    taps = randn(shape.num_taps, shape.channels)
    if isinstance(shape, ShortConvShape):
        return ShortConvWeights(taps, randn(shape.channels))
    is_mamba = isinstance(shape, Mamba2Shape)
    heads = shape.num_heads if is_mamba else shape.num_value_heads
    decay, bias = -torch.rand(heads, device=gpu.device), randn(heads)
    if not is_mamba:
        return DeltaRuleWeights(taps, decay, bias, 1 + randn(shape.value_size), 1e-5)
    return Mamba2Weights(
        taps, randn(shape.channels), decay, bias, randn(heads), 1 + randn(shape.inner), 1e-5
    )


def _inputs(gpu: Hardware, shape: Any, num_rows: int) -> list[torch.Tensor]:
    """The projections of the input of tokens."""
    return [
        torch.randn(num_rows, columns, device=gpu.device).bfloat16()
        for columns in shape.input_sizes
    ]
