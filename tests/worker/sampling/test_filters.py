"""Filters against a slow reference that sorts Python lists, and against transformers."""

import math
import random

import numpy as np
import pytest
import torch
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.worker.sampling.settings import backend_of, each_backend, row_params, sampling_rows
from worker.sampling.sampler import Sampler


def reference_kept_ids(
    logits: list[float], temperature: float, k: int, p: float, m: float
) -> set[int]:
    """Token ids that pass min-p, then top-k, then top-p."""
    scores = [logit / temperature for logit in logits]
    best = max(scores)
    ranked = sorted(range(len(scores)), key=lambda token_id: (-scores[token_id], token_id))
    if m > 0:
        ranked = [each for each in ranked if scores[each] >= best + math.log(m)]
    if k > 0:
        ranked = ranked[:k]
    weights = [math.exp(scores[each] - best) for each in ranked]
    kept, reached, needed = set(), 0.0, p * sum(weights)
    for token_id, weight in zip(ranked, weights, strict=True):
        kept.add(token_id)
        reached += weight
        if p < 1 and reached >= needed:
            break
    return kept


def filtered(variant, logits: torch.Tensor, temperature, top_k, top_p, min_p) -> list[set[int]]:
    """Token ids that remain in every row; checks that their logits are unchanged."""
    masked = logits.clone()
    params = row_params(len(logits), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    backend_of(variant).filter(masked, np.arange(len(logits)), params)
    kept = masked != float("-inf")
    assert torch.equal(masked[kept], logits[kept])
    return [set(row.nonzero().squeeze(1).tolist()) for row in kept]


@each_backend
def test_filters_of_random_rows_match_the_reference(variant) -> None:
    rng = random.Random(5)
    generator = torch.Generator().manual_seed(5)
    vocab_size = 211
    logits = torch.randn(60, vocab_size, generator=generator) * 2
    temperature = [rng.choice([0.5, 1.0, 2.0]) for _ in range(60)]
    top_k = [rng.choice([0, 0, 1, 2, 9, 210, 211, 500]) for _ in range(60)]
    top_p = [rng.choice([1.0, 1.0, 0.01, 0.5, 0.9, 0.999]) for _ in range(60)]
    min_p = [rng.choice([0.0, 0.0, 0.05, 0.3, 1.0]) for _ in range(60)]
    kept = filtered(variant, logits, temperature, top_k, top_p, min_p)
    settings = zip(temperature, top_k, top_p, min_p, strict=True)
    for row, (t, k, p, m) in enumerate(settings):
        assert kept[row] == reference_kept_ids(logits[row].tolist(), t, k, p, m), (row, t, k, p, m)


@each_backend
def test_a_whole_vocabulary_of_nearly_equal_tokens(variant) -> None:
    """Top-p keeps tens of thousands of tokens; rounding may move its edge a little."""
    logits = torch.randn(1, 49152, generator=torch.Generator().manual_seed(2)) * 0.1
    (kept,) = filtered(variant, logits, 1.0, 0, 0.95, 0.0)
    slow = reference_kept_ids(logits[0].tolist(), 1.0, 0, 0.95, 0.0)
    assert len(slow) > 40_000
    assert len(kept ^ slow) <= 3


@each_backend
@pytest.mark.parametrize("top_k", [1, 3, 4, 5, 8])
def test_top_k_is_exact_and_ties_go_to_the_lower_id(variant, top_k: int) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, -0.0, 1.0, 2.0, 3.0]])
    order = [7, 1, 3, 6, 2, 5, 0, 4]
    assert filtered(variant, logits, 1.0, top_k, 1.0, 0.0) == [set(order[:top_k])]


@each_backend
def test_top_p_ties_go_to_the_lower_id(variant) -> None:
    assert filtered(variant, torch.zeros(1, 10), 1.0, 0, 0.35, 0.0) == [{0, 1, 2, 3}]


@each_backend
def test_filters_never_drop_the_best_token(variant) -> None:
    logits = torch.tensor([[0.1, 0.2, 0.3]])
    assert filtered(variant, logits, 1e-4, 1, 1e-6, 1.0) == [{2}]


@each_backend
def test_min_p_is_relative_to_the_best(variant) -> None:
    logits = torch.full((1, 1000), 0.01)
    logits[0, 0] = 10.0
    assert filtered(variant, logits, 1.0, 0, 1.0, 0.1) == [{0}]


@each_backend
def test_top_p_applies_to_the_tokens_left_by_top_k_and_min_p(variant) -> None:
    """Of probabilities .4 .3 .2 .1, top-k 2 leaves .57 .43, so p = .5 keeps one."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert filtered(variant, logits, 1.0, 0, 0.5, 0.0) == [{0, 1}]
    assert filtered(variant, logits, 1.0, 2, 0.5, 0.0) == [{0}]
    assert filtered(variant, logits, 1.0, 0, 0.5, 0.7) == [{0}]


@each_backend
def test_rows_without_filters_are_untouched(variant) -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(4))
    masked = logits.clone()
    backend_of(variant).filter(masked, np.array([1, 3]), row_params(2, top_k=[2, 0]))
    assert torch.equal(masked[[0, 2, 3]], logits[[0, 2, 3]])
    assert masked[1].isfinite().sum() == 2


@each_backend
def test_suppressed_tokens_are_never_kept(variant) -> None:
    logits = torch.tensor([[float("-inf"), 1.0, 2.0, float("-inf")]])
    assert filtered(variant, logits, 1.0, 3, 1.0, 0.0) == [{1, 2}]
    assert filtered(variant, logits, 1.0, 0, 0.999, 0.0) == [{1, 2}]


@each_backend
def test_filters_keep_the_tokens_that_transformers_keeps(variant) -> None:
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(40, 211, generator=generator) * 2
    ids = torch.zeros(40, 1, dtype=torch.int64)
    for temperature in (0.6, 1.0, 1.8):
        scores = TemperatureLogitsWarper(temperature)(ids, logits)
        for warper, settings in (
            (TopKLogitsWarper(17), (17, 1.0, 0.0)),
            (TopPLogitsWarper(0.8), (0, 0.8, 0.0)),
            (MinPLogitsWarper(0.07), (0, 1.0, 0.07)),
        ):
            expected = warper(ids, scores.clone()) > float("-inf")
            kept = filtered(variant, logits, temperature, *settings)
            assert kept == [set(row.nonzero().squeeze(1).tolist()) for row in expected]


@each_backend
def test_min_tokens_suppresses_stop_tokens_like_transformers(variant) -> None:
    """Before min_tokens, stop tokens cannot be chosen; afterwards they can."""
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(7))
    logits[:, [3, 9]] += 20.0
    processor = MinNewTokensLengthLogitsProcessor(4, 3, [3, 9], device="cpu")
    for num_outputs in (0, 2, 3):
        tokens = torch.zeros(2, 4 + num_outputs, dtype=torch.int64)
        expected = processor(tokens, logits.clone()).argmax(1).tolist()
        out = np.array([3, 9])
        early = [(0, out), (1, out)] if num_outputs < 3 else []
        rows = sampling_rows(2, temperature=0.0, suppressed=early)
        token_ids, _ = Sampler(backend_of(variant)).sample(logits.clone(), rows)
        assert token_ids.tolist() == expected
