"""What the model of the scheduler is told, knows of a request, and decides in a step."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Of the scheduler under test. The last three are parts of the pool, 1.0 for all of it.

    windows: one per KV group, None for full attention. longest: tokens of a request in a
    step, 0 for no limit of its own. overlapped: a step is decided while one computes.
    """

    num_blocks: int
    block_size: int
    windows: tuple[int | None, ...] = (None,)
    caching: bool
    budget: int
    longest: int
    chunked: bool
    seats: int
    by_priority: bool
    overlapped: bool = False
    whole_prompts: bool = False
    watermark: float = 0.0
    resume_below: float = 1.0
    stop_above: float = 1.0
    preempt_above: float = 1.0

    @property
    def longest_chunk(self) -> int:
        return min(self.longest or self.budget, self.budget)


@dataclass(eq=False)
class Sequence:
    """One choice of a family; `order` decides under PRIORITY.

    tokens: those that are known. computed: those with KV, or being computed. lost: steps
    held for the prefix of another one in which that got less than others could have. described:
    the worker knows it. decoding: it was seen with no more than a token to compute. came: when
    it was last admitted. charged: its tenant was, for its prompt.
    """

    handle: int
    tokens: list[int]
    max_tokens: int
    order: tuple[int | float, ...]
    choice: int = 0
    family: int = 0
    tenant: int = 0
    salt: str | None = None
    stops: frozenset[int] = frozenset()
    computed: int = 0
    lost: int = 0
    described: bool = False
    decoding: bool = False
    came: int = 0
    charged: bool = False

    def __post_init__(self) -> None:
        self.end = len(self.tokens) + self.max_tokens
        self.shared = len(self.tokens) - 1

    @property
    def is_over(self) -> bool:
        """Judged by the last output."""
        return len(self.tokens) == self.end or self.tokens[-1] in self.stops


@dataclass
class Step:
    """What is decided so far.

    budget: tokens left. victims: handles in order. planned: tokens to compute. hits: by
    handle, what the admitted did not compute. copies: source and copy of each block in
    which a shared prompt ends.
    """

    budget: int
    victims: list[int] = field(default_factory=list)
    planned: dict[Sequence, int] = field(default_factory=dict)
    hits: dict[int, int] = field(default_factory=dict)
    copies: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> dict[int, int]:
        """By handle."""
        return {each.handle: number for each, number in self.planned.items()}
