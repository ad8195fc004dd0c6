"""Experts stored by KV slot, and the settings and models for which they are refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from api_server.generation.request_stream import ExpertRows
from proto.errors import ConfigError, InternalRequestError
from proto.messages.engine_io import RoutedExperts
from proto.settings.config import CacheConfig, ModelConfig, ServeConfig
from proto.settings.config_checks import validate
from tests.fakes.dense_attention import DenseAttention
from tests.fakes.devices import CPU
from tests.fakes.prepared_models import prepare_checkpoint, spec_of
from tests.fakes.tiny_checkpoints import CONFIGS, MIXTURES, save_tiny
from tests.fakes.tiny_ggufs import config_of
from worker.attention.kv_cache import KVCache, kv_cache_geometry, kv_layout
from worker.loader.weights import load_model
from worker.models.moe import MoeSpec
from worker.models.registry import spec_from_config
from worker.models.spec import ModelSpec
from worker.step.routed_experts import (
    ExpertSpan,
    RoutedExpertsCache,
    expert_rows,
    record_experts,
    require_routed_experts,
)


def spec_named(name: str) -> ModelSpec:
    return spec_from_config(config_of(CONFIGS[name]))


def with_experts(spec: ModelSpec, number: int) -> ModelSpec:
    layers = tuple(
        replace(layer, mlp=replace(layer.mlp, router=replace(layer.mlp.router, num_experts=number)))
        if isinstance(layer.mlp, MoeSpec)
        else layer
        for layer in spec.layers
    )
    return replace(spec, layers=layers)


@pytest.mark.parametrize(("num_experts", "num_bytes"), [(256, 1), (257, 2)])
def test_slots_hold_the_experts_of_tokens_and_are_copied_with_blocks(
    num_experts: int, num_bytes: int
) -> None:
    spec = with_experts(spec_named("qwen2moe"), num_experts)
    layout = kv_layout(spec.windows)
    cache = KVCache(kv_cache_geometry(layout, 1, 8, torch.float32), layout, 5, 4)
    num_mixtures = sum(isinstance(layer.mlp, MoeSpec) for layer in spec.layers)
    record = torch.randint(0, num_experts, (num_mixtures, 9, 2)).int()
    record[0, 1, 0] = num_experts - 1
    experts = RoutedExpertsCache(spec, cache, record)
    slots = torch.tensor([4, 7, 15])
    experts.store(slots)
    expected = record[:, :3].transpose(0, 1)
    assert torch.equal(experts.read(slots).int(), expected)
    experts.copy_blocks(torch.tensor([1]), torch.tensor([4]))
    assert torch.equal(experts.read(torch.tensor([16, 19, 15])).int(), expected)
    spans = ExpertSpan(70, 6, 2), ExpertSpan(71, 0, 1)
    found = expert_rows(spans, experts.read(slots).numpy(), {})
    size = num_mixtures * 2 * num_bytes
    assert [
        (row.seq_id, row.experts.first_position, row.experts.num_bytes, len(row.experts.data))
        for row in found
    ] == [(70, 6, num_bytes, 2 * size), (71, 0, num_bytes, size)]


@pytest.mark.parametrize("name", MIXTURES)
def test_the_experts_of_every_router_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """By softmax or sigmoid, with groups and a bias for balance or without."""
    model = save_tiny(name, tmp_path)
    chosen = []
    for module in model.modules():
        if type(module).__name__.endswith("Experts"):
            module.register_forward_pre_hook(
                lambda module, arguments: chosen.append(arguments[1].sort(1).values)
            )
    tokens = torch.randint(0, 96, (40,), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        model(tokens[None])
    prepared = prepare_checkpoint(tmp_path, tmp_path / "prepared")
    cpu = CPU
    decoder = load_model(prepared, spec_of(prepared), torch.float32, cpu, lambda fraction: None)
    record = record_experts(decoder, 40, cpu.torch_device)
    attention = DenseAttention(decoder.spec)
    attention.begin_chunk(len(tokens))
    decoder.forward(tokens, torch.arange(40), attention)
    found = record.long().sort(2).values
    assert len(found) == len(chosen)
    assert torch.equal(found, torch.stack(chosen))
    assert len(found.unique()) > found.shape[2], "the router chooses the same for all tokens"


def test_rows_are_replaced_by_position_and_none_may_be_lost() -> None:
    rows = ExpertRows()
    rows.store(RoutedExperts(0, 1, 2, 1, bytes([1, 2, 3, 4, 5, 6])))
    rows.store(RoutedExperts(3, 1, 2, 1, bytes([7, 8])))
    rows.store(RoutedExperts(1, 1, 2, 1, bytes([9, 9])))
    assert bytes(rows.data) == bytes([1, 2, 9, 9, 5, 6, 7, 8])
    assert rows.encode(3) == {"dtype": "uint8", "shape": [3, 1, 2], "data": "AQIJCQUG"}
    assert rows.encode(9)["shape"] == [4, 1, 2]
    assert ExpertRows().encode(9)["shape"] == [0, 0, 0]
    with pytest.raises(InternalRequestError, match="lost"):
        rows.store(RoutedExperts(5, 1, 2, 1, bytes([7, 8])))


def test_models_without_experts_to_return_are_refused() -> None:
    require_routed_experts(spec_named("mixtral"))
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no experts"):
        require_routed_experts(spec_named("llama"))
    spec = spec_named("mixtral")
    layers = (replace(layer, mixer=replace(layer.mixer, window=8)) for layer in spec.layers)  # type: ignore[type-var]
    with pytest.raises(ConfigError, match="sliding window"):
        require_routed_experts(replace(spec, layers=tuple(layers)))


def test_kv_of_a_connector_has_no_experts() -> None:
    config = ServeConfig(
        model=ModelConfig(enable_return_routed_experts=True),
        cache=CacheConfig(
            kv_transfer_config='{"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}'
        ),
    )
    with pytest.raises(ConfigError, match="--enable-return-routed-experts does not go with"):
        validate(config)
