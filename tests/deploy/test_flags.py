"""Flags generated from the config Structs: valid and invalid values, files, environment."""

from pathlib import Path

import pytest

from deploy import flags
from proto.errors import ConfigError
from proto.settings.config import ServeConfig


def built(*words: str) -> ServeConfig:
    return flags.build(flags.parse(words))


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        built(*words)
    message = str(caught.value)
    assert "\n" not in message
    return message


def all_fields() -> set[str]:
    sections = (getattr(ServeConfig(), name) for name in ServeConfig.__struct_fields__)
    return {field for section in sections for field in section.__struct_fields__}


def test_every_field_has_a_flag_and_help() -> None:
    by_field = {flag.field: flag for flag in flags.all_flags()}
    assert set(by_field) == all_fields()
    assert len(flags.all_flags()) == len(by_field), "a field name is in two sections"
    helps = flags.field_helps()
    text = flags.render()
    for field, flag in by_field.items():
        assert helps[field].endswith("."), field
        assert f"  {flag.name}" in text


def test_documented_flags_exist() -> None:
    documented = """
        --host --port --api-key --served-model-name --tokenizer --dtype --max-model-len --seed
        --block-size --num-gpu-blocks-override --kv-cache-memory --kv-cache-dtype
        --enable-prefix-caching --max-num-seqs --max-num-batched-tokens
        --long-prefill-token-threshold
        --enable-chunked-prefill --scheduling-policy --async-scheduling --tensor-parallel-size
        --device --attention-backend --api-server-count --disable-log-requests
        --scheduler-reserve-full-isl --watermark --stop-admission-above
        --resume-admission-below --preempt-above
        --ssl-keyfile --ssl-certfile --ssl-ca-certs --ssl-cert-reqs
    """
    assert set(documented.split()) <= {flag.name for flag in flags.all_flags()}


def test_no_arguments_give_the_defaults() -> None:
    assert built() == ServeConfig()


def test_arguments_of_every_type() -> None:
    given = built(
        "my-model",
        "--port=0",
        "--max-num-seqs",
        "7",
        "--no-enable-prefix-caching",
        "--kv-cache-memory",
        "512M",
        "--dtype",
        "float32",
        "--api-key",
        "-secret",
    )
    assert given.model.model == "my-model"
    assert given.model.dtype == "float32"
    assert given.frontend.port == 0
    assert given.frontend.api_key == "-secret"
    assert given.scheduler.max_num_seqs == 7
    assert given.cache.enable_prefix_caching is False
    assert given.cache.kv_cache_memory == 512 << 20


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4096", 4096),
        ("3K", 3 << 10),
        ("4G", 4 << 30),
        ("2GiB", 2 << 30),
        ("1 M", 1 << 20),
        ("1T", 1 << 40),
    ],
)
def test_bytes(text: str, number: int) -> None:
    assert built("--kv-cache-memory", text).cache.kv_cache_memory == number


@pytest.mark.parametrize(("text", "number"), [("0", 0.0), ("0.25", 0.25), (".5", 0.5), ("0.", 0.0)])
def test_fractions(text: str, number: float) -> None:
    assert built("--watermark", text).scheduler.watermark == number


@pytest.mark.parametrize(
    "text",
    ['["https://a.example", "http://localhost:3000"]', "https://a.example, http://localhost:3000"],
)
def test_lists(text: str, tmp_path: Path) -> None:
    """JSON as vLLM takes it, or words with commas."""
    expected = ("https://a.example", "http://localhost:3000")
    assert built("--allowed-origins", text).frontend.allowed_origins == expected
    file = tmp_path / "tokend.yaml"
    for value in (text if text.startswith("[") else f"'{text}'", "\n- " + "\n- ".join(expected)):
        file.write_text(f"allowed-origins: {value}")
        assert built("--config", str(file)).frontend.allowed_origins == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--allowed-origins", "[1]"], "--allowed-origins takes a list of texts, not [1]"),
        (["--allowed-origins", '["*"'], "--allowed-origins takes a list such as"),
        (["--allowed-origins", "https://a/b"], "takes origins such as https://chat.example"),
        (["--allowed-origins", "a.example"], "takes origins such as https://chat.example"),
        (["--allowed-origins", "*", "--allowed-headers", "a b"], "--allowed-headers takes names"),
        (["--allow-credentials"], "--allow-credentials needs --allowed-origins"),
        (["--allowed-methods", "GET"], "--allowed-methods needs --allowed-origins"),
        (["--max-num-seq", "3"], "did you mean --max-num-seqs?"),
        (["--no-prefix-caching"], "did you mean --no-enable-prefix-caching?"),
        (["-p", "80"], "unknown flag -p"),
        (["--ctx-size", "80"], "unknown flag --ctx-size; did you mean --max-model-len?"),
        (["-c", "80"], "did you mean --max-model-len?"),
        (["--num_ctx=80"], "did you mean --max-model-len?"),
        (["--n-predict", "99"], "did you mean max_tokens in each request?"),
        (["--port", "http"], "--port takes a whole number, not 'http'"),
        (["--port"], "--port needs a value"),
        (["--port", "--host"], "--port needs a value"),
        (["--port", "70000"], "--port must be between 0 and 65535"),
        (["--max-num-seqs", "-1"], "--max-num-seqs must be at least 1"),
        (["--kv-cache-memory", "4Q"], "--kv-cache-memory takes a number of bytes"),
        (["--dtype", "int3"], "--dtype takes one of auto, float32"),
        (["--attention-backend", "reference"], "auto, cpu, flashinfer; --device reference is"),
        (["--watermark", "nan"], "--watermark takes a number such as 0.9, not 'nan'"),
        (["--watermark", "-0.1"], "--watermark takes 0 or more, not '-0.1'"),
        (["--watermark", "1"], "--watermark must be in [0, 1)"),
        (["--async-scheduling=yes"], "--no-async-scheduling is its opposite"),
        (["--no-async-scheduling=yes"], "--async-scheduling is its opposite"),
        (["--block-size", "12"], "--block-size must be a power of two"),
        (["--max-num-seqs", "9" * 20], "--max-num-seqs takes at most 18,446,744,073,709,551,615"),
        (["--max-num-seqs", "9" * 5000], "--max-num-seqs takes a whole number"),
        (["--kv-cache-memory", "9" * 19 + "G"], "--kv-cache-memory takes at most"),
        (["--kv-cache-memory", "9" * 5000], "--kv-cache-memory takes a number of bytes"),
        (["--step-timeout", "9" * 12], "--step-timeout takes at most 1,000,000,000"),
        (["one", "two"], "two models were given, one and two"),
        (["--api-server-count", "0"], "--api-server-count must be"),
        (["--api-server-count", "257"], "--api-server-count must be at most 256, got 257"),
        (["one", "--model", "two"], "two models were given, one and two"),
        (
            ["--kv-cache-memory", "1G", "--num-gpu-blocks-override", "8"],
            "--num-gpu-blocks-override and --kv-cache-memory both size the KV pool",
        ),
    ],
)
def test_invalid_arguments_are_refused_in_one_line(words: list[str], expected: str) -> None:
    assert expected in refusal(*words)


def test_help_is_recognised_at_any_position() -> None:
    assert flags.parse(["model", "--port", "1", "--help"]).help


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "tokend.yaml"
    path.write_text(text)
    return str(path)


def test_the_command_line_overrides_the_config_file(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "model: from-file\nmax-num-seqs: 9\nport: 1234\nkv-cache-memory: 2G\n"
        "enable-prefix-caching: false\nseed: null\ndtype: float32\nwatermark: 0.01\n"
        "preempt-above: 1\n",
    )
    given = built("--config", path, "--port", "4321")
    assert given.frontend.port == 4321
    assert given.model.model == "from-file"
    assert given.scheduler.max_num_seqs == 9
    assert given.cache.kv_cache_memory == 2 << 30
    assert given.scheduler.watermark == 0.01
    assert given.scheduler.preempt_above == 1.0
    assert given.cache.enable_prefix_caching is False
    assert given.model.dtype == "float32"


def test_an_empty_file_gives_the_defaults(tmp_path: Path) -> None:
    assert built("--config", write(tmp_path, "# nothing\n")) == ServeConfig()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max-num-sequences: 3\n", "unknown key max-num-sequences; did you mean max-num-seqs?"),
        ("port: http\n", "--port takes a whole number, not 'http'"),
        ("port: 1.5\n", "--port takes a whole number, not 1.5"),
        ("port: true\n", "--port takes a whole number, not True"),
        ("port: null\n", "--port must not be null; omit the key"),
        ("model: null\n", "--model must not be null; omit the key"),
        ("api-key:\n", "--api-key must not be empty"),
        ("admin-api-key-file: ~\n", "--admin-api-key-file must not be empty"),
        ("max-num-seqs: 1\nport: 80\nmax_num_seqs: 2\n", "the key max-num-seqs is given twice"),
        ("enable-prefix-caching: 1\n", "--enable-prefix-caching takes true or false, not 1"),
        ("served-model-name: 7\n", "--served-model-name takes a list of texts, not 7"),
        ("dtype: int3\n", "--dtype takes one of"),
        ("watermark: true\n", "--watermark takes a number such as 0.9, not True"),
        (f"max-num-seqs: {9 * 10**19}\n", "--max-num-seqs takes at most"),
        ("watermark: .nan\n", "--watermark takes a number such as 0.9, not 'nan'"),
        ("- port\n", "must be YAML with lines of the form"),
        ("port: [\n", "--config"),
    ],
)
def test_an_invalid_file_is_refused_in_one_line(tmp_path: Path, text: str, expected: str) -> None:
    path = write(tmp_path, text)
    message = refusal("--config", path)
    assert expected in message
    assert message.startswith(f"--config {path}: ")


def test_an_invalid_value_is_named_with_its_source(tmp_path: Path) -> None:
    path = write(tmp_path, "max-num-seqs: 0\n")
    assert refusal("--config", path).startswith(f"--config {path}: --max-num-seqs must be")
    assert refusal("--config", path, "--max-num-seqs", "-1").startswith("--max-num-seqs must be")


def test_flags_and_file_override_the_environment(tmp_path: Path) -> None:
    environment = {"api_key": "environment"}

    def key(*words: str) -> str | None:
        return flags.build(flags.parse(words), environment).frontend.api_key

    path = write(tmp_path, "api-key: file\n")
    assert key() == "environment"
    assert key("--config", path) == "file"
    assert key("--config", path, "--api-key", "flag") == "flag"
    with pytest.raises(ConfigError, match="TOKEND_API_KEY"):
        flags.build(flags.parse([]), {"api_key": ""})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "nothing.yaml: No such file" in refusal("--config", str(tmp_path / "nothing.yaml"))


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["m", "--port", "1"], ["m", "--port", "1"]),
        (["--api-key", "hush", "--port", "1"], ["--api-key", "***", "--port", "1"]),
        (["--api-key=hush"], ["--api-key=***"]),
        (["--api-key", "--api-key"], ["--api-key", "***"]),
        (["--api-key", "-k", "m"], ["--api-key", "***", "m"]),
        (["--api-key"], ["--api-key"]),
        (["--api_key", "hush", "m"], ["--api_key", "***", "m"]),
        (["--hf_token=hush"], ["--hf-token=***"]),
        (["--port=1", "--admin_api-key", "a=b"], ["--port=1", "--admin_api-key", "***"]),
    ],
)
def test_secrets_are_not_shown(words: list[str], shown: list[str]) -> None:
    assert flags.without_secrets(words) == shown


def test_an_api_key_of_the_wrong_type_is_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "tokend.yaml"
    path.write_text("api-key: 123456\n")
    message = refusal("--config", str(path))
    assert message.endswith("--api-key takes text, in quotes")
    assert "123456" not in message


def test_adapters_follow_their_flag() -> None:
    """As in vLLM's command lines; names and paths may contain commas."""
    json = '{"name": "c", "path": "/c", "base_model_name": "m"}'
    for words in (["m", "--lora-modules"], ["--lora-modules"]):
        config = built("--enable-lora", *words, "a=/a", "b=/b,2", json, "--port", "7")
        assert config.lora.lora_modules == ("a=/a", "b=/b,2", json)
    assert built("--enable-lora", "--lora-modules", "a=/a", "m").model.model == "m"
