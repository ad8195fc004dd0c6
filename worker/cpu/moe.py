"""A mixture of experts in one call of a C++ kernel, csrc/layers/moe.cpp.

KernelMoe computes the mixture of one layer; KernelStack passes its descriptions to the kernel of
all layers, with the same bits.
"""

import ctypes
import functools
from bisect import bisect_right
from typing import Final

import torch

from worker.cpu.adapters import KernelAdapters
from worker.cpu.kernel_structures import (
    ExpertStructure,
    LinearPart,
    MoeRun,
    MoeStructure,
    RouterStructure,
)
from worker.cpu.kernels import DTYPE_CODES, Kernels
from worker.cpu.layers import GATE_CODES
from worker.cpu.linear import ProductDescriptions, format_thresholds
from worker.host.memory_nodes import memory_placement
from worker.layers.experts import AdaptedExperts, Expert, LinearExperts
from worker.layers.router import Router
from worker.layers.scratch import ByteBuffer
from worker.models.moe import Mixture, report_mixtures

_SCORING_CODES: Final = {"softmax": 0, "sigmoid": 1}
"""TokendScoring of csrc/layers/moe.h."""
KERNEL: Final = "the mixture kernel"


class KernelMoe:
    """Computes a mixture of experts by the kernel, for numbers of rows that it `takes`."""

    def __init__(
        self,
        kernels: Kernels,
        mixture: Mixture,
        experts: LinearExperts,
        adapted: AdaptedExperts | None = None,
    ) -> None:
        """adapted: the same experts with the adapters of each step; None without adapters."""
        self._kernels = kernels
        self._adapted = adapted
        self._mixture = mixture
        self._experts = experts
        router = mixture.router.spec
        of_experts = {
            -(-rows * router.num_experts // router.top_k)
            for expert in experts.experts
            for linear in (expert.gate_up, expert.down)
            for rows in format_thresholds(linear)
        }
        shared = mixture.shared
        of_shared = () if shared is None else (shared.gate_up, shared.down)
        self.thresholds = sorted(
            {1}.union(of_experts, *(format_thresholds(linear) for linear in of_shared))
        )
        """Numbers of rows from which on other formats of the weights multiply."""

    @functools.cached_property
    def _descriptions(self) -> "list[MoeDescription]":
        # Made when first used: kernels are chosen after all layers are built.
        return [
            MoeDescription(self._mixture, self._experts, num_rows, self._adapted)
            for num_rows in self.thresholds
        ]

    def takes(self, num_rows: int) -> bool:
        """Return whether kernels of ours compute all products with `num_rows` rows."""
        return self.description(num_rows).complete

    def description(self, num_rows: int) -> "MoeDescription":
        """Return the description of the mixture that the kernel reads for `num_rows` rows."""
        return self._descriptions[bisect_right(self.thresholds, max(1, num_rows)) - 1]

    def run(
        self,
        x: torch.Tensor,
        output: torch.Tensor,
        adds: bool,
        memory: ByteBuffer,
        record: torch.Tensor | None = None,
    ) -> None:
        moe, dtype = self.description(len(x)).structure, DTYPE_CODES[x.dtype]
        assert output.dtype == x.dtype
        assert x.stride(1) == output.stride(1) == 1
        report_mixtures(KERNEL)
        run = MoeRun(
            dtype=dtype,
            num_rows=len(x),
            input_stride=x.stride(0) * x.itemsize,
            input=x.data_ptr(),
            output_stride=output.stride(0) * x.itemsize,
            output=output.data_ptr(),
            adds=adds,
            scratch=memory.address(self._kernels.moe_bytes(moe, dtype, len(x))),
            chosen=None if record is None else record.data_ptr(),
            adapters=self._adapters(len(x)),
        )
        self._kernels.moe_run(moe, run)

    def _adapters(self, num_rows: int) -> int | None:
        """Return the address of the adapters of the running step; None if it has none."""
        if self._adapted is None or not self._adapted.adapters.groups:
            return None
        adapters = self._adapted.adapters
        assert isinstance(adapters, KernelAdapters)
        return ctypes.addressof(adapters.description(num_rows).structure)


class MoeDescription:
    """A mixture as a `MoeStructure`, for steps of at least `num_rows` rows.

    Valid while the mixture lives. complete: as in ProductDescriptions; an incomplete description
    must not be run.
    """

    def __init__(
        self,
        mixture: Mixture,
        experts: LinearExperts,
        num_rows: int,
        adapted: AdaptedExperts | None = None,
    ) -> None:
        self._spec = spec = mixture.spec
        self._products = ProductDescriptions()
        # The mean number of rows that an expert computes.
        rows = max(1, num_rows * spec.router.top_k // spec.router.num_experts)
        described = [
            self._expert(expert, rows, spec.intermediate_size) for expert in experts.experts
        ]
        if adapted is not None:
            for expert, (gate_up, down) in zip(described, adapted.products, strict=True):
                expert.gate_up.product, expert.down.product = gate_up, down
        self._experts = (ExpertStructure * len(described))(*described)
        placement = memory_placement()
        groups = () if placement is None else placement.thread_groups
        self._thread_groups = (ctypes.c_int64 * len(groups))(*groups)
        shared, gate = mixture.shared, mixture.shared_gate
        self.structure = MoeStructure(
            hidden_size=spec.hidden_size,
            inner_size=spec.intermediate_size,
            gate=GATE_CODES[spec.activation],
            router=self._router(mixture.router),
            first_expert=experts.first,
            end_expert=experts.first + len(described),
            experts=ctypes.addressof(self._experts),
            shared_size=spec.shared_size,
            shared_gate=None if gate is None else gate.data_ptr(),
            num_thread_groups=len(groups),
            thread_group_ends=ctypes.addressof(self._thread_groups),
        )
        if shared is not None:
            self.structure.shared = self._expert(shared, num_rows, spec.shared_size)
        # The input of all experts is rounded by the kernels of the first.
        self.complete = self._products.complete and all(
            len({_kernels_of(expert, name) for expert in described}) == 1
            for name in ("gate_up", "down")
        )

    def _expert(self, expert: Expert, num_rows: int, inner: int) -> ExpertStructure:
        hidden, describe = self._spec.hidden_size, self._products.describe
        return ExpertStructure(
            gate_up=describe(expert.gate_up, num_rows, hidden, 2 * inner),
            down=describe(expert.down, num_rows, inner, hidden),
        )

    def _router(self, router: Router) -> RouterStructure:
        spec = router.spec
        tensors = {
            "weight": router.weight,
            "bias": router.bias,
            "selection_bias": router.selection_bias,
        }
        for tensor in tensors.values():
            assert tensor is None or (tensor.dtype == torch.float32 and tensor.is_contiguous())
        return RouterStructure(
            num_experts=spec.num_experts,
            top_k=spec.top_k,
            scoring=_SCORING_CODES[spec.scoring],
            normalises=spec.normalised,
            num_groups=spec.num_groups,
            top_groups=spec.top_groups,
            best_of_group=spec.best_of_group,
            scale=spec.scale,
            **{name: None if it is None else it.data_ptr() for name, it in tensors.items()},
        )


def _kernels_of(expert: ExpertStructure, name: str) -> tuple[int, ...]:
    """Return format and kernels of an expert's product."""
    linear = getattr(expert, name)
    if linear.num_parts == 0:
        return ()
    part = LinearPart.from_address(linear.parts)
    return part.format, part.kernels
