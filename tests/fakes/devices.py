"""The devices of this host for tests, and a CUDA device without a GPU."""

from typing import Any

import torch

from proto.settings.config import DeviceConfig
from worker.attention.backend import AttentionBackend, AttentionShape
from worker.attention.kv_cache import KVCache
from worker.cpu.device import CpuDevice
from worker.cpu.kernels import Kernels, KernelsUnavailableError
from worker.cuda.device import CudaDevice, CudaRuntime
from worker.host.device import HostDevice
from worker.layers.experts import DenseExperts, ExpertRanks, Experts, StackedWeights
from worker.reference.attention import ReferenceAttention
from worker.reference.device import ReferenceDevice
from worker.sampling.sampler import Sampler


def host_device(kernels: Kernels | None = None, **settings: Any) -> HostDevice:
    """Return what --device cpu is on this host. kernels: None for the best ones."""
    config = DeviceConfig(**settings)
    try:
        return CpuDevice(config, kernels=kernels)
    except KernelsUnavailableError as reason:
        return ReferenceDevice(config, reason=str(reason))


CPU = host_device()
REFERENCE = ReferenceDevice(DeviceConfig())
GPU = CudaDevice(torch.device("cuda", 0), CudaRuntime(torch.device("cuda", 0)))
"""Its layers need a FakeCuda."""


def create_backend(name: str, kv_cache: KVCache, shape: AttentionShape) -> AttentionBackend:
    """Return the attention backend of this name on the host; "reference" is in plain torch."""
    if name == "reference":
        return ReferenceAttention(kv_cache, shape)
    return CPU.attention(name, kv_cache, shape)


def create_sampler() -> Sampler:
    return CPU.sampler()


def dense_experts(stacked: StackedWeights, first: int = 0) -> Experts:
    """Return experts with SiLU in plain torch, the first of which has this number."""
    experts = REFERENCE.stacked_experts(stacked, "silu", ExpertRanks(len(stacked.down), first))
    assert isinstance(experts, DenseExperts)
    return experts
