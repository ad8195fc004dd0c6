"""The C structures that the kernels' functions read, field by field as in the headers."""

import ctypes
from ctypes import c_double, c_int64, c_void_p


class AttentionStep(ctypes.Structure):
    """TokendAttentionStep of csrc/attention/attention.h."""

    _fields_ = [
        ("num_seqs", c_int64),
        ("num_tokens", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("block_size", c_int64),
        ("max_blocks", c_int64),
        ("window", c_int64),
        ("most_partial_rows", c_int64),
        ("latent_dim", c_int64),
        ("ahead", c_int64),
        ("query_start", c_void_p),
        ("seq_lens", c_void_p),
        ("block_table", c_void_p),
        ("slot_mapping", c_void_p),
        ("attend_end", c_void_p),
        ("scale", c_double),
        ("soft_cap", c_double),
    ]


class AttentionSchedule(ctypes.Structure):
    """TokendAttentionSchedule of csrc/attention/attention.h."""

    _fields_ = [
        ("num_tiles", c_int64),
        ("num_tasks", c_int64),
        ("num_rounds", c_int64),
        ("num_partial_rows", c_int64),
        ("num_elements", c_int64),
        ("tiles", c_void_p),
        ("tasks", c_void_p),
        ("rounds", c_void_p),
        ("partials", c_void_p),
    ]


class AttentionLayer(ctypes.Structure):
    """TokendAttentionLayer of csrc/attention/attention.h."""

    _fields_ = [
        ("dtype", c_int64),
        ("cache_dtype", c_int64),
        ("query", c_void_p),
        ("key", c_void_p),
        ("value", c_void_p),
        ("query_stride", c_int64),
        ("key_stride", c_int64),
        ("value_stride", c_int64),
        ("rotation", c_void_p),
        ("key_pages", c_void_p),
        ("value_pages", c_void_p),
        ("block_stride", c_int64),
        ("head_stride", c_int64),
        ("sinks", c_void_p),
        ("output", c_void_p),
    ]


class RowNorm(ctypes.Structure):
    """TokendRowNorm of csrc/layers/rows.h."""

    _fields_ = [
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("eps", c_double),
        ("is_layer_norm", c_int64),
    ]


class NormCall(ctypes.Structure):
    """TokendNormCall of csrc/layers/rows.h."""

    _fields_ = [
        ("size", c_int64),
        ("norm", RowNorm),
        ("dtype", c_int64),
        ("num_groups", c_int64),
        ("group_size", c_int64),
        ("group_stride", c_int64),
        ("x", c_void_p),
        ("out", c_void_p),
    ]


class GateCall(ctypes.Structure):
    """TokendGateCall of csrc/layers/rows.h."""

    _fields_ = [
        ("kind", c_int64),
        ("is_gated", c_int64),
        ("dtype", c_int64),
        ("num_rows", c_int64),
        ("size", c_int64),
        ("x", c_void_p),
        ("out", c_void_p),
    ]


class PackedShape(ctypes.Structure):
    """TokendPackedShape of csrc/products/packed/packed.h."""

    _fields_ = [
        ("type", c_int64),
        ("out_features", c_int64),
        ("in_features", c_int64),
        ("packed", c_void_p),
    ]


class RotatedShape(ctypes.Structure):
    """TokendRotatedShape of csrc/products/rotated/rotated.h."""

    _fields_ = [
        ("out_features", c_int64),
        ("in_features", c_int64),
        ("packed", c_void_p),
    ]


class Bf16Shape(ctypes.Structure):
    """TokendBf16Shape of csrc/products/bf16/bf16.h."""

    _fields_ = [
        ("out_features", c_int64),
        ("in_features", c_int64),
        ("packed", c_void_p),
    ]


class Fp8Shape(ctypes.Structure):
    """TokendFp8Shape of csrc/products/fp8/fp8.h."""

    _fields_ = [
        ("out_features", c_int64),
        ("in_features", c_int64),
        ("scale_inputs", c_int64),
        ("scale_outputs", c_int64),
        ("packed", c_void_p),
    ]


class Product(ctypes.Structure):
    """TokendProduct of csrc/products/packed/packed.h."""

    _fields_ = [
        ("num_rows", c_int64),
        ("input_dtype", c_int64),
        ("input_stride", c_int64),
        ("input", c_void_p),
        ("bias_dtype", c_int64),
        ("bias", c_void_p),
        ("output_dtype", c_int64),
        ("output_stride", c_int64),
        ("output", c_void_p),
        ("adds", c_int64),
    ]


class LinearPart(ctypes.Structure):
    """TokendLinearPart of csrc/layers/stack.h."""

    _fields_ = [
        ("format", c_int64),
        ("weight", c_void_p),
        ("kernels", c_void_p),
        ("out_features", c_int64),
        ("bias_dtype", c_int64),
        ("bias", c_void_p),
    ]


class StackLinear(ctypes.Structure):
    """TokendStackLinear of csrc/layers/stack.h."""

    _fields_ = [
        ("in_features", c_int64),
        ("out_features", c_int64),
        ("num_parts", c_int64),
        ("parts", c_void_p),
        ("product", c_int64),
    ]


class LowRankPartStructure(ctypes.Structure):
    """TokendLowRankPart of csrc/layers/adapters.h."""

    _fields_ = [
        ("first_output", c_int64),
        ("num_outputs", c_int64),
        ("first_rank", c_int64),
        ("num_ranks", c_int64),
        ("up", c_void_p),
    ]


class LowRankStructure(ctypes.Structure):
    """TokendLowRank of csrc/layers/adapters.h."""

    _fields_ = [
        ("dtype", c_int64),
        ("in_features", c_int64),
        ("rank", c_int64),
        ("down", c_void_p),
        ("num_parts", c_int64),
        ("parts", c_void_p),
        ("out_features", c_int64),
        ("gain", c_void_p),
        ("shift", c_void_p),
    ]


class AdapterRowsStructure(ctypes.Structure):
    """TokendAdapterRows of csrc/layers/adapters.h."""

    _fields_ = [
        ("products", c_void_p),
        ("num_rows", c_int64),
        ("rows", c_void_p),
        ("scales", c_void_p),
    ]


class StepAdaptersStructure(ctypes.Structure):
    """TokendStepAdapters of csrc/layers/adapters.h."""

    _fields_ = [
        ("num_groups", c_int64),
        ("groups", c_void_p),
        ("max_rank", c_int64),
        ("places", c_void_p),
    ]


class AdaptersRun(ctypes.Structure):
    """TokendAdaptersRun of csrc/layers/adapters.h."""

    _fields_ = [
        ("adapters", c_void_p),
        ("product", c_int64),
        ("dtype", c_int64),
        ("x_stride", c_int64),
        ("x", c_void_p),
        ("y_stride", c_int64),
        ("y", c_void_p),
        ("scratch", c_void_p),
    ]


class LatentStructure(ctypes.Structure):
    """TokendLatentAttention of csrc/layers/stack.h."""

    _fields_ = [
        ("query_rank", c_int64),
        ("plain_size", c_int64),
        ("rotated_size", c_int64),
        ("rank", c_int64),
        ("value_size", c_int64),
        ("query", StackLinear),
        ("keys", c_void_p),
        ("values", c_void_p),
    ]


class StackRecurrence(ctypes.Structure):
    """TokendStackRecurrence of csrc/layers/stack.h."""

    _fields_ = [
        ("rows", StackLinear),
        ("gates", StackLinear),
        ("output", StackLinear),
        ("input_factor", c_double),
        ("output_factor", c_double),
        ("state_offset", c_int64),
        ("log_offset", c_int64),
        ("layer", c_void_p),
        ("bytes", c_void_p),
        ("run", c_void_p),
    ]


class StackLayer(ctypes.Structure):
    """TokendStackLayer of csrc/layers/stack.h."""

    _fields_ = [
        ("recurrence", c_void_p),
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
        ("moe", c_void_p),
        ("rope_table", c_int64),
        ("sinks", c_void_p),
        ("latent", c_void_p),
        ("attention_call", c_int64),
        ("input_factor", c_double),
        ("output_factor", c_double),
    ]


class RouterStructure(ctypes.Structure):
    """TokendRouter of csrc/layers/moe.h."""

    _fields_ = [
        ("num_experts", c_int64),
        ("top_k", c_int64),
        ("scoring", c_int64),
        ("normalises", c_int64),
        ("num_groups", c_int64),
        ("top_groups", c_int64),
        ("best_of_group", c_int64),
        ("scale", c_double),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("selection_bias", c_void_p),
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
        ("hidden_size", c_int64),
        ("inner_size", c_int64),
        ("gate", c_int64),
        ("router", RouterStructure),
        ("first_expert", c_int64),
        ("end_expert", c_int64),
        ("experts", c_void_p),
        ("shared_size", c_int64),
        ("shared", ExpertStructure),
        ("shared_gate", c_void_p),
        ("num_thread_groups", c_int64),
        ("thread_group_ends", c_void_p),
    ]


class MoeRun(ctypes.Structure):
    """TokendMoeRun of csrc/layers/moe.h."""

    _fields_ = [
        ("dtype", c_int64),
        ("num_rows", c_int64),
        ("input_stride", c_int64),
        ("input", c_void_p),
        ("output_stride", c_int64),
        ("output", c_void_p),
        ("adds", c_int64),
        ("scratch", c_void_p),
        ("chosen", c_void_p),
        ("adapters", c_void_p),
    ]


class RopeTable(ctypes.Structure):
    """TokendRopeTable of csrc/layers/stack.h."""

    _fields_ = [
        ("num_positions", c_int64),
        ("table", c_void_p),
    ]


class Stack(ctypes.Structure):
    """TokendStack of csrc/layers/stack.h."""

    _fields_ = [
        ("num_layers", c_int64),
        ("hidden_size", c_int64),
        ("inner_size", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("gate", c_int64),
        ("is_gated", c_int64),
        ("gate_factor", c_double),
        ("output_factor", c_double),
        ("gates_attention", c_int64),
        ("is_parallel", c_int64),
        ("norms_heads_jointly", c_int64),
        ("num_rope_tables", c_int64),
        ("rope_tables", c_void_p),
        ("layers", c_void_p),
    ]


class AttentionCall(ctypes.Structure):
    """TokendAttentionCall of csrc/layers/stack.h."""

    _fields_ = [
        ("run", c_void_p),
        ("step", c_void_p),
        ("plan", c_void_p),
        ("layer", c_void_p),
    ]


class StackAddition(ctypes.Structure):
    """TokendRowAddition of csrc/layers/stack.h."""

    _fields_ = [
        ("first", c_int64),
        ("num_rows", c_int64),
        ("num_layers", c_int64),
        ("values", c_void_p),
    ]


class StackRun(ctypes.Structure):
    """TokendStackRun of csrc/layers/stack.h."""

    _fields_ = [
        ("dtype", c_int64),
        ("num_rows", c_int64),
        ("hidden", c_void_p),
        ("positions", c_void_p),
        ("attention_calls", c_void_p),
        ("recurrence", c_void_p),
        ("scratch", c_void_p),
        ("is_timed", c_int64),
        ("product_ns", c_int64),
        ("attention_ns", c_int64),
        ("chosen", c_void_p),
        ("chosen_stride", c_int64),
        ("num_recorded", c_int64),
        ("recorded", c_void_p),
        ("residuals", c_void_p),
        ("residual_stride", c_int64),
        ("progress", c_void_p),
        ("adapters", c_void_p),
        ("adapter_scratch", c_void_p),
        ("rotations", c_void_p),
        ("num_additions", c_int64),
        ("additions", c_void_p),
    ]


class DeltaRuleStructure(ctypes.Structure):
    """TokendDeltaRule of csrc/layers/delta_rule.h."""

    _fields_ = [
        ("num_key_heads", c_int64),
        ("num_value_heads", c_int64),
        ("key_size", c_int64),
        ("value_size", c_int64),
        ("is_tiled", c_int64),
        ("num_taps", c_int64),
        ("taps", c_void_p),
        ("decay", c_void_p),
        ("time_bias", c_void_p),
        ("norm", c_void_p),
        ("norm_eps", c_double),
    ]


class Mamba2Structure(ctypes.Structure):
    """TokendMamba2 of csrc/layers/mamba2.h."""

    _fields_ = [
        ("num_heads", c_int64),
        ("head_size", c_int64),
        ("num_groups", c_int64),
        ("state_size", c_int64),
        ("num_taps", c_int64),
        ("gate_norm", c_int64),
        ("has_wide_output", c_int64),
        ("taps", c_void_p),
        ("conv_bias", c_void_p),
        ("decay", c_void_p),
        ("time_bias", c_void_p),
        ("skip", c_void_p),
        ("norm", c_void_p),
        ("norm_eps", c_double),
        ("gate_factor", c_double),
        ("time_factor", c_double),
    ]


class ShortConvStructure(ctypes.Structure):
    """TokendShortConv of csrc/layers/short_conv.h."""

    _fields_ = [
        ("channels", c_int64),
        ("num_taps", c_int64),
        ("taps", c_void_p),
        ("bias", c_void_p),
    ]


class RecurrenceRun(ctypes.Structure):
    """TokendRecurrenceRun of csrc/layers/recurrence.h."""

    _fields_ = [
        ("dtype", c_int64),
        ("num_seqs", c_int64),
        ("num_tokens", c_int64),
        ("row_stride", c_int64),
        ("gate_stride", c_int64),
        ("rows", c_void_p),
        ("gates", c_void_p),
        ("query_start", c_void_p),
        ("token_start", c_void_p),
        ("sources", c_void_p),
        ("write_start", c_void_p),
        ("write_bases", c_void_p),
        ("write_ends", c_void_p),
        ("write_slots", c_void_p),
        ("states", c_void_p),
        ("slot_stride", c_int64),
        ("max_logged", c_int64),
        ("scratch", c_void_p),
        ("out", c_void_p),
    ]
