"""Grammar masks in the sampler: they affect only their rows, and not log-probabilities."""

import dataclasses

import numpy as np
import pytest
import torch

from proto.messages.scheduler_output import GrammarOutput
from tests.worker.sampling.settings import backend_of, each_backend, sampling_rows
from tests.worker.sampling.unpacked import unpack
from worker.sampling.logit_edits import apply_grammar_masks, grammar_masks
from worker.sampling.sampler import Sampler

VOCAB = 403  # not a multiple of 32


def packed(allowed: dict[int, list[int]], vocab_size: int = VOCAB) -> GrammarOutput:
    """Pack masks by seq_id with a simple loop."""
    words = []
    for tokens in allowed.values():
        row = [0] * -(-vocab_size // 32)
        for token in tokens:
            row[token // 32] += 1 << token % 32
        words.append(row)
    return GrammarOutput(1, 1, list(allowed), np.array(words, dtype="<u4").tobytes())


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 403, 49_152])
def test_disallowed_tokens_become_minus_infinity(vocab_size):
    draw = np.random.default_rng(vocab_size)
    logits = torch.from_numpy(draw.standard_normal((5, vocab_size)).astype(np.float32))
    allowed = {
        seq_id: sorted(set(draw.integers(0, vocab_size, 40).tolist())) for seq_id in (70, 90)
    }
    masked = logits.clone()
    apply_grammar_masks(masked, grammar_masks(packed(allowed, vocab_size), [50, 90, 60, 70, 80]))
    for row, seq_id in ((1, 90), (3, 70)):
        rest = sorted(set(range(vocab_size)) - set(allowed[seq_id]))
        assert torch.equal(masked[row, allowed[seq_id]], logits[row, allowed[seq_id]])
        assert (masked[row, rest] == -torch.inf).all()
    assert torch.equal(masked[[0, 2, 4]], logits[[0, 2, 4]])


def test_masks_of_absent_sequences_are_ignored():
    logits = torch.ones(2, VOCAB)
    apply_grammar_masks(logits, grammar_masks(packed({7: [1]}), [1, 2]))
    apply_grammar_masks(logits, grammar_masks(GrammarOutput(1, 1, [], b""), [1, 2]))
    assert (logits == 1).all()


@each_backend
def test_constrained_rows_do_not_change_others(variant):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(64, VOCAB, generator=generator) * 2
    rows = sampling_rows(
        64,
        temperature=[0.0, 1.3, 0.8, 1.0] * 16,
        top_k=[0, 0, 9, 0] * 16,
        top_p=[1.0, 1.0, 1.0, 0.5] * 16,
        seed=np.arange(64),
        num_logprobs=[-1, 0] * 32,
    )
    draw = np.random.default_rng(0)
    seq_ids = list(range(100, 164))
    allowed = {100 + row: sorted(draw.integers(0, VOCAB, 5).tolist()) for row in range(0, 64, 3)}
    masks = grammar_masks(
        packed({each: sorted(set(ids)) for each, ids in allowed.items()}), seq_ids
    )
    sampler = Sampler(backend_of(variant))
    free, _ = sampler.sample(logits.clone(), rows)
    bound, logprobs = sampler.sample(logits.clone(), dataclasses.replace(rows, masks=masks))
    for row, seq_id in enumerate(seq_ids):
        token = int(bound[row])
        if seq_id in allowed:
            assert token in allowed[seq_id]
            if rows.params["temperature"][row] == 0.0:
                assert token == max(allowed[seq_id], key=lambda each: float(logits[row, each]))
        else:
            assert token == free[row]
        if rows.num_logprobs[row] >= 0:
            arrays = logprobs[row]
            assert arrays is not None
            raw = torch.log_softmax(logits[row].double(), dim=0)[token]
            assert unpack(arrays)[1][0, 0] == pytest.approx(float(raw), abs=1e-4)
