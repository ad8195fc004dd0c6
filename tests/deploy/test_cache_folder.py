"""The folder of models: where it is for users without a home, and what others of a group may do."""

import errno
import io
import os
import pwd
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.display import Display
from deploy.environment import HostEnvironment
from deploy.models import prepare, store
from proto.errors import ConfigError, ModelError
from tests.fakes.tiny_model_files import write_folder

ROOT = Path(__file__).parents[2]


@pytest.fixture
def unknown_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user has no entry in /etc/passwd, and cannot write to /."""

    def getpwuid(uid: int) -> pwd.struct_passwd:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", getpwuid)
    monkeypatch.setattr(os, "access", lambda path, mode: path.strip("/") != "")


@pytest.mark.usefixtures("unknown_user")
@pytest.mark.parametrize("home", [None, "", "/", "//", "~", "home"])
def test_a_user_without_a_home_needs_a_cache_folder(home: str | None) -> None:
    """Otherwise models would lie in a folder called ~ of wherever the command was started."""
    variables = {} if home is None else {"HOME": home}
    for base in ({}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "cache"}):
        with pytest.raises(ConfigError, match=r"no home; set XDG_CACHE_HOME, or HOME, to the abs"):
            _ = HostEnvironment.of(variables | base).cache
    environment = HostEnvironment.of(variables | {"XDG_CACHE_HOME": "/c/"})
    assert environment.cache == environment.variables["HOME"] == "/c/tokend"


def test_the_home_of_a_user_is_from_the_environment_or_from_passwd(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    home = pwd.getpwuid(os.getuid()).pw_dir
    assert HostEnvironment.of({"HOME": "/h"}).cache == "/h/.cache/tokend"
    for variables in ({}, {"HOME": "", "XDG_CACHE_HOME": "c"}, {"HOME": "here"}):
        environment = HostEnvironment.of(variables)
        assert environment.cache == f"{home}/.cache/tokend"
        assert environment.variables.get("HOME", home) == home
    monkeypatch.setattr(os, "access", lambda path, mode: True)
    assert HostEnvironment.of({"HOME": "/"}).cache == "/.cache/tokend"


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs another user")
@pytest.mark.parametrize("variables", [{}, {"HOME": "/"}, {"HOME": "/etc"}, {"HOME": "here"}])
def test_the_command_of_an_unknown_user_names_the_variable(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    tmp_path.chmod(0o777)
    write_folder(tmp_path / "model")
    user = ("setpriv", "--reuid=12345", "--regid=0", "--clear-groups")
    reads = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
    command = (sys.executable, "-P", "-m", "deploy.cli", "prepare", str(tmp_path / "model"))
    done = subprocess.run(
        (*user, *reads, *command),
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)} | variables,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert "XDG_CACHE_HOME" in line
    assert "12345" in line
    assert os.listdir(tmp_path) == ["model"]


@pytest.fixture
def display() -> Display:
    return Display(io.StringIO())


def test_only_errors_of_the_cache_advise_another_one(tmp_path: Path, display: Display) -> None:
    write_folder(tmp_path / "model")
    (tmp_path / "file").touch()
    environment = HostEnvironment.of({"XDG_CACHE_HOME": str(tmp_path / "file")})
    with pytest.raises(ModelError, match=r"in .*/file/tokend: set XDG_CACHE_HOME to a folder that"):
        store.prepared_model(str(tmp_path / "model"), environment, display)
    elsewhere = OSError(errno.EACCES, "Permission denied", "/models/x.gguf")
    assert store.reason(elsewhere, environment.cache) == "Permission denied (/models/x.gguf)"


@pytest.mark.parametrize(("mode", "expected"), [(0o770, True), (0o700, False), (0o755, False)])
def test_what_the_group_may_write_to(
    tmp_path: Path, display: Display, monkeypatch: pytest.MonkeyPatch, mode: int, expected: bool
) -> None:
    """If the cache folder belongs to a group, so does what a model's preparation creates."""

    def run(source: store.ModelSource, target: str, final: str, *_: object) -> None:
        prepare.prepare(
            source.name, source.path, source.kind, source.mmproj, target, final, lambda what: None
        )

    monkeypatch.setattr(store, "_run_preparation", run)
    write_folder(tmp_path / "model")
    cache = tmp_path / "tokend"
    cache.mkdir()
    cache.chmod(mode)
    before = os.umask(0o022)
    try:
        environment = HostEnvironment.of({"XDG_CACHE_HOME": str(tmp_path)})
        model = store.prepared_model(str(tmp_path / "model"), environment, display)
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)
    prepared = Path(model.folder)
    for path in (
        prepared.parent,
        prepared,
        prepared / "manifest.json",
    ):
        assert bool(path.stat().st_mode & stat.S_IWGRP) == expected, path
