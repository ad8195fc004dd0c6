// What products have in common whose weights are bfloat16, or become that: rows, the sums of a pair of
// panels, and results.
#pragma once

#include "products/bf16/bf16_dot.h"
#include "products/bf16/bf16_format.h"
#include "products/panel_product.h"
#include "products/tile_pair.h"

namespace tokend {

// Rows of numbers as a product reads them, `stride` numbers apart.
struct RowsOfBf16 {
    const Bf16Input* first;
    int64_t stride;
};

// The rows of a product, or what they were prepared to.
inline RowsOfBf16 rows_of_bf16(const TokendProduct& product, int64_t in_features, const void* prepared) {
    if (bf16_rows_in_place(product.input_dtype, in_features))
        return {static_cast<const Bf16Input*>(product.input), product.input_stride};
    const int64_t row_bytes = tokend_bf16_prepared_bytes(1, in_features);
    return {static_cast<const Bf16Input*>(prepared), row_bytes / int64_t(sizeof(Bf16Input))};
}

// Prepares the rows of a product and calls multiply(prepared), by a team if that is worth it; calls
// multiply(null) if the product reads them in place.
template <class Multiply>
void with_prepared_rows(const TokendProduct& product, int64_t in_features, int64_t out_features, Multiply multiply) {
    const int64_t num_rows = product.num_rows;
    if (bf16_rows_in_place(product.input_dtype, in_features)) return multiply(static_cast<void*>(nullptr));
    void* prepared = thread_memory(tokend_bf16_prepared_bytes(num_rows, in_features));
    const int64_t row_bytes = product.input_stride * (product.input_dtype == 0 ? 4 : 2);
#pragma omp parallel if (worth_threads(num_rows, in_features, out_features))
    {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < num_rows; row++) {
            const char* x = static_cast<const char*>(product.input) + row * row_bytes;
            prepare_bf16_row(product.input_dtype, in_features, row, x, prepared);
        }
        multiply(prepared);
    }
}

#if defined(TOKEND_AMX) && defined(__AMX_BF16__)

struct Bf16Tiles {
    static constexpr int64_t FETCH_AHEAD = 8192;
    static void upper_first() { _tile_dpbf16ps(0, 4, 6); }
    static void upper_second() { _tile_dpbf16ps(1, 4, 7); }
    static void lower_first() { _tile_dpbf16ps(2, 5, 6); }
    static void lower_second() { _tile_dpbf16ps(3, 5, 7); }
};

#endif

// A thread's way to multiply rows with steps of a pair.
class Bf16Strips {
  public:
#if defined(TOKEND_AMX) && defined(__AMX_BF16__)
    bool by_tiles() const { return allowed_; }
#else
    static bool by_tiles() { return false; }
#endif

    // sums: [num_rows][PAIR_OUTPUTS] of the inputs of these steps. x: the first row's first input.
    template <class Between>
    void operator()(const uint8_t* pair, int64_t num_steps, const Bf16Input* x, int64_t stride, int64_t num_rows,
                    float* sums, PairFetch fetch, Between between) {
#if defined(TOKEND_AMX) && defined(__AMX_BF16__)
        if (allowed_) {
            const TilesOfPair tiles = {pair, pair + PANEL_STEP_BYTES, PAIR_STEP_BYTES};
            const int64_t row_bytes = stride * int64_t(sizeof(Bf16Input));
            return tiles_(tiles, num_steps, x, row_bytes, num_rows, sums, fetch.lines, between);
        }
#endif
        (void)between;
        if (fetch.lines)
            bf16_dot_pair<true>(pair, num_steps, x, stride, num_rows, sums, fetch.next);
        else
            bf16_dot_pair<false>(pair, num_steps, x, stride, num_rows, sums, fetch.next);
    }

#if defined(TOKEND_AMX) && defined(__AMX_BF16__)
  private:
    const bool allowed_ = tiles_allowed();
    TileStrips<Bf16Tiles> tiles_;
#endif
};

// Sums that are results but for the bias.
struct BiasedSums {
    PairBias bias;
    BiasedSums() = default;
    template <class Form>
    BiasedSums(const Form&, const TokendProduct& product, int64_t first, int64_t width) : bias(product, first, width) {}

    struct Columns {
        LineOfPair bias;

        TOKEND_INLINE explicit Columns(const BiasedSums& finish) {
            each<LINE_VECTORS>([&](auto i) { bias[i] = load<ROW_LANES>(finish.bias.numbers + i * ROW_LANES); });
        }
        TOKEND_INLINE void values(const float* sums, int64_t, LineOfPair& to) const {
            each<LINE_VECTORS>([&](auto i) { to[i] = load<ROW_LANES>(sums + i * ROW_LANES) + bias[i]; });
        }
    };
};

}  // namespace tokend
