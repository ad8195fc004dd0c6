"""Adapters on a GPU: their memory in the plan, and what is refused by name."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from proto.errors import ConfigError, ModelError
from proto.messages.prepared_model import PreparedModel
from proto.settings.config import (
    GIB,
    CacheConfig,
    DeviceConfig,
    LoRAConfig,
    ModelConfig,
    SchedulerConfig,
    ServeConfig,
)
from tests.fakes.adapters import SEVEN, Served, make_adapter
from tests.fakes.cuda_runner import Model
from tests.fakes.devices import REFERENCE
from tests.fakes.prepared_models import prepare_checkpoint
from tests.fakes.simulated_gpu import device_of
from tests.fakes.tiny_checkpoints import save_tiny
from tests.fakes.tiny_transformers import save_tiny_transformers
from tests.worker.sampling.test_device_edits import HostAccelerator
from worker.cuda import device as cuda_device
from worker.cuda.layers.adapter_slots import SlotAdapters
from worker.plan.memory_plan import plan_memory
from worker.plan.memory_refusal import refusal

Saved = Callable[[str], tuple[Any, PreparedModel]]
MAX_LORAS = 3


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """saved(name): a tiny model in transformers, and prepared."""

    @cache
    def save(name: str) -> tuple[Any, PreparedModel]:
        folder = tmp_path_factory.mktemp(name)
        if name == "deepseek3":  # with the sizes of the kernels of latents
            model = Model(name, folder)
            return model.own, model.prepared
        return save_tiny(name, folder), prepare_checkpoint(folder, folder / "prepared")

    return save


def in_slots(prepared: PreparedModel, dtype: torch.dtype, **limits: Any) -> Served:
    """Serve a model whose adapters have slots in host memory."""
    accelerator: Any = HostAccelerator()
    slots = SlotAdapters(lambda: accelerator)
    return Served(prepared, dtype, device=REFERENCE, step=slots, max_loras=MAX_LORAS, **limits)


def config_of(**lora: Any) -> ServeConfig:
    return ServeConfig(
        model=ModelConfig(dtype="bfloat16"),
        device=DeviceConfig(device="cuda"),
        cache=CacheConfig(kv_cache_memory=1 << 24),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
        lora=LoRAConfig(enable_lora=True, **{"max_loras": MAX_LORAS} | lora),
    )


@pytest.mark.parametrize(
    ("name", "modules"),
    [("llama", ()), ("llama", ("q_proj", "down_proj")), ("qwen2moe", ()), ("deepseek3", ())],
)
def test_slots_take_the_memory_that_the_plan_says(
    name: str, modules: tuple[str, ...], saved: Saved
) -> None:
    """Without experts and single heads; each slot is rounded up."""
    _, prepared = saved(name)
    config = config_of(max_lora_rank=20, lora_target_modules=modules, max_cpu_loras=9)
    planned = plan_memory(config, prepared, device_of(70 * GIB)).work["3 adapters"]
    slots = in_slots(prepared, torch.bfloat16, max_rank=20, modules=modules).targets.step
    assert isinstance(slots, SlotAdapters)
    assert 10_000 < planned <= slots.num_bytes <= planned + MAX_LORAS * 1024


def test_an_adapter_takes_what_its_ranks_need(saved: Saved, tmp_path: Path) -> None:
    """The largest one, with DoRA on all products, fills a slot."""
    own, prepared = saved("llama-biases")
    served = in_slots(prepared, torch.bfloat16, max_rank=32)
    settings: list[dict[str, Any]] = [{"r": 32, "use_dora": True}, {"r": 3}, {"r": 17}]
    sizes = [
        served.load(make_adapter(own, tmp_path / str(number), **each)).num_bytes
        for number, each in enumerate(settings)
    ]
    slots = served.targets.step
    assert isinstance(slots, SlotAdapters)
    size = slots.num_bytes // MAX_LORAS
    assert size - 512 <= sizes[0] <= size
    assert sizes[1] < 0.6 * sizes[2] < 0.6 * sizes[0]


def test_slots_that_do_not_fit_are_refused_with_flags(saved: Saved) -> None:
    _, prepared = saved("llama")
    roomy = plan_memory(config_of(max_lora_rank=512), prepared, device_of(70 * GIB))
    gpu = device_of(roomy.weights.total() + roomy.work.total() + roomy.pool_bytes - (1 << 20))
    tight = plan_memory(config_of(max_lora_rank=512), prepared, gpu)
    assert roomy.fits
    assert not tight.fits
    message = str(refusal(tight, config_of(max_lora_rank=512), prepared, gpu))
    assert "3 adapters" in message
    assert "--max-lora-rank 32" in message
    assert "--max-loras 2" in message


def test_adapters_that_the_host_cannot_hold_are_refused(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_device, "available_memory", lambda: 1 << 20)
    with pytest.raises(ConfigError, match=r"--max-cpu-loras 12: .* host's memory") as raised:
        plan_memory(config_of(), saved("llama")[1], device_of(70 * GIB))
    assert raised.value.param == "max_cpu_loras"


def test_modules_that_no_adapter_changes_on_a_gpu_are_refused(saved: Saved, tmp_path: Path) -> None:
    config = config_of(lora_target_modules=("q_proj", "lm_head"))
    with pytest.raises(ConfigError, match=r"--lora-target-modules lm_head: .* GPU") as raised:
        plan_memory(config, saved("llama")[1], device_of(70 * GIB))
    assert raised.value.param == "lora_target_modules"
    save_tiny_transformers("stablelm", tmp_path)
    other = prepare_checkpoint(tmp_path, tmp_path / "prepared")
    with pytest.raises(ConfigError, match=r"--enable-lora: .* transformers' code") as raised:
        plan_memory(config_of(), other, device_of(70 * GIB))
    assert raised.value.param == "enable_lora"


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("llama", {"modules_to_save": ["lm_head"]}, "neither embedding nor head"),
        ("llama", {"target_modules": ["embed_tokens"]}, "neither embedding nor head"),
        ("llama", {"trainable_token_indices": [3]}, "neither embedding nor head"),
        (
            "qwen2moe",
            {"target_modules": ["o_proj"], "target_parameters": ["mlp.experts.down_proj"]},
            "neither experts nor kv_b_proj",
        ),
        ("deepseek3", {"target_modules": ["kv_b_proj"]}, "neither experts nor kv_b_proj"),
    ],
)
def test_parts_that_no_adapter_changes_on_a_gpu_are_refused(
    name: str, settings: dict[str, Any], message: str, saved: Saved, tmp_path: Path
) -> None:
    own, prepared = saved(name)
    path = make_adapter(own, tmp_path, **{"target_modules": SEVEN[:1]} | settings)
    with pytest.raises(ModelError, match=rf"tensor base_model.* on a GPU adapters .*{message}"):
        in_slots(prepared, torch.float32).load(path)
