"""Loads the kernels and gives their C functions Python signatures.

Owns the choice of the library for this CPU. Import torch before: the libraries use
its OpenMP runtime.
"""

import ctypes
import platform
from collections.abc import Iterable
from ctypes import POINTER, c_double, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch  # noqa: F401  (its OpenMP runtime must be in the process first)

from worker.build_kernels import SOURCE_DIR, Variant, machine_variants


class KernelsUnavailableError(Exception):
    """This machine has no kernels; the message says why."""


def _structure(name: str, fields: dict[str, Any]) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


Step = _structure(
    "Step",
    {
        **dict.fromkeys(
            ("num_seqs", "num_tokens", "num_heads", "num_kv_heads", "head_dim", "block_size"),
            c_int64,
        ),
        **dict.fromkeys(("max_blocks", "window"), c_int64),
        **dict.fromkeys(("query_start", "seq_lens", "block_table", "slot_mapping"), c_void_p),
        "scale": c_double,
    },
)
"""TokendStep of csrc/attention.h."""

Plan = _structure(
    "Plan",
    {
        **dict.fromkeys(("num_tiles", "num_tasks", "num_partial_rows", "num_elements"), c_int64),
        **dict.fromkeys(("tiles", "tasks", "partials"), c_void_p),
    },
)
"""TokendPlan of csrc/attention.h."""

Layer = _structure(
    "Layer",
    {
        "dtype": c_int64,
        **dict.fromkeys(("query", "key", "value"), c_void_p),
        **dict.fromkeys(("query_stride", "key_stride", "value_stride"), c_int64),
        **dict.fromkeys(("key_pages", "value_pages"), c_void_p),
        **dict.fromkeys(("block_stride", "head_stride"), c_int64),
        "output": c_void_p,
    },
)
"""TokendLayer of csrc/attention.h."""


Weight = _structure(
    "Weight",
    {
        **dict.fromkeys(("type", "out_features", "in_features"), c_int64),
        "packed": c_void_p,
    },
)
"""TokendWeight of csrc/packed.h."""

Product = _structure(
    "Product",
    {
        **dict.fromkeys(("num_rows", "input_dtype", "input_stride"), c_int64),
        "input": c_void_p,
        "bias_dtype": c_int64,
        "bias": c_void_p,
        **dict.fromkeys(("output_dtype", "output_stride"), c_int64),
        "output": c_void_p,
        "adds": c_int64,
    },
)
"""TokendProduct of csrc/packed.h."""


class Kernels:
    """The functions of one library. `variant` names its instruction set."""

    def __init__(self, library: ctypes.CDLL, variant: str) -> None:
        self.variant = variant
        if not library.tokend_start():
            raise OSError(f"the system keeps the instructions of {variant} to itself")
        self.attention_plan = library.tokend_attention_plan
        self.attention_plan.argtypes = [POINTER(Step), POINTER(Plan)]
        self.attention_plan.restype = None
        self.attention_run = library.tokend_attention_run
        self.attention_run.argtypes = [POINTER(Step), POINTER(Plan), POINTER(Layer)]
        self.attention_run.restype = None
        self.partial_width = library.tokend_partial_width
        self.partial_width.argtypes = [c_int64]
        self.partial_width.restype = c_int64
        self.draw = library.tokend_draw
        self.draw.argtypes = [c_void_p, c_int64, c_int64, c_int64, *[c_void_p] * 6]
        self.draw.restype = None
        self.filter = library.tokend_filter
        self.filter.argtypes = [c_void_p, c_int64, c_int64, c_int64, *[c_void_p] * 5]
        self.filter.restype = None
        self.packed_bytes = library.tokend_packed_bytes
        self.packed_bytes.argtypes = [POINTER(Weight)]
        self.packed_bytes.restype = c_int64
        self.pack_blocks = library.tokend_pack_blocks
        self.pack_blocks.argtypes = [POINTER(Weight), c_void_p, c_void_p]
        self.pack_blocks.restype = None
        self.pack_dense = library.tokend_pack_dense
        self.pack_dense.argtypes = [POINTER(Weight), c_int64, c_int64, c_void_p]
        self.pack_dense.restype = None
        self.unpack_rows = library.tokend_unpack_rows
        self.unpack_rows.argtypes = [POINTER(Weight), c_int64, c_void_p, c_int64, c_void_p]
        self.unpack_rows.restype = None
        self.quantise_rows = library.tokend_quantise_rows
        self.quantise_rows.argtypes = [POINTER(Product), c_int64, c_void_p]
        self.quantise_rows.restype = None
        self.packed_product = library.tokend_packed_product
        self.packed_product.argtypes = [POINTER(Weight), POINTER(Product)]
        self.packed_product.restype = None
        self.quantised_product = library.tokend_quantised_product
        self.quantised_product.argtypes = [POINTER(Weight), POINTER(Product), c_void_p]
        self.quantised_product.restype = None


def load_kernels(folder: Path = SOURCE_DIR) -> Kernels:
    """The best library in `folder` that this CPU runs; raises KernelsUnavailableError."""
    runnable = usable_variants(machine_variants(), cpu_flags())
    built = [each for each in runnable if each.library(folder).exists()]
    if not built:
        raise KernelsUnavailableError(
            f"no compiled kernels of these sources in {folder}; with g++ installed, "
            "`python -m worker.build_kernels` makes them"
        )
    refusals = []
    for variant in built:
        try:
            return load_variant(variant, folder)
        except KernelsUnavailableError as refusal:
            refusals.append(str(refusal))
    raise KernelsUnavailableError("; ".join(refusals))


def load_variant(variant: Variant, folder: Path = SOURCE_DIR) -> Kernels:
    """The library of one variant; raises KernelsUnavailableError when it does not load."""
    try:
        return Kernels(ctypes.CDLL(str(variant.library(folder))), variant.name)
    except (OSError, AttributeError) as error:
        raise KernelsUnavailableError(f"the kernels do not load: {error}") from error


def usable_variants(variants: Iterable[Variant], flags: frozenset[str]) -> list[Variant]:
    """Those variants whose instructions a CPU with these flags has, in order."""
    return [each for each in variants if each.cpu_flags <= flags]


def cpu_flags() -> frozenset[str]:
    """Instruction set flags of the first CPU; empty where the system does not tell."""
    cpuinfo = Path("/proc/cpuinfo")
    if platform.system() != "Linux" or not cpuinfo.exists():
        return frozenset()
    for line in cpuinfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()
