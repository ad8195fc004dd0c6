"""What people are told of the form of the weights."""

from typing import Final

from worker.loader.forms import WeightForm

_NAMED: Final = 4


def memory_line(form: WeightForm) -> str:
    """For the log: "packed 91.9 MiB + bf16 256.5 MiB"."""
    return " + ".join(f"{name} {size / (1 << 20):.1f} MiB" for name, size in form.memory.items())


def dense_notice(form: WeightForm) -> str:
    """One line where weights that were to be in blocks are dense; "" where none are."""
    names = form.dense_names
    if not names:
        return ""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return (
        f"{len(names)} weights are dense, as the kernels have no whole blocks for them: "
        f"{', '.join(sorted(names)[:_NAMED])}{more}"
    )
