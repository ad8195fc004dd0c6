"""Mixtral: Mistral's layers with a mixture of experts as MLP."""

from dataclasses import replace

from worker.models.config_reader import ConfigReader
from worker.models.families.base import SOFTMAX, Family, Gguf, ModelSpec
from worker.models.layout import window_from_config, windows_of_all_layers


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; the weights of a token's experts are a softmax over their logits."""
    from worker.models.common import (
        attention_decoder,
        dense_and_sparse,
        llama_attention,
        moe_spec,
        router_from_config,
    )
    from worker.models.moe import MoeNames

    config.must_be("hidden_act", "silu", "swish")
    experts = replace(
        moe_spec(config, router_from_config(config), "intermediate_size"),
        names=MoeNames(
            router="block_sparse_moe.gate",
            experts="block_sparse_moe.experts",
            gate="w1",
            up="w3",
            down="w2",
        ),
    )
    attention = replace(llama_attention(config), rope_interleaved_in=("gguf",))
    windows = windows_of_all_layers(config, window_from_config(config))
    mlps = dense_and_sparse(config, experts, lambda layer: True)
    return attention_decoder(config, attention, windows, mlps=mlps)


FAMILY = Family(
    models={"MixtralForCausalLM": "Mixtral"},
    model_types=("mixtral",),
    spec=spec,
    gguf=Gguf(name="llama", is_marked=lambda keys: bool(keys.get("expert_count")), gating=SOFTMAX),
)
