"""Prompts given as embeddings, through scheduler and runner: what the same tokens give.

tests/e2e/test_prompt_embeds.py has the API, and rows that belong to no token.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from proto.messages.engine_io import EngineCoreOutput
from proto.messages.prepared_model import PreparedModel
from proto.settings.config import ModelConfig, ServeConfig
from tests.fakes.devices import CPU
from tests.fakes.engine_harness import EngineHarness
from tests.fakes.prepared_models import prepare_checkpoint
from tests.fakes.ranks import LockstepRunners, Ranks
from tests.fakes.real_engine import engine_for, load, runner_of
from tests.fakes.tiny_checkpoints import save_tiny
from worker import loaded_model
from worker.models.decoder import Decoder
from worker.parallel.group import RankGroup

PROMPTS = [
    torch.randint(3, 96, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (23, 40, 11, 1, 37)
]
NUM_OUTPUTS = 12


def saved(name: str, folder: Path) -> tuple[PreparedModel, torch.nn.Module]:
    """Return a tiny model, prepared, and its embedding, which it does not scale."""
    model = save_tiny(name, folder)
    embedding: torch.nn.Module = model.get_input_embeddings()  # type: ignore[operator]
    return prepare_checkpoint(folder, folder / "prepared"), embedding


def on_transformers(prepared: PreparedModel) -> Decoder:
    config = ServeConfig(model=ModelConfig(model_impl="transformers", dtype="float32"))
    return loaded_model.load(config, prepared, CPU, RankGroup(), lambda message: None).model


@torch.no_grad()
def rows_of(embedding: torch.nn.Module, prompt: list[int]) -> bytes:
    """Return what the first layer gets for a prompt."""
    return embedding(torch.tensor(prompt)).numpy().astype("<f4").tobytes()


def serve(
    harness: EngineHarness, embedding: torch.nn.Module | None, **params: Any
) -> list[list[int]]:
    """Serve the prompts together, twice; embedding: what gives their rows in place of tokens."""
    found = []
    for _ in range(2):
        rows = []
        for prompt in PROMPTS:
            given = {} if embedding is None else {"prompt_embeds": rows_of(embedding, prompt)}
            tokens = prompt if embedding is None else [0] * len(prompt)
            rows += harness.add(tokens, NUM_OUTPUTS, ignore_eos=True, **params, **given)
        harness.run()
        found += [harness.tokens_of(row) for row in rows]
    return found


def experts_of(outputs: list[EngineCoreOutput]) -> dict[int, bytes]:
    """Return the experts of each token, by its position."""
    found = {}
    for output in outputs:
        if (experts := output.routed_experts) is not None:
            size = experts.num_layers * experts.top_k * experts.num_bytes
            for offset in range(0, len(experts.data), size):
                position = experts.first_position + offset // size
                found[position] = experts.data[offset : offset + size]
    return found


@pytest.mark.parametrize(
    ("name", "settings", "params"),
    [
        ("llama", {"async_scheduling": True}, {"temperature": 0.0}),
        ("llama", {"max_num_batched_tokens": 9}, {"n": 3, "temperature": 1.0}),
        ("llama", {}, {"n": 3, "beam_width": 3, "temperature": 0.0}),
        ("llama on transformers", {"async_scheduling": True}, {"temperature": 0.0}),
        ("qwen3next", {"max_num_batched_tokens": 16}, {"temperature": 0.0}),
        ("mixtral", {}, {"temperature": 0.0, "return_routed_experts": True}),
    ],
    ids=["overlapped", "choices", "beams", "transformers", "states", "experts"],
)
def test_embeddings_give_what_their_tokens_give(
    name: str,
    settings: dict[str, object],
    params: dict[str, object],
    tmp_path: Path,
) -> None:
    prepared, embedding = saved(name.split()[0], tmp_path)
    decoder = on_transformers(prepared) if "transformers" in name else load(prepared)
    found, experts = [], []
    returns_experts = "return_routed_experts" in params
    for given in (None, embedding):
        harness, num_blocks = engine_for(decoder, 200, 60, **settings)
        harness.runner = runner_of(  # type: ignore[assignment]
            decoder, num_blocks, 60, returns_experts=returns_experts
        )
        found.append(serve(harness, given, **params))
        experts.append([experts_of(outputs) for outputs in harness.outputs.values()])
    assert found[0] == found[1]
    assert experts[0] == experts[1]
    assert all(set(each) >= {0, 1} for each in experts[0]) is returns_experts
    assert len({tuple(each) for each in found[0]}) >= len(PROMPTS)


def test_ranks_give_what_one_gives(tmp_path: Path) -> None:
    """Also the log-probabilities of prompts of tokens, which every rank computes."""
    model, embedding = saved("llama", tmp_path)
    alone = load(model)
    with Ranks(2) as ranks:
        decoders = [load(model, group) for group in ranks.groups]
        found, prompt_logprobs = [], []
        for given, num_ranks in ((None, 1), (embedding, 2), (None, 2)):
            harness, num_blocks = engine_for(alone, 200)
            harness.runner = (  # type: ignore[assignment]
                runner_of(alone, num_blocks)
                if num_ranks == 1
                else LockstepRunners(ranks, [runner_of(each, num_blocks) for each in decoders])
            )
            params: dict[str, Any] = {} if given is not None else {"prompt_logprobs": 1}
            found.append(serve(harness, given, temperature=0.0, **params))
            prompt_logprobs.append(
                [
                    np.frombuffer(each.prompt_logprobs.logprobs, "<f4")
                    for outputs in harness.outputs.values()
                    for each in outputs
                    if each.prompt_logprobs is not None
                ]
            )
    assert found[0] == found[1] == found[2]
    assert len(prompt_logprobs[0]) == len(prompt_logprobs[2]) >= len(PROMPTS)
    for ours, theirs in zip(prompt_logprobs[2], prompt_logprobs[0], strict=True):
        assert np.allclose(ours, theirs, atol=1e-4)
