// The C interface of adapters (LoRA): what they add to the outputs of a product, row by row.
//
//   reduced[rank]  = scale of the row * sum over inputs of down[rank, input] * x[input]
//   y[output]     += sum over ranks of up[rank, output] * reduced[rank]  + scale * shift[output]
//   y[output]     += scale * gain[output] * y[output], as it was before, where there is a gain
//
// Each sum is one chain in float32 in the order of inputs, or ranks, independent of other rows
// and however many threads: a row has the same bits in every batch.
//
// Both matrices are packed so that a vector holds neighbouring ranks, or outputs: tiles of
// TOKEND_LORA_LANES of them, in which the numbers of bfloat16 stand in pairs of two inputs, or ranks:
//
//   float32, float16   | input 0: lane 0 1 … 15 | input 1: lane 0 1 … 15 | …
//   bfloat16           | inputs 0 1: lane 0, 0, 1, 1 … 15, 15 | inputs 2 3: … | …
//
// Missing lanes and the missing half of a last pair are zeros.
#pragma once

#include <cstdint>

#include "common/dtype.h"

#define TOKEND_LORA_LANES 16

extern "C" {

// The B of some outputs of a product.
struct TokendLowRankPart {
    int64_t first_output;
    int64_t num_outputs;
    int64_t first_rank;
    int64_t num_ranks;
    const void* up;  // packed: tiles of outputs, num_ranks long
};

// What an adapter adds to one product.
struct TokendLowRank {
    int64_t dtype;  // of down and up, a TokendDType
    int64_t in_features;
    int64_t rank;      // of all parts together
    const void* down;  // packed: tiles of ranks, in_features long
    int64_t num_parts;
    const TokendLowRankPart* parts;
    int64_t out_features;
    const float* gain;   // [out_features], or null
    const float* shift;  // [out_features], or null
};

// The rows of a step that have one adapter.
struct TokendAdapterRows {
    const TokendLowRank* const* products;  // by the number of a product; null where nothing changes
    int64_t num_rows;
    const int64_t* rows;   // ascending
    const float* scales;   // [num_rows]
};

// The adapters of a step.
struct TokendStepAdapters {
    int64_t num_groups;
    const TokendAdapterRows* groups;
    int64_t max_rank;       // of all products, rounded up to lanes
    const int64_t* places;  // of each row of the step: group * 2^32 + place in its rows; -1 for none
};

struct TokendAdaptersRun {
    const TokendStepAdapters* adapters;
    int64_t product;
    int64_t dtype;     // of x and y
    int64_t x_stride;  // elements
    const void* x;
    int64_t y_stride;
    void* y;
    void* scratch;  // tokend_adapters_bytes, aligned to 64
};

// Returns the bytes of scratch memory for any product of a step.
__attribute__((visibility("default"))) int64_t tokend_adapters_bytes(const TokendStepAdapters* adapters);

// Adds all adapters of a step to the output y of a product of x.
__attribute__((visibility("default"))) void tokend_adapters_add(const TokendAdaptersRun* run);
}

namespace tokend {

// Rows of dtype, `stride` elements apart.
struct AdapterInput {
    int64_t dtype, stride;
    const void* memory;
};
struct AdapterOutput {
    int64_t dtype, stride;
    void* memory;
};

// Whether an adapter of a step changes a product.
inline bool changes(const TokendStepAdapters* adapters, int64_t product) {
    if (!adapters || product < 0) return false;
    for (int64_t group = 0; group < adapters->num_groups; group++)
        if (adapters->groups[group].products[product]) return true;
    return false;
}

// Computes `reduced` of all rows into scratch; the threads of a team share the work. The caller
// lets them wait for one another before and after.
void reduce_rows(const TokendStepAdapters& adapters, int64_t product, const AdapterInput& x, void* scratch);

// Adds what follows from `reduced` to y; the same of waiting.
void expand_rows(const TokendStepAdapters& adapters, int64_t product, const void* scratch, const AdapterOutput& y);

// Both for one row of the step, by the calling thread alone. x and y: of this row; scratch: max_rank
// floats. Does nothing for a row whose adapter does not change the product.
void add_row(const TokendStepAdapters& adapters, int64_t product, int64_t row, int64_t x_dtype, const void* x,
             int64_t y_dtype, void* y, float* scratch);

}  // namespace tokend
