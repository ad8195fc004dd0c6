"""Which tokens end an answer, and what in the model's files says so.

    generation_config.json, config.json      ids under eos_token_id, eot_token_id, eom_token_id
    tokenizer.ggml. in a GGUF file           the same keys
    tokenizer_config.json                    texts under eos_token, eot_token, eom_token
    chat templates                           the texts of TURN_ENDS that they write

With --tokenizer or --chat-template the tokenizer and templates that these name add theirs.

All of them count. A fine-tune for chats often keeps the ids of its base model, which never wrote
the end of a turn: without the others its answers would continue with turns of the user.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from msgspec import structs

from proto.errors import ModelError
from proto.messages.prepared_model import (
    CHAT_TEMPLATES,
    MAX_TEMPLATE_BYTES,
    PreparedModel,
    read_model_file,
)
from proto.settings.config import ModelConfig

END_TOKENS: Final = ("eos_token", "eot_token", "eom_token")
TURN_ENDS: Final = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<|EOT|>", "<EOT>", "[EOT]"),
    *("<end_of_turn>", "<turn|>", "<|tool_response>", "<|end_of_turn|>", "<|END_OF_TURN_TOKEN|>"),
    *("<|endofturn|>", "[|endofturn|]", "<|assistant_end|>", "<|role_end|>", "<end_of_utterance>"),
    *("<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<|user|>", "<|observation|>"),
    *("<|endoftext|>", "<|end_of_text|>", "<|end_of_sentence|>", "<｜end▁of▁sentence｜>"),
    *("</s>", "<eos>", "<seed:eos>", "[EOS]", "[e~["),
)
"""Texts of special tokens that end a turn of a chat, if the model's template writes them."""
_MESSAGE_ENDS: Final = ("<|end|>", "<|eom|>")
_MESSAGE_PARTS: Final = ("<|message|>", "<|call|>", "<|calls|>", "<|return|>")
"""Special tokens of models whose answer is several messages, reasoning first: there a token of
_MESSAGE_ENDS ends a message, and the answer goes on."""
_NEXT_TURNS: Final = ("<|user|>", "<|observation|>")
"""GLM ends an answer with the start of the next turn. Other models begin turns with <|user|> too,
but have no <|observation|>."""
_COMMENT: Final = re.compile(r"\{#.*?(?:#\}|\Z)", re.DOTALL)
"""One without an end takes the rest, so that many of them are not each searched to the end."""
_EOS_VARIABLE: Final = re.compile(r"\beos_token\b")


def with_end_tokens(model: PreparedModel, config: ModelConfig) -> PreparedModel:
    """Return the manifest with the end tokens of the tokenizer and template of the settings too.

    Raises ModelError for a file that cannot be read.
    """
    if not model.generates or (config.tokenizer is None and config.chat_template is None):
        return model
    folder = Path(config.tokenizer or model.folder)
    paths = [folder / file for file in CHAT_TEMPLATES.values()]
    if config.chat_template is not None:
        paths = [Path(config.chat_template)]
    settings = folder / "tokenizer_config.json"
    try:
        found = find_turn_ends(
            (),
            read_model_file(folder / "tokenizer.json"),
            json.loads(read_model_file(settings)) if settings.is_file() else {},
            [
                read_model_file(path, MAX_TEMPLATE_BYTES).decode()
                for path in paths
                if path.is_file()
            ],
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelError(f"{folder}: no end tokens of the tokenizer: {error}") from None
    more = {
        token_id: why
        for token_id, why in found.items()
        if token_id < model.vocab_size and token_id not in model.eos_token_ids
    }
    return structs.replace(
        model,
        eos_token_ids=(*model.eos_token_ids, *more),
        end_reasons=(*model.end_reasons, *more.values()),
    )


def find_turn_ends(
    ids: Iterable[tuple[int, str]],
    tokenizer_json: bytes,
    tokenizer_config: Any,
    templates: Iterable[str],
) -> dict[int, str]:
    """Return the text of each token that ends an answer, and in brackets what says so, by id.

    ids: tokens that the model's files name, each with the place. tokenizer_config: the content of
    tokenizer_config.json. Raises ValueError for files that are not a tokenizer's.
    """
    if not isinstance(tokenizer_config, Mapping):
        raise ValueError("tokenizer_config.json must contain a JSON object")
    ids_of, special = _vocabulary(json.loads(tokenizer_json))
    found = list(ids)
    for name in END_TOKENS:
        text = tokenizer_config.get(name)
        text = text.get("content") if isinstance(text, dict) else text
        if isinstance(text, str) and text in ids_of:
            found.append((ids_of[text], f"tokenizer's {name}"))
    eos = [token_id for token_id, place in found if "eos_token" in place]
    for template in templates:
        source = _COMMENT.sub("", template)
        written = [special[text] for text in _turn_ends_of(special) if text in source]
        if _EOS_VARIABLE.search(source):
            written += eos
        found += ((token_id, "chat template") for token_id in written)
    places: dict[int, dict[str, None]] = {}
    for token_id, place in found:
        places.setdefault(token_id, {})[place] = None
    texts = {token_id: text for text, token_id in ids_of.items() if token_id in places}
    return {
        token_id: f"{texts.get(token_id, 'unnamed')} ({', '.join(each)})"
        for token_id, each in places.items()
    }


def _vocabulary(tokenizer: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the ids of all tokens of a tokenizer.json, and those of its special tokens."""
    model: Mapping[str, Any] = tokenizer.get("model") or {}
    vocabulary = model.get("vocab") or {}
    if isinstance(vocabulary, list):  # of unigrams: text and score
        vocabulary = {entry[0]: token_id for token_id, entry in enumerate(vocabulary)}
    added = tokenizer.get("added_tokens") or []
    special = {token["content"]: token["id"] for token in added if token["special"]}
    return {**vocabulary, **{token["content"]: token["id"] for token in added}}, special


def _turn_ends_of(special: Mapping[str, int]) -> Iterator[str]:
    """Yield those of TURN_ENDS that are special tokens of a vocabulary and end a turn there."""
    has_messages = not special.keys().isdisjoint(_MESSAGE_PARTS)
    for text in TURN_ENDS:
        if text not in special or (has_messages and text in _MESSAGE_ENDS):
            continue
        if text not in _NEXT_TURNS or special.keys() >= set(_NEXT_TURNS):
            yield text
