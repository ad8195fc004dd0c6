"""Every attention backend against float64 on random steps."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.worker.attention.steps import LAYER, Case, Step
from tests.worker.kernel_variants import (
    LOADABLE,
    THREADS,
    each_variant,
    load_variant,
    threads_of_torch,
)
from worker.attention.backend import AttentionBackend, AttentionInputs, AttentionShape, Rotation
from worker.attention.kv_cache import Int8Pages, KVCache, kv_cache_geometry, kv_layout
from worker.cpu.attention import (
    MOST_PARTIAL_BYTES,
    AttentionPlan,
    CpuAttention,
    UnsupportedShapeError,
)
from worker.cpu.kernel_structures import AttentionStep
from worker.reference.attention import ReferenceAttention

# Largest error relative to the largest value: 1e-5 for float32; the 16-bit types are compared after
# rounding the output to 8 or 11 bits. Kernels that multiply in bfloat16 round the attention weights
# to 8 bits too: the relative error of a weight is at most 2^-9, so that of the sum is at most 2^-9
# of the largest visible value, usually far less.
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}
DTYPES = list(TOLERANCE)
KV_DTYPES = [*DTYPES, torch.int8]
PAIRS = [*zip(DTYPES, DTYPES, strict=True), *((each, torch.int8) for each in DTYPES)]
"""Of activations and cache."""

CASES = {
    "first token": Case(((0, 1),)),
    "one decode": Case(((37, 1),)),
    "decodes of all lengths": Case(((0, 1), (15, 1), (16, 1), (63, 1), (64, 1), (65, 1), (999, 1))),
    "long decode in splits": Case(((2100, 1),)),
    "prompt": Case(((0, 200),)),
    "chunk after a long prefix": Case(((1500, 40),)),
    "mixed batch": Case(((100, 1), (0, 33), (7, 2), (257, 1), (40, 70))),
    "one kv head, wide": Case(((90, 1), (3, 20)), num_heads=4, num_kv_heads=1, head_dim=256),
    "sixteen heads a group": Case(((300, 1), (0, 9)), num_heads=16, num_kv_heads=1),
    "no grouping": Case(((70, 1), (5, 30)), num_heads=3, num_kv_heads=3),
    "window, one decode": Case(((900, 1), (3, 1), (511, 1), (512, 1)), window=512),
    "window of one token": Case(((40, 1), (0, 30)), window=1),
    "window, prompt": Case(((0, 200),), window=33),
    "window, chunk after a long prefix": Case(((1500, 40),), window=100),
    "window over splits of many rows": Case(((2500, 60),), window=2400),
    "window, few rows across chunks": Case(((300, 2), (63, 7)), window=65, num_heads=3),
    "window, one kv head, wide": Case(
        ((2100, 1), (700, 50)), num_heads=4, num_kv_heads=1, head_dim=256, window=512
    ),
    "head_dim 24, block 1": Case(((9, 1), (3, 20)), head_dim=24, block_size=1),
    "head_dim 8, block 4": Case(((50, 3), (0, 17)), head_dim=8, block_size=4),
    "head_dim 80, block 32": Case(((130, 1), (33, 66)), head_dim=80, block_size=32),
    "head_dim 128, block 256": Case(((700, 1), (3, 20)), head_dim=128, block_size=256),
    "head_dim 128, group of 4": Case(((300, 70), (513, 1)), 8, 2, 128),
    "head_dim 32, group of 12": Case(((70, 40), (1100, 1)), 12, 1, 32),
    "head_dim 96": Case(((270, 40), (300, 1)), head_dim=96),
    "prompt of several splits": Case(((0, 600),), num_heads=3, num_kv_heads=1),
    "decodes of many splits, ten kv heads": Case(
        ((700, 1), (900, 1), (600, 2), (300, 8), (30, 1)), num_heads=20, num_kv_heads=10
    ),
    "decodes of many splits, window, soft cap": Case(
        ((700, 1), (1300, 3), (900, 2), (30, 1), (511, 1)), window=515, soft_cap=2.0, block_size=32
    ),
    "soft cap": Case(((700, 1), (90, 2), (3, 40)), soft_cap=1.5),
    "sinks": Case(((0, 1), (700, 1), (90, 2), (3, 40), (1500, 30)), sinks=True),
    "sinks, window, heads of 64 by eight": Case(
        ((700, 1), (1300, 3), (900, 2), (30, 1), (511, 40)), 16, 2, 64, window=128, sinks=True
    ),
    "latent of 32": Case(((300, 1), (0, 70), (40, 3)), 4, 1, 48, latent_dim=32),
    "latent of 64, sixteen heads": Case(
        ((1100, 1), (600, 1), (0, 9), (20, 60)), 16, 1, 96, latent_dim=64
    ),
    "latent of DeepSeek-V3": Case(((270, 1), (0, 2)), 128, 1, 576, latent_dim=512),
    "both directions": Case(
        ((0, 1), (0, 200), (0, 33), (0, 16), (0, 700)), 3, 3, 32, bidirectional=True
    ),
    "both directions, window": Case(
        ((0, 1), (0, 300), (0, 20), (0, 65)), window=33, bidirectional=True
    ),
    "both directions, window, one kv head, wide": Case(
        ((0, 90), (0, 600)), 3, 1, 256, window=257, bidirectional=True
    ),
    "both directions, several long splits": Case(
        ((0, 1300), (0, 9)), num_heads=2, num_kv_heads=1, soft_cap=2.0, bidirectional=True
    ),
    "many decodes before a long chunk": Case((*((40, 1),) * 41, (1100, 40))),
    "images in prompts and beside decodes": Case(
        ((0, 300), (90, 1), (0, 40), (37, 70)),
        images=((0, 3, 100), (0, 102, 290), (2, 0, 9), (3, 30, 70), (3, 106, 107)),
    ),
    "an image of a few rows": Case(((60, 7), (0, 2)), 3, 3, 32, images=((0, 62, 66), (1, 0, 2))),
    "images, window": Case(((0, 300), (200, 90)), window=33, images=((0, 10, 200), (1, 195, 280))),
    "images, window, one kv head, wide": Case(
        ((0, 600), (700, 50)), 4, 1, 256, window=257, images=((0, 2, 258), (0, 300, 599))
    ),
    "an image over long splits, soft cap": Case(
        ((0, 1300),), 2, 1, soft_cap=2.0, images=((0, 900, 1299),)
    ),
}


def all_backends_of(step: Step) -> dict[str, AttentionBackend]:
    found: dict[str, AttentionBackend] = {
        "reference": ReferenceAttention(step.kv_cache, step.case.shape)
    }
    for variant in LOADABLE:
        found[variant.name] = CpuAttention(load_variant(variant), step.kv_cache, step.case.shape)
    return found


def error_of(step: Step, backend: AttentionBackend) -> float:
    """Largest error relative to the largest value; NaN if a NaN of the cache was read."""
    output = step.run(backend)
    expected = step.expected()
    return float((output.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", CASES)
def test_reference_and_kernels_match_float64(name: str) -> None:
    """All pairs of dtypes, by the reference and by the kernels of every variant."""
    for dtype, kv_dtype in PAIRS:
        if CASES[name].latent_dim and kv_dtype == torch.int8:
            continue  # refused: resolve_kv_dtype
        step = Step(replace(CASES[name], dtype=dtype, kv_dtype=kv_dtype))
        for backend_name, backend in all_backends_of(step).items():
            step.clear_written()
            error = error_of(step, backend)
            assert error < TOLERANCE[dtype], (backend_name, dtype, kv_dtype, error)


def test_reference_and_kernels_match_float64_on_random_steps() -> None:
    rng = random.Random(7)
    for seed in range(60):
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
            kv_dtype=rng.choice(KV_DTYPES),
            soft_cap=rng.choice([0.0, 0.0, 0.5, 30.0]),
            sinks=rng.choice([False, False, True]),
            seed=seed,
            window=rng.choice([None, 1, rng.randrange(2, 100), rng.randrange(2, 500)]),
        )
        step = Step(case)
        for name, backend in all_backends_of(step).items():
            step.clear_written()
            assert error_of(step, backend) < TOLERANCE[case.dtype], (name, case)


def random_images(rng: random.Random, case: Case) -> Case:
    """Return a case with images, some of which begin before the step or end with it."""
    images = []
    for row, (before, new) in enumerate(case.sequences):
        end = 0
        while (first := end + rng.randrange(40)) < before + new:
            end = min(before + new, first + rng.randrange(1, 120))
            images.append((row, first, end))
            end += 1
    return replace(case, images=tuple(images))


def test_images_match_float64_on_random_steps() -> None:
    rng = random.Random(8)
    for seed in range(40):
        kv_heads = rng.choice([1, 2, 3])
        case = Case(
            sequences=tuple(
                (rng.choice([0, rng.randrange(400)]), rng.choice([1, rng.randrange(1, 300)]))
                for _ in range(rng.randrange(1, 4))
            ),
            num_heads=kv_heads * rng.choice([1, 2, 4, 7]),
            num_kv_heads=kv_heads,
            head_dim=rng.choice([8, 24, 64, 128]),
            block_size=rng.choice([1, 8, 16, 64]),
            dtype=rng.choice(DTYPES),
            kv_dtype=rng.choice(KV_DTYPES),
            soft_cap=rng.choice([0.0, 0.0, 30.0]),
            seed=seed,
            window=rng.choice([None, 1, rng.randrange(2, 100), rng.randrange(2, 500)]),
        )
        step = Step(random_images(rng, case))
        for name, backend in all_backends_of(step).items():
            step.clear_written()
            assert error_of(step, backend) < TOLERANCE[case.dtype], (name, step.case)


@each_variant
def test_an_image_changes_no_bit_of_other_tokens(variant) -> None:
    """Tokens before, after and beside an image, of sequences with and without one."""
    sequences = ((0, 400), (600, 1), (0, 50), (300, 30))
    for kv_dtype, window in itertools.product(IN_SIGHT, (None, 100)):
        dtype = torch.float32 if kv_dtype == torch.float32 else torch.bfloat16
        case = Case(sequences, dtype=dtype, kv_dtype=kv_dtype, window=window)
        outputs = []
        for images in ((), ((0, 21, 277), (0, 280, 399), (3, 290, 320))):
            step = Step(replace(case, images=images))
            backend = CpuAttention(load_variant(variant), step.kv_cache, step.case.shape)
            outputs.append(step.run(backend))
        causal, both = outputs
        assert step.inputs.attend_end is not None
        positions = np.concatenate([np.arange(before, before + new) for before, new in sequences])
        sees_later = torch.from_numpy(step.inputs.attend_end > positions + 1)
        assert torch.equal(causal[~sees_later], both[~sees_later]), (kv_dtype, window)
        assert (causal != both).flatten(1).any(dim=1).equal(sees_later), (kv_dtype, window)


@each_variant
def test_a_step_may_begin_inside_an_image(variant) -> None:
    """As after a hit in the prefix cache: the rest gets the bits that it had in the whole."""
    for kv_dtype, window in itertools.product(IN_SIGHT, (None, 100)):
        dtype = torch.float32 if kv_dtype == torch.float32 else torch.bfloat16
        images = ((0, 30, 290),)
        step = Step(Case(((0, 300),), dtype=dtype, kv_dtype=kv_dtype, window=window, images=images))
        backend = CpuAttention(load_variant(variant), step.kv_cache, step.case.shape)
        whole, attend_end = step.run(backend), step.inputs.attend_end
        assert attend_end is not None
        for start in (29, 32, 100, 250, 289):
            inputs = AttentionInputs(
                query_start=np.array([0, 300 - start], dtype=np.int32),
                seq_lens=step.inputs.seq_lens,
                block_table=step.inputs.block_table,
                slot_mapping=step.inputs.slot_mapping[start:],
                attend_end=attend_end[start:].copy(),
            )
            backend.plan(step.of_all_groups(inputs))
            part = slice(start, 300)
            rest = backend.run(LAYER, *step.qkv(part), step.rotation[part], step.sinks)
            if decodes_sum_like_chunks(variant, kv_dtype) or start < 280:
                assert torch.equal(rest, whole[start:]), (kv_dtype, window, start)


HEADS: tuple[dict[str, int], ...] = (
    {},
    {"num_heads": 4, "num_kv_heads": 1, "head_dim": 96, "latent_dim": 64},
)
"""Heads with K and V, and latent ones."""
IN_SIGHT = {torch.float32: (None, 300), torch.bfloat16: (None,), torch.int8: (None,)}
"""The windows that a dtype of the cache is tried with."""


@each_variant
def test_a_row_does_not_depend_on_its_batch(variant) -> None:
    """Decodes and chunks give the same bits alone and in a batch."""
    sequences = ((600, 1), (3, 1), (0, 50), (1200, 1), (20, 30), (999, 3), (255, 1), (256, 1))
    kernels = load_variant(variant)
    for kv_dtype, heads in itertools.product(IN_SIGHT, HEADS):
        if heads and kv_dtype == torch.int8:
            continue
        dtype = torch.float32 if kv_dtype == torch.float32 else torch.bfloat16
        for window in IN_SIGHT[kv_dtype]:
            case = Case(sequences, dtype=dtype, kv_dtype=kv_dtype, window=window, sinks=True)
            together = Step(replace(case, **heads))
            backend = CpuAttention(kernels, together.kv_cache, together.case.shape)
            batch = together.run(backend)
            for row in range(len(sequences)):
                backend.plan(together.of_all_groups(together.only(row)))
                part = slice(*together.inputs.query_start[row : row + 2])
                output = backend.run(
                    LAYER, *together.qkv(part), together.rotation[part], together.sinks
                )
                assert torch.equal(output, batch[part]), (kv_dtype, heads, window, row)


def in_chunks(step: Step, backend: CpuAttention, cuts: list[int]) -> torch.Tensor:
    """Compute the only sequence of the step in chunks that end at `cuts`."""
    (total,) = step.inputs.seq_lens.tolist()
    before = total - step.inputs.num_tokens
    outputs = []
    for start, stop in itertools.pairwise(cuts):
        inputs = AttentionInputs(
            query_start=np.array([0, stop - start], dtype=np.int32),
            seq_lens=np.array([before + stop], dtype=np.int32),
            block_table=step.inputs.block_table,
            slot_mapping=step.inputs.slot_mapping[start:stop],
        )
        backend.plan(step.of_all_groups(inputs))
        part = slice(start, stop)
        outputs.append(backend.run(LAYER, *step.qkv(part), step.rotation[part], step.sinks))
    return torch.cat(outputs)


def decodes_sum_like_chunks(variant, kv_dtype: torch.dtype) -> bool:
    """Whether a row has the same bits in a decode: all but int8 pages multiplied as integers."""
    return kv_dtype != torch.int8 or variant.name in ("avx2", "baseline")


@each_variant
def test_a_row_does_not_depend_on_the_chunk_it_is_in(variant) -> None:
    """Chunks cut anywhere give the same bits; of one token, too, if decodes sum like chunks."""
    for kv_dtype, window, heads in itertools.product(IN_SIGHT, (None, 300), HEADS):
        if heads and (window or kv_dtype == torch.int8):
            continue
        dtype = torch.float32 if kv_dtype == torch.float32 else torch.bfloat16
        case = Case(((700, 400),), dtype=dtype, kv_dtype=kv_dtype, window=window, sinks=True)
        step = Step(replace(case, **heads))
        backend = CpuAttention(load_variant(variant), step.kv_cache, step.case.shape)
        whole = in_chunks(step, backend, [0, 400])
        assert torch.equal(whole, in_chunks(step, backend, [0, 64, 107, 300, 400])), kv_dtype
        if decodes_sum_like_chunks(variant, kv_dtype):
            cuts = [0, 7, 8, 9, 10, 100, 101, 323, 324, 326, 398, 399, 400]
            assert torch.equal(whole, in_chunks(step, backend, cuts)), (kv_dtype, window)


def assert_rows_before_a_nan_are_unchanged(
    step: Step, backend: AttentionBackend, part: str
) -> None:
    """A NaN in the last token of each sequence reaches that row and none before it."""
    clean = step.run(backend)
    last = torch.from_numpy(step.inputs.query_start[1:].astype(np.int64)) - 1
    for each in (step.key, step.value):
        if part == "both" or (part == "key") == (each is step.key):
            each[last] = float("nan")
    output = step.run(backend)
    assert output[last].isnan().all()
    before = torch.ones(len(output), dtype=torch.bool)
    before[last] = False
    assert torch.equal(output[before], clean[before])


NAN_CASE = Case(((0, 60), (0, 3), (30, 5), (600, 1), (1200, 90)))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
def test_nan_reaches_only_rows_that_attend_to_it(kv_dtype: torch.dtype) -> None:
    dtype = torch.bfloat16 if kv_dtype == torch.int8 else kv_dtype
    for window in (None, 40):
        step = Step(replace(NAN_CASE, dtype=dtype, kv_dtype=kv_dtype, window=window))
        key, value = step.key.clone(), step.value.clone()
        for backend in all_backends_of(step).values():
            for part in ("both", "key", "value"):
                step.clear_written()
                step.key.copy_(key)
                step.value.copy_(value)
                assert_rows_before_a_nan_are_unchanged(step, backend, part)


@each_variant
def test_int8_rows_with_nonfinite_values_have_a_nan_scale(variant) -> None:
    for value in (float("inf"), float("-inf"), float("nan")):
        step = Step(Case(((20, 3),), kv_dtype=torch.int8))
        step.key[1, 0, 5] = step.value[2, 1, 7] = value
        step.run(CpuAttention(load_variant(variant), step.kv_cache, step.case.shape))
        key, written = step.written(0), step.written(1)
        assert key[1, 0].isnan().all(), value
        assert written[2, 1].isnan().all(), value
        key[1, 0] = written[2, 1] = 0.0
        assert key.isfinite().all()
        assert written.isfinite().all()


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stored_keys_and_values_are_as_exact_as_the_cache_dtype(
    dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    """The error is at most half a step of the dtype or of the int8 scale."""
    case = Case(((20, 3), (5, 1), (0, 30)), dtype=dtype, kv_dtype=kv_dtype, head_dim=40)
    step = Step(case)
    for backend in all_backends_of(step).values():
        step.clear_written()
        step.run(backend)
        for part, exact in enumerate((step.rotated(step.key), step.value.double())):
            error = (step.written(part).double() - exact).abs()
            if kv_dtype == torch.int8:
                half_step = exact.abs().amax(dim=-1, keepdim=True) / 127 / 2
            else:
                half_step = exact.abs() * torch.finfo(kv_dtype).eps / 2 + 1e-7
            assert (error <= half_step * (1 + 1e-4) + 1e-6).all()
            assert part == 0 or kv_dtype != dtype or error.max() == 0.0


@each_variant
def test_kernels_and_reference_write_the_same_int8(variant) -> None:
    """Values of any size; those below 2^-100 count as zero."""
    step = Step(Case(((0, 120),), kv_dtype=torch.int8))
    step.value.mul_(torch.logspace(-44, 30, 120)[:, None, None])
    kernels = CpuAttention(load_variant(variant), step.kv_cache, step.case.shape)
    reference = ReferenceAttention(step.kv_cache, step.case.shape)
    step.run(kernels)
    pages = step.kv_cache.layer_pages(LAYER)[1]
    blocks = torch.from_numpy(step.inputs.block_table[0, :-2]).long()
    ours = pages.read(blocks)
    step.clear_written()
    step.run(reference)
    assert torch.equal(ours.nan_to_num(7.0), pages.read(blocks).nan_to_num(7.0))
    assert (step.written(1)[0] == 0.0).all()
    assert (step.written(1)[-1] != 0.0).any()


@each_variant
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_results_do_not_depend_on_the_number_of_threads(variant, kv_dtype: torch.dtype) -> None:
    dtype = torch.float32 if kv_dtype == torch.float32 else torch.bfloat16
    sequences = ((600, 1), (0, 150), (1400, 1))
    step = Step(Case(sequences, dtype=dtype, kv_dtype=kv_dtype))
    backend = CpuAttention(load_variant(variant), step.kv_cache, step.case.shape)
    outputs = []
    for threads in THREADS:
        with threads_of_torch(threads):
            outputs.append(step.run(backend))
    assert all(torch.equal(found, outputs[0]) for found in outputs)


@each_variant
def test_results_do_not_depend_on_the_workspace_size(variant) -> None:
    """Long sequences take several rounds; one tile alone needs more than the workspace."""
    case = Case(((900, 1), (3, 1), (2500, 40), (700, 2), (0, 50), (1200, 1)))
    step = Step(case)
    kernels = load_variant(variant)
    with_rounds = CpuAttention(kernels, step.kv_cache, case.shape, most_partial_bytes=10_000)
    outputs = [
        step.run(with_rounds),
        step.run(CpuAttention(kernels, step.kv_cache, case.shape)),
    ]
    assert torch.equal(*outputs)
    (plan,) = with_rounds._plans.values()
    assert plan.structure.num_rounds > 5


@each_variant
def test_the_workspace_is_bounded(variant) -> None:
    """A long chunk of a very long prompt, and decodes that share a long prefix."""
    shape = AttentionShape(32, 8, 128, 1.0)
    for num_seqs, new, total in ((1, 8192, 131_072), (2048, 1, 100_000)):
        query_start = np.arange(num_seqs + 1, dtype=np.int32) * new
        seq_lens = np.full(num_seqs, total, np.int32)
        plan = AttentionPlan(load_variant(variant), shape)
        plan.make(
            AttentionStep(
                num_seqs=num_seqs,
                num_tokens=num_seqs * new,
                num_heads=32,
                num_kv_heads=8,
                head_dim=128,
                block_size=16,
                window=1 << 40,
                query_start=query_start.ctypes.data,
                seq_lens=seq_lens.ctypes.data,
            )
        )
        assert plan.structure.num_rounds > 20
        assert plan.structure.num_partial_rows * (128 + 8) * 4 <= MOST_PARTIAL_BYTES


@each_variant
def test_a_decode_over_a_window_is_split_between_two_threads(variant) -> None:
    """One KV head and a window of 512 tokens, for any length of the sequence."""
    lengths = {}
    for seq_len in (600, 30_000):
        query_start, seq_lens = np.array([0, 1], np.int32), np.array([seq_len], np.int32)
        plan = AttentionPlan(load_variant(variant), AttentionShape(4, 1, 256, 1.0))
        plan.make(
            AttentionStep(
                num_seqs=1,
                num_tokens=1,
                num_heads=4,
                num_kv_heads=1,
                head_dim=256,
                block_size=16,
                window=512,
                query_start=query_start.ctypes.data,
                seq_lens=seq_lens.ctypes.data,
            )
        )
        lengths[seq_len] = plan.structure.num_tasks
    assert lengths == {600: 3, 30_000: 3}


@each_variant
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8], ids=str)
def test_only_slots_of_the_step_are_written(variant, kv_dtype: torch.dtype) -> None:
    step = Step(Case(((20, 3), (5, 1)), kv_dtype=kv_dtype))
    before = step.kv_cache.buffer.clone()
    slots = torch.from_numpy(step.inputs.slot_mapping)
    old = [step.written(part) for part in (0, 1)]
    assert all(each.isnan().all() for each in old)
    step.run(CpuAttention(load_variant(variant), step.kv_cache, step.case.shape))
    place = (slots // step.case.block_size, slice(None), slots % step.case.block_size)
    for part, pages in enumerate(step.kv_cache.layer_pages(LAYER)):
        assert step.written(part).isfinite().all()
        pages.rows.view(torch.uint8)[place] = 0xFF
        if isinstance(pages, Int8Pages):
            blocks, heads, offsets = place
            pages.scales.view(torch.int32)[blocks, heads, :, offsets] = -1
    assert torch.equal(step.kv_cache.buffer.view(torch.uint8), before.view(torch.uint8))


@each_variant
def test_a_float16_overflow_affects_only_its_sequence(variant) -> None:
    """Infinite attention scores of one sequence do not change the others."""
    step = Step(Case(((40, 1), (40, 1)), dtype=torch.float16))
    step.value[0] = float("inf")
    output = step.run(CpuAttention(load_variant(variant), step.kv_cache, step.case.shape))
    assert not output[0].isfinite().any()
    assert output[1].isfinite().all()


def test_head_dim_must_be_a_multiple_of_eight() -> None:
    layout = kv_layout([None])
    cache = KVCache(kv_cache_geometry(layout, 1, 12, torch.float32), layout, 2, 16)
    with pytest.raises(UnsupportedShapeError, match="multiple of 8"):
        CpuAttention(None, cache, Case(((0, 1),), head_dim=12).shape)  # type: ignore[arg-type]


def test_inputs_count_tokens_and_sequences() -> None:
    inputs = Step(Case(((3, 2), (0, 4)))).inputs
    assert (inputs.num_tokens, inputs.num_seqs) == (6, 2)
    assert inputs.block_table.flags.c_contiguous
    assert inputs.slot_mapping.dtype == np.int64


@each_variant
def test_layers_of_several_groups_read_their_own_blocks(variant) -> None:
    """Full attention and two windows, planned at once, with the block tables of their groups."""
    layout = kv_layout([None, 6, 6])
    cache = KVCache(kv_cache_geometry(layout, 1, 8, torch.float32), layout, 16, 4)
    shape = AttentionShape(2, 1, 8, 0.3)
    rng = torch.Generator().manual_seed(0)
    tables = np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]], dtype=np.int32)
    inputs = [
        AttentionInputs(
            query_start=np.array([0, 10], dtype=np.int32),
            seq_lens=np.array([10], dtype=np.int32),
            block_table=table[None],
            slot_mapping=np.repeat(table, 4)[:10].astype(np.int64) * 4 + np.arange(10) % 4,
        )
        for table in tables
    ]
    backends = [
        CpuAttention(load_variant(variant), cache, shape),
        ReferenceAttention(cache, shape),
    ]
    query = torch.randn(3, 10, 2, 8, generator=rng)
    rotation: Rotation = torch.randn(10, 2, 4, generator=rng)
    key, value = torch.randn(2, 3, 10, 1, 8, generator=rng)
    results = []
    for backend in backends:
        cache.buffer.fill_(float("nan"))
        backend.plan(inputs)
        results.append([backend.run(i, query[i], key[i], value[i], rotation) for i in range(3)])
    for kernel, reference in zip(*results, strict=True):
        torch.testing.assert_close(kernel, reference, rtol=1e-5, atol=1e-5)
