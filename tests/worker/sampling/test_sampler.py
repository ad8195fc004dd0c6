"""The sampler as a whole: order of stages, greedy rows, logprobs, determinism."""

import numpy as np
import torch

from tests.worker.sampling.settings import backend_of, each_backend, sampling_rows
from tests.worker.sampling.unpacked import unpack
from worker.cpu.sampling import create_sampler
from worker.sampling.sampler import Sampler

VOCAB = 400


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


@each_backend
def test_greedy_takes_the_lowest_id_of_equal_tokens(variant) -> None:
    logits = random_logits(3)
    logits[:, [50, 30, 390]] = 9.0
    sampler = Sampler(backend_of(variant))
    for temperature in (0.0, [0.0, 1e-6, 0.0], [0.0, 0.9, 0.0]):
        token_ids, logprobs = sampler.sample(
            logits.clone(), sampling_rows(3, temperature=temperature)
        )
        assert token_ids.dtype == np.int64
        assert token_ids[[0, 2]].tolist() == [30, 30]
        assert logprobs == [None, None, None]


@each_backend
def test_top_k_one_is_greedy_also_in_a_tie(variant) -> None:
    logits = random_logits(8)
    logits[:, [70, 20]] = 9.0
    rows = sampling_rows(8, temperature=1.5, top_k=1, seed=np.arange(8))
    token_ids, _ = Sampler(backend_of(variant)).sample(logits, rows)
    assert token_ids.tolist() == [20] * 8


@each_backend
def test_rows_of_every_kind_do_not_depend_on_the_batch(variant) -> None:
    sampler, logits = Sampler(backend_of(variant)), random_logits(12, seed=3)
    settings = {
        "temperature": [0.0, 1.0, 0.7, 1.3] * 3,
        "top_k": [0, 0, 5, 0, 3, 0, 0, 40, 0, 2, 0, 0],
        "top_p": [1.0, 0.9, 1.0, 1.0, 0.5, 1.0] * 2,
        "min_p": [0.0, 0.0, 0.0, 0.2] * 3,
        "seed": list(range(12)),
        "choice": [0, 1, 2] * 4,
        "position": list(range(20, 32)),
        "num_logprobs": [-1, 0, 3, -1, 5, -1] * 2,
    }
    token_ids, logprobs = sampler.sample(logits.clone(), sampling_rows(12, **settings))
    for row in range(12):
        one = {name: values[row] for name, values in settings.items()}
        alone, alone_logprobs = sampler.sample(
            logits[row : row + 1].clone(), sampling_rows(1, **one)
        )
        assert alone[0] == token_ids[row]
        assert alone_logprobs[0] == logprobs[row]


@each_backend
def test_drawn_tokens_equal_the_reference(variant) -> None:
    rows = sampling_rows(
        64, temperature=0.9, top_k=30, top_p=0.9, min_p=0.02, seed=np.arange(64) * 31
    )
    logits = random_logits(64, seed=9)
    drawn, _ = Sampler(backend_of(variant)).sample(logits.clone(), rows)
    reference, _ = Sampler(backend_of("reference")).sample(logits.clone(), rows)
    assert drawn.tolist() == reference.tolist()
    assert len(set(drawn.tolist())) > 30


@each_backend
def test_suppressed_tokens_are_not_chosen_but_keep_their_logprob(variant) -> None:
    logits = random_logits(3)
    logits[:, 11], logits[:, 12] = 30.0, 20.0
    out = np.array([11, 399])
    rows = sampling_rows(
        3, temperature=[0.0, 1.0, 1.0], num_logprobs=1, suppressed=[(0, out), (1, out)]
    )
    token_ids, logprobs = Sampler(backend_of(variant)).sample(logits.clone(), rows)
    assert token_ids.tolist() == [12, 12, 11]
    expected = logits.double().log_softmax(1)
    for row, rank in enumerate([2, 2, 1]):
        ids, values, ranks = unpack(logprobs[row])
        assert ids.tolist() == [[token_ids[row], 11]]
        assert np.abs(values[0] - expected[row, ids[0]].numpy()).max() < 1e-5
        assert ranks.tolist() == [rank]


@each_backend
def test_logprobs_are_of_the_raw_logits(variant) -> None:
    """Neither temperature nor filters affect log-probabilities; positions are the row's own."""
    logits = random_logits(2)
    rows = sampling_rows(2, temperature=0.2, top_k=2, num_logprobs=[4, -1], position=[17, 3])
    _, logprobs = Sampler(backend_of(variant)).sample(logits.clone(), rows)
    ids, values, _ = unpack(logprobs[0])
    assert logprobs[0].first_position == 17
    assert logprobs[1] is None
    assert np.abs(values[0] - logits.log_softmax(1)[0, ids[0]].numpy()).max() < 1e-5


@each_backend
def test_choices_and_positions_have_different_draws(variant) -> None:
    logits = random_logits(1).repeat(40, 1) * 0.1
    rows = sampling_rows(40, temperature=1.0, choice=[0, 1] * 20, position=np.arange(40) // 2)
    tokens, _ = Sampler(backend_of(variant)).sample(logits, rows)
    assert len(set(tokens.tolist())) > 30


def test_a_sampler_is_selected_for_this_machine() -> None:
    token_ids, _ = create_sampler().sample(random_logits(2), sampling_rows(2, temperature=1.0))
    assert token_ids.shape == (2,)
