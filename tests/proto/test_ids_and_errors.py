"""Request ids, the error tree, and the command in an error about a missing package."""

import shlex
import sys
import tomllib
from itertools import islice
from pathlib import Path

import pytest

import proto
from proto.errors import (
    ErrorInfo,
    InternalRequestError,
    InvalidRequestError,
    OverloadedError,
    RequestError,
    TokendError,
    install_command,
)
from proto.messages.engine_io import MAX_FRONT_ENDS, MAX_INCARNATIONS, request_ids
from proto.runtime.process import describe


def test_ids_are_unique_over_clients_and_incarnations():
    sources = [(0, 0), (0, 1), (1, 0), (255, 32767)]
    ids = [each for source in sources for each in islice(request_ids(*source), 1000)]
    assert len(set(ids)) == len(ids)
    assert all(0 <= each < 1 << 63 for each in ids)


@pytest.mark.parametrize("source", [(-1, 0), (MAX_FRONT_ENDS, 0), (0, -1), (0, MAX_INCARNATIONS)])
def test_ids_out_of_range_are_refused(source):
    with pytest.raises(ValueError, match="outside"):
        request_ids(*source)


@pytest.mark.parametrize(
    ("kind", "error", "status"),
    [
        ("invalid_request", InvalidRequestError, 400),
        ("overloaded", OverloadedError, 503),
        ("engine_dead", OverloadedError, 503),
        ("internal", InternalRequestError, 500),
    ],
)
def test_an_error_on_the_wire_becomes_an_exception(kind, error, status):
    exception = ErrorInfo(kind, "message", "n", traceback="secret path").to_exception()
    assert type(exception) is error
    assert isinstance(exception, RequestError)
    assert isinstance(exception, TokendError)
    assert (exception.status, exception.message, exception.param) == (status, "message", "n")
    assert "secret" not in str(exception)


def test_describe_keeps_type_message_and_traceback():
    try:
        raise ValueError("bad") from KeyError("cause")
    except ValueError as error:
        info = describe(error, 3)
    assert (info.kind, info.message, info.rank) == ("internal", "ValueError: bad", 3)
    assert "KeyError" in info.traceback
    assert "test_describe" in info.traceback


def test_proto_is_imported_from_this_repository():
    """The PyPI distribution `proto-plus` installs a package of the same import name."""
    assert proto.PROTOCOL_VERSION >= 1
    assert "site-packages" not in proto.__file__


@pytest.mark.parametrize("extra", ["otel", "gpu"])
def test_the_command_for_an_extra_names_its_packages(extra):
    """pip reads it: the packages are those of pyproject.toml, and none is tokend's."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    command = shlex.split(install_command(extra))
    assert command[:4] == [sys.executable, "-m", "pip", "install"]
    assert command[4:] == project["optional-dependencies"][extra]
