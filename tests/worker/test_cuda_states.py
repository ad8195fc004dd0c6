"""Models with recurrent states on a fake CUDA device: the tokens of the reference, and no waits.

The arithmetic of the layers is plain torch, from the plans that the kernels read on the device;
tests/worker/layers/test_recurrence_kernels.py has the kernels.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_core.busy_loop import OVERLAPPED
from engine_core.request import Request
from proto.messages.scheduler_output import SchedulerOutput
from tests.fakes.copy_streams import CopyingThread
from tests.fakes.cuda_runner import (
    NUM_ROWS,
    NUM_STATE_SLOTS,
    REQUEST_PARAMS,
    STATE_SIZES,
    VOCAB_SIZE,
    Harness,
    Model,
    OnFakeCuda,
    assert_mostly_equal,
    compute_by_torch,
    host_runner,
    num_cascades,
    serve,
)
from tests.fakes.drafts import SyntheticDrafts
from tests.fakes.fake_cuda import FakeCuda
from worker.cuda.block_copies import DeviceBlockBytes
from worker.cuda.formats import FixedRowsFormat
from worker.cuda.runner_builder import run_largest_step
from worker.step.model_runner import ModelRunner, SyncModelRunner

pytestmark = pytest.mark.suite("devices")

_OF_EACH_KIND = ("qwen3next", "mamba2", "lfm2")
"""One of each kind of recurrent layer, one of them without attention."""


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    compute_by_torch(monkeypatch)
    with FakeCuda() as fake:
        yield fake


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    """Models by name, each made when it is first asked for."""
    return {}


@pytest.fixture(params=_OF_EACH_KIND)
def model(
    request: pytest.FixtureRequest,
    models: dict[str, Model],
    tmp_path_factory: pytest.TempPathFactory,
) -> Model:
    name = request.param
    if name not in models:
        models[name] = Model(name, tmp_path_factory.mktemp(name))
    return models[name]


def harness_of(runner: Any, model: Model, num_blocks: int = 81, **settings: Any) -> Harness:
    groups = model.cache_groups()
    settings = {"num_state_slots": NUM_STATE_SLOTS, "groups": groups} | settings
    return Harness(runner, num_blocks, settings.pop("num_rows", NUM_ROWS), **settings)


def on_host(model: Model, num_blocks: int = 81, num_rows: int = NUM_ROWS) -> Harness:
    runner = SyncModelRunner(host_runner(model, num_rows))
    return harness_of(runner, model, num_blocks, num_rows=num_rows)


@pytest.mark.parametrize(
    ("model", "num_blocks", "eager"),
    [
        *(
            (name, *case)
            for name in _OF_EACH_KIND
            for case in ((81, False), (15, False), (81, True))
        ),
        *(
            pytest.param(name, 15, False, marks=pytest.mark.suite("rehearsal"))
            for name in STATE_SIZES
            if name not in _OF_EACH_KIND
        ),
    ],
    indirect=["model"],
)
def test_tokens_are_those_of_the_reference(
    model: Model, num_blocks: int, eager: bool, cuda: FakeCuda
) -> None:
    """In chunks beside decodes, and the same prompts again, from states in the cache.

    15 blocks are too few: requests are preempted.
    """
    host = on_host(model, num_blocks)
    wanted = serve(host) + serve(host)
    worker = OnFakeCuda(model, cuda, NUM_ROWS, enforce_eager=eager)
    ahead = harness_of(worker.runner, model, num_blocks, async_scheduling=True)
    assert serve(ahead) + serve(ahead) == wanted
    assert ahead.worker.most_unknown == OVERLAPPED
    assert (ahead.worker.num_preempted > 0) == (num_blocks < 81)
    assert (cuda.device.num_replays > 20) == (not eager)
    assert ahead.scheduler.pop_stats().prefix_cache_hits > 0 or num_blocks < 81


def test_no_step_waits_for_the_device(
    model: Model, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions in slots stay on the device, also of steps with drafts."""

    def refuse(*_: object) -> None:
        raise AssertionError("the host waits for the device")

    worker = OnFakeCuda(model, cuda, NUM_ROWS)
    monkeypatch.setattr(ModelRunner, "finish_on_host", refuse)
    monkeypatch.setattr(cuda.device, "fetch", refuse)
    drafting = SyntheticDrafts(
        0.5, lambda request, num_tokens: [3] * num_tokens, vocab_size=VOCAB_SIZE
    )
    harness = harness_of(worker.runner, model, async_scheduling=True, drafting=drafting)
    serve(harness)
    assert drafting.num_drafted > 5


@pytest.mark.parametrize(("acceptance", "eager"), [(0.0, False), (0.6, False), (1.0, True)])
def test_drafts_are_verified_and_rolled_back(
    acceptance: float, eager: bool, model: Model, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs take steps with drafts, whose rows are several of a sequence; preempted, and warm."""
    num_rows = 10
    expected = on_host(model, 40, num_rows)
    tokens = serve(expected)

    def answer(request: Request, num_tokens: int) -> list[int]:
        recorded = expected.tokens[request.request_id, request.choice]
        first = request.num_output_tokens
        return recorded[first : first + num_tokens] or [5]

    drafting = SyntheticDrafts(acceptance, answer, vocab_size=VOCAB_SIZE)
    worker = OnFakeCuda(model, cuda, num_rows, enforce_eager=eager)
    found = harness_of(
        worker.runner, model, 40, num_rows=num_rows, async_scheduling=True, drafting=drafting
    )
    replays = 0
    launch = found.worker.launch

    def count_replays(step: SchedulerOutput) -> None:
        nonlocal replays
        before = cuda.device.num_replays
        launch(step)
        replays += bool(step.drafts) and cuda.device.num_replays > before

    monkeypatch.setattr(found.worker, "launch", count_replays)
    assert serve(found) == tokens
    assert drafting.num_drafted > 5
    assert (drafting.num_accepted > 5) == (acceptance > 0.0)
    assert (replays > 3) == (not eager)


def test_beams_go_on_from_copies_of_states(model: Model, cuda: FakeCuda) -> None:
    """The copies are queued before the step that reads them, beside other requests."""
    worker = OnFakeCuda(model, cuda, 2 * NUM_ROWS)
    ahead = harness_of(worker.runner, model, 60, num_rows=2 * NUM_ROWS, async_scheduling=True)
    host = on_host(model, 60, 2 * NUM_ROWS)
    num_copies = 0
    launch = ahead.worker.launch

    def count_copies(step: SchedulerOutput) -> None:
        nonlocal num_copies
        num_copies += len(step.state_copies)
        launch(step)

    ahead.worker.launch = count_copies  # type: ignore[method-assign]
    answers = []
    for harness in (ahead, host):
        rows = harness.add(list(range(3, 23)), 16, n=3, beam_width=3, eos_token_ids=(7,))
        answers.append(
            [*serve(harness, REQUEST_PARAMS[:4]), *(harness.tokens_of(row) for row in rows)]
        )
    assert answers[0] == answers[1]
    assert num_copies > 0
    assert cuda.device.num_replays > 0


def test_attention_of_hybrid_models_reads_a_shared_prefix_once(
    cuda: FakeCuda, tmp_path: Path
) -> None:
    """Cascade attention runs without graphs; states are planned as in any step."""
    model = Model("lfm2", tmp_path)
    params: list[dict[str, Any]] = [{"temperature": 0.0}] * 4
    worker = OnFakeCuda(model, cuda, NUM_ROWS, cascade_attention_from=2)
    found = harness_of(worker.runner, model, async_scheduling=True)
    wanted = serve(on_host(model), params, num_shared=5 * 4)
    assert_mostly_equal(serve(found, params, num_shared=5 * 4), wanted)
    assert num_cascades(worker) > 5
    assert cuda.device.num_replays == 0


def test_the_largest_step_runs_without_slots(model: Model, cuda: FakeCuda) -> None:
    """It begins all sequences and writes the null slot alone."""
    worker = OnFakeCuda(model, cuda, NUM_ROWS)
    assert worker.states is not None
    before = cuda.device.fetch(worker.states.buffer).view(torch.int32)
    run_largest_step(worker.gpu, worker.parts, 24, 4)
    after = cuda.device.fetch(worker.states.buffer).view(torch.int32)
    assert torch.equal(after[1:], before[1:])
    assert not torch.equal(after[0], before[0])


def test_batch_invariant_steps_split_attention_alone(model: Model, cuda: FakeCuda) -> None:
    """Attention sees each query as a sequence of its own; the group of states does not."""
    settings: dict[str, Any] = {"weight_format": FixedRowsFormat(model.dtype)}
    worker = OnFakeCuda(model, cuda, NUM_ROWS, batch_invariant=True, **settings)
    found = harness_of(worker.runner, model, async_scheduling=True)
    assert serve(found) == serve(on_host(model))
    assert cuda.device.num_replays == 0


def test_slots_go_to_a_medium_and_back_with_their_positions(model: Model, cuda: FakeCuda) -> None:
    """As KV blocks do, behind the steps that write them."""
    worker = OnFakeCuda(model, cuda, NUM_ROWS)
    harness = harness_of(worker.runner, model, async_scheduling=True)
    serve(harness, REQUEST_PARAMS[:3])
    states = worker.states
    assert states is not None
    stream: Any = CopyingThread(cuda.device)
    device: Any = cuda.device
    copier = DeviceBlockBytes(states.block_rows(), device, stream)
    wait_for_steps = copier.record_steps()
    written = cuda.device.fetch(states.buffer).view(torch.int32)
    slot = int(written[1:, -1].argmax()) + 1
    assert written[slot, -1] > 0
    memory = bytearray(copier.block_bytes)
    wait_for_steps()
    copier.copy_out(slot, memoryview(memory))
    copier.copy_in(memoryview(memory), NUM_STATE_SLOTS - 1)
    after = cuda.device.fetch(states.buffer).view(torch.int32)
    assert torch.equal(after[-1], written[slot])
