"""Adapters of two tensor-parallel workers on two fake CUDA devices.

Each worker has its rows and columns of an adapter in slots of its own, and the collectives follow
the adapters' kernels in the graphs. The tokens are those of two workers on CPUs.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from engine_core.busy_loop import OVERLAPPED
from proto.settings.config import DeviceConfig
from tests.fakes.adapters import Served
from tests.fakes.cuda_runner import DTYPE, NUM_ROWS, Harness, compute_by_torch, gpu_of
from tests.fakes.devices import GPU, REFERENCE
from tests.fakes.fake_cuda import FakeCuda, SlotsWithoutTriton
from tests.fakes.fake_device import on_host
from tests.fakes.fake_flashinfer import FakeFlashInfer
from tests.fakes.fake_nccl import FakeRanks
from tests.fakes.ranks import Ranks
from tests.worker.adapters.test_cuda_steps import (
    DORA,
    MAX_LORAS,
    MIXED,
    AdaptedModel,
    InFloat64,
    harness_with,
    serve,
)
from tests.worker.parallel.test_cuda_ranks import SIZE, RankRunners, cache_of
from worker.cuda.runner_builder import build_runner
from worker.reference.attention import ReferenceAttention
from worker.reference.sampling import TorchBackend
from worker.sampling.sampler import Sampler
from worker.step.model_runner import ModelRunner, SyncModelRunner
from worker.step.runner_parts import Runner, RunnerParts

pytestmark = pytest.mark.suite("devices")

TURNS = ((*MIXED, DORA, 1, 0, DORA), (1, 2))
"""Adapters of the requests at first, and of later ones, for which two are loaded again."""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AdaptedModel:
    compute_by_torch(monkeypatch)
    return AdaptedModel(tmp_path)


def harness_of_ranks(
    all_ranks: RankRunners, served: list[Served], model: AdaptedModel, **settings: Any
) -> Harness:
    """Return an engine whose adapters all ranks load and drop."""

    def load(number: int) -> None:
        path = model.paths[number - 1]
        all_ranks.run_on_all(lambda rank: served[rank].load(path, number))

    def drop(number: int) -> None:
        all_ranks.run_on_all(lambda rank: served[rank].store.drop(number))

    return harness_with(all_ranks, load, drop, **settings)


def serve_turns(harness: Harness, turns: Iterable[tuple[int, ...]]) -> list[list[int]]:
    return [tokens for ids in turns for tokens in serve(harness, ids)]


def tokens_on_cpus(model: AdaptedModel, turns: Iterable[tuple[int, ...]]) -> list[list[int]]:
    """Tokens of two ranks on CPUs, one step at a time, with the arithmetic of the fake device."""

    def start(rank: int) -> tuple[Served, Runner]:
        group = groups.groups[rank]
        served = Served(model.prepared, DTYPE, group=group, device=REFERENCE, step=InFloat64())
        decoder, cache = served.decoder, cache_of(served.decoder, REFERENCE)
        runner = ModelRunner(
            decoder,
            ReferenceAttention(cache, decoder.spec.attention_shape),
            Sampler(TorchBackend()),
            model.rows(NUM_ROWS),
            cache,
            REFERENCE.transfers(),
            adapters=served.store,
        )
        return served, SyncModelRunner(runner)

    with Ranks(SIZE) as groups:
        all_ranks = RankRunners([FakeCuda() for _ in range(SIZE)])
        served, runners = zip(*all_ranks.run_on_all(start), strict=True)
        all_ranks.runners = list(runners)
        tokens = serve_turns(harness_of_ranks(all_ranks, list(served), model), turns)
        all_ranks.close()
    return tokens


def test_two_ranks_replay_their_adapters_in_graphs(model: AdaptedModel) -> None:
    """Two of five adapters at a time, replaced in the slots while steps are in flight.

    Steps with DoRA, whose factors each rank multiplies its own outputs by, run without graphs.
    """
    cudas, ranks = [FakeCuda() for _ in range(SIZE)], FakeRanks(SIZE)
    all_ranks = RankRunners(cudas)

    def start(rank: int) -> tuple[Served, Runner]:
        cuda = cudas[rank]
        accelerator: Any = cuda.device
        group: Any = ranks.group(rank, cuda.device)
        group.join(1)
        with cuda.loading():
            step = SlotsWithoutTriton(lambda: accelerator)
            served = Served(
                model.prepared, DTYPE, group=group, device=GPU, step=step, max_loras=MAX_LORAS
            )
            cache = cache_of(served.decoder, GPU)
        parts = RunnerParts(
            config=DeviceConfig(),
            model=served.decoder,
            dtype=DTYPE,
            kv_cache=cache,
            batch=model.rows(NUM_ROWS),
            adapters=served.store,
        )
        return served, build_runner(gpu_of(cuda, FakeFlashInfer(cuda.device)), parts)

    served, runners = zip(*all_ranks.run_on_all(start), strict=True)
    all_ranks.runners = list(runners)
    ahead = harness_of_ranks(all_ranks, list(served), model, async_scheduling=True)
    before = list(ranks.num_exchanges)
    tokens = serve_turns(ahead, TURNS)
    all_ranks.close()
    assert tokens == tokens_on_cpus(model, TURNS)
    assert len(ahead.adapters.loads) > len(set(ahead.adapters.loads)), "none was loaded again"
    assert ahead.worker.most_unknown == OVERLAPPED
    replays = [cuda.device.num_replays for cuda in cudas]
    assert replays[0] == replays[1] > 10
    per_step = 1 + 2 * model.spec.num_layers + 1
    assert ranks.num_exchanges[0] == ranks.num_exchanges[1]
    assert ranks.num_exchanges[0] - before[0] > per_step * replays[0]
    first, second = (on_host(each.targets.step._reserved.slots) for each in served)
    assert first.any(1).all()
    assert not first.equal(second)
    plain = tokens_on_cpus(model, [(0,) * len(ids) for ids in TURNS])
    differs = [one != other for one, other in zip(tokens, plain, strict=True)]
    assert differs == [number > 0 for ids in TURNS for number in ids]
