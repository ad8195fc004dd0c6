"""Grammars whose masks are cheap where they are checked, and slow later: others do not wait.

The check of a new grammar writes 32 tokens of a text. These grammars begin with more tokens that
cost nothing; behind them a mask takes up to 2 s of processor time.
"""

import json
import string
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import pytest

from tests.e2e.bystander import Bystander
from tests.e2e.daemon import Daemon, DaemonPool

pytestmark = pytest.mark.suite("hostile")

DRAFTS = json.dumps({"method": "suffix+grammar"})
KV_CACHE = ("--kv-cache-memory", "128M", "--kv-cache-populate")
"""Committed at the start: it would grow with every answer, those of the bystander among them."""
SETTINGS = {
    "synchronous": ("--no-async-scheduling",),
    "overlapped": ("--async-scheduling",),
    "drafts": ("--async-scheduling", "--speculative-config", DRAFTS),
}
ATTACK_SECONDS = 6.0
NUM_CHOICES = 8
LETTERS = string.ascii_lowercase
BEGINNING = " ".join(LETTERS[:17] * 2)


@pytest.fixture(params=SETTINGS)
def serving(request: Any, daemons: DaemonPool) -> Iterator[Daemon]:
    with daemons.borrow(*KV_CACHE, *SETTINGS[request.param]) as running:
        yield running


def ambiguous(number: int) -> str:
    """A grammar of which one mask behind the beginning takes 1 to 2 s, and then fails."""
    operators = range(40)
    return "\n".join(
        [
            f'start: "{BEGINNING}" e{number}',
            f"e{number}: "
            + " | ".join(f"e{number} a{each} e{number}" for each in operators)
            + " | W",
            *(f"a{each}: e{number} W | W e{number}" for each in operators),
            "W: /[a-z ]/",
        ]
    )


def growing(number: int) -> str:
    """A grammar whose masks take 3 ms behind the beginning, and 0.1 ms more with each token."""
    return f'start: "{BEGINNING}" e{number}\ne{number}: e{number} e{number} | W\nW: /[a-z ]/'


def many_lexemes(number: int) -> str:
    """A grammar whose masks take 0.2 s for each new state of its lexer."""
    rules = [
        f"T{each}: /[a-z ]*{LETTERS[each % 26]}[a-z ]{{{each // 26 + 2}}}{LETTERS[each * 7 % 26]}/"
        for each in range(number, number + 300)
    ]
    names = "|".join(rule.partition(":")[0] for rule in rules)
    return f'start: "{BEGINNING}" ({names})*\n' + "\n".join(rules)


def attack(daemon: Daemon, grammar: str, number: int) -> float:
    """Send an attack; return how long it went on, in seconds."""
    body = {
        **{"prompt": "The letters: ", "max_tokens": 48, "temperature": 1.0, "n": NUM_CHOICES},
        **{"structured_outputs": {"grammar": grammar}, "seed": number},
    }
    began = time.monotonic()
    with suppress(httpx.ReadTimeout):  # the request ends with its client
        httpx.post(f"{daemon.url}/v1/completions", json=body, timeout=ATTACK_SECONDS)
    return time.monotonic() - began


def test_slow_masks_delay_no_step_of_others(serving: Daemon) -> None:
    attack(serving, f'start: "{BEGINNING}"', 9)  # starts the processes that check grammars
    grammars = [ambiguous(0), ambiguous(1), many_lexemes(0), growing(0)]
    with Bystander(serving) as bystander, ThreadPoolExecutor(len(grammars)) as pool:
        numbers = range(len(grammars))
        seconds = list(pool.map(attack, [serving] * len(grammars), grammars, numbers))
        bystander.rest()
    assert min(seconds) > 0.3, seconds  # none was refused at once
    assert max(seconds) > 2.0, seconds
    bystander.check()
