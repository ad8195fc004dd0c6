"""GLM-4.7-Flash: the layers of DeepSeek-V3, some of them with a dense MLP."""

from worker.models.common import dense_and_sparse, latent_decoder
from worker.models.config_reader import ConfigReader
from worker.models.deepseek2 import shared_and_routed
from worker.models.deepseek3 import sigmoid_router
from worker.models.spec import ModelSpec

MODEL_TYPE = "glm4_moe_lite"


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; `mlp_layer_types` says which layers have experts, else all but the first."""
    kinds, num_layers = config.get("mlp_layer_types"), config.integer("num_hidden_layers")
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
    mixture = shared_and_routed(config, sigmoid_router(config))
    return latent_decoder(
        config,
        architecture="Glm4MoeLiteForCausalLM",
        mlps=dense_and_sparse(config, mixture, lambda layer: kinds[layer] == "sparse"),
        is_interleaved=config.flag("rope_interleave", True),
    )
