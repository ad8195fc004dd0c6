// Prints the prompts that llama.cpp makes of requests to /infill, and the tokens that end a text:
//
//     infill_ids VOCABULARY.gguf REQUESTS.json
//
// The two functions that make prompts are taken from llama.cpp's server, which need not be built.
// In the sources that tests/peers/packages.py unpacks, with libllama and ggml built static in BUILD:
//
//     for name in tokenize_mixed format_prompt_infill; do
//       sed -n "/^llama_tokens $name/,/^}/p" tools/server/server-common.cpp
//     done > server_functions.inc
//     g++ -O1 -std=c++17 -I. -Iinclude -Iggml/include -Ivendor infill_ids.cpp -o infill_ids \
//       BUILD/src/libllama.a BUILD/ggml/src/libggml.a BUILD/ggml/src/libggml-cpu.a \
//       BUILD/ggml/src/libggml-base.a -lpthread -ldl
#include "llama.h"

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>

using json = nlohmann::ordered_json;
using llama_tokens = std::vector<llama_token>;

template <typename T>
static T json_value(const json & body, const std::string & key, const T & fallback) {
    return body.contains(key) && !body.at(key).is_null() ? body.at(key).get<T>() : fallback;
}

static llama_tokens common_tokenize(
    const llama_vocab * vocab, const std::string & text, bool add_special, bool parse_special) {
    llama_tokens ids(text.size() + 2);
    const int number = llama_tokenize(
        vocab, text.data(), text.size(), ids.data(), ids.size(), add_special, parse_special);
    if (number < 0) {
        abort();
    }
    ids.resize(number);
    return ids;
}

#define SRV_DBG(...)
#include "server_functions.inc"

int main(int, char ** arguments) {
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    auto params = llama_model_default_params();
    params.vocab_only = true;
    llama_model * model = llama_model_load_from_file(arguments[1], params);
    if (model == nullptr) {
        fprintf(stderr, "cannot load %s\n", arguments[1]);
        return 1;
    }
    const llama_vocab * vocab = llama_model_get_vocab(model);
    json prompts = json::array(), ends = json::array();
    for (auto & body : json::parse(std::ifstream(arguments[2]))) {
        const auto written = tokenize_mixed(vocab, json_value(body, "prompt", std::string()), false, true);
        const json extra = json_value(body, "input_extra", json::array());
        prompts.push_back(format_prompt_infill(
            vocab, body.at("input_prefix"), body.at("input_suffix"), extra, body.at("n_batch"),
            body.at("n_predict"), body.at("n_ctx"), json_value(body, "spm", false), written));
    }
    for (int id = 0; id < llama_vocab_n_tokens(vocab); id++) {
        if (llama_vocab_is_eog(vocab, id)) {
            ends.push_back(id);
        }
    }
    std::cout << json{{"ends", ends}, {"prompts", prompts}}.dump() << std::endl;
}
