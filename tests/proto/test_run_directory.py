"""The run directory: private, shared by locks, removed by the last process that leaves it."""

import os
import stat
import subprocess
import sys
import tempfile

import pytest

from proto.errors import ConfigError
from proto.messages.lifecycle import Shutdown
from proto.runtime.run_directory import (
    RunDirectory,
    default_parent,
    pixels_folder,
    remove_pixels,
    sweep,
)
from proto.runtime.sockets import Link


def test_the_directory_is_private(short_dir):
    directory = RunDirectory.create(str(short_dir))
    assert stat.S_IMODE(os.stat(directory.path).st_mode) == 0o700
    assert os.path.dirname(directory.path) == str(short_dir)
    directory.leave()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can switch to another user")
def test_other_users_cannot_reach_the_sockets():
    """The parent directory is open to all users and the socket file is writable by all."""
    with tempfile.TemporaryDirectory(prefix="t-") as above:
        os.chmod(above, 0o755)
        directory = RunDirectory.create(above)
        path = os.path.join(directory.path, "e1.w0")
        link = Link.bind(path, Shutdown)
        os.chmod(path, 0o777)
        script = (
            "import os, socket, sys\n"
            "os.setgid(65534); os.setuid(int(sys.argv[2]))\n"
            "for act in (lambda: socket.socket(socket.AF_UNIX).connect(sys.argv[1]),\n"
            "            lambda: os.listdir(os.path.dirname(sys.argv[1])),\n"
            "            lambda: open(os.path.dirname(sys.argv[1]) + '/lock')):\n"
            "    try: act(); print('yes')\n"
            "    except PermissionError: print('no')\n"
        )
        for user, answer in ((65534, "no"), (0, "yes")):
            command = [sys.executable, "-c", script, path, str(user)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            assert done.stdout.split() == [answer] * 3, user
        link.close()
        directory.leave()


def test_the_last_process_to_leave_removes_the_directory(short_dir):
    first = RunDirectory.create(str(short_dir))
    second = RunDirectory.join(first.path)
    (short_dir / os.path.basename(first.path) / "socket").touch()
    first.leave()
    assert os.path.exists(first.path)
    first.leave()
    assert os.path.exists(first.path)
    second.leave()
    assert not os.path.exists(first.path)


def test_pixels_of_images_go_with_their_directory(short_dir):
    left, killed = RunDirectory.create(str(short_dir)), RunDirectory.create(str(short_dir))
    folders = [pixels_folder(left.path), pixels_folder(killed.path)]
    for folder in folders:
        os.mkdir(folder, 0o700)
    left.leave()
    assert [os.path.exists(folder) for folder in folders] == [False, True]
    os.close(killed._lock_fd)
    sweep(str(short_dir))
    assert not os.path.exists(folders[1])


def test_sweep_removes_only_directories_of_dead_daemons(short_dir):
    living = RunDirectory.create(str(short_dir))
    code = (
        "import os, sys; from proto.runtime.run_directory import RunDirectory; "
        "print(RunDirectory.create(sys.argv[1]).path, flush=True); os._exit(0)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(short_dir)], capture_output=True, text=True, check=True
    )
    dead = result.stdout.strip()
    other = short_dir / "not-ours"
    other.mkdir()
    assert os.path.exists(dead)
    assert sweep(str(short_dir)) == [dead]
    assert not os.path.exists(dead)
    assert os.path.exists(living.path)
    assert other.exists()
    living.leave()


def test_create_removes_directories_of_dead_daemons(short_dir):
    code = (
        "import os, sys; from proto.runtime.run_directory import RunDirectory; "
        "RunDirectory.create(sys.argv[1]); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code, str(short_dir)], check=True)
    (dead,) = os.listdir(short_dir)
    directory = RunDirectory.create(str(short_dir))
    assert dead not in os.listdir(short_dir)
    directory.leave()


def test_sweep_does_not_follow_symlinks(short_dir):
    target = short_dir / "target"
    target.mkdir()
    (target / "lock").touch()
    (short_dir / "tokend-link").symlink_to(target)
    assert sweep(str(short_dir)) == []
    assert target.exists()


def test_the_parent_is_the_runtime_directory_if_it_exists(short_dir, monkeypatch):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(short_dir))
    assert default_parent("/somewhere/else") == str(short_dir)
    assert default_parent(None) == str(short_dir)
    runtime = short_dir / "runtime"
    runtime.mkdir()
    assert default_parent(str(runtime)) == str(runtime)
    monkeypatch.chdir(short_dir)
    assert default_parent("runtime") == str(short_dir)  # relative, so not valid


def test_no_writable_parent_is_an_error(monkeypatch):
    def gettempdir():
        raise FileNotFoundError("No usable temporary directory found in …")

    for replacement in (lambda: "/does/not/exist", gettempdir):
        monkeypatch.setattr("tempfile.gettempdir", replacement)
        with pytest.raises(ConfigError, match="set XDG_RUNTIME_DIR or TMPDIR"):
            default_parent(None)


def test_pixels_of_a_front_end_are_removed_as_far_as_possible(tmp_path):
    folder = tmp_path / "pixels"
    remove_pixels(str(tmp_path), 1)  # there is no folder
    folder.mkdir()
    for name in ("1.0.a", "1.0.z", "10.0.a", "2.0.a"):
        (folder / name).touch()
    (folder / "1.0.b").mkdir()  # cannot be unlinked
    remove_pixels(str(tmp_path), 1)
    assert sorted(os.listdir(folder)) == ["1.0.b", "10.0.a", "2.0.a"]


def test_a_folder_of_pixels_that_is_a_link_or_another_users_stays(tmp_path, monkeypatch):
    other = tmp_path / "other"
    other.mkdir()
    (other / "1.0.a").touch()
    (tmp_path / "pixels").symlink_to(other)
    remove_pixels(str(tmp_path), 1)
    assert os.listdir(other) == ["1.0.a"]
    os.unlink(tmp_path / "pixels")
    other.rename(tmp_path / "pixels")
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    remove_pixels(str(tmp_path), 1)
    assert os.listdir(tmp_path / "pixels") == ["1.0.a"]
