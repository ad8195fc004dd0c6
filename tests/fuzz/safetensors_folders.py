"""Target: a Hugging Face folder with safetensors, from its files to weights in torch.

    config | tokenizer_config | generation_config | index | safetensors, length-prefixed

Preparing and loading it raise only ModelError; no code of the folder is run.
"""

import json
import shutil
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from hypothesis import strategies as st
from safetensors.numpy import save

from deploy.models import hf_folder
from deploy.models import prepared_folder as folder
from proto.errors import ModelError
from tests.fakes.tiny_model_files import TEMPLATE, TOKENS, tokenizer_json
from tests.fuzz.mutation import Edit, mutate_bytes, mutate_tree, mutated, mutated_bytes
from tests.fuzz.prepared import load

NAMES: Final = (
    "config.json",
    "tokenizer_config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "model.safetensors",
)
KEYS: Final = (
    *("head_dim", "rope_scaling", "rope_parameters", "rope_theta", "sliding_window", "layer_types"),
    *("attention_bias", "tie_word_embeddings", "quantization_config", "auto_map", "mlp_bias"),
    *("num_key_value_heads", "vocab_size", "weight_map", "F32", "dtype", "shape", "data_offsets"),
    *("factor", "rope_type", "type", "original_max_position_embeddings", "mscale", "beta_fast"),
)
_ROPES: Final[tuple[dict[str, Any], ...]] = (
    {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0, "mscale_all_dim": 0.5},
    {"rope_type": "linear", "factor": 2.0},
    {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
)


class SafetensorsFolders:
    name = "safetensors"

    def __init__(self) -> None:
        self._place = tempfile.TemporaryDirectory(prefix="tokend-fuzz-")
        self._folder = Path(self._place.name, "model")
        self._folder.mkdir()
        (self._folder / "tokenizer.json").write_bytes(tokenizer_json())

    def seeds(self) -> list[bytes]:
        plain = {"eos_token": {"content": "<|end|>"}, "chat_template": TEMPLATE}
        index = {"weight_map": dict.fromkeys(_weights(), "model.safetensors")}
        weights = save(_weights())
        seeds = [_packed([_config(), plain, {"eos_token_id": [1, 2]}, index, None], weights)]
        seeds += [
            _packed([_config(rope_scaling=rope), plain, None, None, None], weights)
            for rope in _ROPES
        ]
        return seeds

    def inputs(self, known: Sequence[bytes]) -> st.SearchStrategy[bytes]:
        return mutated(known, _mutate_json) | mutated(known, _mutate_header) | mutated_bytes(known)

    def run(self, data: bytes) -> str:
        for name, part in zip(NAMES, _parts(data), strict=True):
            path = self._folder / name
            if part:
                path.write_bytes(part)
            else:
                path.unlink(missing_ok=True)
        target = Path(self._place.name, "prepared")
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        try:
            contents = hf_folder.read(str(self._folder), _ignore_progress)
            prepared = folder.write(
                contents,
                name="fuzz",
                source=str(self._folder),
                target=str(target),
                final=str(target),
            )
            return load(prepared)
        except ModelError as error:
            return str(error)

    def close(self) -> None:
        self._place.cleanup()


def _config(**more: Any) -> dict[str, Any]:
    sizes = {
        "vocab_size": len(TOKENS),
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "eos_token_id": 1,
        "bos_token_id": 0,
    }
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama"} | sizes | more


def _weights() -> dict[str, np.ndarray]:
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (len(TOKENS), 8),
        "lm_head.weight": (len(TOKENS), 8),
        "model.norm.weight": (8,),
        layer + "input_layernorm.weight": (8,),
        layer + "post_attention_layernorm.weight": (8,),
        layer + "self_attn.q_proj.weight": (8, 8),
        layer + "self_attn.k_proj.weight": (4, 8),
        layer + "self_attn.v_proj.weight": (4, 8),
        layer + "self_attn.o_proj.weight": (8, 8),
        layer + "mlp.gate_proj.weight": (8, 8),
        layer + "mlp.up_proj.weight": (8, 8),
        layer + "mlp.down_proj.weight": (8, 8),
    }
    return {name: np.ones(shape, np.float16) for name, shape in shapes.items()}


def _packed(objects: Sequence[Any], weights: bytes) -> bytes:
    parts = [b"" if each is None else json.dumps(each).encode() for each in objects[:4]]
    return b"".join(struct.pack("<I", len(part)) + part for part in [*parts, weights])


def _parts(data: bytes) -> list[bytes]:
    """Split into five parts, also with false lengths."""
    parts = []
    for _ in NAMES:
        length = int.from_bytes(data[:4], "little")
        parts.append(data[4 : 4 + length])
        data = data[4 + length :]
    return parts


def _joined(parts: Sequence[bytes]) -> bytes:
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


def _mutate_json(data: bytes, edits: Sequence[Edit]) -> bytes:
    """Change values of one of the four JSON documents."""
    parts = _parts(data)
    number = edits[0][1] % 7
    number = number if number < 4 else 0
    parts[number] = _mutate_document(parts[number], edits)
    return _joined(parts)


def _mutate_header(data: bytes, edits: Sequence[Edit]) -> bytes:
    """Change values of the safetensors header and keep its length consistent."""
    parts = _parts(data)
    length = int.from_bytes(parts[4][:8], "little")
    header = _mutate_document(parts[4][8 : 8 + length], edits)
    parts[4] = struct.pack("<Q", len(header)) + header + parts[4][8 + length :]
    return _joined(parts)


def _mutate_document(document: bytes, edits: Sequence[Edit]) -> bytes:
    try:
        return json.dumps(mutate_tree(json.loads(document), edits, KEYS)).encode()
    except (ValueError, RecursionError):
        return mutate_bytes(document, edits, ())


def _ignore_progress(what: str) -> None:
    """Ignore progress."""
