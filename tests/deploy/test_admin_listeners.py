"""The listening sockets for operators: mode, names in use, what is left behind."""

import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.supervisor.launch import admin_listeners
from proto.errors import ConfigError
from proto.settings.config import FrontEndConfig


@pytest.fixture
def path() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="td-") as folder:
        yield f"{folder}/admin.sock"


def listening(path: str) -> "socket.socket":
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    return listener


def test_a_socket_is_for_its_owner_alone_and_removed_at_the_end(path: str) -> None:
    before = os.umask(0)
    try:
        with admin_listeners(FrontEndConfig(admin_socket=path)) as (listener,):
            assert stat.S_IMODE(os.lstat(path).st_mode) == 0o600
            assert listener.getsockname() == path
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(path)
    finally:
        os.umask(before)
    assert not os.path.lexists(path)


def test_a_socket_that_a_killed_daemon_has_left_is_replaced(path: str) -> None:
    listening(path).close()
    assert os.path.lexists(path)
    with (
        admin_listeners(FrontEndConfig(admin_socket=path)),
        socket.socket(socket.AF_UNIX) as client,
    ):
        client.connect(path)


def test_a_socket_in_use_is_refused_by_name_and_stays(path: str) -> None:
    config = FrontEndConfig(admin_socket=path)
    with listening(path):
        with pytest.raises(ConfigError, match=f"--admin-socket {path}: is in use"):
            admin_listeners(config).__enter__()
        assert os.path.lexists(path)
    with admin_listeners(config):
        with pytest.raises(ConfigError, match="is in use by another process"):
            admin_listeners(config).__enter__()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)


def test_the_socket_of_a_successor_stays(path: str) -> None:
    with admin_listeners(FrontEndConfig(admin_socket=path)):
        os.unlink(path)
        successor = listening(path)
    assert os.path.lexists(path)
    successor.close()


def test_paths_that_cannot_be_used(path: str) -> None:
    Path(path).write_text("mine")
    for wrong, reason in (
        (path, "exists, and is no socket"),
        (os.path.dirname(path), "exists, and is no socket"),
        (f"{path}.d/x", "No such file or directory"),
        ("/tmp/" + "x" * 200, "longer than 107 bytes"),
    ):
        with pytest.raises(ConfigError, match=f"--admin-socket {wrong}: .*{reason}"):
            admin_listeners(FrontEndConfig(admin_socket=wrong)).__enter__()
    assert Path(path).read_text() == "mine"


def test_a_port_is_on_the_loopback_interface_and_refused_by_its_flag(path: str) -> None:
    with admin_listeners(FrontEndConfig(admin_port=0, host="0.0.0.0")) as (listener,):
        host, port = listener.getsockname()
        assert host == "127.0.0.1"
        config = FrontEndConfig(admin_port=port, admin_socket=path)
        with pytest.raises(ConfigError, match=f"--admin-port {port} is in use on 127.0.0.1"):
            admin_listeners(config).__enter__()
    with admin_listeners(config) as found:
        assert len(found) == 2
