"""Every attention backend against float64 on random steps."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.worker.attention.steps import LAYER, Case, Step
from tests.worker.kernel_variants import each_variant, load_variant
from worker.attention.base import AttentionBackend
from worker.attention.cpu import CpuAttention
from worker.attention.reference import ReferenceAttention
from worker.kv_cache import KVCache, kv_cache_geometry

# Largest error beside the largest value: float32 keeps 1e-5, the 16-bit types are
# compared after rounding the output to 8 or 11 bits.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}
DTYPES = list(TOLERANCE)

CASES = {
    "first token": Case(((0, 1),)),
    "one decode": Case(((37, 1),)),
    "decodes of all lengths": Case(((0, 1), (15, 1), (16, 1), (63, 1), (64, 1), (65, 1), (999, 1))),
    "long decode in pieces": Case(((2100, 1),)),
    "prompt": Case(((0, 200),)),
    "chunk after a long prefix": Case(((1500, 40),)),
    "mixed batch": Case(((100, 1), (0, 33), (7, 2), (257, 1), (40, 70))),
    "one kv head, wide": Case(((90, 1), (3, 20)), num_heads=4, num_kv_heads=1, head_dim=256),
    "sixteen heads a group": Case(((300, 1), (0, 9)), num_heads=16, num_kv_heads=1),
    "no grouping": Case(((70, 1), (5, 30)), num_heads=3, num_kv_heads=3),
    "head_dim 24, block 1": Case(((9, 1), (3, 20)), head_dim=24, block_size=1),
    "head_dim 8, block 4": Case(((50, 3), (0, 17)), head_dim=8, block_size=4),
    "head_dim 80, block 32": Case(((130, 1), (33, 66)), head_dim=80, block_size=32),
    "head_dim 128, block 256": Case(((700, 1), (3, 20)), head_dim=128, block_size=256),
}


def error_of(step: Step, backend: AttentionBackend) -> float:
    """Largest error beside the largest value; NaN when anything leaked."""
    expected = step.expected()
    output = step.run(backend)
    return float((output.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_reference_matches_float64(name: str, dtype: torch.dtype) -> None:
    step = Step(replace(CASES[name], dtype=dtype))
    assert error_of(step, ReferenceAttention(step.kv_cache, step.case.shape)) < TOLERANCE[dtype]


@each_variant
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_kernels_match_float64(name: str, dtype: torch.dtype, variant) -> None:
    step = Step(replace(CASES[name], dtype=dtype))
    backend = CpuAttention(load_variant(variant), step.kv_cache, step.case.shape)
    assert error_of(step, backend) < TOLERANCE[dtype]


@each_variant
def test_kernels_match_float64_on_random_steps(variant) -> None:
    rng = random.Random(7)
    for seed in range(25):
        kv_heads = rng.choice([1, 2, 3, 5])
        case = Case(
            sequences=tuple(
                (rng.choice([0, rng.randrange(400)]), rng.choice([1, 1, 1, rng.randrange(1, 60)]))
                for _ in range(rng.randrange(1, 6))
            ),
            num_heads=kv_heads * rng.choice([1, 2, 3, 4, 7, 12]),
            num_kv_heads=kv_heads,
            head_dim=rng.choice([8, 16, 24, 48, 64, 96]),
            block_size=rng.choice([1, 2, 8, 16, 64]),
            dtype=rng.choice(DTYPES),
            seed=seed,
        )
        step = Step(case)
        backend = CpuAttention(load_variant(variant), step.kv_cache, case.shape)
        assert error_of(step, backend) < TOLERANCE[case.dtype], case


@each_variant
def test_a_row_does_not_depend_on_its_batch(variant) -> None:
    """The same sequence alone and among others gives the same bits."""
    sequences = ((600, 1), (3, 1), (0, 50), (1200, 1), (20, 30))
    together = Step(Case(sequences))
    kernels = load_variant(variant)
    batch = together.run(CpuAttention(kernels, together.kv_cache, together.case.shape))
    for row in range(len(sequences)):
        backend = CpuAttention(kernels, together.kv_cache, together.case.shape)
        alone = together.only(row)
        backend.plan(alone)
        tokens = slice(*together.inputs.query_start[row : row + 2])
        output = backend.run(
            LAYER, together.query[tokens], together.key[tokens], together.value[tokens]
        )
        assert torch.equal(output, batch[tokens])


@each_variant
def test_number_of_threads_does_not_change_a_bit(variant) -> None:
    step = Step(Case(((600, 1), (0, 150), (1400, 1))))
    backend = CpuAttention(load_variant(variant), step.kv_cache, step.case.shape)
    before = torch.get_num_threads()
    try:
        outputs = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            outputs.append(step.run(backend))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*outputs)


@each_variant
def test_only_the_slots_of_the_step_are_written(variant) -> None:
    step = Step(Case(((20, 3), (5, 1))))
    before = step.kv_cache.buffer.clone()
    step.run(CpuAttention(load_variant(variant), step.kv_cache, step.case.shape))
    slots = step.inputs.slot_mapping
    blocks, offsets = slots // step.case.block_size, slots % step.case.block_size
    changed = step.kv_cache.buffer.clone()
    for part, tokens in enumerate((step.key, step.value)):
        written = changed[blocks, LAYER, part, :, offsets]
        assert torch.equal(written, tokens)
        changed[blocks, LAYER, part, :, offsets] = before[blocks, LAYER, part, :, offsets]
    assert torch.equal(changed.view(torch.int32), before.view(torch.int32))


@each_variant
def test_infinite_scores_in_float16_stay_apart(variant) -> None:
    """A value of one sequence that overflows is nobody else's business."""
    step = Step(Case(((40, 1), (40, 1)), dtype=torch.float16))
    step.value[0] = float("inf")
    output = step.run(CpuAttention(load_variant(variant), step.kv_cache, step.case.shape))
    assert not output[0].isfinite().any()
    assert output[1].isfinite().all()


def test_head_dim_must_be_a_multiple_of_eight() -> None:
    cache = KVCache(kv_cache_geometry(1, 1, 12, torch.float32), 2, 16)
    with pytest.raises(ValueError, match="multiple of 8"):
        CpuAttention(None, cache, Case(((0, 1),), head_dim=12).shape)  # type: ignore[arg-type]


def test_inputs_count_tokens_and_sequences() -> None:
    inputs = Step(Case(((3, 2), (0, 4)))).inputs
    assert (inputs.num_tokens, inputs.num_seqs) == (6, 2)
    assert inputs.block_table.flags.c_contiguous
    assert inputs.slot_mapping.dtype == np.int64
