"""Adapters on models that run on transformers' code: logits are those of merged weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

from proto.errors import ModelError
from proto.messages.prepared_model import PreparedModel
from proto.settings.config import LoRAConfig, ModelConfig, ServeConfig
from tests.fakes.adapters import Served, make_adapter, merged
from tests.fakes.devices import CPU
from tests.fakes.prepared_models import prepare_checkpoint
from tests.fakes.tiny_transformers import save_tiny_transformers
from tests.worker.adapters.test_steps import TIE, prompts, serve
from worker.loader.formats import DenseFormat
from worker.plan.memory_plan import plan_memory

ON_TRANSFORMERS = ServeConfig(model=ModelConfig(model_impl="transformers"))
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def tiny(model_type: str, folder: Path) -> tuple[PreparedModel, Any]:
    own = save_tiny_transformers(model_type, folder)
    return prepare_checkpoint(folder, folder / "prepared"), own


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("gpt_oss", {"target_modules": "all-linear"}),
        ("gemma2", {"target_modules": "all-linear", "use_rslora": True}),
        ("gemma4_text", {"target_modules": "all-linear"}),
        ("minicpm3", {"target_modules": "all-linear", "rank_pattern": {"o_proj": 7}}),
        ("stablelm", {"target_modules": ATTENTION}),
        ("phi", {"target_modules": "all-linear", "lora_bias": True}),
    ],
)
def test_greedy_tokens_are_those_of_merged_weights(
    model_type: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Of two adapters beside a request without one; prompts are computed in chunks."""
    prepared, own = tiny(model_type, tmp_path)
    paths = [
        make_adapter(own, tmp_path / f"a{number}", number, r=3 + number, **settings)
        for number in (1, 2)
    ]
    served = Served(prepared, config=ON_TRANSFORMERS)
    assert served.decoder.implementation.startswith("transformers ")
    for number, path in enumerate(paths, 1):
        served.load(path, number)
    requests = prompts((1, 0, 2, 1))
    found, _ = serve(served, requests, max_num_batched_tokens=16)
    models = [own, *(merged(own, path) for path in paths)]
    changed = 0
    for (prompt, number), tokens in zip(requests, found, strict=True):
        with torch.no_grad():
            alone, plain = (
                model(torch.tensor([prompt + tokens]), use_cache=False).logits[0, len(prompt) - 1 :]
                for model in (models[number], own)
            )
        chosen = alone[:-1].gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (alone[:-1].max(1).values - chosen).max() < TIE
        changed += number > 0 and bool((alone - plain).abs().max() > 0.3)
    assert changed == 3, "a difference would not be visible"


def test_a_router_in_float32_beside_bfloat16(tmp_path: Path) -> None:
    """The router keeps its dtype and is no product, so an adapter of it is refused by name."""
    prepared, own = tiny("hunyuan_v1_moe", tmp_path)
    served = Served(prepared, torch.bfloat16, DenseFormat(torch.bfloat16), config=ON_TRANSFORMERS)
    path = make_adapter(own, tmp_path / "router", target_modules=["q_proj", "wg"])
    with pytest.raises(ModelError, match=r"wg\.lora_A\.weight is of no weight of HunYuan"):
        served.load(path)
    path = make_adapter(own, tmp_path / "attention", target_modules=ATTENTION)
    assert len(served.load(path).products) == 4 * own.config.num_hidden_layers


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "use_dora: the weights of a model on transformers' code"),
        ({"modules_to_save": ["embed_tokens"]}, "embed_tokens.*embedding and head of a model on"),
        ({"target_modules": ["embed_tokens"]}, "embed_tokens.*embedding and head of a model on"),
        ({"modules_to_save": ["lm_head"]}, "lm_head.*embedding and head of a model on"),
        ({"target_modules": ["lm_head"]}, "lm_head.*embedding and head of a model on"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, r"experts\.lora_A\.weight is of no"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    prepared, own = tiny("gpt_oss", tmp_path)
    served = Served(prepared, config=ON_TRANSFORMERS)
    path = make_adapter(own, tmp_path / "a", **{"target_modules": ATTENTION} | settings)
    with pytest.raises(ModelError, match=message):
        served.load(path)


def test_an_adapter_without_a_layer_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    prepared, own = tiny("gpt_oss", tmp_path)
    path = make_adapter(own, tmp_path / "a", target_modules=ATTENTION)
    tensors = load_file(path / "adapter_model.safetensors")
    save_file(
        {name: each for name, each in tensors.items() if "layers.1.self_attn.q" not in name},
        path / "adapter_model.safetensors",
    )
    served = Served(prepared, config=ON_TRANSFORMERS)
    with pytest.raises(ModelError, match=r"1\.self_attn\.q_proj\.lora_A\.weight is missing"):
        served.load(path)


def test_an_adapter_takes_the_memory_that_the_plan_says(tmp_path: Path) -> None:
    """What it lacks of a gain and a shift for each output is what the plan has more."""
    prepared, own = tiny("gpt_oss", tmp_path)
    loaded = Served(prepared, config=ON_TRANSFORMERS).load(
        make_adapter(own, tmp_path / "a", r=4, target_modules=["q_proj"])
    )
    config = ServeConfig(
        model=ModelConfig(model_impl="transformers", dtype="float32"),
        lora=LoRAConfig(
            enable_lora=True, max_loras=2, max_lora_rank=4, lora_target_modules=("q_proj",)
        ),
    )
    planned = plan_memory(config, prepared, CPU).work["8 adapters"]
    num_heads, head_dim = own.config.num_attention_heads, own.config.head_dim
    lacking = sum(
        4 * num_heads * head_dim * [update.gain, update.shift].count(None)
        for update in loaded.products.values()
    )
    assert planned == 8 * (loaded.num_bytes + lacking)
