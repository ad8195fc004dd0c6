"""StarCoder 2: LayerNorms, biases everywhere, and an MLP without a gate."""

from dataclasses import replace

from worker.models.config_reader import ConfigReader
from worker.models.families.base import NORM_EPS, QUERY_BIAS, WINDOW, Family, Gguf, ModelSpec
from worker.models.layout import num_layers_of, window_from_config, windows_of_all_layers


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; `use_bias` is for all linear layers, norms always have a bias."""
    from worker.models.common import attention_decoder, llama_attention
    from worker.models.mlp import MlpSpec

    config.must_be("hidden_act", "gelu_pytorch_tanh")
    config.must_be("norm_type", "layer_norm")
    config.get("activation_function")  # an older name, which transformers does not read
    bias = config.flag("use_bias", True)
    attention = llama_attention(config, bias=bias)
    windows = windows_of_all_layers(config, window_from_config(config))
    mlp = MlpSpec(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        activation="gelu_tanh",
        bias=bias,
        is_gated=False,
        up="mlp.c_fc",
        down="mlp.c_proj",
    )
    mlps = [mlp] * num_layers_of(config)
    return replace(
        attention_decoder(config, attention, windows, mlps=mlps, tied=True),
        norm_type="layer",
        norm_bias=True,
        norm_eps=config.number("norm_epsilon", 1e-5),
    )


FAMILY = Family(
    models={"Starcoder2ForCausalLM": "StarCoder 2"},
    model_types=("starcoder2",),
    spec=spec,
    gguf=Gguf(
        name="starcoder2",
        keys={NORM_EPS: "norm_epsilon", WINDOW: "sliding_window"},
        flags={"use_bias": QUERY_BIAS},
    ),
)
