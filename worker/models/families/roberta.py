"""RoBERTa and XLM-RoBERTa: BERT whose positions begin after the padding token's id."""

from worker.models.config_reader import ConfigReader
from worker.models.families.base import Family, Gguf, ModelSpec
from worker.models.families.bert import bert_like


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; the rows of positions up to `pad_token_id` belong to no token."""
    return bert_like(config, first_position=config.integer("pad_token_id", 1, least=0) + 1)


FAMILY = Family(
    models={
        "RobertaModel": "RoBERTa, cross encoders of it",
        "XLMRobertaModel": "XLM-RoBERTa, BGE-M3 (dense), multilingual E5",
    },
    model_types=("xlm-roberta", "roberta"),
    spec=spec,
    gguf=Gguf(name="", pooling_name="bert"),
    is_encoder=True,
)
