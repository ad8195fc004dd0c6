"""Flags of vLLM, llama.cpp and others on tokend's command line: taken, explained or translated."""

import pytest

from deploy import flags
from deploy.foreign_flags import MEANT, MISSING, NO_EFFECT, SAME
from proto.settings.config import ServeConfig
from tests.deploy.test_flags import built, refusal

KNOWN = {flag.name for flag in flags.all_flags()} | {
    flag.negation for flag in flags.all_flags() if flag.kind == "bool"
}
"""tokend's own flags."""


def test_what_stands_in_the_tables_exists_here() -> None:
    for meant in MEANT.values():
        assert not meant.startswith("-") or meant.split()[0] in KNOWN, meant
    own = {name.lstrip("-") for name in KNOWN}
    for table in (MEANT, MISSING, NO_EFFECT, SAME):
        assert not own & table.keys()
    for same in SAME.values():
        for words in same.values():
            flags.parse(words)
    assert not MISSING.keys() & (NO_EFFECT.keys() | SAME.keys())
    assert not NO_EFFECT.keys() & SAME.keys()


@pytest.mark.parametrize("name", NO_EFFECT)
def test_flags_without_effect_are_taken_with_a_notice(name: str) -> None:
    values = NO_EFFECT[name].values
    operands = [[]] if values == () else [[value] for value in values or ("anything",)]
    for operand in operands:
        for words in ([f"--{name}", *operand], [f"--{name.replace('-', '_')}", *operand]):
            parsed = flags.parse([*words, "--port", "7"])
            assert flags.build(parsed) == built("--port", "7")
            assert parsed.notices == [f"--{name} has no effect: {NO_EFFECT[name].reason}"]
        if operand:
            assert flags.parse([f"--{name}={operand[0]}"]).notices
    if values:
        assert f"--{name} other is not available" in refusal(f"--{name}", "other")
    if values == ():
        assert f"--{name} takes no value" in refusal(f"--{name}=1")
    else:
        assert f"--{name} needs a value" in refusal(f"--{name}")


@pytest.mark.parametrize("name", SAME)
def test_flags_with_another_name_are_taken(name: str) -> None:
    for value, words in SAME[name].items():
        given = [f"--{name}", *([value] if value else [])]
        assert flags.parse(given).notices == []
        assert built(*given) == built(*words)
    if "" not in SAME[name]:
        assert f"--{name} takes one of" in refusal(f"--{name}", "other")


@pytest.mark.parametrize("name", MISSING)
def test_what_is_missing_is_named(name: str) -> None:
    assert refusal(*f"--{name}".split(), "x") == f"--{name} is not available: {MISSING[name]}"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--quantization", "fp8"], "--quantization fp8 is not available; see --cpu-weights"),
        (
            ["-dpa", "10.0.0.1"],
            "-dpa is not available: all engines of --data-parallel-size run on this machine, "
            "behind the same front ends",
        ),
        (["--no-disable-log-request"], "did you mean --no-disable-log-requests?"),
        (["--lang", "en"], "unknown flag --lang"),
        (["-fa", "off"], "-fa off is not available; see --attention-backend"),
        (["-md", "x"], """did you mean --speculative-config '{"model": "NAME"}'?"""),
        (["--reasoning-budget", "0"], "did you mean thinking_token_budget in each request?"),
        (
            ["--disable-log-requests", "true"],
            "--disable-log-requests takes no value; --no-disable-log-requests is its opposite",
        ),
        (["--no-page", "False"], "--no-page takes no value; --page is its opposite"),
        (["--no-page-x"], "did you mean --no-page?"),
    ],
)
def test_refusals(words: list[str], expected: str) -> None:
    assert refusal(*words).endswith(expected)


@pytest.mark.parametrize("name", ["--enable-foo", "--no-enable-foo", "--disable-metrics", "--no-x"])
def test_no_suggestion_means_the_opposite(name: str) -> None:
    for known in KNOWN:
        for given in (known.replace("--no-", "--"), known.replace("--", "--no-", 1), name):
            suggested = flags.unknown("flag", given, KNOWN - {given}).partition("did you mean ")[2]
            is_off = given.startswith(("--no-", "--disable-"))
            assert not suggested or suggested.startswith(("--no-", "--disable-")) == is_off


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(("8k", 8000), ("8K", 8192), ("1M", 1 << 20), ("25.6k", 25_600), ("1.1k", 1100)),
        *(("0.5m", 500_000), ("auto", None), ("-1", None)),
    ],
)
def test_lengths_as_vllm_writes_them(text: str, expected: int | None) -> None:
    assert built("--max-model-len", text).model.max_model_len == expected
    if expected is not None:
        assert built("--max-num-batched-tokens", text).scheduler.max_num_batched_tokens == expected


@pytest.mark.parametrize("text", ["1.5K", "8kb", "k", "8 k", "0k", "9999999999999T"])
def test_lengths_that_are_none(text: str) -> None:
    assert refusal("--max-model-len", text).startswith("--max-model-len ")


def test_types_as_vllm_names_them(tmp_path) -> None:
    assert built("--dtype", "half").model.dtype == "float16"
    file = tmp_path / "tokend.yaml"
    file.write_text("dtype: float\nmax-model-len: 2k")
    config = built("--config", str(file))
    assert (config.model.dtype, config.model.max_model_len) == ("float32", 2000)
    assert "--dtype takes one of auto, float32" in refusal("--dtype", "double")


RECIPE = """
    org/model --served-model-name a b,c --enable-auto-tool-choice --tool-call-parser hermes
    --trust-remote-code --max_model_len 4096 --max-num-seqs=8 --gpu-memory-utilization 0.9
    --dtype auto --swap-space 4 --download-dir /models --task generate --port 9
    --no-enable-log-requests --tensor-parallel-size 1 --pipeline-parallel-size 1
"""


def test_recipes_of_vllm() -> None:
    words = RECIPE.split()
    parsed = flags.parse(words)
    config = flags.build(parsed)
    assert config.model.model == "org/model"
    assert config.model.served_model_name == ("a", "b,c")
    assert config.model.max_model_len == 4096
    assert config.model.runner == "generate"
    assert config.frontend.disable_log_requests
    assert len(parsed.notices) == 5


def test_names_stop_at_the_model(tmp_path) -> None:
    """A model after the name is the model, as before there could be several names."""
    assert built("--served-model-name", "a", "model").model.model == "model"
    assert built("--served-model-name", "a", "--model", "m").model.served_model_name == ("a",)
    assert "two models" in refusal("--served-model-name", "a", "b", "c")
    assert "must not be empty" in refusal("m", "--served-model-name", "a", " ")
    file = tmp_path / "tokend.yaml"
    for text in ("a,b", "\n- a,b"):
        file.write_text(f"served-model-name: {text}")
        assert built("--config", str(file)).model.served_model_name == ("a,b",)
    assert ServeConfig().model.served_names("own") == ("own",)


def test_short_names_of_vllm_are_taken() -> None:
    parallel = built("-dp", "2", "-tp=3").parallel
    assert (parallel.data_parallel_size, parallel.tensor_parallel_size) == (2, 3)
    assert parallel.num_workers == 6
    assert refusal("-dp", "0") == "--data-parallel-size must be at least 1, got 0"
    assert refusal("-dp", "65") == "--data-parallel-size must be at most 64, got 65"
