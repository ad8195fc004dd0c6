"""Flags of `tokend serve`, derived from the configuration Structs.

A field is a flag, the string below it is its help, its type defines the allowed values. `parse`
reads the command line, `read_file` a YAML file, `build` makes a ServeConfig of both.
"""

import contextlib
import difflib
import json
import re
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from types import MappingProxyType
from typing import Any, Final, Literal

from deploy.foreign_flags import MEANT, MISSING, NO_EFFECT, SAME, SYNONYMS
from proto.errors import ConfigError, shown
from proto.runtime.plugins import target_of
from proto.settings import config
from proto.settings.config import PARTS, SECRET_FIELDS, LogFormat, ServeConfig, flag_name
from proto.settings.config_checks import validate
from proto.settings.field_texts import texts_below_fields
from worker.models.families import use_families

BYTE_FIELDS: Final = frozenset(
    {"kv_cache_memory", "sched_trace_max_bytes", "max_image_bytes", "media_memory"}
)
"""Fields in bytes, whose values may have a suffix K, M, G or T."""

COUNT_FIELDS: Final = frozenset({"max_model_len", "max_num_batched_tokens"})
"""Fields whose numbers may have a suffix as in vLLM: 8k is 8,000 and 8K is 8,192."""

NAME_FIELDS: Final = frozenset({"served_model_name"})
"""Fields with one or more names, which may contain commas."""

PAIR_FIELDS: Final = frozenset({"lora_modules"})
"""Fields with one or more words NAME=PATH, or JSON objects; both may contain commas."""

HIDDEN: Final = "***"

Kind = Literal["bool", "int", "float", "bytes", "choice", "part", "str", "list"]
_KINDS: Final[Mapping[Any, Kind]] = {
    bool: "bool",
    float: "float",
    int: "int",
    str: "str",
    tuple[str, ...]: "list",
}
"""Type of a field → kind of its flag."""

_PAIR: Final = re.compile(r"\{|[^-/][^=]*=")

_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_YAML_TYPES: Final = {
    "int": "a whole number",
    "bytes": "a whole number",
    "float": "a number such as 0.9",
    "list": "a list of texts",
}
_MAX_VALUES: Final = {"int": (1 << 64) - 1, "bytes": (1 << 63) - 1, "float": 10**9}
"""Largest numbers that messages can carry, and seconds that timers can wait (30 years)."""
_WHOLE: Final = re.compile(r"[+-]?[0-9]{1,20}")
_FRACTION: Final = re.compile(r"[0-9]{1,20}(\.[0-9]*)?|\.[0-9]+")
_COUNT: Final = re.compile(r"(?:([0-9]{1,20})([KMGT])|([0-9]{1,20}(?:\.[0-9]{1,20})?)([kmgt]))")
_BYTES: Final = re.compile(r"([0-9]{1,20})\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)


ALIASES: Final[Mapping[str, str]] = {
    "-dp": "--data-parallel-size",
    "-tp": "--tensor-parallel-size",
}
"""Short names of flags, those of vLLM."""

_MEANT: Final = {("--attention-backend", "reference"): "--device reference"}
"""Values that flags had → the flag that does it now."""


@dataclass(frozen=True)
class Flag:
    """One setting.

    section, field: its place in ServeConfig. kind: type of its values.
    choices: allowed words, for the kind "choice"; built-in names, for the kind "part".
    optional: whether it may be None.
    """

    section: str
    field: str
    kind: Kind
    choices: tuple[str, ...]
    optional: bool
    default: Any

    @property
    def name(self) -> str:
        return flag_name(self.field)

    @property
    def negation(self) -> str:
        """The flag that turns a bool off, such as --no-page."""
        return "--no-" + self.name.removeprefix("--")

    def from_text(self, text: str) -> Any:
        """Parse a value of the command line; raises ConfigError."""
        if self.field in COUNT_FIELDS and (count := _COUNT.fullmatch(text)):
            whole, binary, number, decimal = count.groups()
            if binary:
                return self._within(int(whole) << 10 * ("KMGT".index(binary) + 1))
            return self._within(int(Decimal(number) * 1000 ** ("kmgt".index(decimal) + 1)))
        if self.optional and self.field == "max_model_len" and text in ("auto", "-1"):
            return None
        if self.kind == "int":
            if not _WHOLE.fullmatch(text):
                raise self._error("a whole number", text)
            return self._within(int(text))
        if self.kind == "float":
            if not _FRACTION.fullmatch(text):
                is_negative = _FRACTION.fullmatch(text.removeprefix("-"))
                raise self._error("0 or more" if is_negative else "a number such as 0.9", text)
            return self._within(float(text))
        if self.kind == "bytes":
            match = _BYTES.fullmatch(text)
            if match is None:
                raise self._error("a number of bytes such as 512M or 4G", text)
            return self._within(int(match[1]) * _UNITS[match[2].upper()])
        if self.field in NAME_FIELDS or (self.field in PAIR_FIELDS and text[:1] != "["):
            return (text,)
        if self.kind == "list":
            return self._list_from_text(text)
        text = SYNONYMS.get(self.name, {}).get(text, text)
        if (
            self.kind in ("choice", "part")
            and text not in self.choices
            and not (self.kind == "part" and target_of(PARTS[self.field][0], text))
        ):
            outside = ", or module:name" if self.kind == "part" else ""
            meant = _MEANT.get((self.name, text))
            instead = "" if meant is None else f"; {meant} is meant"
            names = ", ".join(self.choices)
            raise self._error(f"one of {names}{outside}{instead}", text)
        return text

    def from_yaml(self, value: Any) -> Any:
        """Convert a YAML scalar; raises ConfigError."""
        if value is None:
            if self.field in SECRET_FIELDS or self.field.endswith("_key_file"):
                raise ConfigError(f"{self.name} must not be empty", self.field)
            if self.optional:
                return None
            raise ConfigError(
                f"{self.name} must not be null; omit the key to use the default", self.field
            )
        if self.kind == "bool":
            if not isinstance(value, bool):
                raise self._error("true or false", value)
            return value
        if self.kind == "list" and isinstance(value, list):
            return self._list(value)
        if self.kind in ("int", "bytes") and type(value) is int:
            return self._within(value)
        if self.kind == "float" and type(value) in (int, float):
            return self.from_text(str(value))
        if not isinstance(value, str):
            raise self._error(_YAML_TYPES.get(self.kind, "text, in quotes"), value)
        return self.from_text(value)

    def _list_from_text(self, text: str) -> tuple[str, ...]:
        """Parse a JSON list of strings, or words with commas between them."""
        if not text.startswith("["):
            return tuple(word.strip() for word in text.split(",") if word.strip())
        try:
            return self._list(json.loads(text))
        except (ValueError, RecursionError):
            raise self._error('a list such as \'["a", "b"]\' or a,b', text) from None

    def _list(self, value: list[Any]) -> tuple[str, ...]:
        if not all(isinstance(member, str) for member in value):
            raise self._error("a list of texts", value)
        return tuple(value)

    def _within(self, value: float) -> float:
        """Return the number; raises ConfigError if it is out of range."""
        maximum = _MAX_VALUES[self.kind]
        if not -1 << 63 <= value <= maximum:
            raise self._error(f"at most {maximum:,}", value)
        return value

    def _error(self, expected: str, value: Any) -> ConfigError:
        given = "" if self.field in SECRET_FIELDS else f", not {shown(repr(value))}"
        return ConfigError(f"{self.name} takes {expected}{given}", self.field)


@dataclass(frozen=True)
class ServeArguments:
    """Parsed command line of `tokend serve`. values: by field. With `help`, values are empty.

    notices: about flags of other servers that have no effect.
    """

    values: Mapping[str, Any]
    config_file: str | None = None
    help: bool = False
    notices: Sequence[str] = ()


def all_flags() -> tuple[Flag, ...]:
    """Return a flag for every field of every section, in the order of the Structs."""
    sections = typing.get_type_hints(ServeConfig)
    return tuple(
        _flag(section, field, hint, default)
        for section, struct in sections.items()
        for (field, hint), default in zip(
            typing.get_type_hints(struct).items(), struct.__struct_defaults__, strict=True
        )
    )


def parse(words: Sequence[str]) -> ServeArguments:
    """Parse the command line of `tokend serve`; raises ConfigError for the first error.

    Words after a name of --served-model-name are further names, if the model stands before them;
    so are those after --lora-modules that are NAME=PATH or JSON.
    """
    by_name = {flag.name: flag for flag in all_flags()}
    negations = {flag.negation: flag for flag in by_name.values() if flag.kind == "bool"}
    values: dict[str, Any] = {}
    config_file = None
    notices: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, attached = _split(word)
        if word in ("-h", "--help"):
            return ServeArguments({}, help=True)
        if not word.startswith("-") or word == "-":
            _set_model(values, word)
        elif name == "--config":
            config_file = attached if equals else _operand(name, rest)
        elif name in negations or (name in by_name and by_name[name].kind == "bool"):
            if equals or (rest and rest[0].lower() in ("true", "false")):
                raise ConfigError(f"{name} takes no value; {_opposite(name)} is its opposite")
            flag = negations.get(name) or by_name[name]
            values[flag.field] = name not in negations
        elif name in by_name:
            text = attached if equals else _operand(name, rest)
            value = by_name[name].from_text(text)
            if name == "--model":
                _set_model(values, value)
            while by_name[name].field in NAME_FIELDS and "model" in values and _has_operand(rest):
                value += (rest.pop(0),)
            while by_name[name].field in PAIR_FIELDS and rest and _PAIR.match(rest[0]):
                value += (rest.pop(0),)
            values[by_name[name].field] = value
        else:
            known = negations if name.startswith("--no-") else [*by_name, "--config", "--help"]
            same, notice = _foreign(name, attached if equals else None, rest, known)
            rest[:0] = same
            notices += notice
    return ServeArguments(values, config_file, notices=notices)


def _split(word: str) -> tuple[str, str, str]:
    """Return (flag, "=" or "", value) of a word; `_` counts as `-` in a flag."""
    name, equals, value = word.partition("=")
    name = name.replace("_", "-") if name.startswith("--") else name
    return ALIASES.get(name, name), equals, value


def _foreign(
    name: str, attached: str | None, rest: list[str], known: Iterable[str]
) -> tuple[Sequence[str], Sequence[str]]:
    """Return (flags of tokend, notices) for a flag of another server.

    attached: its value after `=`; otherwise the value is taken from `rest`. Raises ConfigError for
    a flag, or a value of one, that has no meaning here.
    """
    bare = name.lstrip("-")
    if bare in MISSING:
        raise ConfigError(f"{name} is not available: {MISSING[bare]}")
    if bare not in NO_EFFECT and bare not in SAME:
        raise ConfigError(unknown("flag", name, known))
    is_switch = "" in SAME[bare] if bare in SAME else NO_EFFECT[bare].values == ()
    if is_switch and attached is not None:
        raise ConfigError(f"{name} takes no value")
    value = attached
    if value is None:
        value = "" if is_switch else _operand(name, rest)
    if bare in SAME:
        if value not in SAME[bare]:
            hint = f"; see {MEANT[bare]}" if bare in MEANT else ""
            known_values = ", ".join(SAME[bare])
            raise ConfigError(f"{name} takes one of {known_values}, not {shown(value)}{hint}")
        return SAME[bare][value], ()
    if (asked := f"{bare} {value}") in MISSING:
        raise ConfigError(f"{name} {value} is not available: {MISSING[asked]}")
    reason, values = NO_EFFECT[bare]
    if values and value not in values:
        hint = f"; see {MEANT[bare]}" if bare in MEANT else ""
        raise ConfigError(f"{name} {shown(value)} is not available{hint}")
    return (), [f"{name} has no effect: {reason}"]


def parse_words(
    arguments: Sequence[str], names: Sequence[str], switches: Sequence[str] = ()
) -> tuple[list[str], dict[str, str]]:
    """Return the words of a command other than `serve`, and the values of its flags by name.

    names: of flags that take a value. switches: of those that take none; theirs is "". Raises
    ConfigError.
    """
    rest = list(arguments)
    words: list[str] = []
    values: dict[str, str] = {}
    while rest:
        word = rest.pop(0)
        name, equals, value = _split(word)
        if not word.startswith("-"):
            words.append(word)
        elif word in switches:
            values[word] = ""
        elif name not in names:
            raise ConfigError(unknown("option", name, (*names, *switches)))
        elif equals:
            values[name] = value
        elif rest:
            values[name] = rest.pop(0)
        else:
            raise ConfigError(f"{name} needs a value")
    return words, values


def log_format(words: Sequence[str]) -> LogFormat:
    """Return the log format, even if other parts of the command line are invalid."""
    split = [_split(word) for word in words]
    given = {name: word for (name, *_), word in zip(split, words[1:], strict=False)}
    given |= {name: value for name, equals, value in split if equals}
    found = given.get("--log-format")
    if found is None and "--config" in given:
        with contextlib.suppress(ConfigError):
            found = read_file(given["--config"]).get("log_format")
    return "json" if found == "json" else "text"


def without_secrets(words: Sequence[str]) -> list[str]:
    """Return the arguments of a command with secrets hidden, for process listings."""
    names = {flag_name(field) for field in SECRET_FIELDS}
    shown: list[str] = []
    hide_next = False
    for word in words:
        name, equals, _ = _split(word)
        if hide_next:
            shown.append(HIDDEN)
        elif name in names and equals:
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(word)
        hide_next = not hide_next and name in names and not equals
    return shown


def read_file(path: str) -> dict[str, Any]:
    """Return the settings in a YAML file, by field; raises ConfigError naming the invalid key."""
    import yaml

    try:
        with open(path, encoding="utf-8") as stream:
            text = stream.read()
        document = yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        message = f"not YAML: {' '.join(str(error).split())}"
        raise ConfigError(f"--config {path}: {message}") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(
            f"--config {path}: must be YAML with lines of the form `max-num-seqs: 64`"
        )
    by_key = {flag.name.removeprefix("--"): flag for flag in all_flags()}
    values: dict[str, Any] = {}
    seen = set()
    for node, _ in yaml.compose(text, Loader=yaml.SafeLoader).value:
        name = str(node.value).replace("_", "-")
        if name in seen:
            raise ConfigError(f"--config {path}: the key {name} is given twice")
        seen.add(name)
    for key, value in document.items():
        flag = by_key.get(str(key).replace("_", "-"))
        if flag is None:
            raise ConfigError(f"--config {path}: {unknown('key', str(key), by_key)}")
        try:
            values[flag.field] = flag.from_yaml(value)
        except ConfigError as error:
            raise ConfigError(f"--config {path}: {error}", flag.field) from None
    return values


def build(
    arguments: ServeArguments, environment: Mapping[str, Any] = MappingProxyType({})
) -> ServeConfig:
    """Return the configuration: flags override the file, and the file overrides `environment`.

    environment: values by field. Raises ConfigError.
    """
    path = arguments.config_file
    from_file = read_file(path) if path is not None else {}
    values = {**environment, **from_file, **arguments.values}
    sections = {
        section: struct(
            **{name: values[name] for name in struct.__struct_fields__ if name in values}
        )
        for section, struct in typing.get_type_hints(ServeConfig).items()
    }
    config = ServeConfig(**sections)
    try:
        validate(config)
    except ConfigError as error:
        if error.param in from_file and error.param not in arguments.values:
            raise ConfigError(f"--config {path}: {error}", error.param) from None
        raise
    use_families(config.model.model_families)
    return config


def unknown(what: str, given: str, known: Iterable[str]) -> str:
    """Return a message about an unknown word that suggests tokend's name or a similar word.

    A flag that turns something off is never suggested for one that turns it on, or the reverse.
    """
    meant = MEANT.get(given.lstrip("-").replace("_", "-"), "")
    if what == "key":
        meant = meant.removeprefix("--")
    elif what == "option" and meant not in known:  # names of `tokend serve`
        meant = ""
    if not meant:
        same = [word for word in known if _turns_off(word) == _turns_off(given)]
        meant = "".join(difflib.get_close_matches(given, same, n=1, cutoff=0.7))
    return f"unknown {what} {given}" + (f"; did you mean {meant}?" if meant else "")


def _set_model(values: dict[str, Any], model: str) -> None:
    if values.get("model", model) != model:
        raise ConfigError(f"two models were given, {values['model']} and {model}", "model")
    values["model"] = model


def _turns_off(flag: str) -> bool:
    return flag.startswith(("--no-", "--disable-", "no-", "disable-"))


def _has_operand(rest: Sequence[str]) -> bool:
    return bool(rest) and not rest[0].startswith("-")


def _operand(name: str, rest: list[str]) -> str:
    if not rest or rest[0].startswith("--"):
        raise ConfigError(f"{name} needs a value")
    return rest.pop(0)


def _opposite(name: str) -> str:
    return "--" + name.removeprefix("--no-") if name.startswith("--no-") else "--no-" + name[2:]


def _flag(section: str, field: str, hint: Any, default: Any) -> Flag:
    optional = False
    if isinstance(hint, types.UnionType):
        (hint,) = (member for member in typing.get_args(hint) if member is not type(None))
        optional = True
    choices = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
    kind: Kind
    if field in PARTS:
        kind, choices = "part", PARTS[field][1]
    elif choices:
        kind = "choice"
    else:
        assert hint in _KINDS, f"no flag can be made for {section}.{field}: {hint}"
        kind = "bytes" if field in BYTE_FIELDS else _KINDS[hint]
    return Flag(section, field, kind, choices, optional, default)


# ---- The text of `tokend serve --help` ----


_LEFT = 2
_INDENT = 30
_WIDTH = 100
_METAVARS = {"int": "N", "float": "X", "bytes": "BYTES", "str": "TEXT", "list": "LIST"}


def render() -> str:
    """Return the text of `tokend serve --help`: flags by section, with help and default."""
    helps = field_helps()
    lines = [
        "usage: tokend serve [MODEL] [flags]",
        "",
        "Serve a model over HTTP. MODEL: see --model.",
        *_entry(
            "--config FILE.yaml",
            "Read flags from a file (keys without the dashes); the command line overrides it.",
        ),
    ]
    flags = all_flags()
    for section, struct in typing.get_type_hints(ServeConfig).items():
        title = (struct.__doc__ or "").strip().splitlines()[0]
        lines += ["", f"{section}: {title}"]
        for flag in flags:
            if flag.section == section:
                lines += _entry(_usage(flag), helps[flag.field] + _default(flag))
    return "\n".join(lines)


def field_helps() -> dict[str, str]:
    """Return the help by field: the string literal below each field of the Structs."""
    return {
        field: text
        for texts in texts_below_fields(config).values()
        for field, text in texts.items()
    }


def _usage(flag: Flag) -> str:
    if flag.kind == "bool":
        return f"{flag.name}, {flag.negation}"
    if flag.kind == "choice":
        return f"{flag.name} {{{','.join(flag.choices)}}}"
    if flag.kind == "part":
        return f"{flag.name} {{{','.join(flag.choices)},module:name}}"
    return f"{flag.name} {_METAVARS[flag.kind]}"


def _default(flag: Flag) -> str:
    value = _default_value(flag)
    return f" (default: {value})" if value else ""


def _default_value(flag: Flag) -> str:
    if flag.default is None:
        return ""
    if flag.kind == "list":
        return ", ".join(flag.default)
    return {True: "on", False: "off"}[flag.default] if flag.kind == "bool" else str(flag.default)


def _entry(usage: str, text: str) -> list[str]:
    wrapped = textwrap.wrap(text, _WIDTH - _INDENT)
    head = " " * _LEFT + usage
    if len(head) + 2 <= _INDENT:
        return [head.ljust(_INDENT) + wrapped[0], *(" " * _INDENT + line for line in wrapped[1:])]
    return [head, *(" " * _INDENT + line for line in wrapped)]
