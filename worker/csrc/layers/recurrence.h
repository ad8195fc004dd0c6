// A step of a recurrent layer of any kind: which tokens and states of sequences it computes.
//
// A sequence is computed in float32, token after token, and apart from the other sequences, so the results do
// not depend on how a sequence is cut into steps.
#pragma once

#include <cstdint>

#include "common/dtype.h"

extern "C" {

// Columns of a matrix of a state that lie together: a tile of 128 rows fits the first cache.
enum : int64_t { TOKEND_STATE_TILE = 32 };

// One step of one layer. Sequence s has the tokens query_start[s] … query_start[s + 1] - 1; it begins
// with the state in slot sources[s], with zeros if that is negative, and writes its state after
// token write_ends[w] - 1 to slot write_slots[w], for w in write_start[s] … write_start[s + 1] - 1, in
// order; the last of them after its last token. A slot that is written may be the one that is read,
// but not one that another sequence of the step reads or writes.
struct TokendRecurrenceRun {
    int64_t dtype;  // of rows, gates and out
    int64_t num_seqs;
    int64_t num_tokens;
    int64_t row_stride;  // elements from one token of rows to the next
    int64_t gate_stride;
    const void* rows;   // the first projection of the input, as the kind has it
    const void* gates;  // the second one, of a kind that has two
    const int32_t* query_start;
    const int32_t* sources;
    const int32_t* write_start;
    const int32_t* write_ends;
    const int32_t* write_slots;
    float* states;        // of this layer in slot 0
    int64_t slot_stride;  // floats
    void* scratch;        // as many bytes as the kind says, aligned to 64
    void* out;
};

// The two functions of a kind. layer: the structure of the kind, such as TokendMamba2 of mamba2.h. The bytes are
// those of scratch memory for a step. A run may be called by one thread, or by every thread of a team (common/team.h).
typedef int64_t TokendRecurrenceBytes(const void* layer, int64_t num_tokens);
typedef void TokendRecurrenceKernel(const void* layer, const TokendRecurrenceRun* run);
}
