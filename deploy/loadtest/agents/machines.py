"""What is simulated: machines by their step times, policies by their settings, the load.

SmolLM2's terms go through the fastest steps of each shape in a trace that the daemon wrote
(`--sched-trace`) on two cores of a Xeon (Sapphire Rapids) which others used, too: 1, 2, 8 and 24
sequences that decode, and chunks of 256 tokens. Those of the H100 are assumed, and nothing has been
measured on one: an 8B model in bfloat16 (16 GB of weights and 128 KiB of KV a token at 3.35 TB/s,
16 GFLOP a token at 800 TFLOP/s, 50 GB/s from host memory).
"""

from dataclasses import dataclass
from typing import Final

from proto.codec import changed
from proto.replay import AgentLoad, HostTier, ReplayOrder, StepModel


@dataclass(frozen=True, kw_only=True)
class Machine:
    """block_ms: that copying a block of 16 tokens to or from host memory takes."""

    step_model: StepModel
    block_ms: float
    max_num_batched_tokens: int


MACHINES: Final = {
    "smollm2-cpu": Machine(
        step_model=StepModel(
            base_ms=4.6, per_token_ms=0.154, per_row_ms=0.35, per_context_ms=0.0005
        ),
        block_ms=0.1,
        max_num_batched_tokens=256,
    ),
    "assumed-h100": Machine(
        step_model=StepModel(
            base_ms=6.0, per_token_ms=0.02, per_row_ms=0.01, per_context_ms=0.00004
        ),
        block_ms=0.042,
        max_num_batched_tokens=8192,
    ),
}


@dataclass(frozen=True)
class Variant:
    """A policy of the scheduler, how it pins, and whether there is host memory behind the pool."""

    policy: str
    pin_policy: str | None = None
    has_tier: bool = False

    def flags(self) -> list[str]:
        """Of `tokend serve`, but for those of the tier."""
        pins = ["--pin-policy", self.pin_policy] if self.pin_policy else []
        return ["--scheduling-policy", self.policy, *pins]

    def order(self, order: ReplayOrder, tier: HostTier) -> ReplayOrder:
        """The same under this policy."""
        return changed(
            order,
            policy=self.policy,
            pin_policy=self.pin_policy,
            tier=tier if self.has_tier else None,
        )


BASELINE: Final = "fcfs"
VARIANTS: Final = {
    BASELINE: Variant("fcfs"),
    "none": Variant("continuum", "none"),
    "fixed": Variant("continuum", "fixed"),
    "rule": Variant("continuum", "rule"),
    "fcfs+host": Variant("fcfs", None, True),
    "rule+host": Variant("continuum", "rule", True),
}
"""none, fixed and rule are of policy continuum; +host: with host memory behind the pool."""


def agent_load(num_jobs: int, seed: int, others_per_job: float = 0.0) -> AgentLoad:
    """A job a second; the shape of the Codex traces, with contexts a tenth of theirs.

    There: a median of 33 turns, 12K tokens that become 80K by 2,242 a turn, 131 tokens in for one
    out. Here: 33 turns, or fewer where 8,192 tokens are full; 1,024 tokens and then 225 a turn.
    """
    return AgentLoad(
        num_jobs=num_jobs,
        seed=seed,
        turns=33.0,
        turn_tokens=190,
        output_tokens=35,
        others_per_job=others_per_job,
    )
