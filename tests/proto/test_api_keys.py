"""API keys from settings and from a file; errors name the line and never contain a key."""

import os

import pytest

from proto.errors import ConfigError
from proto.runtime.security import MAX_KEYS, ApiKey, read_api_keys, readable_key_files
from proto.settings.config import FrontEndConfig


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "keys"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return FrontEndConfig(api_key_file=str(path))

    return write


def test_no_key_and_one_key_from_the_settings():
    assert read_api_keys(FrontEndConfig()) == ()
    assert read_api_keys(FrontEndConfig(api_key="sésame")) == (ApiKey("", "sésame".encode()),)


def test_names_and_keys_of_a_file(write):
    config = write("# ours\n\nalice k1\n  bob\tk2  # bob's\nalice k3\n")
    assert read_api_keys(config) == (
        ApiKey("alice", b"k1"),
        ApiKey("bob", b"k2"),
        ApiKey("alice", b"k3"),
    )


def test_keys_from_settings_and_file_are_combined(write):
    config = write("bob k2")
    both = FrontEndConfig(api_key="k1", api_key_file=config.api_key_file)
    assert [each.name for each in read_api_keys(both)] == ["", "bob"]


def test_admin_keys_are_marked_as_operator_keys(write):
    path = write("ann k3").api_key_file
    config = FrontEndConfig(api_key="k1", admin_api_key="k2", admin_api_key_file=path)
    found = [(each.name, each.key, each.operator) for each in read_api_keys(config)]
    assert found == [("", b"k1", False), ("", b"k2", True), ("", b"k3", True)]


def test_a_key_cannot_be_both_client_and_operator_key():
    with pytest.raises(ConfigError, match="twice: --api-key and --admin-api-key"):
        read_api_keys(FrontEndConfig(api_key="k", admin_api_key="k"))
    with pytest.raises(ConfigError, match="--admin-api-key-file /nowhere/keys: No such file"):
        read_api_keys(FrontEndConfig(admin_api_key_file="/nowhere/keys"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("alice hush\nhush2\n", "line 2 is not a name and a key"),
        ("alice hush more", "line 1 is not a name and a key"),
        ("a" * 129 + " hush", "line 1 is not a name and a key"),
        ("# only a comment\n", "contains no key"),
        (b"alice hush\xff", "is not UTF-8 text"),
        ("".join(f"n hush{number}\n" for number in range(MAX_KEYS + 1)), "more than 1024 keys"),
        ("alice hush\n\nbob hush", "twice: --api-key-file .* line 1 and --api-key-file .* line 3"),
    ],
)
def test_an_invalid_key_file_names_the_line(write, text, words):
    with pytest.raises(ConfigError, match=words) as caught:
        read_api_keys(write(text))
    assert caught.value.param == "api_key_file"
    assert "hush" not in str(caught.value)


def test_files_that_every_user_may_read(write):
    config = write("alice hush")
    os.chmod(config.api_key_file, 0o600)
    assert readable_key_files(config) == []
    os.chmod(config.api_key_file, 0o644)
    assert readable_key_files(config) == [f"--api-key-file {config.api_key_file}"]


def test_a_missing_key_file_is_a_configuration_error():
    with pytest.raises(ConfigError, match="--api-key-file /nowhere/keys: No such file"):
        read_api_keys(FrontEndConfig(api_key_file="/nowhere/keys"))


def test_repr_hides_the_key():
    assert "hush" not in repr(ApiKey("alice", b"hush"))
