"""Pooling: the description of a model that gives a vector or scores for a text, not more text.

    token hidden states ─▶ pooling types ─▶ one vector ─▶ layers ─▶ dimensions, normalisation
                                                                 └▶ or the activation of scores

`Pooler` describes it; `deploy/models/pooler_files.py` reads it from a model's folder;
`proto/settings/pooler_config.py` applies the settings. `PoolingParams` are what a request may
change.
"""

from typing import Final, Literal, get_args

import msgspec

from proto.errors import InvalidRequestError, require

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
    """A layer after pooling. name: of its tensors in the index: `name`.weight and `name`.bias."""

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


def offered_tasks(pooler: Pooler) -> list[str]:
    """Return what requests may ask of the model: its tasks, and score if it can rank texts."""
    ranks = pooler.task == "embed" or len(pooler.labels) == 1
    return [*pooler.tasks, "score"] if ranks else [*pooler.tasks]


def check_task(pooler: Pooler, task: PoolingTask, api: str) -> None:
    """Raise InvalidRequestError if the model has no such task. api: for the error."""
    if task not in pooler.tasks:
        raise InvalidRequestError(
            f"The model does not support {api}: its tasks are {', '.join(offered_tasks(pooler))}",
            "model",
        )


def scoring_by_logits(true_token_id: int, false_token_id: int | None) -> Pooler:
    """Return the pooler of a causal model that answers yes or no."""
    tokens = (true_token_id,) if false_token_id is None else (true_token_id, false_token_id)
    return Pooler(
        task="classify", size=1, activation="sigmoid", labels=("LABEL_0",), logit_tokens=tokens
    )
