// Attention of few bfloat16 query rows over bfloat16 pages without a tile unit: products of pairs
// in one instruction.
#include "attention/few_rows.h"
#include "attention/piece.h"

namespace tokend {

#if defined(__AVX512BF16__)

bool attend_few_in_bfloat16(const Piece& piece, const Piece& following, const TokendAttentionSchedule* plan, int64_t index,
                            Scratch& scratch) {
    const TokendAttentionLayer* layer = piece.layer;
    if (layer->dtype != TOKEND_BFLOAT16 || layer->cache_dtype != TOKEND_BFLOAT16) return false;
    attend_few<bfloat16, bfloat16>(piece, following, plan, index, scratch);
    return true;
}

#else

bool attend_few_in_bfloat16(const Piece&, const Piece&, const TokendAttentionSchedule*, int64_t, Scratch&) { return false; }

#endif

}  // namespace tokend
