"""Files with results for later starts: whole, or none."""

import errno
import os
from pathlib import Path

import pytest

from proto.messages.prepared_model import WeightsDigest
from worker.loader.kept_file import read_kept, write_kept

FIRST, SECOND = WeightsDigest((), "1" * 64), WeightsDigest((), "2" * 64)


def test_a_failed_write_leaves_the_earlier_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "digest")
    assert read_kept(path, WeightsDigest) is None
    write_kept(path, FIRST)

    def full(source: str, target: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space left"):
            write_kept(path, SECOND)
    assert [each.name for each in tmp_path.iterdir()] == ["digest"]
    assert read_kept(path, WeightsDigest) == FIRST
    write_kept(path, SECOND)
    assert read_kept(path, WeightsDigest) == SECOND
