"""Numbers of block contents identify equal contents, and nothing else."""

import random
from hashlib import sha256

from engine_core.trace.recorder import ContentNumbers
from proto.messages.sched_trace import Content
from tests.benchmarks.simulator.recording import Chains


def hashes(text):
    """Return chained hashes, like the block hashes of a sequence."""
    found, parent = [], b""
    for letter in text:
        parent = sha256(parent + letter.encode()).digest()
        found.append(parent)
    return found


def test_only_the_known_prefix_is_replaced() -> None:
    contents = ContentNumbers()
    assert contents.content_of(hashes("abcd")) == Content(0, 0, 1, 4)
    assert contents.content_of(hashes("abcd")) == Content(4, 4)
    assert contents.content_of(hashes("abxy")) == Content(2, 2, 5, 2)
    assert contents.content_of(hashes("abxyz")) == Content(6, 4, 7, 1)
    assert contents.content_of(hashes("b")) == Content(0, 0, 8, 1)
    assert contents.content_of([]) == Content()


def test_equal_hash_chains_restore_equal_prefixes_only() -> None:
    rng = random.Random(3)
    contents, chains = ContentNumbers(), Chains()
    texts = ["".join(rng.choices("ab", k=rng.randrange(9))) for _ in range(200)]
    seen = []
    for text in texts:
        content = contents.content_of(hashes(text))
        chains.learn(content)
        seen.append(chains.blocks(content))
    for text, blocks in zip(texts, seen, strict=True):
        assert len(blocks) == len(text)
        for other, theirs in zip(texts, seen, strict=True):
            common = next(
                (at for at, (a, b) in enumerate(zip(text, other, strict=False)) if a != b),
                min(len(text), len(other)),
            )
            shared = [a == b for a, b in zip(blocks, theirs, strict=False)]
            assert shared == [at < common for at in range(len(shared))]


def test_memory_is_bounded_and_numbers_are_unique() -> None:
    contents = ContentNumbers(max_contents=6)
    assert contents.content_of(hashes("abcd")) == Content(0, 0, 1, 4)
    assert contents.content_of(hashes("abcdxyz")) == Content(0, 0, 5, 7)
    assert len(contents._numbers) == 7
