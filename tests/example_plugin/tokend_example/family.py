"""A family of models: imported without torch, too, so what has tensors is imported in `spec`."""

from typing import TYPE_CHECKING

from worker.models.config_reader import ConfigReader
from worker.models.families.base import Family

if TYPE_CHECKING:
    from worker.models.spec import ModelSpec


def spec(config: ConfigReader) -> "ModelSpec":
    """Return a model like Llama."""
    from worker.models.common import attention_decoder, llama_attention

    return attention_decoder(config, llama_attention(config))


FAMILY = Family(models={"ExampleForCausalLM": "Example"}, model_types=("example",), spec=spec)
