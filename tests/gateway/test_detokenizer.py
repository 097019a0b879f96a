"""Incremental detokenizing against one decode of all ids by the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from gateway.detokenizer import Detokenizer, WindowedDetokenizer, byte_of_char
from gateway.tokenizer import ModelTokenizer
from tests.support.gateways import VOCAB_SIZE

SLOW_OK = settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def feed(detokenizer: Detokenizer, ids: Sequence[int]) -> list[str]:
    """The deltas, the flush last."""
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> ModelTokenizer:
    """The byte-level tokenizer, with ids that no token has."""
    return ModelTokenizer.load(tiny_folder)


@SLOW_OK
@given(ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40))
def test_random_ids(tiny: ModelTokenizer, ids: list[int]) -> None:
    """Any ids, unused and special ones among them, give the text of the full decode."""
    assert "".join(feed(tiny.detokenizer(), ids)) == tiny.decode(ids)


@pytest.fixture(scope="session")
def byte_ids(tiny: ModelTokenizer) -> list[int]:
    """The id of the token that stands for each byte alone."""
    id_of = {tiny.token(i): i for i in range(VOCAB_SIZE)}
    return [id_of[char] for _, char in sorted((b, c) for c, b in byte_of_char().items())]


@SLOW_OK
@given(data=st.binary(max_size=24))
def test_random_bytes(tiny: ModelTokenizer, byte_ids: list[int], data: bytes) -> None:
    """Broken UTF-8 gives U+FFFD exactly where the full decode has it."""
    ids = [byte_ids[byte] for byte in data]
    text = "".join(feed(tiny.detokenizer(), ids))
    assert text == tiny.decode(ids) == data.decode(errors="replace")


def test_a_character_comes_whole(tiny: ModelTokenizer) -> None:
    """While bytes of a character are missing, nothing of it is shown."""
    ids = tiny.encode("\u2603")  # a snowman, which the vocabulary does not know
    assert len(ids) == 3
    assert feed(tiny.detokenizer(), ids) == ["", "", "\u2603", ""]
    assert feed(tiny.detokenizer(), ids[:2]) == ["", "", "\ufffd"]


def test_added_tokens_read_as_they_are_spelled(tmp_path: Path) -> None:
    """An added token with characters outside the byte table is literal; a special one is silent."""
    raw = Tokenizer(models.BPE())
    raw.decoder = decoders.ByteLevel()
    raw.add_tokens([AddedToken("two words"), AddedToken("\u2603"), AddedToken("caf\u00e9")])
    raw.add_special_tokens([AddedToken("<end>")])
    tokenizer = ModelTokenizer(
        raw,
        byte_level=True,
        template=None,
        vocab_size=8,
        max_model_len=8,
        sizes=None,
    )
    ids = [0, 1, 3, 2, 0]
    assert "".join(feed(tokenizer.detokenizer(), ids)) == raw.decode(ids)
    assert tokenizer.decode([3], keep_special=True) == "<end>"


SPECIAL = frozenset(["<unk>", "<s>", "</s>"])


def byte_fallback_tokenizer() -> Tokenizer:
    """Llama-like: words with a leading mark, byte tokens, a decoder that strips one space."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", "\u2581Hello", "\u2581world", "ing", "!", "\u2581\u2581", "\u00e9", "\n"]
    raw = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True)
    )
    raw.normalizer = normalizers.Replace(" ", "\u2581")
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    raw.add_special_tokens([AddedToken(piece) for piece in pieces[:3]])
    return raw


def metaspace_tokenizer() -> Tokenizer:
    """As sentencepiece models are converted today."""
    raw = byte_fallback_tokenizer()
    raw.decoder = decoders.Metaspace()
    return raw


@pytest.mark.parametrize("make", [byte_fallback_tokenizer, metaspace_tokenizer])
@SLOW_OK
@given(data=st.data())
def test_windowed_random_ids(make: object, data: st.DataObject) -> None:
    """Other kinds of tokenizers too: the deltas are the full decode, also past the window."""
    raw = make()
    words = st.integers(259, 265)
    ids = data.draw(st.lists(st.one_of(st.integers(0, 265), words, words), max_size=120))
    detokenizer = WindowedDetokenizer(raw.decode, raw.id_to_token, SPECIAL)
    assert "".join(feed(detokenizer, ids)) == raw.decode(ids)


BLANKS = ["\u2581", "\u2581\u2581", "\n", "<s>", "<0x20>", "<0x0A>"]


@pytest.mark.parametrize("make", [byte_fallback_tokenizer, metaspace_tokenizer])
@SLOW_OK
@given(data=st.data())
def test_windowed_long_blanks(make: object, data: st.DataObject) -> None:
    """Words far apart: nothing of the blanks between them is lost or doubled by a cut in them."""
    raw = make()
    runs = st.tuples(st.sampled_from(BLANKS), st.integers(1, 90))
    words = st.tuples(st.sampled_from(["\u2581Hello", "ing", "<0xC3>", "<0xA9>"]), st.just(1))
    parts = data.draw(st.lists(st.one_of(runs, runs, words), max_size=8))
    ids = [raw.token_to_id(piece) for piece, count in parts for _ in range(count)]
    detokenizer = WindowedDetokenizer(raw.decode, raw.id_to_token, SPECIAL)
    assert "".join(feed(detokenizer, ids)) == raw.decode(ids)


@pytest.mark.parametrize("make", [byte_fallback_tokenizer, metaspace_tokenizer])
@pytest.mark.parametrize(
    ("piece", "in_the_end"),
    [("\n", ""), ("\u2581", ""), ("</s>", ""), ("ing", ""), ("<0x0A>", "!")],
)
def test_windowed_work_is_in_proportion(make: object, piece: str, in_the_end: str) -> None:
    """2,000 times the same token, be it blank, silent or a byte: a short window's decode each."""
    raw, num_tokens = make(), 2000
    num_calls = num_decoded = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal num_calls, num_decoded
        num_calls += 1
        num_decoded += len(ids)
        return raw.decode(ids)

    ids = [raw.token_to_id(piece)] * num_tokens
    ids += [raw.token_to_id(in_the_end)] * bool(in_the_end)
    detokenizer = WindowedDetokenizer(decode, raw.id_to_token, SPECIAL)
    assert "".join(feed(detokenizer, ids)) == raw.decode(ids)
    assert num_calls <= 3 * num_tokens
    assert num_decoded <= num_tokens * (WindowedDetokenizer.LONG + 2)


def test_windowed_gives_text_as_it_comes() -> None:
    """Ordinary words are not held until the end, and the window stays short."""
    raw = byte_fallback_tokenizer()
    detokenizer = WindowedDetokenizer(raw.decode, raw.id_to_token, SPECIAL)
    deltas = [detokenizer.push(raw.token_to_id("\u2581world")) for _ in range(500)]
    assert deltas == ["world", *[" world"] * 499]
    assert len(detokenizer._window) <= WindowedDetokenizer.LONG
