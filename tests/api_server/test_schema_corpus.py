"""JSON schemas that others wrote: they compile, and random answers conform to them.

The schemas are those of the models of the OpenAI and Anthropic SDKs, as Pydantic gives them to
`response_format`, and the selection of the JSON Schema Test Suite that is stored here.
TOKEND_TEST_SCHEMAS names a folder of further ones, such as a checkout of JSONSchemaBench: each
*.json file is a schema, or has one as "schema" beside "tests" with instances. Rates are printed
(pytest -s).
"""

import importlib
import json
import os
import pkgutil
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from pydantic import BaseModel
from referencing.exceptions import Unresolvable

from api_server.protocol.json_schema import SchemaWork, rewrite_schema
from engine_core.structured_output.backend import LLGuidanceBackend
from engine_core.structured_output.matchers import GrammarError, Matcher, mask_words
from proto.errors import InvalidRequestError
from proto.messages.grammar import MAX_GRAMMAR_BYTES, GrammarSource
from tests.fakes.toy_vocabulary import EOS, SIZE, text_of, tokens_of, write_toy_tokenizer

pytestmark = pytest.mark.suite("schemas")

SDKS = ("openai.types", "anthropic.types")
NUM_MODELS = 400
NUM_FILES = 500
SUITE = Path(__file__).parent / "json_schema" / "suite.jsonl"
DRAFTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
FREE_TOKENS = 60
"""After these a walk takes short ways to the end."""
MAX_TOKENS = 4_000
CLOSING = tuple(tokens_of('"}]0') + tokens_of("ntfaul{[:,-1. "))
"""Tokens that lead to the end of a JSON value, the best first."""

Document = tuple[str, Any, list[tuple[Any, bool]]]
"""Name, schema, and instances with whether they are valid."""


def sdk_models() -> Iterator[Document]:
    """Schemas of a seeded selection of the SDKs' models."""
    models: dict[str, type[BaseModel]] = {}
    for package in map(importlib.import_module, SDKS):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            for value in vars(importlib.import_module(module.name)).values():
                if isinstance(value, type) and issubclass(value, BaseModel):
                    models[f"{value.__module__}.{value.__name__}"] = value
    names = sorted(name for name in models if name.startswith(SDKS))
    for name in random.Random(1).sample(names, NUM_MODELS):
        yield name, models[name].model_json_schema(), []


def public_suite() -> Iterator[Document]:
    for line in SUITE.read_text().splitlines():
        case = json.loads(line)
        schema = case["schema"]
        if isinstance(schema, dict):
            schema = {"$schema": DRAFTS[case["draft"]], **schema}
        yield f"{case['draft']} {case['keyword']}: {case['description']}", schema, case["tests"]


def files_of_a_folder() -> Iterator[Document]:
    """A seeded selection of the files in the folder that TOKEND_TEST_SCHEMAS names."""
    folder = os.environ.get("TOKEND_TEST_SCHEMAS")
    files = sorted(Path(folder).rglob("*.json")) if folder else []
    for file in random.Random(1).sample(files, min(NUM_FILES, len(files))):
        found = json.loads(file.read_bytes())
        if isinstance(found, dict) and "schema" in found:
            tests = [(test["data"], test["valid"]) for test in found.get("tests", [])]
            yield file.stem, found["schema"], tests
        else:
            yield file.stem, found, []


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> LLGuidanceBackend:
    return LLGuidanceBackend(write_toy_tokenizer(tmp_path_factory.mktemp("toy")), SIZE, (EOS,))


def random_text(backend: LLGuidanceBackend, matcher: Matcher, seed: int) -> str | None:
    """Return a text of tokens that the masks allow; None if it does not end."""
    draw, token_ids = random.Random(seed), []
    masks = np.empty((1, mask_words(SIZE)), dtype=np.int32)
    for number in range(MAX_TOKENS):
        backend.fill_masks([matcher], masks)
        assert matcher.error == ""
        bits = np.unpackbits(masks[0].view(np.uint8), bitorder="little")
        choices = np.flatnonzero(bits).tolist()
        if EOS in choices and (number > FREE_TOKENS or len(choices) == 1 or draw.random() < 0.2):
            return text_of(token_ids)
        choices = [token_id for token_id in choices if token_id != EOS]
        closing = [token_id for token_id in CLOSING if token_id in choices]
        if closing and draw.random() < (0.3 if number < FREE_TOKENS else 0.9):
            token_ids.append(closing[0])
        else:
            token_ids.append(draw.choice(choices))
        matcher.consume(token_ids[-1:])
    return None


def conforms(schema: Any, text: str) -> bool | None:
    """Return whether JSON conforms to a schema; None if jsonschema cannot say.

    It takes patterns for Python's, and loads no other documents.
    """
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    try:
        return bool(kind(schema, format_checker=kind.FORMAT_CHECKER).is_valid(json.loads(text)))
    except (re.error, Unresolvable):
        return None


@pytest.mark.parametrize(
    ("documents", "compiled_floor", "ended_floor"),
    [(sdk_models, 1.0, 1.0), (public_suite, 0.9, 0.98), (files_of_a_folder, 0.98, 0.98)],
)
def test_schemas_of_others(backend, documents, compiled_floor, ended_floor):
    """Nearly all compile; a random answer ends and is valid, unless a keyword is reported."""
    counts, wrong, refused = Counter[str](), [], []
    for seed, (name, schema, instances) in enumerate(documents()):
        if len(json.dumps(schema)) > MAX_GRAMMAR_BYTES:
            continue
        counts["schemas"] += 1
        try:
            rewritten, removed = rewrite_schema(schema, SchemaWork())
            source = GrammarSource("json_schema", json.dumps(rewritten))
            matcher = backend.compile(source)
        except (InvalidRequestError, GrammarError) as error:
            refused.append((name, error.message))
            continue
        counts["compiled"] += 1
        text = random_text(backend, matcher.copy(), seed)
        counts["ended"] += text is not None
        if text is not None and not removed:
            is_valid = conforms(schema, text)
            counts[f"answers, valid: {is_valid}"] += 1
            if is_valid is False:
                wrong.append((name, text))
        for value, is_valid in instances:
            token_ids = tokens_of(json.dumps(value, ensure_ascii=False))
            inner = matcher.copy().inner
            accepted = inner.try_consume_tokens(token_ids) == len(token_ids)
            accepted = accepted and inner.is_accepting()
            counts[f"{'valid' if is_valid else 'invalid'}, accepted: {accepted}"] += 1
            if accepted and not is_valid and not removed:
                wrong.append((name, value))
    print(documents.__name__, dict(counts), *refused, *wrong, sep="\n")
    assert wrong == []
    assert counts["compiled"] >= compiled_floor * counts["schemas"], refused
    assert counts["ended"] >= ended_floor * counts["compiled"]
