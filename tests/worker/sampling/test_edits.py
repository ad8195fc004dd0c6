"""Penalties, biases, bad words and allowed tokens, against a slow reference and transformers."""

import math
import random

import numpy as np
import pytest
import torch
from transformers import (
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from proto.messages.logit_edits import LogitEdits
from tests.worker.sampling.edit_cases import (
    NEVER,
    VOCAB,
    edit_one_by_one,
    grown_edits,
    random_edits,
)
from tests.worker.sampling.settings import backend_of, each_backend, sampling_rows
from tests.worker.sampling.unpacked import unpack
from worker.sampling.logit_edits import BadWords, RowEdits, TokenCounts, edit_logits
from worker.sampling.sampler import Sampler


@pytest.mark.parametrize("make", [RowEdits, grown_edits])
@pytest.mark.parametrize("seed", range(4))
def test_random_edits_equal_the_slow_reference(make, seed: int) -> None:
    rng = random.Random(seed)
    rows = 40
    logits = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    asked, expected = [], logits.clone()
    for row in range(rows):
        if rng.random() < 0.2:
            continue
        edits = random_edits(rng)
        edits = LogitEdits(**{**fields_of(edits), "bias_values": rounded(edits.bias_values)})
        prompt = rng.choices(range(VOCAB), k=rng.randint(1, 30))
        outputs = rng.choices(range(6), k=rng.randint(0, 40))
        asked.append((row, make(edits, prompt, outputs)))
        expected[row] = torch.tensor(edit_one_by_one(logits[row].tolist(), edits, prompt, outputs))
    edit_logits(logits, asked)
    assert torch.equal(logits == NEVER, expected == NEVER)
    assert torch.allclose(logits, expected, rtol=1e-5, atol=1e-5)
    assert (expected == NEVER).any()


def fields_of(edits: LogitEdits) -> dict[str, object]:
    return {name: getattr(edits, name) for name in LogitEdits.__struct_fields__}


def rounded(values: tuple[float, ...]) -> tuple[float, ...]:
    """Round to float32."""
    return tuple(float(np.float32(value)) for value in values)


def test_repetition_penalty_equals_transformers() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(5, VOCAB, generator=generator) * 4
    tokens = torch.randint(0, VOCAB, (5, 24), generator=generator)
    processor = RepetitionPenaltyLogitsProcessor(penalty=1.7)
    expected = processor(tokens, logits.clone())
    edits = LogitEdits(repetition_penalty=1.7)
    edit_logits(
        logits,
        [(i, RowEdits(edits, row[:10], row[10:])) for i, row in enumerate(tokens.tolist())],
    )
    assert torch.allclose(logits, expected)


def test_bad_words_equal_transformers() -> None:
    """transformers checks the prompt as well, so all tokens are outputs here."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(30, VOCAB, generator=generator)
    tokens = torch.randint(0, 4, (30, 9), generator=generator)
    words = [[7], [0, 1], [0, 2, 3], [1, 1], [3, 2, 1, 0], [2, 2, 2]]
    expected = NoBadWordsLogitsProcessor(words)(tokens, logits.clone())
    edits = LogitEdits(bad_words=tuple(map(tuple, words)))
    edit_logits(logits, [(i, RowEdits(edits, [], row)) for i, row in enumerate(tokens.tolist())])
    assert torch.equal(logits, expected)
    assert len({int(count) for count in (logits == NEVER).sum(1)}) > 1


def test_bias_equals_transformers() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(5))
    bias = {(3,): 5.5, (90,): -7.25}
    expected = SequenceBiasLogitsProcessor(bias)(torch.zeros(1, 1, dtype=torch.int64), logits)
    edited = logits.clone()
    edits = LogitEdits(bias_token_ids=(3, 90), bias_values=(5.5, -7.25))
    edit_logits(edited, [(0, RowEdits(edits, [], []))])
    assert torch.allclose(edited, expected)


def test_rows_without_edits_keep_their_bits() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(6))
    before = logits.clone()
    edits = LogitEdits(presence_penalty=1.0, allowed_token_ids=(4, 5), bad_words=((4,),))
    edit_logits(logits, [(1, RowEdits(edits, [1, 2], [3]))])
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    assert (logits[1] > NEVER).nonzero().tolist() == [[5]]


def test_counts_grow_with_appended_tokens() -> None:
    rng = random.Random(8)
    outputs = rng.choices(range(50), k=300)
    grown, begin = TokenCounts([1, 2, 2, 99], []), TokenCounts([1, 2, 2, 99], outputs[:100])
    for token_id in outputs:
        grown.count_output(token_id)
    behind = begin.after(outputs[100:])
    assert begin.counts.sum() == 100, "the counts of a draft are apart"
    for counts in (grown, behind, TokenCounts([1, 2, 2, 99], outputs)):
        found = dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))
        assert len(found) == len(counts.ids)
        assert found == {each: outputs.count(each) for each in {*outputs, 1, 2, 99}}


def test_a_bad_word_is_forbidden_only_at_its_last_token() -> None:
    words = BadWords([(5,), (1, 2, 3), (2, 4)], [1])
    assert words.forbidden == [5]
    words.append(2)
    assert words.forbidden == [5, 4, 3]
    words.append(2)
    assert words.forbidden == [5, 4]


@each_backend
def test_rows_with_edits_do_not_depend_on_the_batch(variant) -> None:
    """Greedy and drawn rows; log-probabilities are of the logits before edits."""
    rng = random.Random(11)
    sampler = Sampler(backend_of(variant))
    logits = torch.randn(16, VOCAB, generator=torch.Generator().manual_seed(11)) * 2
    settings = {
        "temperature": [0.0, 1.0, 0.7, 1.3] * 4,
        "top_k": [0, 5, 0, 0] * 4,
        "seed": list(range(16)),
        "num_logprobs": [-1, 3] * 8,
    }
    edits = {
        row: RowEdits(random_edits(rng), rng.choices(range(VOCAB), k=9), rng.choices(range(6), k=9))
        for row in range(0, 16, 3)
    }
    token_ids, logprobs = sampler.sample(
        logits.clone(), sampling_rows(16, edits=tuple(edits.items()), **settings)
    )
    for row in range(16):
        one = {name: values[row] for name, values in settings.items()}
        mine = ((0, edits[row]),) if row in edits else ()
        alone, alone_logprobs = sampler.sample(
            logits[row : row + 1].clone(), sampling_rows(1, edits=mine, **one)
        )
        assert alone[0] == token_ids[row]
        assert alone_logprobs[0] == logprobs[row]
    raw = logits.log_softmax(1)
    ids, values, _ = unpack(logprobs[3])
    assert np.abs(values[0] - raw[3, ids[0]].numpy()).max() < 1e-5


@each_backend
def test_logprobs_of_tokens_that_are_named(variant) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(12))
    named = np.array([5, 96, 5], dtype=np.int64)
    rows = sampling_rows(3, num_logprobs=[2, 0, 2], named=((1, named),), position=[7, 8, 9])
    _, logprobs = Sampler(backend_of(variant)).sample(logits.clone(), rows)
    ids, values, ranks = unpack(logprobs[1])
    chosen = int(logits[1].argmax())
    assert ids.tolist() == [[chosen, 5, 96, 5]]
    assert np.abs(values[0] - logits[1].log_softmax(0)[ids[0]].numpy()).max() < 1e-5
    assert ranks.tolist() == [1]
    assert logprobs[1].first_position == 8
    assert unpack(logprobs[0])[0].shape == (1, 3)


def test_penalties_at_their_limits_give_finite_logits() -> None:
    logits = torch.tensor([[80.0, -80.0, 0.0, 1.0]])
    for repetition in (0.01, 100.0):
        edits = LogitEdits(
            repetition_penalty=repetition, frequency_penalty=2.0, presence_penalty=2.0
        )
        edited = logits.clone()
        edit_logits(edited, [(0, RowEdits(edits, [0, 1], [2] * 5000))])
        assert math.isfinite(edited.abs().sum())
        assert edited[0, 2] == -10002.0
