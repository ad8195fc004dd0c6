// The kernels for queries of bfloat16 over pages of bfloat16 or int8, in sources of their own,
// which are compiled for the tile unit where a variant has it. Each says whether it does a
// piece; if not, the kernels for any type do.
#pragma once

#include "attention_piece.h"

namespace tokend {

// attention_bf16.cpp: many query rows, a span of tokens, and how many rows a tile of a longer
// prompt has: enough to reuse each K and V many times.
int64_t tile_rows();
bool attend_in_bfloat16(const Piece& piece, const TokendPlan* plan, int64_t index, Scratch& scratch);

// attention_few_bf16.cpp: few query rows over pages of bfloat16.
bool attend_few_in_bfloat16(const Piece& piece, const Piece& following, const TokendPlan* plan, int64_t index,
                            Scratch& scratch);

// attention_tiles.cpp: few query rows over pages of bfloat16, a piece of tokens; `following` is
// what to fetch ahead.
bool attend_in_tiles(const Piece& piece, const Piece& following, const TokendPlan* plan, int64_t index,
                     Scratch& scratch);

// attention_few_int8.cpp: few query rows over pages of int8, a piece of neighbouring heads.
bool attend_few_in_int8(const Piece& first, int64_t heads, const Piece& following, const TokendPlan* plan,
                        int64_t index, Scratch& scratch);

}  // namespace tokend
