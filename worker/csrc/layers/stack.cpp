// The layers of a decoder, one after the other, by one team of threads.
//
// Products, attention, norms and gates are in the other files; this one defines their order, the
// memory of their results, and the rows of every thread. Threads wait for one another between two
// operations, unless every thread continues with the same rows:
//
//   norm | round | product | attention | round | product | norm | round | product | gate | round | product
//        ^ same rows: no wait           ^ the same                ^                     ^
#include "common/team.h"
#include "layers/row_parts.h"
#include "layers/stack.h"
#include "products/weight_formats.h"

#include <omp.h>
#include <time.h>

#include <algorithm>


namespace tokend {
namespace {

int64_t bytes_of(int64_t dtype) { return dtype == TOKEND_FLOAT32 ? 4 : 2; }

// Rows of `size` elements, or bytes, in the memory of a run.
struct Rows {
    char* memory;
    int64_t stride;  // bytes

    void* row(int64_t index) const { return memory + index * stride; }
};

// The scratch memory of a run, in this order.
struct Space {
    Rows normed, heads, attended, gate_up, inner, added;
    Rows rotations;  // those of the first of the tables, then those of the next, …
    void* codes;
    int64_t num_bytes = 0;

    Space(const TokendStack& stack, int64_t dtype, int64_t num_rows, void* memory)
        : memory_(static_cast<char*>(memory)) {
        const int64_t width = bytes_of(dtype), query_heads = stack.num_heads;
        const int64_t all_heads = query_heads + 2 * stack.num_kv_heads;
        normed = input_rows(num_rows, stack.hidden_size * width);
        heads = rows(num_rows, all_heads * stack.head_dim * width);
        attended = rows(num_rows, query_heads * stack.head_dim * width);
        gate_up = rows(num_rows, 2 * stack.inner_size * width);
        inner = input_rows(num_rows, stack.inner_size * width);
        added = rows(num_rows, stack.hidden_size * width);
        const int64_t widest = std::max({stack.hidden_size, query_heads * stack.head_dim, stack.inner_size});
        codes = take(most_code_bytes(num_rows, widest));
        rotations = rows(stack.num_rope_tables * num_rows, stack.head_dim * int64_t(sizeof(float)));
    }

  private:
    Rows rows(int64_t num_rows, int64_t row_bytes) { return {take(num_rows * row_bytes), row_bytes}; }

    // Rows that a product may read in place: an odd number of cache lines apart, so that the same
    // column of several rows falls into different cache sets.
    Rows input_rows(int64_t num_rows, int64_t row_bytes) { return rows(num_rows, ((row_bytes + 63) / 64 | 1) * 64); }

    char* take(int64_t count) {
        char* begin = memory_ + num_bytes;
        num_bytes += (count + 63) / 64 * 64;
        return begin;
    }

    char* memory_;
};

int64_t nanoseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1'000'000'000 + now.tv_nsec;
}

// Adds the time since the last call to the operation just finished; only the first thread is timed.
class Clock {
  public:
    explicit Clock(bool on) : on_(on && omp_get_thread_num() == 0), last_(on_ ? nanoseconds() : 0) {}

    void lap() {
        if (on_) last_ = nanoseconds();
    }
    void lap(int64_t& sum) {
        if (!on_) return;
        const int64_t now = nanoseconds();
        sum += now - last_;
        last_ = now;
    }

  private:
    bool on_;
    int64_t last_;
};

// The work of one thread in all layers.
class Layers {
  public:
    Layers(const TokendStack& stack, TokendStackRun& run, const Space& space)
        : stack_(stack), run_(run), space_(space), clock_(run.is_timed) {}

    // The rotations of queries and keys, in the layout that attention reads.
    void gather_rotations() {
        for (int64_t index = 0; index < stack_.num_rope_tables; index++)
            each_row([&](int64_t row) {
                const float* from = stack_.rope_tables[index].table + run_.positions[row] * stack_.head_dim;
                std::copy_n(from, stack_.head_dim, rotation(index, row));
            });
    }

    void layer(int64_t index) {
        const TokendStackLayer& layer = stack_.layers[index];
        norm(layer.attention_norm);
        multiply(layer.qkv, space_.normed, space_.heads);
        attend(layer, run_.attention_calls[index]);
        end_block(layer.output, space_.attended, layer.attention_post_norm);
        norm(layer.mlp_norm);
        multiply(layer.gate_up, space_.normed, space_.gate_up);
        each_row([&](int64_t row) {
            gate_row(stack_.gate, run_.dtype, stack_.inner_size, space_.gate_up.row(row), space_.inner.row(row));
        });
        end_block(layer.down, space_.inner, layer.mlp_post_norm);
    }

  private:
    // The same rows always go to the same thread, which need not wait for others in between.
    template <class Body>
    void each_row(Body body) {
#pragma omp for schedule(static) nowait
        for (int64_t row = 0; row < run_.num_rows; row++) body(row);
    }

    void norm(const TokendRowNorm& norm) {
        each_row([&](int64_t row) {
            norm_row(run_.dtype, stack_.hidden_size, {norm.weight, norm.eps}, hidden(row), space_.normed.row(row));
        });
    }

    // Query and key heads where they lie.
    void norm_heads(const TokendStackLayer& layer) {
        if (!layer.query_norm.weight) return;
        const int64_t head_bytes = stack_.head_dim * bytes_of(run_.dtype);
        each_row([&](int64_t row) {
            char* head = static_cast<char*>(space_.heads.row(row));
            for (int64_t index = 0; index < stack_.num_heads + stack_.num_kv_heads; index++, head += head_bytes) {
                const TokendRowNorm& norm = index < stack_.num_heads ? layer.query_norm : layer.key_norm;
                norm_row(run_.dtype, stack_.head_dim, {norm.weight, norm.eps}, head, head);
            }
        });
#pragma omp barrier
    }

    // Rounds the thread's own rows, then multiplies.
    void multiply(const TokendStackLinear& linear, const Rows& from, const Rows& to, bool adds = false) {
        clock_.lap();
        const int64_t format = linear.parts->format;
        if (has_codes(format, run_.dtype, linear.in_features))
            each_row([&](int64_t row) {
                code_row(format, run_.dtype, linear.in_features, run_.num_rows, row, from.row(row), space_.codes);
            });
#pragma omp barrier
        const int64_t width = bytes_of(run_.dtype);
        const RowsOf input = {from.stride / width, from.memory};
        char* output = to.memory;
        for (int64_t index = 0; index < linear.num_parts; index++) {
            const TokendLinearPart& part = linear.parts[index];
            multiply_codes(part, run_.dtype, run_.num_rows, input, space_.codes, {to.stride / width, output}, adds);
            output += part.out_features * width;
        }
        clock_.lap(run_.product_ns);
    }

    //   heads   | query heads | key heads | value heads |   of a row
    void attend(const TokendStackLayer& layer, const TokendAttentionCall& place) {
        norm_heads(layer);
        clock_.lap();
        const int64_t head_bytes = stack_.head_dim * bytes_of(run_.dtype);
        TokendAttentionLayer call = *place.layer;
        call.dtype = run_.dtype;
        call.query = space_.heads.memory;
        call.key = space_.heads.memory + stack_.num_heads * head_bytes;
        call.value = space_.heads.memory + (stack_.num_heads + stack_.num_kv_heads) * head_bytes;
        call.query_stride = call.key_stride = call.value_stride = space_.heads.stride / bytes_of(run_.dtype);
        call.rotation = rotation(layer.rope_table, 0);
        call.output = space_.attended.memory;
        tokend_attention_run(place.step, place.plan, &call);
        clock_.lap(run_.attention_ns);
    }

    // Adds a product, or its norm, to the residual.
    void end_block(const TokendStackLinear& linear, const Rows& from, const TokendRowNorm& post_norm) {
        const Rows residual = {static_cast<char*>(run_.hidden), stack_.hidden_size * bytes_of(run_.dtype)};
        if (!post_norm.weight) return multiply(linear, from, residual, true);
        multiply(linear, from, space_.added);
        each_row([&](int64_t row) {
            const RowNorm norm = {post_norm.weight, post_norm.eps};
            add_norm_row(run_.dtype, stack_.hidden_size, norm, space_.added.row(row), hidden(row));
        });
    }

    float* rotation(int64_t rope_table, int64_t row) const {
        return static_cast<float*>(space_.rotations.row(rope_table * run_.num_rows + row));
    }

    void* hidden(int64_t row) const {
        return static_cast<char*>(run_.hidden) + row * stack_.hidden_size * bytes_of(run_.dtype);
    }

    const TokendStack& stack_;
    TokendStackRun& run_;
    const Space& space_;
    Clock clock_;
};

}  // namespace
}  // namespace tokend

extern "C" int64_t tokend_stack_bytes(const TokendStack* stack, int64_t dtype, int64_t num_rows) {
    return tokend::Space(*stack, dtype, num_rows, nullptr).num_bytes;
}

extern "C" int64_t tokend_stack_run(const TokendStack* stack, TokendStackRun* run) {
    for (int64_t row = 0; row < run->num_rows; row++)
        for (int64_t index = 0; index < stack->num_rope_tables; index++)
            if (run->positions[row] < 0 || run->positions[row] >= stack->rope_tables[index].num_positions) return row;
    const tokend::Space space(*stack, run->dtype, run->num_rows, run->scratch);
#pragma omp parallel
    {
        tokend::Layers layers(*stack, *run, space);
        layers.gather_rotations();
        for (int64_t layer = 0; layer < stack->num_layers; layer++) layers.layer(layer);
    }
    return run->num_rows;
}
