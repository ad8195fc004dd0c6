// Where the result of a row goes: to the output, or to those of other pieces of its tile.
#pragma once

#include "attention_fold.h"
#include "attention_piece.h"

namespace tokend {

// | output, head_dim floats | largest raw score | sum of weights | padding |
inline int64_t partial_width(int64_t head_dim) { return head_dim + 8; }

inline void finish_row(const Piece& piece, int64_t row, float* output, float total) {
    for (int64_t dim = 0; dim < piece.head_dim; dim += 8) store<8>(output + dim, load<8>(output + dim) / total);
    piece.write_output(row, output);
}

// Leaves one row of a piece: final when the tile has one piece, else as a partial result.
inline void leave_row(const Piece& piece, const TokendPlan* plan, int64_t index, int64_t row, const RowResult& result) {
    if (piece.tile->pieces == 1) return finish_row(piece, row, result.output, result.total);
    const int64_t at = piece.tile->partial_row + index * piece.rows + row;
    float* partial = plan->partials + at * partial_width(piece.head_dim);
    std::copy_n(result.output, piece.head_dim, partial);
    partial[piece.head_dim] = result.best;
    partial[piece.head_dim + 1] = result.total;
}

}  // namespace tokend
