"""Pooled results through scheduler and runner against transformers and pooling in plain torch.

A prompt is pooled whole, in chunks, beside others, after a preemption, with a cached prefix, by a
new worker after a death, and with steps that overlap.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification

from deploy.models import hf_folder
from engine_core.request import Request
from proto.errors import ConfigError, ModelError
from proto.messages.engine_io import FinishReason
from proto.messages.model_runner_output import ModelRunnerOutput, RowPooled
from proto.messages.pooling import PoolingParams, PoolingType
from proto.messages.prepared_model import PreparedModel
from proto.settings.config import ModelConfig
from proto.settings.pooler_config import pooler_of
from tests.fakes.pooling_engine import PoolingEngine, prepare
from tests.fakes.real_engine import BLOCK
from tests.fakes.tiny_checkpoints import CONFIGS
from tests.fakes.tiny_encoders import save_encoder
from tests.fakes.tiny_pooling import (
    dense,
    hidden_states,
    pooled,
    save_causal,
    save_modules,
)
from worker.step.pooling import PartialPool

PROMPTS = [
    torch.randint(3, 96, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (23, 40, 11, 1, 37)
]


@pytest.fixture(scope="module")
def last_token(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreparedModel, torch.nn.Module]:
    """A model in the shape of Qwen3-Embedding."""
    folder = tmp_path_factory.mktemp("models") / "last"
    model = save_causal(folder)
    save_modules(folder, model.config.hidden_size, "lasttoken")
    return prepare(folder), model


def expected(model: torch.nn.Module, prompt: list[int], kind: str) -> torch.Tensor:
    return F.normalize(pooled(hidden_states(model, prompt), kind), dim=0)


@pytest.mark.parametrize("overlapped", [False, True], ids=["in turn", "overlapped"])
def test_the_last_token_in_all_situations(
    last_token: tuple[PreparedModel, torch.nn.Module], overlapped: bool
) -> None:
    prepared, model = last_token
    engine = PoolingEngine(prepared, async_scheduling=overlapped)
    harness = engine.harness

    def check(requests: list[Request]) -> None:
        for request in requests:
            want = expected(model, request.prompt_token_ids, "lasttoken")
            torch.testing.assert_close(engine.result(request), want, atol=1e-5, rtol=0)

    requests = [engine.add(prompt) for prompt in PROMPTS]
    harness.run()
    check(requests)
    engine.add(PROMPTS[0])  # the others have evicted it
    harness.run()
    again = engine.add(PROMPTS[0])
    whole_blocks = engine.add(PROMPTS[0][: 5 * BLOCK])
    harness.run()
    assert again.num_cached_tokens == (len(PROMPTS[0]) - 1) // BLOCK * BLOCK
    assert whole_blocks.num_cached_tokens == 4 * BLOCK, "the last token is always computed"
    check([again, whole_blocks])

    assert harness.scheduler.reset_prefix_cache()
    lost = [engine.add(prompt) for prompt in PROMPTS[:2]]
    harness.step()
    harness.lose_workers(runner=engine.new_runner())  # type: ignore[arg-type]
    gone = engine.add(PROMPTS[4])
    harness.step()
    harness.scheduler.reset_prefix_cache(preempting=True)
    assert harness.scheduler.abort_request(gone.request_id) == 1
    harness.run()
    check(lost)
    assert (gone.request_id, 0) not in harness.outputs
    assert not harness.scheduler.num_unfinished
    assert harness.kv_cache.usage == 0


@pytest.mark.parametrize("name", ["granitehybrid", "lfm2"])
def test_models_with_recurrent_states(tmp_path: Path, name: str) -> None:
    """In chunks, beside others, from a cached prefix with its state, and for a new worker."""
    model = save_causal(tmp_path / "model", name=name)
    save_modules(tmp_path / "model", model.config.hidden_size, "lasttoken")
    engine = PoolingEngine(prepare(tmp_path / "model"))
    for lost in (False, True):
        requests = [engine.add(prompt) for prompt in PROMPTS]
        engine.harness.step()
        if lost:
            engine.harness.lose_workers(runner=engine.new_runner())  # type: ignore[arg-type]
        engine.harness.run()
        again = engine.add(PROMPTS[4])
        engine.harness.run()
        assert again.num_cached_tokens == (len(PROMPTS[4]) - 1) // BLOCK * BLOCK
        for request in [*requests, again]:
            want = expected(model, request.prompt_token_ids, "lasttoken")
            torch.testing.assert_close(engine.result(request), want, atol=1e-5, rtol=0)


def test_pooling_of_all_tokens_over_chunks(
    last_token: tuple[PreparedModel, torch.nn.Module], tmp_path: Path
) -> None:
    """The folder joins all other pooling types; nothing is read from the prefix cache."""
    _, model = last_token
    folder = tmp_path / "model"
    save_causal(folder)
    kinds = ("cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens")
    kinds = (*kinds, "weightedmean_tokens")
    save_modules(folder, model.config.hidden_size, *kinds, dense=24)
    engine = PoolingEngine(prepare(folder))
    for _ in range(2):
        requests = [engine.add(prompt) for prompt in PROMPTS]
        engine.harness.step()
        engine.harness.scheduler.reset_prefix_cache(preempting=True)
        engine.harness.run()
        for request in requests:
            hidden = hidden_states(model, request.prompt_token_ids)
            joined = torch.cat([pooled(hidden, kind) for kind in kinds])
            want = F.normalize(dense(folder, joined), dim=0)
            torch.testing.assert_close(engine.result(request), want, atol=1e-5, rtol=0)
            assert request.num_cached_tokens == 0


def test_dimensions_normalisation_and_tokens(
    last_token: tuple[PreparedModel, torch.nn.Module],
) -> None:
    prepared, model = last_token
    engine = PoolingEngine(prepared)
    prompt = PROMPTS[1]
    requests = [
        engine.add(prompt),
        engine.add(prompt, dimensions=8),
        engine.add(prompt, activate=False, dimensions=8),
        engine.add(prompt, task="token_embed"),
    ]
    engine.harness.run()
    whole, short, raw, tokens = map(engine.result, requests)
    hidden = hidden_states(model, prompt)
    torch.testing.assert_close(short, F.normalize(whole[:8], dim=0), atol=1e-6, rtol=0)
    torch.testing.assert_close(raw, hidden[-1][:8], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        tokens.view(len(prompt), -1), F.normalize(hidden, dim=-1), atol=1e-5, rtol=0
    )


def test_a_score_is_the_difference_of_two_logits(tmp_path: Path) -> None:
    """The shape of Qwen3-Reranker."""
    folder = tmp_path / "model"
    model = save_causal(folder, with_head=True)
    config = ModelConfig(pooler_config='{"true_token_id": 7, "false_token_id": 5}')
    engine = PoolingEngine(prepare(folder), config)
    requests = [engine.add(prompt, task="classify") for prompt in PROMPTS]
    raw = engine.add(PROMPTS[0], task="classify", activate=False)
    engine.harness.run()
    for request in [*requests, raw]:
        with torch.inference_mode():
            logits = model(torch.tensor([request.prompt_token_ids])).logits[0, -1]
        want = logits[7] - logits[5]
        want = want if request is raw else want.sigmoid()
        torch.testing.assert_close(engine.result(request)[0], want, atol=1e-5, rtol=1e-5)


def test_a_head_of_scores(tmp_path: Path) -> None:
    """A causal model with `score.weight`; the probabilities of its labels."""
    folder = tmp_path / "model"
    save_causal(folder)
    config = CONFIGS["qwen3"].__class__.from_pretrained(folder)
    config.num_labels, config.pad_token_id = 3, None
    model = AutoModelForSequenceClassification.from_config(config).eval()
    model.save_pretrained(folder)
    engine = PoolingEngine(prepare(folder))
    assert engine.pooler.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    requests = [engine.add(prompt, task="classify") for prompt in PROMPTS]
    engine.harness.run()
    for request in requests:
        with torch.inference_mode():
            logits = model(torch.tensor([request.prompt_token_ids])).logits[0]
        torch.testing.assert_close(engine.result(request), logits.softmax(0), atol=1e-5, rtol=1e-5)


FLOOD, QUIET = 1, 2


@pytest.mark.parametrize("kind", ["causal", "bert"])
def test_a_tenant_does_not_wait_for_the_texts_of_another(
    kind: str, last_token: tuple[PreparedModel, torch.nn.Module], tmp_path: Path
) -> None:
    """Eighty texts wait, and each fills a step or several; the turns of two tenants alternate.

    A text of the same tenant waits for all that came before.
    """
    prepared = last_token[0]
    if kind == "bert":
        save_encoder("bert", tmp_path / "model")
        save_modules(tmp_path / "model", 64, "mean_tokens")
        prepared = prepare(tmp_path / "model")
    engine = PoolingEngine(prepared)
    length = engine.decoder.spec.max_position if kind == "bert" else 30
    flood = [engine.add([7 + number] * length, tenant=FLOOD) for number in range(80)]
    for _ in range(6):
        engine.harness.step()
    texts = {tenant: engine.add([5, 6, 7], tenant=tenant) for tenant in (FLOOD, QUIET)}
    finished = engine.harness.finish_reason_of
    for _ in range(4):
        engine.harness.step()
    assert finished(texts[QUIET]) is FinishReason.STOP
    assert finished(texts[FLOOD]) is None
    assert sum(finished(each) is None for each in flood) > 60
    engine.harness.run()
    assert {finished(each) for each in [*flood, *texts.values()]} == {FinishReason.STOP}


@pytest.fixture
def engine(last_token: tuple[PreparedModel, torch.nn.Module]) -> PoolingEngine:
    return PoolingEngine(last_token[0])


@pytest.mark.parametrize("data", [b"", b"123", None])
def test_a_worker_without_a_valid_result_is_refused(
    engine: PoolingEngine, data: bytes | None
) -> None:
    request = engine.add(PROMPTS[2])
    step = engine.harness.scheduler.schedule()
    rows = [] if data is None else [RowPooled(request.seq_id, data)]
    wrong = ModelRunnerOutput(1, step.step, [request.seq_id], [[]], pooler_outputs=rows)
    with pytest.raises(Exception, match=f"sequence {request.seq_id}"):
        engine.harness.scheduler.update_from_output(step, wrong)


def test_values_that_are_not_finite_end_one_request(
    engine: PoolingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = engine.decoder.forward

    def broken(token_ids: torch.Tensor, *others: Any) -> torch.Tensor:
        hidden = forward(token_ids, *others)
        hidden[token_ids == 50] = float("nan")
        return hidden

    monkeypatch.setattr(engine.decoder, "forward", broken)
    bad, good = engine.add([50, 51, 52]), engine.add([4, 5, 6])
    engine.harness.run()
    assert engine.harness.finish_reason_of(bad) is FinishReason.ERROR
    assert engine.harness.finish_reason_of(good) is FinishReason.STOP


def test_runners(last_token: tuple[PreparedModel, torch.nn.Module], tmp_path: Path) -> None:
    """What the folder says, and settings that change it or cannot be."""
    prepared, _ = last_token
    pooler = pooler_of(ModelConfig(), prepared)
    assert pooler is not None
    assert (pooler.types, pooler.size, pooler.normalize) == (("last",), 64, True)
    assert pooler_of(ModelConfig(runner="generate"), prepared) is None
    mean = pooler_of(ModelConfig(pooler_config='{"pooling_type": "MEAN"}'), prepared)
    assert mean is not None
    assert mean.types == ("mean",)
    folder = tmp_path / "plain"
    save_causal(folder, with_head=True)
    plain = prepare(folder)
    assert pooler_of(ModelConfig(), plain) is None
    assert pooler_of(ModelConfig(runner="pooling"), plain) == pooler
    with pytest.raises(ConfigError, match="token id 96 is outside"):
        pooler_of(ModelConfig(pooler_config='{"true_token_id": 96}'), plain)
    for text in ('{"pooling_type": "most"}', '{"normalise": true}', "[]", '{"false_token_id": 1}'):
        with pytest.raises(ConfigError, match="--pooler-config"):
            pooler_of(ModelConfig(pooler_config=text), plain)
    (folder / "modules.json").write_text('[{"type": "x.Transformer", "path": ""}]')
    with pytest.raises(ModelError, match=r"has no Pooling"):
        hf_folder.read(str(folder), lambda what: None)
    (folder / "modules.json").write_text('[{"type": "x.LSTM", "path": "../1"}]')
    with pytest.raises(ModelError, match="has no type and path"):
        hf_folder.read(str(folder), lambda what: None)
    (folder / "modules.json").write_text('[{"type": "x.LSTM", "path": "1"}]')
    with pytest.raises(ModelError, match=r"x\.LSTM is not supported"):
        hf_folder.read(str(folder), lambda what: None)


@pytest.mark.parametrize("kind", ["mean", "mean_sqrt_len", "weighted_mean", "max"])
def test_the_bits_of_a_pooled_text_do_not_depend_on_its_chunks(kind: PoolingType) -> None:
    hidden = torch.randn(90, 48, generator=torch.Generator().manual_seed(4))
    found = set()
    for cuts in ([], [1], [31, 64], range(1, 90)):
        pool = PartialPool(PoolingParams(task="embed", needs_all_tokens=True), 90)
        for start, end in pairwise([0, *cuts, 90]):
            pool.add(hidden[start:end], start, [kind])
        found.add(pool.vector([kind]).numpy().tobytes())
    assert len(found) == 1
