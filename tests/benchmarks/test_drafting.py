"""The recorded texts and the simulated steps of `python -m tests.benchmarks.drafting`."""

import itertools

import pytest

from engine_core.speculation.suffix_index import load_suffix_index
from tests.benchmarks.drafting import (
    METHODS,
    Q4_1_COSTS,
    all_recordings,
    decision_times,
    index_times,
    play,
    row_cost,
)


@pytest.fixture(scope="module")
def recordings():
    """With a token for each word and each line break, so that no tokenizer is needed."""
    numbers: dict[str, int] = {}

    def encode(text: str) -> list[int]:
        words = text.replace("\n", " \n ").split(" ")
        return [numbers.setdefault(word, len(numbers)) for word in words]

    return all_recordings(encode, 4)


def test_the_texts_are_always_the_same_and_of_each_kind(recordings):
    assert set(recordings) == {"edit", "json", "json, compact", "agent", "chat", "random"}
    assert all(each.prompt and each.outputs for texts in recordings.values() for each in texts)


@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize("method", METHODS)
def test_every_token_is_played_once(recordings, method, concurrency):
    texts = recordings["agent"]
    found = play(texts, method, concurrency, Q4_1_COSTS)
    assert found.num_tokens == sum(len(each.outputs) for each in texts)
    assert found.num_steps == len(found.decisions)
    assert found.num_accepted <= found.num_drafted
    assert found.seconds >= found.num_steps


@pytest.mark.skipif(load_suffix_index() is None, reason="the index is not compiled")
def test_copies_take_less_time_and_random_text_no_more(recordings):
    shares = {
        name: play(recordings[name], "suffix", 1, Q4_1_COSTS).seconds
        / play(recordings[name], "none", 1, Q4_1_COSTS).seconds
        for name in ("edit", "agent", "chat", "random")
    }
    assert shares["edit"] < 0.4
    assert shares["agent"] < 0.6
    assert max(shares.values()) <= 1.02


def test_costs_of_rows_are_interpolated():
    costs = [row_cost(rows, Q4_1_COSTS) for rows in range(1, 40)]
    assert [costs[0], costs[3], costs[7]] == pytest.approx([1.0, 1.28, 1.5])
    assert all(low < high for low, high in itertools.pairwise(costs))


def test_times_are_measured():
    for draft_model in (False, True):
        assert decision_times(3, repeats=True, draft_model=draft_model) >= 0.0
    for value in index_times(list(range(1000))).values():
        assert value > 0
