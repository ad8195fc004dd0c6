"""The choice of the attention backend on a CPU."""

import logging

from proto.errors import ConfigError
from worker.attention.base import AttentionBackend, AttentionShape
from worker.attention.cpu import CpuAttention, UnsupportedShapeError
from worker.attention.reference import ReferenceAttention
from worker.kernels import Kernels, KernelsUnavailableError, load_kernels
from worker.kv_cache import KVCache

logger = logging.getLogger("tokend.attention")


def create_backend(
    name: str, kv_cache: KVCache, shape: AttentionShape, kernels: Kernels | None = None
) -> AttentionBackend:
    """Return the backend called `name` on a CPU.

    "auto" is the kernels, or the reference with a warning if this machine has no kernels or they
    do not support the heads. kernels: None for the best for this CPU. Raises ConfigError if "cpu"
    is requested and there are no such kernels, or if the name is unknown here.
    """
    if name == "reference":
        return ReferenceAttention(kv_cache, shape)
    if name not in ("auto", "cpu"):
        raise ConfigError(f"--attention-backend {name} does not run on a CPU", "attention_backend")
    try:
        kernels = kernels or load_kernels()
        backend = CpuAttention(kernels, kv_cache, shape)
    except (KernelsUnavailableError, UnsupportedShapeError) as reason:
        if name == "cpu":
            raise ConfigError(
                f"--attention-backend cpu needs kernels: {reason}", "attention_backend"
            ) from None
        logger.warning("attention runs on the slow reference: %s", reason)
        return ReferenceAttention(kv_cache, shape)
    logger.info("attention runs on the %s kernels", kernels.variant)
    return backend
