"""Weights that one library lays out and another one multiplies."""

import pytest
import torch

from tests.worker.kernel_variants import LOADABLE, each_variant, load_variant
from worker.cpu.weights import Bf16Weight, KernelWeight, PackedWeight, RotatedWeight

SHAPES = ((7, 64), (100, 576), (33, 1536))
FORMATS = {
    "bf16": lambda kernels, dense: Bf16Weight.from_dense(kernels, dense.bfloat16()),
    "Q8_0": PackedWeight.from_dense,
    "int8": RotatedWeight.from_dense,
}


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().float()


def result(weight: KernelWeight, x: torch.Tensor) -> torch.Tensor:
    return weight.multiply(x, out=torch.empty(len(x), weight.out_features))


@pytest.mark.parametrize("name", FORMATS)
@each_variant
def test_the_kernels_of_any_library_multiply_a_weight(variant, name: str) -> None:
    """A row has the same bits in any batch; so it has those of a weight laid out by the same."""
    kernels, make = load_variant(variant), FORMATS[name]
    for seed, (out_features, in_features) in enumerate(SHAPES):
        dense = numbers(out_features, in_features, seed=seed)
        weight = make(load_variant(LOADABLE[0]), dense)
        weight.use_kernels(kernels)
        for dtype in (torch.float32, torch.bfloat16):
            x = numbers(70, in_features, seed=seed + 50).to(dtype)
            found = result(weight, x)
            if name == "int8":  # the numbers of the weight are rounded after a rotation
                size = x.float().norm(dim=1)[:, None] * dense.norm(dim=1)
                assert ((found - x.float() @ dense.t()).abs() / size).max() < 0.01
            else:
                assert torch.equal(found, result(make(kernels, dense), x))
            for num_rows in (1, 2, 3, 8, 33):
                assert torch.equal(result(weight, x[:num_rows]), found[:num_rows])


def test_packed_weights_have_the_same_bits_by_every_library() -> None:
    """Their results are no part of the fingerprint; those for any CPU are not compared."""
    libraries = [load_variant(variant) for variant in LOADABLE if not variant.is_baseline]
    if len(libraries) < 2:
        pytest.skip("this CPU runs one variant of the kernels")
    dense, x = numbers(100, 576), numbers(70, 576, seed=1)
    weight = PackedWeight.from_dense(libraries[0], dense)
    assert weight.arithmetic == ""
    wanted = result(weight, x)
    for kernels in libraries[1:]:
        weight.use_kernels(kernels)
        assert torch.equal(result(weight, x), wanted), kernels.variant


@pytest.mark.parametrize("name", ["bf16", "int8"])
def test_products_with_other_bits_have_other_names(name: str) -> None:
    """The fingerprint of the KV cache has these names, so libraries of equal bits share one."""
    libraries = [load_variant(variant) for variant in LOADABLE]
    dense, x = numbers(100, 576), numbers(70, 576, seed=1)
    weight = FORMATS[name](libraries[0], dense)
    results: dict[str, torch.Tensor] = {}
    names = {}
    for kernels in libraries:
        weight.use_kernels(kernels)
        names[kernels.variant] = weight.arithmetic
        found = result(weight, x)
        assert torch.equal(results.setdefault(weight.arithmetic, found), found)
    if "avx512_vnni" in names:
        assert names["avx512_vnni"] == names["avx512"]
    assert FORMATS[name](libraries[0], numbers(100, 64)).arithmetic not in results


@pytest.mark.parametrize("name", FORMATS)
@each_variant
def test_a_weight_of_zeros_takes_the_place_of_a_larger_one(variant, name: str) -> None:
    kernels = load_variant(variant)
    weight = FORMATS[name](kernels, numbers(100, 96))
    zeros, x = weight.zeros_like(32), numbers(5, 96, seed=1)
    assert zeros.multiply(x).shape == (5, 32)
    assert not zeros.multiply(x).any()
    assert weight.multiply(x).shape == (5, 100)
    assert weight.multiply(x).all()


@pytest.mark.parametrize("name", FORMATS)
@each_variant
def test_a_part_of_the_memory_has_the_same_part_of_the_outputs(variant, name: str) -> None:
    """worker/host/memory_nodes.py places each part near the thread that computes these outputs."""
    out_features, num_threads = 1024, 4
    share = out_features // num_threads
    dense, x = numbers(out_features, 256), numbers(3, 256, seed=1)
    weight = FORMATS[name](load_variant(variant), dense)
    before = result(weight, x)
    scales_at_the_end = 4 * out_features if name == "int8" else 0
    memory = weight._packed[: weight.nbytes - scales_at_the_end].view(num_threads, -1)
    for thread in range(num_threads):
        kept = memory[thread].clone()
        memory[thread].zero_()
        changed = (result(weight, x) != before).any(dim=0).nonzero()
        memory[thread] = kept
        assert changed.min() >= share * thread
        assert changed.max() < share * (thread + 1)
        assert len(changed) > share * 0.9
