"""The FlashInfer backend on a strict fake of the library, over random steps."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from proto.errors import ConfigError
from tests.fakes.fake_device import DeviceAttentionForHost, FakeDevice, cache_on
from tests.fakes.fake_flashinfer import FakeFlashInfer
from tests.worker.attention.flashinfer_cases import (
    CASES,
    DECODES,
    MIXED,
    SHARING,
    case_of,
    sharing_two_pages,
)
from tests.worker.attention.steps import LAYER, Step
from tests.worker.reference.torch_kernels import store_by_index
from worker.attention.backend import AttentionInputs, AttentionShape
from worker.attention.kv_cache import KVCache, kv_cache_geometry, kv_layout
from worker.cuda.attention import flashinfer
from worker.cuda.attention.flashinfer import FlashInferAttention
from worker.cuda.attention.flashinfer_group import (
    GroupWrappers,
    Options,
    SentOffsets,
    WrapperMaker,
)
from worker.cuda.attention.flashinfer_latent import (
    create_flashinfer,
    head_runs,
)
from worker.cuda.attention.flashinfer_latent import (
    workspace_bytes as latent_bytes,
)
from worker.cuda.attention.flashinfer_schedule import DecodeSplits, workspace_bytes
from worker.cuda.attention.paged_batch import pad_decodes, step_pages
from worker.reference.attention import ReferenceAttention

OPTIONS = Options()


class FakeBackend:
    """The FlashInfer backend over a case's cache, its fake device and fake library."""

    def __init__(self, step: Step, options: Options = OPTIONS) -> None:
        self.device = FakeDevice()
        self.library = FakeFlashInfer(self.device)
        self.backend = DeviceAttentionForHost(
            self.device,
            create_flashinfer(
                cache_on(self.device, step.kv_cache),
                step.case.shape,
                step.case.dtype,
                self.device,
                self.library,
                store_by_index,
                options,
            ),
        )


def capturing(*sizes: int) -> Options:
    return replace(OPTIONS, capture_sizes=sizes, capture_pages=64)


@pytest.mark.parametrize("name", CASES)
def test_output_equals_the_reference_bit_by_bit(name: str) -> None:
    step, twin = Step(CASES[name]), Step(CASES[name])
    result = step.run(FakeBackend(step).backend)
    wanted = twin.run(ReferenceAttention(twin.kv_cache, twin.case.shape))
    assert result.dtype == wanted.dtype
    assert result.is_contiguous()
    assert torch.equal(result, wanted)
    for part in (0, 1):
        assert torch.equal(step.written(part), twin.written(part))
    exact = step.expected()
    assert (result.double() - exact).norm() < 5e-3 * exact.norm()


@pytest.mark.parametrize("name", ["mixed", "decodes", "prefills", "heads of 256, a window"])
def test_sinks_take_part_in_the_softmax(name: str) -> None:
    step = Step(replace(CASES[name], sinks=True))
    result = step.run(FakeBackend(step).backend)
    exact = step.expected()
    assert (result.double() - exact).norm() < 5e-3 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_keys_and_values_of_eight_bits(dtype: torch.dtype) -> None:
    step = Step(case_of(MIXED, dtype=dtype, kv_dtype=torch.float8_e4m3fn, window=6))
    result = step.run(FakeBackend(step).backend)
    exact = step.expected()
    assert (result.double() - exact).norm() < 5e-3 * exact.norm()
    assert torch.equal(step.written(1), step.value.to(torch.float8_e4m3fn).float())


def test_every_kind_of_wrapper_is_planned_once_per_step_and_group() -> None:
    step = Step(case_of(MIXED, window=6))
    fakes = FakeBackend(step)
    for _ in range(3):
        step.run(fakes.backend)
    num_groups = len(step.kv_cache.layout.windows)
    assert [each.num_plans for each in fakes.library.wrappers] == [3] * 2 * num_groups
    only_decodes = Step(case_of(DECODES))
    fakes = FakeBackend(only_decodes)
    only_decodes.run(fakes.backend)
    assert sorted(each.num_plans for each in fakes.library.wrappers) == [0, 1]


def test_a_step_waits_only_for_copies_of_earlier_steps() -> None:
    step = Step(case_of(MIXED))
    fakes = FakeBackend(step)
    for _ in range(4):
        before = fakes.device.queued
        step.run(fakes.backend)
        assert fakes.device.completed <= before
    assert fakes.device.completed > 0


def test_steps_of_any_size_share_one_staging_buffer() -> None:
    sequences = ((0, 7), (20, 1), (33, 5), (15, 1), (90, 1), (0, 40))
    step, twin = Step(case_of(sequences)), Step(case_of(sequences))
    fakes = FakeBackend(step)
    reference = ReferenceAttention(twin.kv_cache, twin.case.shape)
    assert torch.equal(step.run(fakes.backend), twin.run(reference))
    for row in (5, 1, 0, 4, 2, 3):
        tokens = slice(*step.inputs.query_start[row : row + 2])
        results = []
        for each, backend in ((step, fakes.backend), (twin, reference)):
            backend.plan(each.of_all_groups(each.only(row)))
            parts = (part[tokens] for part in (each.query, each.key, each.value, each.rotation))
            results.append(backend.run(LAYER, *parts))
        assert torch.equal(*results)


def test_latents_have_a_wrapper_of_decodes_and_one_of_each_run_of_heads() -> None:
    step = Step(CASES["latents, twenty heads"])
    fakes = FakeBackend(step)
    for _ in range(2):
        step.run(fakes.backend)
    assert [each.num_plans for each in fakes.library.wrappers] == [2, 2, 2]


@pytest.mark.parametrize(
    ("num_heads", "sizes"),
    [(1, [1]), (20, [16, 4]), (96, [64, 32]), (128, [128]), (300, [128, 128, 32, 8, 4])],
)
def test_runs_of_heads_divide_a_tile_and_are_all_heads(num_heads: int, sizes: list[int]) -> None:
    runs = head_runs(num_heads)
    assert [head for run in runs for head in range(run.start, run.stop)] == list(range(num_heads))
    assert [run.stop - run.start for run in runs] == sizes


@pytest.mark.parametrize("window", [None, 6])
def test_a_padded_batch_uses_the_wrapper_of_its_captured_size(window: int | None) -> None:
    case = case_of(DECODES, window=window)
    step, plain = Step(case), Step(case)
    fakes = FakeBackend(step, capturing(4, 8))
    padded = pad_decodes(step.inputs, 4)

    def torch_columns(tokens: torch.Tensor) -> torch.Tensor:
        return torch.cat((tokens, torch.zeros_like(tokens[:1])))

    fakes.backend.plan(step.of_all_groups(padded))
    parts = map(torch_columns, (step.query, step.key, step.value, step.rotation))
    result = fakes.backend.run(LAYER, *parts)
    assert torch.equal(result[:3], plain.run(FakeBackend(plain).backend))
    assert not result[3].any()
    for part in (0, 1):
        assert torch.equal(step.written(part), plain.written(part))
    planned = [each for each in fakes.library.wrappers if each.num_plans]
    assert all(each.batch_size == 4 for each in planned)
    assert len(planned) == len(step.kv_cache.layout.windows)


def test_mixed_steps_use_no_captured_graph() -> None:
    step = Step(case_of(MIXED))
    num_decodes = sum(new == 1 for _, new in MIXED)
    fakes = FakeBackend(step, capturing(num_decodes))
    step.run(fakes.backend)
    assert all(each.batch_size is None for each in fakes.library.wrappers if each.num_plans)


def test_a_captured_size_reuses_its_buffers() -> None:
    step, twin = Step(case_of(DECODES)), Step(case_of(DECODES))
    fakes = FakeBackend(step, capturing(1, 3))
    reference = ReferenceAttention(twin.kv_cache, twin.case.shape)
    for _ in range(3):
        assert torch.equal(step.run(fakes.backend), twin.run(reference))


@pytest.mark.parametrize(
    "fields",
    [{}, {"soft_cap": 2.0}, {"sinks": True}, {"kv_dtype": torch.float8_e4m3fn}],
    ids=str,
)
@pytest.mark.parametrize("name", SHARING)
def test_cascade_attention_reads_a_shared_prefix_once(name: str, fields: dict[str, object]) -> None:
    case = case_of(SHARING[name], **fields)
    step, twin = Step(case), Step(case)
    inputs = sharing_two_pages(step)
    fakes = FakeBackend(step, replace(OPTIONS, cascade_from=2))
    reference = ReferenceAttention(twin.kv_cache, case.shape)
    results = []
    for each, backend in ((step, fakes.backend), (twin, reference)):
        backend.plan([inputs])
        parts = (each.query, each.key, each.value, each.rotation, each.sinks)
        results.append(backend.run(LAYER, *parts))
    most = 7e-3 if case.kv_dtype == torch.float8_e4m3fn else 5e-3
    assert (results[0] - results[1]).double().norm() < most * results[1].double().norm()
    assert len([each for each in fakes.library.wrappers if each.for_all_queries]) == 1


@pytest.mark.parametrize(("window", "cascade_from"), [(None, 0), (None, 3), (40, 1)])
def test_cascade_attention_is_not_used(window: int | None, cascade_from: int) -> None:
    """If disabled, for a short prefix, or in a group with a window."""
    step = Step(case_of(SHARING["mixed"], window=window))
    fakes = FakeBackend(step, replace(OPTIONS, cascade_from=cascade_from))
    inputs = sharing_two_pages(step)
    table = inputs.block_table
    different = np.arange(table.size, dtype=np.int32).reshape(table.shape)
    nothing = replace(inputs, block_table=different)
    *others, _ = step.kv_cache.layout.windows
    fakes.backend.plan([nothing] * len(others) + [inputs])
    assert not [each for each in fakes.library.wrappers if each.for_all_queries]


def backend_for(
    shape: AttentionShape, dtype: torch.dtype, kv_dtype: torch.dtype
) -> FlashInferAttention:
    layout = kv_layout([None])
    geometry = kv_cache_geometry(layout, shape.num_kv_heads, shape.head_dim, kv_dtype)
    device = FakeDevice()
    cache = cache_on(device, KVCache(geometry, layout, 2, 4))
    return FlashInferAttention(
        cache,
        shape,
        dtype,
        device,
        FakeFlashInfer(device),
        store_by_index,
        options=OPTIONS,
    )


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "head_dim", "message", "parameter"),
    [
        (torch.float32, torch.float32, 64, "not float32", "attention_backend"),
        (torch.bfloat16, torch.float32, 64, "fn, not float32", "kv_cache_dtype"),
        (torch.bfloat16, torch.float16, 64, "of bfloat16, .* not float16", "kv_cache_dtype"),
        (torch.bfloat16, torch.int8, 64, "not int8", "kv_cache_dtype"),
        (torch.bfloat16, torch.bfloat16, 96, "heads of 64, 128, 256, not 96", "attention_backend"),
        (torch.float32, torch.float32, -576, "not float32", "attention_backend"),
        (torch.bfloat16, torch.float32, -576, "of bfloat16, .* not float32", "kv_cache_dtype"),
        (
            torch.bfloat16,
            torch.bfloat16,
            -544,
            "512 with 64 .* not 512 with 32",
            "attention_backend",
        ),
    ],
)
def test_unsupported_dtypes_and_heads_are_a_config_error(
    dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, message: str, parameter: str
) -> None:
    """A negative head_dim is that of latent attention, with latents of 512."""
    latent_dim = 512 if head_dim < 0 else 0
    shape = AttentionShape(2, 1, abs(head_dim), scale=1.0, latent_dim=latent_dim)
    with pytest.raises(ConfigError, match=message) as raised:
        backend_for(shape, dtype, kv_dtype)
    assert raised.value.param == parameter


def test_a_missing_library_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer, "installed_version", lambda: None)
    with pytest.raises(ConfigError, match=r"pip install .*flashinfer-python"):
        flashinfer.load_library()


def test_another_version_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer, "installed_version", lambda: "0.7.2")
    with pytest.raises(
        ConfigError, match=r"needs flashinfer-python 0\.6\.18\.post1, found 0\.7\.2"
    ):
        flashinfer.load_library()


UNEQUAL = ((700, 1), *((20, 1),) * 7, (300, 1), *((20, 1),) * 11)
"""20 decodes, one of 44 pages; the fake device has tiles for four sequences of two KV heads."""


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("window", [None, 400])
def test_long_sequences_among_short_ones_are_split(window: int | None, captured: bool) -> None:
    case = case_of(UNEQUAL, num_heads=16, num_kv_heads=2, window=window)
    step, twin = Step(case), Step(case)
    sizes = (len(UNEQUAL),) if captured else ()
    fakes = FakeBackend(step, replace(OPTIONS, capture_sizes=sizes, capture_pages=200))
    reference = ReferenceAttention(twin.kv_cache, case.shape)
    for _ in range(2):
        assert torch.equal(step.run(fakes.backend), twin.run(reference))
    *_, used = [each for each in fakes.library.wrappers if each.num_plans]
    longest = 44 if window is None else -(-(window - 1 + 16) // 16)
    assert used.batch_size == (len(UNEQUAL) if captured else None)
    assert 8 <= used.longest_walk <= longest // 2


@pytest.mark.parametrize("name", ["sequences of equal length", "batch invariance"])
def test_sequences_are_not_split(name: str) -> None:
    equal = name == "sequences of equal length"
    step = Step(case_of(((300, 1),) * 20 if equal else UNEQUAL, num_heads=16, num_kv_heads=2))
    fakes = FakeBackend(step, replace(OPTIONS, batch_invariant=not equal))
    step.run(fakes.backend)
    assert max(each.longest_walk for each in fakes.library.wrappers) == (19 if equal else 44)


LLAMA_8B = AttentionShape(32, 8, 128, scale=1.0)


@pytest.mark.parametrize(
    ("pages", "chunk"),
    [
        ([32] * 33 + [2048] + [0] * 6, 205),
        ([32] * 31 + [2048], 256),
        ([32] * 255 + [4096], 64),
        ([32] * 34 + [0] * 6, None),
        # The library's own chunks are as small.
        ([32] * 23 + [2048], None),
        ([2048], None),
        ([0] * 64, None),
    ],
    ids=["34", "32", "256", "equal", "few", "one", "none"],
)
def test_a_chunk_is_as_small_as_spare_tiles_allow(pages: list[int], chunk: int | None) -> None:
    """On 132 multiprocessors; the library's planner takes these chunks for graphs of this size."""
    splits = DecodeSplits(LLAMA_8B, 16, None, 132, (256,))
    assert splits.chunk_pages(np.array(pages, dtype=np.int32)) == chunk


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("heads", [(4, 4), (8, 1), (16, 1), (71, 1)])
def test_any_batch_may_be_planned_in_the_chosen_chunks(
    heads: tuple[int, int], window: int | None
) -> None:
    """The strict fake demands what the library needs of them, with a graph and without."""
    rng = np.random.default_rng(sum(heads))
    for head_dim in (64, 256):
        shape = AttentionShape(*heads, head_dim, scale=0.125)
        device = FakeDevice()
        options = Options(capture_sizes=(20,), capture_pages=2000)
        make = WrapperMaker(device, FakeFlashInfer(device), shape, options)
        group = GroupWrappers(make, shape, torch.bfloat16, torch.bfloat16, 16, window)
        for num_rows in (20, 20, 19, 3) * 3:
            most = rng.choice([1, 40, 1500], num_rows)
            seq_lens = rng.integers(0, most + 1).astype(np.int32)
            tokens = np.arange(num_rows + 1)
            table = np.zeros((num_rows, 100), dtype=np.int32)
            inputs = AttentionInputs(tokens.astype(np.int32), seq_lens, table, tokens[1:])
            pages = step_pages([inputs], [window], 16, [0]).groups[0]
            sent = [
                device.adopt(torch.from_numpy(each))
                for each in (pages.decodes.kv_indptr, pages.decodes.last_page_len)
            ]
            group.plan(pages, device.zeros(pages.num_pages, torch.int32), SentOffsets(*sent))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "sizes", "mebibytes"),
    [
        # The first two sizes are those that the library's planner computes.
        (32, 8, 128, (256,), 80),
        (32, 8, 128, (1, 512), 161),
        (32, 8, 128, (), 66),
        (16, 1, 128, (), 266),
        (4, 1, 256, (8,), 66),
    ],
)
def test_the_workspace_is_large_enough_for_any_plan(
    heads: int, kv_heads: int, head_dim: int, sizes: tuple[int, ...], mebibytes: int
) -> None:
    shape = AttentionShape(heads, kv_heads, head_dim, scale=1.0)
    found = workspace_bytes(shape, 132, sizes)
    assert found / (1 << 20) == pytest.approx(mebibytes, abs=0.6)


def test_the_workspace_of_latents_is_what_the_planner_takes() -> None:
    """The library's planner for 132 multiprocessors, the slack of alignment aside."""
    assert latent_bytes(132) - (1 << 10) == 17_301_504 + 67_584
