"""The disk medium in a worker: one file for each offloaded block and rank.

A file is written under a temporary name and renamed, so that readers only find complete files.
Nothing is synced: the checksum detects what a crash of the machine has damaged. Other daemons may
share the folder, and files may vanish at any time.
"""

import contextlib
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from proto.errors import ConfigError
from proto.messages.kv_events import DEVICE_MEDIUM
from proto.settings.kv_media import (
    DISK,
    TEMPORARY,
    check_private,
    file_name,
    is_private,
    make_private,
    own_folder,
)
from proto.settings.kv_transfer_config import DiskSettings, disk_settings
from worker.kv_connector.offload.base import STORE_NICENESS, HandlerContext, OffloadingHandler
from worker.kv_connector.offload.block_image import BlockLabel
from worker.kv_connector.offload.transfer_queue import MediumError, SecondsLeft, TransferQueue

_SLICE: Final = 1 << 20
"""Bytes read or written between two checks of the time limit."""

Handlers = dict[tuple[str, str], OffloadingHandler]


class DiskMedium:
    """Medium that reads and writes files.

    folder: of this model's blocks, created with the first block.
    """

    name = DISK

    def __init__(self, folder: Path) -> None:
        self.place = str(folder.parent)
        self._folder = folder
        self._token = os.urandom(4).hex()
        self._numbers = itertools.count()

    def read_blocks(
        self, labels: Sequence[BlockLabel], image: memoryview, seconds_left: SecondsLeft
    ) -> Iterator[bool]:
        for label in labels:
            try:
                yield self._read(label, image, seconds_left)
            except OSError as error:
                raise MediumError(str(error)) from None

    def write_block(self, label: BlockLabel, image: memoryview, seconds_left: SecondsLeft) -> None:
        path = self._path(label)
        temporary = f"{path}.{self._token}{next(self._numbers)}{TEMPORARY}"
        try:
            self._write(temporary, image, seconds_left)
            os.rename(temporary, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise MediumError(str(error)) from None

    def discard(self, label: BlockLabel) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._path(label))

    def close(self) -> None:
        """Nothing to release: no file stays open between blocks."""

    def _make_folders(self, shard: Path) -> None:
        make_private(shard)
        try:
            for folder in (self._folder.parent, self._folder, shard):
                check_private(folder)  # another process may have created it
        except ConfigError as error:
            raise MediumError(str(error)) from None

    def _path(self, label: BlockLabel) -> str:
        return os.path.join(self._folder, file_name(label.key, label.rank))

    def _read(self, label: BlockLabel, image: memoryview, seconds_left: SecondsLeft) -> bool:
        try:
            descriptor = os.open(self._path(label), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            facts = os.fstat(descriptor)
            if facts.st_size != len(image) or not is_private(facts):
                self.discard(label)
                return False
            done = 0
            while done < len(image):
                _check_time(seconds_left)
                count = os.preadv(descriptor, [image[done : done + _SLICE]], done)
                if not count:
                    return False
                done += count
            with contextlib.suppress(OSError):
                os.utime(descriptor)  # mtime is the order of use after a restart
            return True
        finally:
            os.close(descriptor)

    def _write(self, path: str, image: memoryview, seconds_left: SecondsLeft) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags, 0o600)
        except FileNotFoundError:
            self._make_folders(Path(path).parent)
            descriptor = os.open(path, flags, 0o600)
        try:
            done = 0
            while done < len(image):
                _check_time(seconds_left)
                done += os.write(descriptor, image[done : done + _SLICE])
        finally:
            os.close(descriptor)


def make_handlers(extra: Mapping[str, Any], context: HandlerContext) -> Handlers:
    """Create the handlers of both directions; raises ConfigError naming the wrong key."""
    settings: DiskSettings = disk_settings(extra)
    folder = own_folder(settings.disk_path) / context.folder
    check_private(folder.parent)
    check_private(folder)
    return {
        (DISK, DEVICE_MEDIUM): TransferQueue(DiskMedium(folder), context, settings.load_timeout),
        (DEVICE_MEDIUM, DISK): TransferQueue(
            DiskMedium(folder), context, settings.store_timeout, STORE_NICENESS
        ),
    }


def _check_time(seconds_left: SecondsLeft) -> None:
    if seconds_left() <= 0.0:
        raise MediumError("too slow")
