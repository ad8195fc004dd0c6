"""Builds tokenizer.json from the vocabulary in a GGUF file's metadata.

    gpt2     byte-level BPE, with merges in the file; tokenizer.ggml.pre names how text is cut
    gemma4   BPE over characters, with merges in the file
    llama    SentencePiece BPE, whose merges follow from the scores of its tokens
    t5       SentencePiece unigrams
    bert     WordPiece

Token ids equal those of llama.cpp, except where it approximates a family's own regex.
docs/configuration.md says where the conversion in `transformers` differs.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from deploy.models.prepared_folder import as_model_error, is_token_id
from proto.errors import ModelError, shown

_CONTRACTION: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_DIGIT: Final = r"\p{N}"
_SYMBOLS: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2: Final = f"{_CONTRACTION}|{_WORD}|{_DIGIT}|{_SYMBOLS}|{_SPACES}"
_LLAMA3: Final = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SUFFIX: Final = f"{_CONTRACTION}?"
_SYMBOLS_AND_SLASHES: Final = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|{_DIGIT}|{_SYMBOLS_AND_SLASHES}|{_SPACES}"
)
_CASED_WORDS: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}"
)
_GPT4O: Final = rf"{_CASED_WORDS}|\p{{N}}{{1,3}}|{_SYMBOLS_AND_SLASHES}|{_SPACES}"
_HAN: Final = r"[一-龥ࠀ-一가-\x{d7ff}]+"
_CASED: Final = r"[\p{Lu}\p{Ll}\p{Lt}]"
_KIMI_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_KIMI_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
KIMI_K2_PIECES: Final = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}*{_KIMI_LOWER}+{_SUFFIX}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}+{_KIMI_LOWER}*{_SUFFIX}"
    rf"|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
)
_DEEPSEEK_WORDS: Final = (
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
)
_DEEPSEEK_V3: Final = (r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", rf"{_DEEPSEEK_WORDS}[\r\n]*|{_SPACES}")
_DEEPSEEK_LLM: Final = (
    *(r"[\r\n]", rf"\s?{_CASED}+", r"\s?[!-/:-~！-／：-～‘-‟\x{3000}-。]+"),
    *(r"\s+$", _HAN, _DIGIT),
)
_DEEPSEEK_CODER: Final = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, _DIGIT)
_BLOOM: Final = r" ?[^(\s|.,!?…。，、।۔،)]+"
_BAILING: Final = rf"'(?i:[sdmt]|ll|ve|re)|{_WORD}|{_DIGIT}|{_SYMBOLS}|\s*[\r\n]|\s+(?!\S)|\s+"
_AFMOE: Final = (
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
    r"[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+",
    _DEEPSEEK_V3[-1],
)
_CHAMELEON: Final = (
    *("<sentinel:[0-9]+>", "IMGIMG[A-I]{1,4}Z", r"[\t\n]|    |  ", _DIGIT),
    *(r"[\p{P}!-/:-@\[-`{-~]", _GPT2),
)
_EXAONE_MOE: Final = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|{_DIGIT}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_JAIS2: Final = _LLAMA3.removesuffix(r"\s+(?!\S)|\s+") + "|".join(
    (*(rf"\s{{{size}}}(?!\S)" for size in (512, 256, 128, 64, 32, 16, 8, 4, "1,2")), r"\s")
)
_QWEN35: Final = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|{_DIGIT}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_SEED_CODER: Final = rf"{_CONTRACTION}|{_WORD}|{_DIGIT}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_YOUTU: Final = (
    r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
    f"{_CASED_WORDS}|{_DIGIT}|{_SYMBOLS_AND_SLASHES}|{_SPACES}",
)

_LLAMA3_NAMES: Final = (
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"
)
_SPLITS: Final[Mapping[str, tuple[str, ...]]] = {
    name: tuple(regexes)
    for names, *regexes in (
        ("default gpt-2 phi-2 gigachat a.x-4.0 mellum modern-bert roberta-bpe exaone4", _GPT2),
        ("jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code", _GPT2),
        ("mpt olmo jais trillion granite-docling", _GPT2),
        ("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", _DIGIT, _GPT2),
        ("falcon", r"[\p{P}$+<=>\^~|`]+", _GPT2, "[0-9]{3}"),
        (f"{_LLAMA3_NAMES} dbrx smaug-bpe chatglm-bpe glm4 glm5", _LLAMA3),
        ("jais-2", _JAIS2),
        ("minicpm5", r"\p{N}{1,3}", _LLAMA3),
        ("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez", _QWEN2),
        ("stablelm2 hunyuan solar-open grok-2", _QWEN2),
        ("laguna", r"[^\n]+|\n+", _QWEN2),
        ("ufakzeka", _QWEN2.removeprefix(f"{_CONTRACTION}|")),
        ("qwen35", _QWEN35),
        ("seed-coder", _SEED_CODER),
        ("bailingmoe bailingmoe2 llada-moe", _BAILING),
        ("exaone-moe", _EXAONE_MOE),
        ("tekken", _TEKKEN),
        ("gpt-4o llama4 kanana2 talkie minimax-m2 granite-embed-multi-97m", _GPT4O),
        ("tiny_aya cohere2moe", r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O),
        ("youtu", *_YOUTU),
        ("deepseek-llm", *_DEEPSEEK_LLM),
        ("deepseek-coder", *_DEEPSEEK_CODER),
        ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", *_DEEPSEEK_V3),
        ("spark2_5", *_DEEPSEEK_V3[:2], rf"{_DEEPSEEK_WORDS}|[\r\n]|\s+(?!\S)|\s+", _DIGIT),
        ("afmoe", *_AFMOE),
        ("kimi-k2", KIMI_K2_PIECES),
        ("bloom poro-chat gpt3-finnish", _BLOOM),
        ("viking", _BLOOM, _DIGIT),
        ("chameleon", *_CHAMELEON),
        ("superbpe", r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    )
    for name in names.split()
}
"""Value of tokenizer.ggml.pre → regexes that cut a text into the pieces within which a byte-level
BPE merges; each cuts the pieces of the one before it. The names are llama.cpp's. A file
without the key is older than it and taken for `default`."""

_UNSPLIT: Final = ("gemma4", "granite-embed-multi-311m", "sarvam-moe", "mmbert")
"""Values of tokenizer.ggml.pre with BPE over characters instead of bytes, spaces written as in
SentencePiece, and merges across words; mmbert merges within words."""
_WHOLE_PIECES: Final = frozenset(
    f"{_LLAMA3_NAMES} glm4 glm5 tekken youtu minicpm5 granite-embed-multi-97m".split()
)
"""Values of tokenizer.ggml.pre with which a piece that is a token is not merged."""
_BEGINNING: Final = frozenset(
    f"{_LLAMA3_NAMES} tekken chameleon gemma4 granite-embed-multi-311m".split()
)
"""Values of tokenizer.ggml.pre whose texts begin with bos_token_id if the file does not say."""

_TEMPLATE: Final = "tokenizer.chat_template"
"""Key of the chat template, and before a dot and a name of others."""
_SPACE: Final = "▁"
"""Character that SentencePiece writes for a space."""
_MAX_TOKEN_CHARACTERS: Final = 512
"""Longest token whose merges are searched, which takes time with the square of its length."""
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
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
_INFILL_TOKENS: Final = {
    "fim_prefix_token": ("fim_pre_token_id", "prefix_token_id"),
    "fim_suffix_token": ("fim_suf_token_id", "suffix_token_id"),
    "fim_middle_token": ("fim_mid_token_id", "middle_token_id"),
    "fim_pad_token": ("fim_pad_token_id",),
    "fim_repo_token": ("fim_rep_token_id",),
    "fim_separator_token": ("fim_sep_token_id",),
}
"""Tokens for filling in the middle, with the names under which api_server/text/infill.py reads
them, and their keys, newer ones first."""
_SENTENCEPIECE_IDS: Final = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
"""Ids in files of SentencePiece that do not set them."""
_KEEP_SPACES: Final = ("<unk>", "<s>", "<|endoftext|>")
"""Special tokens of Phi-3 that leave white space after them in the text."""


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
    is_sentencepiece = metadata["tokenizer.ggml.model"] == "llama"
    default = _SENTENCEPIECE_IDS.get(key) if is_sentencepiece else None
    value = metadata.get(f"tokenizer.ggml.{key}", default)
    if value is None or is_token_id(value):
        return value
    raise ModelError(f"{path} sets tokenizer.ggml.{key} to {shown(value)}")


def byte_level_bpe(
    vocabulary: dict[str, int],
    merges: list[tuple[str, str]],
    regexes: Iterable[str],
    *,
    is_whole: bool,
) -> Any:
    """Return a `tokenizers.Tokenizer` that merges bytes within the pieces of a text.

    regexes: cut a text into pieces; each cuts the pieces of the one before it. is_whole: a piece
    that is a token is not merged.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=is_whole))
    splits = [pre_tokenizers.Split(Regex(regex), behavior="isolated") for regex in regexes]
    bytes_of_pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_of_pieces])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


class _Vocabulary:
    """The vocabulary in a file. special: token by its name in tokenizer_config.json, or None."""

    def __init__(self, path: str, metadata: Mapping[str, Any]) -> None:
        self._path = path
        self._metadata = metadata
        self._model = metadata["tokenizer.ggml.model"]
        self._pre = self._known_pre()
        self._tokens: list[str] = self._list("tokens", str)
        if self._model == "bert":
            self._tokens = self._wordpieces()
        keys = {**{name: (key,) for name, key in _SPECIAL_TOKENS.items()}, **_INFILL_TOKENS}
        self.special = {
            name: next((token for key in each if (token := self._token(key))), None)
            for name, each in keys.items()
        }

    def tokenizer(self) -> Any:
        """Return the `tokenizers.Tokenizer` of the vocabulary."""
        from tokenizers import AddedToken

        architecture = self._metadata["general.architecture"]
        match self._model, architecture:
            case "gpt2", _ if self._pre in _SPLITS:
                tokenizer = self._byte_level()
            case ("gpt2" | "gemma4", _) | ("llama", "gemma2" | "gemma3" | "gemma-embedding"):
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
                    "supported: gpt2, llama, gemma4, t5, bert"
                )
        vocabulary = tokenizer.get_vocab()
        named = filter(None, self.special.values())
        special = dict.fromkeys([*self._of_type(_CONTROL, _UNKNOWN), *named])
        is_phi3 = self._model == "llama" and architecture == "phi3"
        # Whole in the text, before its normalisation
        for tokens, is_special in ((special, True), (self._of_type(_USER_DEFINED), False)):
            tokenizer.add_tokens(
                [
                    AddedToken(
                        token,
                        normalized=False,
                        special=is_special,
                        rstrip=is_phi3 and token not in _KEEP_SPACES,
                    )
                    for token in tokens
                    if token in vocabulary and (is_special or token not in special)
                ]
            )
        self._add_ends(tokenizer)
        return tokenizer

    def _byte_level(self) -> Any:
        from tokenizers import normalizers

        merges = self._file_merges()
        if merges is None:
            raise self._missing("merges")
        vocabulary = {token: index for index, token in enumerate(self._tokens)}
        tokenizer = byte_level_bpe(
            vocabulary, merges, _SPLITS[self._pre], is_whole=self._pre in _WHOLE_PIECES
        )
        if self._pre == "modern-bert":
            tokenizer.normalizer = normalizers.NFC()
        return tokenizer

    def _sentencepiece(self) -> Any:
        """Return a tokenizer that gives text between special tokens to SentencePiece's rules."""
        from tokenizers import Tokenizer, decoders, models, normalizers

        vocabulary = {token: index for index, token in enumerate(self._tokens)}
        merges = self._file_merges() or self._merges_by_score(vocabulary)
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, fuse_unk=True, byte_fallback=True))
        prefix = self._flag("add_space_prefix", True)
        space = normalizers.Replace(" ", _SPACE)
        tokenizer.normalizer = (
            normalizers.Sequence([normalizers.Prepend(_SPACE), space]) if prefix else space
        )
        steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence(
            [*steps, decoders.Strip(content=" ", left=1)] if prefix else steps
        )
        return tokenizer

    def _gemma(self) -> Any:
        from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

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
        if self._pre == "mmbert":
            begin = normalizers.Replace(Regex(rf"^(?=[^{_SPACE}\n])"), _SPACE)
            tokenizer.normalizer = normalizers.Sequence([tokenizer.normalizer, begin])
            word = Regex(rf"{_SPACE}[^{_SPACE}\n]*|\n+")
            tokenizer.pre_tokenizer = pre_tokenizers.Split(word, behavior="isolated")
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        return tokenizer

    def _wordpiece(self) -> Any:
        """Return a tokenizer by BERT's rules.

        Older files do not say whether case counts: it does if a token has a capital letter.
        """
        from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

        vocabulary = {token: index for index, token in enumerate(self._tokens)}
        control = set(self._of_type(_CONTROL))
        words = (token for token in self._tokens if token not in control and token[:1] != "[")
        has_capitals = any(token.lower() != token for token in words)
        is_lower = self._flag("normalizer.lowercase", not has_capitals)
        strips_accents = self._flag("normalizer.strip_accents", is_lower)
        unknown = self.special["unk_token"] or "[UNK]"
        tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=unknown))
        tokenizer.normalizer = normalizers.BertNormalizer(
            lowercase=is_lower, strip_accents=strips_accents
        )
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
        adds_bos = self._flag("add_bos_token", self._model == "llama" or self._pre in _BEGINNING)
        adds_eos = self._flag("add_eos_token", self._model == "t5")
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

    def _known_pre(self) -> str:
        """Return what cuts texts into pieces, "" for a kind of vocabulary that leaves no choice."""
        if self._model not in ("gpt2", "gemma4"):
            return ""
        default = "default" if self._model == "gpt2" else "gemma4"
        name = self._metadata.get("tokenizer.ggml.pre", default)
        if isinstance(name, str) and (name in _SPLITS or name in _UNSPLIT):
            return name
        raise ModelError(
            f"{self._path}: tokenizer.ggml.pre {shown(name)} is not known, and prompts would be "
            "split into other tokens than in training"
        )

    def _flag(self, key: str, default: bool) -> bool:
        value = self._metadata.get(f"tokenizer.ggml.{key}", default)
        if isinstance(value, bool):
            return value
        raise ModelError(f"{self._path} sets tokenizer.ggml.{key} to {shown(value)}")

    def _of_type(self, *kinds: int) -> list[str]:
        key = "tokenizer.ggml.token_type"
        types = self._list("token_type", int) if key in self._metadata else []
        return [token for token, own in zip(self._tokens, types, strict=False) if own in kinds]

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
