"""Requests with adapters through scheduler and runner: the tokens of transformers, merged weights.

Alone and together, in chunks, after preemptions, with cached prefixes, drafts, on two ranks.
"""

import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from engine_core.request import Request
from proto.messages.engine_io import FinishReason
from proto.messages.model_runner_output import ModelRunnerOutput
from proto.messages.prepared_model import PreparedModel
from proto.messages.scheduler_output import SchedulerOutput
from tests.fakes.adapters import SEVEN, Served, make_adapter, merged
from tests.fakes.dense_attention import logits_in_chunks
from tests.fakes.prepared_models import prepare_checkpoint
from tests.fakes.ranks import LockstepRunners, Ranks
from tests.fakes.real_engine import engine_for, runner_of
from tests.fakes.tiny_checkpoints import save_tiny
from worker.layers.linear import DenseLinear
from worker.step.model_runner import ModelRunner

pytestmark = pytest.mark.suite("long")

NUM_OUTPUTS = 10
TIE = 1e-3
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
Adapted = tuple[list[int], int]
"""A prompt and its adapter; 0: none."""


def prompts(ids: Sequence[int]) -> list[Adapted]:
    """Return a prompt of its own for each of these adapters."""
    generator = torch.Generator().manual_seed(5)
    lengths = (23, 40, 11, 5, 37)
    return [
        (torch.randint(3, 96, (lengths[n % 5],), generator=generator).tolist(), number)
        for n, number in enumerate(ids)
    ]


class Adapting:
    """Runners that get steps whose new sequences name the adapters of their prompts."""

    def __init__(self, runner: Any, requests: Sequence[Adapted]) -> None:
        self._runner = runner
        self._ids = {tuple(prompt): number for prompt, number in requests}

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        new = [
            msgspec.structs.replace(each, lora_int_id=self._ids[tuple(each.prompt_token_ids)])
            for each in step.new_requests
        ]
        output: ModelRunnerOutput = self._runner.execute(
            msgspec.structs.replace(step, new_requests=new)
        )
        return output


class Model:
    """A tiny model with adapters of several ranks, served and in transformers."""

    def __init__(
        self, folder: Path, ranks: Sequence[int], name: str = "llama", **settings: Any
    ) -> None:
        self.own = save_tiny(name, folder)
        self.prepared: PreparedModel = prepare_checkpoint(folder, folder / "prepared")
        self.paths = [
            make_adapter(
                self.own, folder / f"a{number}", number, r=rank, lora_alpha=2 * rank, **settings
            )
            for number, rank in enumerate(ranks, 1)
        ]
        self._merged: dict[int, Any] = {0: self.own}

    def served(self, **settings: Any) -> Served:
        served = Served(self.prepared, **settings)
        for number, path in enumerate(self.paths, 1):
            served.load(path, number)
        return served

    def assert_greedy(self, prompt: list[int], number: int, tokens: list[int]) -> None:
        """Every token is the best one of transformers, or as good up to a rounding."""
        if number not in self._merged:
            self._merged[number] = merged(self.own, self.paths[number - 1])
        whole = torch.tensor([prompt + tokens])
        with torch.no_grad():
            logits = self._merged[number](whole).logits[0, len(prompt) - 1 : -1]
        best = logits.max(1).values
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert len(tokens) == NUM_OUTPUTS
        assert (best - chosen).max() < TIE, (number, tokens)


def runner_with(served: Served, num_blocks: int, **settings: Any) -> ModelRunner:
    runner = runner_of(served.decoder, num_blocks, **settings)
    runner._adapters = served.store
    return runner


def serve(
    served: Served, requests: Sequence[Adapted], num_blocks: int = 400, **settings: Any
) -> tuple[list[list[int]], list[Request]]:
    """Serve the requests together; return their tokens, and the requests."""
    harness, blocks = engine_for(served.decoder, num_blocks, **settings)
    harness.runner = Adapting(runner_with(served, blocks), requests)  # type: ignore[assignment]
    rows = [
        harness.add(prompt, NUM_OUTPUTS, ignore_eos=True, temperature=0.0) for prompt, _ in requests
    ]
    harness.run()
    return [harness.tokens_of(row[0]) for row in rows], [row[0] for row in rows]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("llama"), (4, 16, 64))


@pytest.mark.parametrize("ids", [(1,), (1, 2, 3, 0, 1)], ids=["one", "three and none"])
def test_greedy_tokens_are_those_of_merged_weights(ids: tuple[int, ...], llama: Model) -> None:
    served = llama.served()
    requests = prompts(ids)
    found, _ = serve(served, requests)
    for (prompt, number), tokens in zip(requests, found, strict=True):
        llama.assert_greedy(prompt, number, tokens)


def test_thirty_two_adapters_in_one_batch(tmp_path: Path) -> None:
    """Of ranks 4 to 64, beside requests without one."""
    model = Model(tmp_path, [4 + 60 * number // 31 for number in range(32)])
    requests = prompts([*range(1, 33), 0, 0])
    found, _ = serve(model.served(), requests, max_num_seqs=34)
    for (prompt, number), tokens in zip(requests, found, strict=True):
        model.assert_greedy(prompt, number, tokens)


def test_greedy_tokens_of_a_mixture(tmp_path: Path) -> None:
    settings = {"target_modules": SEVEN[:4], "target_parameters": EXPERTS}
    model = Model(tmp_path, (4, 12), "qwen3moe", **settings)
    requests = prompts((1, 2, 0, 2, 1))
    found, _ = serve(model.served(), requests, max_num_batched_tokens=16)
    for (prompt, number), tokens in zip(requests, found, strict=True):
        model.assert_greedy(prompt, number, tokens)


@pytest.mark.parametrize("part", ["down", "up", "head"])
def test_an_adapter_that_becomes_nan_harms_its_own_requests_only(part: str, tmp_path: Path) -> None:
    """Bit for bit, in prompts and decodes: the numbers change when all requests run."""
    model = Model(tmp_path, (4, 16), modules_to_save=["lm_head"])
    served = model.served()
    requests = prompts((1, 0, 2, 1, 2))
    expected, _ = serve(served, requests)
    harness, blocks = engine_for(served.decoder, 400)
    harness.runner = Adapting(runner_with(served, blocks), requests)  # type: ignore[assignment]
    rows = [
        harness.add(prompt, NUM_OUTPUTS, ignore_eos=True, temperature=0.0)[0]
        for prompt, _ in requests
    ]
    for _ in range(3):
        harness.step()
    assert all(len(harness.tokens_of(row)) > 0 for row in rows)
    broken = served.store._adapters[2]
    if part == "head":
        assert broken.head is not None
        nan = DenseLinear(torch.full((96, 64), torch.nan), None)
        served.store._adapters[2] = replace(broken, head=replace(broken.head, saved=nan))
        served.store._latest = (b"", ())
    else:
        update = broken.products[3]
        numbers = update.down if part == "down" else update.parts[0].up
        numbers.fill_(torch.nan)
    harness.run()
    for row, (_, number), tokens in zip(rows, requests, expected, strict=True):
        reason = harness.finish_reason_of(row)
        if number == 2:
            assert reason is FinishReason.ERROR
        else:
            assert (reason, harness.tokens_of(row)) == (FinishReason.LENGTH, tokens)


@pytest.mark.parametrize(
    ("num_blocks", "settings"),
    [
        (400, {"max_num_batched_tokens": 7}),
        (30, {}),
        (400, {"async_scheduling": True, "max_num_batched_tokens": 16}),
    ],
    ids=["in chunks", "preempted", "overlapped"],
)
def test_chunks_and_preemptions(num_blocks: int, settings: dict[str, Any], llama: Model) -> None:
    requests = prompts((1, 0, 2, 3, 1))
    served = llama.served()
    expected, _ = serve(served, requests)
    found, rows = serve(served, requests, num_blocks, **settings)
    if num_blocks < 100:
        assert sum(row.num_preemptions for row in rows) > 0
    assert found == expected


def test_a_cached_prefix_goes_on_with_its_adapter(llama: Model) -> None:
    served = llama.served()
    prompt = prompts((1, 2))[1][0]
    harness, blocks = engine_for(served.decoder, 400)
    harness.runner = Adapting(runner_with(served, blocks), [(prompt, 2)])  # type: ignore[assignment]
    found = []
    for _ in range(2):
        (request,) = harness.add(prompt, NUM_OUTPUTS, ignore_eos=True, temperature=0.0)
        harness.run()
        found.append(harness.tokens_of(request))
    assert request.num_cached_tokens >= 36
    assert found[0] == found[1]
    llama.assert_greedy(prompt, 2, found[1])


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama-biases", {"target_modules": SEVEN, "use_dora": True}),
        ("llama-biases", {"target_modules": SEVEN, "lora_bias": True}),
        ("llama-tied", {"target_modules": SEVEN, "modules_to_save": ["embed_tokens", "lm_head"]}),
        ("llama-tied", {"target_modules": SEVEN, "trainable_token_indices": [5, 9, 60]}),
        (
            "qwen2moe",
            {
                "target_modules": SEVEN[:4],
                "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            },
        ),
        ("deepseek3", {"target_modules": ["q_a_proj", "q_b_proj", "kv_b_proj", "o_proj"]}),
    ],
    ids=["dora", "biases", "saved ends", "tokens", "mixture", "latent"],
)
def test_two_ranks_give_the_tokens_of_merged_weights(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    model = Model(tmp_path, (4, 6), name, **settings)
    requests = prompts((1, 2, 0))
    with Ranks(2) as ranks:
        served = [model.served(group=group) for group in ranks.groups]
        harness, blocks = engine_for(served[0].decoder, 400)
        runners = [runner_with(each, blocks) for each in served]
        harness.runner = Adapting(LockstepRunners(ranks, runners), requests)  # type: ignore[assignment]
        rows = [
            harness.add(prompt, NUM_OUTPUTS, ignore_eos=True, temperature=0.0)
            for prompt, _ in requests
        ]
        harness.run()
    for (prompt, number), row in zip(requests, rows, strict=True):
        model.assert_greedy(prompt, number, harness.tokens_of(row[0]))


def test_log_probabilities_of_prompts_are_those_of_the_adapter(tmp_path: Path) -> None:
    """Whose head is its own."""
    model = Model(tmp_path, (4,), modules_to_save=["lm_head"])
    served = model.served()
    requests = prompts((1, 0))
    harness, blocks = engine_for(served.decoder, 400, max_num_batched_tokens=13)
    harness.runner = Adapting(runner_with(served, blocks), requests)  # type: ignore[assignment]
    rows = [harness.add(each, 1, temperature=0.0, prompt_logprobs=0)[0] for each, _ in requests]
    harness.run()
    oracles = (merged(model.own, model.paths[0]), model.own)
    for (prompt, _), row, oracle in zip(requests, rows, oracles, strict=True):
        found = np.concatenate(
            [
                np.frombuffer(each.prompt_logprobs.logprobs, "<f4")
                for each in harness.outputs[(row.request_id, 0)]
                if each.prompt_logprobs is not None
            ]
        )
        with torch.no_grad():
            wanted = oracle(torch.tensor([prompt])).logits[0].log_softmax(1)[:-1]
        wanted = wanted.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        assert np.abs(found - wanted.numpy()).max() < TIE


def test_a_scale_is_a_factor_of_the_effect(llama: Model) -> None:
    """Of low-rank parts exactly: half of the scale is half of B."""
    served = llama.served()
    tokens = torch.arange(3, 33)
    logits = []
    for scale in (0.0, 0.5, 1.0):
        with served.running([2] * 30, [scale] * 30):
            logits.append(logits_in_chunks(served.decoder, tokens, 30))
    plain = logits_in_chunks(served.decoder, tokens, 30)
    assert (logits[0] - plain).abs().max() < 1e-5
    whole, half = merged(llama.own, llama.paths[1]), llama.own
    with torch.no_grad():
        own, changed = dict(half.named_parameters()), dict(whole.named_parameters())
        before = {name: it.clone() for name, it in own.items()}
        for name, weight in own.items():
            weight.lerp_(changed[name], 0.5)
        wanted = half(tokens[None]).logits[0]
        for name, weight in own.items():
            weight.copy_(before[name])
    assert (logits[1] - wanted).abs().max() < 2e-4
    assert (logits[2] - wanted).abs().max() > 0.5


def test_a_dropped_adapter_is_freed(llama: Model) -> None:
    served = llama.served()
    requests = prompts((1, 2))
    serve(served, requests)
    kept, dropped = (weakref.ref(served.store._adapters[number]) for number in (1, 2))
    served.store.drop(2)
    gc.collect()
    assert dropped() is None
    assert kept() is not None
    serve(served, requests[:1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_of_an_adapter_gives_a_row_the_same_bits_in_every_batch(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    model = Model(tmp_path, (4,), modules_to_save=["lm_head"])
    served = model.served(dtype=dtype)
    hidden = torch.randn(9, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    with served.running([1] * 9):
        together = served.decoder.logits(hidden)
    base = served.decoder.logits(hidden)
    assert (together - base).abs().max() > 0.1
    for row in range(9):
        with served.running([1]):
            alone = served.decoder.logits(hidden[row : row + 1])
        if dtype == torch.bfloat16:
            assert torch.equal(alone[0], together[row])
        else:
            assert (alone[0] - together[row]).abs().max() < 1e-5
    with served.running([0, 1, 0, 0, 1, 0, 0, 0, 0]):
        mixed = served.decoder.logits(hidden)
    assert torch.equal(mixed[[0, 2, 3, 5, 6, 7, 8]], base[[0, 2, 3, 5, 6, 7, 8]])


def test_prompts_of_embeddings_have_the_adapter(llama: Model) -> None:
    """What their tokens give with it."""
    served, requests = llama.served(), prompts((1, 0, 2, 3, 1))
    expected, _ = serve(served, requests)
    zeros = [([0] * len(prompt), number) for prompt, number in requests]
    harness, blocks = engine_for(served.decoder, 400, max_num_batched_tokens=16)
    harness.runner = Adapting(runner_with(served, blocks), zeros)  # type: ignore[assignment]
    embedding = llama.own.get_input_embeddings()
    rows = [
        harness.add(
            tokens,
            NUM_OUTPUTS,
            ignore_eos=True,
            temperature=0.0,
            prompt_embeds=embedding(torch.tensor(prompt)).detach().numpy().astype("<f4").tobytes(),
        )[0]
        for (tokens, _), (prompt, _) in zip(zeros, requests, strict=True)
    ]
    harness.run()
    assert [harness.tokens_of(row) for row in rows] == expected
