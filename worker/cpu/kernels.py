"""Loads the C++ kernels and gives their functions Python signatures.

load_kernels picks the library for this CPU, candidate_kernels those that can compute products and
attention beside it. limit_kernels holds both to an instruction set. torch is imported first, since
the libraries use its OpenMP runtime.
"""

import ctypes
import functools
import sys
from ctypes import POINTER, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch  # its OpenMP runtime must be in the process first

from proto.errors import ConfigError
from proto.settings.config import CpuKernels
from worker.cpu.build_kernels import (
    SOURCE_DIR,
    KernelVariant,
    cpu_flags,
    machine_variants,
    usable_variants,
)
from worker.cpu.kernel_structures import (
    AdaptersRun,
    AttentionLayer,
    AttentionSchedule,
    AttentionStep,
    Bf16Shape,
    DeltaRuleStructure,
    Fp8Shape,
    Mamba2Structure,
    MoeRun,
    MoeStructure,
    PackedShape,
    Product,
    RecurrenceRun,
    RotatedShape,
    Stack,
    StackRun,
    StepAdaptersStructure,
)
from worker.host.large_pages import WeightArena
from worker.host.memory_nodes import memory_placement

if TYPE_CHECKING:
    from ctypes import _NamedFuncPointer


class KernelsUnavailableError(Exception):
    """This machine has no kernels; the message says why."""


class _Function:
    """The function tokend_NAME of a library, which each Kernels has as its attribute NAME.

    Without argument types ctypes does not check or convert what a call passes.
    """

    def __init__(self, result: type | None, *arguments: type) -> None:
        self._result = result
        self._arguments = arguments

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, kernels: object, owner: type) -> "_NamedFuncPointer":
        # A bound function is in the dictionary of its Kernels, where Python looks first.
        raise AttributeError(f"{self._name} is bound by Kernels(...)")

    def bind(self, library: ctypes.CDLL) -> "_NamedFuncPointer":
        """Return the function of a library; raises AttributeError if there is none."""
        function = library[f"tokend_{self._name}"]
        function.restype = self._result
        if self._arguments:
            function.argtypes = self._arguments
        return function


class Kernels:
    """The functions of one library. `variant` names its instruction set.

    memory: where the functions that lay out weights put them. digest: of sources and flags.
    products: address of TokendProductKernels of csrc/products/weight_formats.h.
    """

    team_threads = _Function(None, POINTER(c_int32))  # csrc/common/team.h

    # csrc/attention/attention.h
    attention_plan = _Function(None, POINTER(AttentionStep), POINTER(AttentionSchedule))
    attention_run = _Function(
        None, POINTER(AttentionStep), POINTER(AttentionSchedule), POINTER(AttentionLayer)
    )
    partial_width = _Function(c_int64, c_int64)

    # csrc/sampling/sampling.h
    draw = _Function(None, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_void_p)
    filter = _Function(None, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p)
    edit = _Function(None, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p)
    find_nonfinite = _Function(None, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_void_p)
    find_best = _Function(None, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_void_p)

    # csrc/layers/rows.h; these take a reference that is made once, which no call needs to check
    norm = _Function(None)
    add_norm = _Function(None)
    gate = _Function(None)

    # csrc/layers/adapters.h
    adapters_bytes = _Function(c_int64, POINTER(StepAdaptersStructure))
    adapters_add = _Function(None, POINTER(AdaptersRun))

    # csrc/layers/stack.h, moe.h, delta_rule.h, mamba2.h and short_conv.h
    stack_bytes = _Function(c_int64, POINTER(Stack), c_int64, c_int64, c_int64)
    stack_run = _Function(c_int64, POINTER(Stack), POINTER(StackRun))
    moe_bytes = _Function(c_int64, POINTER(MoeStructure), c_int64, c_int64)
    moe_run = _Function(None, POINTER(MoeStructure), POINTER(MoeRun))
    delta_state = _Function(c_int64, POINTER(DeltaRuleStructure), c_int64)
    delta_bytes = _Function(c_int64, c_void_p, c_int64)
    delta_run = _Function(None, c_void_p, POINTER(RecurrenceRun))
    mamba2_state = _Function(c_int64, POINTER(Mamba2Structure), c_int64)
    mamba2_bytes = _Function(c_int64, c_void_p, c_int64)
    mamba2_run = _Function(None, c_void_p, POINTER(RecurrenceRun))
    short_conv_bytes = _Function(c_int64, c_void_p, c_int64)
    short_conv_run = _Function(None, c_void_p, POINTER(RecurrenceRun))

    # csrc/products/weight_formats.h
    product_kernels = _Function(c_void_p)

    # csrc/products/packed/packed.h
    packed_bytes = _Function(c_int64, POINTER(PackedShape))
    pack_blocks = _Function(None, POINTER(PackedShape), c_int64, c_int64, c_void_p, c_void_p)
    pack_dense = _Function(None, POINTER(PackedShape), c_int64, c_int64, c_void_p)
    unpack_rows = _Function(c_int64, POINTER(PackedShape), c_int64, c_void_p, c_int64, c_void_p)
    packed_product = _Function(None, POINTER(PackedShape), POINTER(Product))

    # csrc/products/rotated/rotated.h
    rotated_bytes = _Function(c_int64, POINTER(RotatedShape))
    code_bytes = _Function(c_int64, c_int64, c_int64)
    rotate_dense = _Function(None, POINTER(RotatedShape), c_int64, c_int64, c_void_p)
    code_rows = _Function(None, POINTER(Product), c_int64, c_void_p)
    coded_product = _Function(None, POINTER(RotatedShape), POINTER(Product), c_void_p)
    rotated_product = _Function(None, POINTER(RotatedShape), POINTER(Product))

    # csrc/products/bf16/bf16.h
    bf16_bytes = _Function(c_int64, POINTER(Bf16Shape))
    bf16_rows = _Function(c_int64, POINTER(Bf16Shape), c_int64, c_void_p, c_void_p)
    bf16_pack = _Function(None, POINTER(Bf16Shape), c_int64, c_int64, c_int64, c_void_p, c_void_p)
    bf16_product = _Function(None, POINTER(Bf16Shape), POINTER(Product))

    # csrc/products/fp8/fp8.h
    fp8_bytes = _Function(c_int64, POINTER(Fp8Shape))
    fp8_rows = _Function(c_int64, POINTER(Fp8Shape), c_int64, c_void_p, c_void_p)
    fp8_pack = _Function(
        c_int64, POINTER(Fp8Shape), c_int64, c_int64, c_int64, c_void_p, c_void_p, c_void_p
    )
    fp8_product = _Function(None, POINTER(Fp8Shape), POINTER(Product))

    def __init__(self, library: ctypes.CDLL, variant: str, digest: str = "") -> None:
        self.variant = variant
        self.digest = digest
        self.memory = WeightArena(memory_placement())
        for name, function in vars(Kernels).items():
            if isinstance(function, _Function):
                vars(self)[name] = function.bind(library)
        self.products: int = self.product_kernels()


DTYPE_CODES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""TokendDType of csrc/common/dtype.h."""


def load_kernels(folder: Path = SOURCE_DIR) -> Kernels:
    """Return the best library in `folder` that this process may run.

    Raises KernelsUnavailableError if there is none.
    """
    built = runnable_variants(folder)
    if not built:
        raise KernelsUnavailableError(
            f"no compiled kernels of these sources for this CPU in {folder}; with g++ installed, "
            f"`{sys.executable} -m worker.cpu.build_kernels --here` makes them"
        )
    return load_variant(built[0], folder)


@functools.cache
def candidate_kernels() -> tuple[Kernels, ...]:
    """Return the libraries whose products and attention are worth comparing, the default one first.

    Empty if none is compiled. Those for any CPU of this kind are left out: the same loops over
    shorter vectors. Packed weights have the same bits in all others.
    """
    return tuple(
        load_variant(variant)
        for number, variant in enumerate(runnable_variants())
        if number == 0 or not variant.is_baseline
    )


_allowed: KernelVariant | None = None
"""The best variant that this process may run; None: any that the CPU runs."""


def limit_kernels(setting: CpuKernels) -> None:
    """Hold the kernels of this process to those of a variant and lesser ones; once, at its start.

    Raises ConfigError for a variant that cannot run here.
    """
    global _allowed
    if setting == "auto":
        return
    found = {variant.name: variant for variant in runnable_variants()}
    if setting not in found:
        raise ConfigError(
            f"--cpu-kernels {setting} cannot run here; possible: {', '.join(('auto', *found))}"
        )
    _allowed = found[setting]


def runnable_variants(folder: Path = SOURCE_DIR) -> list[KernelVariant]:
    """Return the variants that are compiled and that this process may run, best first."""
    flags = cpu_flags() if _allowed is None else _allowed.cpu_flags
    return [
        variant
        for variant in usable_variants(machine_variants(), flags)
        if variant.library(folder).exists()
    ]


def load_variant(variant: KernelVariant, folder: Path = SOURCE_DIR) -> Kernels:
    """Return the library of one variant; raises KernelsUnavailableError if it does not load."""
    path = variant.library(folder)
    try:
        return Kernels(ctypes.CDLL(str(path)), variant.name, path.stem.rpartition("_")[2])
    except (OSError, AttributeError) as error:
        raise KernelsUnavailableError(f"the kernels do not load: {error}") from error
