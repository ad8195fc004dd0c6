// What adapters (LoRA) add to products, by the threads of a team. See adapters.h.
//
// A tile of 16 ranks, or outputs, is multiplied with a few rows at a time: each row has one vector of
// sums, to which one line of the tile after the other is added. Where the CPU multiplies pairs of
// bfloat16, rows are read as such, others as floats.
#include "layers/adapters.h"

#include <omp.h>

#include <algorithm>
#include <vector>

#include "common/row_vectors.h"
#include "common/team.h"

namespace tokend {
namespace {

constexpr int N = ROW_LANES;
constexpr int64_t LANES = TOKEND_LORA_LANES;
constexpr int VECTORS = int(LANES) / N;
// Rows and tiles that are multiplied together: as many sums as registers hold.
constexpr int TILE_ROWS = VECTORS == 1 ? 8 : VECTORS == 2 ? 4 : 2;
constexpr int TILE_PANELS = VECTORS == 1 ? 2 : 1;
// Rows of a group that are one piece of work, so that several threads can share a group.
constexpr int64_t CHUNK = 32;
// Multiplications from which on several threads are worth waking.
constexpr int64_t PARALLEL_PRODUCTS = 1 << 16;

int64_t tiles(int64_t count) { return (count + LANES - 1) / LANES; }

// Elements of a packed tile whose lines are `length` long.
template <class T>
int64_t tile_size(int64_t length) {
    return LANES * (std::is_same_v<T, bfloat16> ? (length + 1) / 2 * 2 : length);
}

// One line of a tile as floats: of one input, or of a pair of them.
template <class T>
struct Line {
    static constexpr int INPUTS = 1;
    F<N> numbers[VECTORS];
    TOKEND_INLINE explicit Line(const T* from) {
        each<VECTORS>([&](auto i) { numbers[i] = load<N>(from + i * N); });
    }
    TOKEND_INLINE void add(F<N> (&sums)[VECTORS], const float* x) const {
        each<VECTORS>([&](auto i) { sums[i] = multiply_add<N>(numbers[i], splat<N>(x[0]), sums[i]); });
    }
};

template <>
struct Line<bfloat16> {
    static constexpr int INPUTS = 2;
    F<N> low[VECTORS], high[VECTORS];
    TOKEND_INLINE explicit Line(const bfloat16* from) {
        typedef Vec<N>::U U;
        each<VECTORS>([&](auto i) {
            const U words = load_bytes<U>(from + i * 2 * N);
            low[i] = bit_cast<F<N>>(U(words << 16));
            high[i] = bit_cast<F<N>>(U(words & 0xffff0000u));
        });
    }
    TOKEND_INLINE void add(F<N> (&sums)[VECTORS], const float* x) const {
        each<VECTORS>([&](auto i) {
            sums[i] = multiply_add<N>(low[i], splat<N>(x[0]), sums[i]);
            sums[i] = multiply_add<N>(high[i], splat<N>(x[1]), sums[i]);
        });
    }
};

#if defined(__AVX512BF16__)
// A line of pairs that is multiplied with pairs of bfloat16.
struct PairLine {
    static constexpr int INPUTS = 2;
    __m512bh words;
    TOKEND_INLINE explicit PairLine(const bfloat16* from) : words((__m512bh)load_bytes<__m512i>(from)) {}
    TOKEND_INLINE void add(F<N> (&sums)[VECTORS], const bfloat16* x) const {
        const __m512i both = _mm512_set1_epi32(load_bytes<int32_t>(x));
        sums[0] = (F<16>)_mm512_dpbf16_ps((__m512)sums[0], words, (__m512bh)both);
    }
};
#endif

// How numbers of type T are multiplied: with rows of Input, by lines of type Of.
template <class T>
struct LineOf {
    typedef Line<T> Of;
    typedef float Input;
};
#if defined(__AVX512BF16__)
template <>
struct LineOf<bfloat16> {
    typedef PairLine Of;
    typedef bfloat16 Input;
};
#endif
template <class T>
using InputOf = typename LineOf<T>::Input;

// Inputs of a row rounded up to whole lines; the others are zeros.
template <class T>
int64_t padded(int64_t length) {
    constexpr int64_t inputs = LineOf<T>::Of::INPUTS;
    return (length + inputs - 1) / inputs * inputs;
}

// Multiplies PANELS tiles side by side with ROWS rows: finish(row, tile, sums) for each.
template <int ROWS, int PANELS, class T, class Finish>
TOKEND_INLINE void multiply_tiles(const T* tile, int64_t length, const InputOf<T>* const* x, Finish finish) {
    typedef typename LineOf<T>::Of L;
    const int64_t size = tile_size<T>(length);
    F<N> total[ROWS][PANELS][VECTORS] = {};
    for (int64_t at = 0; at < length; at += L::INPUTS, tile += LANES * L::INPUTS) {
        each<PANELS>([&](auto panel) {
            const L line(tile + panel * size);
            each<ROWS>([&](auto row) { line.add(total[row][panel], x[row] + at); });
        });
    }
    each<ROWS>([&](auto row) { each<PANELS>([&](auto panel) { finish(int(row), int(panel), total[row][panel]); }); });
}

// The same of any number of rows and of the tiles from `first` on: finish(row, tile, sums).
template <class T, class Finish>
TOKEND_FLATTEN void multiply_all(const T* matrix, int64_t length, int64_t first, int64_t end,
                                 const InputOf<T>* const* x, int64_t count, Finish finish) {
    const int64_t whole = padded<T>(length);
    const auto rows_of = [&](int64_t tile, auto panels) {
        const T* from = matrix + tile * tile_size<T>(length);
        int64_t row = 0;
        const auto some = [&](auto rows) {
            multiply_tiles<rows, panels>(from, whole, x + row, [&](int at, int panel, const F<N>(&sums)[VECTORS]) {
                finish(row + at, tile + panel, sums);
            });
            row += rows;
        };
        while (row + TILE_ROWS <= count) some(std::integral_constant<int, TILE_ROWS>());
        if (TILE_ROWS > 4 && row + 4 <= count) some(std::integral_constant<int, 4>());
        while (row + 2 <= count) some(std::integral_constant<int, 2>());
        if (row < count) some(std::integral_constant<int, 1>());
    };
    int64_t tile = first;
    if constexpr (TILE_PANELS > 1)
        for (; tile + TILE_PANELS <= end; tile += TILE_PANELS)
            rows_of(tile, std::integral_constant<int, TILE_PANELS>());
    for (; tile < end; tile++) rows_of(tile, std::integral_constant<int, 1>());
}

// Memory of this thread for rows as lines read them.
template <class T>
T* row_memory(int64_t count) {
    static thread_local std::vector<float> memory;
    const size_t floats = size_t(count) * sizeof(T) / sizeof(float) + 1;
    if (memory.size() < floats) memory.resize(floats);
    return reinterpret_cast<T*>(memory.data());
}

template <class From, class To>
void convert(const From* from, int64_t count, To* to) {
    int64_t at = 0;
    for (; at + N <= count; at += N) store<N>(to + at, load<N>(from + at));
    if (at < count) store_some<N>(to + at, count - at, load_some<N>(from + at, count - at, 0.0f));
}

// Where the rows of a piece of work are.
struct RowsOfWork {
    const void* rows[CHUNK];
    float scales[CHUNK];
    int64_t count;
};

// Rows of X as lines of T read them: where they are, or converted and padded with zeros.
template <class T, class X>
void prepare_rows(const X* const* rows, int64_t count, int64_t length, const InputOf<T>** prepared) {
    typedef InputOf<T> Input;
    const int64_t whole = padded<T>(length);
    if constexpr (std::is_same_v<X, Input>) {
        if (whole == length) return void(std::copy_n(rows, count, prepared));
    }
    Input* memory = row_memory<Input>(count * whole);
    for (int64_t row = 0; row < count; row++, memory += whole) {
        convert(rows[row], length, memory);
        std::fill(memory + length, memory + whole, Input{});
        prepared[row] = memory;
    }
}

// reduced [count][stride] of some tiles of ranks.
template <class T, class X>
void reduce_tiles(const TokendLowRank& product, const RowsOfWork& work, int64_t first_tile, int64_t end_tile,
                  float* const* reduced) {
    const X* x[CHUNK];
    const InputOf<T>* prepared[CHUNK];
    for (int64_t row = 0; row < work.count; row++) x[row] = static_cast<const X*>(work.rows[row]);
    prepare_rows<T>(x, work.count, product.in_features, prepared);
    multiply_all(static_cast<const T*>(product.down), product.in_features, first_tile, end_tile, prepared, work.count,
                 [&](int64_t row, int64_t tile, const F<N>(&sums)[VECTORS]) {
                     const F<N> scale = splat<N>(work.scales[row]);
                     each<VECTORS>([&](auto i) { store<N>(reduced[row] + tile * LANES + i * N, sums[i] * scale); });
                 });
}

// Adds a part to some tiles of its outputs. work: rows of the product's output.
template <class T, class Y>
void expand_tiles(const TokendLowRankPart& part, const RowsOfWork& work, const float* const* reduced,
                  int64_t first_tile, int64_t end_tile) {
    const float* x[CHUNK];
    const InputOf<T>* prepared[CHUNK];
    for (int64_t row = 0; row < work.count; row++) x[row] = reduced[row] + part.first_rank;
    prepare_rows<T>(x, work.count, part.num_ranks, prepared);
    multiply_all(static_cast<const T*>(part.up), part.num_ranks, first_tile, end_tile, prepared, work.count,
                 [&](int64_t row, int64_t tile, const F<N>(&sums)[VECTORS]) {
                     Y* y = const_cast<Y*>(static_cast<const Y*>(work.rows[row])) + part.first_output + tile * LANES;
                     const int64_t count = part.num_outputs - tile * LANES;
                     each<VECTORS>([&](auto i) {
                         const int64_t left = count - i * N;
                         if (left >= N)
                             store<N>(y + i * N, load<N>(y + i * N) + sums[i]);
                         else if (left > 0)
                             store_some<N>(y + i * N, left, load_some<N>(y + i * N, left, 0.0f) + sums[i]);
                     });
                 });
}

// Multiplies outputs by gains and adds shifts, before the parts are added.
template <class Y>
void scale_outputs(const TokendLowRank& product, const RowsOfWork& work, int64_t first, int64_t end) {
    for (int64_t row = 0; row < work.count; row++) {
        Y* y = const_cast<Y*>(static_cast<const Y*>(work.rows[row]));
        const F<N> scale = splat<N>(work.scales[row]);
        for (int64_t at = first; at < end; at += N) {
            const int64_t some = std::min<int64_t>(end - at, N);
            const auto vector = [&](const float* from) {
                return some == N ? load<N>(from + at) : load_some<N>(from + at, some, 0.0f);
            };
            F<N> value = some == N ? load<N>(y + at) : load_some<N>(y + at, some, 0.0f);
            if (product.gain) value = multiply_add<N>(vector(product.gain) * scale, value, value);
            if (product.shift) value = multiply_add<N>(vector(product.shift), scale, value);
            if (some == N)
                store<N>(y + at, value);
            else
                store_some<N>(y + at, some, value);
        }
    }
}

int64_t bytes_of_type(int64_t dtype) { return dtype == TOKEND_FLOAT32 ? 4 : 2; }

// The place of a group's first row in scratch memory.
float* reduced_of(const TokendStepAdapters& adapters, int64_t group, const void* scratch) {
    int64_t before = 0;
    for (int64_t index = 0; index < group; index++) before += adapters.groups[index].num_rows;
    return static_cast<float*>(const_cast<void*>(scratch)) + before * adapters.max_rank;
}

int64_t num_chunks(const TokendAdapterRows& group) { return (group.num_rows + CHUNK - 1) / CHUNK; }

RowsOfWork rows_of_work(const TokendAdapterRows& group, int64_t chunk, const void* memory, int64_t row_bytes) {
    RowsOfWork work;
    const int64_t first = chunk * CHUNK;
    work.count = std::min(CHUNK, group.num_rows - first);
    for (int64_t i = 0; i < work.count; i++) {
        work.rows[i] = static_cast<const char*>(memory) + group.rows[first + i] * row_bytes;
        work.scales[i] = group.scales[first + i];
    }
    return work;
}

// Divides pieces of work, counted through all groups, evenly among the threads of a team:
// body(group, product, first piece, end piece) for the thread's own.
template <class Count, class Body>
void share(const TokendStepAdapters& adapters, int64_t product, Count count, Body body) {
    int64_t total = 0;
    for (int64_t index = 0; index < adapters.num_groups; index++)
        if (const TokendLowRank* update = adapters.groups[index].products[product])
            total += count(adapters.groups[index], *update);
    const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
    const int64_t begin = total * thread / threads, end = total * (thread + 1) / threads;
    int64_t at = 0;
    for (int64_t index = 0; index < adapters.num_groups && at < end; index++) {
        const TokendLowRank* update = adapters.groups[index].products[product];
        if (!update) continue;
        const int64_t pieces = count(adapters.groups[index], *update);
        const int64_t first = std::max(begin - at, int64_t(0)), last = std::min(end - at, pieces);
        if (first < last) body(index, *update, first, last);
        at += pieces;
    }
}

template <class Body>
void with_both(int64_t dtype, int64_t other, Body body) {
    with_type(dtype, [&]<class T>(T*) { with_type(other, [&]<class X>(X*) { body.template operator()<T, X>(); }); });
}

// Tiles of all parts of a product, and of which part a tile is.
int64_t output_tiles(const TokendLowRank& product) {
    int64_t total = 0;
    for (int64_t part = 0; part < product.num_parts; part++) total += tiles(product.parts[part].num_outputs);
    return total;
}

template <class Body>
void each_part(const TokendLowRank& product, int64_t first, int64_t end, Body body) {
    int64_t before = 0;
    for (int64_t index = 0; index < product.num_parts; index++) {
        const TokendLowRankPart& part = product.parts[index];
        const int64_t count = tiles(part.num_outputs);
        const int64_t from = std::max(first - before, int64_t(0)), to = std::min(end - before, count);
        if (from < to) body(part, from, to);
        before += count;
    }
}

}  // namespace

void reduce_rows(const TokendStepAdapters& adapters, int64_t product, const AdapterInput& x, void* scratch) {
    const auto count = [](const TokendAdapterRows& group, const TokendLowRank& update) {
        return num_chunks(group) * tiles(update.rank);
    };
    share(adapters, product, count, [&](int64_t index, const TokendLowRank& update, int64_t first, int64_t end) {
        const TokendAdapterRows& group = adapters.groups[index];
        float* reduced = reduced_of(adapters, index, scratch);
        const int64_t each = tiles(update.rank);
        for (int64_t piece = first; piece < end;) {
            const int64_t chunk = piece / each, last = std::min(end, (chunk + 1) * each);
            const RowsOfWork work = rows_of_work(group, chunk, x.memory, x.stride * bytes_of_type(x.dtype));
            float* rows[CHUNK];
            for (int64_t i = 0; i < work.count; i++) rows[i] = reduced + (chunk * CHUNK + i) * adapters.max_rank;
            with_both(update.dtype, x.dtype, [&]<class T, class X>() {
                reduce_tiles<T, X>(update, work, piece - chunk * each, last - chunk * each, rows);
            });
            piece = last;
        }
    });
}

void expand_rows(const TokendStepAdapters& adapters, int64_t product, const void* scratch, const AdapterOutput& y) {
    const auto count = [](const TokendAdapterRows& group, const TokendLowRank& update) {
        const bool scales = update.gain || update.shift;
        return num_chunks(group) * (scales ? 1 : output_tiles(update));
    };
    share(adapters, product, count, [&](int64_t index, const TokendLowRank& update, int64_t first, int64_t end) {
        const TokendAdapterRows& group = adapters.groups[index];
        const float* reduced = reduced_of(adapters, index, scratch);
        const bool scales = update.gain || update.shift;
        const int64_t all = output_tiles(update), each = scales ? 1 : all;
        for (int64_t piece = first; piece < end;) {
            const int64_t chunk = piece / each, last = std::min(end, (chunk + 1) * each);
            const RowsOfWork work = rows_of_work(group, chunk, y.memory, y.stride * bytes_of_type(y.dtype));
            const float* rows[CHUNK];
            for (int64_t i = 0; i < work.count; i++) rows[i] = reduced + (chunk * CHUNK + i) * adapters.max_rank;
            with_both(update.dtype, y.dtype, [&]<class T, class Y>() {
                if (scales) scale_outputs<Y>(update, work, 0, update.out_features);
                const int64_t from = scales ? 0 : piece - chunk * each, to = scales ? all : last - chunk * each;
                each_part(update, from, to, [&](const TokendLowRankPart& part, int64_t begin, int64_t stop) {
                    expand_tiles<T, Y>(part, work, rows, begin, stop);
                });
            });
            piece = last;
        }
    });
}

void add_row(const TokendStepAdapters& adapters, int64_t product, int64_t row, int64_t x_dtype, const void* x,
             int64_t y_dtype, void* y, float* scratch) {
    const int64_t place = adapters.places[row];
    if (place < 0) return;
    const TokendAdapterRows& group = adapters.groups[place >> 32];
    const TokendLowRank* update = group.products[product];
    if (!update) return;
    RowsOfWork work;
    work.count = 1;
    work.rows[0] = x;
    work.scales[0] = group.scales[place & 0xffffffff];
    float* reduced[1] = {scratch};
    with_both(update->dtype, x_dtype,
              [&]<class T, class X>() { reduce_tiles<T, X>(*update, work, 0, tiles(update->rank), reduced); });
    work.rows[0] = y;
    const float* rows[1] = {scratch};
    with_both(update->dtype, y_dtype, [&]<class T, class Y>() {
        if (update->gain || update->shift) scale_outputs<Y>(*update, work, 0, update->out_features);
        each_part(*update, 0, output_tiles(*update), [&](const TokendLowRankPart& part, int64_t begin, int64_t stop) {
            expand_tiles<T, Y>(part, work, rows, begin, stop);
        });
    });
}

}  // namespace tokend

using namespace tokend;

extern "C" int64_t tokend_adapters_bytes(const TokendStepAdapters* adapters) {
    int64_t rows = 0;
    for (int64_t group = 0; group < adapters->num_groups; group++) rows += adapters->groups[group].num_rows;
    return rows * adapters->max_rank * int64_t(sizeof(float));
}

extern "C" void tokend_adapters_add(const TokendAdaptersRun* run) {
    const TokendStepAdapters& adapters = *run->adapters;
    int64_t products = 0;
    for (int64_t index = 0; index < adapters.num_groups; index++)
        if (const TokendLowRank* update = adapters.groups[index].products[run->product])
            products += adapters.groups[index].num_rows * update->rank * (update->in_features + update->out_features);
    in_team(products > PARALLEL_PRODUCTS, [&] {
        reduce_rows(adapters, run->product, {run->dtype, run->x_stride, run->x}, run->scratch);
#pragma omp barrier
        expand_rows(adapters, run->product, run->scratch, {run->dtype, run->y_stride, run->y});
    });
}
