"""A mixture of experts as the MLP of a layer: spec, weights, sharding and forward pass.

A router chooses a few of many gated MLPs for each token (Shazeer et al., Outrageously Large Neural
Networks); shared experts compute every token (Dai et al., DeepSeekMoE, section 3.2).
"""

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch

from worker.layers.activation import Activation, Gate, is_gated
from worker.layers.adapters import StepAdapters, product_number
from worker.layers.experts import AdaptedExperts, Expert, Experts
from worker.layers.linear import Linear, PartOutput
from worker.layers.router import Router, RouterSpec
from worker.layers.scratch import ByteBuffer
from worker.models.mlp import share_of_inner
from worker.models.parts import (
    ForwardContext,
    PartReader,
    PartSpec,
    Shard,
    StackPart,
    WeightSpec,
    divide_evenly,
    product_flops,
    product_outputs,
    projection,
    stacked,
)

logger = logging.getLogger("tokend.worker")


@dataclass(frozen=True, kw_only=True)
class MoeNames:
    """Names of a mixture's weights in Hugging Face checkpoints, relative to the layer.

    router: a tensor without its ".weight". experts, gate, up, down: "EXPERTS.3.GATE.weight" is that
    of expert 3; None if all files stack experts. stacked_gate_up: tensor [experts, gate ‖ up,
    hidden] of files that do; biases have its name with "_bias". interleaved: its rows are those of
    gate and up by turns. transposed: see StackPart. shared_gate_up, shared_down: names of the
    shared experts' projections in files that have gate and up in one tensor; "" if they are
    projections of `shared`. latent_down, latent_up: those to and from what experts read.
    """

    router: str = "mlp.gate"
    experts: str | None = "mlp.experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    stacked_gate_up: str = "mlp.experts.gate_up_proj"
    stacked_down: str = "mlp.experts.down_proj"
    interleaved: bool = False
    transposed: bool = False
    shared: str = "mlp.shared_experts"
    shared_gate_up: str = ""
    shared_down: str = ""
    shared_gate: str = "mlp.shared_expert_gate"
    latent_down: str = ""
    latent_up: str = ""


@dataclass(frozen=True, kw_only=True)
class MoeSpec(PartSpec):
    """A router, experts of one size, and shared experts, which are one gated MLP.

    intermediate_size: inner columns of each expert.
    bias: all projections of the experts have one.
    shared_size: inner columns of the shared experts; 0 if there are none.
    shared_gate: the output of the shared experts is multiplied by sigmoid(gate · x).
    latent_size: experts, but not shared ones, read a projection of x of this size, and a projection
        of their sum is the output; 0: they read x.
    is_expert_parallel: ranks have whole experts, in order, and a part of the shared ones.
    own: experts of this rank, all if None.
    """

    hidden_size: int
    intermediate_size: int
    router: RouterSpec
    activation: Activation = "silu"
    bias: bool = False
    shared_size: int = 0
    shared_gate: bool = False
    latent_size: int = 0
    names: MoeNames = MoeNames()
    is_expert_parallel: bool = False
    own: range | None = None

    @property
    def is_gated(self) -> bool:
        """Whether experts have a gate projection."""
        return is_gated(self.activation)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The projections of an expert's input."""
        return ("gate", "up") if self.is_gated else ("up",)

    @property
    def own_experts(self) -> range:
        return range(self.router.num_experts) if self.own is None else self.own

    @cached_property
    def weights(self) -> tuple[WeightSpec, ...]:
        experts = (weight for number in self.own_experts for weight in self._expert_weights(number))
        return (*self._weights_of_every_token, *experts)

    @property
    def flops_per_token(self) -> int:
        # Of several ranks each computes its share of a token's experts on average.
        chosen = product_flops(self._expert_weights(0)) * self.router.top_k
        experts = chosen * len(self.own_experts) // self.router.num_experts
        shared_gate = 2 * self.hidden_size if self.shared_gate else 0
        return product_flops(self._weights_of_every_token) + experts + shared_gate

    @property
    def outputs_per_token(self) -> int:
        # The outputs of experts are float32, and are read from rows that are copied for each.
        each = product_outputs(self._expert_weights(0)) + 2 * self.hidden_size
        return product_outputs(self._weights_of_every_token) + self.router.top_k * each

    @property
    def max_ranks(self) -> int:
        experts = self.router.num_experts if self.is_expert_parallel else self.intermediate_size
        return min(experts, self.shared_size or experts)

    def shard(
        self, rank: int, size: int, block_columns: Mapping[str, int]
    ) -> tuple["MoeSpec", dict[str, Shard]]:
        """Divide the experts, or the inner columns of each; every rank has the whole router."""
        shards: dict[str, Shard] = {}

        def divide(num_columns: int, *prefixes: str) -> int:
            blocks = max(block_columns.get(f"{prefix}.down.weight", 1) for prefix in prefixes)
            inner = share_of_inner(num_columns, rank, size, blocks)
            for prefix in prefixes:
                for name in self.inputs:
                    kinds = (f"{prefix}.{name}.weight", f"{prefix}.{name}.bias")
                    shards.update(dict.fromkeys(kinds, Shard(rows=inner)))
                shards[f"{prefix}.down.weight"] = Shard(columns=inner)
            return len(range(num_columns)[inner])

        shared = divide(self.shared_size, "shared") if self.shared_size else 0
        if self.is_expert_parallel:
            own = divide_evenly(self.router.num_experts, size)[rank]
            return replace(self, own=own, shared_size=shared), shards
        experts = (f"experts.{number}" for number in self.own_experts)
        inner = divide(self.intermediate_size, *experts)
        return replace(self, intermediate_size=inner, shared_size=shared), shards

    def read(self, reader: PartReader) -> Callable[[], "MoeMlp"]:
        """Read gate and up projections of an expert as one product, and the router in float32."""

        def float32(name: str, is_there: bool) -> torch.Tensor | None:
            return reader.tensor(name, torch.float32) if is_there else None

        router = Router(
            self.router,
            reader.tensor("router.weight", torch.float32),
            float32("router.bias", self.router.bias),
            float32("router.selection_bias", self.router.selection_bias),
        )
        experts = reader.experts(
            self.own_experts,
            self.activation,
            total=self.router.num_experts,
            row_fraction=self.router.top_k / self.router.num_experts,
            are_whole=self.is_expert_parallel,
        )
        shared = None
        if self.shared_size:
            inputs = reader.linear(*(f"shared.{name}" for name in self.inputs))
            shared = inputs, reader.summed_linear("shared.down")
        latents = None
        if self.latent_size:
            latents = reader.linear("latent.down"), reader.linear("latent.up")
        shared_gate = float32("shared_gate.weight", self.shared_gate)
        output = reader.output()

        def build() -> MoeMlp:
            mixture = Mixture(
                spec=self,
                router=router,
                experts=experts(),
                shared=None if shared is None else Expert(shared[0](), shared[1]()),
                shared_gate=shared_gate,
                latents=None if latents is None else (latents[0](), latents[1]()),
            )
            device = reader.device
            fused = device.fused_mixture(mixture)
            gate = device.gate(self.activation, self.is_gated)
            return MoeMlp(mixture, output(), gate, fused)

        return build

    @property
    def _weights_of_every_token(self) -> tuple[WeightSpec, ...]:
        """The weights of router and shared experts."""
        hidden, num_experts, names = self.hidden_size, self.router.num_experts, self.names
        weights = [
            *projection(
                "router", names.router, "ffn_gate_inp", (num_experts, hidden), self.router.bias
            )
        ]
        if self.router.selection_bias:
            weights.append(
                WeightSpec(
                    name="router.selection_bias",
                    shape=(num_experts,),
                    hugging_face=f"{names.router}.e_score_correction_bias",
                    gguf="exp_probs_b.bias",
                )
            )
        if self.shared_size:
            inner, outer = (self.shared_size, hidden), (hidden, self.shared_size)
            shared = [
                projection(
                    f"shared.{name}",
                    theirs or f"{names.shared}.{name}_proj",
                    f"ffn_{name}_shexp",
                    shape,
                )[0]
                for name, shape, theirs in (
                    *((name, inner, names.shared_gate_up) for name in self.inputs),
                    ("down", outer, names.shared_down),
                )
            ]
            if names.shared_gate_up:
                in_file = stacked(*shared[:2])
                shared[:2] = [
                    replace(weight, hugging_face_stack=each.hugging_face_stack)
                    for weight, each in zip(shared, in_file, strict=False)
                ]
            weights += shared
        if self.latent_size:
            shapes = {"down": (self.latent_size, hidden), "up": (hidden, self.latent_size)}
            for name, shape in shapes.items():
                theirs = {"down": names.latent_down, "up": names.latent_up}[name]
                weights += projection(f"latent.{name}", theirs, f"ffn_latent_{name}", shape)
        if self.shared_gate:
            row = f"{names.shared_gate}.weight"
            weights.append(
                WeightSpec(
                    name="shared_gate.weight",
                    shape=(hidden,),
                    hugging_face=row,
                    gguf="ffn_gate_inp_shexp.weight",
                    hugging_face_stack=StackPart(tensor=row, shape=(1, hidden), index=0),
                )
            )
        return tuple(weights)

    def _expert_weights(self, number: int) -> tuple[WeightSpec, ...]:
        """Return the weights of one expert, in tensors of its own or in stacks of all."""
        hidden, inner = self.latent_size or self.hidden_size, self.intermediate_size
        names = self.names
        num_experts, step = self.router.num_experts, 2 if names.interleaved else 1
        first_of_up = 1 if names.interleaved else inner * (len(self.inputs) - 1)
        inputs_inner = len(self.inputs) * inner
        gate_up, down = (names.stacked_gate_up, inputs_inner), (names.stacked_down, hidden)

        def weight(
            kind: str, name: str, theirs: str, stack: tuple[str, int], first: int, step: int
        ) -> WeightSpec:
            of_weight = kind == "weight"
            rows, columns = (hidden, inner) if name == "down" else (inner, hidden)
            tail, (tensor, stack_rows) = (columns,) if of_weight else (), stack
            stacked = tensor if of_weight else f"{tensor}_bias"
            alone = f"{names.experts}.{number}.{theirs}.{kind}"
            return WeightSpec(
                name=f"experts.{number}.{name}.{kind}",
                shape=(rows, *tail),
                hugging_face=stacked if names.experts is None else alone,
                gguf=f"ffn_{name}.{number}.{kind}",
                hugging_face_stack=StackPart(
                    tensor=stacked,
                    shape=(num_experts, stack_rows, *tail),
                    index=number,
                    first_row=first,
                    row_step=step,
                    transposed=names.transposed and of_weight,
                    may_be_transposed=of_weight,
                ),
                gguf_stack=StackPart(
                    tensor=f"ffn_{name}_exps.{kind}",
                    shape=(num_experts, rows, *tail),
                    index=number,
                ),
            )

        return tuple(
            weight(kind, *of_projection)
            for kind in (("weight", "bias") if self.bias else ("weight",))
            for of_projection in (
                ("gate", names.gate, gate_up, 0, step),
                ("up", names.up, gate_up, first_of_up, step),
                ("down", names.down, down, 0, 1),
            )
            if of_projection[0] in (*self.inputs, "down")
        )


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """The weights of a mixture. shared: the shared experts. shared_gate: float32 [hidden].

    latents: the projections to and from what the experts read, or None.
    """

    spec: MoeSpec
    router: Router
    experts: Experts
    shared: Expert | None
    shared_gate: torch.Tensor | None
    latents: tuple[Linear, Linear] | None = None


class FusedMixture(Protocol):
    """A mixture in one call, which adds the adapters of the running step, too."""

    def takes(self, num_rows: int) -> bool:
        """Return whether it computes steps of `num_rows` rows."""

    def run(
        self,
        x: torch.Tensor,
        output: torch.Tensor,
        adds: bool,
        memory: ByteBuffer,
        record: torch.Tensor | None = None,
    ) -> None:
        """Write the mixture of x to output, both [T, hidden], or add it to what output holds.

        record: gets the experts of each row, int32 [T or more, top_k], contiguous.
        """


@functools.cache
def report_mixtures(implementation: str) -> None:
    """Log once what computes mixtures; called when it does."""
    logger.info("mixtures of experts run on %s", implementation)


class MoeMlp:
    """The mixture of one layer with its weights.

    gate: the activation of the shared experts. fused: computes the mixture in one call, or None.
    record: gets the experts of each row, int32 [rows, top_k]; None if they are not recorded.
    """

    def __init__(
        self, mixture: Mixture, output: PartOutput, gate: Gate, fused: FusedMixture | None
    ) -> None:
        self.mixture = mixture
        self.output = output
        self.fused = fused
        self.record: torch.Tensor | None = None
        self._gate = gate
        experts, shared = mixture.experts, mixture.shared
        self._adapters: StepAdapters | None = None
        self._products: list[int] = []
        if isinstance(experts, AdaptedExperts):
            self._adapters = experts.adapters
            self._products = [number for pair in experts.products for number in pair]
            if shared is not None:
                self._products += [product_number(shared.gate_up), product_number(shared.down)]
            if mixture.latents is not None:
                self._products += map(product_number, mixture.latents)

    def add_to(
        self, residual: torch.Tensor, x: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        adapters = self._adapters
        if adapters is None or not adapters.groups or self._is_fused(len(x)):
            return self._add_mixture(residual, x, context)
        adapted = adapters.rows_of(self._products)
        before = residual.index_select(0, adapted)
        with adapters.running(()):
            residual = self._add_mixture(residual, x, context)
        if len(adapted):
            rows = x.index_select(0, adapted)
            with adapters.selecting(adapted):
                mixed = self._mix(rows)
            residual[adapted] = self.output.add_to(before, mixed.to(x.dtype))
        return residual

    def _is_fused(self, num_rows: int) -> bool:
        return self.fused is not None and self.fused.takes(num_rows)

    def _add_mixture(
        self, residual: torch.Tensor, x: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """Add the mixture, with adapters if it is computed in one call."""
        if self.fused is None or not self._is_fused(len(x)):
            return self.output.add_to(residual, self._mix(x, self.record).to(x.dtype))
        if self.output.is_plain:
            self.fused.run(x, residual, True, context.memory, self.record)
            return residual
        output = torch.empty_like(residual)
        self.fused.run(x, output, False, context.memory, self.record)
        return self.output.add_to(residual, output)

    def _mix(self, x: torch.Tensor, record: torch.Tensor | None = None) -> torch.Tensor:
        """Return the mixture of x in float32, computed in torch. record: as in `FusedMixture`."""
        own = self.mixture
        report_mixtures(type(own.experts).__name__)
        weights, chosen = own.router(x)
        if record is not None:
            record[: len(x)].copy_(chosen)
        total = own.experts(x if own.latents is None else own.latents[0](x), weights, chosen)
        if own.latents is not None:
            total = own.latents[1](total.to(x.dtype)).float()
        if own.shared is not None:
            output = own.shared.down(self._gate(own.shared.gate_up(x))).float()
            if own.shared_gate is not None:
                output *= (x.float() @ own.shared_gate).sigmoid()[:, None]
            total += output
        return total
