// The layers of a decoder, one after the other, by one team of threads.
//
// Products, attention, norms and gates are in the other files; this one defines their order, the
// memory of their results, and the rows of every thread. Threads wait for one another between two
// operations, unless every thread continues with the same rows:
//
//   norm | round | product | attention | round | product | norm | round | product | gate | round | product
//        ^ same rows: no wait           ^ the same                ^                     ^
#include "common/team.h"
#include "layers/moe.h"
#include "layers/row_parts.h"
#include "layers/run_memory.h"
#include "layers/stack.h"
#include "products/weight_formats.h"

#include <omp.h>
#include <time.h>

#include <algorithm>


namespace tokend {
namespace {

// The scratch memory of a run, in this order.
struct Space {
    Rows normed, heads, attended, gate_up, inner, added;
    Rows rotations;  // those of the first of the tables, then those of the next, …
    void* codes;
    void* mixture;  // memory of a mixture of experts
    RunMemory memory;

    Space(const TokendStack& stack, int64_t dtype, int64_t num_rows, void* scratch) : memory(scratch) {
        const int64_t width = bytes_of(dtype), query_heads = stack.num_heads;
        const int64_t all_heads = query_heads + 2 * stack.num_kv_heads;
        normed = memory.input_rows(num_rows, stack.hidden_size * width);
        heads = memory.rows(num_rows, all_heads * stack.head_dim * width);
        attended = memory.rows(num_rows, query_heads * stack.head_dim * width);
        gate_up = memory.rows(num_rows, 2 * stack.inner_size * width);
        inner = memory.input_rows(num_rows, stack.inner_size * width);
        added = memory.rows(num_rows, stack.hidden_size * width);
        const int64_t widest = std::max({stack.hidden_size, query_heads * stack.head_dim, stack.inner_size});
        codes = memory.take(code_bytes(stack, num_rows, widest));
        int64_t mixture_bytes = 0;
        for (int64_t index = 0; index < stack.num_layers; index++)
            if (const TokendMoe* moe = stack.layers[index].moe)
                mixture_bytes = std::max(mixture_bytes, tokend_moe_bytes(moe, dtype, num_rows));
        mixture = memory.take(mixture_bytes);
        rotations = memory.rows(stack.num_rope_tables * num_rows, stack.head_dim * int64_t(sizeof(float)));
    }

  private:
    // Bytes of the codes that the kernels of any product write.
    static int64_t code_bytes(const TokendStack& stack, int64_t num_rows, int64_t in_features) {
        int64_t most = 0;
        const TokendProductKernels* last = nullptr;
        for (int64_t index = 0; index < stack.num_layers; index++) {
            const TokendStackLayer& layer = stack.layers[index];
            for (const TokendStackLinear* linear : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down}) {
                if (linear->num_parts == 0) continue;  // of a layer with a mixture
                const TokendProductKernels* kernels = linear->parts->kernels;
                if (kernels != last) most = std::max(most, kernels->most_code_bytes(num_rows, in_features));
                last = kernels;
            }
        }
        return most;
    }
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
        const Rows from = normed(layer.attention_norm, residual());
        multiply(layer.qkv, from, space_.heads);
        attend(layer, run_.attention_calls[index]);
        end_block(layer.output, space_.attended, layer.attention_post_norm);
        norm_sum(layer.attention_sum_norm);
        const Rows mlp_input = normed(layer.mlp_norm, stack_.is_parallel ? from : residual());
        if (layer.moe) {
            mix_experts(layer, mlp_input);
            return norm_sum(layer.mlp_sum_norm);
        }
        multiply(layer.gate_up, mlp_input, space_.gate_up);
        each_row([&](int64_t row) {
            gate_row(stack_.gate, stack_.is_gated, run_.dtype, stack_.inner_size, space_.gate_up.row(row),
                     space_.inner.row(row));
        });
        end_block(layer.down, space_.inner, layer.mlp_post_norm);
        norm_sum(layer.mlp_sum_norm);
    }

  private:
    // The same rows always go to the same thread, which need not wait for others in between.
    template <class Body>
    void each_row(Body body) {
#pragma omp for schedule(static) nowait
        for (int64_t row = 0; row < run_.num_rows; row++) body(row);
    }

    // The residual's norm, or `instead` if the model does not have it.
    Rows normed(const TokendRowNorm& norm, const Rows& instead) {
        if (!norm.weight) return instead;
        each_row([&](int64_t row) {
            norm_row(run_.dtype, stack_.hidden_size, norm, hidden(row), space_.normed.row(row));
        });
        return space_.normed;
    }

    // Query and key heads where they lie.
    void norm_heads(const TokendStackLayer& layer) {
        if (!layer.query_norm.weight) return;
        const int64_t joint = stack_.norms_heads_jointly;
        each_row([&](int64_t row) {
            char* heads = static_cast<char*>(space_.heads.row(row));
            heads = norm_each(layer.query_norm, joint ? stack_.num_heads : 1, stack_.num_heads, heads);
            norm_each(layer.key_norm, joint ? stack_.num_kv_heads : 1, stack_.num_kv_heads, heads);
        });
#pragma omp barrier
    }

    // Norms `count` heads in place, `together` at a time; returns their end.
    char* norm_each(const TokendRowNorm& norm, int64_t together, int64_t count, char* heads) {
        const int64_t size = together * stack_.head_dim;
        for (int64_t index = 0; index < count; index += together, heads += size * bytes_of(run_.dtype))
            norm_row(run_.dtype, size, norm, heads, heads);
        return heads;
    }

    // Rounds the thread's own rows, then multiplies.
    void multiply(const TokendStackLinear& linear, const Rows& from, const Rows& to, bool adds = false) {
        clock_.lap();
        const int64_t format = linear.parts->format;
        const TokendProductKernels& kernels = *linear.parts->kernels;
        if (kernels.has_codes(format, run_.dtype, linear.in_features))
            each_row([&](int64_t row) {
                kernels.code_row(format, run_.dtype, linear.in_features, run_.num_rows, row, from.row(row),
                                 space_.codes);
            });
#pragma omp barrier
        const int64_t width = bytes_of(run_.dtype);
        const RowsOf input = {from.stride / width, from.memory};
        char* output = to.memory;
        for (int64_t index = 0; index < linear.num_parts; index++) {
            const TokendLinearPart& part = linear.parts[index];
            part.kernels->multiply_codes(part, run_.dtype, run_.num_rows, input, space_.codes,
                                         {to.stride / width, output}, adds);
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
        call.sinks = layer.sinks;
        call.output = space_.attended.memory;
        tokend_attention_run(place.step, place.plan, &call);
        clock_.lap(run_.attention_ns);
    }

    // Adds a product, or its norm, to the residual.
    void end_block(const TokendStackLinear& linear, const Rows& from, const TokendRowNorm& post_norm) {
        multiply(linear, from, post_norm.weight ? space_.added : residual(), !post_norm.weight);
        if (post_norm.weight) add_norm(post_norm);
    }

    // Adds a mixture of experts, or its norm, to the residual.
    void mix_experts(const TokendStackLayer& layer, const Rows& from) {
        clock_.lap();
        const bool adds = !layer.mlp_post_norm.weight;
        const Rows output = adds ? residual() : space_.added;
        const TokendMoeRun run = {run_.dtype, run_.num_rows, from.stride, from.memory, output.stride,
                                  output.memory, adds, space_.mixture, chosen(layer)};
        tokend_moe_run(layer.moe, &run);
        clock_.lap(run_.product_ns);
        if (!adds) add_norm(layer.mlp_post_norm);
    }

    // Where the experts of a layer's rows go; null if they are not recorded.
    int32_t* chosen(const TokendStackLayer& layer) const {
        if (!run_.chosen) return nullptr;
        const int64_t before = std::count_if(stack_.layers, &layer, [](const auto& each) { return each.moe; });
        return run_.chosen + before * run_.chosen_stride;
    }

    void add_norm(const TokendRowNorm& norm) {
        each_row([&](int64_t row) {
            add_norm_row(run_.dtype, stack_.hidden_size, norm, space_.added.row(row), hidden(row));
        });
    }

    // Replaces the residual by its norm.
    void norm_sum(const TokendRowNorm& norm) {
        if (!norm.weight) return;
        each_row([&](int64_t row) { norm_row(run_.dtype, stack_.hidden_size, norm, hidden(row), hidden(row)); });
    }

    Rows residual() const {
        return {static_cast<char*>(run_.hidden), stack_.hidden_size * bytes_of(run_.dtype)};
    }

    float* rotation(int64_t rope_table, int64_t row) const {
        return static_cast<float*>(space_.rotations.row(rope_table * run_.num_rows + row));
    }

    void* hidden(int64_t row) const {
        return residual().row(row);
    }

    const TokendStack& stack_;
    TokendStackRun& run_;
    const Space& space_;
    Clock clock_;
};

}  // namespace
}  // namespace tokend

extern "C" int64_t tokend_stack_bytes(const TokendStack* stack, int64_t dtype, int64_t num_rows) {
    return tokend::Space(*stack, dtype, num_rows, nullptr).memory.num_bytes();
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
