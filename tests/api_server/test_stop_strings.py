"""Incremental stop string search, compared with a search in the whole text."""

import random

import pytest

from api_server.text.stop_strings import StopStrings


def run(strings: list[str], pieces: list[str]) -> tuple[str, str | None, list[str]]:
    """Return (text, stop string, chunks of text)."""
    matcher = StopStrings(strings)
    shown: list[str] = []
    for piece in pieces:
        text, stop = matcher.filter_text(piece, can_stop=True)
        shown.append(text)
        if stop is not None:
            return "".join(shown), stop, shown
    shown.append(matcher.flush_text())
    return "".join(shown), None, shown


def obvious(strings: list[str], text: str) -> tuple[str, str | None]:
    """Return the stop string that ends first; ties go to the first in the list."""
    for end in range(1, len(text) + 1):
        for string in strings:
            if text[:end].endswith(string):
                return text[: end - len(string)], string
    return text, None


@pytest.mark.parametrize("seed", range(300))
def test_agrees_with_the_simple_search(seed: int) -> None:
    source = random.Random(seed)
    strings = [
        "".join(source.choices("ab", k=source.randint(1, 5))) for _ in range(source.randint(1, 4))
    ]
    text = "".join(source.choices("abc", weights=(5, 5, 1), k=30))
    pieces, rest = [], text
    while rest:
        size = source.randint(1, 6)
        pieces.append(rest[:size])
        rest = rest[size:]
    found, stop, _ = run(strings, pieces)
    assert (found, stop) == obvious(strings, text)


@pytest.mark.parametrize(
    ("strings", "shown"), [(["END", "THE END"], "it is THE "), (["THE END", "END"], "it is ")]
)
def test_the_first_in_the_list_wins_a_tie(strings: list[str], shown: str) -> None:
    assert run(strings, ["it is T", "HE E", "ND."])[:2] == (shown, strings[0])


def test_only_a_prefix_of_a_stop_string_is_held_back() -> None:
    _, _, shown = run(["stop here"], ["we ", "stop", " now"])
    assert shown == ["we ", "", "stop now", ""]


def test_a_stop_string_across_chunks_is_not_emitted() -> None:
    assert run(["group of peo", "short"], ["a gr", "oup of", " people"]) == (
        "a ",
        "group of peo",
        ["a ", "", ""],
    )


def test_a_stop_string_inside_a_chunk() -> None:
    assert run(["gani"], ["volunteer organization"])[:2] == ("volunteer or", "gani")


def test_matches_before_min_tokens_are_ignored() -> None:
    matcher = StopStrings(["e"])
    assert matcher.filter_text(" is Lee,", can_stop=False) == (" is Lee,", None)
    assert matcher.filter_text(" a stude", can_stop=True) == (" a stud", "e")


def test_a_match_that_began_before_min_tokens_counts() -> None:
    matcher = StopStrings(["abcd"])
    assert matcher.filter_text("xab", can_stop=False) == ("x", None)
    assert matcher.filter_text("cd", can_stop=True) == ("", "abcd")
