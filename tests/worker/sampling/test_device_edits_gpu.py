"""Logits edited on a GPU equal, bit for bit, logits edited by torch on the host."""

import random

import numpy as np
import pytest
import torch

from tests.worker.reference.torch_kernels import TorchEdits
from tests.worker.sampling.test_device_edits import (
    NUM_ROWS,
    last_positions,
    new_request,
    random_masks,
    random_params,
    step_of,
)
from worker.batch.input_batch import InputBatch
from worker.cuda.sampling.device_kernels import ListedEdits, RowEditArrays, TritonEdits
from worker.cuda.sampling.device_sampler import batch_logit_edits

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


@pytest.mark.parametrize("vocab_size", [97, 1031, 128_256])
def test_random_edits_equal_those_of_the_host(vocab_size: int) -> None:
    rng = random.Random(vocab_size)
    rows, seq_ids = InputBatch(NUM_ROWS, 64, 16), list(range(50, 50 + NUM_ROWS))
    at = rows.apply(step_of([new_request(each, rng, **random_params(rng)) for each in seq_ids]))
    positions = last_positions(rows, at, seq_ids)
    masks = random_masks(rng, seq_ids, vocab_size)
    batch_edits = batch_logit_edits(rows, positions, masks, vocab_size)
    logits = 3 * torch.randn(NUM_ROWS, vocab_size)
    counts = torch.randint(0, 4, (NUM_ROWS, vocab_size), dtype=torch.int32)
    slots = np.arange(len(batch_edits.positions)) - 2
    arrays = [
        batch_edits.positions,
        np.maximum(slots, -1),
        batch_edits.masks,
        batch_edits.rules,
        batch_edits.words,
    ]
    last = torch.zeros(NUM_ROWS, dtype=torch.int64)
    found = []
    for device, kernels in ((torch.device("cpu"), TorchEdits()), (CUDA, TritonEdits())):
        device_logits = logits.clone().to(device)
        listed, changes = (
            [torch.from_numpy(each).to(device) for each in some]
            for some in (batch_edits.listed, arrays)
        )
        kernels.add_listed(device_logits, ListedEdits(*listed), last.to(device))
        kernels.edit_rows(device_logits, RowEditArrays(*changes), counts.to(device))
        found.append(device_logits.cpu())
    assert torch.equal(*found)
