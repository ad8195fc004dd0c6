"""Granite 3 with a mixture of experts as MLP: 1B-A400M, 3B-A800M."""

from typing import Final

from worker.models.common import dense_and_sparse, llama_like, router_from_config
from worker.models.config_reader import ConfigReader
from worker.models.granite import factors
from worker.models.moe import MoeNames, MoeSpec
from worker.models.spec import ModelSpec

MODEL_TYPE = "granitemoe"
_NAMES: Final = MoeNames(
    router="block_sparse_moe.router.layer",
    experts=None,
    stacked_gate_up="block_sparse_moe.input_linear.weight",
    stacked_down="block_sparse_moe.output_linear.weight",
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
        architecture="GraniteMoeForCausalLM",
        mlps=dense_and_sparse(config, mixture, lambda layer: True),
        **factors(config),
    )
