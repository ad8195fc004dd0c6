"""Configuration of speculative decoding: --speculative-config and --speculative-max-tokens.

The keys are those of vLLM's option of the same name. A key that is unknown, or has no effect with
the methods that are given, is refused by name.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

import msgspec

from proto.errors import ConfigError, shown
from proto.runtime.plugins import target_of
from proto.settings.json_flag import flag_error, parse_json_flag

FIELD: Final = "speculative_config"
MAX_TOKENS: Final = 64
"""Longest draft."""
_MAX_DEPTH: Final = 256
HEAD_METHODS: Final = ("eagle", "eagle3")
"""Methods whose drafts come from a head on the hidden states of the model itself."""
MODEL_METHODS: Final = ("draft_model", *HEAD_METHODS)
"""Methods whose drafts come from a model in the workers."""
METHODS: Final = ("suffix", "ngram", "grammar", *MODEL_METHODS)
DEFAULT_METHODS: Final = ("suffix", "grammar")
"""The methods by default where a token has the same bits in any step; elsewhere none."""
DRAFT_POSITIONS: Final = 64
"""Positions that a step on a CPU may sample beyond --max-num-seqs."""
_KEYS_OF: Final[dict[str, tuple[str, ...]]] = {
    "ngram": ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"),
    "suffix": (
        "num_speculative_tokens",
        "suffix_decoding_max_tree_depth",
        "suffix_decoding_max_cached_requests",
        "suffix_decoding_max_spec_factor",
        "suffix_decoding_min_token_prob",
    ),
    "grammar": (),
    **dict.fromkeys(
        MODEL_METHODS,
        ("num_speculative_tokens", "model", "draft_tensor_parallel_size", "max_model_len"),
    ),
}
_REFUSED_KEYS: Final = {
    "quantization": "the weights of a draft model are held as --cpu-weights says",
    "revision": "name a folder or a file that has the revision",
}
_DEFAULT_NGRAM: Final = 5


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which drafts are made.

    methods: of METHODS, or names of proposers from outside; empty for no speculation.
    max_tokens: of any draft.
    num_speculative_tokens: of a draft by any method but grammar.
    prompt_lookup_min, prompt_lookup_max: lengths of the match that ngram continues.
    suffix_decoding_max_tree_depth: length of a match beyond which it counts as equal.
    suffix_decoding_max_cached_requests: outputs to keep of each tenant.
    suffix_decoding_max_spec_factor: tokens of a draft for each token of the match.
    suffix_decoding_min_token_prob: probability, by counts, of a token and all before it.
    model: of the method with a model, as --model names one.
    draft_tensor_parallel_size: ranks of that model; None for those of the model itself.
    max_model_len: tokens beyond which a sequence has no drafts by that model; None for its own
        limit.
    """

    methods: tuple[str, ...] = ()
    max_tokens: int = 16
    num_speculative_tokens: int = 16
    prompt_lookup_min: int = _DEFAULT_NGRAM
    prompt_lookup_max: int = _DEFAULT_NGRAM
    suffix_decoding_max_tree_depth: int = 64
    suffix_decoding_max_cached_requests: int = 1_000
    suffix_decoding_max_spec_factor: float = 2.0
    suffix_decoding_min_token_prob: float = 0.1
    model: str | None = None
    draft_tensor_parallel_size: int | None = None
    max_model_len: int | None = None

    @property
    def model_method(self) -> str:
        """The method of METHODS whose drafts come from a model; "" if there is none."""
        return next((method for method in self.methods if method in MODEL_METHODS), "")


@lru_cache
def parse_speculative_config(
    text: str | None, max_tokens: int, default: tuple[str, ...] = ()
) -> SpeculativeConfig:
    """Parse --speculative-config, a JSON text, for drafts of at most max_tokens.

    default: the methods without a text. Raises ConfigError naming the key at fault.
    """
    if not 1 <= max_tokens <= MAX_TOKENS:
        raise ConfigError(
            f"--speculative-max-tokens must be in [1, {MAX_TOKENS}], got {shown(max_tokens)}"
        )
    if text is None:
        return SpeculativeConfig(
            methods=default, max_tokens=max_tokens, num_speculative_tokens=max_tokens
        )
    document = parse_json_flag(FIELD, text, _EXAMPLE)
    methods = _methods(document)
    _check_keys(document, methods)
    keys = {key: value for key, value in document.items() if key != "method"}
    keys.setdefault("num_speculative_tokens", max_tokens)
    if isinstance(keys["num_speculative_tokens"], int):
        max_tokens = min(MAX_TOKENS, max(max_tokens, keys["num_speculative_tokens"]))
    if "ngram" in methods:
        shortest, longest = keys.get("prompt_lookup_min"), keys.get("prompt_lookup_max")
        keys["prompt_lookup_min"] = shortest or longest or _DEFAULT_NGRAM
        keys["prompt_lookup_max"] = longest or shortest or _DEFAULT_NGRAM
        for key, value in (("prompt_lookup_min", shortest), ("prompt_lookup_max", longest)):
            if value is not None:
                keys[key] = value
    for key, value in keys.items():
        _check_type(key, value)
    config = SpeculativeConfig(methods=methods, max_tokens=max_tokens, **keys)
    _check_values(config)
    return config


_EXAMPLE: Final = """'{"method": "ngram", "num_speculative_tokens": 4}'"""


def _methods(document: Mapping[str, Any]) -> tuple[str, ...]:
    """Read `method`: a name, names joined by +, a list of names, or none."""
    given = document.get("method", "draft_model" if "model" in document else None)
    names = given.split("+") if isinstance(given, str) else given
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or not names:
        raise flag_error(FIELD, f": method takes a name, or names joined by +, got {shown(given)}")
    names = [name.strip() for name in names]
    if names == ["none"]:
        return ()
    for name in names:
        if name not in METHODS and not target_of("draft_proposer", name):
            raise flag_error(
                FIELD, f": method {shown(name)} is unknown; there are {', '.join(METHODS)}, none"
            )
        if names.count(name) > 1:
            raise flag_error(FIELD, f": method names {name} twice")
    if len(with_model := [name for name in names if name in MODEL_METHODS]) > 1:
        raise flag_error(
            FIELD, f": method names {' and '.join(with_model)}, and there is one draft model"
        )
    return tuple(names)


def _check_keys(document: Mapping[str, Any], methods: tuple[str, ...]) -> None:
    known = dict.fromkeys(key for keys in _KEYS_OF.values() for key in keys)
    outside = ("num_speculative_tokens",)
    allowed = {"method", *(key for method in methods for key in _KEYS_OF.get(method, outside))}
    for key in document:
        if key in allowed:
            continue
        if key in _REFUSED_KEYS:
            raise flag_error(FIELD, f": {key} is not supported: {_REFUSED_KEYS[key]}")
        if key in known:
            users = [method for method, keys in _KEYS_OF.items() if key in keys]
            raise flag_error(FIELD, f": {key} goes with method {' or '.join(users)}")
        raise flag_error(FIELD, f" has no {shown(key)}; it has method, {', '.join(known)}")
    for method in methods:
        if method in MODEL_METHODS and "model" not in document:
            raise flag_error(FIELD, f": method {method} needs the key model")


def _check_type(key: str, value: Any) -> None:
    is_number = type(value) in (int, float)
    if key in ("suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob"):
        if not is_number:
            raise flag_error(FIELD, f": {key} takes a number, got {shown(value)}")
    elif key == "model":
        if not isinstance(value, str) or not value:
            raise flag_error(FIELD, f": model takes a name or a path, got {shown(value)}")
    elif type(value) is not int:
        raise flag_error(FIELD, f": {key} takes a whole number, got {shown(value)}")


def _check_values(config: SpeculativeConfig) -> None:
    bounds: tuple[tuple[str, float, float], ...] = (
        ("num_speculative_tokens", 1, MAX_TOKENS),
        ("prompt_lookup_min", 1, MAX_TOKENS),
        ("prompt_lookup_max", 1, MAX_TOKENS),
        ("suffix_decoding_max_tree_depth", 2, _MAX_DEPTH),
        ("suffix_decoding_max_cached_requests", 0, 1_000_000),
        ("suffix_decoding_max_spec_factor", 0.1, MAX_TOKENS),
        ("suffix_decoding_min_token_prob", 0, 1),
        ("draft_tensor_parallel_size", 1, 1024),
        ("max_model_len", 1, 1 << 31),
    )
    for key, low, high in bounds:
        value = getattr(config, key)
        if value is not None and not low <= value <= high:
            raise flag_error(FIELD, f": {key} must be in [{low:g}, {high:g}], got {shown(value)}")
    if config.prompt_lookup_min > config.prompt_lookup_max:
        raise flag_error(
            FIELD,
            f": prompt_lookup_min ({config.prompt_lookup_min}) must not be more than "
            f"prompt_lookup_max ({config.prompt_lookup_max})",
        )
