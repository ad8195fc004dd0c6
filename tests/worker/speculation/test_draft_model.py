"""Drafts of a second model: they are what that model would go on with, after any history.

An engine runs requests with every sampling parameter while drafts of another kind are accepted and
rejected, prompts are found in the cache, requests are preempted and blocks change hands; beside
that, every step asks for proposals. The reference is transformers on the draft model's weights.
"""

from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine_core.request import Request
from proto.messages.prepared_model import PreparedModel
from proto.settings.config import ModelConfig, ServeConfig
from tests.fakes.devices import CPU, create_backend, create_sampler
from tests.fakes.drafted_engine import (
    BLOCK,
    NUM_ROWS,
    PARAMS,
    STEP_TOKENS,
    VOCAB_SIZE,
    Setup,
    answers_of,
    serve,
)
from tests.fakes.drafts import SyntheticDrafts
from tests.fakes.engine_harness import EngineHarness
from tests.fakes.lookahead_runner import LOOKAHEAD, LookaheadRunner
from tests.fakes.prepared_models import prepare_checkpoint, spec_of
from tests.fakes.ranks import LockstepRunners, Ranks
from tests.fakes.tiny_checkpoints import CONFIGS, save_tiny, tiny_model
from worker.attention.kv_cache import KVCache
from worker.host.device import PREFILL_TOKENS
from worker.loaded_model import load as load_worker
from worker.loader.formats import DenseFormat
from worker.loader.weights import load_model
from worker.models.decoder import Decoder
from worker.parallel.group import RankGroup
from worker.plan.draft_settings import draft_cache
from worker.speculation.draft_model import DraftModel
from worker.speculation.draft_sampler import host_draw
from worker.speculation.drafter import DraftedModel
from worker.step.model_runner import ModelRunner


@cache
def prepared_in(folder: Path) -> PreparedModel:
    return prepare_checkpoint(folder, folder / "prepared")


def load(folder: Path, group: RankGroup | None = None) -> Decoder:
    prepared = prepared_in(folder)
    dtype = torch.float32
    return load_model(
        prepared,
        spec_of(prepared),
        dtype,
        CPU,
        lambda _: None,
        DenseFormat(dtype),
        group or RankGroup(),
    )


def on_transformers(folder: Path) -> Decoder:
    config = ServeConfig(model=ModelConfig(model_impl="transformers", dtype="float32"))
    prepared = prepared_in(folder)
    return load_worker(config, prepared, CPU, RankGroup(), lambda message: None).model


def with_drafter(
    runner: ModelRunner,
    draft: Decoder,
    kv_dtype: torch.dtype = torch.float32,
    step_tokens: int = STEP_TOKENS,
    max_model_len: int | None = None,
) -> DraftModel:
    layout, geometry = draft_cache(draft.spec, kv_dtype)
    cache = KVCache(geometry, layout, runner.kv_cache.num_blocks, BLOCK)
    drafter = DraftModel(
        draft,
        create_backend("cpu", cache, draft.spec.attention_shape),
        cache,
        host_draw(create_sampler()),
        DraftedModel(
            runner.batch,
            runner.kv_cache.layout.windows.index(None),
            runner.vocab_size,
            step_tokens,
            max_model_len or draft.spec.max_position,
        ),
        CPU.transfers(),
        PREFILL_TOKENS,
    )
    drafter.warm_up()
    runner._drafter = drafter
    return drafter


class Reference:
    """The greedy continuation by transformers, and the probabilities of its tokens."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._logits: dict[tuple[int, ...], torch.Tensor] = {}

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        key = tuple(tokens)
        if key not in self._logits:
            self._logits[key] = self._model(torch.tensor([tokens])).logits[0, -1].double()
        return self._logits[key]

    def check(
        self, known: list[int], draft: list[int], acceptance_probs: list[float], tolerance: float
    ) -> None:
        acceptance_prob = 1.0
        for index, (token, found) in enumerate(zip(draft, acceptance_probs, strict=True)):
            logits = self.logits(known + draft[:index])
            assert logits[token] > logits.max() - tolerance
            acceptance_prob *= float(logits.softmax(0)[token])
            assert found == pytest.approx(acceptance_prob, rel=2 * tolerance)


def tiny(name: str, folder: Path) -> Path:
    folder.mkdir()
    save_tiny(name, folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: tiny(name, root / name) for name in ("llama", "qwen3", "gemma3")}


@pytest.fixture(scope="module")
def setups(folders: dict[str, Path]) -> dict[str, Setup]:
    made = {}
    for name in ("llama", "gemma3"):
        made[name] = Setup(load(folders[name]), torch.float32, returns_experts=False)
        made[name].record_answers()
    return made


def serve_greedy(engine: EngineHarness) -> list[Request]:
    """Greedy requests that share prefixes, some with two choices, while others run."""
    generator = torch.Generator().manual_seed(5)
    shared = torch.randint(0, VOCAB_SIZE, (14,), generator=generator).tolist()
    requests = []
    for index in range(10):
        own = torch.randint(0, VOCAB_SIZE, (1 + index % 4,), generator=generator).tolist()
        prompt = shared[: (14, 0, 8)[index % 3]] + own
        params = {"temperature": 0.0, "ignore_eos": True, "seed": index}
        requests += engine.add(prompt, 12 + 3 * index, n=1 + index % 2, **params)
        engine.step()
    engine.run()
    return requests


@pytest.mark.parametrize(
    ("target", "draft", "is_full", "every", "kv_dtype"),
    [
        ("llama", "qwen3", False, 1, torch.float32),
        ("llama", "qwen3", True, 3, torch.float32),
        ("llama", "gemma3", True, 2, torch.float32),  # the draft model has windows
        ("gemma3", "qwen3", True, 2, torch.float32),  # the served one has
        ("llama", "qwen3", True, 2, torch.int8),
    ],
)
def test_greedy_drafts_are_those_of_transformers(
    setups: dict[str, Setup],
    folders: dict[str, Path],
    target: str,
    draft: str,
    is_full: bool,
    every: int,
    kv_dtype: torch.dtype,
) -> None:
    setup, reference = setups[target], Reference(folders[draft])
    plain = setup.harness()
    expected = serve_greedy(plain)
    answers = {(each.request_id, each.choice): plain.tokens_of(each) for each in expected}

    def answer(request: Request, num_tokens: int) -> list[int]:
        first = request.num_output_tokens
        return answers[request.request_id, request.choice][first : first + num_tokens] or [5]

    drafting = SyntheticDrafts(0.6, answer, vocab_size=VOCAB_SIZE)
    engine = setup.harness(is_full=is_full, drafting=drafting)
    runner = LookaheadRunner(engine.runner, every=every)  # type: ignore[arg-type]
    with_drafter(runner.runner, load(folders[draft]), kv_dtype)
    engine.runner = runner  # type: ignore[assignment]
    requests = serve_greedy(engine)
    for each in requests:
        assert engine.tokens_of(each) == answers[each.request_id, each.choice]
    assert runner.num_resumed > 0 or not is_full
    assert runner.num_copied > 0
    tolerance = 1e-3 if kv_dtype == torch.float32 else 0.1
    for _, known, proposed, acceptance_probs in runner.proposals:
        reference.check(known, proposed, acceptance_probs, tolerance)
    lengths = Counter(len(proposed) for _, _, proposed, _ in runner.proposals)
    assert lengths.total() > 50
    assert lengths[LOOKAHEAD] > 0
    if every == 1 and not is_full:  # after the first pass over a prompt, only new tokens
        assert np.median([rows[0] for rows in runner.pass_rows if rows]) < 2 * NUM_ROWS


def test_drafts_of_the_same_model_are_accepted_with_any_parameters(
    setups: dict[str, Setup], folders: dict[str, Path]
) -> None:
    """Also at a temperature, with filters, penalties, forbidden words and least lengths."""
    setup = setups["llama"]
    engine = setup.harness(is_full=True)
    runner = LookaheadRunner(engine.runner)  # type: ignore[arg-type]
    with_drafter(runner.runner, setup.decoder)
    engine.runner = runner  # type: ignore[assignment]
    requests = {each.seq_id: each for each in serve(engine)}
    found = Counter[int]()
    for seq_id, known, proposed, acceptance_probs in runner.proposals:
        request = requests[seq_id]
        answer = setup.answers[request.request_id, request.choice]
        rest = answer[len(known) - request.num_prompt_tokens :]
        assert proposed[: len(rest)] == rest[: len(proposed)]
        stops = request.sampling_params.stop_ids
        assert not stops & set(proposed[:-1])
        assert all(np.diff([1.0, *acceptance_probs]) <= 0)
        found[request.request_id] += min(len(rest), len(proposed))
    assert len(found) == len(PARAMS)
    assert min(found.values()) > 3


@pytest.mark.parametrize(
    ("target", "draft"), [("mixtral", "qwen3"), ("llama", "llama on transformers")]
)
def test_answers_are_those_without_a_draft_model(target: str, draft: str, tmp_path: Path) -> None:
    """Of a mixture with the experts of all tokens, and if both models run on transformers' code.

    Steps verify drafts of the draft model and others.
    """
    loading = on_transformers if "transformers" in draft else load
    decoder = loading(tiny(target, tmp_path / target))
    setup = Setup(decoder, torch.float32, returns_experts=target == "mixtral")
    setup.record_answers()
    drafting = setup.drafts(0.7)
    drafting.has_draft_model = True
    engine = setup.harness(drafting=drafting, is_full=True)
    with_drafter(engine.runner, loading(tiny(draft.split()[0], tmp_path / "draft")))  # type: ignore[arg-type]
    found = answers_of(engine, serve(engine))
    for field in ("tokens", "ends", "ranks", "experts"):
        assert [each[field] for each in found] == [each[field] for each in setup.expected]
    assert drafting.num_proposed > 20
    assert any(each["experts"] for each in found) is (target == "mixtral")


def test_a_prompt_of_embeddings_has_drafts(
    setups: dict[str, Setup], folders: dict[str, Path]
) -> None:
    """The draft model does not know its tokens, so that few drafts are right."""
    setup = setups["llama"]
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, VOCAB_SIZE, (n,), generator=generator) for n in (23, 3, 11)]
    answers = []
    for drafts in (False, True):
        drafting = SyntheticDrafts(0.0, lambda request, n: [5], vocab_size=VOCAB_SIZE)
        drafting.has_draft_model = drafts
        engine = setup.harness(drafting=drafting)
        if drafts:
            with_drafter(engine.runner, load(folders["qwen3"]))  # type: ignore[arg-type]
        requests = [
            engine.add_one(
                [0] * len(prompt),
                30,
                prompt_embeds=setup.decoder.embed(prompt).float().numpy().tobytes(),
                temperature=0.0,
                ignore_eos=True,
            )
            for prompt in prompts
        ]
        engine.run()
        answers.append([engine.tokens_of(each) for each in requests])
    assert drafting.num_proposed > 20
    assert answers[0] == answers[1]
    assert len({tuple(each) for each in answers[0]}) == len(prompts)


def test_a_draft_ends_where_its_survival_is_too_low(
    setups: dict[str, Setup], folders: dict[str, Path]
) -> None:
    lengths = {}
    for least in (0.0, 0.02, 1.1):
        engine = setups["llama"].harness()
        runner = LookaheadRunner(engine.runner, min_acceptance_prob=least)  # type: ignore[arg-type]
        with_drafter(runner.runner, load(folders["qwen3"]))
        engine.runner = runner  # type: ignore[assignment]
        serve_greedy(engine)
        assert all(
            each >= least for *_, acceptance_probs in runner.proposals for each in acceptance_probs
        )
        lengths[least] = sum(len(proposed) for _, _, proposed, _ in runner.proposals)
    assert lengths[0.0] > lengths[0.02] > lengths[1.1] == 0


@pytest.mark.parametrize(("passes", "most_known"), [(8, 72), (1, 79)])
def test_a_long_prompt_is_computed_in_several_passes(
    setups: dict[str, Setup],
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    passes: int,
    most_known: int,
) -> None:
    """In the steps that follow if they are too many; a short sequence need not wait."""
    monkeypatch.setattr("worker.speculation.draft_model.PREFILL_PASSES", passes)
    engine = setups["llama"].harness()
    runner = LookaheadRunner(engine.runner)  # type: ignore[arg-type]
    with_drafter(runner.runner, load(folders["qwen3"]), step_tokens=20)
    engine.runner = runner  # type: ignore[assignment]
    long = engine.add_one(list(range(70)), 12, temperature=0.0, ignore_eos=True)
    engine.step()
    engine.step()
    short = engine.add_one([5, 6], 12, temperature=0.0, ignore_eos=True)
    engine.run()
    assert max(max(rows) for rows in runner.pass_rows if rows) == 20
    reference = Reference(folders["qwen3"])
    for _, known, proposed, acceptance_probs in runner.proposals:
        reference.check(known, proposed, acceptance_probs, 1e-3)
    first = {}
    for seq_id, known, *_ in runner.proposals:
        first.setdefault(seq_id, len(known))
    assert first[short.seq_id] <= 4
    assert most_known - 6 <= first[long.seq_id] <= most_known


def test_nonfinite_logits_end_the_draft_alone(
    setups: dict[str, Setup], folders: dict[str, Path]
) -> None:
    setup = setups["llama"]
    engine = setup.harness()
    runner = LookaheadRunner(engine.runner)  # type: ignore[arg-type]
    drafter = with_drafter(runner.runner, load(folders["qwen3"]))
    compute = drafter._model.logits

    def poison(hidden: torch.Tensor) -> torch.Tensor:
        logits = compute(hidden)
        logits[::2, 3] = float("nan")
        return logits

    drafter._model.logits = poison  # type: ignore[method-assign]
    engine.runner = runner  # type: ignore[assignment]
    found = answers_of(engine, serve(engine))
    assert [each["tokens"] for each in found] == [each["tokens"] for each in setup.expected]
    assert len(runner.proposals) > 0


def test_a_sequence_has_no_draft_beyond_the_length_of_the_draft_model(
    setups: dict[str, Setup], folders: dict[str, Path]
) -> None:
    engine = setups["llama"].harness()
    runner = LookaheadRunner(engine.runner)  # type: ignore[arg-type]
    with_drafter(runner.runner, load(folders["qwen3"]), max_model_len=28)
    engine.runner = runner  # type: ignore[assignment]
    engine.add_one([1, 2, 3], 60, temperature=0.0, ignore_eos=True)
    engine.run()
    ends = [len(known) + len(proposed) for _, known, proposed, _ in runner.proposals]
    assert max(ends) == 28


@pytest.mark.parametrize("vocab_size", [64, 128])
def test_vocabularies_of_other_sizes(
    setups: dict[str, Setup], tmp_path: Path, vocab_size: int
) -> None:
    """Proposals are tokens of the served model, and tokens that the other lacks do no harm."""
    config = CONFIGS["qwen3"]
    other = tiny_model(type(config)(**config.to_dict() | {"vocab_size": vocab_size}))
    other.save_pretrained(tmp_path)
    setup = setups["llama"]
    engine = setup.harness()
    runner = LookaheadRunner(engine.runner)  # type: ignore[arg-type]
    with_drafter(runner.runner, load(tmp_path))
    engine.runner = runner  # type: ignore[assignment]
    found = answers_of(engine, serve(engine))
    assert [each["tokens"] for each in found] == [each["tokens"] for each in setup.expected]
    proposed = {token for *_, draft, _ in runner.proposals for token in draft}
    assert len(proposed) > 10
    assert max(proposed) < min(vocab_size, VOCAB_SIZE)


def serve_some(engine: EngineHarness) -> None:
    engine.add_one([3, 4, 5], 8, temperature=0.0, ignore_eos=True)
    engine.add_one([7, 4, 5], 8, temperature=1.0, seed=3, ignore_eos=True)
    engine.run()


def test_ranks_make_the_same_drafts(setups: dict[str, Setup], folders: dict[str, Path]) -> None:
    alone = setups["llama"].harness()
    runner = LookaheadRunner(alone.runner)  # type: ignore[arg-type]
    with_drafter(runner.runner, load(folders["qwen3"]))
    alone.runner = runner  # type: ignore[assignment]
    serve_some(alone)
    prepared_in(folders["qwen3"])
    with Ranks(2) as ranks:
        decoders = ranks.run_on_all(lambda rank: load(folders["llama"], ranks.groups[rank]))
        drafts = ranks.run_on_all(lambda rank: load(folders["qwen3"], ranks.groups[rank]))
        runners = [Setup(each, torch.float32, returns_experts=False).runner() for each in decoders]
        ranks.run_on_all(lambda rank: with_drafter(runners[rank], drafts[rank]))
        engine = setups["llama"].harness()
        together = LookaheadRunner(runners[0])
        together.execute_step = LockstepRunners(ranks, runners).execute
        engine.runner = together  # type: ignore[assignment]
        serve_some(engine)
    assert [draft for _, _, draft, _ in together.proposals] == [
        draft for _, _, draft, _ in runner.proposals
    ]
