"""What a front end reads of a model: its tokenizer and its chat template.

Owns where they are looked for. Reading takes up to a second: a reload does it on a thread.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from api_server.inputs.chat_template import load_chat_template, read_chat_template
from api_server.inputs.rendering import TimedRendering
from api_server.inputs.tokenizer import ModelTokenizer, special_token_texts
from proto.config import ModelConfig
from proto.prepared_model import PreparedModel


@dataclass(frozen=True, slots=True)
class ModelTexts:
    """vocabulary: hex digest of tokenizer.json and the tokens that end an answer."""

    tokenizer: ModelTokenizer
    chat_template: TimedRendering
    vocabulary: str

    @classmethod
    def load(cls, config: ModelConfig, model: PreparedModel) -> "ModelTexts":
        """Raises ModelError for what is missing or cannot be used."""
        folder = config.tokenizer or model.folder
        name = config.served_model_name or model.name
        tokenizer = ModelTokenizer.load(folder)
        variables = special_token_texts(folder)
        if config.chat_template is None:
            template = load_chat_template((folder, model.folder), name, variables)
        else:
            template = read_chat_template(Path(config.chat_template), variables)
        digest = hashlib.sha256(repr(model.eos_token_ids).encode())
        digest.update(Path(folder, "tokenizer.json").read_bytes())
        return cls(tokenizer, TimedRendering(template), digest.hexdigest())
