"""Configuration of pooling: --pooler-config and --runner, applied to how a model pools."""

from functools import lru_cache
from typing import Final

import msgspec

from proto.errors import ConfigError
from proto.messages.pooling import POOLING_TYPES, Pooler, PoolingType, scoring_by_logits
from proto.messages.prepared_model import PreparedModel
from proto.settings.config import ModelConfig
from proto.settings.json_flag import convert_object, flag_error, parse_json_flag

FIELD: Final = "pooler_config"


class PoolerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of --pooler-config; what it leaves out is as the model's folder says.

    true_token_id, false_token_id: score by the logits of these tokens, as Qwen3-Reranker does.
    """

    pooling_type: str | None = None
    normalize: bool | None = None
    true_token_id: int | None = None
    false_token_id: int | None = None

    def apply_to(self, pooler: Pooler) -> Pooler:
        if self.pooling_type is not None:
            pooler = msgspec.structs.replace(pooler, types=(_pooling_type(self.pooling_type),))
        if self.normalize is not None:
            pooler = msgspec.structs.replace(pooler, normalize=self.normalize)
        if self.true_token_id is not None:
            pooler = scoring_by_logits(self.true_token_id, self.false_token_id)
        return pooler


def _pooling_type(name: str) -> PoolingType:
    for known in POOLING_TYPES:
        if name.lower() == known:
            return known
    names = ", ".join(known.upper() for known in POOLING_TYPES)
    raise flag_error(FIELD, f": pooling_type {name[:40]} is none of {names}")


def parse_pooler_config(text: str) -> PoolerSettings:
    """Return the settings of --pooler-config; raise ConfigError."""
    settings = convert_object(FIELD, parse_json_flag(FIELD, text), PoolerSettings)
    ids = (settings.true_token_id, settings.false_token_id)
    if settings.false_token_id is not None and settings.true_token_id is None:
        raise flag_error(FIELD, ": false_token_id needs true_token_id")
    if any(token_id is not None and token_id < 0 for token_id in ids):
        raise flag_error(FIELD, ": a token id must not be negative")
    settings.apply_to(Pooler())  # the pooling type
    return settings


@lru_cache(maxsize=8)
def pooler_of(config: ModelConfig, model: PreparedModel) -> Pooler | None:
    """Return how the model pools; None if it generates.

    Raises ConfigError for settings that the model cannot have.
    """
    if config.runner == "generate" or (
        config.runner == "auto" and model.pooler is None and config.pooler_config is None
    ):
        if not model.generates:
            raise ConfigError(f"--runner generate: {model.architecture} does not generate text")
        return None
    pooler = model.pooler or Pooler()
    if config.pooler_config is not None:
        pooler = parse_pooler_config(config.pooler_config).apply_to(pooler)
    if pooler.task == "embed" and not pooler.layers:
        size = model.hidden_size * len(pooler.types)
        pooler = msgspec.structs.replace(pooler, size=size)
    if pooler.logit_tokens and not model.generates:
        raise flag_error(FIELD, f": {model.architecture} has no logits of tokens")
    wrong = [token_id for token_id in pooler.logit_tokens if token_id >= model.vocab_size]
    if wrong:
        raise flag_error(
            FIELD, f": token id {wrong[0]} is outside the vocabulary [0, {model.vocab_size})"
        )
    return pooler
