// Products with rotated weights, by tiles or by vectors: integer sums and what numbers they are.
#include "products/panel_product.h"
#include "products/rotated/rotated_dot.h"
#include "products/rotated/rotated_format.h"
#include "products/tile_pair.h"

#if defined(TOKEND_AMX) && defined(__AMX_INT8__)

namespace tokend {

// Integer products of up to 32 rows with the 32 outputs of a pair of panels, by tiles.
//
// A tile of a weight is 16 groups x 16 outputs x 4 inputs, one of rows 16 rows x 64 inputs; the
// sums are those of rotated_dot.h.
struct RotatedTiles {
    static constexpr int64_t FETCH_AHEAD = 4096;
    static void upper_first() { _tile_dpbsud(0, 4, 6); }
    static void upper_second() { _tile_dpbsud(1, 4, 7); }
    static void lower_first() { _tile_dpbsud(2, 5, 6); }
    static void lower_second() { _tile_dpbsud(3, 5, 7); }
};

}  // namespace tokend

#endif

namespace tokend {
namespace {

// A weight and the codes of rows, as panel_product.h has them.
class RotatedForm {
  public:
    typedef int32_t Sum;
    static constexpr bool ALWAYS_FETCH = false;

    struct Finish {
        alignas(64) float scales[PAIR_OUTPUTS];
        PairBias bias;
        const RowFacts* facts;

        Finish() = default;
        Finish(const RotatedForm& form, const TokendProduct& product, int64_t first, int64_t width)
            : bias(product, first, width), facts(form.facts_) {
            std::copy_n(form.layout_.scales(form.weight_) + first, PAIR_OUTPUTS, scales);
        }
    };

    struct Columns {
        LineOfPair scales, bias;
        const RowFacts* facts;

        TOKEND_INLINE explicit Columns(const Finish& finish) : facts(finish.facts) {
            each<LINE_VECTORS>([&](auto i) {
                scales[i] = load<DOT_LANES>(finish.scales + i * DOT_LANES);
                bias[i] = load<DOT_LANES>(finish.bias.numbers + i * DOT_LANES);
            });
        }
        TOKEND_INLINE void values(const int32_t* sums, int64_t row, LineOfPair& to) const {
            const DotF scale = splat<DOT_LANES>(facts[row].scale);
            const DotI start = splat_int(DotWeight::OFFSET ? facts[row].start : 0);
            each<LINE_VECTORS>([&](auto i) {
                const DotI sum = load_bytes<DotI>(sums + i * DOT_LANES) + start;
                to[i] = fused(to_floats(sum), scale * scales[i], bias[i]);
            });
        }
    };

    RotatedForm(const TokendRotatedShape& weight, int64_t num_rows, void* codes)
        : weight_(weight), layout_(weight), rows_(num_rows, weight.in_features), codes_(rows_.codes(codes, 0)),
          facts_(rows_.facts(codes)) {}

    int64_t num_pairs() const { return layout_.num_pairs(); }
    int64_t pair_bytes() const { return 2 * layout_.panel_bytes; }
    int64_t out_features() const { return weight_.out_features; }

    struct Strips {
        template <class Between>
        void operator()(const RotatedForm& form, int64_t pair, int64_t row, int64_t num_rows, int32_t* sums,
                        [[maybe_unused]] PairFetch fetch, [[maybe_unused]] Between between) {
            const RotatedLayout& layout = form.layout_;
            const uint8_t* weight = layout.panel(form.weight_, 2 * pair);
            const int64_t stride = form.rows_.stride;
            const int8_t* x = form.codes_ + row * stride;
#if defined(TOKEND_AMX) && defined(__AMX_INT8__)
            if (allowed_) {
                const TilesOfPair tiles = {weight, weight + layout.panel_bytes, TILE_BYTES};
                return tiles_(tiles, layout.inputs / DEPTH, x, stride, num_rows, sums, fetch.lines, between);
            }
#endif
            dot_pair(weight, layout.panel_bytes, layout.inputs, x, stride, num_rows, sums);
        }

#if defined(TOKEND_AMX) && defined(__AMX_INT8__)
      private:
        const bool allowed_ = tiles_allowed();
        TileStrips<RotatedTiles> tiles_;
#endif
    };

  private:
    const TokendRotatedShape& weight_;
    const RotatedLayout layout_;
    const CodesLayout rows_;
    const int8_t* codes_;
    const RowFacts* facts_;
};

void multiply(const TokendRotatedShape& weight, const TokendProduct& product, void* codes) {
    multiply_share(RotatedForm(weight, product.num_rows, codes), product);
}

bool worth_threads(const TokendRotatedShape& weight, int64_t num_rows) {
    return tokend::worth_threads(num_rows, weight.in_features, weight.out_features);
}

}  // namespace

void multiply_rotated_part(const TokendRotatedShape& weight, const TokendProduct& product, const void* codes,
                           const ProductPart& part) {
    multiply_part(RotatedForm(weight, product.num_rows, const_cast<void*>(codes)), product, part);
}

}  // namespace tokend

using namespace tokend;

extern "C" void tokend_coded_product(const TokendRotatedShape* weight, const TokendProduct* product, const void* codes) {
    in_team(worth_threads(*weight, product->num_rows),
            [&] { multiply(*weight, *product, const_cast<void*>(codes)); });
}

extern "C" void tokend_rotated_product(const TokendRotatedShape* weight, const TokendProduct* product) {
    const int64_t in_features = weight->in_features;
    const CodesLayout layout(product->num_rows, in_features);
    void* codes = thread_memory(layout.bytes());
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
