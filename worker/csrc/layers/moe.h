// The C interface of a mixture of experts: router, the chosen experts of each row, shared experts.
//
//   logits   = router(x)                        float32, as scores and weights are
//   output (+)= sum of weight * down(gate(gate_up(x))) over the chosen experts
//             + sigmoid(shared_gate . x) * the same of the shared experts, which compute every row
//
// Rows are sorted by expert, and threads share the outputs of all experts evenly, so that one row
// reads nothing but the weights of its own experts. The sum over experts is one chain in float32,
// from the best expert to the last: a row has the same bits in every batch and with any number of
// threads.
#pragma once

#include "layers/stack.h"

extern "C" {

enum TokendScoring : int64_t { TOKEND_SOFTMAX = 0, TOKEND_SIGMOID = 1 };

// See worker/layers/router.py.
struct TokendRouter {
    int64_t num_experts;
    int64_t top_k;
    int64_t scoring;     // a TokendScoring
    int64_t normalises;  // 1: the weights of a row's experts sum to `scale`
    int64_t num_groups;
    int64_t top_groups;
    int64_t best_of_group;  // 1 or 2 scores, whose sum ranks a group
    double scale;
    const float* weight;          // [num_experts, hidden_size]
    const float* bias;            // [num_experts], of the logits; or null
    const float* selection_bias;  // [num_experts], of the scores, for the choice alone; or null
};

struct TokendExpert {
    TokendStackLinear gate_up;
    TokendStackLinear down;
};

// Threads of one group are bound to one memory node, where their range of every weight lies
// (worker/host/memory_nodes.py), and share the work on these ranges evenly.
//
// Products of all experts have weights of one format for gate_up and one for down, each with
// kernels of one library; those of the shared experts may have others.
struct TokendMoe {
    int64_t hidden_size;
    int64_t inner_size;  // of an expert
    int64_t gate;        // a TokendGateKind of rows.h
    TokendRouter router;
    int64_t first_expert;  // this rank has experts [first_expert, end_expert)
    int64_t end_expert;
    const TokendExpert* experts;
    int64_t shared_size;  // inner size of the shared experts; 0 if there are none
    TokendExpert shared;
    const float* shared_gate;  // [hidden_size], or null
    int64_t num_thread_groups;         // 0: one group of all threads
    const int64_t* thread_group_ends;  // of each group the thread after its last
};

struct TokendMoeRun {
    int64_t dtype;  // of input and output: 0 float32, 1 bfloat16
    int64_t num_rows;
    int64_t input_stride;  // bytes; the same below
    const void* input;
    int64_t output_stride;
    void* output;
    int64_t adds;   // 1: adds to what the output holds, rounded once
    void* scratch;  // tokend_moe_bytes, aligned to 64
    int32_t* chosen;  // receives the experts of each row, best first, [num_rows, top_k]; or null
    const TokendStepAdapters* adapters;  // of the rows; or null
};

// Returns the bytes of scratch memory for a run of `num_rows` rows.
__attribute__((visibility("default"))) int64_t tokend_moe_bytes(const TokendMoe* moe, int64_t dtype, int64_t num_rows);

// Computes the mixture for all rows. May be called by every thread of a team (team.h); a thread
// then returns when its own rows of the output are written.
__attribute__((visibility("default"))) void tokend_moe_run(const TokendMoe* moe, const TokendMoeRun* run);
}
