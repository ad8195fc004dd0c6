"""Two tensor-parallel workers on two fake CUDA devices.

Every worker has a fake device and a thread; the collectives are part of the CUDA graphs. The tokens
equal those of two workers on CPUs, whose arithmetic is the same.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from engine_core.busy_loop import OVERLAPPED
from proto.messages.model_runner_output import ModelRunnerOutput
from proto.messages.scheduler_output import SchedulerOutput
from proto.settings.config import DeviceConfig
from tests.fakes.cuda_runner import (
    DTYPE,
    EDITS,
    NUM_ROWS,
    REQUEST_PARAMS,
    SHARED,
    ConstrainedThirds,
    Harness,
    Model,
    assert_mostly_equal,
    compute_by_torch,
    gpu_of,
    serve,
)
from tests.fakes.devices import GPU, REFERENCE
from tests.fakes.fake_cuda import FakeCuda
from tests.fakes.fake_flashinfer import FakeFlashInfer
from tests.fakes.fake_nccl import FakeRanks
from tests.fakes.ranks import Ranks
from tests.fakes.stepped_engine import BLOCK, NUM_BLOCKS
from worker.attention.kv_cache import KVCache, kv_cache_geometry, kv_layout
from worker.cuda.async_runner import AsyncModelRunner
from worker.cuda.runner_builder import build_runner
from worker.device import Device
from worker.loader.weights import load_model
from worker.models.decoder import Decoder
from worker.parallel.group import RankGroup
from worker.reference.attention import ReferenceAttention
from worker.reference.sampling import TorchBackend
from worker.sampling.sampler import Sampler
from worker.step.model_runner import GrammarMaskSource, ModelRunner, SyncModelRunner, no_grammars
from worker.step.runner_parts import PendingStep, Runner, RunnerParts

pytestmark = pytest.mark.suite("devices")

FILTERED = [each for each in REQUEST_PARAMS if "top_k" in each or "min_p" in each]
LIMIT_SECONDS = 120.0
SIZE = 2
Result = TypeVar("Result")


class RankRunners:
    """The runners of all ranks, each in a thread with its own device, as one runner."""

    def __init__(self, cudas: list[FakeCuda]) -> None:
        self._cudas = cudas
        self._threads = [ThreadPoolExecutor(1) for _ in cudas]
        self.runners: list[Runner] = []
        self.libraries: list[FakeFlashInfer] = []

    def run_on_all(self, work: Callable[[int], Result]) -> list[Result]:
        started = [thread.submit(self._on, rank, work) for rank, thread in enumerate(self._threads)]
        return [each.result(LIMIT_SECONDS) for each in started]

    def _on(self, rank: int, work: Callable[[int], Result]) -> Result:
        with self._cudas[rank], torch.inference_mode():
            return work(rank)

    def launch(
        self, step: SchedulerOutput, get_grammars: GrammarMaskSource = no_grammars
    ) -> "RankSteps":
        # masks depend on earlier tokens and are made once
        grammars: Any = get_grammars(step) if step.constrained_seq_ids else None
        return RankSteps(
            self, self.run_on_all(lambda rank: self.runners[rank].launch(step, lambda _: grammars))
        )

    def close(self) -> None:
        for each in self._threads:
            each.shutdown()


class RankSteps:
    """The pending steps of all ranks as one; their results must agree."""

    def __init__(self, all_ranks: RankRunners, launched: list[PendingStep]) -> None:
        self._all_ranks = all_ranks
        self._launched = launched

    def is_ready(self) -> bool:
        return all(self._all_ranks.run_on_all(lambda rank: self._launched[rank].is_ready()))

    def result(self) -> ModelRunnerOutput:
        first, *others = self._all_ranks.run_on_all(lambda rank: self._launched[rank].result())
        for other in others:
            assert other.sampled_token_ids == first.sampled_token_ids
            assert other.logprobs == first.logprobs
        return first


def load(model: Model, device: Device, group: RankGroup) -> Decoder:
    return load_model(model.prepared, model.spec, DTYPE, device, lambda fraction: None, None, group)


def cache_of(decoder: Decoder, device: Device) -> KVCache:
    spec = decoder.spec
    layout = kv_layout(spec.windows)
    heads = spec.attention_shape
    geometry = kv_cache_geometry(layout, heads.num_kv_heads, heads.head_dim, DTYPE)
    return KVCache(geometry, layout, NUM_BLOCKS, BLOCK, device.zeros)


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return Model("llama", tmp_path)


@pytest.fixture
def on_devices(
    request: pytest.FixtureRequest, model: Model, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[RankRunners, FakeRanks, list[FakeCuda]]]:
    """A parameter: blocks that a shared prefix of cascade attention has at least."""
    compute_by_torch(monkeypatch)
    config = DeviceConfig(cascade_attention_from=getattr(request, "param", 0))
    cudas = [FakeCuda() for _ in range(SIZE)]
    ranks = FakeRanks(SIZE)
    all_ranks = RankRunners(cudas)

    def start(rank: int) -> AsyncModelRunner:
        cuda = cudas[rank]
        group = ranks.group(rank, cuda.device)
        group.join(1)
        with cuda.loading():
            decoder = load(model, GPU, group)
            cache = cache_of(decoder, GPU)
        parts = RunnerParts(
            config=config,
            model=decoder,
            dtype=DTYPE,
            kv_cache=cache,
            batch=model.rows(NUM_ROWS),
        )
        library = FakeFlashInfer(cuda.device)
        all_ranks.libraries.append(library)
        return build_runner(gpu_of(cuda, library), parts)

    all_ranks.runners = list(all_ranks.run_on_all(start))
    yield all_ranks, ranks, cudas
    all_ranks.close()


def tokens_on_cpus(
    model: Model, params: list[dict[str, Any]], num_shared: int = 0
) -> list[list[int]]:
    """Tokens of two ranks on CPUs, one step at a time."""
    with Ranks(SIZE) as ranks:
        cudas = [FakeCuda() for _ in range(SIZE)]  # for the arithmetic of the fake device
        all_ranks = RankRunners(cudas)

        def start(rank: int) -> Runner:
            decoder = load(model, REFERENCE, ranks.groups[rank])
            cache, spec = cache_of(decoder, REFERENCE), decoder.spec
            shape = spec.attention_shape
            attention, sampler = ReferenceAttention(cache, shape), Sampler(TorchBackend())
            rows, transfers = model.rows(NUM_ROWS), REFERENCE.transfers()
            runner = ModelRunner(decoder, attention, sampler, rows, cache, transfers)
            return SyncModelRunner(runner)

        all_ranks.runners = list(all_ranks.run_on_all(start))
        harness = Harness(all_ranks, 81, grammars=ConstrainedThirds())
        tokens = serve(harness, params, num_shared=num_shared)
        all_ranks.close()
    return tokens


def test_two_ranks_replay_their_collectives_in_graphs(
    model: Model, on_devices: tuple[RankRunners, FakeRanks, list[FakeCuda]]
) -> None:
    params = [*EDITS, *FILTERED]
    all_ranks, ranks, cudas = on_devices
    before = list(ranks.num_exchanges)
    ahead = Harness(all_ranks, 81, async_scheduling=True, grammars=ConstrainedThirds())
    tokens = serve(ahead, params)
    assert ahead.worker.most_at_once == OVERLAPPED
    replays = [cuda.device.num_replays for cuda in cudas]
    assert replays[0] == replays[1] > 10
    assert ranks.num_exchanges[0] == ranks.num_exchanges[1]
    # The graph has one collective for the embedding and two per layer; the head's follows it.
    per_step = 1 + 2 * model.spec.num_layers + 1
    assert ranks.num_exchanges[0] - before[0] >= per_step * replays[0]
    assert tokens == tokens_on_cpus(model, params)


@pytest.mark.suite("rehearsal")
@pytest.mark.parametrize("on_devices", [2], indirect=True)
def test_two_ranks_read_a_shared_prefix_once(
    model: Model, on_devices: tuple[RankRunners, FakeRanks, list[FakeCuda]]
) -> None:
    all_ranks, _, cudas = on_devices
    ahead = Harness(all_ranks, 81, async_scheduling=True, grammars=ConstrainedThirds())
    tokens = serve(ahead, FILTERED, num_shared=SHARED)
    assert_mostly_equal(tokens, tokens_on_cpus(model, FILTERED, SHARED))
    for library in all_ranks.libraries:
        assert sum(each.num_plans for each in library.wrappers if each.for_all_queries) > 10
    assert [cuda.device.num_replays for cuda in cudas] == [0, 0]
