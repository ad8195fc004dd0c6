"""DeepSeek-V2: latent attention, and softmax scores of experts, by groups in the large model."""

from worker.layers.router import RouterSpec
from worker.models.common import dense_and_sparse, latent_decoder, router_from_config
from worker.models.config_reader import ConfigReader
from worker.models.moe import MoeSpec
from worker.models.parts import PartSpec
from worker.models.spec import ModelSpec

MODEL_TYPE = "deepseek_v2"


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; experts are chosen among all, or with `group_limited_greedy` by groups."""
    config.must_be("scoring_func", "softmax")
    config.must_be("norm_topk_prob", False)
    config.must_be("topk_method", "greedy", "group_limited_greedy")
    is_grouped = config.get("topk_method") == "group_limited_greedy"
    if not is_grouped:
        config.must_be("n_group", 1)
        config.must_be("topk_group", 1)
    router = router_from_config(
        config,
        normalised=False,
        scale=config.number("routed_scaling_factor", 1.0),
        best_of_group=1,
    )
    return latent_decoder(
        config,
        architecture="DeepseekV2ForCausalLM",
        mlps=mixtures_above_dense_layers(config, router),
    )


def mixtures_above_dense_layers(config: ConfigReader, router: RouterSpec) -> tuple[PartSpec, ...]:
    """Return the MLP of each layer: mixtures from `first_k_dense_replace` on, with shared experts.

    Every `moe_layer_freq`th of these layers, by its number, has experts.
    """
    num_dense = config.integer("first_k_dense_replace", 0, least=0)
    step = config.integer("moe_layer_freq", 1)
    return dense_and_sparse(
        config,
        shared_and_routed(config, router),
        lambda layer: layer >= num_dense and layer % step == 0,
    )


def shared_and_routed(config: ConfigReader, router: RouterSpec) -> MoeSpec:
    """Return the mixture of DeepSeek's layers."""
    inner = config.integer("moe_intermediate_size")
    shared = config.get("n_shared_experts")
    num_shared = 0 if shared is None else config.integer("n_shared_experts", least=0)
    return MoeSpec(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=inner,
        router=router,
        shared_size=inner * num_shared,
    )
