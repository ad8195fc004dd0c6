"""The compiled suffix index against a search of all positions in Python."""

import random
from collections import Counter

import pytest

from engine_core import build_native
from engine_core.speculation.suffix_index import load_suffix_index

DEPTH = 12
SEPARATOR = None


def common_suffix(left: list, right: list) -> int:
    """Length of the equal ends, at most DEPTH, without separators."""
    length = 0
    for a, b in zip(reversed(left), reversed(right), strict=False):
        if a != b or a is SEPARATOR or length == DEPTH:
            break
        length += 1
    return length


def reference_drafts(
    text: list, source: list, orders: tuple[int, ...], limit: int, factor: float, least: float
) -> list[tuple[float, int, list[int], list[float]]]:
    """Return (sum, length, tokens, probabilities) for each length of the match, longest first."""
    is_own = text is source
    matches = []
    for end in range(1, len(text)):  # text[end] follows the match
        length = common_suffix(text[:end], source)
        if length >= orders[0] and text[end] is not SEPARATOR:
            matches.append((end, length))
    drafts = []
    for length in sorted({length for _, length in matches}, reverse=True):
        alive = [end for end, other in matches if other >= length]
        tokens: list[int] = []
        probabilities: list[float] = []
        probability = 1.0
        while len(tokens) < min(limit, int(factor * length)):
            long = [*text, *tokens] if is_own else text
            following = {
                end: long[end + len(tokens)]
                for end in alive
                if end + len(tokens) < len(long) and long[end + len(tokens)] is not SEPARATOR
            }
            if not following:
                break
            counts = Counter(following.values())
            newest = {token: end for end, token in sorted(following.items())}
            token = max(counts, key=lambda one: (counts[one], newest[one]))
            probability *= counts[token] / len(alive)
            if probability < least:
                break
            tokens.append(token)
            probabilities.append(probability)
            alive = [end for end in alive if following.get(end) == token]
        drafts.append((sum(probabilities), length, tokens, probabilities))
    return drafts


def check_proposal(found, drafts) -> None:
    best = max((total for total, *_ in drafts), default=0.0)
    if best == 0.0:
        assert found is None
        return
    assert found is not None
    length, tokens, probabilities = found
    assert sum(probabilities) == pytest.approx(best)
    same_length = next(draft for draft in drafts if draft[1] == length)
    assert tokens == same_length[2]
    assert probabilities == pytest.approx(same_length[3])


def fill(index, text: list) -> None:
    for token in text:
        if token is SEPARATOR:
            index.separate()
        else:
            index.extend([token], 0, 1)


@pytest.mark.parametrize("orders", [(1,), (2,), (2, 4, 8), (1, 3)])
@pytest.mark.parametrize("seed", range(12))
def test_a_text_continues_as_a_search_of_all_positions_finds(make_index, orders, seed):
    generator = random.Random(seed)
    num_tokens, vocabulary = generator.choice([(30, 2), (300, 3), (600, 20)])
    text: list[int] = []
    factor, least = generator.choice([0.5, 1.0, 2.5]), generator.choice([0.0, 0.1, 0.5])
    index = make_index(orders, DEPTH, 4096, 4096, factor, least)
    while len(text) < num_tokens:
        if text and generator.random() < 0.3:  # a copy
            start = generator.randrange(len(text))
            new = text[start : start + generator.randrange(1, 20)]
        else:
            new = [generator.randrange(vocabulary) for _ in range(generator.randrange(1, 6))]
        index.extend([9, *new, 9], 1, 1 + len(new))
        text += new
        limit = generator.randrange(1, 20)
        found = index.propose(index, limit)
        check_proposal(found, reference_drafts(text, text, orders, limit, factor, least))


@pytest.mark.parametrize("seed", range(8))
def test_other_sequences_continue_one_and_separators_match_nothing(make_index, seed):
    generator = random.Random(seed)
    corpus: list = []
    index, own = make_index((2, 4), DEPTH, 4096, 4096, 2.0), make_index((2, 4), DEPTH)
    for _ in range(20):
        corpus += [SEPARATOR, *(generator.randrange(3) for _ in range(generator.randrange(12)))]
    fill(index, corpus)
    text: list[int] = []
    for _ in range(40):
        text.append(generator.randrange(3))
        own.extend(text, len(text) - 1, len(text))
        found = index.propose(own, 8)
        check_proposal(found, reference_drafts(corpus, text, (2, 4), 8, 2.0, 0.1))


@pytest.mark.parametrize("seed", range(4))
def test_a_full_ring_forgets_the_oldest_tokens(make_index, seed):
    """Of 256 tokens, the least that an index keeps."""
    generator = random.Random(seed)
    index = make_index((2, 4), DEPTH, 4096, 256)
    text: list[int] = []
    num_bytes = 0
    for _ in range(200):
        text += [generator.randrange(4) for _ in range(generator.randrange(1, 30))]
        index.extend(text, (index.end), len(text))
        assert index.end == len(text)
        assert index.num_tokens == min(256, len(text))
        kept = text[-256:]
        found = index.propose(index, 6)
        check_proposal(found, reference_drafts(kept, kept, (2, 4), 6, 1.0, 0.1))
        num_bytes = max(num_bytes, index.num_bytes)
    assert index.num_bytes == num_bytes < 256 * 20 + 2 * 4096 * 24 + 256


def test_forgotten_tokens_are_not_found(make_index):
    index = make_index((2,))
    index.extend([1, 2, 3, 1, 2], 0, 5)
    assert index.propose(index, 3) == (2, [3, 1], [1.0, 1.0])
    index.forget_before(3)
    assert index.num_tokens == 2
    assert index.propose(index, 3) is None
    index.forget_before(100)
    assert index.num_tokens == 0
    index.extend([1, 2, 4, 1, 2], 0, 5)
    assert index.propose(index, 3) == (2, [4, 1], [1.0, 1.0])


def test_a_text_that_repeats_itself_goes_on_behind_its_end(make_index):
    index = make_index((2,))
    index.extend([1, 2, 3] * 3, 0, 9)
    assert index.propose(index, 6)[1] == [1, 2, 3, 1, 2, 3]


def test_lookup_takes_the_most_recent_of_the_longest_matches(make_index):
    index = make_index((2,), 3)
    text = [1, 2, 3, 10, 1, 2, 3, 11, 9, 2, 3, 12, 1, 2, 3]
    index.extend(text, 0, len(text))
    assert index.lookup(index, 2) == (3, [11, 9], [1.0, 1.0])
    index.extend([77], 0, 1)
    assert index.lookup(index, 2) is None


def test_only_recent_occurrences_are_counted(make_index):
    """The limit bounds the time of a lookup in a text that repeats a token."""
    index = make_index((2,), 4, 3)
    for following in (5, 5, 5, 5, 6, 6, 7):
        index.extend([1, 2, following], 0, 3)
    index.extend([1, 2], 0, 2)
    assert index.propose(index, 1) == (2, [6], [pytest.approx(2 / 3)])


@pytest.mark.parametrize("token", [-1, 1 << 32, (1 << 32) - 1])
def test_a_token_id_out_of_range_is_refused(make_index, token):
    with pytest.raises(OverflowError):
        make_index((2,)).extend([token], 0, 1)


@pytest.mark.parametrize("seed", range(4))
def test_matches_after_a_part_was_forgotten(make_index, seed):
    """Also while the index grows, which moves what it has."""
    generator = random.Random(seed)
    index = make_index((2, 4), DEPTH, 4096)
    text, first = [], 0
    while len(text) < 1500:
        new = [generator.randrange(3) for _ in range(generator.randrange(1, 40))]
        index.extend(new, 0, len(new))
        text += new
        if generator.random() < 0.3:
            first = generator.randrange(first, len(text) + 1)
            index.forget_before(first)
        kept = text[first:]
        check_proposal(index.propose(index, 6), reference_drafts(kept, kept, (2, 4), 6, 1.0, 0.1))


@pytest.mark.parametrize("orders", [(), (0,), (3, 2), (2, 65), (1, 2, 3, 4, 5)])
def test_impossible_orders_are_refused(make_index, orders):
    with pytest.raises(ValueError, match=r"range|ascend"):
        make_index(orders)


def test_without_a_library_there_is_no_index(tmp_path):
    assert load_suffix_index(tmp_path) is None
    build_native.library(build_native.SUFFIX_INDEX, tmp_path).write_text("not a library")
    assert load_suffix_index(tmp_path) is None
