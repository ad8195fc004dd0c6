"""RMSNorm and embedding against their formulas in float64."""

import pytest
import torch

from tests.fakes.devices import CPU
from worker.layers.embedding import Embedding, dense_table
from worker.layers.norm import NormWeight


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3), (torch.float16, 1e-3)]
)
def test_rms_norm(dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(5, 3, 48, generator=generator) * 20).to(dtype)
    weight = torch.randn(48, generator=generator).to(dtype)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 0.1).sqrt() * weight.double()
    result = CPU.norm(NormWeight(weight, 0.1))(x[:, :2])
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), expected[:, :2], rtol=tolerance, atol=tolerance)


def test_rms_norm_with_a_float32_weight() -> None:
    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = 1 + torch.arange(48) * 1e-5
    result = CPU.norm(NormWeight(weight, 1e-6))(x)
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, CPU.norm(NormWeight(weight, 1e-6))(x.float()).bfloat16())


def test_an_embedding_copies_its_rows() -> None:
    table = torch.arange(12.0).view(4, 3)
    rows = Embedding(dense_table(table))(torch.tensor([3, 0, 3]))
    assert rows.tolist() == [[9.0, 10.0, 11.0], [0.0, 1.0, 2.0], [9.0, 10.0, 11.0]]
    rows.zero_()
    assert table.sum() == 66
    with pytest.raises(IndexError):
        Embedding(dense_table(table))(torch.tensor([4]))


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 55.4256), (torch.bfloat16, 55.5)])
def test_an_embedding_scale_is_rounded_to_its_dtype(dtype: torch.dtype, scale: float) -> None:
    table = torch.ones(2, 3, dtype=dtype)
    rows = Embedding(dense_table(table), 3072**0.5)(torch.tensor([1]))
    assert rows[0].tolist() == pytest.approx([scale] * 3, rel=1e-6)
    assert table.sum() == 6
