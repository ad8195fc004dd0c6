"""Peak rates that times are compared with."""

import torch

from tests.gpu.hardware import Hardware


def read_rate(gpu: Hardware) -> float:
    """Bytes per second of a sum over memory larger than any cache."""
    count = gpu.sizes.rate_bytes
    memory = torch.empty(count // 4, dtype=torch.float32, device=gpu.device).normal_()
    return count / gpu.median_seconds(memory.sum, rounds=5)


def copy_rate(gpu: Hardware) -> float:
    """Bytes per second, read and written, of a copy of such memory."""
    count = gpu.sizes.rate_bytes
    source = torch.empty(count // 4, dtype=torch.float32, device=gpu.device).normal_()
    target = torch.empty_like(source)
    return 2 * count / gpu.median_seconds(lambda: target.copy_(source), rounds=5)


def product_rate(gpu: Hardware) -> float:
    """Operations per second of a product of random bfloat16 matrices."""
    size = gpu.sizes.product_size
    a, b = (torch.randn(size, size, device=gpu.device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / gpu.median_seconds(lambda: torch.mm(a, b, out=out), rounds=20)
