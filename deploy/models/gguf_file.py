"""Reads a GGUF file: tensor index, configuration, tokenizer.

`transformers` converts configuration and tokenizer, so that token ids and settings are the same as
there. Settings that its conversion omits are added from the metadata. A setting that neither
supports is an error, because ignoring it would change the arithmetic silently.
"""

import json
import os
from collections.abc import Mapping
from typing import Any, Final

from deploy.models import gguf_header
from deploy.models.gguf_header import GgufHeader
from deploy.models.prepared_folder import (
    ModelContents,
    ProgressCallback,
    as_model_error,
    is_token_id,
)
from proto.errors import ModelError, shown
from proto.prepared_model import FAMILIES, TensorIndex

_SUPPORTED_KEYS: Final = frozenset(
    {
        "context_length",
        "block_count",
        "embedding_length",
        "feed_forward_length",
        "vocab_size",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.finetuned",
        "rope.scaling.attn_factor",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
    }
)
"""Metadata keys, without the architecture, that are converted to config.json."""

_WITH_SLIDING_WINDOW: Final = frozenset({"gemma3"})
"""Architectures whose attention.sliding_window `transformers` converts."""

_LAYERS_OF_GEMMA3_27B: Final = 62

_END_KEYS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")


def read(path: str, report: ProgressCallback) -> ModelContents:
    """Read a GGUF file; raises ModelError if it is damaged or not supported."""
    report("reading the GGUF header", None)
    header = gguf_header.read(path)
    _check(header, path)
    metadata = header.values
    report("converting configuration and tokenizer", None)
    config = _config(path, metadata)
    tokenizer_json, tokenizer_config, template = _tokenizer(path)
    return ModelContents(
        config=config,
        tokenizer_json=tokenizer_json,
        tokenizer_config=tokenizer_config,
        chat_template=template,
        tensors=TensorIndex("gguf", (path,), header.tensors),
        eos_token_ids=_end_tokens(metadata),
        bos_token_id=_token_id(metadata, "bos_token_id"),
    )


def _check(header: GgufHeader, path: str) -> None:
    architecture = header.values.get("general.architecture")
    if not isinstance(architecture, str):
        raise ModelError(f"{path} has no general.architecture")
    if architecture not in FAMILIES.values():
        raise ModelError(
            f"GGUF architecture {shown(architecture)} is not supported; "
            f"supported: {', '.join(FAMILIES.values())}"
        )
    if header.values.get("split.count", 0) not in (0, 1):  # 0: a joined file
        raise ModelError("a GGUF model that is split over several files is not supported: join it")
    if not isinstance(header.values.get("tokenizer.ggml.model"), str):
        raise ModelError(f"{path} has no tokenizer (tokenizer.ggml.model)")
    if not header.tensors:
        raise ModelError(f"{path} has no tensors")


def _config(path: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    architecture = metadata["general.architecture"]
    prefix = architecture + "."
    own = {
        key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)
    }
    windowed = {"attention.sliding_window"} if architecture in _WITH_SLIDING_WINDOW else set()
    for key in own:
        if key not in _SUPPORTED_KEYS | windowed:
            raise ModelError(f"the GGUF file sets {prefix}{key}, which is not supported")
    config = _converted_config(path, architecture)
    _add_head_dim(config, own, prefix)
    _add_query_scale(config, own)
    _add_rope_scaling(config, own, prefix)
    return config


def _converted_config(path: str, architecture: str) -> dict[str, Any]:
    from transformers import AutoConfig

    folder, name = os.path.split(path)
    with as_model_error(f"GGUF architecture {shown(architecture)!r}"):
        converted = AutoConfig.from_pretrained(
            folder, gguf_file=name, local_files_only=True, trust_remote_code=False
        )
        config: dict[str, Any] = json.loads(converted.to_json_string())
    config.pop("_model_name_or_path", None)
    config["architectures"] = [name for name, known in FAMILIES.items() if known == architecture]
    return config


def _add_head_dim(config: dict[str, Any], own: Mapping[str, Any], prefix: str) -> None:
    """Add the head size, which the conversion omits for some families."""
    length = own.get("attention.key_length")
    if length is None:
        return
    if own.get("attention.value_length", length) != length:
        raise ModelError(f"{prefix}attention.value_length differs from key_length: not supported")
    if own.get("rope.dimension_count", length) != length:
        raise ModelError(f"{prefix}rope.dimension_count is not the head size: not supported")
    config["head_dim"] = length


def _add_query_scale(config: dict[str, Any], own: Mapping[str, Any]) -> None:
    """Add the query scale of Gemma 3: by the head size, except for the 27B model.

    GGUF files do not contain it; llama.cpp, too, recognises the 27B model by its layers.
    """
    if config["model_type"] != "gemma3_text":
        return
    if own.get("block_count") == _LAYERS_OF_GEMMA3_27B:
        config["query_pre_attn_scalar"] = config["hidden_size"] // config["num_attention_heads"]
    else:
        config["query_pre_attn_scalar"] = config["head_dim"]


def _add_rope_scaling(config: dict[str, Any], own: Mapping[str, Any], prefix: str) -> None:
    """Add rope scaling, which the conversion omits for most families, under its HF names."""
    kind = own.get("rope.scaling.type", "none")
    if kind == "none":
        return
    if kind not in ("linear", "yarn"):
        raise ModelError(f"{prefix}rope.scaling.type {kind!r} is not supported")
    parameters = config.get("rope_parameters", {})
    # Gemma 3 has a rope per kind of layer; the scaling is for layers without a window.
    per_kind = "full_attention" in parameters
    rope = {**(parameters["full_attention"] if per_kind else parameters), "rope_type": kind}
    names = {
        "factor": "factor",
        "original_context_length": "original_max_position_embeddings",
        "attn_factor": "attention_factor",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    }
    for key, hf_key in names.items():
        if f"rope.scaling.{key}" in own:
            rope[hf_key] = own[f"rope.scaling.{key}"]
    config["rope_parameters"] = {**parameters, "full_attention": rope} if per_kind else rope


def _tokenizer(path: str) -> tuple[bytes, dict[str, Any], str | None]:
    """Return tokenizer.json, tokenizer configuration, and chat template or None."""
    from transformers import AutoTokenizer

    folder, name = os.path.split(path)
    with as_model_error(f"the tokenizer in {path} cannot be converted"):
        tokenizer = AutoTokenizer.from_pretrained(
            folder, gguf_file=name, local_files_only=True, trust_remote_code=False
        )
        if not tokenizer.is_fast:
            raise ModelError(f"the tokenizer in {path} cannot be converted to tokenizer.json")
        tokenizer_json = tokenizer.backend_tokenizer.to_str(pretty=True).encode()
    special = {
        key: value for key, value in tokenizer.special_tokens_map.items() if isinstance(value, str)
    }
    template = tokenizer.chat_template
    return tokenizer_json, special, template if isinstance(template, str) else None


def _end_tokens(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    found = (_token_id(metadata, key) for key in _END_KEYS)
    return tuple(dict.fromkeys(token for token in found if token is not None))


def _token_id(metadata: Mapping[str, Any], key: str) -> int | None:
    value: Any = metadata.get(f"tokenizer.ggml.{key}")
    if value is not None and not is_token_id(value):
        raise ModelError(f"the GGUF file sets tokenizer.ggml.{key} to {shown(value)}")
    return value
