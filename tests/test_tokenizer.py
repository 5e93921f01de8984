"""Tokens against transformers and SentencePiece, on text of many kinds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import transformers
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

import gguf_factory
import model_factory
from fastserve.errors import ModelError
from fastserve.models.resolve import ModelSource, resolve
from fastserve.sampling_params import ParameterError
from fastserve.text.tokenizer import Tokenizer

TEXTS = [
    "",
    " ",
    "Hello world",
    "  two leading, two trailing  ",
    "tabs\tand\nnewlines\r\n\n\n   indented",
    "I'm you'll we'd SHE'S they've 'quoted'",
    "12345 67 8.90 1,000,000 ٣٤٥ ⅷ ½ 二〇二四",
    "Größe, naïve café, El Niño, Ångström, smørrebrød",
    "Привет, мир! Как дела?",
    "你好，世界。今天天气怎么样？",
    "これはテストです。日本語のトークン化。",
    "안녕하세요 세계",
    "مرحبا بالعالم שלום עולם",
    "नमस्ते दुनिया สวัสดีชาวโลก",
    "👩‍👩‍👧‍👦 family, 👨🏽‍🚀 astronaut, 🏳️‍🌈 flag",
    "e\u0301 composed and de\u0301compose\u0301, a\u0308\u0323",
    "def f(x):\n    return {k: v**2 for k, v in x.items()}  # comment\n",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "zero\u200bwidth, nbsp\u00a0here, ideographic\u3000space, \u2028line",
    "\x00\x01\x7f\ufffd\U0010ffff",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" * 3,
    "The quick brown fox doesn't jump.\n" * 100,  # Long enough to be encoded another way.
]
# What transformers does not know of a GGUF file: SmolLM2 takes numerals one by one, Qwen2 composes.
NUMERALS, DECOMPOSED = TEXTS[6], TEXTS[15]


@pytest.fixture(scope="session")
def smollm2() -> Tokenizer:
    return Tokenizer.from_source(resolve("smollm2"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return model_factory.make("llama", tmp_path_factory.mktemp("models"))


def check_bytes(tokenizer: Tokenizer, text: str, *, leading_space: bool = False) -> None:
    """The table's bytes, put together, are the text."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    joined = b"".join(tokenizer.token_bytes(token) for token in ids)
    assert joined == (b" " if leading_space and text else b"") + text.encode()
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_equals_transformers(text, smollm2):
    check_bytes(smollm2, text)
    if text == NUMERALS:
        return
    theirs = model_factory.reference_tokenizer(resolve("smollm2").path)
    assert smollm2.encode(text) == theirs.encode(text)


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_equals_its_own_definition(text, smollm2):
    """The hub's tokenizer.json of this model: single digits, then GPT-2's words, then BPE."""
    metadata = resolve("smollm2").gguf.metadata
    vocab = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.add_special_tokens([token for token in vocab if token.startswith("<|")])
    assert smollm2.encode(text) == backend.encode(text).ids


def test_smollm2_facts(smollm2):
    assert smollm2.vocab_size == 49152
    assert (smollm2.bos_token_id, smollm2.eos_token_id) == (1, 2)
    assert smollm2.special_ids == set(range(17))
    assert not smollm2.strips_leading_space
    assert smollm2.has_chat_template
    assert smollm2.token_bytes(2) == b"<|im_end|>"
    assert smollm2.token_bytes(49152) == smollm2.token_bytes(-1) == b""
    assert smollm2.decode([1, 9690, 2]) == smollm2.decode([9690])
    assert len(smollm2.token_bytes_table()) == len(smollm2.table) == 49152
    assert smollm2.table.is_special(2)
    assert not smollm2.table.is_special(9690)


@pytest.mark.parametrize("text", TEXTS)
def test_a_folders_tokenizer_equals_transformers(text, folder):
    tokenizer = Tokenizer.from_source(resolve(folder))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.encode(text)
    assert ids == theirs.encode(text)
    assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    check_bytes(tokenizer, text)


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "tekken"])
def test_words_of_a_gguf_file_equal_transformers(pre, folder, tmp_path):
    keys = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": False}
    path = gguf_factory.convert(folder, tmp_path / "model.gguf", metadata=keys)
    tokenizer = Tokenizer.from_source(resolve(path))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    for text in TEXTS:
        if pre == "qwen2" and text == DECOMPOSED:
            continue
        assert tokenizer.encode(text) == theirs.encode(text), text
        check_bytes(tokenizer, text)


def test_qwen2_composes_characters_as_its_own_tokenizer_does(folder, tmp_path):
    path = gguf_factory.convert(
        folder, tmp_path / "model.gguf", metadata={"tokenizer.ggml.pre": "qwen2"}
    )
    tokenizer = Tokenizer.from_source(resolve(path))
    composed = normalizers.NFC().normalize_str(DECOMPOSED)
    assert composed != DECOMPOSED
    assert tokenizer.encode(DECOMPOSED) == tokenizer.encode(composed)


@pytest.mark.parametrize(
    ("keys", "want"),
    [
        ({"tokenizer.ggml.add_bos_token": True}, [0]),
        ({"tokenizer.ggml.add_bos_token": False}, []),
        ({"tokenizer.ggml.add_bos_token": None}, []),
        ({"tokenizer.ggml.add_bos_token": None, "tokenizer.ggml.pre": "llama-bpe"}, [0]),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}, [0, 2]),
    ],
)
def test_ends_are_added_where_the_file_says_so(keys, want, folder, tmp_path):
    path = gguf_factory.convert(folder, tmp_path / "model.gguf", metadata=keys)
    tokenizer = Tokenizer.from_source(resolve(path))
    plain = tokenizer.encode("the fox", add_special_tokens=False)
    assert tokenizer.encode("the fox") == want[:1] + plain + want[1:]


CORPUS = [text for text in TEXTS if text.strip() and "\x00" not in text] * 2 + [
    "the quick brown fox jumps over the lazy dog",
    "a sentence with several words and some more words in it",
]


@pytest.fixture(scope="session")
def sentence_piece(tmp_path_factory) -> sentencepiece.SentencePieceProcessor:
    """Trained the way Llama 2's and Mistral's were: BPE, bytes as fallback, spaces kept."""
    prefix = tmp_path_factory.mktemp("spm") / "model"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_prefix=str(prefix),
        vocab_size=640,
        model_type="bpe",
        byte_fallback=True,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        character_coverage=0.98,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")


@pytest.fixture(scope="session")
def spm_source(sentence_piece, folder, tmp_path_factory) -> ModelSource:
    sp = sentence_piece
    pieces = range(sp.get_piece_size())
    kinds = [
        2 if sp.is_unknown(piece) else 3 if sp.is_control(piece) else 6 if sp.is_byte(piece) else 1
        for piece in pieces
    ]
    keys = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [sp.id_to_piece(piece) for piece in pieces],
        "tokenizer.ggml.scores": [float(sp.get_score(piece)) for piece in pieces],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.bos_token_id": sp.bos_id(),
        "tokenizer.ggml.eos_token_id": sp.eos_id(),
        "tokenizer.ggml.unknown_token_id": sp.unk_id(),
        "tokenizer.ggml.add_bos_token": None,
    }
    path = tmp_path_factory.mktemp("spm-gguf") / "model.gguf"
    return resolve(gguf_factory.convert(folder, path, metadata=keys))


@pytest.mark.parametrize("text", TEXTS)
def test_a_sentence_piece_vocabulary_equals_sentence_piece(text, sentence_piece, spm_source):
    tokenizer = Tokenizer.from_source(spm_source)
    if "<|" in text or "\x00" in text:
        pytest.skip("control characters and special tokens are treated differently on purpose")
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == sentence_piece.encode(text)
    assert tokenizer.encode(text) == [sentence_piece.bos_id(), *ids]
    assert tokenizer.decode(ids) == text
    check_bytes(tokenizer, text, leading_space=True)
    assert tokenizer.strips_leading_space


def test_bytes_of_sentence_piece_tokens(spm_source, sentence_piece):
    tokenizer = Tokenizer.from_source(spm_source)
    for byte in range(256):
        assert tokenizer.token_bytes(sentence_piece.piece_to_id(f"<0x{byte:02X}>")) == bytes([byte])
    emoji = tokenizer.encode("\U0001f9ff", add_special_tokens=False)
    assert [tokenizer.token_bytes(token) for token in emoji[-4:]] == [
        bytes([byte]) for byte in "\U0001f9ff".encode()
    ]


def test_truncation_and_padding_of_the_file_are_off(folder, tmp_path):
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=50)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_source(resolve(tmp_path))
    ids = tokenizer.encode("the quick brown fox jumps over the lazy dog")
    assert tokenizer.decode(ids) == "the quick brown fox jumps over the lazy dog"


@pytest.mark.parametrize(
    ("decoder", "kept", "strips"),
    [
        (decoders.Metaspace(prepend_scheme="first"), b" fox", True),
        (decoders.Metaspace(prepend_scheme="never"), b" fox", False),
        (decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()]), b" fox", False),
        (decoders.ByteLevel(), "▁fox".encode(), False),
    ],
)
def test_the_decoder_says_what_bytes_tokens_are(decoder, kept, strips):
    backend = Backend(models.BPE(vocab={"▁fox": 0}, merges=[]))
    backend.decoder = decoder
    tokenizer = Tokenizer(backend, "here")
    assert tokenizer.token_bytes(0) == kept
    assert tokenizer.strips_leading_space == strips


def error_of(source: ModelSource) -> str:
    with pytest.raises(ModelError) as caught:
        Tokenizer.from_source(source)
    return str(caught.value)


def test_a_folder_without_tokenizer_json_says_how_to_make_one(folder, tmp_path):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert error_of(resolve(tmp_path)) == (
        f"{tmp_path}: no tokenizer.json; make one with transformers: "
        "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
    )
    (tmp_path / "tokenizer.json").write_text("{}")
    assert error_of(resolve(tmp_path)).startswith(f"{tmp_path}/tokenizer.json: cannot be used: ")


@pytest.mark.parametrize(
    ("keys", "want"),
    [
        (
            {"tokenizer.ggml.model": "bert"},
            "tokenizer.ggml.model='bert' is not supported; the supported ones are gpt2 and llama",
        ),
        (
            {"tokenizer.ggml.pre": "chatglm"},
            "tokenizer.ggml.pre='chatglm' is not supported; the supported ones are "
            "deepseek-r1-qwen, default, gpt-2, llama-bpe, llama-v3, llama3, qwen2, smollm, tekken",
        ),
        (
            {"tokenizer.ggml.bos_token_id": 5000},
            "tokenizer.ggml.bos_token_id=5000: want less than the 320 tokens",
        ),
        (
            {"tokenizer.ggml.tokens": None},
            "metadata has no tokenizer.ggml.tokens; the file cannot be used without",
        ),
        (
            {"tokenizer.ggml.merges": ["a bc", "x"]},
            "the tokenizer is corrupt: ",
        ),
        (
            {"tokenizer.ggml.model": "llama", "tokenizer.ggml.merges": None},
            "metadata has no tokenizer.ggml.scores for its tokens",
        ),
    ],
)
def test_what_a_gguf_file_lacks_is_named(keys, want, folder, tmp_path):
    path = gguf_factory.convert(folder, tmp_path / "model.gguf", metadata=keys)
    assert error_of(resolve(path)).startswith(f"{path}: {want}")


def test_every_token_id_has_bytes(smollm2):
    """Nothing but padding is empty, and single bytes are all there."""
    table = smollm2.token_bytes_table()
    assert all(table)
    assert {token for token in table if len(token) == 1} >= {bytes([b]) for b in range(0x20, 0x7F)}
    ids = np.random.default_rng(0).integers(17, 49152, 500).tolist()
    whole = b"".join(table[token] for token in ids).decode(errors="replace")
    assert smollm2.decode(ids) == whole


@pytest.mark.parametrize("before", ["ab", "ab" * 2000])
@pytest.mark.parametrize("halves", ["\ud800", "\udfffc", "\udfff\ud800"])
def test_half_a_surrogate_pair_is_named(before, halves, smollm2):
    with pytest.raises(ParameterError) as refusal:
        smollm2.encode(before + halves)
    assert str(refusal.value) == (
        f"prompt has {halves[0]!a} at character {len(before)}: want both halves of a surrogate pair"
    )
    with pytest.raises(TypeError):
        smollm2.encode(5)
