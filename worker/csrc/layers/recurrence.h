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

// A slot has the state after some token, its base, and a log of up to max_logged tokens that follow: what the
// recurrence reads of them. Tokens of a draft are logged, since those that are rejected do not count. A step that
// begins after a logged token computes the tokens up to it again. With a log of 4, base b and a draft d:
//
//   verified in this step   | x d d d |      state after x, log d d d
//   the next one            | d d | y |      two were accepted: computed again, without outputs, before y
//
// The inputs of a convolution, and of the gates, in the state of a kind that has them:
//
//   inputs   [num_taps - 1 + max_logged, channels]    those before the base, oldest first, then those in the log
//   gates    [max_logged, gates of a token]           of the log
//
// One step of one layer. Sequence s has the tokens query_start[s] … query_start[s + 1] - 1; it begins
// with the state in slot sources[s], with zeros if that is negative, and with tokens of its log, which token_start
// counts. It writes its state to slot write_slots[w], for w in write_start[s] … write_start[s + 1] - 1, in order: that
// after token write_bases[w] - 1, and a log of the tokens before write_ends[w]. Bases do not descend, and the last end is
// that of the sequence. A slot that is written may be the one that is read, but not one that another sequence of the
// step reads or writes.
struct TokendRecurrenceRun {
    int64_t dtype;  // of rows, gates and out
    int64_t num_seqs;
    int64_t num_tokens;
    int64_t row_stride;  // elements from one token of rows to the next
    int64_t gate_stride;
    const void* rows;   // the first projection of the input, as the kind has it
    const void* gates;  // the second one, of a kind that has two
    const int32_t* query_start;
    const int32_t* token_start;  // [num_seqs + 1], as query_start, with the tokens that are computed again
    const int32_t* sources;
    const int32_t* write_start;
    const int32_t* write_bases;
    const int32_t* write_ends;
    const int32_t* write_slots;
    float* states;        // of this layer in slot 0
    int64_t slot_stride;  // floats
    int64_t max_logged;
    void* scratch;        // as many bytes as the kind says, aligned to 64
    void* out;
};

// The two functions of a kind. layer: the structure of the kind, such as TokendMamba2 of mamba2.h. The bytes are
// those of scratch memory for a step; its tokens include those that are computed again. A run may be called by one thread, or by every thread of a team (common/team.h).
typedef int64_t TokendRecurrenceBytes(const void* layer, int64_t num_tokens);
typedef void TokendRecurrenceKernel(const void* layer, const TokendRecurrenceRun* run);
}
