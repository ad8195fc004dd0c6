"""Drafts of heads of EAGLE: they are those of the published arithmetic, after any history.

An engine runs requests while drafts of another kind are accepted and rejected, prompts are cut into
chunks, requests are preempted and blocks change hands; every step asks the head for a proposal. The
reference computes each proposal from the tokens alone: the target in transformers, the head here.
"""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from proto import PROTOCOL_VERSION
from proto.errors import ConfigError
from proto.messages.lifecycle import InitializeCache
from proto.messages.prepared_model import PreparedModel
from proto.messages.sampling_params import SamplingParams
from proto.messages.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from proto.runtime.faults import FaultInjector
from proto.settings.config import ModelConfig, ServeConfig, SpeculationConfig
from tests.fakes.devices import CPU, create_backend, create_sampler
from tests.fakes.drafted_engine import (
    BLOCK,
    NUM_BLOCKS,
    PARAMS,
    STEP_TOKENS,
    VOCAB_SIZE,
    Setup,
    answers_of,
    serve,
)
from tests.fakes.engine_harness import EngineHarness
from tests.fakes.events import num_cached_tokens
from tests.fakes.lookahead_runner import LOOKAHEAD, LookaheadRunner
from tests.fakes.prepared_models import prepare_checkpoint, spec_of
from tests.fakes.ranks import LockstepRunners, Ranks
from tests.fakes.tiny_checkpoints import save_tiny
from tests.fakes.tiny_heads import head_config, head_tensors, prepare_head, save_head
from worker.attention.kv_cache import KVCache
from worker.create_device import create_device
from worker.loaded_model import load as worker_load
from worker.loader.formats import DenseFormat
from worker.loader.weights import load_model
from worker.models.decoder import Decoder
from worker.parallel.group import RankGroup
from worker.plan.draft_settings import require_draft_model
from worker.plan.memory_plan import plan_memory
from worker.runner_builder import RunnerBuilder
from worker.speculation.draft_sampler import host_draw
from worker.speculation.drafter import DraftedModel
from worker.speculation.eagle import EagleDrafter
from worker.speculation.eagle_head import load_head, read_head
from worker.step.model_runner import ModelRunner

pytestmark = pytest.mark.suite("long")

TARGETS = ("llama", "gemma3", "qwen2")


def load(prepared: PreparedModel, group: RankGroup | None = None) -> Decoder:
    dtype = torch.float32
    form = DenseFormat(dtype)
    return load_model(
        prepared, spec_of(prepared), dtype, CPU, lambda _: None, form, group or RankGroup()
    )


class HeadReference:
    """A head in plain float32 torch, on a target of transformers.

    residuals: layers before which EAGLE-3 reads the residual.
    """

    def __init__(
        self,
        target: Path,
        head: Path,
        config: dict[str, Any],
        residuals: tuple[int, ...] = (2, 1, 0),
    ) -> None:
        self._target = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        self._tensors = {
            name.removeprefix("midlayer.").removeprefix("layers.0."): tensor
            for name, tensor in load_file(head / "model.safetensors").items()
        }
        self._config = config
        self._residuals = residuals
        self._is_third = "d2t" in self._tensors
        self._known: list[tuple[list[int], torch.Tensor]] = []

    @torch.inference_mode()
    def check(
        self, known: list[int], draft: list[int], acceptance_probs: list[float], tolerance: float
    ) -> None:
        """Compare a greedy draft after known tokens."""
        features = self._features(known[:-1])
        tokens, acceptance_prob = list(known[1:]), 1.0
        for token, found in zip(draft, acceptance_probs, strict=True):
            state = self._forward(torch.tensor(tokens), features)[-1:]
            logits = self._logits(state)[0].double()
            assert logits[token] > logits.max() - tolerance
            acceptance_prob *= float(logits.softmax(0)[token])
            assert found == pytest.approx(acceptance_prob, rel=5 * tolerance)
            tokens.append(token)
            features = torch.cat((features, state))

    def _features(self, tokens: list[int]) -> torch.Tensor:
        """What the head reads of the target at each token, [n, H]; longer sequences come first."""
        for longer, features in self._known:
            if longer[: len(tokens)] == tokens:
                return features[: len(tokens)]
        states = self._target(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        features = states[-1][0]
        if self._is_third:
            joined = torch.cat([states[layer][0] for layer in self._residuals], dim=1)
            features = F.linear(joined, self._tensors["fc.weight"])
        self._known.append((tokens, features))
        return features

    def _forward(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """The head's states [n, H] of all positions: tokens behind them, and what it reads."""
        weights = self._tensors
        embedded = self._target.get_input_embeddings().weight[tokens]
        if self._is_third:
            residual, normed = features, self._norm("hidden_norm", features)
            if self._config.get("norm_before_residual"):
                residual = normed
            x = torch.cat((self._norm("input_layernorm", embedded), normed), dim=1)
        else:
            joined = torch.cat((embedded, features), dim=1)
            residual = x = F.linear(joined, weights["fc.weight"], weights.get("fc.bias"))
        residual = residual + self._attention(x)
        x = self._norm("post_attention_layernorm", residual)
        gate, up = (F.linear(x, weights[f"mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        return residual + F.linear(F.silu(gate) * up, weights["mlp.down_proj.weight"])

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        config, length, dim = self._config, len(x), self._config["head_dim"]
        query, key, value = (
            F.linear(x, self._tensors[f"self_attn.{name}_proj.weight"])
            .view(length, -1, dim)
            .transpose(0, 1)
            for name in "qkv"
        )
        angles = torch.arange(length)[:, None] * config["rope_theta"] ** (
            -torch.arange(0, dim, 2) / dim
        )
        angles = torch.cat((angles, angles), dim=1)

        def rotated(heads: torch.Tensor) -> torch.Tensor:
            first, second = heads.chunk(2, dim=-1)
            return heads * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()

        groups = config["num_attention_heads"] // config["num_key_value_heads"]
        key, value = (each.repeat_interleave(groups, 0) for each in (rotated(key), value))
        attended = F.scaled_dot_product_attention(rotated(query), key, value, is_causal=True)
        joined = attended.transpose(0, 1).flatten(1)
        return F.linear(joined, self._tensors["self_attn.o_proj.weight"])

    def _logits(self, state: torch.Tensor) -> torch.Tensor:
        if not self._is_third:
            return self._target.get_output_embeddings()(state)
        ids = F.linear(self._norm("norm", state), self._tensors["lm_head.weight"])
        logits = torch.full((len(ids), VOCAB_SIZE), float("-inf"))
        logits[:, self._tensors["d2t"] + torch.arange(ids.shape[1])] = ids
        return logits

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = self._tensors[f"{name}.weight"]
        return F.rms_norm(x, x.shape[-1:], weight, self._config["rms_norm_eps"])


def with_head(runner: ModelRunner, method: str, prepared: PreparedModel) -> EagleDrafter:
    """Give a runner a head, whole."""
    target = runner._model
    spec = read_head(method, prepared, target.spec, CPU)
    head = load_head(prepared, spec, target, torch.float32, CPU, DenseFormat(torch.float32))
    head.record_residuals(STEP_TOKENS)
    layout, geometry = spec.cache(torch.float32)
    cache = KVCache(geometry, layout, runner.kv_cache.num_blocks, BLOCK)
    drafter = EagleDrafter(
        head,
        create_backend("cpu", cache, spec.attention_shape),
        cache,
        host_draw(create_sampler()),
        DraftedModel(
            runner.batch,
            runner.kv_cache.layout.windows.index(None),
            runner.vocab_size,
            STEP_TOKENS,
            spec.longest,
        ),
        CPU.transfers(),
    )
    drafter.warm_up()
    runner._drafter = drafter
    return drafter


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Setup]]:
    made = {}
    for name in TARGETS:
        folder = tmp_path_factory.mktemp(name)
        save_tiny(name, folder)
        decoder = load(prepare_checkpoint(folder, folder / "prepared"))
        made[name] = folder, Setup(decoder, torch.float32, returns_experts=False)
    return made


@pytest.fixture(scope="module")
def new_head(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., tuple[Path, dict[str, Any]]]:
    def make(method: str, **changes: Any) -> tuple[Path, dict[str, Any]]:
        config = head_config(method, **changes)
        folder = tmp_path_factory.mktemp(method)
        return save_head(folder, config, head_tensors(method, config)), config

    return make


def serve_greedy(engine: EngineHarness) -> dict[tuple[int, int], list[int]]:
    """Answers of greedy requests that share prefixes, some with two choices, while others run.

    No two of them differ in the first token of a block, behind equal ones: a prefix may be found in
    blocks that the other one wrote, with its own token behind.
    """
    generator = torch.Generator().manual_seed(5)
    shared = torch.randint(0, VOCAB_SIZE, (14,), generator=generator).tolist()
    requests = []
    for index in range(10):
        own = torch.randint(0, VOCAB_SIZE, (1 + 9 * (index % 4),), generator=generator).tolist()
        prompt = shared[: (14, 0, 9)[index % 3]] + own
        requests += engine.add(
            prompt,
            12 + 3 * index,
            n=1 + index % 2,
            temperature=0.0,
            ignore_eos=True,
            seed=index,
        )
        engine.step()
    engine.run()
    return {(each.request_id, each.choice): engine.tokens_of(each) for each in requests}


@pytest.mark.parametrize(
    ("method", "target", "is_full", "changes"),
    [
        ("eagle", "llama", False, {}),
        ("eagle", "gemma3", True, {}),
        ("eagle", "qwen2", True, {}),
        ("eagle3", "llama", True, {}),
        ("eagle3", "gemma3", False, {"norm_before_residual": True}),
        (
            "eagle3",
            "qwen2",
            True,
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 0, 1]}},
        ),
    ],
    ids=str,
)
def test_greedy_drafts_are_those_of_the_published_arithmetic(
    targets: dict[str, tuple[Path, Setup]],
    new_head: Callable[..., tuple[Path, dict[str, Any]]],
    method: str,
    target: str,
    is_full: bool,
    changes: dict[str, Any],
) -> None:
    folder, setup = targets[target]
    setup.answers = answers = serve_greedy(setup.harness())
    engine = setup.harness(is_full=is_full, drafting=setup.drafts(0.6), num_dropped_blocks=1)
    runner = LookaheadRunner(engine.runner)  # type: ignore[arg-type]
    head, config = new_head(method, **changes)
    with_head(runner.runner, method, prepare_head(head))
    engine.runner = runner  # type: ignore[assignment]
    assert serve_greedy(engine) == answers
    assert runner.num_resumed > 0 or not is_full
    assert any(num_cached_tokens(outputs[0]) for outputs in engine.outputs.values())
    residuals = (2, 1, 2) if "eagle_config" in changes else (2, 1, 0)
    reference = HeadReference(folder, head, config, residuals)
    for _, known, proposed, acceptance_probs in reversed(runner.proposals):
        reference.check(known, proposed, acceptance_probs, 1e-3)
    lengths = Counter(len(proposed) for _, _, proposed, _ in runner.proposals)
    assert min(lengths[1], lengths[2], lengths[3]) > 10


def test_drafts_follow_the_parameters_of_a_request(
    targets: dict[str, tuple[Path, Setup]],
    new_head: Callable[..., tuple[Path, dict[str, Any]]],
) -> None:
    """Answers are those without a head; stop tokens end a draft, forbidden ones are in none."""
    _, setup = targets["qwen2"]
    plain = setup.harness()
    expected = answers_of(plain, serve(plain))
    for method in ("eagle", "eagle3"):
        engine = setup.harness()
        runner = LookaheadRunner(engine.runner)  # type: ignore[arg-type]
        with_head(runner.runner, method, prepare_head(new_head(method)[0]))
        engine.runner = runner  # type: ignore[assignment]
        requests = {each.seq_id: each for each in serve(engine)}
        assert answers_of(engine, list(requests.values())) == expected
        found = Counter[int]()
        for seq_id, _, proposed, acceptance_probs in runner.proposals:
            params = requests[seq_id].sampling_params
            assert not params.stop_ids & set(proposed[:-1])
            if params.edits is not None and params.edits.allowed_token_ids:
                assert set(proposed) <= {3, 4, 5}
            assert all(np.diff([1.0, *acceptance_probs]) <= 0)
            found[requests[seq_id].request_id] += len(proposed)
        assert len(found) == len(PARAMS)
        assert min(found.values()) > 3


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
@pytest.mark.parametrize("settings", [{}, {"is_full": True, "async_scheduling": True}], ids=str)
def test_answers_are_those_without_a_head(
    targets: dict[str, tuple[Path, Setup]],
    new_head: Callable[..., tuple[Path, dict[str, Any]]],
    method: str,
    settings: dict[str, Any],
) -> None:
    """With every sampling parameter, while steps verify drafts of the head and others."""
    _, setup = targets["qwen2"]
    setup.record_answers()
    drafting = setup.drafts(0.7)
    drafting.has_draft_model = True
    engine = setup.harness(drafting=drafting, **settings)
    with_head(engine.runner, method, prepare_head(new_head(method)[0]))  # type: ignore[arg-type]
    found = answers_of(engine, serve(engine))
    for answer, wanted in zip(found, setup.expected, strict=True):
        assert {**answer, "cached": 0} == {**wanted, "cached": 0}
    assert drafting.num_proposed > 20


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_ranks_make_the_same_drafts(
    targets: dict[str, tuple[Path, Setup]],
    new_head: Callable[..., tuple[Path, dict[str, Any]]],
    method: str,
) -> None:
    folder, setup = targets["llama"]
    prepared = prepare_checkpoint(folder, folder / "prepared")
    head = prepare_head(new_head(method)[0])
    alone = LookaheadRunner(setup.runner())
    with_head(alone.runner, method, head)
    with Ranks(2) as ranks:
        decoders = ranks.run_on_all(lambda rank: load(prepared, ranks.groups[rank]))
        runners = [Setup(each, torch.float32, returns_experts=False).runner() for each in decoders]
        ranks.run_on_all(lambda rank: with_head(runners[rank], method, head))
        together = LookaheadRunner(runners[0])
        together.execute_step = LockstepRunners(ranks, runners).execute
        for runner in (alone, together):
            engine = setup.harness()
            engine.runner = runner  # type: ignore[assignment]
            serve(engine)
    assert [draft for _, _, draft, _ in together.proposals] == [
        draft for _, _, draft, _ in alone.proposals
    ]


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("eagle", {"hidden_size": 32}, "hidden_size = 32: that of the model is 64"),
        ("eagle", {"vocab_size": 97}, "vocab_size = 97: that of the model is 96"),
        ("eagle", {"num_hidden_layers": 2}, "num_hidden_layers = 2: a head has one layer"),
        ("eagle", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("eagle", {"intermediate_size": 96}, "mlp.gate_proj.weight has shape [80, 64]"),
        ("eagle", {"rope_scaling": {"rope_type": "odd", "factor": 2.0}}, "odd"),
        ("eagle3", {"norm_before_fc": True}, "norm_before_fc = True: not supported"),
        ("eagle3", {"draft_vocab_size": 30}, "the configuration asks for [30, 64]"),
        ("eagle3", {"draft_vocab_size": 97}, "draft_vocab_size = 97: at most 96"),
        ("eagle3", {"target_hidden_size": 128}, "target_hidden_size = 128: supported: 64"),
        (
            "eagle3",
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 4]}},
            "[0, 1, 4]: 3 layers of the model's 3 are needed",
        ),
        (
            "eagle3",
            {"eagle_config": {"use_aux_hidden_state": False}},
            "use_aux_hidden_state = False: supported: True",
        ),
    ],
    ids=str,
)
def test_a_configuration_that_does_not_fit_is_refused(
    targets: dict[str, tuple[Path, Setup]],
    tmp_path: Path,
    method: str,
    changes: dict[str, Any],
    message: str,
) -> None:
    config = head_config(method)
    folder = save_head(tmp_path, config | changes, head_tensors(method, config))
    assert message in refusal(targets, method, folder)


@pytest.mark.parametrize(
    ("method", "name", "tensor", "message"),
    [
        (
            "eagle",
            "layers.0.mlp.up_proj.weight",
            None,
            "up_proj.weight of shape [80, 64] is missing",
        ),
        (
            "eagle",
            "layers.0.input_layernorm.weight",
            torch.ones(64),
            "is no part of a head of EAGLE",
        ),
        ("eagle", "fc.weight", torch.ones(64, 64), "asks for [64, 128]"),
        ("eagle", "fc.bias", torch.ones(32), "asks for [64]"),
        (
            "eagle3",
            "midlayer.input_layernorm.weight",
            None,
            "of shape [64] is missing",
        ),
        ("eagle3", "lm_head.weight", None, "lm_head.weight of shape [40, 64] is missing"),
        ("eagle3", "d2t", None, "d2t of shape [40] is missing"),
        ("eagle3", "d2t", torch.full((40,), 57), "d2t maps to tokens outside the vocabulary"),
        ("eagle3", "d2t", torch.zeros(40), "d2t has type F32"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    targets: dict[str, tuple[Path, Setup]],
    tmp_path: Path,
    method: str,
    name: str,
    tensor: torch.Tensor | None,
    message: str,
) -> None:
    config = head_config(method)
    tensors = head_tensors(method, config)
    tensors.pop(name, None)
    if tensor is not None:
        tensors[name] = tensor
    assert message in refusal(targets, method, save_head(tmp_path, config, tensors))


def test_a_head_of_the_other_kind_is_refused(
    targets: dict[str, tuple[Path, Setup]],
    new_head: Callable[..., tuple[Path, dict[str, Any]]],
) -> None:
    assert "its method is eagle3" in refusal(targets, "eagle", new_head("eagle3")[0])
    assert "its method is eagle" in refusal(targets, "eagle3", new_head("eagle")[0])


def refusal(targets: dict[str, tuple[Path, Setup]], method: str, head: Path) -> str:
    """The error about a head, before a weight is read."""
    folder, _ = targets["llama"]
    prepared = prepare_checkpoint(folder, folder / "prepared")
    given = json.dumps({"method": method, "model": str(head)})
    config = ServeConfig(
        model=ModelConfig(model="llama"), speculation=SpeculationConfig(speculative_config=given)
    )
    with pytest.raises(ConfigError) as error:
        require_draft_model(config, prepared, prepare_head(head), create_device(config, 0))
    text = str(error.value)
    assert text.startswith(f"--speculative-config: model {head.name}: ")
    assert "\n" not in text
    return text


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_a_cached_prefix_has_the_kv_of_the_head(
    targets: dict[str, tuple[Path, Setup]],
    new_head: Callable[..., tuple[Path, dict[str, Any]]],
    method: str,
) -> None:
    """If the last block of the prefix is computed again; a copied block has it, too.

    tokens 0 to 8 are the same        0 1 2 3 | 4 5 6 7 | 8 …
    first                             block 1 | 2       | 3
    second, computes 4 and later      block 1 | 11      | 12
    third, the same                   a copy  | 21      | 22
    """
    folder, setup = targets["llama"]
    head, config = new_head(method)
    runner = LookaheadRunner(setup.runner())
    with_head(runner.runner, method, prepare_head(head))
    shared = [5, 9, 2, 40, 77, 13, 8, 61, 30]
    prompts = [[*shared, 1, 2, 3], [*shared, 50, 51, 52], [*shared, 90, 91, 92]]
    blocks = [[1, 2, 3, 4, 5], [1, 11, 12, 13, 14], [20, 21, 22, 23, 24]]
    for seq_id in range(3):
        num_computed = BLOCK if seq_id else 0
        new = NewRequestData(
            seq_id=seq_id,
            prompt_token_ids=prompts[seq_id],
            output_token_ids=[],
            sampling_params=SamplingParams(max_tokens=20, temperature=0.0),
            seed=0,
            choice=0,
            block_ids=[blocks[seq_id]],
            num_computed_tokens=num_computed,
            num_scheduled_tokens=len(prompts[seq_id]) - num_computed,
        )
        decoded = CachedRequestData([seq_id], [len(prompts[seq_id])], [1], [None])
        steps = ([new], CachedRequestData()), ([], decoded)
        for number, (new_requests, cached) in enumerate(steps):
            runner.execute(
                SchedulerOutput(
                    epoch=1,
                    step=2 * seq_id + number,
                    new_requests=new_requests,
                    cached_requests=cached,
                    total_num_scheduled_tokens=1,
                    finished_seq_ids=[],
                    preempted_seq_ids=[],
                    block_copies=[1, 20] if seq_id == 2 and new_requests else [],
                )
            )
    assert [seq_id for seq_id, *_ in runner.proposals] == [0, 1, 2]
    reference = HeadReference(folder, head, config)
    for _, known, proposed, acceptance_probs in runner.proposals:
        assert len(proposed) == LOOKAHEAD
        reference.check(known, proposed, acceptance_probs, 1e-3)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_a_worker_plans_loads_and_runs_a_head(
    targets: dict[str, tuple[Path, Setup]],
    new_head: Callable[..., tuple[Path, dict[str, Any]]],
    method: str,
) -> None:
    folder, _ = targets["llama"]
    prepared = prepare_checkpoint(folder, folder / "prepared")
    head, reference_config = new_head(method)
    draft = prepare_head(head)
    given = json.dumps({"method": method, "model": str(head)})
    config = ServeConfig(
        model=ModelConfig(model="llama", dtype="float32"),
        speculation=SpeculationConfig(speculative_config=given),
    )
    device = create_device(config, 0)
    plain = plan_memory(config, prepared, device)
    loaded = worker_load(config, prepared, device, RankGroup(), print, draft=draft)
    plan, own = loaded.plan, loaded.draft
    assert own is not None
    assert own.method == method
    assert plan.draft_weights == own.weight_format.memory
    assert len(own.fingerprint) == 32
    assert plan.block_bytes - plain.block_bytes == 16 * 2 * 2 * 24 * 4
    fault_injector = FaultInjector.of((), "worker", 0, 0)
    builder = RunnerBuilder(config, loaded, fault_injector, print, "")
    message = InitializeCache(PROTOCOL_VERSION, 1, NUM_BLOCKS, BLOCK, 128)
    runner = LookaheadRunner(CPU.model_runner(builder.parts(message)))
    setup = Setup(loaded.model, torch.float32, returns_experts=False)
    engine = setup.harness(enable_prefix_caching=False)
    engine.runner = runner  # type: ignore[assignment]
    engine.add_one(list(range(40, 70)), 12, temperature=0.0, ignore_eos=True)
    engine.run()
    reference = HeadReference(folder, head, reference_config)
    assert len(runner.proposals) > 2
    for _, known, proposed, acceptance_probs in runner.proposals:
        reference.check(known, proposed, acceptance_probs, 1e-3)
