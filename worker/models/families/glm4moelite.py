"""GLM-4.7-Flash: the layers of DeepSeek-V3, some of them with a dense MLP."""

from worker.models.config_reader import ConfigReader
from worker.models.families.base import Family, Gguf, ModelSpec
from worker.models.layout import num_layers_of


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; `mlp_layer_types` says which layers have experts, else all but the first."""
    from worker.models.common import (
        deepseek_mixture,
        dense_and_sparse,
        latent_decoder,
        sigmoid_router,
    )

    config.must_be("topk_method", "noaux_tc")
    kinds, num_layers = config.get("mlp_layer_types"), num_layers_of(config)
    num_dense = config.integer("first_k_dense_replace", 1, least=0)
    if kinds is None:
        kinds = ["dense" if layer < num_dense else "sparse" for layer in range(num_layers)]
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or any(kind not in ("dense", "sparse") for kind in kinds)
    ):
        reason = f"{num_layers} of dense and sparse are needed"
        raise config.refusal("mlp_layer_types", kinds, reason)
    mixture = deepseek_mixture(config, sigmoid_router(config))
    return latent_decoder(
        config,
        dense_and_sparse(config, mixture, lambda layer: kinds[layer] == "sparse"),
        is_interleaved=config.flag("rope_interleave", True),
    )


FAMILY = Family(
    models={"Glm4MoeLiteForCausalLM": "GLM-4.7-Flash"},
    model_types=("glm4_moe_lite",),
    spec=spec,
    gguf=Gguf(name="deepseek2"),
)
