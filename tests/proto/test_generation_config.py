"""Sampling defaults from a model's settings, the flags, and both together."""

import json
from pathlib import Path
from typing import Any

import pytest

from proto.errors import ConfigError, ModelError, TokendError
from proto.settings.config import ModelConfig
from proto.settings.generation_config import GenerationDefaults, generation_defaults, model_settings
from tests.fakes import lifecycle_messages

OF_FILE = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}


def defaults(settings: dict[str, Any], **config: Any) -> GenerationDefaults:
    model = lifecycle_messages.model(source="/m", generation_settings=model_settings(settings))
    return generation_defaults(ModelConfig(**config), model)


@pytest.mark.parametrize(
    ("settings", "values", "not_applied"),
    [
        ({}, {}, ()),
        ({**OF_FILE, "do_sample": False, "eos_token_id": 2}, OF_FILE, ()),
        ({"temperature": 0, "top_k": 0, "min_p": None, "top_p": 1}, None, ()),
        ({"top_k": 50.0, "max_new_tokens": 2048}, {"top_k": 50, "max_tokens": 2048}, ()),
        (
            {"typical_p": 0.9, "num_beams": 1, "suppress_tokens": [3]},
            {},
            ("typical_p", "suppress_tokens"),
        ),
        (
            {
                "general.sampling.temp": 0.7,
                "general.sampling.penalty_repeat": 1.1,
                "general.sampling.penalty_last_n": 64,
                "general.sampling.mirostat": 2,
                "general.sampling.xtc_probability": 0.0,
            },
            {"temperature": 0.7, "repetition_penalty": 1.1},
            ("general.sampling.penalty_last_n", "general.sampling.mirostat"),
        ),
        (
            {"general.sampling.penalty_repeat": 1.1, "general.sampling.penalty_last_n": 0},
            {},
            (),
        ),
    ],
)
def test_settings_of_a_model(
    settings: dict[str, Any], values: dict[str, float] | None, not_applied: tuple[str, ...]
) -> None:
    found = defaults(settings)
    assert found.values == (
        values if values is not None else {"temperature": 0, "top_k": 0, "top_p": 1}
    )
    assert found.not_applied == not_applied
    assert all(name in str(found) for name in (*found.values, *not_applied))
    without = defaults(settings, generation_config="vllm")
    assert (without.values, str(without)) == ({}, "")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -1),
        ("temperature", True),
        ("temperature", float("nan")),
        ("top_p", "x"),
        ("top_p", 0),
        ("top_k", 1.5),
        ("top_k", -2),
        ("top_k", 10**400),
        ("min_p", [0.5]),
        ("repetition_penalty", 0.0),
        ("max_new_tokens", 0),
        ("general.sampling.temp", -0.5),
    ],
)
def test_an_invalid_value_names_file_and_key(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"^/m.*: {key} must be .*--generation-config vllm"):
        defaults({key: value})
    assert defaults({key: value}, generation_config="vllm").values == {}
    (tmp_path / "generation_config.json").write_text(json.dumps({key: value}))
    with pytest.raises(ModelError, match=f"{tmp_path}/generation_config.json: {key} must be"):
        defaults({}, generation_config=str(tmp_path))
    if not key.startswith("general"):
        with pytest.raises(ConfigError, match=f"--override-generation-config: {key} must be"):
            defaults({}, override_generation_config=json.dumps({key: value}))


def test_flags_replace_the_models_settings(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_p": 0.5, "seed": 1}))
    assert defaults(OF_FILE, generation_config=str(tmp_path)).values == {"top_p": 0.5}
    override = json.dumps({"temperature": 1.0, "top_k": None, "min_p": 0.1})
    found = defaults(OF_FILE, override_generation_config=override)
    expected = OF_FILE | {"temperature": 1.0, "min_p": 0.1}
    del expected["top_k"]
    assert found.values == expected
    assert "generation_config.json, --override-generation-config" in str(found)
    replaced = defaults({"temperature": 1.5}, override_generation_config='{"temperature": 0.5}')
    assert "generation_config.json" not in str(replaced), "no value of the file is left"
    only = defaults(OF_FILE, generation_config="vllm", override_generation_config=override)
    assert only.values == {"temperature": 1.0, "min_p": 0.1}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"generation_config": "/nowhere"},
            "--generation-config .*/nowhere/generation_config.json",
        ),
        ({"override_generation_config": "{"}, "--override-generation-config"),
        ({"override_generation_config": "[1]"}, "must be a JSON object"),
        ({"override_generation_config": '{"do_sample": true}'}, "do_sample is none of temperature"),
    ],
)
def test_invalid_flags(config: dict[str, str], message: str) -> None:
    with pytest.raises(TokendError, match=message):
        defaults({}, **config)
