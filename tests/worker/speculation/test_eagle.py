"""Drafts of heads of EAGLE: they are those of the published arithmetic, after any history.

An engine runs requests while drafts of another kind are accepted and rejected, prompts are cut into
chunks, requests are preempted and blocks change hands; every step asks the head for a proposal. The
reference computes each proposal from the tokens alone: the target in transformers, the head here.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.fakes.engine_harness import EngineHarness
from tests.fakes.lookahead_runner import LookaheadRunner
from tests.fakes.prepared_models import prepare_checkpoint, spec_of
from tests.fakes.tiny_checkpoints import save_tiny
from tests.fakes.tiny_heads import head_config, head_tensors, prepare_head, save_head
from tests.worker.test_speculation import (
    BLOCK,
    STEP_TOKENS,
    VOCAB_SIZE,
    Setup,
)
from worker.attention.registry import create_backend
from worker.kv_cache import KVCache
from worker.loader.formats import DenseFormat
from worker.loader.weights import load_model
from worker.model_runner import ModelRunner
from worker.sampling.sampler import create_sampler
from worker.speculation.eagle import EagleDrafter
from worker.speculation.eagle_head import load_head, read_head

CPU = torch.device("cpu")
TARGETS = ("llama", "gemma3", "qwen2")


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

    @torch.inference_mode()
    def check(
        self, known: list[int], draft: list[int], survivals: list[float], tolerance: float
    ) -> None:
        """Compare a greedy draft after known tokens."""
        states = self._target(torch.tensor([known[:-1]]), output_hidden_states=True).hidden_states
        features = states[-1][0]
        if self._is_third:
            joined = torch.cat([states[layer][0] for layer in self._residuals], dim=1)
            features = F.linear(joined, self._tensors["fc.weight"])
        tokens, survival = list(known[1:]), 1.0
        for token, found in zip(draft, survivals, strict=True):
            state = self._forward(torch.tensor(tokens), features)[-1:]
            logits = self._logits(state)[0].double()
            assert logits[token] > logits.max() - tolerance
            survival *= float(logits.softmax(0)[token])
            assert found == pytest.approx(survival, rel=5 * tolerance)
            tokens.append(token)
            features = torch.cat((features, state))

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


def with_head(runner: ModelRunner, method: str, folder: Path) -> EagleDrafter:
    """Give a runner a head, whole."""
    target, prepared = runner._model, prepare_head(folder)
    spec = read_head(method, prepared, target.spec)
    head = load_head(prepared, spec, target, torch.float32, CPU, DenseFormat(torch.float32))
    head.record_residuals(STEP_TOKENS)
    layout, geometry = spec.cache(torch.float32)
    cache = KVCache(geometry, layout, runner.kv_cache.num_blocks, BLOCK, CPU)
    drafter = EagleDrafter(
        method,
        head,
        create_backend("cpu", cache, spec.attention_shape),
        cache,
        create_sampler(),
        runner.batch,
        group=runner.kv_cache.layout.windows.index(None),
        max_model_len=spec.longest,
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
        prepared = prepare_checkpoint(folder, folder / "prepared")
        dtype = torch.float32
        decoder = load_model(
            prepared, spec_of(prepared), dtype, CPU, lambda _: None, DenseFormat(dtype)
        )
        made[name] = folder, Setup(decoder, dtype, returns_experts=False)
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
    """Answers of greedy requests that share prefixes, some with two choices, while others run."""
    generator = torch.Generator().manual_seed(5)
    shared = torch.randint(0, VOCAB_SIZE, (14,), generator=generator).tolist()
    requests = []
    for index in range(10):
        own = torch.randint(0, VOCAB_SIZE, (1 + 9 * (index % 4),), generator=generator).tolist()
        prompt = shared[: (14, 0, 8)[index % 3]] + own
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
    engine = setup.harness(is_full=is_full, drafting=setup.drafts(0.6), enable_prefix_caching=False)
    runner = LookaheadRunner(engine.runner)  # type: ignore[arg-type]
    head, config = new_head(method, **changes)
    with_head(runner.runner, method, head)
    engine.runner = runner  # type: ignore[assignment]
    assert serve_greedy(engine) == answers
    assert runner.num_resumed > 0 or not is_full
    residuals = (2, 1, 2) if "eagle_config" in changes else (2, 1, 0)
    reference = HeadReference(folder, head, config, residuals)
    for _, known, proposed, survivals in runner.proposals:
        reference.check(known, proposed, survivals, 1e-3)
    lengths = Counter(len(proposed) for _, _, proposed, _ in runner.proposals)
    assert min(lengths[1], lengths[2], lengths[3]) > 10
