// Products with rotated weights: cuts the work into pairs of panels and rows for the
// threads, and turns the integer sums into numbers.
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
// Rows of a task: their codes stay in the second cache.
constexpr int64_t CHUNK = 256;
// Below this many products of bytes one thread is done before others wake.
constexpr int64_t PARALLEL_PRODUCTS = 1 << 17;

// What the outputs of a pair of panels are multiplied by, and what is added.
struct Finish {
    alignas(64) float scales[PAIR_OUTPUTS];
    alignas(64) float bias[PAIR_OUTPUTS];
    int64_t width;  // outputs that there are
};

float number_at(int64_t dtype, const void* from, int64_t index) {
    return dtype == 0 ? static_cast<const float*>(from)[index]
                      : bit_cast<float>(uint32_t(static_cast<const bfloat16*>(from)[index].bits) << 16);
}

template <bool ADDS, class T>
TOKEND_INLINE void finish_line(const int32_t* sums, const RowFacts& facts, const Finish& finish, T* to) {
    constexpr int N = DOT_LANES;
    const DotF scale = splat<N>(facts.scale);
    const DotI start = splat_int(DotWeight::OFFSET ? facts.start : 0);
    each<int(PAIR_OUTPUTS) / N>([&](auto i) {
        const DotI sum = load_bytes<DotI>(sums + i * N) + start;
        DotF value = fused(to_floats(sum), scale * load<N>(finish.scales + i * N), load<N>(finish.bias + i * N));
        if constexpr (ADDS) value += load<N>(to + i * N);
        store<N>(to + i * N, value);
    });
}

template <bool ADDS, class T>
TOKEND_FLATTEN void finish_rows(const int32_t* sums, const RowFacts* facts, const Finish& finish, int64_t num_rows,
                                int64_t stride, T* to) {
    for (int64_t row = 0; row < num_rows; row++, sums += PAIR_OUTPUTS, to += stride) {
        if (finish.width == PAIR_OUTPUTS) {
            finish_line<ADDS>(sums, facts[row], finish, to);
        } else {
            T line[PAIR_OUTPUTS] = {};
            std::copy_n(to, finish.width, line);
            finish_line<ADDS>(sums, facts[row], finish, line);
            std::copy_n(line, finish.width, to);
        }
    }
}

void write(const TokendProduct& product, int64_t first, int64_t row, int64_t num_rows, const int32_t* sums,
           const RowFacts* facts, const Finish& finish) {
    const int64_t at = row * product.output_stride + first;
    const auto as = [&](auto* output) {
        if (product.adds)
            finish_rows<true>(sums, facts, finish, num_rows, product.output_stride, output + at);
        else
            finish_rows<false>(sums, facts, finish, num_rows, product.output_stride, output + at);
    };
    if (product.output_dtype == 0)
        as(static_cast<float*>(product.output));
    else
        as(static_cast<bfloat16*>(product.output));
}

Finish finish_of(const TokendRotated& weight, const RotatedLayout& layout, const TokendProduct& product,
                 int64_t first) {
    Finish finish = {};
    std::copy_n(layout.scales(weight) + first, PAIR_OUTPUTS, finish.scales);
    finish.width = std::min(PAIR_OUTPUTS, weight.out_features - first);
    if (product.bias)
        for (int64_t i = 0; i < finish.width; i++)
            finish.bias[i] = number_at(product.bias_dtype, product.bias, first + i);
    return finish;
}

#if defined(TOKEND_AMX) && defined(__AMX_INT8__)

// Tiles on one thread, whose shapes follow the number of rows.
class Strips {
  public:
    void operator()(const uint8_t* pair, const RotatedLayout& layout, const int8_t* x, int64_t stride,
                    int64_t num_rows, int32_t* sums, bool fetch) {
        if (num_rows != shaped_) shape_tiles(shaped_ = num_rows);
        const auto run = num_rows > TILE_ROWS_MOST ? fetch ? tile_pair<true, true> : tile_pair<true, false>
                                                   : fetch ? tile_pair<false, true> : tile_pair<false, false>;
        run(pair, layout.panel_bytes, layout.inputs, x, stride, sums);
    }
    ~Strips() {
        if (shaped_) _tile_release();
    }

  private:
    int64_t shaped_ = 0;
};

#else

struct Strips {
    void operator()(const uint8_t* pair, const RotatedLayout& layout, const int8_t* x, int64_t stride,
                    int64_t num_rows, int32_t* sums, bool) {
        dot_pair(pair, layout.panel_bytes, layout.inputs, x, stride, num_rows, sums);
    }
};

#endif

// Within a parallel region, or on one thread: all threads of it come here.
void multiply(const TokendRotated& weight, const TokendProduct& product, void* codes) {
    const RotatedLayout layout(weight);
    const CodesLayout rows(product.num_rows, weight.in_features);
    const int64_t chunks = (product.num_rows + CHUNK - 1) / CHUNK;
    Strips strips;
    alignas(64) int32_t sums[STRIP * PAIR_OUTPUTS];
#pragma omp for schedule(static) nowait
    for (int64_t task = 0; task < layout.num_pairs() * chunks; task++) {
        const int64_t pair = task / chunks, first = pair * PAIR_OUTPUTS;
        const Finish finish = finish_of(weight, layout, product, first);
        const int64_t begin = task % chunks * CHUNK, end = std::min(begin + CHUNK, product.num_rows);
        for (int64_t row = begin; row < end; row += STRIP) {
            const int64_t count = std::min(STRIP, end - row);
            strips(layout.panel(weight, 2 * pair), layout, rows.codes(codes, row), rows.stride, count, sums,
                   row == begin);
            write(product, first, row, count, sums, rows.facts(codes) + row, finish);
        }
    }
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
