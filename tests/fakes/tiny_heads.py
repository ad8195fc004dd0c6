"""Random heads of EAGLE and EAGLE-3 in the folders in which these are published."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from deploy.models import hf_folder
from proto.messages.prepared_model import PreparedModel
from tests.fakes.prepared_models import prepare

HEAD_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "vocab_size": 96,
    "initializer_range": 0.02,
    "pretraining_tp": 1,
    "torch_dtype": "float16",
    "use_cache": True,
}
DRAFT_VOCAB_SIZE = 40


def head_config(method: str, **changes: Any) -> dict[str, Any]:
    """Return a configuration with changes; None removes a key."""
    config = HEAD_CONFIG | {"bias": True}
    if method == "eagle3":
        config = HEAD_CONFIG | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": DRAFT_VOCAB_SIZE,
            "tie_word_embeddings": False,
        }
    return {key: value for key, value in (config | changes).items() if value is not None}


def head_tensors(method: str, config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Return random tensors of a head in float32, by their names in published files."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    size, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries = config["num_attention_heads"] * head_dim
    keys = config["num_key_value_heads"] * head_dim
    is_third = method == "eagle3"
    inputs = 2 * size if is_third else size
    shapes = {
        "self_attn.q_proj": (queries, inputs),
        "self_attn.k_proj": (keys, inputs),
        "self_attn.v_proj": (keys, inputs),
        "self_attn.o_proj": (size, queries),
        "mlp.gate_proj": (inner, size),
        "mlp.up_proj": (inner, size),
        "mlp.down_proj": (size, inner),
    }
    layer = {
        f"{name}.weight": random(*shape, scale=1.5 * shape[1] ** -0.5)
        for name, shape in shapes.items()
    }
    norms = ["post_attention_layernorm"]
    norms += ["hidden_norm", "input_layernorm"] if is_third else []
    layer |= {f"{name}.weight": 1 + random(size, scale=0.3) for name in norms}
    fc = random(size, (3 if is_third else 2) * size, scale=size**-0.5)
    prefix = "midlayer" if is_third else "layers.0"
    tensors = {f"{prefix}.{name}": value for name, value in layer.items()} | {"fc.weight": fc}
    tensors["embed_tokens.weight"] = random(config["vocab_size"], size)  # is never read
    if not is_third:
        return tensors | {"fc.bias": random(size)}
    num_ids = config["draft_vocab_size"]
    tokens = torch.randperm(config["vocab_size"], generator=generator)[:num_ids].sort().values
    is_drafted = torch.zeros(config["vocab_size"], dtype=torch.bool)
    is_drafted[tokens] = True
    return tensors | {
        "norm.weight": 1 + random(size, scale=0.3),
        "lm_head.weight": random(num_ids, size, scale=0.3),
        "d2t": tokens - torch.arange(num_ids),
        "t2d": is_drafted,
    }


def save_head(
    folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], *, pickled: bool = False
) -> Path:
    """Write a head's folder. pickled: pytorch_model.bin instead of safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


def prepare_head(folder: Path) -> PreparedModel:
    """Prepare a head's folder as `deploy` does."""
    contents = hf_folder.read_head(str(folder), lambda _: None)
    return prepare(folder / "prepared", dict(contents.config), contents.tensors, name=folder.name)
