"""`python -m tests.benchmarks.embeddings`: what it measures with, without a daemon."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from proto.errors import ConfigError
from tests.benchmarks import embeddings
from tests.benchmarks.embeddings import Measurement, random_texts, write_model
from tests.fakes.pooling_engine import prepare


class Timed:
    """An embedder that takes given seconds and returns given vectors."""

    def __init__(self, seconds: Sequence[float], vectors: Any) -> None:
        self.seconds = list(seconds)
        self.vectors = np.array(vectors, dtype=np.float32)
        self.num_texts: list[int] = []

    def embed(self, texts: Sequence[str]) -> tuple[float, Any]:
        self.num_texts.append(len(texts))
        seconds = self.seconds.pop(0) if len(self.num_texts) > 1 else 99.0
        return seconds, self.vectors


def test_rounds_are_compared_with_the_peer_of_the_same_round() -> None:
    """The first call warms up; cosines do not depend on the length of vectors."""
    peer = Timed([4, 8, 6], [[1, 0], [0, 2]])
    own = Timed([2, 2, 6], [[3, 0], [1, 1]])
    texts = [str(number) for number in range(100)]
    measured = embeddings._measure({embeddings._PEER: peer, "tokend": own}, texts, 3)
    assert peer.num_texts == own.num_texts == [64, 100, 100, 100]
    assert measured["tokend"].seconds == [2, 2, 6]
    assert measured["tokend"].times_as_fast(measured[embeddings._PEER]) == 2
    assert measured["tokend"].cosine == pytest.approx(0.5**0.5)
    assert measured[embeddings._PEER].cosine is None
    figures = measured["tokend"].to_dict(100, measured[embeddings._PEER])
    assert figures["texts_per_second_median"] == 50
    assert figures["times_as_fast"] == 2
    assert Measurement([4.0]).to_dict(100, None)["times_as_fast"] is None


def test_texts_have_the_tokens_that_are_asked_for(tmp_path: Path) -> None:
    """The model is one that the daemon takes, and sentence-transformers' files agree with it."""
    folder = tmp_path / "minilm"
    write_model(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = random_texts(40, 5, 12, seed=1)
    lengths = {len(tokenizer.encode(text).ids) for text in texts}
    assert lengths == set(range(5, 13))
    assert all("[UNK]" not in tokenizer.encode(text).tokens for text in texts)
    assert random_texts(40, 5, 12, seed=1) == texts
    assert random_texts(40, 5, 12, seed=2) != texts
    prepared = prepare(folder)
    assert prepared.pooler is not None
    assert (prepared.pooler.types, prepared.pooler.normalize) == (("mean",), True)
    pooling = json.loads((folder / "1_Pooling" / "config.json").read_text())
    assert prepared.pooler.size == pooling["word_embedding_dimension"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--tokens", "9", "4"], "tokens"),
        (["--texts", "0"], "texts"),
        (["--rounds", "0"], "rounds"),
    ],
)
def test_impossible_options_are_named(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((SystemExit, ConfigError)) as caught:
        embeddings._parse(words)
    assert named in capsys.readouterr().err + str(caught.value)
