"""Fill in the middle: the tokens of a vocabulary for it, and prompts made of them.

    files of a request      <repo>name <file>name text … <file>name
    before the suffix       <prefix>text <suffix>text <middle>          what the model continues
    suffix first            <suffix>text <prefix>text <middle>

Names of tokens, their order and the limits of `project_prompt` are those of llama.cpp.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from proto.errors import InvalidRequestError

_NAMES: Final = {
    "prefix": (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>"),
        *("<|code_prefix|>", "<|prefix|>"),
    ),
    "suffix": (
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>"),
        *("<|code_suffix|>", "<|suffix|>"),
    ),
    "middle": (
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>"),
        *("<|code_middle|>", "<|middle|>"),
    ),
    "pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "repo": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "separator": ("<|file_sep|>",),
}
"""Role → texts of the token that has it, of which a vocabulary has one at most."""
_MORE_ENDS: Final = ("<file_sep>", "<repo_name>", "<|file_separator|>", "<EOT>", "▁<EOT>")
"""Texts of further tokens that StarCoder 2, CodeGemma and Code Llama write after the middle."""
SETTINGS: Final = {role: f"fim_{role}_token" for role in _NAMES}
"""Role → key in tokenizer_config.json of the text of its token, which a GGUF file may name."""
MAX_WINDOW: Final = 2048
"""Most tokens of prefix and suffix together: llama.cpp's n_batch; half of a small context."""


@dataclass(frozen=True, slots=True)
class InfillTokens:
    """Ids of a vocabulary's tokens for filling in, None for those that it lacks.

    end_ids: tokens after which the model writes another file or nothing.
    """

    prefix: int | None = None
    suffix: int | None = None
    middle: int | None = None
    repo: int | None = None
    separator: int | None = None
    end_ids: tuple[int, ...] = ()
    all_ids: frozenset[int] = field(default_factory=frozenset)

    @classmethod
    def find(
        cls, id_of: Callable[[str], int | None], settings: Mapping[str, object]
    ) -> "InfillTokens":
        """Return the tokens that tokenizer_config.json names, or else those with known texts.

        id_of: id of the token with a text. settings: the content of tokenizer_config.json.
        """
        found: dict[str, int] = {}
        for role, names in _NAMES.items():
            named = settings.get(SETTINGS[role])
            for text in (named, *names) if isinstance(named, str) else names:
                if (token_id := id_of(text)) is not None:
                    found[role] = token_id
                    break
        more = (id_of(text) for text in _MORE_ENDS)
        ends = [found.get(role) for role in ("pad", "repo", "separator")]
        end_ids = tuple(dict.fromkeys(each for each in (*ends, *more) if each is not None))
        found.pop("pad", None)
        return cls(**found, end_ids=end_ids, all_ids=frozenset((*found.values(), *end_ids)))

    def check(self, param: str) -> None:
        """Raise InvalidRequestError if the model cannot fill in. param: the field that asks."""
        roles = {"prefix": self.prefix, "suffix": self.suffix, "middle": self.middle}
        missing = [role for role, token_id in roles.items() if token_id is None]
        if missing:
            examples = ", ".join(_NAMES[role][0] for role in missing)
            raise InvalidRequestError(
                f"{param} is not available: this model cannot fill in the middle, because its "
                f"vocabulary has no token for the {', '.join(missing)}, such as {examples}",
                param,
            )

    def prompt(
        self,
        prefix: Sequence[int],
        suffix: Sequence[int],
        *,
        start: Sequence[int] = (),
        written: Sequence[int] = (),
        suffix_first: bool = False,
    ) -> list[int]:
        """Return a prompt that the model continues with what is between prefix and suffix.

        start: tokens at the start of every prompt of the model. written: the beginning of the
        middle, which counts as a part of the prefix.
        """
        assert self.prefix is not None, "see `check`"
        assert self.suffix is not None, "see `check`"
        assert self.middle is not None, "see `check`"
        before = [self.prefix, *prefix, *written]
        after = [self.suffix, *suffix]
        parts = (after, before) if suffix_first else (before, after)
        return [*start, *parts[0], *parts[1], self.middle]

    def project_prompt(
        self,
        prefix: Sequence[int],
        suffix: Sequence[int],
        files: Sequence[tuple[Sequence[int], Sequence[int]]],
        names: Sequence[Sequence[int]],
        *,
        start: Sequence[int],
        written: Sequence[int],
        suffix_first: bool,
        context: int,
        num_output_tokens: int,
    ) -> list[int]:
        """Return a prompt with other files before it, as llama.cpp's `/infill` makes it.

        Keeps the end of the prefix, the beginning of the suffix and the end of the files.
        files: token ids of the name and of the text of each. names: token ids of NAME_TEXTS.
        context: most tokens of prompt and output together. num_output_tokens: 0 if unlimited.

            |-- files --|start|<prefix>-- 3/4 of the window --|<suffix>-- 1/4 --|<middle>| output
        """
        most_before, most_after = window_shares(context)
        kept = min(len(prefix), most_before)
        near = self.prompt(
            prefix[len(prefix) - kept :],
            suffix[: max(0, most_after - (2 + len(written)))],
            start=start,
            written=written,
            suffix_first=suffix_first,
        )
        before: list[int] = []
        repo_name, file_name, snippet = names
        if self.repo is not None:
            before += [self.repo, *repo_name]
        for name, text in files:
            before += snippet if self.separator is None else [self.separator, *name]
            before += text
        if self.separator is not None:
            before += [self.separator, *file_name]
        room = min(
            context - most_before - most_after + 2,
            context - len(near) - max(1, num_output_tokens),
        )
        return [*before[max(0, len(before) - max(0, room)) :], *near]


def window_shares(context: int) -> tuple[int, int]:
    """Return the most tokens of the prefix, 3/4 of the window, and of all that follows it."""
    quarter = min(MAX_WINDOW, context // 2) // 4
    return 3 * quarter, quarter


NAME_TEXTS: Final = ("myproject\n", "filename\n", "\n\n--- snippet ---\n\n")
"""Project, file, and what stands between files without separators: a request names neither."""
