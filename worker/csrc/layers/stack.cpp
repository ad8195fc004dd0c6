// The layers of a decoder, one after the other, by one team of threads.
//
// Products, attention, norms and gates are in the other files; this one defines their order, the
// memory of their results, and the rows of every thread. Threads wait for one another between two
// operations, unless every thread continues with the same rows:
//
//   norm | round | product | attention | round | product | norm | round | product | gate | round | product
//        ^ same rows: no wait           ^ the same                ^                     ^
//
// Adapters of rows add to a product after it, from inputs that are reduced before it (adapters.h).
//
// Latent attention has products of its own before and after it, some with a weight for each head.
#include "common/team.h"
#include "layers/moe.h"
#include "layers/row_parts.h"
#include "layers/run_memory.h"
#include "layers/stack.h"
#include "products/weight_formats.h"

#include <omp.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>


namespace tokend {
namespace {

// The scratch memory of a run, in this order.
struct Space {
    Rows normed, heads, attended, gate_up, inner, added;
    Rows scaled;                                        // the input of a mixer with a factor
    Rows gated;                                         // heads, where queries have gates
    Rows projected, gates, mixed;                       // inputs and output of a recurrence
    Rows inputs, query_latents, queries, keys, values;  // of latent attention
    char* prepared_heads = nullptr;  // prepared input of each head's product, one head after the other
    int64_t prepared_head_bytes = 0;
    Rows rotations;  // those of the first of the tables, then those of the next, …
    void* prepared;  // input rows of one product at a time (weight_formats.h)
    void* mixture;   // memory of a mixture of experts
    void* recurrence;  // memory of a recurrence
    RunMemory memory;

    Space(const TokendStack& stack, int64_t dtype, int64_t num_rows, int64_t num_tokens, void* scratch)
        : memory(scratch) {
        const int64_t width = bytes_of(dtype), query_heads = stack.num_heads;
        const int64_t all_heads = query_heads + 2 * stack.num_kv_heads;
        normed = memory.input_rows(num_rows, stack.hidden_size * width);
        const TokendLatentAttention* latent = latent_of(stack);
        heads = memory.rows(num_rows, (latent ? query_heads : all_heads) * stack.head_dim * width);
        attended = memory.rows(num_rows, query_heads * (latent ? latent->rank : stack.head_dim) * width);
        gated = memory.rows(num_rows, stack.gates_attention ? (all_heads + query_heads) * stack.head_dim * width : 0);
        gate_up = memory.rows(num_rows, 2 * stack.inner_size * width);
        inner = memory.input_rows(num_rows, stack.inner_size * width);
        added = memory.rows(num_rows, stack.hidden_size * width);
        int64_t output_inputs = query_heads * stack.head_dim, query_rank = 0;
        if (latent) {
            output_inputs = query_heads * latent->value_size;
            query_rank = latent->query_rank;
            inputs = memory.rows(num_rows, (plain_inputs(stack) + stack.head_dim) * width);
            query_latents = memory.input_rows(num_rows, query_rank * width);
            queries = memory.rows(num_rows, query_rank ? query_numbers(stack) * width : 0);
            keys = memory.rows(num_rows, stack.head_dim * width);
            values = memory.input_rows(num_rows, output_inputs * width);
            prepared_head_bytes = max_prepared_head_bytes(stack, num_rows);
            prepared_heads = memory.take(query_heads * prepared_head_bytes);
        }
        int64_t projections = 0, gate_columns = 0, outputs = 0, recurrence_bytes = 0;
        for (int64_t index = 0; index < stack.num_layers; index++)
            if (const TokendStackRecurrence* each = stack.layers[index].recurrence) {
                projections = std::max(projections, each->inputs[0].out_features);
                gate_columns = std::max(gate_columns, each->inputs[1].out_features);
                outputs = std::max(outputs, each->output.in_features);
                recurrence_bytes = std::max(recurrence_bytes, each->bytes(each->layer, num_tokens));
            }
        scaled = memory.input_rows(num_rows, scales_inputs(stack) ? stack.hidden_size * width : 0);
        projected = memory.rows(num_rows, projections * width);
        gates = memory.rows(num_rows, gate_columns * width);
        mixed = memory.rows(num_rows, outputs * width);
        recurrence = memory.take(recurrence_bytes);
        const int64_t widest = std::max({stack.hidden_size, output_inputs, stack.inner_size, query_rank, outputs});
        prepared = memory.take(max_prepared_bytes(stack, num_rows, widest));
        int64_t mixture_bytes = 0;
        for (int64_t index = 0; index < stack.num_layers; index++)
            if (const TokendMoe* moe = stack.layers[index].moe)
                mixture_bytes = std::max(mixture_bytes, tokend_moe_bytes(moe, dtype, num_rows));
        mixture = memory.take(mixture_bytes);
        rotations = memory.rows(stack.num_rope_tables * num_rows, rotary_dim(stack) * int64_t(sizeof(float)));
    }

    // Numbers of a head that rotate.
    static int64_t rotary_dim(const TokendStack& stack) {
        const TokendLatentAttention* latent = latent_of(stack);
        return latent ? latent->rotated_size : stack.head_dim;
    }

    // Numbers of all query heads before keys are multiplied into them.
    static int64_t query_numbers(const TokendStack& stack) {
        const TokendLatentAttention& latent = *latent_of(stack);
        return stack.num_heads * (latent.plain_size + latent.rotated_size);
    }

    // Numbers of the input products of latent attention before the latent.
    static int64_t plain_inputs(const TokendStack& stack) {
        const int64_t query_rank = latent_of(stack)->query_rank;
        return query_rank ? query_rank : query_numbers(stack);
    }

  private:
    // The latent attention of a layer; null if no layer has it.
    static const TokendLatentAttention* latent_of(const TokendStack& stack) {
        for (int64_t index = 0; index < stack.num_layers; index++)
            if (stack.layers[index].latent) return stack.layers[index].latent;
        return nullptr;
    }

    static bool scales_inputs(const TokendStack& stack) {
        return std::any_of(stack.layers, stack.layers + stack.num_layers, [](const TokendStackLayer& layer) {
            return layer.input_factor != 1.0 || (layer.recurrence && layer.recurrence->input_factor != 1.0);
        });
    }

    // Bytes of the prepared input of one head's product, in any layer.
    static int64_t max_prepared_head_bytes(const TokendStack& stack, int64_t num_rows) {
        int64_t most = 0;
        const TokendProductKernels* last = nullptr;
        for (int64_t index = 0; index < stack.num_layers; index++) {
            const TokendLatentAttention* latent = stack.layers[index].latent;
            if (!latent) continue;
            for (const TokendStackLinear* linears : {latent->keys, latent->values})
                for (int64_t head = 0; head < stack.num_heads; head++) {
                    const TokendProductKernels* kernels = linears[head].parts->kernels;
                    if (kernels == last) continue;
                    for (const int64_t size : {latent->plain_size, latent->rank})
                        most = std::max(most, kernels->max_prepared_bytes(num_rows, size));
                    last = kernels;
                }
        }
        return (most + 63) / 64 * 64;
    }

    // Bytes of the prepared input of any product.
    static int64_t max_prepared_bytes(const TokendStack& stack, int64_t num_rows, int64_t in_features) {
        int64_t most = 0;
        const TokendProductKernels* last = nullptr;
        for (int64_t index = 0; index < stack.num_layers; index++) {
            const TokendStackLayer& layer = stack.layers[index];
            const TokendStackLinear* query = layer.latent ? &layer.latent->query : &layer.qkv;
            const auto count = [&](const TokendStackLinear& linear) {
                if (linear.num_parts == 0) return;  // the layer has no such product
                const TokendProductKernels* kernels = linear.parts->kernels;
                if (kernels != last) most = std::max(most, kernels->max_prepared_bytes(num_rows, in_features));
                last = kernels;
            };
            for (const TokendStackLinear* linear : {&layer.qkv, query, &layer.output, &layer.gate_up, &layer.down})
                count(*linear);
            if (const TokendStackRecurrence* recurrence = layer.recurrence) {
                for (const TokendStackLinear& linear : recurrence->inputs) count(linear);
                count(recurrence->output);
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
        const int64_t size = Space::rotary_dim(stack_);
        for (int64_t index = 0; index < stack_.num_rope_tables; index++)
            each_row([&](int64_t row) {
                const float* from = run_.rotations
                                        ? run_.rotations[index] + row * size
                                        : stack_.rope_tables[index].table + run_.positions[row] * size;
                std::copy_n(from, size, rotation(index, row));
            });
    }

    // Adds to the residual of some rows what follows a layer.
    void add_after(int64_t layer) {
        const int64_t row_bytes = stack_.hidden_size * bytes_of(run_.dtype);
        for (int64_t index = 0; index < run_.num_additions; index++) {
            const TokendRowAddition& addition = run_.additions[index];
            if (layer >= addition.num_layers) continue;
            each_row([&](int64_t row) {
                const int64_t own = row - addition.first;
                if (own < 0 || own >= addition.num_rows) return;
                const int64_t part = own * addition.num_layers + layer;
                const char* from = static_cast<const char*>(addition.values) + part * row_bytes;
                accumulate_row(run_.dtype, stack_.hidden_size, from, hidden(row));
            });
        }
    }

    // Copies the residual before a layer to the memory of each entry of `recorded` that names the layer.
    void record_residual(int64_t layer) {
        for (int64_t index = 0; index < run_.num_recorded; index++) {
            if (run_.recorded[index] != layer) continue;
            const int64_t width = bytes_of(run_.dtype), row_bytes = stack_.hidden_size * width;
            char* to = static_cast<char*>(run_.residuals) + index * run_.residual_stride * width;
            each_row([&](int64_t row) { std::memcpy(to + row * row_bytes, hidden(row), row_bytes); });
        }
    }

    // Waits until another thread has loaded the KV that a layer reads. Cores are left to that thread.
    void await_load(int64_t index) const {
        if (!run_.progress) return;
        const timespec pause = {0, 50'000};
        while (std::atomic_ref(run_.progress->loaded).load(std::memory_order_acquire) <= index)
            nanosleep(&pause, nullptr);
    }

    // Publishes that K and V of a layer are written. All threads have waited for one another after its attention.
    void note_computed(int64_t index) const {
        if (run_.progress && omp_get_thread_num() == 0)
            std::atomic_ref(run_.progress->computed).store(uint32_t(index + 1), std::memory_order_release);
    }

    void layer(int64_t index) {
        const TokendStackLayer& layer = stack_.layers[index];
        const Rows from = normed(layer.attention_norm, residual());
        if (layer.recurrence) recur(*layer.recurrence, from);
        if (layer.qkv.num_parts) attend(layer, from);
        norm_sum(layer.attention_sum_norm);
        if (!layer.moe && !layer.gate_up.num_parts) return;
        const Rows mlp_input = normed(layer.mlp_norm, stack_.is_parallel ? from : residual());
        if (layer.moe) {
            mix_experts(layer, mlp_input);
            return norm_sum(layer.mlp_sum_norm);
        }
        multiply(layer.gate_up, mlp_input, space_.gate_up);
        each_row([&](int64_t row) {
            void *gate_up = space_.gate_up.row(row), *inner = space_.inner.row(row);
            const int64_t size = stack_.inner_size;
            if (stack_.gate_factor != 1.0) scale_row(run_.dtype, size, stack_.gate_factor, gate_up, gate_up);
            gate_row(stack_.gate, stack_.is_gated, run_.dtype, size, gate_up, inner);
            if (stack_.output_factor != 1.0) scale_row(run_.dtype, size, stack_.output_factor, inner, inner);
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
    void norm_heads(const TokendStackLayer& layer, const Rows& queries, const Rows& keys) {
        if (!layer.query_norm.weight) return;
        const int64_t joint = stack_.norms_heads_jointly;
        each_row([&](int64_t row) {
            norm_each(layer.query_norm, joint, stack_.num_heads, queries.row(row));
            norm_each(layer.key_norm, joint, stack_.num_kv_heads, keys.row(row));
        });
    }

    // Norms `count` heads in place, one by one or jointly.
    void norm_each(const TokendRowNorm& norm, bool joint, int64_t count, void* heads) {
        const int64_t size = (joint ? count : 1) * stack_.head_dim, bytes = size * bytes_of(run_.dtype);
        for (int64_t index = 0; index < (joint ? 1 : count); index++)
            norm_row(run_.dtype, size, norm, static_cast<char*>(heads) + index * bytes,
                     static_cast<char*>(heads) + index * bytes);
    }

    // What a mixer reads: the rows, times a factor.
    Rows scaled(double factor, const Rows& from) {
        if (factor == 1.0) return from;
        each_row([&](int64_t row) {
            scale_row(run_.dtype, stack_.hidden_size, factor, from.row(row), space_.scaled.row(row));
        });
        return space_.scaled;
    }

    // Adds a recurrent mixer to the residual.
    void recur(const TokendStackRecurrence& mixer, const Rows& rows) {
        const Rows from = scaled(mixer.input_factor, rows);
        const int64_t width = bytes_of(run_.dtype);
        const Rows projected = {space_.projected.memory, mixer.inputs[0].out_features * width};
        const Rows gates = {space_.gates.memory, mixer.inputs[1].out_features * width};
        multiply(mixer.inputs[0], from, projected);
        if (mixer.inputs[1].num_parts) multiply(mixer.inputs[1], from, gates);
        clock_.lap();
        TokendRecurrenceRun run = *run_.recurrence;
        run.dtype = run_.dtype;
        run.num_tokens = run_.num_rows;
        run.rows = projected.memory;
        run.row_stride = projected.stride / width;
        run.gates = gates.memory;
        run.gate_stride = gates.stride / width;
        run.states += mixer.state_offset + run.max_logged * mixer.log_offset;
        run.scratch = space_.recurrence;
        run.out = space_.mixed.memory;
        mixer.run(mixer.layer, &run);
        clock_.lap(run_.attention_ns);
        end_block(mixer.output, {space_.mixed.memory, mixer.output.in_features * width}, {}, mixer.output_factor);
    }

    // Adds attention to the residual.
    void attend(const TokendStackLayer& layer, const Rows& rows) {
        const Rows from = scaled(layer.input_factor, rows);
        const TokendAttentionCall& call = run_.attention_calls[layer.attention_call];
        if (layer.latent) {
            multiply(layer.qkv, from, space_.inputs);
            attend_to_latents(layer, *layer.latent, call);
        } else {
            multiply(layer.qkv, from, stack_.gates_attention ? space_.gated : space_.heads);
            attend_to_heads(layer, call);
        }
        end_block(layer.output, layer.latent ? space_.values : space_.attended, layer.attention_post_norm,
                  layer.output_factor);
    }

    // Prepares the thread's own rows, then multiplies.
    void multiply(const TokendStackLinear& linear, const Rows& from, const Rows& to, bool adds = false) {
        clock_.lap();
        const int64_t format = linear.parts->format;
        const TokendProductKernels& kernels = *linear.parts->kernels;
        if (kernels.needs_prepared_input(format, run_.dtype, linear.in_features))
            each_row([&](int64_t row) {
                kernels.prepare_input_row(format, run_.dtype, linear.in_features, run_.num_rows, row, from.row(row),
                                          space_.prepared);
            });
#pragma omp barrier
        const int64_t width = bytes_of(run_.dtype);
        const bool adapts = changes(run_.adapters, linear.product);
        if (adapts)
            reduce_rows(*run_.adapters, linear.product, {run_.dtype, from.stride / width, from.memory},
                        run_.adapter_scratch);
        const RowsOf input = {from.stride / width, from.memory};
        char* output = to.memory;
        for (int64_t index = 0; index < linear.num_parts; index++) {
            const TokendLinearPart& part = linear.parts[index];
            part.kernels->multiply_prepared_input(part, run_.dtype, run_.num_rows, input, space_.prepared,
                                                  {to.stride / width, output}, adds);
            output += part.out_features * width;
        }
        if (adapts) {  // after the wait at the end of the product
            expand_rows(*run_.adapters, linear.product, run_.adapter_scratch,
                        {run_.dtype, to.stride / width, to.memory});
#pragma omp barrier
        }
        clock_.lap(run_.product_ns);
    }

    //   heads   | query heads | key heads | value heads |   of a row
    //   gated   | query | its gate | query | its gate | … | key heads | value heads |
    void attend_to_heads(const TokendStackLayer& layer, const TokendAttentionCall& attention) {
        const int64_t width = bytes_of(run_.dtype), head_bytes = stack_.head_dim * width;
        const bool gated = stack_.gates_attention;
        const Rows queries = space_.heads, from = gated ? space_.gated : space_.heads;
        const Rows keys = {from.memory + (gated ? 2 : 1) * stack_.num_heads * head_bytes, from.stride};
        if (gated)
            each_row([&](int64_t row) {
                const char* query = static_cast<const char*>(from.row(row));
                char* to = static_cast<char*>(queries.row(row));
                for (int64_t head = 0; head < stack_.num_heads; head++)
                    std::copy_n(query + 2 * head * head_bytes, head_bytes, to + head * head_bytes);
            });
        norm_heads(layer, queries, keys);
        const float* scales = stack_.rope_tables[layer.rope_table].query_scales;
        if (scales)
            each_row([&](int64_t row) {
                void* query = queries.row(row);
                scale_row(run_.dtype, stack_.num_heads * stack_.head_dim, scales[run_.positions[row]], query, query);
            });
        if (gated || layer.query_norm.weight || scales) {
#pragma omp barrier
        }
        clock_.lap();
        TokendAttentionLayer arguments = *attention.layer;
        arguments.dtype = run_.dtype;
        arguments.query = queries.memory;
        arguments.key = keys.memory;
        arguments.value = keys.memory + stack_.num_kv_heads * head_bytes;
        arguments.query_stride = queries.stride / width;
        arguments.key_stride = arguments.value_stride = keys.stride / width;
        arguments.rotation = rotation(layer.rope_table, 0);
        arguments.sinks = layer.sinks;
        arguments.output = space_.attended.memory;
        attention.run(attention.step, attention.plan, &arguments);
        clock_.lap(run_.attention_ns);
        if (gated) each_row([&](int64_t row) { gate_heads(row); });
    }

    // Multiplies the attention of a row by the sigmoid of its gates. What follows a gate is not needed any more:
    //
    //   gated   | query | gate | query | …       becomes       | query | gate | attended | …
    void gate_heads(int64_t row) {
        const int64_t head_bytes = stack_.head_dim * bytes_of(run_.dtype);
        char* gate = static_cast<char*>(space_.gated.row(row)) + head_bytes;
        char* attended = static_cast<char*>(space_.attended.row(row));
        for (int64_t head = 0; head < stack_.num_heads; head++, gate += 2 * head_bytes, attended += head_bytes) {
            std::copy_n(attended, head_bytes, gate + head_bytes);
            gate_row(TOKEND_SIGMOID_GATE, true, run_.dtype, stack_.head_dim, gate, attended);
        }
    }

    //   inputs  | query, or its latent | latent | rotated |        heads  | latent | rotated | … of each head
    void attend_to_latents(const TokendStackLayer& layer, const TokendLatentAttention& latent,
                           const TokendAttentionCall& attention) {
        const int64_t width = bytes_of(run_.dtype), query_size = latent.plain_size + latent.rotated_size;
        Rows queries = space_.inputs;
        if (latent.query_rank) {
            each_row([&](int64_t row) {
                norm_row(run_.dtype, latent.query_rank, layer.query_norm, space_.inputs.row(row),
                         space_.query_latents.row(row));
            });
            multiply(latent.query, space_.query_latents, space_.queries);
            queries = space_.queries;
        }
        const int64_t latent_at = Space::plain_inputs(stack_) * width, rotated_bytes = latent.rotated_size * width;
        each_row([&](int64_t row) {
            const char* input = static_cast<const char*>(space_.inputs.row(row)) + latent_at;
            char* key = static_cast<char*>(space_.keys.row(row));
            norm_row(run_.dtype, latent.rank, layer.key_norm, input, key);
            std::copy_n(input + latent.rank * width, rotated_bytes, key + latent.rank * width);
            const char* from = static_cast<const char*>(queries.row(row)) + latent.plain_size * width;
            char* to = static_cast<char*>(space_.heads.row(row)) + latent.rank * width;
            for (int64_t head = 0; head < stack_.num_heads; head++)
                std::copy_n(from + head * query_size * width, rotated_bytes, to + head * stack_.head_dim * width);
        });
        multiply_heads(latent.keys, queries, query_size, space_.heads, stack_.head_dim);
        clock_.lap();
        TokendAttentionLayer arguments = *attention.layer;
        arguments.dtype = run_.dtype;
        arguments.query = space_.heads.memory;
        arguments.query_stride = space_.heads.stride / width;
        arguments.key = space_.keys.memory;
        arguments.key_stride = space_.keys.stride / width;
        arguments.value = nullptr;
        arguments.rotation = rotation(layer.rope_table, 0);
        arguments.sinks = nullptr;
        arguments.output = space_.attended.memory;
        attention.run(attention.step, attention.plan, &arguments);
        clock_.lap(run_.attention_ns);
        multiply_heads(latent.values, space_.attended, latent.rank, space_.values, latent.value_size);
    }

    // Multiplies each head of the rows by a weight of its own; from_size and to_size:
    // numbers from one head to the next, in input and output. Threads share the outputs of all heads.
    void multiply_heads(const TokendStackLinear* linears, const Rows& from, int64_t from_size, const Rows& to,
                        int64_t to_size) {
        clock_.lap();
        const int64_t width = bytes_of(run_.dtype), num_rows = run_.num_rows, num_heads = stack_.num_heads;
#pragma omp for schedule(static) nowait
        for (int64_t index = 0; index < num_rows * num_heads; index++) {
            const int64_t row = index / num_heads, head = index % num_heads;
            const TokendLinearPart& part = *linears[head].parts;
            const int64_t in_features = linears[head].in_features;
            if (!part.kernels->needs_prepared_input(part.format, run_.dtype, in_features)) continue;
            const char* x = static_cast<const char*>(from.row(row)) + head * from_size * width;
            part.kernels->prepare_input_row(part.format, run_.dtype, in_features, num_rows, row, x,
                                            prepared_head(head));
        }
#pragma omp barrier
        const int64_t panels = (linears->parts->out_features + SHARE_OUTPUTS - 1) / SHARE_OUTPUTS;
        const int64_t total = num_heads * panels, threads = omp_get_num_threads(), thread = omp_get_thread_num();
        const int64_t end = total * (thread + 1) / threads;
        for (int64_t at = total * thread / threads; at < end;) {
            const int64_t head = at / panels, first = at % panels, last = std::min(panels, first + end - at);
            const TokendLinearPart& part = *linears[head].parts;
            const RowsOf input = {from.stride / width, from.memory + head * from_size * width};
            const RowsOf output = {to.stride / width, to.memory + head * to_size * width};
            part.kernels->multiply_share(part, {run_.dtype, num_rows, 0, num_rows, input, prepared_head(head),
                                                run_.dtype, output, first, last});
            at += last - first;
        }
#pragma omp barrier
        if (run_.adapters) {
            std::vector<float> reduced(size_t(run_.adapters->max_rank));
#pragma omp for schedule(static)
            for (int64_t index = 0; index < num_rows * num_heads; index++) {
                const int64_t row = index / num_heads, head = index % num_heads;
                if (linears[head].product >= 0)
                    add_row(*run_.adapters, linears[head].product, row, run_.dtype,
                            static_cast<const char*>(from.row(row)) + head * from_size * width, run_.dtype,
                            static_cast<char*>(to.row(row)) + head * to_size * width, reduced.data());
            }
        }
        clock_.lap(run_.product_ns);
    }

    void* prepared_head(int64_t head) const { return space_.prepared_heads + head * space_.prepared_head_bytes; }

    // Adds a product, its multiple or its norm, to the residual.
    void end_block(const TokendStackLinear& linear, const Rows& from, const TokendRowNorm& post_norm,
                   double factor = 1.0) {
        if (factor != 1.0) {
            multiply(linear, from, space_.added);
            return each_row([&](int64_t row) {
                void* added = space_.added.row(row);
                scale_row(run_.dtype, stack_.hidden_size, factor, added, added);
                accumulate_row(run_.dtype, stack_.hidden_size, added, hidden(row));
            });
        }
        multiply(linear, from, post_norm.weight ? space_.added : residual(), !post_norm.weight);
        if (post_norm.weight) add_norm(post_norm);
    }

    // Adds a mixture of experts, or its norm, to the residual.
    void mix_experts(const TokendStackLayer& layer, const Rows& from) {
        clock_.lap();
        const bool adds = !layer.mlp_post_norm.weight;
        const Rows output = adds ? residual() : space_.added;
        const TokendMoeRun run = {run_.dtype, run_.num_rows, from.stride, from.memory, output.stride,
                                  output.memory, adds, space_.mixture, chosen(layer), run_.adapters};
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

extern "C" int64_t tokend_stack_bytes(
    const TokendStack* stack, int64_t dtype, int64_t num_rows, int64_t num_tokens
) {
    return tokend::Space(*stack, dtype, num_rows, num_tokens, nullptr).memory.num_bytes();
}

extern "C" int64_t tokend_stack_run(const TokendStack* stack, TokendStackRun* run) {
    for (int64_t row = 0; row < run->num_rows && !run->rotations; row++)
        for (int64_t index = 0; index < stack->num_rope_tables; index++)
            if (run->positions[row] < 0 || run->positions[row] >= stack->rope_tables[index].num_positions) return row;
    const TokendRecurrenceRun* recurrence = run->recurrence;
    const int64_t num_tokens = recurrence ? recurrence->token_start[recurrence->num_seqs] : run->num_rows;
    const tokend::Space space(*stack, run->dtype, run->num_rows, num_tokens, run->scratch);
#pragma omp parallel
    {
        tokend::Layers layers(*stack, *run, space);
        layers.gather_rotations();
        for (int64_t layer = 0; layer < stack->num_layers; layer++) {
            layers.record_residual(layer);
            layers.await_load(layer);
            layers.layer(layer);
            layers.add_after(layer);
            layers.note_computed(layer);
        }
        layers.record_residual(stack->num_layers);
    }
    return run->num_rows;
}
