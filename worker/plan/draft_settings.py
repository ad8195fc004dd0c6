"""Which models can draft for which, and with what settings a draft model is loaded.

Everything here is known before a weight is read. Start at require_draft_model.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from proto.codec import changed, from_json
from proto.errors import ConfigError, ModelError, ProtocolError, shown
from proto.messages.lifecycle import KVCacheGeometry
from proto.messages.prepared_model import PreparedModel, read_model_file
from proto.settings.config import ServeConfig
from proto.settings.pooler_config import pooler_of
from proto.settings.speculative_config import HEAD_METHODS
from worker.attention.kv_cache import KVLayout, LayerSlot, kv_cache_geometry, resolve_kv_dtype
from worker.device import Device
from worker.models.registry import model_spec
from worker.models.spec import ModelSpec
from worker.models.transformers_model import TransformersSpec
from worker.speculation.draft_model import TOKEN_BYTES
from worker.speculation.eagle_head import read_head

TOKENIZER_FILE: Final = "tokenizer.json"


def draft_config(config: ServeConfig, draft: PreparedModel) -> ServeConfig:
    """Return the settings for a draft model: those of the served one where it has the same."""
    lengths = (config.model.max_model_len, config.speculation.parsed().max_model_len)
    longest = min((each for each in lengths if each is not None), default=None)
    if longest is not None:
        longest = min(longest, draft.max_position)
    model = changed(
        config.model,
        model=draft.name,
        runner="generate",
        pooler_config=None,
        max_model_len=longest,
        enable_return_routed_experts=False,
    )
    return changed(
        config, model=model, parallel=changed(config.parallel, enable_expert_parallel=False)
    )


def require_draft_model(
    config: ServeConfig, prepared: PreparedModel, draft: PreparedModel, device: Device
) -> None:
    """Raise ConfigError if `draft` cannot propose tokens for the model `prepared`."""
    settings = config.speculation.parsed()
    method = settings.model_method
    size = config.parallel.tensor_parallel_size
    served, drafter = prepared.architecture, draft.architecture
    if size > 1 and not device.drafts_on_ranks:
        raise _error(
            f"method {method} drafts on one GPU only so far: --tensor-parallel-size 1 is needed, "
            f"got {size}"
        )
    if settings.draft_tensor_parallel_size not in (None, size):
        raise _error(
            f"draft_tensor_parallel_size must be that of the model, --tensor-parallel-size {size}, "
            f"got {settings.draft_tensor_parallel_size}"
        )
    if pooler_of(config.model, prepared) is not None:
        raise _error(f"no drafts for {prepared.name}: its outputs are pooled")
    spec = model_spec(prepared, config, device.head_dims)
    if spec.state_layers:
        raise _error(f"method {method}: {served} has recurrent states, with which no model drafts")
    if None not in spec.windows:
        raise _error(
            f"model: all layers of {prepared.name} have windows, and the blocks of a draft model "
            "are those of a layer that attends to all tokens"
        )
    if method in HEAD_METHODS:
        if isinstance(spec, TransformersSpec):
            raise _error(
                f"method {method}: {served} runs on transformers' code, which has no heads"
            )
        with naming_draft(draft):
            read_head(method, draft, spec, device)
        return
    if not draft.generates:
        raise _error(f"model: {drafter} does not generate text")
    if (settings.max_model_len or 0) > draft.max_position:
        raise _error(
            f"max_model_len {settings.max_model_len} is more than the {draft.max_position} "
            f"positions that {draft.name} supports"
        )
    with naming_draft(draft):
        draft_spec = model_spec(draft, draft_config(config, draft), device.head_dims)
    if draft_spec.state_layers:
        raise _error(f"model: {drafter} has layers with a recurrent state")
    served_tokens = os.path.join(config.model.tokenizer or prepared.folder, TOKENIZER_FILE)
    _require_same_tokens(prepared, served_tokens, draft)


@contextmanager
def naming_draft(draft: PreparedModel) -> Iterator[None]:
    """Name the draft model in errors about a model or a setting."""
    try:
        yield
    except (ConfigError, ModelError) as error:
        raise _error(f"model {draft.name}: {error}") from None


def draft_cache(spec: ModelSpec, kv_dtype: torch.dtype) -> tuple[KVLayout, KVCacheGeometry]:
    """Return how the layers of a draft model share its KV cache, and the shape of that.

    A block has a slot for each layer, and there is a group for each window, so that one block table
    serves all groups.
    """
    heads, windows = spec.attention_shape, tuple(dict.fromkeys(spec.windows))
    slots = (LayerSlot(windows.index(each), slot) for slot, each in enumerate(spec.windows))
    layout = KVLayout(tuple(slots), windows, len(spec.windows))
    num_parts = 1 if heads.latent_dim else 2
    return layout, kv_cache_geometry(
        layout, heads.num_kv_heads, heads.head_dim, kv_dtype, num_parts
    )


def draft_token_bytes(spec: ModelSpec, config: ServeConfig, dtype: torch.dtype) -> int:
    """Return the bytes that a rank keeps of each token in the blocks of a draft model.

    spec: of the rank. config: from `draft_config`. dtype: of the activations.
    """
    return draft_cache(spec, draft_kv_dtype(spec, config, dtype))[1].bytes_per_token + TOKEN_BYTES


def draft_kv_dtype(spec: ModelSpec, config: ServeConfig, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a draft model's KV; dtype: of the activations."""
    heads = spec.attention_shape
    return resolve_kv_dtype(config.cache.kv_cache_dtype, dtype, heads.head_dim, heads.latent_dim)


def _require_same_tokens(prepared: PreparedModel, path: str, draft: PreparedModel) -> None:
    """Raise ConfigError if an id stands for different tokens in the two models.

    An id that only one of them has may be padding, or a token that it was given later.
    """
    data, draft_data = _read(path), _read(os.path.join(draft.folder, TOKENIZER_FILE))
    if data == draft_data:
        return
    tokens, draft_tokens = _tokens(data, path), _tokens(draft_data, draft.folder)
    for token_id in sorted(tokens.keys() & draft_tokens.keys()):
        if tokens[token_id] != draft_tokens[token_id]:
            raise _error(
                f"model: {draft.name} has another tokenizer than {prepared.name}: token {token_id} "
                f"is {shown(draft_tokens[token_id])} in the one and {shown(tokens[token_id])} in "
                "the other"
            )


def _tokens(data: bytes, path: str) -> dict[int, str]:
    """Return the tokens in a tokenizer.json by their ids."""
    try:
        document: dict[str, Any] = from_json(data, dict[str, Any])
        vocab = document["model"]["vocab"]
        # A dictionary, or in a unigram model pairs of token and probability in the order of ids.
        found = (
            {token_id: token for token, token_id in vocab.items()}
            if isinstance(vocab, dict)
            else {token_id: entry[0] for token_id, entry in enumerate(vocab)}
        )
        added = document.get("added_tokens") or []
        return found | {entry["id"]: entry["content"] for entry in added}
    except (ProtocolError, AttributeError, KeyError, TypeError, IndexError) as error:
        raise ModelError(f"{path}: no tokenizer that can be compared: {error!r}") from None


def _read(path: str) -> bytes:
    try:
        return read_model_file(path)
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from None


def _error(what: str) -> ConfigError:
    return ConfigError(f"--speculative-config: {what}")
