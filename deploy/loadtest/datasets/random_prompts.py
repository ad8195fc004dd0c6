"""Prompts that have nothing in common, or only how they begin."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from deploy.loadtest.datasets.material import Material, ask_for, joined
from deploy.loadtest.datasets.sessions import Draws, OneRequest, Session, Sizes


@dataclass(frozen=True)
class RandomPrompts:
    """None is like another."""

    sizes: Sizes
    material: Material
    chat: bool = False

    def sessions(self, draws: Draws) -> Iterator[Session]:
        for index in itertools.count():
            rng, checked = draws.rng(index), draws.checked(index)
            input_tokens, output_tokens = self.sizes.draw(rng)
            prompt = self.material.prompt(rng, input_tokens)
            yield OneRequest(ask_for(prompt, output_tokens, checked=checked, chat=self.chat))


@dataclass(frozen=True)
class SharedPrefix:
    """Groups of prompts that begin alike; the sizes are those of what follows the prefix.

    prefix 0 | own        request 0
    prefix 1 | own        request 1
    prefix 0 | own        request 2, of two groups
    """

    sizes: Sizes
    material: Material
    num_groups: int
    prefix_tokens: int
    chat: bool = False

    def sessions(self, draws: Draws) -> Iterator[Session]:
        for index in itertools.count():
            rng, checked = draws.rng(index), draws.checked(index)
            group = random.Random(f"{draws.name(index)}:prefix {index % self.num_groups}")
            prefix = self.material.prompt(group, self.prefix_tokens)
            input_tokens, output_tokens = self.sizes.draw(rng)
            prompt = joined(prefix, self.material.prompt(rng, input_tokens))
            yield OneRequest(ask_for(prompt, output_tokens, checked=checked, chat=self.chat))
