"""Whether memory stays flat: the resident size of each process, second by second."""

from collections import defaultdict
from typing import Final

from deploy.loadtest.processes import usage_by_title

MAX_MIB: Final = 8.0
"""Most growth of a process under a flood: less than half a KiB of each that is refused."""


class Memory:
    """pid: of the supervisor. Sizes in MiB, by process title."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.sizes: defaultdict[str, list[float]] = defaultdict(list)

    def look(self) -> None:
        """Note what each process has now."""
        for title, usage in usage_by_title(self._pid).items():
            self.sizes[title].append(usage.resident_mib)

    def growth(self, title: str) -> float:
        """MiB from the end of the first tenth of the time, when buffers have their sizes."""
        sizes = self.sizes[title]
        return sizes[-1] - sizes[len(sizes) // 10]
