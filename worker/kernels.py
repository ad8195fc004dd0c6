"""Loads the C++ kernels and gives their functions and structures Python signatures.

load_kernels picks the library for this CPU, candidate_kernels those that can compute products and
attention beside it. limit_kernels holds both to an instruction set. torch is imported first, since
the libraries use its OpenMP runtime.
"""

import ctypes
import functools
import logging
from ctypes import POINTER, c_double, c_float, c_int64, c_void_p
from pathlib import Path
from typing import Any, Final

import torch  # its OpenMP runtime must be in the process first

from proto.config import CpuKernels
from proto.errors import ConfigError
from worker.build_kernels import (
    SOURCE_DIR,
    KernelVariant,
    cpu_flags,
    machine_variants,
    usable_variants,
)
from worker.large_pages import WeightArena
from worker.memory_nodes import memory_placement

logger = logging.getLogger("tokend.kernels")


class KernelsUnavailableError(Exception):
    """This machine has no kernels; the message says why."""


def _structure(name: str, fields: dict[str, Any]) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


AttentionStep = _structure(
    "AttentionStep",
    {
        **dict.fromkeys(
            ("num_seqs", "num_tokens", "num_heads", "num_kv_heads", "head_dim", "block_size"),
            c_int64,
        ),
        **dict.fromkeys(("max_blocks", "window", "most_partial_rows", "latent_dim"), c_int64),
        "ahead": c_int64,
        **dict.fromkeys(("query_start", "seq_lens", "block_table", "slot_mapping"), c_void_p),
        **dict.fromkeys(("scale", "soft_cap"), c_double),
    },
)
"""TokendAttentionStep of csrc/attention/attention.h."""

AttentionSchedule = _structure(
    "AttentionSchedule",
    {
        **dict.fromkeys(("num_tiles", "num_tasks", "num_rounds"), c_int64),
        **dict.fromkeys(("num_partial_rows", "num_elements"), c_int64),
        **dict.fromkeys(("tiles", "tasks", "rounds", "partials"), c_void_p),
    },
)
"""TokendAttentionSchedule of csrc/attention/attention.h."""

AttentionLayer = _structure(
    "AttentionLayer",
    {
        **dict.fromkeys(("dtype", "cache_dtype"), c_int64),
        **dict.fromkeys(("query", "key", "value"), c_void_p),
        **dict.fromkeys(("query_stride", "key_stride", "value_stride"), c_int64),
        **dict.fromkeys(("rotation", "key_pages", "value_pages"), c_void_p),
        **dict.fromkeys(("block_stride", "head_stride"), c_int64),
        **dict.fromkeys(("sinks", "output"), c_void_p),
    },
)
"""TokendAttentionLayer of csrc/attention/attention.h."""


RowNorm = _structure(
    "RowNorm",
    {**dict.fromkeys(("weight", "bias"), c_void_p), "eps": c_double, "is_centered": c_int64},
)
"""TokendRowNorm of csrc/layers/rows.h."""

NormCall = _structure(
    "NormCall",
    {
        **{"size": c_int64, "norm": RowNorm},
        **dict.fromkeys(("dtype", "num_groups", "group_size", "group_stride"), c_int64),
        **dict.fromkeys(("x", "out"), c_void_p),
    },
)
"""TokendNormCall of csrc/layers/rows.h."""

GateCall = _structure(
    "GateCall",
    {
        **dict.fromkeys(("kind", "is_gated", "dtype", "num_rows", "size"), c_int64),
        **dict.fromkeys(("x", "out"), c_void_p),
    },
)
"""TokendGateCall of csrc/layers/rows.h."""

Edits = _structure(
    "Edits",
    {
        **{"num_allowed": c_int64, "allowed": c_void_p},
        **{"num_forbidden": c_int64, "forbidden": c_void_p},
        **{"num_biases": c_int64, "bias_ids": c_void_p, "bias_values": c_void_p},
        **{"num_counts": c_int64, "count_ids": c_void_p, "counts": c_void_p},
        **dict.fromkeys(("repetition", "frequency", "presence"), c_float),
    },
)
"""TokendEdits of csrc/sampling/sampling.h."""

PackedShape = _structure(
    "PackedShape",
    {
        **dict.fromkeys(("type", "out_features", "in_features"), c_int64),
        "packed": c_void_p,
    },
)
"""TokendPackedShape of csrc/products/packed/packed.h."""

RotatedShape = _structure(
    "RotatedShape",
    {
        **dict.fromkeys(("out_features", "in_features"), c_int64),
        "packed": c_void_p,
    },
)
"""TokendRotatedShape of csrc/products/rotated/rotated.h."""

Bf16Shape = _structure(
    "Bf16Shape",
    {
        **dict.fromkeys(("out_features", "in_features"), c_int64),
        "packed": c_void_p,
    },
)
"""TokendBf16Shape of csrc/products/bf16/bf16.h."""

Fp8Shape = _structure(
    "Fp8Shape",
    {
        **dict.fromkeys(("out_features", "in_features"), c_int64),
        **dict.fromkeys(("scale_inputs", "scale_outputs"), c_int64),
        "packed": c_void_p,
    },
)
"""TokendFp8Shape of csrc/products/fp8/fp8.h."""

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
"""TokendProduct of csrc/products/packed/packed.h."""

LinearPart = _structure(
    "LinearPart",
    {
        **{"format": c_int64, "weight": c_void_p, "kernels": c_void_p, "out_features": c_int64},
        **{"bias_dtype": c_int64, "bias": c_void_p},
    },
)
"""TokendLinearPart of csrc/layers/stack.h."""

StackLinear = _structure(
    "StackLinear",
    {
        **dict.fromkeys(("in_features", "out_features", "num_parts"), c_int64),
        "parts": c_void_p,
    },
)
"""TokendStackLinear of csrc/layers/stack.h."""

LatentStructure = _structure(
    "LatentStructure",
    {
        **dict.fromkeys(("query_rank", "plain_size", "rotated_size", "rank"), c_int64),
        **{"value_size": c_int64, "query": StackLinear},
        **dict.fromkeys(("keys", "values"), c_void_p),
    },
)
"""TokendLatentAttention of csrc/layers/stack.h."""

StackLayer = _structure(
    "StackLayer",
    {
        **{"attention_norm": RowNorm, "qkv": StackLinear},
        **{"query_norm": RowNorm, "key_norm": RowNorm},
        **{"output": StackLinear, "attention_post_norm": RowNorm, "attention_sum_norm": RowNorm},
        **{"mlp_norm": RowNorm, "gate_up": StackLinear},
        **{"down": StackLinear, "mlp_post_norm": RowNorm, "mlp_sum_norm": RowNorm},
        **{"moe": c_void_p, "rope_table": c_int64, "sinks": c_void_p, "latent": c_void_p},
    },
)
"""TokendStackLayer of csrc/layers/stack.h."""

RouterStructure = _structure(
    "RouterStructure",
    {
        **dict.fromkeys(("num_experts", "top_k", "scoring", "normalises"), c_int64),
        **dict.fromkeys(("num_groups", "top_groups", "best_of_group"), c_int64),
        "scale": c_double,
        **dict.fromkeys(("weight", "bias", "selection_bias"), c_void_p),
    },
)
"""TokendRouter of csrc/layers/moe.h."""

ExpertStructure = _structure("ExpertStructure", {"gate_up": StackLinear, "down": StackLinear})
"""TokendExpert of csrc/layers/moe.h."""

MoeStructure = _structure(
    "MoeStructure",
    {
        **dict.fromkeys(("hidden_size", "inner_size", "gate"), c_int64),
        **{"router": RouterStructure, "first_expert": c_int64, "end_expert": c_int64},
        **{"experts": c_void_p, "shared_size": c_int64},
        **{"shared": ExpertStructure, "shared_gate": c_void_p},
        **{"num_thread_groups": c_int64, "thread_group_ends": c_void_p},
    },
)
"""TokendMoe of csrc/layers/moe.h."""

MoeRun = _structure(
    "MoeRun",
    {
        **{"dtype": c_int64, "num_rows": c_int64},
        **{"input_stride": c_int64, "input": c_void_p},
        **{"output_stride": c_int64, "output": c_void_p},
        **{"adds": c_int64, "scratch": c_void_p, "chosen": c_void_p},
    },
)
"""TokendMoeRun of csrc/layers/moe.h."""

RopeTable = _structure("RopeTable", {"num_positions": c_int64, "table": c_void_p})
"""TokendRopeTable of csrc/layers/stack.h."""

Stack = _structure(
    "Stack",
    {
        **dict.fromkeys(("num_layers", "hidden_size", "inner_size"), c_int64),
        **dict.fromkeys(("num_heads", "num_kv_heads", "head_dim", "gate"), c_int64),
        **dict.fromkeys(("is_gated", "is_parallel", "norms_heads_jointly"), c_int64),
        **{"num_rope_tables": c_int64, "rope_tables": c_void_p, "layers": c_void_p},
    },
)
"""TokendStack of csrc/layers/stack.h."""

AttentionCall = _structure(
    "AttentionCall", dict.fromkeys(("run", "step", "plan", "layer"), c_void_p)
)
"""TokendAttentionCall of csrc/layers/stack.h."""

StackRun = _structure(
    "StackRun",
    {
        **dict.fromkeys(("dtype", "num_rows"), c_int64),
        **dict.fromkeys(("hidden", "positions", "attention_calls", "scratch"), c_void_p),
        **dict.fromkeys(("is_timed", "product_ns", "attention_ns"), c_int64),
        **{"chosen": c_void_p, "chosen_stride": c_int64},
        **{"num_recorded": c_int64, "recorded": c_void_p},
        **{"residuals": c_void_p, "residual_stride": c_int64},
    },
)
"""TokendStackRun of csrc/layers/stack.h."""


DeltaRuleStructure = _structure(
    "DeltaRuleStructure",
    {
        **dict.fromkeys(("num_key_heads", "num_value_heads", "key_size", "value_size"), c_int64),
        **dict.fromkeys(("is_tiled", "num_taps"), c_int64),
        **{"taps": c_void_p, "decay": c_void_p, "time_bias": c_void_p},
        **{"norm": c_void_p, "norm_eps": c_double},
    },
)
"""TokendDeltaRule of csrc/layers/delta_rule.h."""

DeltaRuleRun = _structure(
    "DeltaRuleRun",
    {
        **dict.fromkeys(("dtype", "num_seqs", "num_tokens", "row_stride"), c_int64),
        **{"gate_stride": c_int64, "rows": c_void_p, "gates": c_void_p},
        **dict.fromkeys(("query_start", "sources", "write_start"), c_void_p),
        **dict.fromkeys(("write_ends", "write_slots", "states"), c_void_p),
        **{"slot_stride": c_int64, "scratch": c_void_p, "out": c_void_p},
    },
)
"""TokendDeltaRun of csrc/layers/delta_rule.h."""


class Kernels:
    """The functions of one library. `variant` names its instruction set.

    memory: where the functions that lay out weights put them. digest: of sources and flags.
    """

    def __init__(self, library: ctypes.CDLL, variant: str, digest: str = "") -> None:
        self.variant = variant
        self.digest = digest
        self.memory = WeightArena(memory_placement())
        self.attention_plan = library.tokend_attention_plan
        self.attention_plan.argtypes = [POINTER(AttentionStep), POINTER(AttentionSchedule)]
        self.attention_plan.restype = None
        self.attention_run = library.tokend_attention_run
        self.attention_run.argtypes = [
            POINTER(AttentionStep),
            POINTER(AttentionSchedule),
            POINTER(AttentionLayer),
        ]
        self.attention_run.restype = None
        self.partial_width = library.tokend_partial_width
        self.partial_width.argtypes = [c_int64]
        self.partial_width.restype = c_int64
        self.draw = library.tokend_draw
        self.draw.argtypes = [c_void_p, c_int64, c_int64, c_int64, *[c_void_p] * 3]
        self.draw.restype = None
        self.filter = library.tokend_filter
        self.filter.argtypes = [c_void_p, c_int64, c_int64, c_int64, *[c_void_p] * 2]
        self.filter.restype = None
        # These take a reference that is made once: no argtypes, which cost a check at each call.
        self.norm = library.tokend_norm
        self.add_norm = library.tokend_add_norm
        self.gate = library.tokend_gate
        self.find_nonfinite = library.tokend_find_nonfinite
        self.find_nonfinite.argtypes = [c_int64, c_int64, c_void_p, c_int64, c_void_p, c_void_p]
        self.find_best = library.tokend_find_best
        self.find_best.argtypes = [*[c_int64] * 3, *[c_void_p] * 4]
        self.edit = library.tokend_edit
        self.edit.argtypes = [c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p]
        self.edit.restype = None
        for function in (
            *(self.norm, self.add_norm),
            *(self.gate, self.find_nonfinite, self.find_best),
        ):
            function.restype = None
        self.packed_bytes = library.tokend_packed_bytes
        self.packed_bytes.argtypes = [POINTER(PackedShape)]
        self.packed_bytes.restype = c_int64
        self.pack_blocks = library.tokend_pack_blocks
        self.pack_blocks.argtypes = [POINTER(PackedShape), c_int64, c_int64, c_void_p, c_void_p]
        self.pack_blocks.restype = None
        self.pack_dense = library.tokend_pack_dense
        self.pack_dense.argtypes = [POINTER(PackedShape), c_int64, c_int64, c_void_p]
        self.pack_dense.restype = None
        self.unpack_rows = library.tokend_unpack_rows
        self.unpack_rows.argtypes = [POINTER(PackedShape), c_int64, c_void_p, c_int64, c_void_p]
        self.unpack_rows.restype = c_int64
        self.quantise_rows = library.tokend_quantise_rows
        self.quantise_rows.argtypes = [POINTER(Product), c_int64, c_void_p]
        self.quantise_rows.restype = None
        self.packed_product = library.tokend_packed_product
        self.packed_product.argtypes = [POINTER(PackedShape), POINTER(Product)]
        self.packed_product.restype = None
        self.quantised_product = library.tokend_quantised_product
        self.quantised_product.argtypes = [POINTER(PackedShape), POINTER(Product), c_void_p]
        self.quantised_product.restype = None
        self.stack_bytes = library.tokend_stack_bytes
        self.stack_bytes.argtypes = [POINTER(Stack), c_int64, c_int64]
        self.stack_bytes.restype = c_int64
        self.stack_run = library.tokend_stack_run
        self.stack_run.argtypes = [POINTER(Stack), POINTER(StackRun)]
        self.stack_run.restype = c_int64
        self.moe_bytes = library.tokend_moe_bytes
        self.moe_bytes.argtypes = [POINTER(MoeStructure), c_int64, c_int64]
        self.moe_bytes.restype = c_int64
        self.moe_run = library.tokend_moe_run
        self.moe_run.argtypes = [POINTER(MoeStructure), POINTER(MoeRun)]
        self.moe_run.restype = None
        self.delta_state = library.tokend_delta_state
        self.delta_state.argtypes = [POINTER(DeltaRuleStructure)]
        self.delta_bytes = library.tokend_delta_bytes
        self.delta_bytes.argtypes = [POINTER(DeltaRuleStructure), c_int64]
        for function in (self.delta_state, self.delta_bytes):
            function.restype = c_int64
        self.delta_run = library.tokend_delta_run
        self.delta_run.argtypes = [POINTER(DeltaRuleStructure), POINTER(DeltaRuleRun)]
        self.delta_run.restype = None
        library.tokend_product_kernels.restype = c_void_p
        self.products: int = library.tokend_product_kernels()
        """Address of TokendProductKernels of csrc/products/weight_formats.h."""
        self._bind_rotated(library)
        self._bind_bf16(library)
        self._bind_fp8(library)

    def _bind_rotated(self, library: ctypes.CDLL) -> None:
        """The functions of csrc/products/rotated/rotated.h."""
        self.rotated_bytes = library.tokend_rotated_bytes
        self.rotated_bytes.argtypes = [POINTER(RotatedShape)]
        self.code_bytes = library.tokend_code_bytes
        self.code_bytes.argtypes = [c_int64, c_int64]
        for function in (self.rotated_bytes, self.code_bytes):
            function.restype = c_int64
        self.rotate_dense = library.tokend_rotate_dense
        self.rotate_dense.argtypes = [POINTER(RotatedShape), c_int64, c_int64, c_void_p]
        self.code_rows = library.tokend_code_rows
        self.code_rows.argtypes = [POINTER(Product), c_int64, c_void_p]
        self.coded_product = library.tokend_coded_product
        self.coded_product.argtypes = [POINTER(RotatedShape), POINTER(Product), c_void_p]
        self.rotated_product = library.tokend_rotated_product
        self.rotated_product.argtypes = [POINTER(RotatedShape), POINTER(Product)]
        for function in (
            *(self.rotate_dense, self.code_rows),
            *(self.coded_product, self.rotated_product),
        ):
            function.restype = None

    def _bind_bf16(self, library: ctypes.CDLL) -> None:
        """The functions of csrc/products/bf16/bf16.h."""
        self.bf16_bytes = library.tokend_bf16_bytes
        self.bf16_bytes.argtypes = [POINTER(Bf16Shape)]
        self.bf16_rows = library.tokend_bf16_rows
        self.bf16_rows.argtypes = [POINTER(Bf16Shape), c_int64, c_void_p, c_void_p]
        for function in (self.bf16_bytes, self.bf16_rows):
            function.restype = c_int64
        self.bf16_pack = library.tokend_bf16_pack
        self.bf16_pack.argtypes = [POINTER(Bf16Shape), *[c_int64] * 3, c_void_p, c_void_p]
        self.bf16_product = library.tokend_bf16_product
        self.bf16_product.argtypes = [POINTER(Bf16Shape), POINTER(Product)]
        for function in (self.bf16_pack, self.bf16_product):
            function.restype = None

    def _bind_fp8(self, library: ctypes.CDLL) -> None:
        """The functions of csrc/products/fp8/fp8.h."""
        self.fp8_bytes = library.tokend_fp8_bytes
        self.fp8_bytes.argtypes = [POINTER(Fp8Shape)]
        self.fp8_pack = library.tokend_fp8_pack
        self.fp8_pack.argtypes = [POINTER(Fp8Shape), *[c_int64] * 3, *[c_void_p] * 3]
        self.fp8_rows = library.tokend_fp8_rows
        self.fp8_rows.argtypes = [POINTER(Fp8Shape), c_int64, c_void_p, c_void_p]
        for function in (self.fp8_bytes, self.fp8_pack, self.fp8_rows):
            function.restype = c_int64
        self.fp8_product = library.tokend_fp8_product
        self.fp8_product.argtypes = [POINTER(Fp8Shape), POINTER(Product)]
        self.fp8_product.restype = None


DTYPE_CODES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""TokendDType of csrc/common/dtype.h."""


@functools.cache
def row_kernels() -> Kernels | None:
    """Return the kernels for small row operations, or None with one warning if there are none."""
    try:
        return load_kernels()
    except KernelsUnavailableError as reason:
        logger.warning("small operations run on the slow reference: %s", reason)
        return None


def load_kernels(folder: Path = SOURCE_DIR) -> Kernels:
    """Return the best library in `folder` that this process may run.

    Raises KernelsUnavailableError if there is none.
    """
    built = runnable_variants(folder)
    if not built:
        raise KernelsUnavailableError(
            f"no compiled kernels of these sources in {folder}; with g++ installed, "
            "`python -m worker.build_kernels` makes them"
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
        if number == 0 or variant.cpu_flags
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
            f"--cpu-kernels {setting} cannot run here; possible: {', '.join(('auto', *found))}",
            "cpu_kernels",
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
