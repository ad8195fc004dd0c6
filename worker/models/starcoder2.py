"""StarCoder 2: LayerNorms, biases everywhere, and an MLP without a gate."""

from worker.models.common import llama_like, window_from_config, windows_of_all_layers
from worker.models.config_reader import ConfigReader
from worker.models.mlp import MlpSpec
from worker.models.spec import ModelSpec

MODEL_TYPE = "starcoder2"


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; `use_bias` is for all linear layers, norms always have a bias."""
    config.must_be("hidden_act", "gelu_pytorch_tanh")
    config.must_be("norm_type", "layer_norm")
    config.get("activation_function")  # an older name, which transformers does not read
    bias = config.flag("use_bias", True)
    mlp = MlpSpec(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        activation="gelu_tanh",
        bias=bias,
        is_gated=False,
        up="mlp.c_fc",
        down="mlp.c_proj",
    )
    return llama_like(
        config,
        architecture="Starcoder2ForCausalLM",
        windows=windows_of_all_layers(config, window_from_config(config)),
        attention={"qkv_bias": bias, "output_bias": bias},
        mlps=[mlp] * config.integer("num_hidden_layers"),
        norm_kind="layer",
        norm_bias=True,
        norm_eps=config.number("norm_epsilon", 1e-5),
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )
