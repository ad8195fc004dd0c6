"""Types of command line options, and output files, of `tokend bench` and `tokend trace`."""

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TextIO

from proto.errors import ConfigError


class BenchParser(argparse.ArgumentParser):
    """Raises ConfigError for invalid arguments, like the rest of the command line.

    The help shows the description as it is written.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, **settings})

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}")


def at_least_one(text: str) -> int:
    """Parse a whole number of at least 1; for `type=`."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def from_zero(text: str) -> int:
    """Parse a whole number of at least 0; for `type=`."""
    number = int(text)
    if number < 0:
        raise ValueError
    return number


def positive(text: str) -> float:
    """Parse a number above 0; for `type=`."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise ValueError
    return number


def share(text: str) -> float:
    """Parse a number from 0 to 1; for `type=`."""
    number = float(text)
    if not 0 <= number <= 1:
        raise ValueError
    return number


def several_counts(text: str) -> list[int]:
    """Parse numbers from 1 separated by commas; A..B means A, 2 A, 4 A … B; for `type=`."""
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
    """Parse numbers above 0 separated by commas; for `type=`."""
    return [positive(part) for part in text.split(",")]


def add_values(
    group: "argparse._ActionsContainer", *rows: tuple[str, Callable[[str], Any], Any, str]
) -> None:
    """Add flags that take a value: name, type, default and help, which ends with the default."""
    for name, kind, default, text in rows:
        shown = "" if default is None else f" ({default:g})"
        group.add_argument(name, type=kind, default=default, help=(text + shown).strip())


@contextlib.contextmanager
def writable(
    flag: str, name: str | None, *, is_private: bool = False
) -> Iterator[Sequence[TextIO]]:
    """Open the output file of a flag, if given; its old content is kept until `write`.

    It is opened before the measurement, which must not be lost to an invalid name; a new one is
    removed if nothing is written. is_private: only its owner may read it. Raises ConfigError.
    """
    if name is None:
        yield ()
        return
    is_new = not os.path.lexists(name)
    with _appendable(flag, name) as file:
        if is_private:
            os.fchmod(file.fileno(), 0o600)
        try:
            yield (file,)
        finally:
            if is_new and not file.tell():
                os.unlink(name)


def write(files: Sequence[TextIO], text: str) -> None:
    """Replace the content of the files that `writable` has yielded."""
    for file in files:
        file.seek(0)
        file.truncate()
        file.write(text)


def _appendable(flag: str, name: str) -> TextIO:
    try:
        return open(name, "a", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{flag} {name}: {error.strerror}", flag.removeprefix("--")) from None
