"""Which kernels compute a product or attention, as a device has chosen them, for the operator."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True)
class KernelChoice:
    """The kernels of a product or of attention.

    ratios: of the times of all candidates to the shortest, by name.
    """

    name: str
    variant: str
    ratios: dict[str, float]


def describe_choices(choices: Iterable[KernelChoice]) -> str:
    """Return the choices as text: products of one type together where they have the same kernels.

    For example "bf16 by avx512_bf16 (avx512 2.1, avx2 3.2 times as long)".
    """

    def key(choice: KernelChoice) -> tuple[str, str]:
        return choice.name.split()[0], choice.variant

    texts = []
    for (type_name, variant), group in groupby(sorted(choices, key=key), key):
        alike = list(group)
        means = {
            name: statistics.geometric_mean(
                choice.ratios[name] / choice.ratios[variant] for choice in alike
            )
            for name in alike[0].ratios
            if name != variant
        }
        others = ", ".join(f"{name} {ratio:.2f}" for name, ratio in means.items())
        texts.append(f"{type_name} by {variant} ({others} times as long)")
    return "; ".join(texts)
