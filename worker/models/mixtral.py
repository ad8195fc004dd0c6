"""Mixtral: Mistral's layers with a mixture of experts as MLP."""

from typing import Final

from worker.models.common import (
    dense_and_sparse,
    llama_like,
    router_from_config,
    window_from_config,
    windows_of_all_layers,
)
from worker.models.config_reader import ConfigReader
from worker.models.moe import MoeNames, MoeSpec
from worker.models.spec import ModelSpec

MODEL_TYPE = "mixtral"
_NAMES: Final = MoeNames(
    router="block_sparse_moe.gate",
    experts="block_sparse_moe.experts",
    gate="w1",
    up="w3",
    down="w2",
)


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; the weights of a token's experts are a softmax over their logits."""
    config.must_be("hidden_act", "silu", "swish")
    mixture = MoeSpec(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        router=router_from_config(config),
        names=_NAMES,
    )
    return llama_like(
        config,
        architecture="MixtralForCausalLM",
        windows=windows_of_all_layers(config, window_from_config(config)),
        attention={"interleaved_in": ("gguf",)},
        mlps=dense_and_sparse(config, mixture, lambda layer: True),
    )
