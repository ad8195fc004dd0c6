"""Edits of files that leave no trace in size and modification time."""

import os
from pathlib import Path


def edit_middle(path: Path) -> None:
    """Change a byte in the middle of a file, in place, and restore its times."""
    times = path.stat()
    with path.open("r+b") as stream:
        stream.seek(times.st_size // 2)
        (byte,) = stream.read(1)
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 1]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
