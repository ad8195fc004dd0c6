"""FlashInfer's kernels for norm, gate, rotation and experts, for 16-bit activations on a GPU.

usable_flashinfer returns the library or None. What its kernels do not support goes to our own
(triton_kernels.py): other dtypes, rows whose size is no multiple of a 16-byte vector, and norms
added to a residual. The library's fused_add_rmsnorm has no use here: products already add to the
residual at their end.
"""

import functools
import importlib.metadata
import logging
import os
from typing import Any, Final

import torch

from worker.attention.backend import Rotation
from worker.cuda.accelerator import Accelerator
from worker.cuda.flashinfer_library import VERSION
from worker.layers.activation import Activation, Gate
from worker.layers.experts import ExpertRanks, StackedWeights
from worker.layers.norm import Norm

SIXTEEN_BITS: Final = (torch.bfloat16, torch.float16)
EXPERTS: Final = "fused_moe_90"
"""The library's module of the experts on Hopper."""
VECTOR_BYTES: Final = 16
GATES: Final = frozenset(("silu", "gelu_tanh"))
"""Activations with a gate that the library has kernels for, of those that tokend uses."""
_MANY_TOKENS: Final = 8192


logger = logging.getLogger("tokend.worker")


def installed_version() -> str | None:
    """Return the installed version of flashinfer-python, or None."""
    try:
        return importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return None


def import_flashinfer() -> Any:
    """Import the library so that it compiles nothing in the middle of a step.

    With nvidia-cutlass-dsl installed it would compile norms with that, at the first step; it reads
    this variable when it is imported. Products of FP8 in blocks would be compiled by NVRTC for
    each weight's shape and many numbers of rows, unless DeepGEMM is off: then they run on kernels
    of the module itself.
    """
    os.environ["FLASHINFER_USE_CUDA_NORM"] = "1"
    os.environ["TRTLLM_DG_ENABLED"] = "0"
    import flashinfer

    return flashinfer


@functools.cache
def usable_flashinfer() -> Any | None:
    """Return the module flashinfer, or None to use our own kernels; logs which, once."""
    if installed_version() != VERSION:
        logger.info("norms and gates run on our own kernels: FlashInfer %s is needed", VERSION)
        return None
    library = import_flashinfer()
    logger.info("norms, gates and rotations run on FlashInfer")
    return library


@functools.cache
def has_prebuilt_experts() -> bool:
    """Return whether FlashInfer's experts are prebuilt; logs it, once.

    They are hundreds of sources: a server that compiled them would not start for a long time.
    """
    from flashinfer.jit import env

    if (env.FLASHINFER_AOT_DIR / EXPERTS / f"{EXPERTS}.so").exists():
        return True
    logger.info(
        "experts run on our own kernels: FlashInfer's are not prebuilt "
        "(flashinfer-jit-cache, or python -m worker.cuda.build_flashinfer FOLDER --experts)"
    )
    return False


class FlashInferNorm(Norm):
    """RMSNorm by FlashInfer; `own` is for inputs that the library does not support.

    A float32 weight, such as Gemma's with the 1 added, is not a 16-bit weight: then `own` computes
    everything, because `gemma_rmsnorm` would round the weight.
    """

    def __init__(self, library: Any, own: Norm) -> None:
        super().__init__(own.weight)
        self._own = own
        self._weight = own.weight.weight.contiguous()
        self._norm = library.rmsnorm
        self._eps = own.weight.eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of x [..., size]; rows of x may be a stride apart."""
        if x.dtype != self._weight.dtype or x.dtype not in SIXTEEN_BITS:
            return self._own(x)
        out = x.new_empty(x.shape)
        self._norm(x, self._weight, self._eps, out=out)
        return out

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self._own.add_to(residual, x)


def flashinfer_gate(library: Any, name: Activation, own: Gate) -> Gate:
    """Return the MLP gate by FlashInfer; `own` is for inputs that the library does not support."""
    gate = library.silu_and_mul if name == "silu" else library.gelu_tanh_and_mul

    def activate(gate_up: torch.Tensor) -> torch.Tensor:
        size = gate_up.shape[1] // 2
        if gate_up.dtype not in SIXTEEN_BITS or size * gate_up.element_size() % VECTOR_BYTES:
            return own(gate_up)
        out = gate_up.new_empty(len(gate_up), size)
        gate(gate_up, out=out)
        return out

    return activate


def is_hopper(device: torch.device) -> bool:
    """Return whether the library has its CUTLASS experts of compute capability 9.0 for a GPU."""
    return torch.cuda.get_device_capability(device) == (9, 0)


def takes_experts(stacked: StackedWeights, activation: Activation, ranks: ExpertRanks) -> bool:
    """Return whether FlashInferExperts computes these experts.

    The library counts experts of equal ranks, and reads vectors of 16 bytes.
    """
    num_experts, hidden, inner = stacked.down.shape
    return (
        activation == "silu"
        and stacked.down.dtype in SIXTEEN_BITS
        and hidden * stacked.down.itemsize % VECTOR_BYTES == 0
        and inner * stacked.down.itemsize % VECTOR_BYTES == 0
        and (not ranks.are_whole or num_experts * ranks.size == ranks.total)
    )


class FlashInferExperts:
    """The experts of a mixture by FlashInfer's CUTLASS kernels, all in one call.

    The library has the up projection before the gate, so the weights are copied once in this order.
    Sums of a row's experts are a kernel of their own: fused into the product they would be added
    in an order that changes from run to run.
    """

    def __init__(self, library: Any, stacked: StackedWeights, ranks: ExpertRanks) -> None:
        self._run = library.cutlass_fused_moe
        self._gate_up = _up_first(stacked.gate_up)
        self._down = stacked.down.contiguous()
        self._gate_up_bias = self._down_bias = None
        if stacked.gate_up_bias is not None or stacked.down_bias is not None:
            # The library takes both or none.
            dtype, first, second = self._down.dtype, stacked.gate_up_bias, stacked.down_bias
            if first is None:
                first = self._down.new_zeros(self._gate_up.shape[:2])
            if second is None:
                second = self._down.new_zeros(self._down.shape[:2])
            self._gate_up_bias = _up_first(first).to(dtype)
            self._down_bias = second.to(dtype).contiguous()
        whole = ranks.are_whole
        self._ranks = {
            "tp_size": 1 if whole else ranks.size,
            "tp_rank": 0 if whole else ranks.rank,
            "ep_size": ranks.size if whole else 1,
            "ep_rank": ranks.rank if whole else 0,
        }

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        output = torch.empty_like(x)
        self._run(
            x.contiguous(),
            chosen.int(),
            weights.contiguous(),
            self._gate_up,
            self._down,
            x.dtype,
            [],
            fc1_expert_biases=self._gate_up_bias,
            fc2_expert_biases=self._down_bias,
            output=output,
            use_fused_finalize=False,
            **self._ranks,
        )
        return output.float()


def _up_first(gate_up: torch.Tensor) -> torch.Tensor:
    """Return gate ‖ up, [experts, 2 * inner, ...], as up ‖ gate."""
    gate, up = gate_up.chunk(2, dim=1)
    return torch.cat((up, gate), dim=1)


class FlashInferRotary:
    """Rotates queries and keys of a step in place, in one launch."""

    def __init__(self, library: Any, accelerator: Accelerator) -> None:
        self._rope = library.apply_rope_with_cos_sin_cache_inplace
        self._accelerator = accelerator
        # The table of a step has its tokens' own rotations, one after the other. Graphs go on
        # reading the numbers that they were recorded with.
        self._numbers = [self._count_to(_MANY_TOKENS)]

    def __call__(self, query: torch.Tensor, key: torch.Tensor, rotation: Rotation) -> None:
        """Rotate query and key, [T, n, head_dim] each with heads and dims contiguous."""
        num_tokens, _, head_dim = query.shape
        if num_tokens > len(self._numbers[-1]):
            self._numbers.append(self._count_to(2 * num_tokens))
        self._rope(
            self._numbers[-1][:num_tokens],
            query.view(num_tokens, -1),
            key.view(num_tokens, -1),
            head_dim,
            rotation.view(num_tokens, head_dim),
            is_neox=True,
        )

    def _count_to(self, end: int) -> torch.Tensor:
        """Return int64 0, 1, 2, … on the device."""
        return self._accelerator.zeros(end, torch.int64).add_(1).cumsum(0).sub_(1)
