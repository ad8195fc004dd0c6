// Products with rotated weights: cuts the work into pairs of panels and rows for the
// threads, and turns the integer sums into numbers.
#include <omp.h>

#include <algorithm>
#include <vector>

#include "rotated_dot.h"
#include "rotated_rows.h"
#include "rotated_tiles.h"
#include "team.h"

namespace tokend {
namespace {

// Rows whose sums a thread has at a time.
constexpr int64_t STRIP = 32;
// Bytes of a weight that are multiplied with all rows in turn.
constexpr int64_t GROUP_PANEL_BYTES = 1 << 19;
// Below this many products of bytes one thread is done before others wake.
constexpr int64_t PARALLEL_PRODUCTS = 1 << 17;
constexpr int LINE_VECTORS = int(PAIR_OUTPUTS) / DOT_LANES;

// What the sums of a pair of panels become.
struct Finish {
    alignas(64) float scales[PAIR_OUTPUTS];
    alignas(64) float bias[PAIR_OUTPUTS];
    int64_t width;  // outputs that there are
};

float number_at(int64_t dtype, const void* from, int64_t index) {
    return dtype == 0 ? static_cast<const float*>(from)[index]
                      : bit_cast<float>(uint32_t(static_cast<const bfloat16*>(from)[index].bits) << 16);
}

void describe(const TokendRotated& weight, const RotatedLayout& layout, const TokendProduct& product, int64_t first,
              Finish& finish) {
    std::copy_n(layout.scales(weight) + first, PAIR_OUTPUTS, finish.scales);
    std::fill_n(finish.bias, PAIR_OUTPUTS, 0.0f);
    finish.width = std::min(PAIR_OUTPUTS, weight.out_features - first);
    if (product.bias)
        for (int64_t i = 0; i < finish.width; i++)
            finish.bias[i] = number_at(product.bias_dtype, product.bias, first + i);
}

template <class T>
TOKEND_INLINE void store_line(T* to, const DotF (&values)[LINE_VECTORS]) {
    each<LINE_VECTORS>([&](auto i) { store<DOT_LANES>(to + i * DOT_LANES, values[i]); });
}

#if defined(__AVX512BF16__)
TOKEND_INLINE void store_line(bfloat16* to, const DotF (&values)[LINE_VECTORS]) {
    const __m512bh both = _mm512_cvtne2ps_pbh((__m512)values[1], (__m512)values[0]);
    __builtin_memcpy(to, &both, sizeof(both));
}
#endif

// The same in registers.
struct Columns {
    DotF scales[LINE_VECTORS], bias[LINE_VECTORS];

    TOKEND_INLINE explicit Columns(const Finish& finish) {
        each<LINE_VECTORS>([&](auto i) {
            scales[i] = load<DOT_LANES>(finish.scales + i * DOT_LANES);
            bias[i] = load<DOT_LANES>(finish.bias + i * DOT_LANES);
        });
    }
};

template <bool ADDS, class T>
TOKEND_INLINE void finish_line(const int32_t* sums, const RowFacts& facts, const Columns& columns, T* to) {
    constexpr int N = DOT_LANES;
    const DotF scale = splat<N>(facts.scale);
    const DotI start = splat_int(DotWeight::OFFSET ? facts.start : 0);
    DotF values[LINE_VECTORS];
    each<LINE_VECTORS>([&](auto i) {
        const DotI sum = load_bytes<DotI>(sums + i * N) + start;
        values[i] = fused(to_floats(sum), scale * columns.scales[i], columns.bias[i]);
        if constexpr (ADDS) values[i] += load<N>(to + i * N);
    });
    store_line(to, values);
}

// Rows whose sums are there and whose numbers are still to be written.
template <bool ADDS, class T>
struct Pending {
    const int32_t* sums;
    const RowFacts* facts;
    const Finish* finish;
    T* to;
    int64_t stride;
    int64_t num_rows = 0;

    template <int COUNT>
    TOKEND_INLINE void some() {
        if (num_rows < COUNT) return;
        const Columns columns(*finish);
        if (finish->width == PAIR_OUTPUTS) {
            each<COUNT>([&](auto row) {
                finish_line<ADDS>(sums + row * PAIR_OUTPUTS, facts[row], columns, to + row * stride);
            });
        } else {
            for (int64_t row = 0; row < COUNT; row++) {
                T line[PAIR_OUTPUTS] = {};
                std::copy_n(to + row * stride, finish->width, line);
                finish_line<ADDS>(sums + row * PAIR_OUTPUTS, facts[row], columns, line);
                std::copy_n(line, finish->width, to + row * stride);
            }
        }
        sums += COUNT * PAIR_OUTPUTS, facts += COUNT, to += COUNT * stride, num_rows -= COUNT;
    }
    void all() {
        while (num_rows >= 4) some<4>();
        while (num_rows) some<1>();
    }
};

#if defined(TOKEND_AMX) && defined(__AMX_INT8__)

// Tiles on one thread, whose shapes follow the number of rows.
class Strips {
  public:
    template <class Pending>
    void operator()(const uint8_t* pair, const RotatedLayout& layout, const int8_t* x, int64_t stride,
                    int64_t num_rows, int32_t* sums, bool fetch, Pending& before) {
        if (!allowed_) return dot_pair(pair, layout.panel_bytes, layout.inputs, x, stride, num_rows, sums);
        if (num_rows != shaped_) shape_tiles(shaped_ = num_rows);
        const auto run = [&](auto lower, auto fetches) {
            tile_pair<lower, fetches>(pair, layout.panel_bytes, layout.inputs, x, stride, sums,
                                      [&] { before.template some<ROWS_BETWEEN>(); });
        };
        if (num_rows > TILE_ROWS_MOST)
            fetch ? run(std::true_type(), std::true_type()) : run(std::true_type(), std::false_type());
        else
            fetch ? run(std::false_type(), std::true_type()) : run(std::false_type(), std::false_type());
    }
    ~Strips() {
        if (shaped_) _tile_release();
    }

  private:
    // Rows that vectors finish while tiles multiply 64 inputs.
    static constexpr int ROWS_BETWEEN = 4;
    const bool allowed_ = tiles_allowed();
    int64_t shaped_ = 0;
};

#else

struct Strips {
    template <class Pending>
    void operator()(const uint8_t* pair, const RotatedLayout& layout, const int8_t* x, int64_t stride,
                    int64_t num_rows, int32_t* sums, bool, Pending&) {
        dot_pair(pair, layout.panel_bytes, layout.inputs, x, stride, num_rows, sums);
    }
};

#endif

// A part of the outputs, as pairs of panels, and of the rows.
struct Slice {
    int64_t first_pair, end_pair, first_row, end_row;
};

// One thread's part of a product:
//
//   group of pairs   ->  strip of rows  ->  pair          group: in the second cache
//                                                         strip: in the first
// so that what is written of a row lies together. The numbers of a strip are written while
// the next sums are made.
template <bool ADDS, class T>
TOKEND_FLATTEN void multiply_slice(const TokendRotated& weight, const TokendProduct& product, void* codes,
                                   const Slice& slice) {
    const RotatedLayout layout(weight);
    const CodesLayout rows(product.num_rows, weight.in_features);
    const int64_t group = std::max<int64_t>(1, GROUP_PANEL_BYTES / (2 * layout.panel_bytes));
    Strips strips;
    Finish finishes[2];
    alignas(64) int32_t sums[2][STRIP * PAIR_OUTPUTS];
    Pending<ADDS, T> before{};
    int turn = 0;
    for (int64_t begin = slice.first_pair; begin < slice.end_pair; begin += group) {
        const int64_t end = std::min(begin + group, slice.end_pair);
        for (int64_t row = slice.first_row; row < slice.end_row; row += STRIP) {
            const int64_t count = std::min(STRIP, slice.end_row - row);
            for (int64_t pair = begin; pair < end; pair++) {
                turn ^= 1;
                strips(layout.panel(weight, 2 * pair), layout, rows.codes(codes, row), rows.stride, count, sums[turn],
                       row == slice.first_row, before);
                before.all();
                const int64_t first = pair * PAIR_OUTPUTS;
                describe(weight, layout, product, first, finishes[turn]);
                T* to = static_cast<T*>(product.output) + row * product.output_stride + first;
                before = {sums[turn], rows.facts(codes) + row, &finishes[turn], to, product.output_stride, count};
            }
        }
    }
    before.all();
}

// All threads of a parallel region come here, or one that is alone. Outputs are cut; rows as
// well where there are more threads than that feeds.
template <bool ADDS, class T>
void multiply(const TokendRotated& weight, const TokendProduct& product, void* codes) {
    const int64_t pairs = RotatedLayout(weight).num_pairs(), threads = omp_get_num_threads();
    const int64_t parts = std::clamp<int64_t>(2 * threads / pairs, 1, (product.num_rows + STRIP - 1) / STRIP);
    const int64_t part_rows = whole((product.num_rows + parts - 1) / parts, STRIP), units = parts * pairs;
    const int64_t thread = omp_get_thread_num();
    const int64_t last = units * (thread + 1) / threads;
    for (int64_t unit = units * thread / threads; unit < last;) {
        const int64_t part = unit / pairs, end = std::min(last, (part + 1) * pairs);
        const int64_t row = part * part_rows;
        multiply_slice<ADDS, T>(weight, product, codes,
                                {unit - part * pairs, end - part * pairs, row,
                                 std::min(row + part_rows, product.num_rows)});
        unit = end;
    }
}

void multiply(const TokendRotated& weight, const TokendProduct& product, void* codes) {
    if (product.output_dtype == 0)
        product.adds ? multiply<true, float>(weight, product, codes) : multiply<false, float>(weight, product, codes);
    else
        product.adds ? multiply<true, bfloat16>(weight, product, codes)
                     : multiply<false, bfloat16>(weight, product, codes);
}

bool worth_threads(const TokendRotated& weight, int64_t num_rows) {
    return num_rows * weight.in_features * weight.out_features > PARALLEL_PRODUCTS;
}

// Memory for codes, kept for the next product; aligned to 64.
void* own_codes(int64_t bytes) {
    struct alignas(64) Line {
        uint8_t bytes[64];
    };
    static thread_local std::vector<Line> lines;
    if (int64_t(lines.size()) * 64 < bytes) lines.resize(size_t(bytes) / 64);
    return lines.data();
}

}  // namespace
}  // namespace tokend

using namespace tokend;

extern "C" void tokend_coded_product(const TokendRotated* weight, const TokendProduct* product, const void* codes) {
    in_team(worth_threads(*weight, product->num_rows),
            [&] { multiply(*weight, *product, const_cast<void*>(codes)); });
}

extern "C" void tokend_rotated_product(const TokendRotated* weight, const TokendProduct* product) {
    const int64_t in_features = weight->in_features;
    const CodesLayout layout(product->num_rows, in_features);
    void* codes = own_codes(layout.bytes());
    const auto code = [&](int64_t row) {
        layout.facts(codes)[row] = code_input(*product, in_features, row, row_scratch(in_features), layout.codes(codes, row));
    };
    const bool shared = product->num_rows * in_features > PARALLEL_CODES;
    if (!shared)
        for (int64_t row = 0; row < product->num_rows; row++) code(row);
#pragma omp parallel if (worth_threads(*weight, product->num_rows))
    {
        if (shared) {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < product->num_rows; row++) code(row);
        }
        multiply(*weight, *product, codes);
    }
}
