"""Models with recurrent states through scheduler and runner: bits, hits, choices and refusals.

test_families.py compares the tokens of the same models with transformers.
"""

import copy
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine_core.request import Request
from proto.errors import ConfigError, ModelError
from proto.messages.prepared_model import PreparedModel
from proto.settings.config import (
    GIB,
    CacheConfig,
    ModelConfig,
    ServeConfig,
    SpeculationConfig,
)
from tests.fakes.beam_reference import beam_search
from tests.fakes.dense_attention import DenseAttention
from tests.fakes.devices import CPU
from tests.fakes.engine_harness import EngineHarness
from tests.fakes.gguf_models import packed
from tests.fakes.prepared_models import prepare_checkpoint, spec_of
from tests.fakes.quantised_checkpoints import SCHEMES, quantise_folder
from tests.fakes.real_engine import BLOCK, engine_for, runner_of
from tests.fakes.real_engine import load as load_exact
from tests.fakes.simulated_gpu import device_of
from tests.fakes.tiny_checkpoints import CONFIGS, architecture_of, save_tiny, tiny_model
from worker.cpu.device import CpuDevice
from worker.cpu.kernels import Kernels
from worker.loaded_model import load
from worker.loader.weights import load_model
from worker.models.decoder import Decoder
from worker.models.registry import spec_from_config
from worker.models.sharding import shard_model
from worker.parallel.group import RankGroup
from worker.plan.memory_plan import MemoryPlan, plan_memory

DELTA_RULES = ("qwen35", "qwen3next")
NAMES = (
    *DELTA_RULES,
    "bamba",
    "falconh1",
    "granitehybrid",
    "lfm2",
    "lfm2moe",
    "mamba2",
    "nemotronh",
)
_DELTA_RULE = 4 * 16 * 32 + 3 * (2 * 2 * 16 + 4 * 16)
_MAMBA = 8 * 16 * 32 + 3 * (128 + 2 * 2 * 16)
_MAMBA_OF_ONE_GROUP = 8 * 16 * 32 + 3 * (128 + 2 * 16)
SLOT_BYTES = {
    "Qwen3_5ForCausalLM": 4 * 3 * _DELTA_RULE,
    "Qwen3NextForCausalLM": 4 * 3 * _DELTA_RULE,
    "BambaForCausalLM": 4 * 3 * _MAMBA,
    "FalconH1ForCausalLM": 4 * 5 * _MAMBA_OF_ONE_GROUP,
    "GraniteMoeHybridForCausalLM": 4 * 3 * _MAMBA_OF_ONE_GROUP,
    "Lfm2ForCausalLM": 4 * 2 * 2 * 64,
    "Lfm2MoeForCausalLM": 4 * 2 * 2 * 64,
    "Mamba2ForCausalLM": 4 * 3 * _MAMBA,
    "NemotronHForCausalLM": 4 * 3 * _MAMBA,
}
"""Matrices of whole tiles of 32 columns, and windows of the inputs of the convolutions."""
NUM_OUTPUTS = 9
NUM_SLOTS = 31
PROMPTS = [
    torch.randint(3, 96, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (29, 40, 3, 1, 33)
]


@pytest.fixture(scope="module", params=NAMES)
def prepared(request: pytest.FixtureRequest, tmp_path_factory: Any) -> PreparedModel:
    folder = tmp_path_factory.mktemp("model")
    save_tiny(request.param, folder)
    return prepare_checkpoint(folder, folder / "prepared")


@pytest.fixture(scope="module")
def decoder(prepared: PreparedModel) -> Decoder:
    """The model with products whose bits do not depend on the number of rows."""
    config = ServeConfig(model=ModelConfig(cpu_weights="bf16"))
    device = CpuDevice(config.device)
    return load(config, prepared, device, RankGroup(), lambda message: None).model


def engine_of(decoder: Decoder, num_blocks: int = 60, **settings: object) -> EngineHarness:
    harness, num_blocks = engine_for(decoder, num_blocks, NUM_SLOTS, **settings)
    harness.runner = runner_of(decoder, num_blocks, NUM_SLOTS)
    return harness


def add(harness: EngineHarness, prompt: list[int], **options: Any) -> list[Request]:
    return harness.add(prompt, NUM_OUTPUTS, temperature=0.0, logprobs=4, ignore_eos=True, **options)


def bits_of(harness: EngineHarness, request: Request) -> list[bytes]:
    """Return the log-probabilities of all outputs, each of which depends on all logits."""
    outputs = harness.outputs[request.request_id, request.choice]
    found = [each.logprobs.logprobs for each in outputs if each.logprobs is not None]
    assert len(found) == NUM_OUTPUTS
    return found


def alone(decoder: Decoder) -> list[list[bytes]]:
    """Return the bits of each prompt by itself, computed in one step."""
    found = []
    for prompt in PROMPTS:
        harness = engine_of(decoder, max_num_batched_tokens=64)
        (row,) = add(harness, prompt)
        harness.run()
        found.append(bits_of(harness, row))
    return found


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("budget", [64, 16, 7])
def test_an_answer_has_the_same_bits_alone_with_others_and_in_chunks(
    budget: int, is_async: bool, decoder: Decoder
) -> None:
    harness = engine_of(decoder, max_num_batched_tokens=budget, async_scheduling=is_async)
    rows = [row for prompt in PROMPTS for row in add(harness, prompt)]
    harness.run()
    expected = alone(decoder)
    assert [bits_of(harness, row) for row in rows] == expected
    # The same prompts again, from states in the cache, in another order.
    order = list(range(len(PROMPTS)))
    random.Random(budget).shuffle(order)
    again = {index: add(harness, PROMPTS[index])[0] for index in order}
    harness.run()
    assert [bits_of(harness, again[index]) for index in range(len(PROMPTS))] == expected
    assert sum(row.num_cached_tokens for row in again.values()) > 28


def test_a_next_turn_goes_on_from_the_state_behind_the_answer(decoder: Decoder) -> None:
    harness = engine_of(decoder)
    (first,) = add(harness, PROMPTS[0])
    harness.run()
    turn = [*PROMPTS[0], *harness.tokens_of(first), 5, 6, 7]
    (second,) = add(harness, turn)
    harness.run()
    assert second.num_cached_tokens == (len(PROMPTS[0]) + NUM_OUTPUTS - 1) // BLOCK * BLOCK
    fresh = engine_of(decoder)
    (third,) = add(fresh, turn)
    fresh.run()
    assert bits_of(harness, second) == bits_of(fresh, third)


def test_choices_have_states_of_their_own(decoder: Decoder) -> None:
    """Choices that draw other tokens, and preemptions in between, against each one alone."""
    options: dict[str, Any] = {"ignore_eos": True, "temperature": 1.0, "seed": 3}
    harness = engine_of(decoder, num_blocks=25, max_num_batched_tokens=16)
    rows = harness.add(PROMPTS[1], 20, n=3, **options)
    harness.run()
    roomy = engine_of(decoder, num_blocks=100)
    expected = roomy.add(PROMPTS[1], 20, n=3, **options)
    roomy.run()
    tokens = [harness.tokens_of(row) for row in rows]
    assert tokens == [roomy.tokens_of(row) for row in expected]
    assert len({tuple(each) for each in tokens}) == 3
    assert sum(row.num_preemptions for row in rows) > 0


@pytest.mark.parametrize("name", NAMES)
def test_beams_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Each row goes on from a copy of its parent's state; float32, log-probabilities of each."""
    reference = save_tiny(name, tmp_path)

    @torch.inference_mode()
    def logprobs(token_ids: list[int]) -> Any:
        logits = reference(torch.tensor([token_ids])).logits[0, -1]
        return logits.float().log_softmax(-1).numpy()

    exact = load_exact(prepare_checkpoint(tmp_path, tmp_path / "prepared"))
    harness = engine_of(exact, max_num_batched_tokens=16)
    rows = harness.add(PROMPTS[0], 9, n=3, beam_width=3, ignore_eos=True)
    harness.run()
    expected = beam_search(PROMPTS[0], logprobs, width=3, max_tokens=9, stop_ids=())
    assert [harness.tokens_of(row) for row in rows] == expected
    assert harness.scheduler.pop_stats().num_scheduled_tokens == len(PROMPTS[0]) + 3 * 8


@pytest.mark.parametrize("name", ["bamba", "falconh1", "qwen35"])
def test_int8_kv_goes_with_states_cold_and_warm(name: str, tmp_path: Path) -> None:
    """Near the log-probabilities of float32 KV, and the same tokens from cached states."""
    save_tiny(name, tmp_path)
    exact = load_exact(prepare_checkpoint(tmp_path, tmp_path / "prepared"))
    found = {}
    for dtype in (torch.float32, torch.int8):
        harness, num_blocks = engine_for(exact, 60, NUM_SLOTS, max_num_batched_tokens=16)
        harness.runner = runner_of(exact, num_blocks, NUM_SLOTS, dtype)
        (row,) = add(harness, PROMPTS[1])
        harness.run()
        (again,) = add(harness, PROMPTS[1])
        harness.run()
        assert again.num_cached_tokens > 0
        assert harness.tokens_of(again) == harness.tokens_of(row)
        found[dtype] = bits_of(harness, row)[0]
    of_float, of_int8 = (np.frombuffer(bits, "<f4") for bits in found.values())
    assert of_int8 == pytest.approx(of_float, abs=0.05)
    assert found[torch.int8] != found[torch.float32]


def plan(prepared: PreparedModel, device: Any = None, **cache: Any) -> MemoryPlan:
    config = ServeConfig(cache=CacheConfig(**cache))
    return plan_memory(config, prepared, device or CpuDevice(config.device))


def test_the_plan_counts_a_slot_for_each_state(prepared: PreparedModel, decoder: Decoder) -> None:
    shape = decoder.spec.state_shape()
    assert shape is not None
    assert shape.slot_bytes == SLOT_BYTES[prepared.architecture]
    logged = decoder.spec.state_shape(16)
    assert logged is not None
    found = plan(prepared, num_state_slots=100)
    assert (found.num_state_slots, found.state_bytes) == (101, logged.slot_bytes)
    assert found.states_bytes == 101 * logged.slot_bytes
    floats = sum(mixer.logged_floats for mixer in decoder.spec.state_layers)
    assert logged.slot_bytes == shape.slot_bytes + 4 * (16 * floats + 1)
    undrafted = ServeConfig(speculation=SpeculationConfig(speculative_config='{"method": "none"}'))
    without = plan_memory(undrafted, prepared, CpuDevice(undrafted.device))
    assert without.state_bytes == shape.slot_bytes
    assert any(line.split()[0] == "states" for line in found.table())
    usual = plan(prepared)
    assert usual.num_state_slots == 1 + 4 * ServeConfig().scheduler.max_num_seqs
    assert plan(prepared, enable_prefix_caching=False).num_state_slots == 513
    tight = plan(prepared, num_state_slots=1 << 40)
    assert not tight.fits
    assert usual.num_groups == 1, "blocks of the KV pool are those of attention"
    on_gpu = plan(prepared, device_of(free=60 * GIB), num_state_slots=100)
    assert (on_gpu.num_state_slots, on_gpu.state_bytes) == (101, logged.slot_bytes)
    assert on_gpu.fits
    assert not plan(prepared, device_of(free=60 * GIB), num_state_slots=1 << 40).fits


def test_slots_for_a_model_without_states_are_refused_by_name(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    other = prepare_checkpoint(tmp_path, tmp_path / "prepared")
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no layers with a recurrent state"):
        plan(other, num_state_slots=8)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layer_types": ["mamba"] * 5}, "layer_types = 'mamba'.*linear_attention, full_attention"),
        ({"layer_types": ["conv"] * 5}, "layer_types = 'conv'"),
        ({"layer_types": ["linear_attention"] * 5}, "one full_attention at least"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads = 3: must be a multiple"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim = 0"),
        ({"linear_conv_kernel_dim": 65}, "at most 64"),
        ({"linear_key_head_dim": "16"}, "linear_key_head_dim = '16'"),
        ({"attn_output_gate": False}, "attn_output_gate = False"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_a_configuration_that_is_not_supported_is_refused_by_name(
    changes: dict[str, Any], named: str
) -> None:
    config = copy.deepcopy(CONFIGS["qwen35"]).to_dict() | {"architectures": ["Qwen3_5ForCausalLM"]}
    spec_from_config(config)
    with pytest.raises(ModelError, match=named):
        spec_from_config(config | changes)


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("granitehybrid", {"mamba_n_heads": 7}, "mamba_n_heads = 7: must divide 128 channels"),
        ("granitehybrid", {"mamba_n_groups": 3}, "mamba_n_groups = 3: must divide mamba_n_heads"),
        ("granitehybrid", {"mamba_d_head": 8}, "mamba_d_head = 8: 8 heads of 128 channels have 16"),
        ("granitehybrid", {"mamba_d_state": 0}, "mamba_d_state = 0"),
        ("granitehybrid", {"mamba_chunk_size": 0}, "mamba_chunk_size = 0"),
        ("granitehybrid", {"mamba_d_conv": 65}, "mamba_d_conv = 65: at most 64"),
        ("granitehybrid", {"time_step_limit": [0.1, 1.0]}, "time_step_limit"),
        ("granitehybrid", {"layer_types": ["mamba"] * 5}, "one full_attention at least"),
        ("granitehybrid", {"layer_types": ["conv"] * 5}, "layer_types = 'conv'"),
        ("granitehybrid", {"position_embedding_type": "alibi"}, "position_embedding_type"),
        ("bamba", {"attn_layer_indices": []}, "attn_layer_indices"),
        ("bamba", {"attn_rotary_emb": 16}, "attn_rotary_emb = 16"),
        ("falconh1", {"ssm_multipliers": [1.0] * 4}, "ssm_multipliers.*5 numbers"),
        ("lfm2", {"conv_L_cache": 1}, "conv_L_cache = 1: a whole number of at least 2"),
        ("lfm2", {"layer_types": ["conv"] * 4}, "one full_attention at least"),
        ("nemotronh", {"layers_block_type": ["mamba", "conv"]}, "layers_block_type = 'conv'"),
        ("nemotronh", {"mlp_hidden_act": "silu"}, "mlp_hidden_act = 'silu'"),
        ("mamba2", {"n_groups": 5}, "n_groups = 5: must divide num_heads = 8"),
        ("mamba2", {"num_heads": 6}, "num_heads = 6: must divide 128 channels"),
    ],
)
def test_sizes_of_recurrent_layers_that_do_not_fit_are_refused_by_name(
    name: str, changes: dict[str, Any], named: str
) -> None:
    config = json.loads(CONFIGS[name].to_json_string(use_diff=False))
    config["architectures"] = [architecture_of(CONFIGS[name])]
    spec_from_config(config)
    with pytest.raises(ModelError, match=named):
        spec_from_config(config | changes)


def test_ranks_share_groups_of_heads_or_the_heads_of_the_only_group() -> None:
    def mixers(name: str, size: int) -> list[Any]:
        config = json.loads(CONFIGS[name].to_json_string(use_diff=False))
        spec = spec_from_config(config | {"architectures": [architecture_of(CONFIGS[name])]})
        return [shard.spec.state_layers[0] for shard in shard_model(spec, size)]

    of_groups = [each.shape for each in mixers("bamba", 2)]
    assert [(each.num_groups, each.num_heads) for each in of_groups] == [(1, 4), (1, 4)]
    assert not any(each.has_wide_output for each in of_groups)
    with pytest.raises(ConfigError, match="at most 2 workers"):
        mixers("bamba", 3)
    of_heads = mixers("granitehybrid", 3)
    assert [each.shape.num_heads for each in of_heads] == [3, 3, 2]
    assert all(each.shape.has_wide_output and each.total_inner == 128 for each in of_heads)
    assert not any(each.total_inner for each in mixers("granitehybrid", 1))


@pytest.mark.parametrize("is_tiled", [False, True])
def test_ranks_have_the_value_heads_that_read_their_key_heads(is_tiled: bool) -> None:
    num_keys, num_values = 5, 15
    config = CONFIGS["qwen35"].to_dict() | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "linear_num_key_heads": num_keys,
        "linear_num_value_heads": num_values,
        "of_llama_cpp": is_tiled,
    }
    numbers = torch.arange(num_values)
    key_of = numbers % num_keys if is_tiled else numbers // 3
    for size in (1, 2, 3, 4):
        held: list[int] = []
        for shard in shard_model(spec_from_config(config), size):
            weights, shape = shard.weights, shard.spec.state_layers[0].shape
            heads = weights["layers.0.decay"].rows_of(numbers)
            columns = numbers.repeat_interleave(shape.value_size)[None]
            own_columns = weights["layers.0.out.weight"].columns_of(columns)[0]
            assert own_columns.equal(heads.repeat_interleave(shape.value_size))
            own = torch.arange(shape.num_value_heads)
            own_key = own % shape.num_key_heads if is_tiled else own // 3
            first_key = weights["layers.0.taps_k"].rows.start // shape.key_size
            assert key_of[heads].equal(first_key + own_key)
            held += heads.tolist()
        assert sorted(held) == numbers.tolist()


@pytest.mark.parametrize("scheme", ["awq 128", "gptq desc_act", "fp8 blocks", "nf4"])
@pytest.mark.parametrize("name", DELTA_RULES)
def test_projections_of_states_are_quantised_like_others(
    name: str, scheme: str, kernels: Kernels, tmp_path: Path
) -> None:
    """In float32 with the numbers of the folder, and in its blocks, against transformers.

    Blocks are multiplied with activations of 8 bits, which changes logits of random weights a lot,
    but not as much as rows in another order would.
    """
    sizes: dict[str, Any] = {
        "hidden_size": 256,
        "head_dim": 64,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    }
    config = type(CONFIGS[name])(**CONFIGS[name].to_dict() | sizes)
    model = tiny_model(config)
    model.save_pretrained(tmp_path)
    kinds = ("_proj.weight", "in_proj_qkv.weight", "in_proj_z.weight", "in_proj_qkvz.weight")
    numbers = quantise_folder(
        tmp_path,
        SCHEMES[scheme],
        is_quantised=lambda each: "_attn." in each and each.endswith(kinds),
    )
    of_mixers = {each: number for each, number in numbers.items() if "_attn." in each}
    model.load_state_dict(of_mixers, strict=False)
    tokens = torch.tensor(PROMPTS[0])
    with torch.no_grad():
        expected = model(tokens[None]).logits[0]
    quantised = prepare_checkpoint(tmp_path, tmp_path / "prepared")
    spec, cpu = spec_of(quantised), CPU
    for form, most in ((None, 1e-4), (packed(kernels), 0.3)):
        decoder = load_model(quantised, spec, torch.float32, cpu, lambda fraction: None, form)
        attention = DenseAttention(spec)
        attention.begin_chunk(len(tokens))
        found = decoder.float32_logits(
            decoder.forward(tokens, torch.arange(len(tokens)), attention)
        )
        assert (found - expected).norm() < most * expected.norm()
    assert form is not None
    assert not any("in_q" in each or "out" in each for each in form.dense_names)
