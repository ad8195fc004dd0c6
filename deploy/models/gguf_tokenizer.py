"""Builds tokenizer.json from the vocabulary in a GGUF file's metadata.

    gpt2     byte-level BPE, with merges in the file
    llama    SentencePiece BPE, whose merges follow from the scores of its tokens
    t5       SentencePiece unigrams
    bert     WordPiece

Token ids equal those of the conversion in
`transformers`, which takes seconds to import.
"""

from collections.abc import Mapping
from typing import Any, Final

from deploy.models.prepared_folder import as_model_error, is_token_id
from proto.errors import ModelError, shown

_LLAMA3: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SUFFIX: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_TEKKEN: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_HAN: Final = r"[一-龥ࠀ-一가-\x{d7ff}]+"
_CASED: Final = r"[\p{Lu}\p{Ll}\p{Lt}]"
_KIMI_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_KIMI_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
KIMI_K2_PIECES: Final = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}*{_KIMI_LOWER}+{_SUFFIX}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}+{_KIMI_LOWER}*{_SUFFIX}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_V3: Final = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEEPSEEK_LLM: Final = (
    *(r"[\r\n]", rf"\s?{_CASED}+", r"\s?[!-/:-~！-／：-～‘-‟\x{3000}-。]+"),
    *(r"\s+$", _HAN, r"\p{N}"),
)
_DEEPSEEK_CODER: Final = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}")
_SPLITS: Final[Mapping[str, str | tuple[str, ...]]] = {
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral"), _LLAMA3
    ),
    **dict.fromkeys(("midm-2.0", "lfm2", "jina-v5-nano", "dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("glm4", "chatglm-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _GPT4O),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK_V3),
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-llm": _DEEPSEEK_LLM,
    "kimi-k2": KIMI_K2_PIECES,
    "tekken": _TEKKEN,
}
"""Value of tokenizer.ggml.pre → regex of the pieces within which a byte-level BPE merges; several
cut the pieces of those before them. With any other value the pieces are those of GPT-2."""

_SINGLE_DIGITS: Final = ("command-r", "refact", "starcoder")
"""Values of tokenizer.ggml.pre with GPT-2's pieces, and every digit by itself: Command R, Granite
and StarCoder."""

_TEMPLATE: Final = "tokenizer.chat_template"
"""Key of the chat template, and before a dot and a name of others."""
_SPACE: Final = "▁"
"""Character that SentencePiece writes for a space."""
_MAX_TOKEN_CHARACTERS: Final = 512
"""Longest token whose merges are searched, which takes time with the square of its length."""
_CONTROL, _USER_DEFINED = 3, 4
"""Values of tokenizer.ggml.token_type: tokens that text is searched for before any merge."""
_SPLIT_END: Final = "##"
"""Prefix of WordPiece tokens that continue a word; in files all other tokens begin with _SPACE."""
_ENCODERS: Final = ("bert", "modern-bert")
"""Architectures whose texts always have a first and a last token."""
_WORDPIECE_ENDS: Final = (
    (("bos_token_id", "cls_token_id"), "[CLS]"),
    (("seperator_token_id", "eos_token_id"), "[SEP]"),
)
_OTHER_ENDS: Final = (
    (("bos_token_id", "cls_token_id"), "<s>"),
    (("eos_token_id", "seperator_token_id"), "</s>"),
)
"""Keys of the first and the last token, by preference, and what they are in a file without a key;
`seperator` is gguf's spelling."""
_SPECIAL_TOKENS: Final = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def convert(path: str, metadata: Mapping[str, Any]) -> tuple[bytes, dict[str, Any], dict[str, str]]:
    """Return tokenizer.json, tokenizer configuration, and the chat templates by name.

    Raises ModelError naming the file and the key for a vocabulary that is missing or invalid.
    """
    vocabulary = _Vocabulary(path, metadata)
    with as_model_error(f"the tokenizer in {path} cannot be converted"):
        tokenizer = vocabulary.tokenizer()
        tokenizer_json = tokenizer.to_str(pretty=True).encode()
    special = {name: token for name, token in vocabulary.special.items() if token is not None}
    return tokenizer_json, special, _chat_templates(metadata)


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    return {
        key.removeprefix(_TEMPLATE).removeprefix(".") or "default": text
        for key, text in metadata.items()
        if (key == _TEMPLATE or key.startswith(f"{_TEMPLATE}.")) and isinstance(text, str)
    }


def token_id(path: str, metadata: Mapping[str, Any], key: str) -> int | None:
    """Return the token id under tokenizer.ggml.`key`; raises ModelError if it is none."""
    value = metadata.get(f"tokenizer.ggml.{key}")
    if value is None or is_token_id(value):
        return value
    raise ModelError(f"{path} sets tokenizer.ggml.{key} to {shown(value)}")


class _Vocabulary:
    """The vocabulary in a file. special: token by its name in tokenizer_config.json, or None."""

    def __init__(self, path: str, metadata: Mapping[str, Any]) -> None:
        self._path = path
        self._metadata = metadata
        self._model = metadata["tokenizer.ggml.model"]
        self._tokens: list[str] = self._list("tokens", str)
        if self._model == "bert":
            self._tokens = self._wordpieces()
        self.special = {name: self._token(key) for name, key in _SPECIAL_TOKENS.items()}

    def tokenizer(self) -> Any:
        """Return the `tokenizers.Tokenizer` of the vocabulary."""
        from tokenizers import AddedToken

        match self._model, self._metadata["general.architecture"]:
            case "gpt2", _:
                tokenizer = self._byte_level()
            case "llama", "gemma2" | "gemma3" | "gemma-embedding":
                tokenizer = self._gemma()
            case "llama", _:
                tokenizer = self._sentencepiece()
            case "t5", _:
                tokenizer = self._unigrams()
            case "bert", _:
                tokenizer = self._wordpiece()
            case model, _:
                raise ModelError(
                    f"{self._path} has tokenizer.ggml.model {shown(model)}: "
                    "supported: gpt2, llama, t5, bert"
                )
        vocabulary = tokenizer.get_vocab()
        control = [token for token in self._of_type(_CONTROL) if token in vocabulary]
        named = [token for token in self.special.values() if token in vocabulary]
        # Whole in the text, before its normalisation
        tokenizer.add_special_tokens(
            [
                AddedToken(token, normalized=False, special=True)
                for token in dict.fromkeys([*control, *named])
            ]
        )
        tokenizer.add_tokens(
            [
                AddedToken(token, normalized=False, special=False)
                for token in self._of_type(_USER_DEFINED)
                if token in vocabulary and token not in named
            ]
        )
        self._add_ends(tokenizer)
        return tokenizer

    def _byte_level(self) -> Any:
        from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

        merges = self._file_merges()
        if merges is None:
            raise self._missing("merges")
        vocabulary = {_in_byte_letters(token): index for index, token in enumerate(self._tokens)}
        tokenizer = Tokenizer(models.BPE(vocabulary, merges))
        pre = self._metadata.get("tokenizer.ggml.pre", "")
        if pre == "modern-bert":
            tokenizer.normalizer = normalizers.NFC()
        pieces: list[Any] = [
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in _SPLITS)
        ]
        if pre in _SPLITS:
            own = _SPLITS[pre]
            regexes = (own,) if isinstance(own, str) else own
            pieces[:0] = [
                pre_tokenizers.Split(Regex(regex), behavior="isolated") for regex in regexes
            ]
        elif pre in _SINGLE_DIGITS:
            pieces.insert(0, pre_tokenizers.Digits(individual_digits=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(pieces)
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def _sentencepiece(self) -> Any:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        vocabulary = {token: index for index, token in enumerate(self._tokens)}
        merges = self._file_merges() or self._merges_by_score(vocabulary)
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, fuse_unk=True, byte_fallback=True))
        prefix = self._metadata.get("tokenizer.ggml.add_space_prefix", True) is not False
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement=_SPACE, prepend_scheme="first" if prefix else "never", split=False
        )
        steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence(
            [*steps, decoders.Strip(content=" ", left=1)] if prefix else steps
        )
        return tokenizer

    def _gemma(self) -> Any:
        from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

        # Gemma's files have tokens of several spaces as such; and the order of its merges is that
        # of its tokens, not that of their scores.
        tokens = [
            _SPACE * len(token) if " " in token and not token.strip() else token
            for token in self._tokens
        ]
        vocabulary = {token: index for index, token in enumerate(tokens)}
        merges = self._file_merges() or self._splits_in_order(vocabulary)
        unknown = self.special["unk_token"] or "<unk>"
        tokenizer = Tokenizer(
            models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
        )
        tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        return tokenizer

    def _wordpiece(self) -> Any:
        """Lower case, if no token has a capital letter."""
        from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

        vocabulary = {token: index for index, token in enumerate(self._tokens)}
        control = set(self._of_type(_CONTROL))
        words = (token for token in self._tokens if token not in control and token[:1] != "[")
        is_lower = not any(character.isupper() for token in words for character in token)
        unknown = self.special["unk_token"] or "[UNK]"
        tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=unknown))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=is_lower)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        return tokenizer

    def _wordpieces(self) -> list[str]:
        """Return the tokens as WordPiece has them.

        Files have words with the character of a space before them, and other parts without `##`.
        """
        control = set(self._of_type(_CONTROL))
        return [
            token
            if token in control or (token[:1] == "[" and token[-1:] == "]")
            else token[1:]
            if token.startswith(_SPACE) and token != _SPACE
            else _SPLIT_END + token
            for token in self._tokens
        ]

    def _unigrams(self) -> Any:
        from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

        scores = self._scores()
        unknown = token_id(self._path, self._metadata, "unknown_token_id")
        if unknown is None or unknown >= len(self._tokens):
            raise self._missing("unknown_token_id")
        tokenizer = Tokenizer(models.Unigram(list(zip(self._tokens, scores, strict=True)), unknown))
        charsmap = self._metadata.get("tokenizer.ggml.precompiled_charsmap")
        if charsmap is not None:
            if not isinstance(charsmap, list) or not all(type(byte) is int for byte in charsmap):
                raise ModelError(f"{self._path}: tokenizer.ggml.precompiled_charsmap is no bytes")
            data = bytes(byte & 0xFF for byte in charsmap)
            tokenizer.normalizer = normalizers.Precompiled(data)
        spaces = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="always")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), spaces]
        )
        tokenizer.decoder = decoders.Metaspace(replacement=_SPACE, prepend_scheme="always")
        return tokenizer

    def _add_ends(self, tokenizer: Any) -> None:
        """Let encoding add the first and the last token of a text if the file says so."""
        from tokenizers.processors import TemplateProcessing

        if self._metadata["general.architecture"] in _ENCODERS:
            self._add_ends_of_encoder(tokenizer)
            return
        # Without the keys, a text of a SentencePiece vocabulary begins with the token
        adds_bos = self._metadata.get("tokenizer.ggml.add_bos_token", self._model != "gpt2")
        adds_eos = self._metadata.get("tokenizer.ggml.add_eos_token", False)
        first = self.special["bos_token"] if adds_bos else None
        last = self.special["eos_token"] if adds_eos else None

        def with_ends(text: str, sequence: int) -> list[str]:
            pieces = [first, text, last]
            return [f"{piece}:{sequence}" for piece in pieces if piece is not None]

        single = with_ends("$A", 0)
        added = dict.fromkeys(token for token in (first, last) if token is not None)
        tokenizer.post_processor = TemplateProcessing(
            single=single,
            pair=single + with_ends("$B", 1),
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in added],
        )

    def _add_ends_of_encoder(self, tokenizer: Any) -> None:
        """Let a text have its first and last token, and a pair begin once.

        The second text of a pair has another token type with WordPiece. In RoBERTa and XLM-RoBERTa
        the last token is also before it.
        """
        from tokenizers.processors import TemplateProcessing

        is_wordpiece = self._model == "bert"
        first, last = self._ends_of_encoder(_WORDPIECE_ENDS if is_wordpiece else _OTHER_ENDS)
        is_roberta = not is_wordpiece and self._metadata["general.architecture"] == "bert"
        single, number = f"{first} $A {last}", ":1" if is_wordpiece else ""
        between = f"{last} " if is_roberta else ""
        tokenizer.post_processor = TemplateProcessing(
            single=single,
            pair=f"{single} {between}$B{number} {last}{number}",
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in (first, last)],
        )

    def _ends_of_encoder(self, both: tuple[tuple[tuple[str, ...], str], ...]) -> tuple[str, ...]:
        """Return the first and the last token of a text; raises ModelError if there is none."""
        ends = []
        for keys, default in both:
            found = next((token for key in keys if (token := self._token(key))), default)
            if found not in self._tokens:
                raise self._missing(keys[0])
            ends.append(found)
        return tuple(ends)

    def _of_type(self, kind: int) -> list[str]:
        key = "tokenizer.ggml.token_type"
        types = self._list("token_type", int) if key in self._metadata else []
        return [token for token, own in zip(self._tokens, types, strict=False) if own == kind]

    def _file_merges(self) -> list[tuple[str, str]] | None:
        if "tokenizer.ggml.merges" not in self._metadata:
            return None
        merges = []
        for merge in self._list("merges", str):
            left, space, right = merge.partition(" ")
            if not space or " " in right:
                raise ModelError(
                    f"{self._path} has a merge in tokenizer.ggml.merges that is not two tokens: "
                    f"{shown(merge)}"
                )
            merges.append((left, right))
        return merges

    def _merges_by_score(self, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
        """Return the merges that SentencePiece's scores imply: those of the best tokens first."""
        scores = self._scores()

        def rank(pair: tuple[str, str]) -> tuple[float, int, int]:
            left, right = pair
            return -scores[vocabulary[left + right]], -len(left), -len(right)

        return sorted(self._splits_in_order(vocabulary), key=rank)

    def _scores(self) -> list[float]:
        scores = self._list("scores", float)
        if len(scores) != len(self._tokens):
            raise ModelError(
                f"{self._path} has {len(scores)} tokenizer.ggml.scores "
                f"for {len(self._tokens)} tokens"
            )
        return scores

    def _splits_in_order(self, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
        """Return all ways to make tokens of two others, by token, a long left part first."""
        splits = []
        for token in vocabulary:
            if len(token) > _MAX_TOKEN_CHARACTERS:
                raise ModelError(
                    f"{self._path} has a token of {len(token)} characters in "
                    f"tokenizer.ggml.tokens, and at most {_MAX_TOKEN_CHARACTERS} are supported "
                    "without tokenizer.ggml.merges"
                )
            for cut in range(len(token) - 1, 0, -1):
                left, right = token[:cut], token[cut:]
                if left in vocabulary and right in vocabulary:
                    splits.append((left, right))
        return splits

    def _token(self, key: str) -> str | None:
        number = token_id(self._path, self._metadata, key)
        if number is None:
            return None
        if number >= len(self._tokens):
            raise ModelError(
                f"{self._path} sets tokenizer.ggml.{key} to {number}, "
                f"and there are {len(self._tokens)} tokens"
            )
        return self._tokens[number]

    def _list(self, key: str, kind: type) -> list[Any]:
        """Return the array of a key, which holds values of one type."""
        values = self._metadata.get(f"tokenizer.ggml.{key}")
        if values is None:
            raise self._missing(key)
        if not isinstance(values, list) or (values and type(values[0]) is not kind):
            raise ModelError(f"{self._path} has no list of {kind.__name__} in tokenizer.ggml.{key}")
        return values

    def _missing(self, key: str) -> ModelError:
        return ModelError(f"{self._path} has no tokenizer.ggml.{key}")


def _byte_letters() -> dict[int, str]:
    """Return GPT-2's letter for each byte: itself if it prints, else one from 256 on."""
    printing = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printing]
    return {
        **{byte: chr(byte) for byte in printing},
        **{byte: chr(256 + index) for index, byte in enumerate(others)},
    }


BYTE_LETTERS: Final = _byte_letters()
_ALPHABET: Final = frozenset(BYTE_LETTERS.values())


def _in_byte_letters(token: str) -> str:
    """Return a token in GPT-2's letters; some files spell added tokens as plain text."""
    if _ALPHABET.issuperset(token):
        return token
    return "".join(BYTE_LETTERS[byte] for byte in token.encode())
