"""Reads a Hugging Face configuration without ignoring any key that changes the arithmetic.

A family reads the keys that it understands; refuse_unread_keys then looks at the others. Keys that
change no number pass, and so does a key whose value switches its feature off; a key whose name
suggests arithmetic is refused by name.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from proto.errors import ModelError, shown

_ARITHMETIC: Final = re.compile(
    r"scal|multiplier|mup|cap|rotary|rope|window|chunk|sink|norm|bias|expert|router|moe|parallel"
    r"|alibi|clip|clamp|quant|compress|attn|attention|act|head|layer|lora|position|conv|embed",
)
"""A key with one of these in its name may change results."""

_HARMLESS: Final = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_attn_implementation_internal",
        "attn_implementation",
        "is_llama_config",
        "layerdrop",
        "output_router_logits",
        "pretraining_tp",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "sbert_ce_default_activation_function",
        "use_sliding_window",
    }
)
"""Names that match _ARITHMETIC although they change nothing, or only through another key."""

_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "partial_rotary_factor": (1, 1.0),
    "position_embedding_type": ("absolute", "rope"),
}
"""Values, beside null, false, zero and empty, at which a key changes nothing."""


MOST: Final = (1 << 31) - 1
"""Sizes and counts fit 32 bits."""
_LARGEST: Final = 3e38


class ConfigReader:
    """One configuration, and which of its keys have been read.

    Values are checked for their type: a string instead of a number raises ModelError naming key
    and value.

    max_model_len: tokens of the longest request that will be served; None for the model's length.
    """

    def __init__(
        self, config: Mapping[str, Any], where: str = "config", max_model_len: int | None = None
    ) -> None:
        self.max_model_len = max_model_len
        self._config = config
        self._where = where
        self._read: set[str] = set()

    def get(self, key: str) -> Any:
        """Return the raw value, or None if it is missing."""
        self._read.add(key)
        return self._config.get(key)

    def integer(
        self, key: str, default: int | None = None, least: int = 1, most: int = MOST
    ) -> int:
        """Return a whole number from `least` to `most`."""
        value = self.get(key)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.refusal(key, value, f"a whole number of at least {least} is needed")
        if value > most:
            raise self.refusal(key, value, f"at most {most} is supported")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number above 0 that fits float32."""
        value = self.get(key)
        if value is None:
            value = default
        if not _is_positive(value):
            raise self.refusal(key, value, "a number above 0 is needed")
        return float(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of numbers above 0 that fit float32."""
        values = self.get(key)
        if not isinstance(values, list) or not values or not all(map(_is_positive, values)):
            raise self.refusal(key, values, "a list of numbers above 0 is needed")
        return tuple(map(float, values))

    def soft_cap(self, key: str, default: float | None = None) -> float:
        """Return a number above 0 that fits float32, or 0 if the key is null, and so by default."""
        if self.get(key) is None and (key in self._config or default is None):
            return 0.0
        return self.number(key, default)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            value = default
        if not isinstance(value, bool):
            raise self.refusal(key, value, "true or false is needed")
        return value

    def mapping(self, key: str) -> Mapping[str, Any]:
        """Return an object; an empty one if it is missing or null."""
        value = self.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.refusal(key, value, "an object is needed")
        return value

    def must_be(self, key: str, *allowed: Any) -> None:
        """Raise ModelError unless the key is missing or has one of these values."""
        value = self.get(key)
        if value is not None and value not in allowed:
            works = ", ".join(repr(value) for value in allowed)
            raise self.refusal(key, value, f"supported: {works}")

    def refuse_unread_keys(self) -> None:
        """Raise ModelError for the first unread key that may change the arithmetic."""
        for key, value in self._config.items():
            if key in self._read or key in _HARMLESS or "dropout" in key:
                continue
            if not value or value in _NEUTRAL.get(key, ()):
                continue
            if _ARITHMETIC.search(key):
                raise self.refusal(key, value, "not supported")

    def refuse_unread(self) -> None:
        """Raise ModelError for the first key that was not read and is not null."""
        for key, value in self._config.items():
            if key not in self._read and value is not None:
                raise self.refusal(key, value, "not supported")

    def refusal(self, key: str, value: Any, reason: str) -> ModelError:
        """Return the error that names a key, its value and the reason."""
        return ModelError(f"{self._where}: {shown(key)} = {shown(repr(value))}: {reason}")


def _is_positive(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value <= _LARGEST  # type: ignore[operator]
