"""Files of one JSON object a line, read with the number of the line in every complaint."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from deploy.loadtest.datasets.material import Prompt
from deploy.loadtest.openai.client import CHAT, COMPLETIONS
from proto.errors import ConfigError


class Line:
    """One object; what is missing or of the wrong kind is a ConfigError that names the line."""

    def __init__(self, where: str, fields: dict[str, Any]) -> None:
        self._where = where
        self._fields = fields

    def number(self, *names: str, default: float | None = None) -> float:
        """The first of these fields that is there, at least 0."""
        for name in names:
            value = self._fields.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise ConfigError(f"{self._where}: {name} is no number from 0: {value!r}")
            return value
        if default is None:
            raise ConfigError(f"{self._where}: there is no {' or '.join(names)}")
        return default

    def numbers(self, name: str) -> list[int]:
        """A list of whole numbers; empty where there is none."""
        value = self._fields.get(name) or []
        if not isinstance(value, list) or not all(isinstance(each, int) for each in value):
            raise ConfigError(f"{self._where}: {name} is no list of whole numbers")
        return value

    def content(self) -> tuple[str, dict[str, Any]] | None:
        """(path, prompt or messages), if the line has them."""
        if messages := self._fields.get("messages"):
            return CHAT, {"messages": messages}
        prompt: Prompt | None = self._fields.get("prompt")
        return (COMPLETIONS, {"prompt": prompt}) if prompt else None

    def missing(self, what: str) -> ConfigError:
        return ConfigError(f"{self._where}: there is no {what}")


def read_lines(file: str) -> list[Line]:
    """Every line that is not empty; raises ConfigError for a file without one."""
    try:
        texts = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {getattr(error, 'strerror', None) or error}") from None
    lines = list(_parsed(file, texts))
    if not lines:
        raise ConfigError(f"{file}: there is no line in it")
    return lines


def _parsed(file: str, texts: Iterable[str]) -> Iterator[Line]:
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        where = f"{file}, line {number}"
        try:
            fields = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{where}: not JSON: {error}") from None
        if not isinstance(fields, dict):
            raise ConfigError(f"{where}: not an object")
        yield Line(where, fields)
