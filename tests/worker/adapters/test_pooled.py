"""Adapters on models that pool: their vectors are those of transformers with merged weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from engine_core.request import Request
from proto.errors import ModelError
from proto.settings.config import ModelConfig, ServeConfig
from tests.fakes.adapters import SEVEN, Served, make_adapter, merged
from tests.fakes.pooling_engine import PoolingEngine, prepare
from tests.fakes.tiny_encoders import CONFIGS, save_encoder
from tests.fakes.tiny_pooling import hidden_states, pooled, save_causal, save_modules
from tests.worker.adapters.test_steps import Adapting, prompts

NEAR = 1e-4
IDS = (1, 0, 2, 1, 2)


def engine_of(folder: Path, paths: list[Path], **settings: Any) -> PoolingEngine:
    """Return an engine that serves the model of a folder with these adapters, 1, 2 …"""
    prepared = prepare(folder)
    config = settings.pop("config", ModelConfig())
    served = Served(prepared, config=ServeConfig(model=config))
    for number, path in enumerate(paths, 1):
        served.load(path, number)
    engine = PoolingEngine(prepared, config, served, **settings)
    engine.harness.runner = Adapting(engine.harness.runner, prompts(IDS))  # type: ignore[assignment]
    return engine


def vectors(models: list[Any], kind: str) -> list[torch.Tensor]:
    """Return what the prompts give with the model of each."""
    found = []
    for prompt, number in prompts(IDS):
        hidden = hidden_states(models[number], prompt)
        found.append(F.normalize(pooled(hidden, kind), dim=0))
    return found


def assert_results(
    engine: PoolingEngine, requests: list[Request], wanted: list[torch.Tensor]
) -> None:
    for request, vector in zip(requests, wanted, strict=True):
        torch.testing.assert_close(engine.result(request), vector, atol=NEAR, rtol=0)


@pytest.mark.parametrize("kind", ["lasttoken", "mean_tokens"])
def test_embeddings_of_a_decoder(kind: str, tmp_path: Path) -> None:
    """In chunks, and again with a cached prefix of the same adapter."""
    folder = tmp_path / "model"
    model = save_causal(folder)
    save_modules(folder, model.config.hidden_size, kind)
    paths = [make_adapter(model, tmp_path / f"a{seed}", seed, r=4 * seed) for seed in (1, 2)]
    engine = engine_of(folder, paths)
    wanted = vectors([model, *(merged(model, path) for path in paths)], kind)
    assert (wanted[0] - vectors([model] * 3, kind)[0]).abs().max() > 0.05, "it is not visible"
    requests = [engine.add(prompt) for prompt, _ in prompts(IDS)]
    engine.harness.run()
    assert_results(engine, requests, wanted)
    for _ in range(2):  # the pool is too small for all prompts
        again = engine.add(prompts(IDS)[0][0])
        engine.harness.run()
        assert_results(engine, [again], wanted[:1])
    assert (again.num_cached_tokens > 0) == (kind == "lasttoken"), "a mean needs all tokens"


def test_scores_of_two_tokens(tmp_path: Path) -> None:
    """The head of the model gives them, with the adapter's own rows."""
    folder = tmp_path / "model"
    model = save_causal(folder, with_head=True)
    settings: dict[str, Any] = {"target_modules": SEVEN, "modules_to_save": ["lm_head"]}
    paths = [make_adapter(model, tmp_path / f"a{seed}", seed, **settings) for seed in (1, 2)]
    pooling = json.dumps({"true_token_id": 9, "false_token_id": 5})
    config = ModelConfig(runner="pooling", pooler_config=pooling)
    engine = engine_of(folder, paths, config=config)
    models = [model, *(merged(model, path) for path in paths)]
    requests = [engine.add(prompt, task="classify") for prompt, _ in prompts(IDS)]
    engine.harness.run()
    for request, (prompt, number) in zip(requests, prompts(IDS), strict=True):
        with torch.no_grad():
            logits = [of(torch.tensor([prompt])).logits[0, -1] for of in (models[number], model)]
        wanted, plain = (torch.sigmoid(each[9] - each[5]) for each in logits)
        torch.testing.assert_close(engine.result(request)[0], wanted, atol=NEAR, rtol=0)
        assert number == 0 or abs(wanted - plain) > 10 * NEAR


@pytest.mark.parametrize("name", CONFIGS)
def test_embeddings_of_an_encoder(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = save_encoder(name, folder)
    save_modules(folder, model.config.hidden_size, "mean_tokens")
    # Of an encoder without a head, `all-linear` would leave out the last dense layer.
    targets = sorted(
        {
            module.rpartition(".")[2]
            for module, part in model.named_modules()
            if isinstance(part, torch.nn.Linear) and "pooler" not in module
        }
    )
    exclude = {"exclude_modules": ["pooler.dense"]} if "bert" in name else {}
    paths = [
        make_adapter(model, tmp_path / f"a{seed}", seed, target_modules=targets, r=seed, **exclude)
        for seed in (3, 5)
    ]
    engine = engine_of(folder, paths)
    wanted = vectors([model, *(merged(model, path) for path in paths)], "mean_tokens")
    assert (wanted[0] - vectors([model] * 3, "mean_tokens")[0]).abs().max() > 0.05
    requests = [engine.add(prompt) for prompt, _ in prompts(IDS)]
    engine.harness.run()
    assert_results(engine, requests, wanted)


def test_an_adapter_that_is_not_finite_harms_its_own_texts(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = save_causal(folder)
    save_modules(folder, model.config.hidden_size, "lasttoken")
    paths = [make_adapter(model, tmp_path / f"a{seed}", seed) for seed in (1, 2)]
    engine = engine_of(folder, paths)
    assert engine.adapters is not None
    for update in engine.adapters._adapters[2].products.values():
        update.down.fill_(float("nan"))
    requests = [engine.add(prompt) for prompt, _ in prompts(IDS)]
    engine.harness.run()
    wanted = vectors([model, merged(model, paths[0]), model], "lasttoken")
    for request, (_, number), vector in zip(requests, prompts(IDS), wanted, strict=True):
        reason = engine.harness.finish_reason_of(request)
        if number == 2:
            assert reason.name == "ERROR"
        else:
            np.testing.assert_allclose(engine.result(request), vector, atol=NEAR)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("bert", {"target_modules": ["word_embeddings"]}, "word_embeddings.*encoder's embedding"),
        ("bert", {"target_modules": ["pooler.dense"]}, "pooler.*is of no weight of BertModel"),
        ("", {"modules_to_save": ["lm_head"]}, "lm_head.*the model has no head"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    name: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    model = save_encoder(name, folder) if name else save_causal(folder)
    save_modules(folder, model.config.hidden_size, "mean_tokens")
    path = make_adapter(model, tmp_path / "a", **settings)
    with pytest.raises(ModelError, match=message):
        Served(prepare(folder), config=ServeConfig()).load(path)
