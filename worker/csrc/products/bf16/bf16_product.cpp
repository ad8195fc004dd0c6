// Products with weights of bfloat16, by tiles or by vectors, and the rows for them.
#include "products/bf16/bf16_dot.h"
#include "products/bf16/bf16_format.h"
#include "products/panel_product.h"
#include "products/tile_pair.h"

namespace tokend {
namespace {

// Contiguous rows whose inputs are padded with zeros.
struct CodesOfRows {
    int64_t inputs, stride;

    // A row has an odd number of cache lines, so that the same column of several rows falls into
    // different cache sets.
    explicit CodesOfRows(int64_t in_features)
        : inputs(whole(in_features, STEP_INPUTS)),
          stride((whole(inputs * int64_t(sizeof(Bf16Code)), 64) / 64 | 1) * 64 / int64_t(sizeof(Bf16Code))) {}
    int64_t row_bytes() const { return stride * int64_t(sizeof(Bf16Code)); }
};

#if defined(TOKEND_AMX) && defined(__AMX_BF16__)

struct Bf16Tiles {
    static constexpr int64_t FETCH_AHEAD = 8192;
    static void upper_first() { _tile_dpbf16ps(0, 4, 6); }
    static void upper_second() { _tile_dpbf16ps(1, 4, 7); }
    static void lower_first() { _tile_dpbf16ps(2, 5, 6); }
    static void lower_second() { _tile_dpbf16ps(3, 5, 7); }
};

#endif

// A weight and the rows for it, as panel_product.h has them.
class Bf16Form {
  public:
    typedef float Sum;
    static constexpr bool ALWAYS_FETCH = true;

    struct Finish {
        PairBias bias;
        Finish() = default;
        Finish(const Bf16Form&, const TokendProduct& product, int64_t first, int64_t width)
            : bias(product, first, width) {}
    };

    struct Columns {
        LineOfPair bias;

        TOKEND_INLINE explicit Columns(const Finish& finish) {
            each<LINE_VECTORS>([&](auto i) { bias[i] = load<ROW_LANES>(finish.bias.numbers + i * ROW_LANES); });
        }
        TOKEND_INLINE void values(const float* sums, int64_t, LineOfPair& to) const {
            each<LINE_VECTORS>([&](auto i) { to[i] = load<ROW_LANES>(sums + i * ROW_LANES) + bias[i]; });
        }
    };

    Bf16Form(const TokendBf16Shape& weight, const void* codes, int64_t stride)
        : weight_(weight), layout_(weight), codes_(static_cast<const Bf16Code*>(codes)), stride_(stride) {}

    int64_t num_pairs() const { return layout_.num_pairs; }
    int64_t pair_bytes() const { return layout_.pair_bytes(); }
    int64_t out_features() const { return weight_.out_features; }

    struct Strips {
        template <class Between>
        void operator()(const Bf16Form& form, int64_t pair, int64_t row, int64_t num_rows, float* sums, bool fetch,
                        Between between) {
            const uint8_t* weight = form.layout_.pair(form.weight_, pair);
            const Bf16Code* x = form.codes_ + row * form.stride_;
#if defined(TOKEND_AMX) && defined(__AMX_BF16__)
            if (allowed_) {
                const TilesOfPair tiles = {weight, weight + PANEL_STEP_BYTES, PAIR_STEP_BYTES};
                const int64_t row_bytes = form.stride_ * int64_t(sizeof(Bf16Code));
                return tiles_(tiles, form.layout_.num_steps, x, row_bytes, num_rows, sums, fetch, between);
            }
#endif
            (void)between;
            if (fetch)
                bf16_dot_pair<true>(weight, form.layout_.num_steps, x, form.stride_, num_rows, sums);
            else
                bf16_dot_pair<false>(weight, form.layout_.num_steps, x, form.stride_, num_rows, sums);
        }

#if defined(TOKEND_AMX) && defined(__AMX_BF16__)
      private:
        const bool allowed_ = tiles_allowed();
        TileStrips<Bf16Tiles> tiles_;
#endif
    };

  private:
    const TokendBf16Shape& weight_;
    const Bf16Layout layout_;
    const Bf16Code* codes_;
    const int64_t stride_;  // numbers from row to row
};

// Numbers rounded to bfloat16, as in rows.
template <class T>
TOKEND_FLATTEN void code_numbers(const T* from, int64_t count, Bf16Code* to) {
    if constexpr (std::is_same_v<T, bfloat16> && std::is_same_v<Bf16Code, bfloat16>) {
        std::copy_n(from, count, to);
        return;
    }
    constexpr int N = ROW_LANES;
    const auto some = [](F<N> numbers, Bf16Code* place) {
        bfloat16 rounded[N];
        store<N>(rounded, numbers);
        store<N>(place, load<N>(rounded));
    };
    int64_t at = 0;
    for (; at + N <= count; at += N) some(load<N>(from + at), to + at);
    if (at < count) {
        Bf16Code last[N];
        some(load_some<N>(from + at, count - at, 0.0f), last);
        std::copy_n(last, count - at, to + at);
    }
}

// The weight and the rows for it: those of the product, or their codes.
Bf16Form form_of(const TokendBf16Shape& weight, const TokendProduct& product, const void* codes) {
    const int64_t in_features = weight.in_features;
    if (bf16_rows_in_place(product.input_dtype, in_features)) return {weight, product.input, product.input_stride};
    return {weight, codes, CodesOfRows(in_features).stride};
}

}  // namespace

void multiply_bf16_part(const TokendBf16Shape& weight, const TokendProduct& product, const void* codes,
                        const ProductPart& part) {
    multiply_part(form_of(weight, product, codes), product, part);
}

bool bf16_rows_in_place(int64_t dtype, int64_t in_features) {
    return sizeof(Bf16Code) == 2 && dtype == TOKEND_BFLOAT16 && in_features % STEP_INPUTS == 0;
}

void code_bf16_row(int64_t dtype, int64_t in_features, int64_t row, const void* x, void* codes) {
    const CodesOfRows rows(in_features);
    Bf16Code* to = static_cast<Bf16Code*>(codes) + row * rows.stride;
    if (dtype == 0)
        code_numbers(static_cast<const float*>(x), in_features, to);
    else
        code_numbers(static_cast<const bfloat16*>(x), in_features, to);
    std::fill(to + in_features, to + rows.inputs, Bf16Code{});
}

}  // namespace tokend

using namespace tokend;

extern "C" int64_t tokend_bf16_code_bytes(int64_t num_rows, int64_t in_features) {
    return num_rows * CodesOfRows(in_features).row_bytes();
}

extern "C" void tokend_bf16_coded_product(const TokendBf16Shape* weight, const TokendProduct* product, const void* codes) {
    const Bf16Form form = form_of(*weight, *product, codes);
    in_team(worth_threads(product->num_rows, weight->in_features, weight->out_features),
            [&] { multiply_share(form, *product); });
}

extern "C" void tokend_bf16_product(const TokendBf16Shape* weight, const TokendProduct* product) {
    const int64_t in_features = weight->in_features, num_rows = product->num_rows;
    if (bf16_rows_in_place(product->input_dtype, in_features))
        return tokend_bf16_coded_product(weight, product, nullptr);
    void* codes = own_codes(tokend_bf16_code_bytes(num_rows, in_features));
    const int64_t row_bytes = product->input_stride * (product->input_dtype == 0 ? 4 : 2);
#pragma omp parallel if (worth_threads(num_rows, in_features, weight->out_features))
    {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < num_rows; row++) {
            const char* x = static_cast<const char*>(product->input) + row * row_bytes;
            code_bf16_row(product->input_dtype, in_features, row, x, codes);
        }
        tokend_bf16_coded_product(weight, product, codes);
    }
}
