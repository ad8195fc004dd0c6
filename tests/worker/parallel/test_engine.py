"""Scheduler and model runners of two ranks, without processes, give the results of one rank.

Covers prefix hits, preemption, two steps in flight, log-probabilities, random draws and beams.
"""

import numpy as np
import pytest
import torch

from proto.messages.prepared_model import PreparedModel
from tests.fakes.devices import CPU
from tests.fakes.engine_harness import EngineHarness
from tests.fakes.prepared_models import prepare_checkpoint, spec_of
from tests.fakes.ranks import LockstepRunners, Ranks
from tests.fakes.real_engine import engine_for, load, runner_of
from tests.fakes.tiny_checkpoints import save_tiny
from worker.cpu.formats import Bf16Format
from worker.cpu.kernels import Kernels
from worker.loader.weights import load_model

PROMPTS = [
    torch.randint(0, 96, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (23, 40, 11, 1)
]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def prepared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> PreparedModel:
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny(request.param, folder)
    return prepare_checkpoint(folder, folder / "prepared")


Results = list[tuple[list[int], list[list[float]]]]


def serve(harness: EngineHarness, **params: object) -> tuple[Results, int]:
    """Serve all prompts twice; return tokens with log-probabilities, and the preemptions."""
    results, num_preemptions = [], 0
    for _ in range(2):
        rows = [row for prompt in PROMPTS for row in harness.add(prompt, 12, **params)]  # type: ignore[arg-type]
        harness.run()
        for row in rows:
            outputs = harness.outputs[row.request_id, row.choice]
            logprobs = [
                np.frombuffer(each.logprobs.logprobs, "<f4").tolist()
                for each in outputs
                if each.logprobs is not None
            ]
            results.append((harness.tokens_of(row), logprobs))
            num_preemptions += row.num_preemptions
    assert harness.kv_cache.usage == 0
    return results, num_preemptions


def assert_same(found: Results, expected: Results) -> None:
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, ours), (_, theirs) in zip(found, expected, strict=True):
        assert len(ours) == len(theirs)
        for our, their in zip(ours, theirs, strict=True):
            assert our == pytest.approx(their, abs=1e-4)


@pytest.mark.parametrize(
    ("num_blocks", "settings", "params", "kv_dtype"),
    [
        (200, {"async_scheduling": True}, {"temperature": 0.0, "logprobs": 3}, None),
        (200, {"max_num_batched_tokens": 9}, {"temperature": 0.0, "logprobs": 0}, None),
        (15, {"async_scheduling": True}, {"temperature": 0.0}, None),
        (200, {}, {"temperature": 1.0, "top_p": 0.9, "n": 2}, None),
        (28, {}, {"n": 3, "beam_width": 3, "temperature": 0.0}, None),
        (15, {}, {"temperature": 0.0}, torch.int8),
    ],
    ids=["overlapped", "chunks", "preempted", "drawn", "beams", "int8"],
)
def test_two_ranks_give_the_results_of_one(
    prepared: PreparedModel,
    num_blocks: int,
    settings: dict[str, object],
    params: dict[str, object],
    kv_dtype: torch.dtype | None,
) -> None:
    kv_dtype = kv_dtype or torch.float32
    alone = load(prepared)
    harness, blocks = engine_for(alone, num_blocks, **settings)
    harness.runner = runner_of(alone, blocks, kv_dtype=kv_dtype)  # type: ignore[assignment]
    expected, preemptions = serve(harness, **params)
    with Ranks(2) as ranks:
        decoders = [load(prepared, group) for group in ranks.groups]
        together, blocks = engine_for(alone, num_blocks, **settings)
        runners = [runner_of(decoder, blocks, kv_dtype=kv_dtype) for decoder in decoders]
        ranks.run_on_all(lambda rank: runners[rank].warm_up())
        together.runner = LockstepRunners(ranks, runners)  # type: ignore[assignment]
        found, _ = serve(together, **params)
    assert_same(found, expected)
    assert (preemptions > 0) is (num_blocks < 200)


def test_bits_of_two_ranks_do_not_depend_on_the_batch(
    prepared: PreparedModel, kernels: Kernels
) -> None:
    """Alone, and together in chunks with two steps in flight, with weights in bfloat16."""
    dtype, spec = torch.bfloat16, spec_of(prepared)
    found: list[list[bytes]] = []
    with Ranks(2) as ranks:
        decoders = [
            load_model(prepared, spec, dtype, CPU, lambda _: None, Bf16Format(kernels), group)
            for group in ranks.groups
        ]

        def serve_bits(prompts: list[list[int]], **settings: object) -> None:
            harness, blocks = engine_for(decoders[0], 200, **settings)
            runners = [runner_of(each, blocks, kv_dtype=dtype) for each in decoders]
            harness.runner = LockstepRunners(ranks, runners)  # type: ignore[assignment]
            for prompt in prompts:
                harness.add(prompt, 12, temperature=0.0, logprobs=3, ignore_eos=True)
            harness.run()
            for outputs in harness.outputs.values():
                found.append([each.logprobs.logprobs for each in outputs if each.logprobs])

        for prompt in PROMPTS:
            serve_bits([prompt], max_num_batched_tokens=64)
        serve_bits(PROMPTS, max_num_batched_tokens=9, async_scheduling=True)
    assert found[: len(PROMPTS)] == found[len(PROMPTS) :]
    assert all(len(each) == 12 for each in found)
