"""The agent's session: what its turns send, and what is counted as computed again."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from proto.errors import ConfigError
from tests.benchmarks import states
from tests.benchmarks.states import Figures, LlamaCpp, MeasuredServer, Reply, Tokend, Turn

WORDS = ("--turns", "4", "--tokens", "160", "--first-tokens", "40", "--answer-tokens", "8")


class CachingServer(MeasuredServer):
    """A server that finds what it had before, in whole blocks, until it forgets."""

    name = "fake"

    def __init__(self, options: argparse.Namespace, variant: str) -> None:
        super().__init__(options, variant, "model", Path("folder"))
        self.prompts: list[list[int]] = []
        self.events: list[str] = []
        self._known: list[list[int]] = []

    def ask(self, prompt: Sequence[int], num_tokens: int) -> Reply:
        answer = list(range(50_000 + len(prompt), 50_000 + len(prompt) + num_tokens))
        self.prompts.append(list(prompt))
        found = max((self._common(known, prompt) for known in self._known), default=0)
        self._known.append([*prompt, *answer[:-1]])
        return Reply(answer, found // 16 * 16, 0.01 * len(self.prompts))

    def restart(self) -> None:
        self.events.append(f"restart before {len(self.prompts)}")
        self._known.clear()

    def kill(self) -> None:
        self.events.append(f"kill before {len(self.prompts)}")

    def _common(self, known: Sequence[int], prompt: Sequence[int]) -> int:
        pairs = enumerate(zip(known, prompt, strict=False))
        return next((i for i, (a, b) in pairs if a != b), min(len(known), len(prompt)))

    def _command(self) -> list[str]:
        return []

    def _request(self, prompt: Sequence[int], num_tokens: int) -> tuple[str, dict[str, Any]]:
        return "", {}

    def _read(self, event: Mapping[str, Any]) -> tuple[list[int], int]:
        return [], 0


def session(variant: str) -> tuple[CachingServer, list[Turn]]:
    options = states.parse([*WORDS, "--pause", "0", "--others", "3", "--other-tokens", "24"])
    server = CachingServer(options, variant)
    return server, states.run_session(server, options, variant)


def test_a_session_grows_by_its_answers_and_only_the_last_block_is_computed_again() -> None:
    server, turns = session("alone")
    assert [turn.num_tokens for turn in turns] == [40, 80, 120, 160]
    assert [turn.num_known for turn in turns] == [0, 47, 87, 127]
    assert [turn.num_again for turn in turns] == [0, 47 - 32, 87 - 80, 127 - 112]
    for before, after in zip(server.prompts, server.prompts[1:], strict=False):
        answer = list(range(50_000 + len(before), 50_000 + len(before) + 8))
        assert after[: len(before) + 8] == before + answer


def test_a_shortened_answer_is_not_known() -> None:
    server, turns = session("shortened")
    assert [turn.num_known for turn in turns] == [0, 40, 80, 120]
    assert server.prompts[1][40:44] == [50_044, 50_045, 50_046, 50_047]
    assert [turn.num_again for turn in turns] == [0, 8, 0, 8]


def test_others_send_their_prompts_before_the_turn_in_the_middle() -> None:
    server, turns = session("others")
    assert [len(prompt) for prompt in server.prompts] == [40, 80, 24, 24, 24, 120, 160]
    assert [turn.num_tokens for turn in turns] == [40, 80, 120, 160]


@pytest.mark.parametrize(("variant", "again"), [("restarted", 87), ("killed", 7)])
def test_the_server_ends_before_the_turn_in_the_middle(variant: str, again: int) -> None:
    server, turns = session(variant)
    assert server.events == [f"{'restart' if variant == 'restarted' else 'kill'} before 2"]
    figures = Figures.of(variant, server.name, turns)
    assert (figures.middle_again, figures.again) == (again, 15 + again + 15)
    assert (figures.second_ms, figures.middle_ms) == pytest.approx((20, 30))
    assert (figures.median_ms, figures.last_ms) == pytest.approx((30, 40))


def test_events_of_both_servers_are_read() -> None:
    options = states.parse(WORDS)
    ours, theirs = (kind(options, "alone", "m", Path("f")) for kind in (Tokend, LlamaCpp))
    assert ours._read({"choices": [{"token_ids": [4, 5]}]}) == ([4, 5], 0)
    usage = {"prompt_tokens_details": {"cached_tokens": 32}}
    assert ours._read({"choices": [], "usage": usage}) == ([], 32)
    assert theirs._read({"tokens": [4], "stop": False, "id_slot": 2}) == ([4], 0)
    last = {"tokens": [], "stop": True, "timings": {"cache_n": 31}}
    assert theirs._read(last) == ([], 31)


def test_answers_are_compared_from_their_first_token() -> None:
    ours, theirs = (Turn(9, 0, 0, 1.0, answer) for answer in ([1, 2, 3], [1, 2, 4]))
    assert states.num_equal({"a": [ours], "b": [theirs]}) == 2
    assert states.num_equal({"a": [ours], "b": [ours]}) == 3


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="--first-tokens"):
        states.parse(["--tokens", "100", "--first-tokens", "200"])
