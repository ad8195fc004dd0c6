"""The cache of grammars stays within its two limits."""

from engine_core.structured_output.compiler import GrammarCache
from engine_core.structured_output.matchers import GrammarError
from proto.messages.grammar import GrammarSource


def source(name: str, num_bytes: int = 10) -> GrammarSource:
    return GrammarSource("regex", name * num_bytes)


def test_the_least_recently_used_goes_first():
    cache = GrammarCache(3, 1000)
    errors = {name: GrammarError(name) for name in "abcd"}
    for name in "abc":
        cache.put(source(name), errors[name])
    assert cache.get(source("a")) is errors["a"]
    cache.put(source("d"), errors["d"])
    assert cache.get(source("b")) is None
    assert [cache.get(source(name)) for name in "acd"] == [errors[name] for name in "acd"]


def test_ten_thousand_grammars_keep_within_entries_and_bytes():
    cache = GrammarCache(64, 4000)
    for number in range(10_000):
        cache.put(source(chr(97 + number % 26), 10 + number), GrammarError("x"))
        assert len(cache) <= 64
        assert cache.num_bytes <= 4000
    assert cache.num_bytes == 0  # the last ones were larger than the limit
    cache.put(source("z", 3999), GrammarError("x"))
    cache.put(source("z", 3999), GrammarError("y"))
    assert (len(cache), cache.num_bytes) == (1, 3999)


def test_large_grammars_of_short_sources_keep_within_the_bytes():
    cache = GrammarCache(64, 1000)
    for number in range(100):
        cache.put(source(f"{number:03}"), GrammarError("x"), 270)
        assert cache.num_bytes <= 1000
    assert (len(cache), cache.num_bytes) == (3, 900)
    cache.put(source("099"), GrammarError("y"), 70)
    assert (len(cache), cache.num_bytes) == (3, 700)


def test_a_cache_of_nothing_keeps_nothing():
    cache = GrammarCache(0, 0)
    cache.put(source("a"), GrammarError("x"))
    assert (len(cache), cache.num_bytes, cache.get(source("a"))) == (0, 0, None)
