"""Finds the language model in a folder that wraps it beside a vision or an audio part.

Its config.json has the settings of the language model in a `text_config` (older files: beside
`vision_config`), and some of them outside. `find` returns the configuration that the language model
would have in a folder of its own, with the defaults that transformers' configuration classes add.
`language_tensors` gives its tensors the names that they would have there, decided from the names
alone:

    in the file                                       here
    language_model.model.layers.0.mlp.…               model.layers.0.mlp.…
    model.language_model.embed_tokens.weight          model.embed_tokens.weight
    language_model.lm_head.weight                     lm_head.weight
    vision_tower.…, model.visual.…                    left out, or read by vision_files.py

So nothing behind these two knows of the other parts.
"""

import copy
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from deploy.models.prepared_folder import as_model_error, first_architecture
from deploy.models.quantised_folder import CONFIG_KEYS
from proto.errors import ModelError, shown
from proto.messages.prepared_model import TEXT_BODIES, TensorEntry
from worker.models.families import FAMILIES

_GENERATING: Final = ("ForConditionalGeneration", "ForCausalLM")
"""Endings of the names of architectures with a language head."""
TEXT_KEYS: Final = ("text_config", "decoder", "generator")
"""Where transformers looks for the configuration of a language model."""
_OUTER_KEYS: Final = ("bos_token_id", "eos_token_id", "auto_map", *CONFIG_KEYS)
"""Settings of the language model that count where they stand outside of its own configuration."""
_FIXED_SETTINGS: Final[dict[str, dict[str, Any]]] = {"qwen3_vl_moe_text": {"norm_topk_prob": True}}
"""Settings that transformers fixes for a type of language model, by model_type."""
_EMBEDDING: Final = re.compile(r"(.+)\.embed_tokens\.[^.]+")
_BODY_OF_OPT: Final = "model.decoder"


@dataclass(frozen=True)
class WrappedModel:
    """A language model in the configuration of a larger one.

    architecture: of the larger one. outer: its configuration with all defaults.
    config: of the language model; its `tie_word_embeddings` holds if the folder has no head, as in
    transformers.
    other_parts: "vision", "audio" and so on.
    """

    architecture: str
    outer: dict[str, Any]
    config: dict[str, Any]
    other_parts: tuple[str, ...]


def find(config: Mapping[str, Any]) -> WrappedModel | None:
    """Return the language model in a configuration that wraps one; None for any other.

    Raises ModelError naming what is missing in a configuration that should wrap one, and for a
    language model whose type neither tokend nor transformers has.
    """
    architecture, model_type = first_architecture(config), config.get("model_type")
    if not architecture.endswith(_GENERATING) or architecture in FAMILIES:
        return None
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        return None
    cls = CONFIG_MAPPING[model_type]
    keys = [key for key in TEXT_KEYS if key in cls.sub_configs]
    others = [key for key in cls.sub_configs if key not in keys]
    if not keys or not others:  # a model around a language model alone is something else
        return None
    _check_text_config(config, keys[0], architecture)
    with as_model_error("config.json"):
        outer = cls.from_dict(cls._decode_special_floats(copy.deepcopy(dict(config))))
        text = outer.get_text_config(decoder=True)
        if outer.is_encoder_decoder or text.is_encoder_decoder:
            return None
        settings: dict[str, Any] = json.loads(text.to_json_string(use_diff=False))
        whole: dict[str, Any] = json.loads(outer.to_json_string(use_diff=False))
    settings = _as_causal_model(settings, architecture)
    inner = config.get(keys[0]) or {}
    for key in _OUTER_KEYS:
        given = [each[key] for each in (config, inner) if each.get(key) is not None]
        if given:
            settings[key] = given[0]
    ties = (getattr(each, "tie_word_embeddings", False) for each in (outer, text))
    settings["tie_word_embeddings"] = any(ties)
    parts = (key.removesuffix("_config") for key in others if getattr(outer, key, None))
    return WrappedModel(architecture, whole, settings, tuple(parts))


def _check_text_config(config: Mapping[str, Any], key: str, architecture: str) -> None:
    """Raise ModelError unless the settings of the language model are there.

    transformers would take those of some model. Older files have them beside the other parts'.
    """
    value = config.get(key)
    if value is None and config.get("num_hidden_layers") is None:
        raise ModelError(
            f"config.json has no {key}, where {architecture} has the settings of its language model"
        )
    if value is not None and not isinstance(value, Mapping):
        raise ModelError(f"config.json: {key} = {shown(repr(value))}: an object is needed")


def _as_causal_model(settings: dict[str, Any], owner: str) -> dict[str, Any]:
    """Return the settings of a language model with the architecture that computes it.

    Raises ModelError if there is none.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    model_type: Any = settings.get("model_type")
    for architecture, family in FAMILIES.items():
        if model_type in family.wrapped_types:
            model_types = [name for name, causal in CAUSAL.items() if causal == architecture]
            changes = {"model_type": model_types[0], "architectures": [architecture]}
            return settings | _FIXED_SETTINGS.get(model_type, {}) | changes
    if model_type in TEXT_BODIES:
        return settings | {"architectures": [owner]}
    if model_type not in CAUSAL:
        raise ModelError(
            f"{owner}: its language model has the model_type {shown(repr(model_type))}, which "
            f"neither tokend nor transformers {transformers.__version__} has as a causal language "
            "model"
        )
    return settings | {"architectures": [CAUSAL[model_type]]}


def language_tensors(entries: Iterable[TensorEntry], architecture: str) -> list[TensorEntry]:
    """Return the tensors of the language model in a folder of this architecture, renamed.

    The body of the language model is where there are both `embed_tokens` and `layers.0`; the head
    is an `lm_head` there or further outside. Raises ModelError unless there is one such body.
    """
    entries = list(entries)
    body = _body_of([entry.name for entry in entries], architecture)
    parts = body.split(".")
    heads = tuple(".".join((*parts[:depth], "lm_head.")) for depth in range(len(parts) + 1))
    target = _BODY_OF_OPT if body.endswith(".decoder") else "model"

    def renamed(name: str) -> str:
        """Return the name in a folder of the language model alone; "" for another part's."""
        if name.startswith(heads):
            return name[name.index("lm_head.") :]
        return target + name.removeprefix(body) if name.startswith(f"{body}.") else ""

    return [
        msgspec.structs.replace(entry, name=name)
        for entry in entries
        if (name := renamed(entry.name))
    ]


def _body_of(names: Sequence[str], owner: str) -> str:
    """Return the prefix of a language model's tensors, without its last dot."""
    tables = {match[1] for name in names if (match := _EMBEDDING.fullmatch(name))}
    layers = {prefix: f"{prefix}.layers.0." for prefix in sorted(tables)}
    found = [prefix for prefix in layers if any(name.startswith(layers[prefix]) for name in names)]
    if len(found) != 1:
        raise ModelError(
            f"{owner}: the tensors of a language model are PREFIX.embed_tokens and PREFIX.layers.0 "
            f"with one PREFIX, which this folder has for {', '.join(found) or 'none'}"
        )
    return found[0]
