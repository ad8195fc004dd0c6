"""A program that runs for as long as a measurement needs it."""

import subprocess
from typing import Final, Self

END_SECONDS: Final = 30.0


class Program:
    """Ends with the `with` block: asked first, killed when that takes too long."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *how: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its own processes end with it
            self._process.wait()
