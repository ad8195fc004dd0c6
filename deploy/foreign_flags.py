"""Flags of vLLM, llama.cpp, SGLang and Ollama: what `tokend serve` makes of each.

    --enable-auto-tool-choice    NO_EFFECT   taken; a notice says why it changes nothing
    --task embed                 SAME        taken as --runner pooling
    --rope-scaling JSON          MISSING     refused; the reason names what is missing
    --ctx-size 8192              MEANT       refused; --max-model-len is suggested

The flags stand in foreign_flags.toml. Names are without dashes.
"""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple


class NoEffect(NamedTuple):
    """A flag that changes nothing here. reason: why, as the end of a sentence.

    values: the values for which that is true; None for any value, empty for a flag without one.
    """

    reason: str
    values: Sequence[str] | None = ()


_TABLES: Final = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def _each(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table with a key for each of the names that share one."""
    return {name: value for names, value in table.items() for name in names.split(", ")}


NO_EFFECT: Final[Mapping[str, NoEffect]] = {
    **{name: NoEffect(why) for name, why in _each(_TABLES["no_effect"]).items()},
    **{
        name: NoEffect(why, None)
        for name, why in _each(_TABLES["no_effect_with_any_value"]).items()
    },
    **{name: NoEffect(*entry) for name, entry in _each(_TABLES["no_effect_with"]).items()},
}
SAME: Final[Mapping[str, Mapping[str, Sequence[str]]]] = {
    **{name: {"": words} for name, words in _each(_TABLES["same"]).items()},
    **{name: _each(by_value) for name, by_value in _TABLES["same_with"].items()},
}
"""Name → value, or "" of a flag without one → flags of tokend."""

SYNONYMS: Final[Mapping[str, Mapping[str, str]]] = _TABLES["synonyms"]
"""Flag of tokend → word that vLLM takes for a value → that value."""

MISSING: Final[Mapping[str, str]] = _each(_TABLES["missing"])
"""Flags, also with a value, that ask for what is not here → the reason."""

MEANT: Final[Mapping[str, str]] = _each(_TABLES["meant"])
"""Flags, commands and options with another name here → that name."""
