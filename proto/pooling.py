"""Pooling: the description of a model that gives a vector or scores for a text, not more text.

    token hidden states ─▶ pooling types ─▶ one vector ─▶ layers ─▶ dimensions, normalisation
                                                                 └▶ or the activation of scores

`Pooler` describes it; `deploy/models/pooler_files.py` reads it from a model's folder, `pooler_of`
applies the settings. `PoolingParams` are what a request may change.
"""

from functools import lru_cache
from typing import TYPE_CHECKING, Final, Literal, get_args

import msgspec

from proto.config import ModelConfig
from proto.errors import ConfigError, InvalidRequestError, require

if TYPE_CHECKING:
    from proto.prepared_model import PreparedModel

PoolingType = Literal["last", "cls", "mean", "max", "mean_sqrt_len", "weighted_mean"]
"""weighted_mean: the first token counts once, the second twice, and so on."""
POOLING_TYPES: Final[tuple[PoolingType, ...]] = get_args(PoolingType)
PoolingTask = Literal["embed", "classify", "token_embed"]
"""embed: a vector. classify: scores of labels. token_embed: the vectors of all tokens."""
Activation = Literal["none", "tanh", "gelu", "relu", "silu", "sigmoid", "softmax"]

MAX_INPUTS: Final = 8192
"""Most texts of one HTTP request."""
MAX_VECTOR: Final = 1 << 20
"""Most numbers of a vector."""


class PoolerLayer(msgspec.Struct, array_like=True, frozen=True):
    """A layer behind pooling. name: of its tensors in the index: `name`.weight and `name`.bias."""

    kind: Literal["dense", "norm", "normalize"]
    name: str = ""
    activation: Activation = "none"
    eps: float = 1e-5


class PoolingParams(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """What a request asks of a pooling model.

    dimensions: first numbers of the vector that are returned; 0 for all.
    activate: normalise an embedding, or apply the activation to scores; None: as the model does.
    needs_all_tokens: no prefix of the prompt may come from the prefix cache.
    second_start: position of the first token of the second text of a pair, from which on the token
        type is 1 (Devlin et al., BERT, section 3); 0: all types are 0.
    """

    task: PoolingTask
    dimensions: int = 0
    activate: bool | None = None
    needs_all_tokens: bool = False
    second_start: int = 0

    def of_pair(self, second_start: int) -> "PoolingParams":
        """Return the same for a pair of texts; second_start: 0 if it is a single text."""
        return msgspec.structs.replace(self, second_start=second_start) if second_start else self

    def validate(self) -> None:
        require(0 <= self.dimensions <= MAX_VECTOR, "dimensions", f"must be 0 to {MAX_VECTOR}")
        require(0 <= self.second_start <= MAX_VECTOR, "second_start", f"must be 0 to {MAX_VECTOR}")


class Pooler(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """How a model turns hidden states into its result.

    types: pooling types, whose vectors are joined. layers: in order.
    size: numbers of the result; 0 for the hidden size.
    normalize: embeddings have length 1, unless a request says otherwise.
    activation: of scores. labels: names of the scores; empty for an embedding.
    logit_tokens: the score is the difference of the logits of the first and the second token, or
        the logit of the only one, in place of the pooled vector.
    generates: whether the model's files have a language head, too.
    """

    task: Literal["embed", "classify"] = "embed"
    types: tuple[PoolingType, ...] = ("last",)
    layers: tuple[PoolerLayer, ...] = ()
    size: int = 0
    normalize: bool = True
    activation: Activation = "none"
    labels: tuple[str, ...] = ()
    logit_tokens: tuple[int, ...] = ()
    generates: bool = True

    @property
    def tasks(self) -> tuple[PoolingTask, ...]:
        """The tasks of the model, its own first.

        Layers that read several pooled vectors at once cannot read those of single tokens.
        """
        has_tokens = self.task == "embed" and (len(self.types) == 1 or not self.layers)
        return (self.task, "token_embed") if has_tokens else (self.task,)

    @property
    def needs_all_tokens(self) -> bool:
        """Whether the hidden states of all tokens count, so that no prefix may be cached."""
        return self.types != ("last",)

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors that its layers may have."""
        names = [layer.name for layer in self.layers if layer.name]
        return tuple(f"{name}.{kind}" for name in names for kind in ("weight", "bias"))

    def params(
        self, task: PoolingTask, *, dimensions: int = 0, activate: bool | None = None
    ) -> PoolingParams:
        """Return what a request asks of this model; arguments as in PoolingParams."""
        return PoolingParams(
            task=task,
            dimensions=dimensions,
            activate=activate,
            needs_all_tokens=self.needs_all_tokens or task == "token_embed",
        )


def check_task(pooler: Pooler, task: PoolingTask, api: str) -> None:
    """Raise InvalidRequestError if the model has no such task. api: for the error."""
    if task not in pooler.tasks:
        raise InvalidRequestError(
            f"The model does not support {api}: its tasks are {', '.join(pooler.tasks)}", "model"
        )


class PoolerSettings(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
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


def scoring_by_logits(true_token_id: int, false_token_id: int | None) -> Pooler:
    """Return the pooler of a causal model that answers yes or no."""
    tokens = (true_token_id,) if false_token_id is None else (true_token_id, false_token_id)
    return Pooler(
        task="classify", size=1, activation="sigmoid", labels=("LABEL_0",), logit_tokens=tokens
    )


def _pooling_type(name: str) -> PoolingType:
    for known in POOLING_TYPES:
        if name.lower() == known:
            return known
    names = ", ".join(known.upper() for known in POOLING_TYPES)
    raise ConfigError(
        f"--pooler-config: pooling_type {name[:40]} is none of {names}", "pooler_config"
    )


def parse_pooler_config(text: str) -> PoolerSettings:
    """Return the settings of --pooler-config; raise ConfigError."""
    try:
        settings = msgspec.json.decode(text, type=PoolerSettings)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise ConfigError(f"--pooler-config: {error}", "pooler_config") from None
    ids = (settings.true_token_id, settings.false_token_id)
    if settings.false_token_id is not None and settings.true_token_id is None:
        raise ConfigError("--pooler-config: false_token_id needs true_token_id", "pooler_config")
    if any(token_id is not None and token_id < 0 for token_id in ids):
        raise ConfigError("--pooler-config: a token id must not be negative", "pooler_config")
    settings.apply_to(Pooler())  # the pooling type
    return settings


@lru_cache(maxsize=8)
def pooler_of(config: ModelConfig, model: "PreparedModel") -> Pooler | None:
    """Return how the model pools; None if it generates.

    Raises ConfigError for settings that the model cannot have.
    """
    if config.runner == "generate" or (
        config.runner == "auto" and model.pooler is None and config.pooler_config is None
    ):
        if not model.generates:
            raise ConfigError(
                f"--runner generate: {model.architecture} does not generate text", "runner"
            )
        return None
    pooler = model.pooler or Pooler()
    if config.pooler_config is not None:
        pooler = parse_pooler_config(config.pooler_config).apply_to(pooler)
    if pooler.task == "embed" and not pooler.layers:
        size = model.hidden_size * len(pooler.types)
        pooler = msgspec.structs.replace(pooler, size=size)
    if pooler.logit_tokens and not model.generates:
        raise ConfigError(
            f"--pooler-config: {model.architecture} has no logits of tokens", "pooler_config"
        )
    wrong = [token_id for token_id in pooler.logit_tokens if token_id >= model.vocab_size]
    if wrong:
        raise ConfigError(
            f"--pooler-config: token id {wrong[0]} is outside the vocabulary "
            f"[0, {model.vocab_size})",
            "pooler_config",
        )
    return pooler
