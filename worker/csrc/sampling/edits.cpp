// Edits of logits, row by row and in place.
#include "sampling/edit_row.h"
#include "sampling/sampling.h"

#include <algorithm>
#include <vector>


namespace tokend {
namespace {

void keep_only(float* scores, int64_t vocab_size, int64_t num_allowed, const int64_t* allowed) {
    static thread_local std::vector<float> kept;
    kept.resize(num_allowed);
    for (int64_t i = 0; i < num_allowed; i++) kept[i] = scores[allowed[i]];
    std::fill_n(scores, vocab_size, -std::numeric_limits<float>::infinity());
    for (int64_t i = 0; i < num_allowed; i++) scores[allowed[i]] = kept[i];
}

}  // namespace
}  // namespace tokend

extern "C" void tokend_edit(float* logits, int64_t row_stride, int64_t vocab_size, int64_t num_rows,
                            const int64_t* rows, const TokendEdits* const* edits) {
    for (int64_t i = 0; i < num_rows; i++) {
        float* scores = logits + rows[i] * row_stride;
        if (edits[i]->num_allowed >= 0)
            tokend::keep_only(scores, vocab_size, edits[i]->num_allowed, edits[i]->allowed);
        tokend::change_scores(scores, *edits[i]);
    }
}
