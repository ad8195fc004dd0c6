"""What libraries raise over a model file that they cannot make sense of, as ModelError.

They raise anything: their own mistakes look no different from those of the file.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from proto.errors import MAX_SHOWN, ModelError

_PANIC: Final = "PanicException"
"""Of libraries written in Rust; derived from BaseException, and importable from nowhere."""
_LONGEST: Final = 3 * MAX_SHOWN


@contextmanager
def as_model_error(what: str) -> Iterator[None]:
    """Raise ModelError, beginning with `what`, for whatever is raised inside."""
    try:
        yield
    except ModelError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
            raise
        text = " ".join(str(error).split())[:_LONGEST]
        raise ModelError(f"{what}: {text or type(error).__name__}") from None
