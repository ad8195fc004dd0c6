"""--speculative-config: vLLM's keys, several methods, and one line for each error."""

import json

import pytest

from proto.errors import ConfigError
from proto.settings.config import ServeConfig, SpeculationConfig
from proto.settings.config_checks import validate
from proto.settings.speculative_config import SpeculativeConfig, parse_speculative_config


def test_by_default_there_is_no_speculation():
    assert parse_speculative_config(None, 16) == SpeculativeConfig()


@pytest.mark.parametrize(
    ("method", "methods"),
    [
        ("suffix", ("suffix",)),
        ("suffix+grammar", ("suffix", "grammar")),
        (["ngram", "suffix", "grammar"], ("ngram", "suffix", "grammar")),
        ("none", ()),
    ],
)
def test_methods(method, methods):
    assert parse_speculative_config(json.dumps({"method": method}), 16).methods == methods


def test_keys_of_the_methods_are_read():
    text = json.dumps(
        {
            "method": "ngram+suffix",
            "num_speculative_tokens": 5,
            "prompt_lookup_max": 4,
            "suffix_decoding_max_tree_depth": 24,
            "suffix_decoding_max_cached_requests": 0,
            "suffix_decoding_max_spec_factor": 2,
            "suffix_decoding_min_token_prob": 0,
        }
    )
    config = parse_speculative_config(text, 8)
    assert config == SpeculativeConfig(
        methods=("ngram", "suffix"),
        max_tokens=8,
        num_speculative_tokens=5,
        prompt_lookup_min=4,
        prompt_lookup_max=4,
        suffix_decoding_max_tree_depth=24,
        suffix_decoding_max_cached_requests=0,
        suffix_decoding_max_spec_factor=2,
        suffix_decoding_min_token_prob=0,
    )
    assert parse_speculative_config('{"method": "suffix"}', 8).num_speculative_tokens == 8
    config = parse_speculative_config('{"model": "a", "max_model_len": 4096}', 8)
    assert config.methods == ("draft_model",)
    assert (config.model_method, config.model, config.max_model_len) == ("draft_model", "a", 4096)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "takes JSON"),
        ("[]", "takes a JSON object"),
        ("{}", "method takes a name"),
        ('{"method": ""}', "method  is unknown"),
        ('{"method": 3}', "method takes a name"),
        ('{"method": []}', "method takes a name"),
        ('{"method": "medusa"}', "method medusa is unknown; there are suffix, ngram, grammar"),
        ('{"method": "suffix+none"}', "method none is unknown"),
        ('{"method": "suffix+suffix"}', "method names suffix twice"),
        ('{"method": "suffix+eagle3"}', "method eagle3 needs the key model"),
        ('{"method": "draft_model", "model": ""}', "model takes a name or a path"),
        ('{"method": "draft_model+eagle", "model": "x"}', "names draft_model and eagle"),
        ('{"model": "x", "quantization": "fp8"}', "quantization is not supported: the weights"),
        ('{"model": "x", "max_model_len": 0}', r"max_model_len must be in \[1, "),
        ('{"method": "suffix", "model": "x"}', "goes with method draft_model or eagle or eagle3"),
        ('{"method": "suffix", "draft_tensor_parallel_size": 1}', "draft_tensor_parallel_size"),
        ('{"method": "suffix", "prompt_lookup_min": 2}', "prompt_lookup_min goes with method ngra"),
        ('{"method": "grammar", "num_speculative_tokens": 2}', "goes with method ngram or suff"),
        ('{"method": "suffix", "tokens": 2}', "has no tokens; it has method, num_speculative_tok"),
        ('{"method": "suffix", "num_speculative_tokens": 0}', r"must be in \[1, 64\], got 0"),
        ('{"method": "ngram", "num_speculative_tokens": 10000}', r"in \[1, 64\], got 10000"),
        ('{"method": "ngram", "num_speculative_tokens": "4"}', "takes a whole number, got 4"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "takes a whole number"),
        ('{"method": "ngram", "num_speculative_tokens": null}', "takes a whole number"),
        ('{"method": "ngram", "prompt_lookup_min": 0}', r"prompt_lookup_min must be in \[1, 64\]"),
        ('{"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3}', "not be more than"),
        ('{"method": "suffix", "suffix_decoding_max_tree_depth": 1}', r"in \[2, 256\], got 1"),
        ('{"method": "suffix", "suffix_decoding_min_token_prob": 1.5}', r"in \[0, 1\], got 1.5"),
        ('{"method": "suffix", "suffix_decoding_max_spec_factor": "a"}', "takes a number, got a"),
        ('{"method": "suffix", "suffix_decoding_max_cached_requests": -1}', "got -1"),
    ],
)
def test_errors_name_the_key_on_one_line(text, message):
    config = ServeConfig(speculation=SpeculationConfig(speculative_config=text))
    with pytest.raises(ConfigError, match=message) as raised:
        validate(config)
    assert raised.value.param == "speculative_config"
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith("--speculative-config")


@pytest.mark.parametrize("max_tokens", [0, -1, 65, 10_000])
def test_the_longest_draft_is_limited(max_tokens):
    speculation = SpeculationConfig(speculative_max_tokens=max_tokens)
    with pytest.raises(ConfigError, match="--speculative-max-tokens must be in") as raised:
        validate(ServeConfig(speculation=speculation))
    assert raised.value.param == "speculative_max_tokens"
