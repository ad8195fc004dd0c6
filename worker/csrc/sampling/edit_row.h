// The edits of one row of logits, in their order.
#pragma once

#include <limits>

#include "common/simd.h"
#include "sampling/sampling.h"

namespace tokend {

// a * b rounded to float32: prevents the compiler from fusing it into a sum.
inline float rounded_product(float a, float b) {
    volatile float product = a * b;
    return product;
}

inline float penalised(float score, float count, const TokendEdits& edits) {
    const float repeated = score > 0.0f ? score / edits.repetition : score * edits.repetition;
    return repeated - rounded_product(edits.frequency, count) - (count > 0.0f ? edits.presence : 0.0f);
}

// scores: of all tokens, or at least of those that the edits name.
inline void change_scores(float* scores, const TokendEdits& edits) {
    for (int64_t i = 0; i < edits.num_forbidden; i++)
        scores[edits.forbidden[i]] = -std::numeric_limits<float>::infinity();
    for (int64_t i = 0; i < edits.num_biases; i++) scores[edits.bias_ids[i]] += edits.bias_values[i];
    for (int64_t i = 0; i < edits.num_counts; i++) {
        float& score = scores[edits.count_ids[i]];
        score = penalised(score, edits.counts[i], edits);
    }
}

}  // namespace tokend
