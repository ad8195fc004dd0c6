// The changes of one row of scores, in their order, on whatever places they name.
#pragma once

#include <limits>

#include "edits.h"
#include "simd.h"

namespace tokend {

// a * b as a float32 of its own: a compiler may not take it into a sum unrounded.
inline float rounded_product(float a, float b) {
    volatile float product = a * b;
    return product;
}

// Calls body with each token id that is changed by more than being left out.
template <class Body>
inline void each_changed(const TokendEdits& edits, Body body) {
    for (int64_t i = 0; i < edits.num_forbidden; i++) body(edits.forbidden[i]);
    for (int64_t i = 0; i < edits.num_biases; i++) body(edits.bias_ids[i]);
    for (int64_t i = 0; i < edits.num_counts; i++) body(edits.count_ids[i]);
}

// scores: of the tokens that `each_changed` names, at their places.
inline void change_scores(float* scores, const TokendEdits& edits) {
    for (int64_t i = 0; i < edits.num_forbidden; i++)
        scores[edits.forbidden[i]] = -std::numeric_limits<float>::infinity();
    for (int64_t i = 0; i < edits.num_biases; i++) scores[edits.bias_ids[i]] += edits.bias_values[i];
    for (int64_t i = 0; i < edits.num_counts; i++) {
        float& score = scores[edits.count_ids[i]];
        const float repeated = score > 0.0f ? score / edits.repetition : score * edits.repetition;
        score = repeated - rounded_product(edits.frequency, edits.counts[i]) -
                (edits.counts[i] > 0.0f ? edits.presence : 0.0f);
    }
}

}  // namespace tokend
