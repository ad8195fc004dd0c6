"""A mixture of experts as the MLP of a layer: spec, weights, sharding and forward pass.

A router chooses a few of many gated MLPs for each token (Shazeer et al., Outrageously Large Neural
Networks); shared experts compute every token (Dai et al., DeepSeekMoE, section 3.2).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from worker.kernels import row_kernels
from worker.layers.activation import Activation, make_gate
from worker.layers.experts import Expert, Experts, LinearExperts
from worker.layers.linear import PartOutput
from worker.layers.router import Router, RouterSpec
from worker.models.kernel_moe import KernelMoe, Mixture, report_mixtures
from worker.models.mlp import share_of_inner
from worker.models.parts import (
    ForwardContext,
    Shard,
    StackPart,
    WeightSpec,
    divide_evenly,
    product_flops,
    product_outputs,
    projection,
)

if TYPE_CHECKING:
    from worker.loader.weights import LayerReader


@dataclass(frozen=True, kw_only=True)
class MoeNames:
    """Names of a mixture's weights in Hugging Face checkpoints, relative to the layer.

    router: a tensor without its ".weight". experts, gate, up, down: "EXPERTS.3.GATE.weight" is that
    of expert 3; None if all files stack experts. stacked_gate_up: tensor [experts, gate ‖ up,
    hidden] of files that do; biases have its name with "_bias". interleaved: its rows are those of
    gate and up by turns. transposed: see StackPart.
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
    shared_gate: str = "mlp.shared_expert_gate"


@dataclass(frozen=True, kw_only=True)
class MoeSpec:
    """A router, experts of one size, and shared experts, which are one gated MLP.

    intermediate_size: inner columns of each expert.
    bias: all projections of the experts have one.
    shared_size: inner columns of the shared experts; 0 if there are none.
    shared_gate: the output of the shared experts is multiplied by sigmoid(gate · x).
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
    names: MoeNames = MoeNames()
    is_expert_parallel: bool = False
    own: range | None = None

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
                for name in ("gate.weight", "gate.bias", "up.weight", "up.bias"):
                    shards[f"{prefix}.{name}"] = Shard(rows=inner)
                shards[f"{prefix}.down.weight"] = Shard(columns=inner)
            return len(range(num_columns)[inner])

        shared = divide(self.shared_size, "shared") if self.shared_size else 0
        if self.is_expert_parallel:
            own = divide_evenly(self.router.num_experts, size)[rank]
            return replace(self, own=own, shared_size=shared), shards
        experts = (f"experts.{number}" for number in self.own_experts)
        inner = divide(self.intermediate_size, *experts)
        return replace(self, intermediate_size=inner, shared_size=shared), shards

    def read(self, reader: "LayerReader") -> Callable[[], "MoeMlp"]:
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
            rows_share=self.router.top_k / self.router.num_experts,
            are_whole=self.is_expert_parallel,
        )
        shared = None
        if self.shared_size:
            shared = reader.linear("shared.gate", "shared.up"), reader.summed_linear("shared.down")
        shared_gate = float32("shared_gate.weight", self.shared_gate)
        output = reader.output()

        def build() -> MoeMlp:
            built = None if shared is None else Expert(shared[0](), shared[1]())
            return MoeMlp(
                spec=self,
                router=router,
                experts=experts(),
                shared=built,
                shared_gate=shared_gate,
                output=output(),
                device=reader.device,
            )

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
            for name, shape in (("gate", inner), ("up", inner), ("down", outer)):
                theirs = f"{names.shared}.{name}_proj"
                weights += projection(f"shared.{name}", theirs, f"ffn_{name}_shexp", shape)
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
        hidden, inner, names = self.hidden_size, self.intermediate_size, self.names
        num_experts, step = self.router.num_experts, 2 if names.interleaved else 1
        first_of_up = 1 if names.interleaved else inner
        gate_up, down = (names.stacked_gate_up, 2 * inner), (names.stacked_down, hidden)

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
        )


class MoeMlp:
    """The mixture of one layer with its weights.

    shared: the shared experts, or None. shared_gate: float32 [hidden], or None.
    kernel: computes the mixture in one call; None for dense experts, and without kernels.
    record: gets the experts of each row, int32 [rows, top_k]; None if they are not recorded.
    """

    def __init__(
        self,
        spec: MoeSpec,
        router: Router,
        experts: Experts,
        shared: Expert | None,
        shared_gate: torch.Tensor | None,
        output: PartOutput,
        device: torch.device,
    ) -> None:
        self.spec = spec
        self.router = router
        self.experts = experts
        self.shared = shared
        self.shared_gate = shared_gate
        self.output = output
        self.record: torch.Tensor | None = None
        self._gate = make_gate(spec.activation, device)

    @cached_property
    def kernel(self) -> KernelMoe | None:
        # Made when it is first used: kernels are chosen after all layers are built.
        kernels = row_kernels() if isinstance(self.experts, LinearExperts) else None
        if kernels is None or not isinstance(self.experts, LinearExperts):
            return None
        return KernelMoe(
            kernels,
            Mixture(
                hidden_size=self.spec.hidden_size,
                intermediate_size=self.spec.intermediate_size,
                activation=self.spec.activation,
                router=self.router,
                experts=self.experts,
                shared_size=self.spec.shared_size,
                shared=self.shared,
                shared_gate=self.shared_gate,
            ),
        )

    def add_to(
        self, residual: torch.Tensor, x: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        if self.kernel is None or not self.kernel.takes(len(x)):
            return self.output.add_to(residual, self._mix(x, context).to(x.dtype))
        if self.output.is_plain:
            self.kernel.run(x, residual, True, context.memory, self.record)
            return residual
        output = torch.empty_like(residual)
        self.kernel.run(x, output, False, context.memory, self.record)
        return self.output.add_to(residual, output)

    def _mix(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Return the mixture of x in float32, computed in torch."""
        report_mixtures(type(self.experts).__name__)
        weights, chosen = self.router(x)
        if self.record is not None:
            self.record[: len(x)].copy_(chosen)
        total = self.experts(x, weights, chosen)
        if self.shared is not None:
            inner = context.scratch(self.spec.shared_size)
            output = self.shared.down(self._gate(self.shared.gate_up(x), inner)).float()
            if self.shared_gate is not None:
                output *= (x.float() @ self.shared_gate).sigmoid()[:, None]
            total += output
        return total
