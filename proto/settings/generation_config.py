"""Sampling defaults of the served model: what holds for a field that a request does not give.

They come from generation_config.json of the model's folder or the metadata of its GGUF file, from
--generation-config instead, and from --override-generation-config. `do_sample` has no effect.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from proto.errors import ConfigError, InvalidRequestError, ModelError, shown
from proto.messages.logit_edits import LOGIT_EDIT_NUMBERS
from proto.messages.prepared_model import ModelSetting, PreparedModel, read_model_file
from proto.messages.sampling_params import SAMPLING_NUMBERS
from proto.settings.config import ModelConfig, flag_name

FILE_NAME: Final = "generation_config.json"
GGUF_PREFIX: Final = "general.sampling."
_MAX_TOKENS: Final = "max_tokens"
_KEYS: Final = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")},
    "max_new_tokens": _MAX_TOKENS,
}
_FIELDS: Final = _KEYS | {
    GGUF_PREFIX + "temp": "temperature",
    GGUF_PREFIX + "top_k": "top_k",
    GGUF_PREFIX + "top_p": "top_p",
    GGUF_PREFIX + "min_p": "min_p",
    GGUF_PREFIX + "penalty_repeat": "repetition_penalty",
}
"""Key of a model's settings → field of a request."""
_LIMIT: Final = 1 << 53
_WINDOW: Final = GGUF_PREFIX + "penalty_last_n"
_NOT_APPLIED: Final[Mapping[str, tuple[Any, ...]]] = {
    "num_beams": (1,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "penalty_alpha": (0.0,),
    "no_repeat_ngram_size": (0,),
    "min_new_tokens": (0,),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "bad_words_ids"), ("[]",)),
    "top_h": (),
    GGUF_PREFIX + "sequence": (),
    GGUF_PREFIX + "xtc_probability": (0.0,),
    GGUF_PREFIX + "xtc_threshold": (),
    _WINDOW: (0, -1),
    GGUF_PREFIX + "mirostat": (0,),
    GGUF_PREFIX + "mirostat_tau": (),
    GGUF_PREFIX + "mirostat_eta": (),
}
"""Keys that change the sampling elsewhere and have no equivalent here → values without effect."""


class GenerationDefaults(NamedTuple):
    """The defaults of a model. values: by field of a request. not_applied: keys without effect.

    source: where the values are from, for people.
    """

    values: Mapping[str, int | float] = {}
    source: str = ""
    not_applied: tuple[str, ...] = ()

    @property
    def max_tokens(self) -> int | None:
        limit = self.values.get(_MAX_TOKENS)
        return None if limit is None else int(limit)

    def __str__(self) -> str:
        """Return them in words; "" for a model without."""
        values = ", ".join(f"{name} {value}" for name, value in self.values.items())
        parts = [f"{values} ({self.source})"] if values else []
        if self.not_applied:
            parts.append(f"not applied: {', '.join(self.not_applied)}")
        return "; ".join(parts)


NO_DEFAULTS: Final = GenerationDefaults()


def model_settings(settings: Mapping[str, Any]) -> tuple[ModelSetting, ...]:
    """Return the keys about sampling, for the manifest; a value that is no scalar as text."""
    known = _FIELDS.keys() | _NOT_APPLIED.keys()
    return tuple((key, _scalar(value)) for key, value in settings.items() if key in known)


def _scalar(value: Any) -> int | float | str | None:
    is_number = isinstance(value, int | float) and abs(value) < _LIMIT
    return value if value is None or is_number else shown(value)


def generation_defaults(config: ModelConfig, model: PreparedModel) -> GenerationDefaults:
    """Return the defaults of a served model; raises ConfigError or ModelError naming the key."""
    settings, path, source = _settings(config, model)
    try:
        values: dict[str, int | float | None] = dict(_values(settings))
    except ValueError as error:
        raise ModelError(f"{path}: {error}; --generation-config vllm ignores the file") from None
    if settings.get(_WINDOW) == 0:  # a penalty of no tokens
        values.pop("repetition_penalty", None)
    overrides = parse_overrides(config.override_generation_config)
    sources = [source] if values.keys() - overrides.keys() else []
    if overrides:
        sources.append(flag_name("override_generation_config"))
    merged = values | overrides
    return GenerationDefaults(
        {name: value for name in _KEYS.values() if (value := merged.get(name)) is not None},
        ", ".join(sources),
        tuple(
            key
            for key, neutral in _NOT_APPLIED.items()
            if settings.get(key) is not None and settings[key] not in neutral
        ),
    )


def parse_overrides(text: str | None) -> dict[str, int | float | None]:
    """Return the values of --override-generation-config by field; raise ConfigError.

    None is the value of a field that is to have no default.
    """
    field = "override_generation_config"
    if text is None:
        return {}
    try:
        settings = json.loads(text)
        if not isinstance(settings, dict):
            raise ValueError("must be a JSON object")
        for key in settings:
            if key not in _KEYS:
                raise ValueError(f"{shown(key)} is none of {', '.join(_KEYS)}")
        return dict.fromkeys(_KEYS[key] for key in settings) | dict(_values(settings))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{flag_name(field)}: {error}") from None


def _settings(config: ModelConfig, model: PreparedModel) -> tuple[Mapping[str, Any], str, str]:
    """Return the settings before overrides, their file for errors, and their source for people."""
    name = config.generation_config
    if name == "vllm":
        return {}, "", ""
    if name == "auto":
        settings = dict(model.generation_settings)
        if any(key.startswith(GGUF_PREFIX) for key in settings):
            return settings, model.source, f"{GGUF_PREFIX}* of the GGUF file"
        return settings, f"{model.source}/{FILE_NAME}", FILE_NAME
    path = Path(name, FILE_NAME)
    try:
        settings = json.loads(read_model_file(path))
    except OSError as error:
        raise _not_readable(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise _not_readable(f"{path} is not valid JSON: {shown(error)}") from None
    if not isinstance(settings, dict):
        raise _not_readable(f"{path} must contain a JSON object")
    return dict(model_settings(settings)), str(path), str(path)


def _not_readable(reason: str) -> ConfigError:
    field = "generation_config"
    return ConfigError(f"{flag_name(field)} takes auto, vllm or a folder: {reason}")


def _values(settings: Mapping[str, Any]) -> Iterator[tuple[str, int | float]]:
    """Yield field and value of the keys that are not null; raises ValueError naming the key."""
    for key, value in settings.items():
        if key not in _FIELDS or value is None:
            continue
        field = _FIELDS[key]
        if type(value) not in (int, float):
            raise ValueError(f"{key} must be a number, got {shown(json.dumps(value))}")
        if number := (SAMPLING_NUMBERS | LOGIT_EDIT_NUMBERS).get(field):
            try:
                number.check(key, value)
            except InvalidRequestError as error:
                raise ValueError(error.message) from None
            yield field, float(value)
            continue
        lowest = 1 if field == _MAX_TOKENS else -1
        if not (lowest <= value < _LIMIT and value == int(value)):
            raise ValueError(f"{key} must be a whole number of at least {lowest}, got {value}")
        yield field, int(value)
