// Products of rows with pairs of panels for all weight formats: divides the work into pairs and
// rows for the threads, and converts sums to numbers while the next sums are computed.
//
// A Form of weights has
//   Sum                              of a row and an output: 4 bytes
//   ALWAYS_FETCH                     whether lines are asked for also where they come from a cache
//   num_pairs(), pair_bytes()        of the weight
//   Strips                           a thread's way to multiply; strips(form, pair, row, num_rows, sums, fetch,
//                                    between) makes sums [num_rows][PAIR_OUTPUTS]; fetch: a PairFetch
//   Columns                          what the sums of a pair become: columns.values(sums, row, values)
#pragma once

#include <omp.h>

#include <algorithm>
#include <vector>

#include "common/row_vectors.h"
#include "common/team.h"
#include "products/packed/packed.h"
#include "products/panels.h"

namespace tokend {

// Rows whose sums a thread has at a time.
constexpr int64_t STRIP = 32;
// Bytes of a weight that are multiplied with all rows before the next bytes.
constexpr int64_t GROUP_PANEL_BYTES = 1 << 19;
// Below this many multiplications one thread is done before others wake up.
constexpr int64_t PARALLEL_PRODUCTS = 1 << 17;
// Rows that vectors finish while tiles multiply 64 bytes of each row.
constexpr int ROWS_BETWEEN = 4;
constexpr int LINE_VECTORS = int(PAIR_OUTPUTS) / ROW_LANES;

typedef F<ROW_LANES> LineOfPair[LINE_VECTORS];

// What is asked for while a pair is multiplied: its own lines some steps ahead, and those of the
// next pair, if pairs come from memory.
struct PairFetch {
    bool lines, next;
};

inline float number_at(int64_t dtype, const void* from, int64_t index) {
    return dtype == 0 ? static_cast<const float*>(from)[index]
                      : bit_cast<float>(uint32_t(static_cast<const bfloat16*>(from)[index].bits) << 16);
}

// The biases of a pair; 0 without a bias.
struct PairBias {
    alignas(64) float numbers[PAIR_OUTPUTS] = {};

    PairBias(const TokendProduct& product, int64_t first, int64_t width) {
        if (product.bias)
            for (int64_t i = 0; i < width; i++) numbers[i] = number_at(product.bias_dtype, product.bias, first + i);
    }
    PairBias() = default;
};

template <class T>
TOKEND_INLINE void store_line(T* to, const LineOfPair& values) {
    each<LINE_VECTORS>([&](auto i) { store<ROW_LANES>(to + i * ROW_LANES, values[i]); });
}

#if defined(__AVX512BF16__)
TOKEND_INLINE void store_line(bfloat16* to, const LineOfPair& values) {
    const __m512bh both = _mm512_cvtne2ps_pbh((__m512)values[1], (__m512)values[0]);
    __builtin_memcpy(to, &both, sizeof(both));
}
#endif

template <bool ADDS, class Columns, class Sum, class T>
TOKEND_INLINE void finish_line(const Columns& columns, const Sum* sums, int64_t row, T* to) {
    LineOfPair values;
    columns.values(sums, row, values);
    if constexpr (ADDS)
        each<LINE_VECTORS>([&](auto i) { values[i] += load<ROW_LANES>(to + i * ROW_LANES); });
    store_line(to, values);
}

// Rows whose sums are computed and whose outputs are still to be written.
template <class Form, bool ADDS, class T>
struct Pending {
    const typename Form::Sum* sums;
    const typename Form::Finish* finish;
    int64_t row;
    T* to;
    int64_t stride;
    int64_t width;  // outputs that there are
    int64_t num_rows = 0;

    template <int COUNT>
    TOKEND_INLINE void some() {
        if (num_rows < COUNT) return;
        const typename Form::Columns columns(*finish);
        if (width == PAIR_OUTPUTS) {
            each<COUNT>([&](auto i) {
                finish_line<ADDS>(columns, sums + i * PAIR_OUTPUTS, row + i, to + i * stride);
            });
        } else {
            for (int64_t i = 0; i < COUNT; i++) {
                T line[PAIR_OUTPUTS] = {};
                std::copy_n(to + i * stride, width, line);
                finish_line<ADDS>(columns, sums + i * PAIR_OUTPUTS, row + i, line);
                std::copy_n(line, width, to + i * stride);
            }
        }
        sums += COUNT * PAIR_OUTPUTS, row += COUNT, to += COUNT * stride, num_rows -= COUNT;
    }
    void all() {
        while (num_rows >= ROWS_BETWEEN) some<ROWS_BETWEEN>();
        while (num_rows) some<1>();
    }
};

// One thread's part of a product:
//
//   group of pairs   ->  strip of rows  ->  pair          group: in the second cache
//                                                         strip: in the first
// so that writes of a row are contiguous. The outputs of a strip are written while the next sums
// are computed.
template <bool ADDS, class T, class Form>
TOKEND_FLATTEN void multiply_part(const Form& form, const TokendProduct& product, const ProductPart& part) {
    const int64_t group = std::max<int64_t>(1, GROUP_PANEL_BYTES / form.pair_bytes());
    typename Form::Strips strips;
    typename Form::Finish finishes[2];
    alignas(64) typename Form::Sum sums[2][STRIP * PAIR_OUTPUTS];
    Pending<Form, ADDS, T> before{};
    int turn = 0;
    for (int64_t begin = part.first_panel; begin < part.end_panel; begin += group) {
        const int64_t end = std::min(begin + group, part.end_panel);
        for (int64_t row = part.first_row; row < part.end_row; row += STRIP) {
            const int64_t count = std::min(STRIP, part.end_row - row);
            for (int64_t pair = begin; pair < end; pair++) {
                turn ^= 1;
                const bool from_memory = row == part.first_row;
                strips(form, pair, row, count, sums[turn], {Form::ALWAYS_FETCH || from_memory, from_memory},
                       [&] { before.template some<ROWS_BETWEEN>(); });
                before.all();
                const int64_t first = pair * PAIR_OUTPUTS;
                const int64_t width = std::min(PAIR_OUTPUTS, form.out_features() - first);
                finishes[turn] = typename Form::Finish(form, product, first, width);
                T* to = static_cast<T*>(product.output) + row * product.output_stride + first;
                before = {sums[turn], &finishes[turn], row, to, product.output_stride, width, count};
            }
        }
    }
    before.all();
}

// Called by all threads of a parallel region, or by a single thread. Outputs are divided among
// threads; rows as well if there are more threads than output parts.
template <bool ADDS, class T, class Form>
void multiply_share(const Form& form, const TokendProduct& product) {
    const int64_t pairs = form.num_pairs(), threads = omp_get_num_threads();
    const int64_t parts = std::clamp<int64_t>(2 * threads / pairs, 1, (product.num_rows + STRIP - 1) / STRIP);
    const int64_t part_rows = whole((product.num_rows + parts - 1) / parts, STRIP), units = parts * pairs;
    const int64_t thread = omp_get_thread_num();
    const int64_t last = units * (thread + 1) / threads;
    for (int64_t unit = units * thread / threads; unit < last;) {
        const int64_t part = unit / pairs, end = std::min(last, (part + 1) * pairs);
        const int64_t row = part * part_rows;
        multiply_part<ADDS, T>(form, product,
                                {unit - part * pairs, end - part * pairs, row,
                                 std::min(row + part_rows, product.num_rows)});
        unit = end;
    }
}

template <class Form>
void multiply_share(const Form& form, const TokendProduct& product) {
    if (product.num_rows == 0) return;
    if (product.output_dtype == 0)
        product.adds ? multiply_share<true, float>(form, product) : multiply_share<false, float>(form, product);
    else
        product.adds ? multiply_share<true, bfloat16>(form, product) : multiply_share<false, bfloat16>(form, product);
}

// Called by a single thread; the panels of the part are pairs.
template <class Form>
void multiply_part(const Form& form, const TokendProduct& product, const ProductPart& part) {
    if (product.output_dtype == 0)
        multiply_part<false, float>(form, product, part);
    else
        multiply_part<false, bfloat16>(form, product, part);
}

inline bool worth_threads(int64_t num_rows, int64_t in_features, int64_t out_features) {
    return num_rows * in_features * out_features > PARALLEL_PRODUCTS;
}

// Memory of this thread for prepared rows, kept for the next product; aligned to 64.
inline void* thread_memory(int64_t bytes) {
    struct alignas(64) Line {
        uint8_t bytes[64];
    };
    static thread_local std::vector<Line> lines;
    if (int64_t(lines.size()) * 64 < bytes) lines.resize(size_t(bytes + 63) / 64);
    return lines.data();
}

}  // namespace tokend
