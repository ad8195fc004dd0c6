// Products with weights of bfloat16, by tiles or by vectors, and the rows for them.
#include "products/bf16/bf16_sums.h"

namespace tokend {
namespace {

// Contiguous rows whose inputs are padded with zeros.
struct PreparedRows {
    int64_t inputs, stride;

    // A row has an odd number of cache lines, so that the same column of several rows falls into
    // different cache sets.
    explicit PreparedRows(int64_t in_features)
        : inputs(whole(in_features, STEP_INPUTS)),
          stride((whole(inputs * int64_t(sizeof(Bf16Input)), 64) / 64 | 1) * 64 / int64_t(sizeof(Bf16Input))) {}
    int64_t row_bytes() const { return stride * int64_t(sizeof(Bf16Input)); }
};

// A weight and the rows for it, as panel_product.h has them.
class Bf16Form {
  public:
    typedef float Sum;
    static constexpr bool ALWAYS_FETCH = true;
    typedef BiasedSums Finish;
    typedef BiasedSums::Columns Columns;

    Bf16Form(const TokendBf16Shape& weight, const RowsOfBf16& rows) : weight_(weight), layout_(weight), rows_(rows) {}

    int64_t num_pairs() const { return layout_.num_pairs; }
    int64_t pair_bytes() const { return layout_.pair_bytes(); }
    int64_t out_features() const { return weight_.out_features; }

    struct Strips {
        template <class Between>
        void operator()(const Bf16Form& form, int64_t pair, int64_t row, int64_t num_rows, float* sums, PairFetch fetch,
                        Between between) {
            const Bf16Input* x = form.rows_.first + row * form.rows_.stride;
            strips_(form.layout_.pair(form.weight_, pair), form.layout_.num_steps, x, form.rows_.stride, num_rows, sums,
                    fetch, between);
        }

      private:
        Bf16Strips strips_;
    };

  private:
    const TokendBf16Shape& weight_;
    const Bf16Layout layout_;
    const RowsOfBf16 rows_;
};

// Numbers rounded to bfloat16, as in rows.
template <class T>
TOKEND_FLATTEN void round_numbers(const T* from, int64_t count, Bf16Input* to) {
    if constexpr (std::is_same_v<T, bfloat16> && std::is_same_v<Bf16Input, bfloat16>) {
        std::copy_n(from, count, to);
        return;
    }
    constexpr int N = ROW_LANES;
    const auto some = [](F<N> numbers, Bf16Input* place) {
        bfloat16 rounded[N];
        store<N>(rounded, numbers);
        store<N>(place, load<N>(rounded));
    };
    int64_t at = 0;
    for (; at + N <= count; at += N) some(load<N>(from + at), to + at);
    if (at < count) {
        Bf16Input last[N];
        some(load_some<N>(from + at, count - at, 0.0f), last);
        std::copy_n(last, count - at, to + at);
    }
}

}  // namespace

void multiply_bf16_part(const TokendBf16Shape& weight, const TokendProduct& product, const void* prepared,
                        const ProductPart& part) {
    multiply_part(Bf16Form(weight, rows_of_bf16(product, weight.in_features, prepared)), product, part);
}

bool bf16_rows_in_place(int64_t dtype, int64_t in_features) {
    return sizeof(Bf16Input) == 2 && dtype == TOKEND_BFLOAT16 && in_features % STEP_INPUTS == 0;
}

void prepare_bf16_row(int64_t dtype, int64_t in_features, int64_t row, const void* x, void* prepared) {
    const PreparedRows rows(in_features);
    Bf16Input* to = static_cast<Bf16Input*>(prepared) + row * rows.stride;
    if (dtype == 0)
        round_numbers(static_cast<const float*>(x), in_features, to);
    else
        round_numbers(static_cast<const bfloat16*>(x), in_features, to);
    std::fill(to + in_features, to + rows.inputs, Bf16Input{});
}

}  // namespace tokend

using namespace tokend;

extern "C" int64_t tokend_bf16_prepared_bytes(int64_t num_rows, int64_t in_features) {
    return num_rows * PreparedRows(in_features).row_bytes();
}

extern "C" void tokend_bf16_prepared_product(
    const TokendBf16Shape* weight, const TokendProduct* product, const void* prepared) {
    const Bf16Form form(*weight, rows_of_bf16(*product, weight->in_features, prepared));
    in_team(worth_threads(product->num_rows, weight->in_features, weight->out_features),
            [&] { multiply_share(form, *product); });
}

extern "C" void tokend_bf16_product(const TokendBf16Shape* weight, const TokendProduct* product) {
    with_prepared_rows(*product, weight->in_features, weight->out_features, [&](const void* prepared) {
        tokend_bf16_prepared_product(weight, product, prepared);
    });
}
