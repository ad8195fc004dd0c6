"""The C structures that the kernels' functions read, field by field as in the headers."""

import ctypes
from ctypes import c_double, c_int64, c_void_p


def integers(*names: str) -> list[tuple[str, type[c_int64]]]:
    return [(name, c_int64) for name in names]


def pointers(*names: str) -> list[tuple[str, type[c_void_p]]]:
    return [(name, c_void_p) for name in names]


def doubles(*names: str) -> list[tuple[str, type[c_double]]]:
    return [(name, c_double) for name in names]


class AttentionStep(ctypes.Structure):
    """TokendAttentionStep of csrc/attention/attention.h."""

    _fields_ = [
        *integers("num_seqs", "num_tokens", "num_heads", "num_kv_heads", "head_dim", "block_size"),
        *integers("max_blocks", "window", "most_partial_rows", "latent_dim", "ahead"),
        *pointers("query_start", "seq_lens", "block_table", "slot_mapping", "attend_end"),
        *doubles("scale", "soft_cap"),
    ]


class AttentionSchedule(ctypes.Structure):
    """TokendAttentionSchedule of csrc/attention/attention.h."""

    _fields_ = [
        *integers("num_tiles", "num_tasks", "num_rounds", "num_partial_rows", "num_elements"),
        *pointers("tiles", "tasks", "rounds", "partials"),
    ]


class AttentionLayer(ctypes.Structure):
    """TokendAttentionLayer of csrc/attention/attention.h."""

    _fields_ = [
        *integers("dtype", "cache_dtype"),
        *pointers("query", "key", "value"),
        *integers("query_stride", "key_stride", "value_stride"),
        *pointers("rotation", "key_pages", "value_pages"),
        *integers("block_stride", "head_stride"),
        *pointers("sinks", "output"),
    ]


class RowNorm(ctypes.Structure):
    """TokendRowNorm of csrc/layers/rows.h."""

    _fields_ = [
        *pointers("weight", "bias"),
        *doubles("eps"),
        *integers("is_layer_norm"),
    ]


class NormCall(ctypes.Structure):
    """TokendNormCall of csrc/layers/rows.h."""

    _fields_ = [
        *integers("size"),
        ("norm", RowNorm),
        *integers("dtype", "num_groups", "group_size", "group_stride"),
        *pointers("x", "out"),
    ]


class GateCall(ctypes.Structure):
    """TokendGateCall of csrc/layers/rows.h."""

    _fields_ = [
        *integers("kind", "is_gated", "dtype", "num_rows", "size"),
        *pointers("x", "out"),
    ]


class PackedShape(ctypes.Structure):
    """TokendPackedShape of csrc/products/packed/packed.h."""

    _fields_ = [
        *integers("type", "out_features", "in_features"),
        *pointers("packed"),
    ]


class RotatedShape(ctypes.Structure):
    """TokendRotatedShape of csrc/products/rotated/rotated.h."""

    _fields_ = [
        *integers("out_features", "in_features"),
        *pointers("packed"),
    ]


class Bf16Shape(ctypes.Structure):
    """TokendBf16Shape of csrc/products/bf16/bf16.h."""

    _fields_ = [
        *integers("out_features", "in_features"),
        *pointers("packed"),
    ]


class Fp8Shape(ctypes.Structure):
    """TokendFp8Shape of csrc/products/fp8/fp8.h."""

    _fields_ = [
        *integers("out_features", "in_features", "scale_inputs", "scale_outputs"),
        *pointers("packed"),
    ]


class Product(ctypes.Structure):
    """TokendProduct of csrc/products/packed/packed.h."""

    _fields_ = [
        *integers("num_rows", "input_dtype", "input_stride"),
        *pointers("input"),
        *integers("bias_dtype"),
        *pointers("bias"),
        *integers("output_dtype", "output_stride"),
        *pointers("output"),
        *integers("adds"),
    ]


class LinearPart(ctypes.Structure):
    """TokendLinearPart of csrc/layers/stack.h."""

    _fields_ = [
        *integers("format"),
        *pointers("weight", "kernels"),
        *integers("out_features", "bias_dtype"),
        *pointers("bias"),
    ]


class StackLinear(ctypes.Structure):
    """TokendStackLinear of csrc/layers/stack.h."""

    _fields_ = [
        *integers("in_features", "out_features", "num_parts"),
        *pointers("parts"),
        *integers("product"),
    ]


class LowRankPartStructure(ctypes.Structure):
    """TokendLowRankPart of csrc/layers/adapters.h."""

    _fields_ = [
        *integers("first_output", "num_outputs", "first_rank", "num_ranks"),
        *pointers("up"),
    ]


class LowRankStructure(ctypes.Structure):
    """TokendLowRank of csrc/layers/adapters.h."""

    _fields_ = [
        *integers("dtype", "in_features", "rank"),
        *pointers("down"),
        *integers("num_parts"),
        *pointers("parts"),
        *integers("out_features"),
        *pointers("gain", "shift"),
    ]


class AdapterRowsStructure(ctypes.Structure):
    """TokendAdapterRows of csrc/layers/adapters.h."""

    _fields_ = [
        *pointers("products"),
        *integers("num_rows"),
        *pointers("rows", "scales"),
    ]


class StepAdaptersStructure(ctypes.Structure):
    """TokendStepAdapters of csrc/layers/adapters.h."""

    _fields_ = [
        *integers("num_groups"),
        *pointers("groups"),
        *integers("max_rank"),
        *pointers("places"),
    ]


class AdaptersRun(ctypes.Structure):
    """TokendAdaptersRun of csrc/layers/adapters.h."""

    _fields_ = [
        *pointers("adapters"),
        *integers("product", "dtype", "x_stride"),
        *pointers("x"),
        *integers("y_stride"),
        *pointers("y", "scratch"),
    ]


class LatentStructure(ctypes.Structure):
    """TokendLatentAttention of csrc/layers/stack.h."""

    _fields_ = [
        *integers("query_rank", "plain_size", "rotated_size", "rank", "value_size"),
        ("query", StackLinear),
        *pointers("keys", "values"),
    ]


class StackRecurrence(ctypes.Structure):
    """TokendStackRecurrence of csrc/layers/stack.h."""

    _fields_ = [
        ("rows", StackLinear),
        ("gates", StackLinear),
        ("output", StackLinear),
        *doubles("input_factor", "output_factor"),
        *integers("state_offset", "log_offset"),
        *pointers("layer", "bytes", "run"),
    ]


class StackLayer(ctypes.Structure):
    """TokendStackLayer of csrc/layers/stack.h."""

    _fields_ = [
        *pointers("recurrence"),
        ("attention_norm", RowNorm),
        ("qkv", StackLinear),
        ("query_norm", RowNorm),
        ("key_norm", RowNorm),
        ("output", StackLinear),
        ("attention_post_norm", RowNorm),
        ("attention_sum_norm", RowNorm),
        ("mlp_norm", RowNorm),
        ("gate_up", StackLinear),
        ("down", StackLinear),
        ("mlp_post_norm", RowNorm),
        ("mlp_sum_norm", RowNorm),
        *pointers("moe"),
        *integers("rope_table"),
        *pointers("sinks", "latent"),
        *integers("attention_call"),
        *doubles("input_factor", "output_factor"),
    ]


class RouterStructure(ctypes.Structure):
    """TokendRouter of csrc/layers/moe.h."""

    _fields_ = [
        *integers("num_experts", "top_k", "scoring", "normalises", "num_groups", "top_groups"),
        *integers("best_of_group"),
        *doubles("scale"),
        *pointers("weight", "bias", "selection_bias"),
    ]


class ExpertStructure(ctypes.Structure):
    """TokendExpert of csrc/layers/moe.h."""

    _fields_ = [
        ("gate_up", StackLinear),
        ("down", StackLinear),
    ]


class MoeStructure(ctypes.Structure):
    """TokendMoe of csrc/layers/moe.h."""

    _fields_ = [
        *integers("hidden_size", "inner_size", "gate"),
        ("router", RouterStructure),
        *integers("first_expert", "end_expert"),
        *pointers("experts"),
        *integers("shared_size"),
        ("shared", ExpertStructure),
        *pointers("shared_gate"),
        *integers("num_thread_groups"),
        *pointers("thread_group_ends"),
    ]


class MoeRun(ctypes.Structure):
    """TokendMoeRun of csrc/layers/moe.h."""

    _fields_ = [
        *integers("dtype", "num_rows", "input_stride"),
        *pointers("input"),
        *integers("output_stride"),
        *pointers("output"),
        *integers("adds"),
        *pointers("scratch", "chosen", "adapters"),
    ]


class RopeTable(ctypes.Structure):
    """TokendRopeTable of csrc/layers/stack.h."""

    _fields_ = [
        *integers("num_positions"),
        *pointers("table", "query_scales"),
    ]


class Stack(ctypes.Structure):
    """TokendStack of csrc/layers/stack.h."""

    _fields_ = [
        *integers("num_layers", "hidden_size", "inner_size", "num_heads", "num_kv_heads"),
        *integers("head_dim", "gate", "is_gated"),
        *doubles("gate_factor", "output_factor"),
        *integers("gates_attention", "is_parallel", "norms_heads_jointly", "num_rope_tables"),
        *pointers("rope_tables", "layers"),
    ]


class AttentionCall(ctypes.Structure):
    """TokendAttentionCall of csrc/layers/stack.h."""

    _fields_ = [
        *pointers("run", "step", "plan", "layer"),
    ]


class StackAddition(ctypes.Structure):
    """TokendRowAddition of csrc/layers/stack.h."""

    _fields_ = [*integers("first", "num_rows", "num_layers"), *pointers("values")]


class StackRun(ctypes.Structure):
    """TokendStackRun of csrc/layers/stack.h."""

    _fields_ = [
        *integers("dtype", "num_rows"),
        *pointers("hidden", "positions", "attention_calls", "recurrence", "scratch"),
        *integers("is_timed", "product_ns", "attention_ns"),
        *pointers("chosen"),
        *integers("chosen_stride", "num_recorded"),
        *pointers("recorded", "residuals"),
        *integers("residual_stride"),
        *pointers("progress", "adapters", "adapter_scratch"),
        *pointers("rotations"),
        *integers("num_additions"),
        *pointers("additions"),
    ]


class DeltaRuleStructure(ctypes.Structure):
    """TokendDeltaRule of csrc/layers/delta_rule.h."""

    _fields_ = [
        *integers("num_key_heads", "num_value_heads", "key_size", "value_size", "is_tiled"),
        *integers("num_taps"),
        *pointers("taps", "decay", "time_bias", "norm"),
        *doubles("norm_eps"),
    ]


class Mamba2Structure(ctypes.Structure):
    """TokendMamba2 of csrc/layers/mamba2.h."""

    _fields_ = [
        *integers("num_heads", "head_size", "num_groups", "state_size", "num_taps", "gate_norm"),
        *integers("has_wide_output"),
        *pointers("taps", "conv_bias", "decay", "time_bias", "skip", "norm"),
        *doubles("norm_eps", "gate_factor", "time_factor"),
    ]


class ShortConvStructure(ctypes.Structure):
    """TokendShortConv of csrc/layers/short_conv.h."""

    _fields_ = [
        *integers("channels", "num_taps"),
        *pointers("taps", "bias"),
    ]


class RecurrenceRun(ctypes.Structure):
    """TokendRecurrenceRun of csrc/layers/recurrence.h."""

    _fields_ = [
        *integers("dtype", "num_seqs", "num_tokens", "row_stride", "gate_stride"),
        *pointers("rows", "gates", "query_start", "token_start", "sources", "write_start"),
        *pointers("write_bases", "write_ends", "write_slots", "states"),
        *integers("slot_stride", "max_logged"),
        *pointers("scratch", "out"),
    ]
