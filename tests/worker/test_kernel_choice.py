"""Which kernels compute products and attention: chosen by time, once for a model and a machine."""

import logging
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from worker.attention.backend import AttentionShape
from worker.cpu import kernel_choice
from worker.cpu.kernel_choice import (
    ROWS,
    TIMES_FILE,
    KernelChoice,
    attention_sample,
    choose,
    choose_attention,
    choose_products,
    describe_choices,
    measure,
    share_sample,
)
from worker.cpu.kernels import Kernels, candidate_kernels
from worker.cpu.weights import Bf16Weight, KernelWeight, PackedWeight, RotatedWeight

BF16 = torch.bfloat16
HEADS = AttentionShape(6, 2, 64, 0.125)


def weights_of(kernels: Kernels) -> list[KernelWeight]:
    """Two weights of one shape, one of another, and one of each other format."""
    numbers = torch.randn(96, 64, generator=torch.Generator().manual_seed(0))
    return [
        *(Bf16Weight.from_dense(kernels, numbers.bfloat16()) for _ in range(2)),
        Bf16Weight.from_dense(kernels, numbers[:64].bfloat16()),
        PackedWeight.from_dense(kernels, numbers),
        RotatedWeight.from_dense(kernels, numbers),
    ]


@pytest.fixture
def candidates(kernels: Kernels) -> tuple[Kernels, ...]:
    if len(candidate_kernels()) == 1:
        pytest.skip("this CPU runs one variant of the kernels")
    return candidate_kernels()


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch, candidates: tuple[Kernels, ...]) -> list[list[str]]:
    """Replaces the measurement: the last candidate is the fastest. Lists what was measured."""
    measured: list[list[str]] = []

    def by_order(samples, kernels, seconds):
        measured.append(list(samples))
        of_variant = {each.variant: (9.0 - at,) * len(ROWS) for at, each in enumerate(kernels)}
        return dict.fromkeys(samples, of_variant)

    monkeypatch.setattr(kernel_choice, "measure", by_order)
    return measured


def chosen(weights: list[KernelWeight]) -> list[str]:
    return [weight.multiplied_by.variant for weight in weights]


def test_each_distinct_product_is_measured_once_for_a_model_and_a_machine(
    tmp_path: Path, candidates: tuple[Kernels, ...], times: list[list[str]]
) -> None:
    fastest = candidates[-1].variant
    for _ in range(2):
        weights = weights_of(candidates[0])
        assert chosen(weights) == [candidates[0].variant] * len(weights)
        choices = choose_products(weights, BF16, str(tmp_path))
        assert chosen(weights) == [fastest] * len(weights)
        assert {choice.variant for choice in choices} == {fastest}
    names = ["bf16 96x64 bfloat16", "bf16 64x64 bfloat16", "Q8_0 96x64 bfloat16"]
    assert times == [[*names, "int8 96x64 bfloat16"]]
    choose_products(weights_of(candidates[0])[:1], torch.float32, str(tmp_path))
    assert times[1:] == [["bf16 96x64 float32"]]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        choose_products(weights_of(candidates[0])[:1], BF16, str(tmp_path))
    finally:
        torch.set_num_threads(threads)
    assert times[2:] == [["bf16 96x64 bfloat16"]]


@pytest.mark.parametrize("content", [b"", b"\x81\xa8machines\x80", b"\xff" * 40])
def test_times_that_cannot_be_used_are_measured_again(
    tmp_path: Path, candidates: tuple[Kernels, ...], times: list[list[str]], content: bytes
) -> None:
    (tmp_path / TIMES_FILE).write_bytes(content)
    weights = weights_of(candidates[0])[:1]
    choose_products(weights, BF16, str(tmp_path))
    choose_products(weights, BF16, str(tmp_path))
    assert times == [["bf16 96x64 bfloat16"]]


def test_where_times_cannot_be_kept_the_default_kernels_multiply(
    tmp_path: Path,
    candidates: tuple[Kernels, ...],
    times: list[list[str]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Other workers could not choose alike."""
    weights = weights_of(candidates[0])
    assert choose_products(weights, BF16, str(tmp_path / "missing")) == []
    assert chosen(weights) == [candidates[0].variant] * len(weights)
    assert f"products by {candidates[0].variant}: times cannot be kept" in caplog.text


def test_the_log_names_the_choice_and_what_the_others_took(
    tmp_path: Path,
    candidates: tuple[Kernels, ...],
    times: list[list[str]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        choose_products(weights_of(candidates[0]), BF16, str(tmp_path))
    (record,) = caplog.records
    fastest, others = candidates[-1].variant, candidates[:-1]
    ratio = 9.0 / (10.0 - len(candidates))
    for name in ("Q8_0", "bf16", "int8"):
        assert f"{name} by {fastest} ({others[0].variant} {ratio:.2f}" in record.getMessage()


def test_a_measurement_has_times_of_all_candidates_and_changes_no_weight(
    candidates: tuple[Kernels, ...],
) -> None:
    weights = weights_of(candidates[0])
    x = torch.randn(3, 64).bfloat16()
    before = [weight.multiply(x) for weight in weights]
    threads = torch.get_num_threads()
    samples = {
        name: share_sample(weight, BF16) for name, weight in zip("abcde", weights, strict=True)
    }
    found = measure(samples, candidates, seconds=0.0)
    assert torch.get_num_threads() == threads
    assert list(found) == list("abcde")
    for times in found.values():
        assert list(times) == [kernels.variant for kernels in candidates]
        assert all(min(of_rows) > 0 and len(of_rows) == len(ROWS) for of_rows in times.values())
    for weight, result in zip(weights, before, strict=True):
        assert torch.equal(weight.multiply(x), result)


@pytest.mark.parametrize(
    ("shape", "kv_dtype"),
    [
        (HEADS, torch.int8),
        (AttentionShape(8, 1, 256, 0.1, soft_cap=30.0), BF16),
        (AttentionShape(64, 1, 96, 0.1, latent_dim=64), BF16),
        (AttentionShape(2, 2, 32, 0.1, bidirectional=True), torch.float32),
    ],
)
def test_attention_is_measured_with_the_heads_of_the_model(
    candidates: tuple[Kernels, ...], shape: AttentionShape, kv_dtype: torch.dtype
) -> None:
    sample = attention_sample(shape, BF16, kv_dtype)
    for num_rows in ROWS:
        output = sample(candidates[0], num_rows)()
        assert isinstance(output, torch.Tensor)
        assert output.shape == (num_rows, shape.group_size, shape.value_dim)
        assert output.isfinite().all()
    (times,) = measure({"attention": sample}, candidates, seconds=0.0).values()
    assert list(times) == [kernels.variant for kernels in candidates]


def test_attention_of_a_model_is_measured_once(
    tmp_path: Path,
    candidates: tuple[Kernels, ...],
    times: list[list[str]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    choose_products(weights_of(candidates[0])[:1], BF16, str(tmp_path))
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            kernels, (choice,) = choose_attention(HEADS, BF16, torch.int8, str(tmp_path))
            assert kernels is candidates[-1]
            assert choice.variant == candidates[-1].variant
    assert times == [["bf16 96x64 bfloat16"], ["attention 3x64 bfloat16 int8"]]
    assert f"attention by time: attention by {candidates[-1].variant}" in caplog.text


@pytest.mark.parametrize(
    ("head_dim", "folder"), [(64, "missing"), (12, "")], ids=["cannot-be-kept", "no-kernels"]
)
def test_attention_stays_with_the_default_kernels(
    tmp_path: Path, candidates: tuple[Kernels, ...], head_dim: int, folder: str
) -> None:
    shape = AttentionShape(2, 2, head_dim, 0.1)
    assert choose_attention(shape, BF16, BF16, str(tmp_path / folder)) == (None, [])


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({"first": (10.0, 10.0), "second": (9.8, 9.8)}, "first"),
        ({"first": (10.0, 10.0), "second": (9.0, 9.0)}, "second"),
        ({"first": (10.0, 10.0), "second": (11.0, 8.0)}, "second"),
        ({"first": (10.0, 10.0), "second": (16.0, 7.0)}, "first"),
    ],
)
def test_the_default_stays_without_a_clear_gain(
    times: dict[str, tuple[float, ...]], expected: str
) -> None:
    assert choose("bf16 1x1 bfloat16", times).variant == expected


def test_products_of_a_type_with_the_same_kernels_are_described_together() -> None:
    ratios = {"avx2": 1.0, "avx512": 2.0}
    choices = [KernelChoice(f"bf16 {rows}x64 bfloat16", "avx2", ratios) for rows in (1, 2)]
    other = KernelChoice("Q4_K 1x256 bfloat16", "avx512", {"avx2": 1.5, "avx512": 1.0})
    assert describe_choices([choices[0], other, choices[1]]) == (
        "Q4_K by avx512 (avx2 1.50 times as long); bf16 by avx2 (avx512 2.00 times as long)"
    )


def test_without_a_choice_nothing_is_measured(
    tmp_path: Path, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> NoReturn:
        raise AssertionError("measured")

    monkeypatch.setattr(kernel_choice, "measure", refuse)
    monkeypatch.setattr(kernel_choice, "candidate_kernels", refuse)
    assert choose_products([], BF16, str(tmp_path)) == []
    monkeypatch.setattr(kernel_choice, "candidate_kernels", lambda: (kernels,))
    assert choose_products(weights_of(kernels), BF16, str(tmp_path)) == []
    for libraries in ((kernels,), ()):
        monkeypatch.setattr(kernel_choice, "candidate_kernels", lambda found=libraries: found)
        assert choose_attention(HEADS, BF16, BF16, str(tmp_path)) == (None, [])
    assert not list(tmp_path.iterdir())
