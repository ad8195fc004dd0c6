// A mixture of experts for some rows, by one team of threads.
//
//   score | choose | sort | prepare | gate_up of all experts | gate, prepare | down of all experts | add
//
// with a barrier at each line. A pair is a row and one of its experts; pairs are sorted by expert:
//
//   pairs   | expert 2: rows 0 3 | expert 5: row 1 | expert 7: rows 0 1 3 |
#include "layers/moe.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "common/row_vectors.h"
#include "layers/row_parts.h"
#include "layers/run_memory.h"
#include "products/weight_formats.h"

namespace tokend {
namespace {

constexpr int N = ROW_LANES;
// Rows that read a router's weight together.
constexpr int SCORED_ROWS = 4;
// Rows with which multiplying a weight takes as long as reading it from memory.
constexpr int64_t ROWS_OF_READING = 4;
constexpr float LEAST_SUM = 1e-20f;

// Rows that experts of one size compute, and the memory of their results.
struct Lane {
    int64_t inner_size = 0;
    int64_t num_rows = 0;
    Rows input;  // copies, for products that read them in place
    Rows gate_up, inner;
    Rows output;  // float32
    void* prepared = nullptr;  // rows of input, then of inner, for products that do not read them in place

    Lane() = default;
    Lane(const TokendExpert& expert, int64_t hidden_size, int64_t inner, int64_t dtype, int64_t rows, RunMemory& memory)
        : inner_size(inner), num_rows(rows) {
        const int64_t width = bytes_of(dtype);
        const TokendProductKernels &first = *expert.gate_up.parts->kernels, &second = *expert.down.parts->kernels;
        if (!first.needs_prepared_input(expert.gate_up.parts->format, dtype, hidden_size))
            input = memory.input_rows(rows, hidden_size * width);
        gate_up = memory.rows(rows, 2 * inner * width);
        this->inner = memory.input_rows(rows, inner * width);
        output = memory.rows(rows, hidden_size * int64_t(sizeof(float)));
        prepared = memory.take(
            std::max(first.max_prepared_bytes(rows, hidden_size), second.max_prepared_bytes(rows, inner)));
    }
};

struct MoeSpace {
    Rows logits, choice;  // float32 [num_experts]; logits become scores
    int32_t* chosen;      // [num_rows, top_k]
    float* weights;       // [num_rows, top_k]
    float* shared_weights;
    int64_t* pair_of;     // [num_rows, top_k], -1 if another rank has the expert
    int64_t* first_pair;  // of each expert of this rank; then their number
    int64_t* row_of;      // of each pair
    Lane routed, shared;
    RunMemory memory;

    MoeSpace(const TokendMoe& moe, int64_t dtype, int64_t num_rows, void* scratch) : memory(scratch) {
        const int64_t pairs = num_rows * moe.router.top_k, row_bytes = moe.router.num_experts * int64_t(sizeof(float));
        logits = memory.rows(num_rows, row_bytes);
        choice = memory.rows(num_rows, row_bytes);
        chosen = memory.array<int32_t>(pairs);
        weights = memory.array<float>(pairs);
        shared_weights = memory.array<float>(num_rows);
        pair_of = memory.array<int64_t>(pairs);
        first_pair = memory.array<int64_t>(moe.end_expert - moe.first_expert + 1);
        row_of = memory.array<int64_t>(pairs);
        routed = Lane(*moe.experts, moe.hidden_size, moe.inner_size, dtype, pairs, memory);
        if (moe.shared_size) shared = Lane(moe.shared, moe.hidden_size, moe.shared_size, dtype, num_rows, memory);
    }
};

// sums[row] = row . weight; each sum is the same for any number of rows.
template <int ROWS, class T>
TOKEND_FLATTEN void dot_rows(const T* const (&x)[ROWS], const float* weight, int64_t size, float (&sums)[ROWS]) {
    F<N> total[ROWS][2] = {};
    int64_t at = 0;
    for (; at + 2 * N <= size; at += 2 * N)
        each<2>([&](auto half) {
            const F<N> part = load<N>(weight + at + half * N);
            each<ROWS>([&](auto row) {
                total[row][half] = multiply_add<N>(load<N>(x[row] + at + half * N), part, total[row][half]);
            });
        });
    for (; at < size; at += N) {
        const int64_t rest = std::min<int64_t>(size - at, N);
        const F<N> part = load_some<N>(weight + at, rest, 0.0f);
        each<ROWS>([&](auto row) {
            total[row][0] = multiply_add<N>(load_some<N>(x[row] + at, rest, 0.0f), part, total[row][0]);
        });
    }
    each<ROWS>([&](auto row) { sums[row] = sum_lanes<N>(total[row][0] + total[row][1]); });
}

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// The work of one thread.
class MoeTeam {
  public:
    MoeTeam(const TokendMoe& moe, const TokendMoeRun& run, const MoeSpace& space)
        : moe_(moe), router_(moe.router), run_(run), space_(space) {}

    void run() {
#pragma omp barrier
        score();
#pragma omp barrier
        each_row([&](int64_t row) { choose(row); });
#pragma omp barrier
#pragma omp single
        sort();
        const int64_t pairs = space_.first_pair[num_experts()];
        each(pairs, [&](int64_t pair) { prepare_input(*moe_.experts, space_.routed, pair, space_.row_of[pair]); });
        if (moe_.shared_size) each_row([&](int64_t row) { prepare_input(moe_.shared, space_.shared, row, row); });
#pragma omp barrier
        multiply(&TokendExpert::gate_up, &Lane::input, &Lane::gate_up, run_.dtype);
#pragma omp barrier
        each(pairs, [&](int64_t pair) {
            if (run_.adapters) {
                const int64_t* ends = space_.first_pair + 1;
                const int64_t expert = std::upper_bound(ends, ends + num_experts(), pair) - ends;
                adapt_gate_up(moe_.experts[expert], space_.routed, pair, space_.row_of[pair]);
            }
            gate(*moe_.experts, space_.routed, pair);
        });
        if (moe_.shared_size)
            each_row([&](int64_t row) {
                if (run_.adapters) adapt_gate_up(moe_.shared, space_.shared, row, row);
                gate(moe_.shared, space_.shared, row);
            });
#pragma omp barrier
        multiply(&TokendExpert::down, &Lane::inner, &Lane::output, TOKEND_FLOAT32);
#pragma omp barrier
        with_type(run_.dtype, [&]<class T>(T*) {
            each_row([&](int64_t row) {
                if (run_.adapters) adapt_outputs(row);
                add<T>(row);
            });
        });
    }

  private:
    template <class Body>
    void each(int64_t count, Body body) {
#pragma omp for schedule(static) nowait
        for (int64_t index = 0; index < count; index++) body(index);
    }

    // The same rows always go to the same thread, as in stack.cpp.
    template <class Body>
    void each_row(Body body) {
        each(run_.num_rows, body);
    }

    int64_t num_experts() const { return moe_.end_expert - moe_.first_expert; }

    template <class T = void>
    const T* input(int64_t row) const {
        return reinterpret_cast<const T*>(static_cast<const char*>(run_.input) + row * run_.input_stride);
    }

    float* logits(int64_t row) const { return static_cast<float*>(space_.logits.row(row)); }

    void score() {
        const int64_t blocks = (run_.num_rows + SCORED_ROWS - 1) / SCORED_ROWS;
        const int64_t dots = router_.num_experts + (moe_.shared_gate ? 1 : 0);
        with_type(run_.dtype, [&]<class T>(T*) {
            each(blocks * dots, [&](int64_t task) {
                const int64_t first = task / dots * SCORED_ROWS, last = std::min(first + SCORED_ROWS, run_.num_rows);
                if (last - first == SCORED_ROWS) return dots_of<SCORED_ROWS, T>(first, task % dots);
                for (int64_t row = first; row < last; row++) dots_of<1, T>(row, task % dots);
            });
        });
    }

    // The logits of an expert, or what the shared experts are multiplied by.
    template <int ROWS, class T>
    void dots_of(int64_t first, int64_t expert) {
        const bool is_shared = expert == router_.num_experts;
        const float* weight = is_shared ? moe_.shared_gate : router_.weight + expert * moe_.hidden_size;
        const T* x[ROWS];
        for (int row = 0; row < ROWS; row++) x[row] = input<T>(first + row);
        float sums[ROWS];
        dot_rows<ROWS, T>(x, weight, moe_.hidden_size, sums);
        for (int row = 0; row < ROWS; row++) {
            if (is_shared)
                space_.shared_weights[first + row] = sigmoid(sums[row]);
            else
                logits(first + row)[expert] = sums[row] + (router_.bias ? router_.bias[expert] : 0.0f);
        }
    }

    void choose(int64_t row) {
        const int64_t count = router_.num_experts, top_k = router_.top_k;
        float* scores = logits(row);
        float* choice = static_cast<float*>(space_.choice.row(row));
        if (router_.scoring == TOKEND_SOFTMAX) {
            const float largest = *std::max_element(scores, scores + count);
            float sum = 0.0f;
            for (int64_t i = 0; i < count; i++) sum += scores[i] = std::exp(scores[i] - largest);
            for (int64_t i = 0; i < count; i++) scores[i] /= sum;
        } else {
            for (int64_t i = 0; i < count; i++) scores[i] = sigmoid(scores[i]);
        }
        for (int64_t i = 0; i < count; i++)
            choice[i] = scores[i] + (router_.selection_bias ? router_.selection_bias[i] : 0.0f);
        if (router_.num_groups > 1) keep_best_groups(choice);
        int32_t* chosen = space_.chosen + row * top_k;
        float* weights = space_.weights + row * top_k;
        float sum = 0.0f;
        for (int64_t slot = 0; slot < top_k; slot++) {
            chosen[slot] = int32_t(take_best(choice, count));
            sum += weights[slot] = scores[chosen[slot]];
        }
        const float factor = router_.normalises ? float(router_.scale) / std::max(sum, LEAST_SUM) : float(router_.scale);
        for (int64_t slot = 0; slot < top_k; slot++) weights[slot] *= factor;
        if (run_.chosen) std::copy_n(chosen, top_k, run_.chosen + row * top_k);
    }

    // Returns the index of the largest number that was not taken, and takes it. NaN counts least.
    static int64_t take_best(float* numbers, int64_t count) {
        int64_t best = -1;
        for (int64_t i = 0; i < count; i++)
            if (!is_taken(numbers[i]) && (best < 0 || numbers[i] > numbers[best] || std::isnan(numbers[best]))) best = i;
        numbers[best] = bit_cast<float>(TAKEN);
        return best;
    }

    // A NaN of its own, which no arithmetic gives.
    static constexpr uint32_t TAKEN = 0xffc0dead;
    static bool is_taken(float number) { return bit_cast<uint32_t>(number) == TAKEN; }

    // Sets the scores outside of the best groups below all others.
    void keep_best_groups(float* choice) const {
        const int64_t size = router_.num_experts / router_.num_groups;
        const auto rank = [&](int64_t group) {
            float best[2] = {-INFINITY, -INFINITY};
            for (int64_t i = group * size; i < (group + 1) * size; i++) {
                if (choice[i] > best[0]) best[1] = best[0], best[0] = choice[i];
                else if (choice[i] > best[1]) best[1] = choice[i];
            }
            return router_.best_of_group == 1 ? best[0] : best[0] + best[1];
        };
        // A group is kept if fewer than top_groups others are better; of equal ones the first.
        uint64_t kept = 0;
        for (int64_t group = 0; group < router_.num_groups; group++) {
            const float own = rank(group);
            int64_t better = 0;
            for (int64_t other = 0; other < router_.num_groups; other++) {
                const float theirs = rank(other);
                better += theirs > own || (theirs == own && other < group);
            }
            kept |= uint64_t(better < router_.top_groups) << group;
        }
        for (int64_t i = 0; i < router_.num_experts; i++)
            if (!(kept >> (i / size) & 1)) choice[i] = -INFINITY;
    }

    // Counts the pairs of each expert, then gives each pair its place.
    void sort() {
        const int64_t count = run_.num_rows * router_.top_k, experts = num_experts();
        int64_t* ends = space_.first_pair;
        std::fill_n(ends, experts + 1, 0);
        const auto own = [&](int64_t at) { return space_.chosen[at] - moe_.first_expert; };
        for (int64_t at = 0; at < count; at++)
            if (own(at) >= 0 && own(at) < experts) ends[own(at)]++;
        for (int64_t expert = 1; expert <= experts; expert++) ends[expert] += ends[expert - 1];
        for (int64_t at = count - 1; at >= 0; at--) {
            const bool is_own = own(at) >= 0 && own(at) < experts;
            space_.pair_of[at] = is_own ? --ends[own(at)] : -1;
            if (is_own) space_.row_of[space_.pair_of[at]] = at / router_.top_k;
        }
    }

    // Prepares a row of the input for the first products of an expert, or copies it where they read it in place.
    void prepare_input(const TokendExpert& expert, const Lane& lane, int64_t lane_row, int64_t row) {
        if (lane.input.memory)
            std::copy_n(static_cast<const char*>(input(row)), moe_.hidden_size * bytes_of(run_.dtype),
                        static_cast<char*>(lane.input.row(lane_row)));
        else
            prepare_row(expert.gate_up, lane, moe_.hidden_size, lane_row, input(row));
    }

    void prepare_row(const TokendStackLinear& linear, const Lane& lane, int64_t size, int64_t lane_row, const void* x) {
        const TokendLinearPart& part = *linear.parts;
        part.kernels->prepare_input_row(part.format, run_.dtype, size, lane.num_rows, lane_row, x, lane.prepared);
    }

    void gate(const TokendExpert& expert, const Lane& lane, int64_t lane_row) {
        gate_row(moe_.gate, 1, run_.dtype, lane.inner_size, lane.gate_up.row(lane_row), lane.inner.row(lane_row));
        const TokendLinearPart& down = *expert.down.parts;
        if (down.kernels->needs_prepared_input(down.format, run_.dtype, lane.inner_size))
            prepare_row(expert.down, lane, lane.inner_size, lane_row, lane.inner.row(lane_row));
    }

    // Adds the adapter of a row to the first products of an expert.
    void adapt_gate_up(const TokendExpert& expert, const Lane& lane, int64_t lane_row, int64_t row) {
        if (expert.gate_up.product < 0) return;
        add_row(*run_.adapters, expert.gate_up.product, row, run_.dtype, input(row), run_.dtype,
                lane.gate_up.row(lane_row), reduced());
    }

    // The same of the outputs of all experts of a row.
    void adapt_outputs(int64_t row) {
        const auto adapt = [&](const TokendExpert& expert, const Lane& lane, int64_t lane_row) {
            if (expert.down.product < 0) return;
            add_row(*run_.adapters, expert.down.product, row, run_.dtype, lane.inner.row(lane_row), TOKEND_FLOAT32,
                    lane.output.row(lane_row), reduced());
        };
        for (int64_t at = row * router_.top_k; at < (row + 1) * router_.top_k; at++)
            if (space_.pair_of[at] >= 0)
                adapt(moe_.experts[space_.chosen[at] - moe_.first_expert], space_.routed, space_.pair_of[at]);
        if (moe_.shared_size) adapt(moe_.shared, space_.shared, row);
    }

    float* reduced() {
        reduced_.resize(size_t(run_.adapters->max_rank));
        return reduced_.data();
    }

    // Calls body with each expert that has rows: body(expert, lane, first row, number of rows).
    template <class Body>
    void each_group(Body body) {
        for (int64_t expert = 0; expert < num_experts(); expert++) {
            const int64_t first = space_.first_pair[expert], count = space_.first_pair[expert + 1] - first;
            if (count) body(moe_.experts[expert], space_.routed, first, count);
        }
        if (moe_.shared_size) body(moe_.shared, space_.shared, 0, run_.num_rows);
    }

    // Threads [first, end) of a team, and their share of the outputs of a weight.
    struct ThreadGroup {
        int64_t first, end, threads;
        int64_t first_panel(int64_t panels) const { return panels * first / threads; }
        int64_t num_panels(int64_t panels) const { return panels * end / threads - first_panel(panels); }
    };

    ThreadGroup group_of(int64_t thread, int64_t threads) const {
        const int64_t count = moe_.num_thread_groups, *ends = moe_.thread_group_ends;
        if (count == 0 || ends[count - 1] != threads) return {0, threads, threads};
        const int64_t* end = std::upper_bound(ends, ends + count, thread);
        return {end == ends ? 0 : end[-1], *end, threads};
    }

    // Products of all experts; the thread computes a range of the panels of its group, counted
    // through all of them.
    void multiply(TokendStackLinear TokendExpert::*product, Rows Lane::*from, Rows Lane::*to, int64_t output_dtype) {
        const auto panels_of = [](const TokendLinearPart& part) {
            return (part.out_features + SHARE_OUTPUTS - 1) / SHARE_OUTPUTS;
        };
        const auto cost_of = [](const TokendStackLinear& linear, int64_t count) {
            return (count + ROWS_OF_READING) * ((linear.in_features + SHARE_OUTPUTS - 1) / SHARE_OUTPUTS);
        };
        const ThreadGroup group = group_of(omp_get_thread_num(), omp_get_num_threads());
        int64_t total = 0;
        each_group([&](const TokendExpert& expert, const Lane&, int64_t, int64_t count) {
            const TokendStackLinear& linear = expert.*product;
            for (int64_t i = 0; i < linear.num_parts; i++)
                total += group.num_panels(panels_of(linear.parts[i])) * cost_of(linear, count);
        });
        const int64_t thread = omp_get_thread_num() - group.first, threads = group.end - group.first;
        const int64_t begin = total * thread / threads, end = total * (thread + 1) / threads;
        int64_t at = 0;
        each_group([&](const TokendExpert& expert, const Lane& lane, int64_t first, int64_t count) {
            const TokendStackLinear& linear = expert.*product;
            const int64_t cost = cost_of(linear, count);
            char* output = (lane.*to).memory;
            for (int64_t i = 0; i < linear.num_parts; i++) {
                const TokendLinearPart& part = linear.parts[i];
                const int64_t panels = group.num_panels(panels_of(part)), before = group.first_panel(panels_of(part));
                // The first panel that begins at or after a place in the work of all.
                const auto panel_at = [&](int64_t place) {
                    return std::clamp<int64_t>((place - at + cost - 1) / cost, 0, panels);
                };
                const int64_t first_panel = begin > at ? panel_at(begin) : 0, end_panel = end > at ? panel_at(end) : 0;
                if (first_panel < end_panel)
                    part.kernels->multiply_share(
                        part, {run_.dtype, lane.num_rows, first, count, rows_of(lane.*from, run_.dtype), lane.prepared,
                               output_dtype, {(lane.*to).stride / bytes_of(output_dtype), output},
                               before + first_panel, before + end_panel});
                at += panels * cost;
                output += part.out_features * bytes_of(output_dtype);
            }
        });
    }

    static RowsOf rows_of(const Rows& rows, int64_t dtype) { return {rows.stride / bytes_of(dtype), rows.memory}; }

    // Adds the outputs of a row's experts, then those of the shared ones.
    template <class T>
    TOKEND_FLATTEN void add(int64_t row) {
        const int64_t size = moe_.hidden_size, top_k = router_.top_k;
        T* output = reinterpret_cast<T*>(static_cast<char*>(run_.output) + row * run_.output_stride);
        const float shared_weight = moe_.shared_gate ? space_.shared_weights[row] : 1.0f;
        for (int64_t at = 0; at < size; at += N) {
            const int64_t count = std::min<int64_t>(size - at, N);
            F<N> total{};
            const auto add_one = [&](const Lane& lane, int64_t lane_row, float weight) {
                const float* from = static_cast<const float*>(lane.output.row(lane_row)) + at;
                const F<N> summand = count == N ? load<N>(from) : load_some<N>(from, count, 0.0f);
                total = multiply_add<N>(splat<N>(weight), summand, total);
            };
            for (int64_t slot = row * top_k; slot < (row + 1) * top_k; slot++)
                if (space_.pair_of[slot] >= 0) add_one(space_.routed, space_.pair_of[slot], space_.weights[slot]);
            if (moe_.shared_size) add_one(space_.shared, row, shared_weight);
            if (run_.adds) total += count == N ? load<N>(output + at) : load_some<N>(output + at, count, 0.0f);
            if (count == N) store<N>(output + at, total);
            else store_some<N>(output + at, count, total);
        }
    }

    const TokendMoe& moe_;
    const TokendRouter& router_;
    const TokendMoeRun& run_;
    const MoeSpace& space_;
    std::vector<float> reduced_;
};

}  // namespace
}  // namespace tokend

extern "C" int64_t tokend_moe_bytes(const TokendMoe* moe, int64_t dtype, int64_t num_rows) {
    return tokend::MoeSpace(*moe, dtype, num_rows, nullptr).memory.num_bytes();
}

extern "C" void tokend_moe_run(const TokendMoe* moe, const TokendMoeRun* run) {
    const tokend::MoeSpace space(*moe, run->dtype, run->num_rows, run->scratch);
    if (omp_get_level() > 0) return tokend::MoeTeam(*moe, *run, space).run();
#pragma omp parallel
    tokend::MoeTeam(*moe, *run, space).run();
}
