"""LFM2 with a mixture of experts as MLP in most layers."""

from dataclasses import replace

from worker.models.config_reader import ConfigReader
from worker.models.families.base import SIGMOID, Family, Gguf, ModelSpec, add_heads_of_width
from worker.models.families.lfm2 import LFM2_KEYS, finish_lfm2, lfm2_decoder


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; layers from `num_dense_layers` on have experts, chosen by sigmoid scores."""
    from worker.models.common import dense_and_sparse, moe_spec, sigmoid_router
    from worker.models.moe import MoeNames

    router = replace(sigmoid_router(config), selection_bias=config.flag("use_expert_bias", True))
    experts = replace(
        moe_spec(config, router),
        names=MoeNames(
            router="feed_forward.gate",
            experts="feed_forward.experts",
            gate="w1",
            up="w3",
            down="w2",
            stacked_gate_up="feed_forward.experts.gate_up_proj",
            stacked_down="feed_forward.experts.down_proj",
        ),
    )
    num_dense = config.integer("num_dense_layers", 2, least=0)
    mlps = dense_and_sparse(config, experts, lambda layer: layer >= num_dense)
    decoder = lfm2_decoder(config, mlps)
    bias = ("feed_forward.gate.e_score_correction_bias", "feed_forward.expert_bias")
    return replace(decoder, hugging_face_names=(*decoder.hugging_face_names, bias))


FAMILY = Family(
    models={"Lfm2MoeForCausalLM": "LFM2 with experts"},
    model_types=("lfm2_moe",),
    spec=spec,
    gguf=Gguf(
        name="lfm2moe",
        keys={**LFM2_KEYS, "leading_dense_block_count": "num_dense_layers"},
        gating=SIGMOID,
        add_heads=add_heads_of_width,
        finish=finish_lfm2,
    ),
)
