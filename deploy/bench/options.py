"""Command lines of the measurements."""

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from typing import NoReturn, TextIO

from proto.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """Says what is wrong as the rest of the command line does."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}")


def at_least_one(text: str) -> int:
    """For `type=`: a whole number of which there must be one."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def from_zero(text: str) -> int:
    """For `type=`: a whole number, 0 included."""
    number = int(text)
    if number < 0:
        raise ValueError
    return number


def positive(text: str) -> float:
    """For `type=`: a number above 0."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise ValueError
    return number


def from_zero_number(text: str) -> float:
    """For `type=`: a number, 0 included."""
    number = float(text)
    if not 0 <= number < float("inf"):
        raise ValueError
    return number


def share(text: str) -> float:
    """For `type=`: a number from 0 to 1."""
    number = float(text)
    if not 0 <= number <= 1:
        raise ValueError
    return number


def several_counts(text: str) -> list[int]:
    """For `type=`: whole numbers from 1 with commas between; A..B stands for A, 2 A, 4 A … B."""
    found: list[int] = []
    for part in text.split(","):
        first, dots, last = part.partition("..")
        found.append(at_least_one(first))
        if dots:
            end = at_least_one(last)
            while found[-1] < end:
                found.append(min(2 * found[-1], end))
    return found


def several_rates(text: str) -> list[float]:
    """For `type=`: numbers above 0 with commas between."""
    return [positive(part) for part in text.split(",")]


@contextlib.contextmanager
def writable(flag: str, name: str | None) -> Iterator[Sequence[TextIO]]:
    """The file that a flag names, if any; its old content goes when something is written.

    Looked at first: a name that is no good must not cost the measurement.
    """
    if name is None:
        yield ()
        return
    with _appendable(flag, name) as file:
        yield (file,)


def write(files: Sequence[TextIO], text: str) -> None:
    """Into the files of `writable`."""
    for file in files:
        file.seek(0)
        file.truncate()
        file.write(text)


def _appendable(flag: str, name: str) -> TextIO:
    try:
        return open(name, "a", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{flag} {name}: {error.strerror}", flag.removeprefix("--")) from None
