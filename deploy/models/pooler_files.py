"""Reads how a model folder pools: the modules of sentence-transformers, or its architecture.

    modules.json                  the modules in order, each with a folder
    1_Pooling/config.json         pooling types
    2_Dense/config.json           a layer; its weights are in model.safetensors beside it
    sentence_bert_config.json     longest text

A module or a value that changes the result and is not supported raises ModelError with its name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Any, Final

import msgspec

from deploy.models import safetensors_header
from deploy.models.prepared_folder import first_architecture, read_json
from proto.errors import ModelError, shown
from proto.messages.pooling import Activation, Pooler, PoolerLayer, PoolingType, scoring_by_logits
from proto.messages.prepared_model import TensorEntry, TensorIndex
from worker.models.families import FAMILIES

_TYPES: Final[dict[str, PoolingType]] = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weighted_mean",
    "lasttoken": "last",
}
"""Pooling type in sentence-transformers → ours, in the order in which their vectors are joined."""
_OLDER_NAMES: Final = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_ACTIVATIONS: Final[dict[str, Activation]] = {
    "torch.nn.modules.linear.Identity": "none",
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.activation.GELU": "gelu",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.SiLU": "silu",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.activation.Softmax": "softmax",
}
_MAX_LABELS: Final = 1 << 16
_PREFIXES: Final = ("model.", "bert.", "roberta.")
"""Prefixes that names of tensors of the model without its head may have."""
_HEADS: Final = ("lm_head.", "score.", "classifier.", "pooler.", "head.")
"""Prefixes of tensors that belong to a head, not to the model without its head."""
_BIDIRECTIONAL_KEY: Final = "use_bidirectional_attention"
_OLDER_ACTIVATION_KEY: Final = "sbert_ce_default_activation_function"
"""Key of the activation of a cross encoder in config.json by older sentence-transformers."""


@dataclass(frozen=True)
class PoolerContents:
    """What a folder says about pooling.

    pooler: None for a model that only generates. entries: tensors of its layers, in `files`, which
    are numbered from 0. max_tokens: longest text; None for the model's length.
    """

    pooler: Pooler | None = None
    entries: tuple[TensorEntry, ...] = ()
    files: tuple[str, ...] = ()
    max_tokens: int | None = None

    def joined_to(self, index: TensorIndex) -> TensorIndex:
        """Return the index with the tensors of the layers.

        A folder of a model that pools may have the body's tensors without the prefix `model.`, or
        with another one.
        """
        tensors = index.tensors
        if self.pooler is not None:
            names = [tensor.name for tensor in tensors]
            prefix = next(
                (it for it in _PREFIXES if any(map(str.startswith, names, repeat(it)))), ""
            )
            tensors = tuple(
                msgspec.structs.replace(tensor, name=_body_name(tensor.name, prefix))
                for tensor in tensors
            )
        first = len(index.files)
        added = [msgspec.structs.replace(entry, file=first + entry.file) for entry in self.entries]
        return TensorIndex(index.format, (*index.files, *self.files), (*tensors, *added))


def _body_name(name: str, prefix: str) -> str:
    """Return the name of a tensor with the prefix `model.` in place of `prefix`.

    What is not part of the body has none.
    """
    body = name.removeprefix(prefix)
    if body.startswith(_HEADS) or not name.startswith(prefix):
        return body
    return f"model.{body}"


@dataclass
class _Modules:
    """The modules of a folder that were read so far."""

    folder: Path
    types: tuple[PoolingType, ...] = ()
    layers: list[PoolerLayer] = field(default_factory=list)
    size: int = 0
    normalize: bool = False
    logits: Pooler | None = None
    entries: list[TensorEntry] = field(default_factory=list)
    files: list[str] = field(default_factory=list)

    def read(self, name: str, path: str) -> None:
        kind = name.rsplit(".", 1)[-1]
        if self.normalize:
            # Only the last module may normalise, because dimensions are cut before it.
            self.layers.append(PoolerLayer("normalize"))
            self.normalize = False
        if kind == "Pooling":
            self.types, self.size = self._pooling(path)
        elif kind == "Dense":
            self.layers.append(self._dense(path))
        elif kind == "Normalize":
            self.normalize = True
        elif kind == "LogitScore":
            self.logits = self._logit_score(path)
        elif kind != "Dropout":
            raise ModelError(
                f"{self.folder / 'modules.json'}: {shown(name)} is not supported; supported: "
                "Transformer, Pooling, Dense, Normalize, LogitScore"
            )

    def _pooling(self, path: str) -> tuple[tuple[PoolingType, ...], int]:
        file, config = self._config(path)
        mode = config.get("pooling_mode")
        names = [mode] if isinstance(mode, str) else mode
        if names is None:
            found = [new for old, new in _OLDER_NAMES.items() if config.get(old) is True]
            names = found or ["mean"]
        if not isinstance(names, list) or not names or not all(name in _TYPES for name in names):
            known = ", ".join(_TYPES)
            raise ModelError(f"{file}: pooling_mode {shown(names)}: supported: {known}")
        if config.get("include_prompt", True) is not True:
            raise ModelError(f"{file}: include_prompt = false is not supported")
        size = config.get("embedding_dimension", config.get("word_embedding_dimension"))
        if type(size) is not int or size <= 0:
            raise ModelError(f"{file}: word_embedding_dimension {shown(size)} is no size")
        return tuple(_TYPES[name] for name in names), size * len(names)

    def _dense(self, path: str) -> PoolerLayer:
        file, config = self._config(path)
        activation = config.get("activation_function", "torch.nn.modules.activation.Tanh")
        if activation not in _ACTIVATIONS:
            raise ModelError(f"{file}: activation_function {shown(activation)} is not supported")
        if config.get("use_residual"):
            raise ModelError(f"{file}: use_residual is not supported")
        weights = self.folder / path / "model.safetensors"
        if not weights.is_file():
            raise ModelError(f"{weights} is missing; pickled weights are never read")
        for entry in safetensors_header.read(str(weights), len(self.files)):
            self.entries.append(msgspec.structs.replace(entry, name=f"{path}.{entry.name}"))
        self.files.append(str(weights))
        name = f"{path}.linear"
        shapes = {entry.name: entry.shape for entry in self.entries}
        shape = shapes.get(f"{name}.weight", ())
        if len(shape) != 2 or shape[1] != self.size:
            raise ModelError(f"{weights}: linear.weight of shape {list(shape)} has not {self.size}")
        self.size = shape[0]
        return PoolerLayer("dense", name, _ACTIVATIONS[activation])

    def _logit_score(self, path: str) -> Pooler:
        file, config = self._config(path)
        ids = config.get("true_token_id"), config.get("false_token_id")
        if type(ids[0]) is not int or not (ids[1] is None or type(ids[1]) is int):
            raise ModelError(f"{file}: true_token_id and false_token_id must be token ids")
        return scoring_by_logits(ids[0], ids[1])

    def _config(self, path: str) -> tuple[Path, dict[str, Any]]:
        file = self.folder / path / "config.json"
        value = read_json(file)
        if not isinstance(value, dict):
            raise ModelError(f"{file} is missing or no JSON object")
        return file, value


def read_pooler(folder: Path, config: Mapping[str, Any]) -> PoolerContents:
    """Return what a folder says about pooling; config: its config.json. Raises ModelError."""
    longest = read_json(folder / "sentence_bert_config.json")
    max_tokens = longest.get("max_seq_length") if isinstance(longest, dict) else None
    if type(max_tokens) is not int or max_tokens <= 0:
        max_tokens = None
    max_tokens = _shorter(max_tokens, _positions_of_roberta(config))
    scores = _score_head(config)
    if scores is not None:
        return PoolerContents(scores, max_tokens=max_tokens)
    is_encoder = _is_encoder(config)
    listed = read_json(folder / "modules.json")
    if listed is None:
        if is_encoder:  # as sentence-transformers reads such a folder
            return PoolerContents(Pooler(types=("mean",), generates=False), max_tokens=max_tokens)
        is_body = family_architecture(config) != first_architecture(config)
        return PoolerContents(Pooler(generates=False) if is_body else None)
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise ModelError(f"{folder / 'modules.json'} is no list of modules")
    modules = _Modules(folder)
    for number, each in enumerate(listed):
        name, path = each.get("type"), each.get("path")
        if not isinstance(name, str) or not isinstance(path, str) or not _is_plain(path):
            raise ModelError(f"{folder / 'modules.json'}: module {number} has no type and path")
        if number or not name.endswith(".Transformer"):
            modules.read(name, path)
    if modules.logits is not None:
        return PoolerContents(modules.logits, max_tokens=max_tokens)
    if not modules.types:
        raise ModelError(f"{folder / 'modules.json'} has no Pooling module")
    pooler = Pooler(
        types=modules.types,
        layers=tuple(modules.layers),
        size=modules.size,
        normalize=modules.normalize,
        generates=not is_encoder,
    )
    return PoolerContents(pooler, tuple(modules.entries), tuple(modules.files), max_tokens)


def family_architecture(config: Mapping[str, Any]) -> str:
    """Return the architecture with whose code the layers run.

    That of `Qwen3Model` and `Qwen3ForSequenceClassification` is `Qwen3ForCausalLM`, that of
    `BertForSequenceClassification` is `BertModel`.
    """
    name = first_architecture(config)
    for ending in ("ForSequenceClassification", "TextModel", "Model"):
        if name.endswith(ending):
            base = name.removesuffix(ending)
            for family in (f"{base}ForCausalLM", f"{base}Model"):
                if family in FAMILIES:
                    return family
    return name


def _is_encoder(config: Mapping[str, Any]) -> bool:
    """Return whether the model attends in both directions, so that it cannot generate."""
    family = FAMILIES.get(family_architecture(config))
    return family is not None and (family.is_encoder or config.get(_BIDIRECTIONAL_KEY) is True)


def _positions_of_roberta(config: Mapping[str, Any]) -> int | None:
    """Return the tokens for which a RoBERTa has positions, fewer than it says; None for others."""
    family = FAMILIES.get(family_architecture(config))
    rows, padding = config.get("max_position_embeddings"), config.get("pad_token_id")
    padding = 1 if padding is None else padding
    if family is None or family.module != "roberta" or type(rows) is not int:
        return None
    return max(rows - padding - 1, 1) if type(padding) is int else None


def _shorter(one: int | None, other: int | None) -> int | None:
    return min(one, other) if one is not None and other is not None else one or other


def _score_head(config: Mapping[str, Any]) -> Pooler | None:
    """Return the pooler of a model with a head of scores; None for other models."""
    architecture = first_architecture(config)
    if not architecture.endswith("ForSequenceClassification"):
        return None
    labels = labels_of(config)
    kind, layers = _head_layers(config)
    return Pooler(
        task="classify",
        types=(kind,),
        layers=layers,
        size=len(labels),
        activation=activation_of(config, len(labels)),
        labels=labels,
        generates=False,
    )


def _head_layers(config: Mapping[str, Any]) -> tuple[PoolingType, tuple[PoolerLayer, ...]]:
    """Return the pooling type before a head of scores, and the layers of the head."""
    family = FAMILIES.get(family_architecture(config))
    match family and family.module:
        case "bert":
            return "cls", (
                PoolerLayer("dense", "pooler.dense", "tanh"),
                PoolerLayer("dense", "classifier"),
            )
        case "roberta":
            return "cls", (
                PoolerLayer("dense", "classifier.dense", "tanh"),
                PoolerLayer("dense", "classifier.out_proj"),
            )
        case "modernbert":
            return _modernbert_head(config)
    return "last", (PoolerLayer("dense", "score"),)


def _modernbert_head(
    config: Mapping[str, Any],
) -> tuple[PoolingType, tuple[PoolerLayer, ...]]:
    kinds: dict[Any, PoolingType] = {"cls": "cls", "mean": "mean"}
    pooling = config.get("classifier_pooling", "cls")
    activations: dict[Any, Activation] = {"gelu": "gelu", "silu": "silu", "relu": "relu"}
    activation = config.get("classifier_activation", "gelu")
    eps = config.get("norm_eps") or 1e-5
    for key, value, known in (
        ("classifier_pooling", pooling, kinds),
        ("classifier_activation", activation, activations),
    ):
        if not isinstance(value, str) or value not in known:
            raise ModelError(f"{key} {shown(value)}: supported: {', '.join(known)}")
    if not isinstance(eps, float):
        raise ModelError(f"norm_eps {shown(eps)} is no number")
    return kinds[pooling], (
        PoolerLayer("dense", "head.dense", activations[activation]),
        PoolerLayer("norm", "head.norm", eps=eps),
        PoolerLayer("dense", "classifier"),
    )


def labels_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the scores, in order."""
    names = config.get("id2label")
    if isinstance(names, dict) and names:
        try:
            ordered = sorted((int(number), str(name)) for number, name in names.items())
        except ValueError:
            raise ModelError(f"id2label {shown(names)} has keys that are no numbers") from None
        if [number for number, _ in ordered] != list(range(len(ordered))):
            raise ModelError(f"id2label {shown(names)} leaves out a number")
        return tuple(name for _, name in ordered)
    number = config.get("num_labels", 2)
    if type(number) is not int or not 0 < number <= _MAX_LABELS:
        raise ModelError(f"num_labels {shown(number)} is no number of labels")
    return tuple(f"LABEL_{index}" for index in range(number))


def activation_of(config: Mapping[str, Any], num_labels: int) -> Activation:
    """Return the activation of the scores: that of a cross encoder, or what the labels ask for."""
    own = config.get("sentence_transformers")
    named = own.get("activation_fn") if isinstance(own, Mapping) else None
    named = named or config.get(_OLDER_ACTIVATION_KEY)
    if isinstance(named, str):
        if named not in _ACTIVATIONS:
            raise ModelError(f"activation_fn {shown(named)} is not supported")
        return _ACTIVATIONS[named]
    problem = config.get("problem_type")
    if problem == "regression":
        return "none"
    if problem == "multi_label_classification" or num_labels == 1:
        return "sigmoid"
    return "softmax"


def _is_plain(path: str) -> bool:
    """Return whether a path stays in the folder."""
    return not path.startswith("/") and ".." not in path.split("/")
