"""Figures of `python -m tests.benchmarks.quality`, and its refused arguments."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from proto.errors import ConfigError
from tests.benchmarks import quality as bench
from tests.benchmarks.quality import (
    PIECE,
    Prediction,
    Setting,
    Text,
    compare,
    default_texts,
    digest,
    divergence,
    document,
    mean_divergence,
    mean_mass,
    perplexity,
    predictions_of,
    text_of,
)


def prediction(probabilities: list[float], shown: int, token_id: int = 0) -> Prediction:
    """Return a prediction with only the likeliest tokens of a distribution and its own token."""
    logs = {i: math.log(each) for i, each in enumerate(probabilities)}
    likeliest = sorted(logs, key=lambda i: -logs[i])[:shown]
    return Prediction(token_id, logs[token_id], {i: logs[i] for i in {*likeliest, token_id}})


def distribution(rng: random.Random, size: int) -> list[float]:
    weights = [rng.random() ** 4 + 1e-4 for _ in range(size)]
    return [each / sum(weights) for each in weights]


def test_perplexity_of_the_actual_tokens() -> None:
    certain = Prediction(1, 0.0, {1: 0.0})
    assert perplexity([certain]) == 1.0
    assert perplexity([certain, prediction([0.25] * 4, 2)]) == pytest.approx(2.0)


def test_divergence_is_exact_or_a_lower_bound() -> None:
    rng = random.Random(3)
    for _ in range(200):
        p, q = distribution(rng, 12), distribution(rng, 12)
        whole = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
        assert divergence(prediction(p, 12), prediction(q, 12)) == pytest.approx(whole)
        part = divergence(prediction(p, 5), prediction(q, 5))
        assert -1e-12 < part <= whole + 1e-12


def test_equal_predictions_do_not_diverge() -> None:
    each = prediction([0.5, 0.3, 0.2], 2)
    assert mean_divergence([each, each], [each, each]) == pytest.approx(0.0)
    assert mean_mass([each], [each]) == pytest.approx(0.8)


def test_only_tokens_of_both_predictions_are_compared_individually() -> None:
    exact = prediction([0.6, 0.3, 0.1], 2)
    other = prediction([0.6, 0.1, 0.3], 2)
    assert mean_mass([exact], [other]) == pytest.approx(0.6)
    assert divergence(exact, other) == pytest.approx(0.0)


def answer(*positions: dict[str, Any] | None) -> dict[str, Any]:
    choice = {"prompt_token_ids": [7, 8, 9], "prompt_logprobs": list(positions)}
    return {"choices": [choice]}


def test_the_first_token_of_a_prompt_has_no_prediction() -> None:
    entry = {"logprob": -0.5, "rank": 1, "decoded_token": "x"}
    found = predictions_of(answer(None, {"8": entry}, {"4": entry, "9": entry | {"logprob": -2}}))
    assert found == [Prediction(8, -0.5, {8: -0.5}), Prediction(9, -2.0, {4: -0.5, 9: -2.0})]


def rows(change: float, bound: float) -> list[bench.Row]:
    """Return rows with unchanged code and a changed perplexity of prose."""
    plain = Prediction(1, -2.0, {1: -2.0})
    other = Prediction(1, -2.0 - math.log1p(change), {1: -2.0 - math.log1p(change)})
    exact = {"prose": [plain], "code": [plain]}
    return compare(Setting("x", bound, ("--a", "b c")), exact, {"prose": [other], "code": [plain]})


def test_the_bound_applies_to_all_texts_together() -> None:
    prose, code, whole = rows(0.012, 0.5)
    assert (prose.text, code.text, whole.text) == ("prose", "code", "all")
    assert prose.perplexity_change_percent == pytest.approx(1.2)
    assert code.perplexity_change_percent == pytest.approx(0.0)
    assert whole.perplexity_change_percent == pytest.approx(0.598, abs=1e-3)
    assert [each.within_bound for each in (prose, code, whole)] == [True, True, False]
    assert rows(0.009, 0.5)[-1].within_bound
    assert not rows(-0.012, 0.5)[-1].within_bound, "a lower perplexity is out of bounds as well"


def test_the_document_names_texts_and_units() -> None:
    texts = [Text("prose", ("a", "b"))]
    found = json.loads(document(rows(0.0, 0.5), texts))
    assert found["texts_sha256"] == digest(texts)
    assert found["rows"][0]["kl_nats_per_token"] == pytest.approx(0.0)
    assert found["rows"][0]["flags"] == "--a 'b c'"
    assert digest(texts) != digest([Text("prose", ("ab",))])


def test_texts_are_long_enough_and_deterministic() -> None:
    prose, code = default_texts()
    assert (prose.kind, code.kind) == ("prose", "code")
    for text in (prose, code):
        assert sum(map(len, text.pieces)) == 20_000
        assert all(len(piece) == PIECE for piece in text.pieces[:-1])
    assert "import" in "".join(code.pieces)
    assert digest([prose, code]) == digest(default_texts())


def test_a_user_provided_text(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_text("x" * (PIECE + 1))
    assert text_of(path) == Text("own.txt", ("x" * PIECE, "x"))
    with pytest.raises(ConfigError, match=r"--text .*nowhere"):
        text_of(tmp_path / "nowhere")


@pytest.mark.parametrize("given", ["packed", "packed:x:--a", "packed:0.5", ":1:--a", "a:0:--a"])
def test_settings_are_parsed_as_name_bound_and_flags(given: str) -> None:
    with pytest.raises(ConfigError, match="NAME:PERCENT:FLAGS"):
        bench.main(["--setting", given])
