"""RoBERTa and XLM-RoBERTa: BERT whose positions begin after the padding token's id."""

from worker.models.bert import bert_like
from worker.models.config_reader import ConfigReader
from worker.models.spec import ModelSpec

MODEL_TYPE = ("xlm-roberta", "roberta")


def spec(config: ConfigReader) -> ModelSpec:
    """Return the spec; the rows of positions up to `pad_token_id` belong to no token."""
    (architecture,) = config.get("architectures")
    first = config.integer("pad_token_id", 1, least=0) + 1
    return bert_like(config, architecture=architecture, first_position=first)
