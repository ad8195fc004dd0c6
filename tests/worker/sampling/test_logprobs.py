"""Log-probabilities, ranks and their packing."""

import numpy as np
import pytest
import torch

from tests.worker.sampling.unpacked import unpack
from worker.sampling import logprobs
from worker.sampling.token_order import best_tokens, order_keys, token_ids_of, token_ranks


def random_logits(rows: int, vocab_size: int = 97) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(rows))


def test_rows_with_different_counts() -> None:
    logits, chosen = random_logits(3), np.array([5, 90, 0])
    packed = logprobs.row_logprobs(
        logits, chosen, np.array([0, 4, 2], dtype=np.int32), np.array([9, 8, 7], dtype=np.uint32)
    )
    expected = logits.double().log_softmax(1)
    for row, (arrays, count) in enumerate(zip(packed, [0, 4, 2], strict=True)):
        ids, values, ranks = unpack(arrays)
        order = expected[row].argsort(descending=True).tolist()
        assert arrays.width == count + 1
        assert arrays.first_position == [9, 8, 7][row]
        assert ids.tolist() == [[chosen[row], *order[:count]]]
        assert np.abs(values[0] - expected[row, ids[0]].numpy()).max() < 1e-5
        assert ranks.tolist() == [order.index(chosen[row]) + 1]


def test_best_continuations_are_in_order_and_suppressed_ones_last() -> None:
    logits = random_logits(2)
    expected = logits.double().log_softmax(1)
    order = [each.argsort(descending=True).tolist() for each in expected]
    banned = np.array(order[1][:2])
    packed = logprobs.best_continuations(
        logits,
        np.array([3, 97], dtype=np.int32),
        np.array([4, 5], dtype=np.uint32),
        [(1, banned)],
    )
    ids, values, _ = unpack(packed[0])
    assert ids.tolist() == [order[0][:3]]
    assert np.abs(values[0] - expected[0, ids[0]].numpy()).max() < 1e-5
    ids, values, _ = unpack(packed[1])
    assert ids[0, :-2].tolist() == order[1][2:]
    assert np.isneginf(values[0, -2:]).all()
    assert np.abs(values[0, :-2] - expected[1, ids[0, :-2]].numpy()).max() < 1e-5
    assert [each.first_position for each in packed] == [4, 5]


@pytest.mark.parametrize("chunk_rows", [1, 3, 100])
def test_prompt_logprobs_do_not_depend_on_the_chunks(
    chunk_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, tokens = random_logits(10), np.arange(10) * 9
    whole = logprobs.prompt_logprobs(logits, tokens, 3, 1)
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", chunk_rows * 4 * logits.shape[1])
    assert logprobs.prompt_logprobs(logits, tokens, 3, 1) == whole
    ids, values, ranks = unpack(whole)
    assert ids.shape == (10, 4)
    assert ids[:, 0].tolist() == tokens.tolist()
    assert np.all(np.diff(values[:, 1:], axis=1) <= 0)
    assert np.abs(values[:, 0] - logits.log_softmax(1)[range(10), tokens].numpy()).max() < 1e-5
    assert ranks.min() >= 1


def test_a_chunk_is_at_most_64_mib() -> None:
    assert logprobs.CHUNK_BYTES == 64 << 20


def test_ties_are_ordered_by_id_also_at_the_cutoff() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 3.0, 1.0, -0.0, 0.0], [0.0] * 7])
    assert best_tokens(logits, 4).tolist() == [[1, 3, 0, 2], [0, 1, 2, 3]]
    assert best_tokens(logits, 7).tolist() == [[1, 3, 0, 2, 4, 5, 6], list(range(7))]
    assert best_tokens(logits, 0).shape == (2, 0)
    assert token_ranks(logits, torch.tensor([[4], [6]])).tolist() == [5, 7]


def test_order_keys_sort_every_kind_of_float() -> None:
    values = [float("-inf"), -3e38, -1.5, -1e-40, 0.0, 1e-40, 2.0, 3e38, float("inf")]
    logits = torch.tensor([values])
    keys = order_keys(logits)
    assert keys.argsort(dim=1).tolist() == [list(range(len(values)))]
    assert token_ids_of(keys).tolist() == [list(range(len(values)))]
