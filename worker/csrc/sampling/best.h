// The largest element of a row, block by block; its index is searched in its block only.
#pragma once

#include <limits>
#include <vector>

#include "common/row_vectors.h"
#include "sampling/edit_row.h"

namespace tokend {

constexpr int64_t BLOCK = 1024;
constexpr float NEVER = -std::numeric_limits<float>::infinity();

// Largest of up to BLOCK elements; *sum becomes NaN if one of them is NaN.
template <class T>
TOKEND_INLINE float best_of_block(const T* x, int64_t size, float* sum) {
    constexpr int N = ROW_LANES;
    F<N> best[4], nonfinite[4] = {};
    each<4>([&](auto j) { best[j] = splat<N>(NEVER); });
    const auto take = [&](int j, F<N> part) {
        best[j] = maximum<N>(part, best[j]);
        nonfinite[j] += part == part ? F<N>{} : part;
    };
    int64_t at = 0;
    for (; at + 4 * N <= size; at += 4 * N) each<4>([&](auto j) { take(j, load<N>(x + at + j * N)); });
    for (; at + N <= size; at += N) take(0, load<N>(x + at));
    if (at < size) take(1, load_some<N>(x + at, size - at, NEVER));
    *sum += sum_lanes<N>((nonfinite[0] + nonfinite[1]) + (nonfinite[2] + nonfinite[3]));
    return max_lanes<N>(maximum<N>(maximum<N>(best[0], best[1]), maximum<N>(best[2], best[3])));
}

// The first index of the largest of up to BLOCK elements; arbitrary if that is NaN.
template <class T>
TOKEND_INLINE int64_t place_in_block(const T* x, int64_t size, float largest) {
    int64_t at = 0;
    while (at < size - 1 && load<1>(x + at)[0] != largest) at++;
    return at;
}

// The largest logit of a row after edits in a few places, found without reading the row again.
//
//   scores   . . . b . . . e . . e . . . .     b: the best before edits, e: edited
//
// If b's score does not fall, the best token is b or the best e, because no other token was above
// b, or equal with a lower id. If b falls, blocks are searched in descending order of their largest
// element, without edited tokens, until no block can have a better one. The row itself is
// unchanged.

struct Candidate {
    float score = NEVER;
    int64_t place = std::numeric_limits<int64_t>::max();

    bool beats(float other, int64_t other_place) const {
        return score > other || (score == other && place <= other_place);
    }

    void consider(float other, int64_t other_place) {
        if (!beats(other, other_place)) *this = {other, other_place};
    }
};

// Calls body with every index that the edits name.
template <class Body>
inline void each_named(const TokendEdits& edits, Body body) {
    for (int64_t i = 0; i < edits.num_allowed; i++) body(edits.allowed[i]);
    for (int64_t i = 0; i < edits.num_forbidden; i++) body(edits.forbidden[i]);
    for (int64_t i = 0; i < edits.num_biases; i++) body(edits.bias_ids[i]);
    for (int64_t i = 0; i < edits.num_counts; i++) body(edits.count_ids[i]);
}

// Edited scores at the indices that the edits name; other entries are undefined.
template <class T>
inline const float* changed_scores(const T* x, int64_t size, const TokendEdits& edits) {
    static thread_local std::vector<float> scratch;
    if (int64_t(scratch.size()) < size) scratch.resize(size);
    each_named(edits, [&](int64_t place) { scratch[place] = load<1>(x + place)[0]; });
    change_scores(scratch.data(), edits);
    return scratch.data();
}

// Calls body(index, score) with every index that the edits name and its edited score.
template <class T, class Body>
inline void each_changed(const T* x, int64_t size, const TokendEdits& edits, Body body) {
    if ((edits.num_forbidden > 0) + (edits.num_biases > 0) + (edits.num_counts > 0) > 1) {
        const float* changed = changed_scores(x, size, edits);
        return each_named(edits, [&](int64_t place) { body(place, changed[place]); });
    }
    // No index is named by edits of two kinds, so no state per index is needed.
    for (int64_t i = 0; i < edits.num_forbidden; i++) body(edits.forbidden[i], NEVER);
    for (int64_t i = 0; i < edits.num_biases; i++)
        body(edits.bias_ids[i], load<1>(x + edits.bias_ids[i])[0] + edits.bias_values[i]);
    for (int64_t i = 0; i < edits.num_counts; i++)
        body(edits.count_ids[i], penalised(load<1>(x + edits.count_ids[i])[0], edits.counts[i], edits));
}

// Considers the unedited elements of the block that begins at `from`.
template <class T>
TOKEND_FLATTEN void meet_block(const T* x, int64_t size, int64_t from, const TokendEdits& edits, Candidate& found) {
    float block[BLOCK];
    const int64_t count = std::min(BLOCK, size - from);
    for (int64_t i = 0; i < count; i++) block[i] = load<1>(x + from + i)[0];
    each_named(edits, [&](int64_t place) {
        if (place >= from && place < from + count) block[place - from] = NEVER;
    });
    float sum = 0.0f;
    const float largest = best_of_block(block, count, &sum);
    found.consider(largest, from + place_in_block(block, count, largest));
}

// The index of the largest element of a row of `size` numbers x after edits.
//   best: the index of the largest before edits
//   maxima: the largest element of every block; overwritten
template <class T>
TOKEND_FLATTEN int64_t best_place_of_edited(const T* x, int64_t size, int64_t best, std::vector<float>& maxima,
                                            const TokendEdits& edits) {
    Candidate found;
    if (edits.num_allowed >= 0) {
        const float* changed = changed_scores(x, size, edits);
        for (int64_t i = 0; i < edits.num_allowed; i++) found.consider(changed[edits.allowed[i]], edits.allowed[i]);
        return found.place;
    }
    const float before = load<1>(x + best)[0];
    float after = before;
    each_changed(x, size, edits, [&](int64_t place, float score) {
        found.consider(score, place);
        if (place == best) after = score;
    });
    found.consider(after, best);
    if (after >= before) return found.place;
    for (size_t tried = 0; tried < maxima.size(); tried++) {
        const int64_t block = std::max_element(maxima.begin(), maxima.end()) - maxima.begin();
        if (found.beats(maxima[block], block * BLOCK)) break;
        meet_block(x, size, block * BLOCK, edits, found);
        maxima[block] = NEVER;
    }
    return found.place;
}

}  // namespace tokend
