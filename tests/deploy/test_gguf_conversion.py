"""Configuration and tokenizer of a GGUF file: the same as `transformers` converts them to."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoTokenizer,
    BertTokenizer,
    RobertaTokenizer,
    XLMRobertaTokenizer,
)

from deploy.models import gguf_config, gguf_file, gguf_header, gguf_tokenizer
from proto.errors import ModelError
from proto.messages.pooling import Pooler
from tests.fakes.tiny_model_files import SIZES, TOKENS, write_gguf
from worker.models.latent_attention import LatentAttentionSpec
from worker.models.moe import MoeSpec
from worker.models.registry import spec_from_config
from worker.models.rope import YarnRope

TEXTS = (
    "a a  aa, a's AA's 1234 a1!\n\n a\t<|end|>a",
    "  aab ab ba\r\nÄ ß é 中a",
    "<|begin|>a<think> a</think>",
    "",
)
SPECIAL = {"bos_token_id": "<|begin|>", "eos_token_id": "<|end|>", "unknown_token_id": "<unk>"}


def byte_level() -> dict[str, Any]:
    tokens = [*TOKENS, "aa", "Ġaa", "12", "'s", "<|begin|>", "<unk>", "<think>", "</think>"]
    types = [3 if token.startswith("<|") or token == "<unk>" else 1 for token in tokens]
    types[tokens.index("<think>")] = types[tokens.index("</think>")] = 4
    merges = ["Ġ a", "a a", "Ġa a", "1 2", "' s"]
    return {"model": "gpt2", "tokens": tokens, "types": types, "merges": merges}


def sentencepiece() -> dict[str, Any]:
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = [
        "▁",
        "a",
        "b",
        "'",
        "s",
        "▁a",
        "aa",
        "▁aa",
        "ab",
        "▁b",
        "aab",
        "\n",
        "1",
        "▁▁",
        "<think>",
    ]
    tokens = ["<unk>", "<|begin|>", "<|end|>", *bytes_, *pieces]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(pieces) - 1), 4]
    scores = [0.0] * 259 + [-float(index % 5) for index in range(len(pieces))]
    return {"model": "llama", "tokens": tokens, "types": types, "scores": scores}


def gemma() -> dict[str, Any]:
    vocabulary = sentencepiece()
    vocabulary["tokens"][-2] = "  "
    return vocabulary


def write(path: Path, architecture: str, vocabulary: dict[str, Any], **flags: bool) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(path, architecture)
    writer.add_context_length(SIZES["length"])
    writer.add_embedding_length(SIZES["hidden"])
    writer.add_block_count(2)
    writer.add_feed_forward_length(SIZES["feed_forward"])
    writer.add_head_count(SIZES["heads"])
    writer.add_head_count_kv(SIZES["kv_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    writer.add_key_length(8)
    if architecture == "gemma3":
        writer.add_sliding_window(16)
    writer.add_tokenizer_model(vocabulary["model"])
    writer.add_token_list(vocabulary["tokens"])
    writer.add_token_types(vocabulary["types"])
    if "merges" in vocabulary:
        writer.add_token_merges(vocabulary["merges"])
    if "scores" in vocabulary:
        writer.add_token_scores(vocabulary["scores"])
    if "pre" in vocabulary:
        writer.add_tokenizer_pre(vocabulary["pre"])
    for key, token in SPECIAL.items():
        writer.add_uint32(f"tokenizer.ggml.{key}", vocabulary["tokens"].index(token))
    for key, flag in flags.items():
        writer.add_bool(f"tokenizer.ggml.{key}", flag)
    writer.add_chat_template("{{ messages }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("architecture", "make", "pre", "flags"),
    [
        *[("llama", byte_level, pre, {}) for pre in ("", "default", "gpt-2", "qwen2", "gpt-4o")],
        *[("llama", byte_level, pre, {"add_bos_token": False}) for pre in ("llama-bpe", "tekken")],
        ("qwen3", byte_level, "qwen2", {"add_bos_token": True, "add_eos_token": True}),
        ("gemma3", gemma, "", {"add_bos_token": True, "add_space_prefix": False}),
    ],
    ids=lambda value: getattr(value, "__name__", None) or str(value),
)
def test_the_tokenizer_equals_that_of_transformers(
    tmp_path: Path,
    architecture: str,
    make: Callable[[], dict[str, Any]],
    pre: str,
    flags: dict[str, bool],
) -> None:
    path = tmp_path / "tiny.gguf"
    vocabulary = make()
    write(path, architecture, vocabulary | ({"pre": pre} if pre else {}), **flags)
    data, special, templates = gguf_tokenizer.convert(str(path), gguf_header.read(str(path)).values)
    ours = Tokenizer.from_str(data.decode())
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name, local_files_only=True)
    for text in TEXTS:
        encoding = ours.encode(text)
        assert encoding.ids == theirs(text)["input_ids"], text
        assert ours.decode(encoding.ids) == theirs.decode(encoding.ids, skip_special_tokens=True)
        plain = ours.encode(text, add_special_tokens=False).ids
        assert plain == theirs(text, add_special_tokens=False)["input_ids"]
    assert [special[name] for name in ("bos_token", "eos_token")] == ["<|begin|>", "<|end|>"]
    assert templates == {"default": "{{ messages }}"}
    assert ours.get_vocab_size() == len(vocabulary["tokens"]), "no token is added"


WORDS = ["aa", "##b", "a", "##a", "ab", "b", "ß", "e", "##e", "1", "##2", "中", "!", "'", "▁"]
PIECES = [("▁", -3.0), ("▁a", -1.0), ("a", -2.0), ("b", -2.5), ("ab", -1.5), ("1", -4.0)]


def encoders() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Return tokenizers of transformers, and what llama.cpp's converter writes of each."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    found: dict[str, tuple[Any, dict[str, Any]]] = {}
    for name, more in (("lower case", []), ("both cases", ["A", "##A"])):
        words = [*WORDS, *more]
        vocabulary = {token: index for index, token in enumerate([*special, *words])}
        theirs = BertTokenizer(vocab=vocabulary, do_lower_case=not more)
        tokens = [word[2:] if word.startswith("##") else "▁" + word for word in words]
        types, ids = [3] * 5 + [1] * len(words), {"bos": 2, "seperator": 3, "unknown": 1}
        found[name] = theirs, {"model": "bert", "tokens": [*special, *tokens], "types": types}
        found[name][1]["ids"] = ids | {"padding": 0, "mask": 4}
    pieces = [*((token, 0.0) for token in ("<s>", "<pad>", "</s>", "<unk>")), *PIECES]
    pieces.append(("<mask>", 0.0))
    values = {"model": "t5", "tokens": [token for token, _ in pieces]}
    values["scores"] = [score for _, score in pieces]
    values["types"] = [3, 3, 3, 2, *[1] * len(PIECES), 3]
    values["ids"] = {"bos": 0, "eos": 2, "unknown": 3, "seperator": 2, "padding": 1}
    found["unigrams"] = XLMRobertaTokenizer(vocab=pieces), values
    values = byte_level()
    values["tokens"] = ["<s>", "<pad>", "</s>", "<unk>", *values["tokens"], "<mask>"]
    values["types"] = [3, 3, 3, 3, *values["types"], 3]
    vocabulary = {token: index for index, token in enumerate(values["tokens"])}
    merges = [tuple(merge.split()) for merge in values["merges"]]
    values["ids"] = {"bos": 0, "eos": 2, "unknown": 3, "padding": 1}
    found["byte level"] = RobertaTokenizer(vocab=vocabulary, merges=merges), values
    return found


@pytest.mark.parametrize("name", ["lower case", "both cases", "unigrams", "byte level"])
@pytest.mark.parametrize("has_ids", [True, False])
def test_tokenizers_of_encoders_equal_those_of_transformers(name: str, has_ids: bool) -> None:
    """Texts and pairs; without the ids of the first and the last token these have their names."""
    theirs, values = encoders()[name]
    ids = values["ids"] if has_ids else {"unknown": values["ids"]["unknown"]}
    metadata: dict[str, Any] = {"general.architecture": "bert"}
    metadata |= {f"tokenizer.ggml.{key}_token_id": number for key, number in ids.items()}
    metadata |= {
        "tokenizer.ggml.model": values["model"],
        "tokenizer.ggml.tokens": values["tokens"],
        "tokenizer.ggml.token_type": values["types"],
        "tokenizer.ggml.scores": values.get("scores", []),
        "tokenizer.ggml.merges": values.get("merges", []),
    }
    data, _, _ = gguf_tokenizer.convert("some.gguf", metadata)
    ours = Tokenizer.from_str(data.decode())
    assert ours.get_vocab() == theirs.get_vocab()
    texts = TEXTS[:2] if name != "byte level" else ["aa 12's", " a  aa"]
    for text in (*texts, "aab AA  a1!", "", "ab [MASK] a <mask>", "▁ ▁a", "Éa É"):
        encoding, pair = ours.encode(text), ours.encode(text, "b a")
        expected = theirs(text, "b a", return_token_type_ids=True)
        assert encoding.ids == theirs(text)["input_ids"], text
        assert pair.ids == expected["input_ids"], text
        assert pair.type_ids == expected["token_type_ids"], text


def test_a_normaliser_of_unigrams_is_kept() -> None:
    """XLM-RoBERTa's is a table of replacements; a damaged one is refused."""
    _, values = encoders()["unigrams"]
    metadata: dict[str, Any] = {
        "general.architecture": "bert",
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": values["tokens"],
        "tokenizer.ggml.scores": values["scores"],
        "tokenizer.ggml.unknown_token_id": 3,
    }
    for charsmap, message in (
        ([0, 0], r"some\.gguf cannot be converted"),
        ("ab", r"precompiled_charsmap is no bytes"),
    ):
        with pytest.raises(ModelError, match=message):
            gguf_tokenizer.convert(
                "some.gguf", metadata | {"tokenizer.ggml.precompiled_charsmap": charsmap}
            )
    del metadata["tokenizer.ggml.unknown_token_id"]
    with pytest.raises(ModelError, match=r"no tokenizer\.ggml\.unknown_token_id"):
        gguf_tokenizer.convert("some.gguf", metadata)


def test_a_pooling_type_makes_a_decoder_pool(tmp_path: Path) -> None:
    """Qwen3-Embedding's file says that the last token counts; it could generate, too."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path, architecture="qwen2", extra={"qwen2.pooling_type": 3})
    pooler = gguf_file.read(str(path), lambda what: None).pooler
    assert pooler == Pooler(types=("last",), size=SIZES["hidden"], generates=True)
    write_gguf(path, architecture="qwen2", extra={"qwen2.attention.causal": False})
    with pytest.raises(ModelError, match=r"qwen2\.attention\.causal"):
        gguf_file.read(str(path), lambda what: None)


def tokenizer_of(vocabulary: dict[str, Any], architecture: str = "llama", **more: Any) -> Tokenizer:
    """Return the tokenizer of a file. more: values by the ends of their keys."""
    values = {"token_type": vocabulary["types"], **vocabulary, **more}
    del values["types"]
    for key, token in SPECIAL.items():
        values.setdefault(key, vocabulary["tokens"].index(token))
    metadata = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    metadata["general.architecture"] = architecture
    return Tokenizer.from_str(gguf_tokenizer.convert("some.gguf", metadata)[0].decode())


@pytest.mark.parametrize(
    ("pre", "begins"),
    [
        *[(pre, True) for pre in ("llama-bpe", "llama3", "pixtral", "lfm2", "tekken", "chameleon")],
        *[(pre, False) for pre in ("default", "gpt-2", "qwen2", "smollm", "dbrx", "deepseek-llm")],
    ],
)
def test_a_file_that_does_not_say_whether_texts_begin_with_a_token(pre: str, begins: bool) -> None:
    for flags, expected in (({}, begins), ({"add_bos_token": not begins}, not begins)):
        tokens = tokenizer_of(byte_level(), pre=pre, **flags).encode("a").tokens
        assert tokens == ["<|begin|>"] * expected + ["a"]


@pytest.mark.parametrize(("pre", "expected"), [("llama-bpe", ["aab"]), ("dbrx", ["aa", "b"])])
def test_a_piece_that_is_a_token_is_not_merged(pre: str, expected: list[str]) -> None:
    vocabulary = byte_level()
    vocabulary["tokens"].append("aab")
    vocabulary["types"].append(1)
    encoding = tokenizer_of(vocabulary, pre=pre).encode("aab", add_special_tokens=False)
    assert encoding.tokens == expected


def test_added_tokens_are_plain_text() -> None:
    """Unlike the other tokens of a byte-level vocabulary: DeepSeek's are no letters of bytes."""
    vocabulary = byte_level()
    added = {"<｜begin｜>": 3, "    ": 4, "ø": 4}
    vocabulary["tokens"] += added
    vocabulary["types"] += added.values()
    begin = vocabulary["tokens"].index("<｜begin｜>")
    tokenizer = tokenizer_of(vocabulary, pre="deepseek-v3", bos_token_id=begin, add_bos_token=True)
    assert tokenizer.encode("a    ø<｜begin｜>").tokens == [
        *("<｜begin｜>", "a", "    ", "ø", "<｜begin｜>")
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", "▁a"),
        (" a", "▁ ▁a"),
        ("a  a", "▁a ▁ ▁a"),
        ("  ", "▁▁ ▁"),
        ("<|begin|>a", "<|begin|> ▁a"),
        ("a<|end|> a", "▁a <|end|> ▁ ▁a"),
        ("a<think>b<unk>\n", "▁a <think> ▁b <unk> ▁ \n"),
    ],
)
def test_sentencepiece_encodes_each_text_between_special_tokens_by_itself(
    text: str, expected: str
) -> None:
    """With a space before it, even if it has one."""
    tokenizer = tokenizer_of(sentencepiece())
    encoding = tokenizer.encode(text)
    assert encoding.tokens == ["<|begin|>", *expected.split(" ")]
    assert tokenizer.encode(text, add_special_tokens=False).ids == encoding.ids[1:]


def test_a_file_of_sentencepiece_without_a_space_before_texts() -> None:
    values = {"tokenizer.ggml.add_space_prefix": False}
    values |= {f"tokenizer.ggml.{key}": value for key, value in sentencepiece().items()}
    values["general.architecture"] = "llama"
    data, _, _ = gguf_tokenizer.convert("some.gguf", values)
    tokenizer = Tokenizer.from_str(data.decode())
    assert tokenizer.encode("a<|end|> a").tokens == ["<|begin|>", "a", "<|end|>", "▁a"]
    assert tokenizer.decode(tokenizer.encode(" a").ids) == " a"


def test_special_tokens_of_phi_3_take_the_white_space_after_them() -> None:
    vocabulary = sentencepiece()
    encoding = tokenizer_of(vocabulary, "phi3").encode("a<|end|>\n a")
    tokens = [vocabulary["tokens"][token] for token in encoding.ids]
    assert tokens == ["<|begin|>", "▁a", "<|end|>", "▁a"]


def test_ids_that_a_file_of_sentencepiece_does_not_set() -> None:
    values = sentencepiece()
    metadata = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    metadata["general.architecture"] = "llama"
    data, special, _ = gguf_tokenizer.convert("some.gguf", metadata)
    assert special == {"bos_token": "<|begin|>", "eos_token": "<|end|>", "unk_token": "<unk>"}
    assert Tokenizer.from_str(data.decode()).encode("a").tokens == ["<|begin|>", "▁a"]


@pytest.mark.parametrize(
    ("word", "flags", "is_lower"),
    [
        ("▁ℝ", {}, True),
        ("▁Z", {}, False),
        ("▁ℝ", {"normalizer.lowercase": False}, False),
        ("▁Z", {"normalizer.lowercase": True}, True),
    ],
)
def test_whether_case_counts_in_a_wordpiece_vocabulary(
    word: str, flags: dict[str, bool], is_lower: bool
) -> None:
    """The sign of the real numbers is a capital letter without a small one."""
    tokens = ["<unk>", "<|begin|>", "<|end|>", "▁a", word]
    vocabulary = {"model": "bert", "tokens": tokens, "types": [3, 3, 3, 1, 1]}
    encoding = tokenizer_of(vocabulary, "bert", seperator_token_id=2, **flags).encode("A")
    assert encoding.tokens[1:-1] == ["a" if is_lower else "<unk>"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.pre": "invented"}, "tokenizer.ggml.pre invented is not known"),
        ({"tokenizer.ggml.pre": ["gpt-2"]}, "tokenizer.ggml.pre ['gpt-2'] is not known"),
        ({"tokenizer.ggml.add_bos_token": "no"}, "sets tokenizer.ggml.add_bos_token to no"),
        ({"tokenizer.ggml.merges": None}, "no tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["a"]}, "tokenizer.ggml.merges that is not two tokens: a"),
        ({"tokenizer.ggml.merges": ["a b"]}, "cannot be converted"),
        ({"tokenizer.ggml.tokens": None}, "no tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.tokens": [1]}, "no list of str in tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.tokens": "a"}, "no list of str in tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.model": "rwkv"}, "model rwkv: supported: gpt2, llama, gemma4, t5, bert"),
        (
            {"tokenizer.ggml.model": "bert", "general.architecture": "bert"},
            "no tokenizer.ggml.bos_token_id",
        ),
        ({"tokenizer.ggml.model": "llama"}, "no tokenizer.ggml.scores"),
        (
            {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.0]},
            "1 tokenizer.ggml.scores for 3 tokens",
        ),
        ({"tokenizer.ggml.eos_token_id": 3}, "eos_token_id to 3, and there are 3 tokens"),
        ({"tokenizer.ggml.eos_token_id": True}, "eos_token_id to True"),
    ],
)
def test_an_invalid_vocabulary_is_refused_by_file_and_key(
    change: dict[str, Any], message: str
) -> None:
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", "b", "c"],
        "tokenizer.ggml.merges": [],
    }
    metadata = {key: value for key, value in (metadata | change).items() if value is not None}
    if metadata["tokenizer.ggml.model"] == "llama":
        del metadata["tokenizer.ggml.merges"]
    with pytest.raises(ModelError) as caught:
        gguf_tokenizer.convert("some.gguf", metadata)
    assert "some.gguf" in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
@pytest.mark.parametrize("head_dim", [8, 16])
def test_the_configuration_equals_that_of_transformers(
    tmp_path: Path, architecture: str, head_dim: int
) -> None:
    extra: dict[str, Any] = {f"{architecture}.attention.key_length": head_dim}
    if architecture == "gemma3":
        extra["gemma3.attention.sliding_window"] = 16
    path = tmp_path / "tiny.gguf"
    write_gguf(path, architecture=architecture, layers=12, head_dim=head_dim, extra=extra)
    ours = gguf_file.read(str(path), lambda what: None).config
    theirs = AutoConfig.from_pretrained(tmp_path, gguf_file=path.name, local_files_only=True)
    added = {"architectures": ours["architectures"], "head_dim": head_dim}
    if architecture == "gemma3":
        added["query_pre_attn_scalar"] = head_dim
    assert spec_from_config(ours) == spec_from_config(theirs.to_dict() | added)


@pytest.mark.parametrize(
    ("architecture", "keys"),
    [
        ("llama", {}),
        ("olmoe", {}),
        ("granitemoe", {"residual_scale": 0.5, "logit_scale": 2.0}),
        (
            "glm4moe",
            {
                "expert_feed_forward_length": 24,
                "expert_shared_count": 2,
                "expert_gating_func": 2,
                "leading_dense_block_count": 0,
                "nextn_predict_layers": 1,
                "attention.key_length": 8,
            },
        ),
        (
            "gpt-oss",
            {
                "expert_feed_forward_length": 24,
                "expert_gating_func": 3,
                "attention.sliding_window": 16,
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 16,
            },
        ),
        ("qwen2moe", {"expert_feed_forward_length": 16, "expert_shared_feed_forward_length": 24}),
        ("qwen3moe", {"expert_feed_forward_length": 16, "expert_gating_func": 1}),
    ],
)
def test_the_configuration_of_a_mixture(
    tmp_path: Path, architecture: str, keys: dict[str, Any]
) -> None:
    keys = {"expert_count": 8, "expert_used_count": 3} | keys
    extra = {f"{architecture}.{key}": value for key, value in keys.items()}
    path = tmp_path / "tiny.gguf"
    is_glm = architecture == "glm4moe"  # has a layer more, and rotates half of each head
    sizes = {"layers": 1 + is_glm, "head_dim": 4 if is_glm else 8}
    write_gguf(path, architecture=architecture, extra=extra, **sizes)
    spec = spec_from_config(gguf_file.read(str(path), lambda what: None).config)
    mixture, attention = spec.layers[0].mlp, spec.attention_layers[0]
    assert isinstance(mixture, MoeSpec)
    assert (spec.num_layers, spec.num_unused_layers) == (1, is_glm)
    assert (attention.head_dim, attention.rotary_dim) == (8, sizes["head_dim"])
    assert (mixture.router.num_experts, mixture.router.top_k) == (8, 3)
    if architecture == "gpt-oss":
        assert spec.windows == (16,)
        assert attention.rope == YarnRope(
            10_000.0, 4.0, 16, 32.0, 1.0, False, pytest.approx(1.1386, abs=1e-4)
        )
    assert mixture.router.normalised == (architecture not in ("qwen2moe", "olmoe"))
    assert mixture.intermediate_size == keys.get("expert_feed_forward_length", 48)
    assert mixture.shared_size == (
        48 if is_glm else keys.get("expert_shared_feed_forward_length", 0)
    )
    extra[f"{architecture}.expert_gating_func"] = 1 if is_glm else 2
    write_gguf(path, architecture=architecture, extra=extra, **sizes)
    with pytest.raises(ModelError, match=rf"sets {architecture}\.expert_gating_func"):
        gguf_file.read(str(path), lambda what: None)


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("deepseek-v3", ["ab", "'c", " ", "123", "45", " ", "中ひ", "ß", " !=", "x", "\n\n", "_z"]),
        (
            "deepseek-llm",
            ["ab", "'", "c", " ", *"12345", " ", "中ひ", "ß", " !=", "x", "\n", "\n", "_", "z"],
        ),
        (
            "deepseek-coder",
            ["ab", "'", "c", " ", *"12345", " ", "中ひ", "ß", " !", "=", "x", "\n", "\n", "_", "z"],
        ),
        ("kimi-k2", ["ab", "'c", " ", "123", "45", " ", "中", "ひß", " !=", "x", "\n\n", "_z"]),
    ],
)
def test_pieces_of_deepseek_and_kimi(pre: str, expected: list[str]) -> None:
    """As the tokenizers of the published folders cut them, which transformers does not convert."""
    assert pieces_of("ab'c 12345 中ひß !=x\n\n_z", pre) == expected


def pieces_of(text: str, pre: str) -> list[str]:
    cutter = tokenizer_of(byte_level(), pre=pre).pre_tokenizer
    return [text[slice(*span)] for _, span in cutter.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("default exaone4 olmo", "I|'|M| re|\u0301| | 1234567|;|\n|\n|/|a"),
        (
            "smollm starcoder refact command-r chameleon",
            "I|'|M| re|\u0301|  |1|2|3|4|5|6|7|;|\n|\n|/|a",
        ),
        ("falcon", "I|'|M| re|\u0301| | |123|456|7|;|\n\n|/|a"),
        ("llama-bpe dbrx glm4", "I|'M| re|\u0301| | |123|456|7|;\n\n|/a"),
        (
            "qwen2 stablelm2 hunyuan ufakzeka bailingmoe",
            "I|'M| re|\u0301| | |1|2|3|4|5|6|7|;\n\n|/a",
        ),
        ("laguna seed-coder", "I|'M| re|\u0301| | |1|2|3|4|5|6|7|;|\n\n|/a"),
        ("qwen35", "I|'M| re\u0301| | |1|2|3|4|5|6|7|;\n\n|/a"),
        ("exaone-moe", "I|'M| re\u0301| | |1|2|3|4|5|6|7|;\n|\n|/a"),
        ("tekken", "I|'M| re\u0301| | |1|2|3|4|5|6|7|;\n\n/|a"),
        ("gpt-4o minimax-m2", "I'M| re\u0301| | |123|456|7|;\n\n/|a"),
        ("tiny_aya", "I'M| re\u0301|  |1|234|567|;\n\n/|a"),
        ("youtu", "I'M| re\u0301| | |1|2|3|4|5|6|7|;\n\n/|a"),
        ("hunyuan-dense", "I|'M| re\u0301|  |123|456|7|;\n\n|/a"),
        ("spark2_5", "I|'M| re\u0301|  |1|2|3|4|5|6|7|;|\n|\n|/a"),
        ("afmoe", "I|'M| re\u0301|  |1|234|567|;\n\n|/a"),
        ("bloom", "I'M| re\u0301| | 1234567;|\n\n|/a"),
        ("viking", "I'M| re\u0301| | |1|2|3|4|5|6|7|;|\n\n|/a"),
        ("superbpe", "I'M re\u0301  |1|234|567|;\n\n/a"),
    ],
)
def test_pieces(names: str, expected: str) -> None:
    """With `|` between them."""
    for pre in names.split():
        assert "|".join(pieces_of("I'M re\u0301  1234567;\n\n/a", pre)) == expected


@pytest.mark.parametrize("is_newer", [False, True])
@pytest.mark.parametrize("gating", [None, 1, 2])
def test_the_configuration_of_latent_attention(
    tmp_path: Path, gating: int | None, is_newer: bool
) -> None:
    """Newer files count latents as keys and values, and name the lengths of heads apart."""
    keys: dict[str, Any] = {
        "attention.q_lora_rank": 24,
        "attention.kv_lora_rank": 16,
        "attention.key_length": 24 if is_newer else 20,
        "attention.value_length": 16 if is_newer else 12,
        "expert_count": 8,
        "expert_used_count": 3,
        "expert_feed_forward_length": 16,
        "expert_shared_count": 2,
        "expert_weights_scale": 2.5,
        "expert_group_count": 4,
        "expert_group_used_count": 2,
        "leading_dense_block_count": 1,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 40.0,
        "rope.scaling.original_context_length": 32,
        "rope.scaling.yarn_log_multiplier": 0.0707,
    }
    if is_newer:
        keys |= {"attention.key_length_mla": 20, "attention.value_length_mla": 12}
    if gating is not None:
        keys["expert_gating_func"] = gating
    path = tmp_path / "tiny.gguf"
    extra = {f"deepseek2.{key}": value for key, value in keys.items()}
    write_gguf(path, architecture="deepseek2", layers=2, extra=extra)
    spec = spec_from_config(gguf_file.read(str(path), lambda what: None).config)
    attention, mixture = spec.attention_layers[1], spec.layers[1].mlp
    assert isinstance(attention, LatentAttentionSpec)
    assert isinstance(mixture, MoeSpec)
    assert not isinstance(spec.layers[0].mlp, MoeSpec)
    assert (attention.q_lora_rank, attention.kv_lora_rank, attention.v_head_dim) == (24, 16, 12)
    assert (attention.qk_nope_head_dim, attention.qk_rope_head_dim) == (12, 8)
    magnitude = 0.0707 * math.log(40.0) + 1.0
    assert attention.scale == pytest.approx(magnitude**2 / 20**0.5)
    assert isinstance(attention.rope, YarnRope)
    assert attention.rope.attention_factor == pytest.approx(1.0)
    router = mixture.router
    assert (router.scoring == "sigmoid") == router.selection_bias == (gating == 2)
    assert router.best_of_group == (2 if gating == 2 else 1)
    assert (router.num_groups, router.top_groups, router.scale) == (4, 2, 2.5)
    assert mixture.shared_size == 32


@pytest.mark.parametrize("key", ["block_count", "context_length", "attention.head_count"])
def test_a_missing_size_is_refused_by_its_key(key: str) -> None:
    sizes = dict.fromkeys(gguf_config._REQUIRED_KEYS, 8)
    del sizes[key]
    values = {f"llama.{name}": value for name, value in sizes.items()}
    header = gguf_header.GgufHeader({"general.architecture": "llama", **values}, ())
    with pytest.raises(ModelError, match=rf"some\.gguf has no llama\.{key}"):
        gguf_config.convert("some.gguf", header)
