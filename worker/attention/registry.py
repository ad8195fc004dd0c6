"""Names of attention backends, and which one a machine gets."""

from proto.errors import ConfigError
from worker.attention.base import AttentionBackend, AttentionShape
from worker.attention.reference import ReferenceAttention
from worker.kv_cache import KVCache


def create_backend(name: str, kv_cache: KVCache, shape: AttentionShape) -> AttentionBackend:
    """The backend called `name` on a CPU; raises ConfigError for one that does not run here."""
    if name not in ("auto", "cpu", "reference"):
        raise ConfigError(f"--attention-backend {name} does not run on a CPU", "attention_backend")
    return ReferenceAttention(kv_cache, shape)
