// Where the attention of a row is cut, the same in every kernel.
//
// The KV tokens of a sequence are cut at fixed positions, whatever part of them is computed
// together, so that a row adds up the same numbers in the same order alone, in a batch and in
// any chunk of its prompt:
//
//   token     0        64       128      192      256                          1024
//   chunk     |--------|--------|--------|--------|-- …     one softmax, then its values
//   piece     |-----------------------------------|-- …     chunks one after the other
//   span      |------------------------------------------ … ------------------|-- …
//
// Pieces are folded into their span from left to right, and spans into the row.
#pragma once

#include <cstdint>

namespace tokend {

constexpr int64_t CHUNK = 64;
// Short enough that threads share one sequence evenly.
constexpr int64_t PIECE = 256;
constexpr int64_t SPAN = 1024;

// Up to this many rows a task is bound by reading KV, and is a piece; else it is a span.
constexpr int64_t PIECE_ROWS = 16;

}  // namespace tokend
