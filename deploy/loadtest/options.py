"""Command lines of the measurements."""

import argparse
from typing import NoReturn

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


def positive(text: str) -> float:
    """For `type=`: a number above 0."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise ValueError
    return number
