"""What a device builds a runner from, and a drafter."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from proto.messages.model_runner_output import ModelRunnerOutput
from proto.messages.scheduler_output import SchedulerOutput
from proto.runtime.faults import FaultInjector
from proto.settings.config import DeviceConfig
from worker.attention.kv_cache import KVCache
from worker.attention.state_cache import StateCache
from worker.batch.input_batch import InputBatch
from worker.models.decoder import Decoder
from worker.speculation.drafter import DraftedModel, Drafter
from worker.speculation.eagle_head import EagleHead
from worker.step.adapter_store import AdapterStore
from worker.step.encoder_cache import EncoderCache
from worker.step.model_runner import GrammarMaskSource, no_grammars
from worker.step.pooling import PoolingHead
from worker.step.routed_experts import RoutedExpertsCache


class PendingStep(Protocol):
    """A launched step."""

    def is_ready(self) -> bool:
        """Return whether `result` does not wait."""

    def result(self) -> ModelRunnerOutput:
        """Wait for the step and return its answer; called in the order of the steps."""


class Runner(Protocol):
    """One step after the other of one engine: SyncModelRunner, AsyncModelRunner."""

    def launch(
        self, step: SchedulerOutput, get_grammars: GrammarMaskSource = no_grammars
    ) -> PendingStep:
        """Compute a step, or queue it on the device."""


def _no_progress(fraction: float) -> None:
    """Show nothing."""


@dataclass(frozen=True, kw_only=True)
class RunnerParts:
    """The parts of a runner that are the same on all devices.

    dtype: of the activations. attention_kernels: from `Device.choose_attention`.
    states: of layers without attention; None without such layers. experts: those of each token, if
    they are kept. drafter: of this engine, or None. pooling_head: of a model that pools. adapters:
    those that rows may have, or None. encoder_cache: of a model that reads images.
    is_batch_invariant: whether threads may change between steps. show_captured: called with the
    captured fraction of what is recorded before the first step.
    """

    config: DeviceConfig
    model: Decoder
    dtype: torch.dtype
    kv_cache: KVCache
    batch: InputBatch
    attention_kernels: str = ""
    states: StateCache | None = None
    experts: RoutedExpertsCache | None = None
    drafter: Drafter | None = None
    pooling_head: PoolingHead | None = None
    adapters: AdapterStore | None = None
    encoder_cache: EncoderCache | None = None
    fault_injector: FaultInjector | None = None
    is_batch_invariant: bool = False
    show_captured: Callable[[float], None] = _no_progress


@dataclass(frozen=True, kw_only=True)
class DrafterParts:
    """The parts of a drafter; see RunnerParts. kv_cache: with as many blocks as `target` has."""

    config: DeviceConfig
    model: Decoder | EagleHead
    dtype: torch.dtype
    kv_cache: KVCache
    target: DraftedModel
    attention_kernels: str = ""
    show_captured: Callable[[float], None] = _no_progress
