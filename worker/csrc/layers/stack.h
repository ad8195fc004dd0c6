// The C interface of a decoder's layers: all of them in one call, one team of threads.
//
//   x                                                       the residual, [num_rows, hidden_size]
//   heads = qkv(norm(x))           query ‖ key ‖ value of each row; normed per head where a model does,
//                                  queries times a factor of their position where one does
//   x    += output(attention(heads))                        or its norm (attention_post_norm);
//           after it or instead of it a recurrent mixer
//   x     = attention_sum_norm(x)                           where a model does
//   x    += down(gate(gate_up(norm(x))))                    or its norm (mlp_post_norm);
//           or a mixture of experts (moe.h) of norm(x)
//   x     = mlp_sum_norm(x)                                 where a model does
//
// A part without a norm before it reads x itself, or in a parallel block what the attention reads. A layer may lack
// the attention or the MLP: products that it does not have are without parts.
//
// Results between two products are rounded to the dtype, as they are when each part is a call of
// its own (worker/models/layer_stack.py), so the bits are the same.
#pragma once

#include <cstdint>

#include "attention/attention.h"
#include "layers/adapters.h"
#include "layers/recurrence.h"
#include "layers/rows.h"

extern "C" {

// How a weight lies in memory and is multiplied.
enum TokendWeightFormat : int64_t {
    TOKEND_PACKED = 0,   // TokendPackedShape of packed.h
    TOKEND_ROTATED = 1,  // TokendRotatedShape of rotated.h
    TOKEND_BF16 = 2,     // TokendBf16Shape of bf16.h
    TOKEND_FP8 = 3,      // TokendFp8Shape of fp8.h
};

struct TokendProductKernels;  // of weight_formats.h
struct TokendMoe;             // of moe.h

// One weight of a product, which computes a range of its outputs.
struct TokendLinearPart {
    int64_t format;
    const void* weight;
    const TokendProductKernels* kernels;  // those that multiply, of this library or of another one
    int64_t out_features;
    int64_t bias_dtype;  // 0 float32, 1 bfloat16
    const void* bias;    // [out_features], or null
};

// A linear layer: weights stacked along the outputs, all of one format. The kernels of the first
// prepare the input rows for all (products/weight_formats.h).
struct TokendStackLinear {
    int64_t in_features;
    int64_t out_features;
    int64_t num_parts;
    const TokendLinearPart* parts;
    int64_t product;  // its number among those that adapters change (adapters.h); -1 if none does
};

// Multi-head latent attention (DeepSeek-V2, section 2.1; worker/models/latent_attention.py). qkv, query_norm
// and key_norm of the layer are its products and norms of the input:
//
//   inputs  = qkv(norm(x))                    query, or a latent of queries ‖ latent ‖ rotated part
//   query   = query(query_norm(its latent))   where queries have one
//   key     = key_norm(latent) ‖ rotated part
//   heads   = keys(plain part of a head) ‖ rotated part of the head, for each head
//   x      += output(values(attention(heads, key)))
struct TokendLatentAttention {
    int64_t query_rank;    // numbers of a latent of queries; 0 without one
    int64_t plain_size;    // numbers of a query head that do not rotate
    int64_t rotated_size;  // and those that do
    int64_t rank;          // numbers of a latent
    int64_t value_size;    // numbers of a head of values
    TokendStackLinear query;
    const TokendStackLinear* keys;    // of each head, one part each: plain_size to rank
    const TokendStackLinear* values;  // of each head, one part each: rank to value_size
};

// A recurrent mixer (recurrence.h):
//
//   x += output_factor * output(recurrence(inputs(input_factor * norm(x))))
struct TokendStackRecurrence {
    TokendStackLinear inputs[2];  // the rows and the gates that the kind reads; without parts: it has no gates
    TokendStackLinear output;
    double input_factor;
    double output_factor;
    int64_t state_offset;  // floats before its state in a slot, without logs
    int64_t log_offset;    // floats of the logs of a token before its state
    const void* layer;     // the structure of its kind
    TokendRecurrenceBytes* bytes;
    TokendRecurrenceKernel* run;
};

struct TokendStackLayer {
    const TokendStackRecurrence* recurrence;  // added before the attention; or null
    TokendRowNorm attention_norm;
    TokendStackLinear qkv;
    TokendRowNorm query_norm;
    TokendRowNorm key_norm;
    TokendStackLinear output;
    TokendRowNorm attention_post_norm;
    TokendRowNorm attention_sum_norm;
    TokendRowNorm mlp_norm;
    TokendStackLinear gate_up;
    TokendStackLinear down;
    TokendRowNorm mlp_post_norm;
    TokendRowNorm mlp_sum_norm;
    const TokendMoe* moe;  // in place of gate_up and down; or null
    int64_t rope_table;  // index into the tables of the stack
    const float* sinks;  // of the attention, [num_heads]; or null
    const TokendLatentAttention* latent;  // of all attention with equal sizes; or null
    int64_t attention_call;  // index into those of a run
    double input_factor;     // of what the attention reads
    double output_factor;    // and of what it adds
};

// Cosines and sines of every position of the model.
struct TokendRopeTable {
    int64_t num_positions;
    const float* table;  // [num_positions, 2, n / 2] for the n numbers of a head that rotate
    const float* query_scales;  // [num_positions], factors of the queries before they rotate; null: all are 1
};

struct TokendStack {
    int64_t num_layers;
    int64_t hidden_size;
    int64_t inner_size;  // of the MLP
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;
    int64_t gate;  // a TokendGateKind of rows.h
    int64_t is_gated;  // 0: gate_up has no gate and inner_size outputs
    double gate_factor;    // of the MLP's gate before the activation
    double output_factor;  // of the MLP's inner columns
    int64_t gates_attention;  // 1: qkv has a gate after each query head, whose sigmoid multiplies the head's output
    int64_t is_parallel;  // 1: the MLP reads what the attention reads
    int64_t norms_heads_jointly;  // 1: query_norm is one norm of all query heads, key_norm of all key heads
    int64_t num_rope_tables;
    const TokendRopeTable* rope_tables;
    const TokendStackLayer* layers;
};

// The arguments of one layer's attention; of TokendAttentionLayer only the pages are read.
struct TokendAttentionCall {
    decltype(&tokend_attention_run) run;  // of the library whose attention is used
    const TokendAttentionStep* step;
    const TokendAttentionSchedule* plan;
    const TokendAttentionLayer* layer;
};

// The layers of a run, for threads that load and save KV meanwhile (worker/layers/layer_progress.py).
struct TokendLayerProgress {
    uint32_t loaded;    // layers whose KV is there: a run waits before attention of the next one
    uint32_t computed;  // layers whose K and V are written, set by the run
};

// What the first layers add to the residual of neighbouring rows.
struct TokendRowAddition {
    int64_t first;
    int64_t num_rows;
    int64_t num_layers;  // layer i of these adds its part after itself
    const void* values;  // [num_rows, num_layers, hidden_size], of the residual's type
};

struct TokendStackRun {
    int64_t dtype;  // of hidden: 0 float32, 1 bfloat16
    int64_t num_rows;
    void* hidden;               // [num_rows, hidden_size]
    const int64_t* positions;   // [num_rows]
    const TokendAttentionCall* attention_calls;  // of each layer with attention
    const TokendRecurrenceRun* recurrence;  // the sequences of the step, and the states of slot 0; null without states
    void* scratch;              // tokend_stack_bytes, aligned to 64
    int64_t is_timed;           // 1: adds to the two fields below
    int64_t product_ns;         // of products and the rounding of their inputs
    int64_t attention_ns;       // of attention and of recurrences between their products
    int32_t* chosen;  // receives the experts of each row in each mixture, [num_rows, top_k]; or null
    int64_t chosen_stride;  // elements from one mixture to the next
    int64_t num_recorded;   // places where the residual is recorded
    const int64_t* recorded;  // of each the layer before which it is, num_layers for the last one's output
    void* residuals;          // receives the residual there, [num_recorded][num_rows, hidden_size]
    int64_t residual_stride;  // elements from one recorded residual to the next
    TokendLayerProgress* progress;  // of a step whose KV is loaded or saved layer by layer; or null
    const TokendStepAdapters* adapters;  // of the rows, without gains; or null
    void* adapter_scratch;               // tokend_adapters_bytes, aligned to 64
    const float* const* rotations;  // of each table those of the rows, [num_rows, 2, n / 2], in place of positions; or null
    int64_t num_additions;
    const TokendRowAddition* additions;
};

// Returns the bytes of scratch memory for a run of `num_rows` rows. num_tokens: the rows, and logged tokens that
// recurrences compute again.
__attribute__((visibility("default"))) int64_t tokend_stack_bytes(
    const TokendStack* stack, int64_t dtype, int64_t num_rows, int64_t num_tokens);

// Runs all layers. Returns num_rows, or the first row whose position is outside a table; then
// nothing was done.
__attribute__((visibility("default"))) int64_t tokend_stack_run(const TokendStack* stack, TokendStackRun* run);
}
