// The best of a row whose scores are changed in a few places: without reading it again.
//
//   scores   . . . b . . . e . . e . . . .     b: the best as they are, e: changed
//
// While b keeps its score or gains, the best of all is b or the best e: no other token is above
// what b was, and none that is equal to it comes before it. Where b falls, the blocks of the row
// are looked at from that with the largest element downwards, without what is changed, until
// none can have a better one. The row itself stays as it is.
#pragma once

#include <vector>

#include "best_block.h"
#include "edit_row.h"

namespace tokend {

struct Candidate {
    float score = NEVER;
    int64_t place = std::numeric_limits<int64_t>::max();

    bool beats(float other, int64_t other_place) const {
        return score > other || (score == other && place <= other_place);
    }

    void meet(float other, int64_t other_place) {
        if (!beats(other, other_place)) *this = {other, other_place};
    }
};

// Meets what is not changed in the block that begins at `from`.
template <class T>
TOKEND_FLATTEN void meet_block(const T* x, int64_t size, int64_t from, const TokendEdits& edits, Candidate& found) {
    float block[BLOCK];
    const int64_t count = std::min(BLOCK, size - from);
    for (int64_t i = 0; i < count; i++) block[i] = load<1>(x + from + i)[0];
    each_changed(edits, [&](int64_t place) {
        if (place >= from && place < from + count) block[place - from] = NEVER;
    });
    float sum = 0.0f;
    const float largest = best_of_block(block, count, &sum);
    found.meet(largest, from + place_in_block(block, count, largest));
}

// The place of the largest element of a row of `size` numbers x once changes are made.
//   best: the place of the largest as they are
//   maxima: the largest of each block, spent
template <class T>
int64_t best_place_of_edited(const T* x, int64_t size, int64_t best, std::vector<float>& maxima,
                             const TokendEdits& edits) {
    // A place holds something only once it was written for this row.
    static thread_local std::vector<float> scratch;
    if (int64_t(scratch.size()) < size) scratch.resize(size);
    float* changed = scratch.data();
    const auto take = [&](int64_t place) { changed[place] = load<1>(x + place)[0]; };
    for (int64_t i = 0; i < edits.num_allowed; i++) take(edits.allowed[i]);
    take(best);
    each_changed(edits, take);
    change_scores(changed, edits);

    Candidate found;
    if (edits.num_allowed >= 0) {
        for (int64_t i = 0; i < edits.num_allowed; i++) found.meet(changed[edits.allowed[i]], edits.allowed[i]);
        return found.place;
    }
    found.meet(changed[best], best);
    each_changed(edits, [&](int64_t place) { found.meet(changed[place], place); });
    if (changed[best] >= load<1>(x + best)[0]) return found.place;
    for (size_t tried = 0; tried < maxima.size(); tried++) {
        const int64_t block = std::max_element(maxima.begin(), maxima.end()) - maxima.begin();
        if (found.beats(maxima[block], block * BLOCK)) break;
        meet_block(x, size, block * BLOCK, edits, found);
        maxima[block] = NEVER;
    }
    return found.place;
}

}  // namespace tokend
