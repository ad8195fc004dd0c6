"""adapter_config.json of PEFT: what it says, and which of it is not supported.

A key that changes the arithmetic is understood or refused by name; none is ignored.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from proto.errors import ModelError, shown

_CHANGES_BASE: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways to initialise an adapter that change the weights of the model, too."""
_OF_TRAINING: Final = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "task_type"),
        *("peft_type", "peft_version", "lora_dropout", "init_lora_weights", "loftq_config"),
        *("eva_config", "corda_config", "lora_ga_config", "velora_config", "runtime_config"),
        *("megatron_config", "megatron_core", "qalora_group_size", "r", "lora_alpha"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    }
)
"""Keys that name the model or the training, or that decide which tensors there are."""
_OF_ARITHMETIC: Final = (
    *("rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "lora_bias", "modules_to_save"),
    *("trainable_token_indices", "target_parameters", "ensure_weight_tying"),
)
"""Keys that are read, beside r and lora_alpha."""
_NAMES: Final = {
    "alora_invocation_tokens": "activated LoRA (aLoRA)",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "Arrow",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "layer_replication": "replicated layers",
    "fan_in_fan_out": "transposed weights",
}
"""Keys that are not supported when they are set, and what they ask for."""


@dataclass(frozen=True, kw_only=True)
class PeftConfig:
    """What adapter_config.json says about an adapter.

    facts: the keys that change its arithmetic. token_indices: by the name of the module; "" for the
    embedding. Others by PEFT's names.
    """

    path: str
    r: int
    lora_alpha: float
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    use_rslora: bool = False
    use_dora: bool = False
    target_modules: str | Sequence[str] | None = None
    exclude_modules: str | Sequence[str] | None = None
    modules_to_save: Sequence[str] = ()
    layers_to_transform: Sequence[int] | None = None
    layers_pattern: Sequence[str] = ()
    target_parameters: Sequence[str] = ()
    token_indices: Mapping[str, Sequence[int]] = field(default_factory=dict)
    ensure_weight_tying: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)

    def rank(self, module: str) -> int:
        """Return the rank of a module's adapter."""
        return int(_of_pattern(self.rank_pattern, module, self.r))

    def scale(self, module: str) -> float:
        """Return the factor of B A in a module."""
        rank = self.rank(module)
        alpha = _of_pattern(self.alpha_pattern, module, self.lora_alpha)
        return float(alpha / (math.sqrt(rank) if self.use_rslora else rank))

    def targets(self, module: str) -> bool:
        """Return whether the adapter changes the weight of a module, by its name in the model."""
        if self.exclude_modules and _names(self.exclude_modules, module):
            return False
        if any(re.match(rf"(^|.*\.){name}($|\..*)", module) for name in self.modules_to_save):
            return False
        if self.target_modules is None:
            return False
        if isinstance(self.target_modules, str):
            if self.target_modules == "all-linear":
                return True
            return re.fullmatch(self.target_modules, module) is not None
        if not _names(self.target_modules, module):
            return False
        if module in self.target_modules or self.layers_to_transform is None:
            return True
        patterns = self.layers_pattern or (r"[^.]*",)
        found = (re.match(rf"(?:^|.*?\.){each}\.(\d+)\.", module) for each in patterns)
        layer = next((int(match[1]) for match in found if match), None)
        return layer in self.layers_to_transform


def _names(modules: str | Sequence[str], module: str) -> bool:
    """Return whether a regular expression, or a list of names or their ends, means a module."""
    if isinstance(modules, str):
        return re.fullmatch(modules, module) is not None
    return module in modules or any(module.endswith(f".{name}") for name in modules)


def _of_pattern(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    for key, value in pattern.items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default


def read_peft_config(path: str, text: bytes) -> PeftConfig:
    """Return what the file says; raises ModelError for what is invalid or not supported."""
    try:
        config = json.loads(text)
        if not isinstance(config, dict):
            raise ValueError
    except (ValueError, RecursionError):
        raise ModelError(f"{path} is no JSON object") from None
    _refuse(path, config)
    reader = _Reader(path, config)
    rank_pattern = reader.pattern("rank_pattern")
    for key, rank in rank_pattern.items():
        if not isinstance(rank, int) or rank < 1:
            raise reader.wrong("rank_pattern", rank, f"the rank of {key} must be at least 1")
    modules = reader.names("modules_to_save")
    tokens = config.get("trainable_token_indices") or {}
    if isinstance(tokens, list):
        tokens = {"": tokens}
    if not isinstance(tokens, dict) or not all(map(_are_indices, tokens.values())):
        raise reader.wrong("trainable_token_indices", tokens, "a list of token ids is needed")
    layers = config.get("layers_to_transform")
    layers = [layers] if isinstance(layers, int) else layers
    if layers is not None and not _are_indices(layers):
        raise reader.wrong("layers_to_transform", layers, "a list of layers is needed")
    found = PeftConfig(
        path=path,
        r=reader.rank(),
        lora_alpha=reader.number("lora_alpha", 8),
        rank_pattern=rank_pattern,
        alpha_pattern=reader.pattern("alpha_pattern"),
        use_rslora=reader.flag("use_rslora"),
        use_dora=reader.flag("use_dora"),
        target_modules=reader.modules("target_modules"),
        exclude_modules=reader.modules("exclude_modules"),
        modules_to_save=modules,
        layers_to_transform=layers or None,
        layers_pattern=reader.names("layers_pattern"),
        target_parameters=reader.names("target_parameters"),
        token_indices=tokens,
        ensure_weight_tying=reader.flag("ensure_weight_tying"),
        facts={key: config[key] for key in ("r", "lora_alpha", *_OF_ARITHMETIC) if config.get(key)},
    )
    _check_patterns(reader, found)
    return found


def _check_patterns(reader: "_Reader", config: PeftConfig) -> None:
    """Raise ModelError for a regular expression that is none."""
    expressions = {
        "rank_pattern": config.rank_pattern,
        "alpha_pattern": config.alpha_pattern,
        "target_modules": config.target_modules,
        "exclude_modules": config.exclude_modules,
        "modules_to_save": config.modules_to_save,
        "layers_pattern": config.layers_pattern,
    }
    for key, value in expressions.items():
        for each in [value] if isinstance(value, str) else value or ():
            try:
                re.compile(each)
            except (re.error, RecursionError, OverflowError):
                raise reader.wrong(key, each, "it is no regular expression") from None


def _refuse(path: str, config: Mapping[str, Any]) -> None:
    """Raise ModelError for what is not supported."""
    if (kind := config.get("peft_type", "LORA")) != "LORA":
        raise ModelError(f"{path}: peft_type {shown(kind)} is not supported: LORA is")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise ModelError(
            f"{path}: init_lora_weights {shown(start)} changes the weights of the model, which all "
            "requests share: PEFT can save the adapter as LoRA "
            "(path_initial_model_for_weight_conversion)"
        )
    if config.get("bias", "none") != "none":
        raise ModelError(
            f"{path}: bias {shown(config['bias'])} changes the biases of the model: not supported"
        )
    for key, value in config.items():
        if key in _OF_TRAINING or key in _OF_ARITHMETIC or key == "bias" or not value:
            continue
        what = _NAMES.get(key, "this key is not known")
        raise ModelError(f"{path}: {shown(key)} {shown(value)}: {what}: not supported")


def _are_indices(values: object) -> bool:
    return isinstance(values, list) and all(type(each) is int and each >= 0 for each in values)


class _Reader:
    """Reads the keys of a configuration."""

    def __init__(self, path: str, config: Mapping[str, Any]) -> None:
        self._path = path
        self._config = config

    def wrong(self, key: str, value: object, rule: str) -> ModelError:
        return ModelError(f"{self._path}: {key} {shown(value)}: {rule}")

    def rank(self) -> int:
        value = self._config.get("r", 8)
        if type(value) is not int or value < 1:
            raise self.wrong("r", value, "a rank of at least 1 is needed")
        return value

    def number(self, key: str, default: float) -> float:
        value = self._config.get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self.wrong(key, value, "a finite number is needed")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self._config.get(key) or False
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false is needed")
        return value

    def names(self, key: str) -> list[str]:
        value = self._config.get(key) or []
        value = [value] if isinstance(value, str) else value
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self.wrong(key, value, "a list of names is needed")
        return value

    def modules(self, key: str) -> str | list[str] | None:
        value = self._config.get(key)
        return value if value is None or isinstance(value, str) else self.names(key)

    def pattern(self, key: str) -> dict[str, Any]:
        value = self._config.get(key) or {}
        if not isinstance(value, dict) or not all(
            type(each) in (int, float) and math.isfinite(each) for each in value.values()
        ):
            raise self.wrong(key, value, "an object of numbers is needed")
        return value
