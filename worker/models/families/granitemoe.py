"""Granite 3 with a mixture of experts as MLP: 1B-A400M, 3B-A800M."""

from dataclasses import replace
from typing import TYPE_CHECKING

from worker.models.config_reader import ConfigReader
from worker.models.families.base import SOFTMAX, Family, Gguf, ModelSpec
from worker.models.families.granite import GRANITE_KEYS, granite_attention, granite_decoder

if TYPE_CHECKING:
    from worker.models.moe import MoeSpec


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; the weights of a token's experts are a softmax over their logits."""
    from worker.models.common import attention_layers, dense_and_sparse

    mlps = dense_and_sparse(config, granite_mixture(config), lambda layer: True)
    return granite_decoder(config, attention_layers(config, granite_attention(config)), mlps)


def granite_mixture(config: ConfigReader) -> "MoeSpec":
    """Return the mixture of a layer, without a shared expert."""
    from worker.models.common import moe_spec, router_from_config
    from worker.models.moe import MoeNames

    config.must_be("hidden_act", "silu", "swish")
    return replace(
        moe_spec(config, router_from_config(config), "intermediate_size"),
        names=MoeNames(
            router="block_sparse_moe.router.layer",
            experts=None,
            stacked_gate_up="block_sparse_moe.input_linear.weight",
            stacked_down="block_sparse_moe.output_linear.weight",
        ),
    )


FAMILY = Family(
    models={"GraniteMoeForCausalLM": "Granite 3 1B-A400M, 3B-A800M"},
    model_types=("granitemoe",),
    spec=spec,
    gguf=Gguf(name="granitemoe", keys=GRANITE_KEYS, gating=SOFTMAX),
)
