// Top-k, top-p and min-p on rows of logits, without sorting a vocabulary.
//
// Tokens are ranked by score, ties by lower id, and every filter keeps a prefix of
// that order, so the result of a filter is one cut: the last token that it keeps. Top-k and top-p
// find it in a histogram over the distance to the best score and sort only the bin in which the
// count, or the probability, is reached.
#include "common/simd.h"
#include "sampling/sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>


namespace tokend {
namespace {

constexpr int N = 8;
constexpr int BINS = 2048;
constexpr float BINS_PER_UNIT = 32.0f;
constexpr float NEVER = -std::numeric_limits<float>::infinity();

// The last token kept.
struct Cut {
    float score = NEVER;
    int64_t token = std::numeric_limits<int64_t>::max();

    bool keeps(float other, int64_t id) const { return other > score || (other == score && id <= token); }
};

// Memory of one thread, kept between calls; entries past the vocabulary fill a vector.
struct Scratch {
    std::vector<float> scores;
    std::vector<int32_t> bins;
};

// One row: scores = logits / temperature, and the remaining tokens.
class Row {
  public:
    Row(const float* logits, int64_t vocab_size, float temperature, Scratch& scratch)
        : size_(vocab_size), padded_((vocab_size + N - 1) / N * N), scores_(scratch.scores), bins_(scratch.bins) {
        scores_.assign(padded_, NEVER);
        bins_.resize(padded_);
        std::copy_n(logits, size_, scores_.begin());
        F<N> largest = splat<N>(NEVER);
        for (int64_t id = 0; id < padded_; id += N) {
            const F<N> score = load<N>(&scores_[id]) / temperature;
            store<N>(&scores_[id], score);
            largest = maximum<N>(largest, score);
        }
        best_ = max_lanes<N>(largest);
        for (int64_t id = 0; id < padded_; id += N) {
            const F<N> distance = (best_ - load<N>(&scores_[id])) * BINS_PER_UNIT;
            const F<N> last = splat<N>(float(BINS - 1));
            const auto bin = __builtin_convertvector(distance < last ? distance : last, typename Vec<N>::I);
            __builtin_memcpy(&bins_[id], &bin, sizeof(bin));
        }
    }

    void min_p(float p) {
        const double least = double(best_) + std::log(double(p));
        // The smallest float that is not below the limit; ties at the limit are kept.
        float score = float(least);
        if (double(score) < least) score = std::nextafter(score, std::numeric_limits<float>::infinity());
        cut_ = {score, std::numeric_limits<int64_t>::max()};
    }

    void top_k(int64_t k) {
        std::vector<int64_t> counts(BINS);
        for (int64_t id = 0; id < size_; id++) counts[bins_[id]] += cut_.keeps(scores_[id], id);
        int64_t before = 0;
        for (int index = 0; index < BINS; before += counts[index++]) {
            if (before + counts[index] < k) continue;
            const auto members = sorted_members(index);
            const auto& [score, token] = members[k - before - 1];
            cut_ = {score, token};
            return;
        }
    }

    void top_p(float p) {
        std::vector<double> sums(BINS);
        for (int64_t id = 0; id < padded_; id += N) add_weights(id, sums);
        double total = 0.0;
        for (const double sum : sums) total += sum;
        double before = 0.0;
        for (int index = 0; index < BINS; before += sums[index++]) {
            if (before + sums[index] < double(p) * total) continue;
            for (const auto& [score, token] : sorted_members(index)) {
                cut_ = {score, token};
                before += std::exp(double(score) - double(best_));
                if (before >= double(p) * total) return;
            }
            return;
        }
    }

    void mask(float* logits) const {
        for (int64_t id = 0; id < size_; id++)
            if (!cut_.keeps(scores_[id], id)) logits[id] = NEVER;
    }

  private:
    // Remaining tokens of one bin, in order.
    std::vector<std::pair<float, int64_t>> sorted_members(int index) const {
        std::vector<std::pair<float, int64_t>> members;
        for (int64_t id = 0; id < size_; id++)
            if (bins_[id] == index && cut_.keeps(scores_[id], id)) members.emplace_back(scores_[id], id);
        std::sort(members.begin(), members.end(), [](const auto& a, const auto& b) {
            return a.first > b.first || (a.first == b.first && a.second < b.second);
        });
        return members;
    }

    // Adds unnormalised probabilities of tokens [from, from + N) to their bins.
    void add_weights(int64_t from, std::vector<double>& sums) const {
        float weights[N];
        store<N>(weights, exp_nonpositive<N>(load<N>(&scores_[from]) - best_));
        for (int64_t id = from; id < from + N; id++)
            if (cut_.keeps(scores_[id], id)) sums[bins_[id]] += weights[id - from];
    }

    int64_t size_;
    int64_t padded_;
    std::vector<float>& scores_;
    std::vector<int32_t>& bins_;
    float best_;
    Cut cut_;
};

void filter_row(float* logits, int64_t vocab_size, const RowParams& params) {
    static thread_local Scratch scratch;
    Row row(logits, vocab_size, params.temperature, scratch);
    if (params.min_p > 0.0f) row.min_p(params.min_p);
    if (params.top_k > 0) row.top_k(params.top_k);
    if (params.top_p < 1.0f) row.top_p(params.top_p);
    row.mask(logits);
}

}  // namespace
}  // namespace tokend

extern "C" void tokend_filter(float* logits, int64_t row_stride, int64_t vocab_size, int64_t num_rows,
                              const int64_t* rows, const tokend::RowParams* params) {
#pragma omp parallel for schedule(dynamic, 1) if (num_rows > 1)
    for (int64_t i = 0; i < num_rows; i++)
        tokend::filter_row(logits + rows[i] * row_stride, vocab_size, params[i]);
}
