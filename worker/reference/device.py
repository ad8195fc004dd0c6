"""Plain torch: what devices are compared with, and what a host without kernels uses."""

import logging
from pathlib import Path

from proto.errors import ConfigError
from proto.messages.prepared_model import PreparedModel
from proto.settings.config import DeviceConfig, ParallelConfig, ServeConfig
from worker.attention.backend import AttentionBackend, AttentionShape
from worker.attention.kv_cache import KVCache
from worker.batch.transfers import HostTransfers, Transfers
from worker.host.device import ALONE, HostDevice
from worker.layers.activation import Activation, Gate
from worker.layers.norm import Norm, NormWeight
from worker.layers.recurrence import Recurrence, RecurrenceShape
from worker.loader.formats import DenseFormat, WeightFormat, activation_dtype
from worker.reference.attention import ReferenceAttention
from worker.reference.layers import TorchNorm, torch_gate
from worker.reference.recurrence import RECURRENCES
from worker.reference.sampling import TorchBackend
from worker.sampling.sampler import Sampler

logger = logging.getLogger("tokend.worker")


class ReferenceDevice(HostDevice):
    """The cores of the host without kernels of ours; weights have the dtype of the activations.

    reason: why there are no kernels. Other arguments as in HostDevice.
    """

    def __init__(
        self,
        config: DeviceConfig,
        root: Path = Path("/"),
        *,
        parallel: ParallelConfig = ALONE,
        starts_alone: bool = False,
        reason: str = "",
    ) -> None:
        super().__init__(config, root, parallel=parallel, starts_alone=starts_alone)
        self._reason = reason
        if reason:
            logger.warning("everything runs on the slow reference: %s", reason)

    @property
    def kernels(self) -> str:
        none = "none are compiled for this CPU: " if self._reason else ""
        return f"{none}plain torch, many times slower"

    def weight_format(self, config: ServeConfig, prepared: PreparedModel) -> WeightFormat:
        if config.model.cpu_weights not in ("auto", "bf16", "f32"):
            raise ConfigError(
                f"--cpu-weights {config.model.cpu_weights} needs kernels: {self._why_none}"
            )
        return DenseFormat(self.resolve_dtype(activation_dtype(config.model)))

    @property
    def _why_none(self) -> str:
        return self._reason or "--device reference has none"

    def norm(self, weight: NormWeight) -> Norm:
        return TorchNorm(weight)

    def gate(self, name: Activation, is_gated: bool = True) -> Gate:
        return torch_gate(name, is_gated)

    def recurrence(self, shape: RecurrenceShape, weights: object) -> Recurrence:
        return RECURRENCES[type(shape)](shape, weights)

    def attention(
        self, name: str, kv_cache: KVCache, shape: AttentionShape, kernels: str = ""
    ) -> AttentionBackend:
        if name == "cpu":
            raise ConfigError(f"--attention-backend cpu needs kernels: {self._why_none}")
        if name != "auto":
            raise ConfigError(f"--attention-backend {name} does not run on a CPU")
        return ReferenceAttention(kv_cache, shape, self.transfers())

    def transfers(self) -> Transfers:
        return HostTransfers()

    def sampler(self) -> Sampler:
        return Sampler(TorchBackend())
