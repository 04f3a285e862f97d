"""Chunks: exact ranges, token limits, no text lost, borders that come back behind an edit."""

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ingest.chunking import PARAGRAPH, Chunker, cut, split
from schemas.errors import EventError
from schemas.events import ChangeEvent, ContentType


class Words:
    """A tokenizer with one token per word and one per other visible character; spaces are free."""

    def encode(self, text):
        return [sum(map(ord, word)) for word in re.findall(r"\w+|[^\w\s]", text)]


class Characters:
    """The worst case: every character is a token of its own."""

    def encode(self, text):
        return [ord(character) for character in text]


def texts(content, max_tokens=16, content_type=ContentType.TEXT, tokenizer=None):
    return [content[start:end] for start, end, _ in cut(content, content_type, tokenizer or Words(), max_tokens)]


SENTENCES = [
    f"Sentence number {n} says that item {n * 7919 % 1000} costs {n * 104729 % 1000} coins." for n in range(400)
]

awkward = st.text(st.sampled_from("ab .!?\n\t#`-é漢。🙂\u2003\r"), min_size=1, max_size=300)


@settings(deadline=None, max_examples=300)
@given(content=awkward, content_type=st.sampled_from(ContentType), max_tokens=st.integers(16, 40))
@example(content="\n" * 500 + "x" + " " * 500, content_type=ContentType.TEXT, max_tokens=16)
@example(content="x" * 2000, content_type=ContentType.MARKDOWN, max_tokens=16)
@pytest.mark.parametrize("tokenizer", [Words(), Characters()], ids=["words", "characters"])
def test_chunks_keep_all_text_within_the_limit(tokenizer, content, content_type, max_tokens):
    """A cutter that loses the text between two chunks, or makes empty ones, is noticed only by wrong answers."""
    position = 0
    for start, end, token_ids in cut(content, content_type, tokenizer, max_tokens):
        assert content[position:start].strip() == "", "only white space is left out"
        assert content[start:end].strip() == content[start:end] != ""
        assert list(token_ids) == tokenizer.encode(content[start:end])
        assert 0 < len(token_ids) <= max_tokens
        position = end
    assert content[position:].strip() == ""


def test_the_same_text_gives_the_same_chunks():
    content = " ".join(SENTENCES)
    assert texts(content, 64) == texts(content, 64)


def test_chunks_end_at_sentence_borders():
    for chunk in texts(" ".join(SENTENCES), 64):
        assert chunk.startswith("Sentence")
        assert chunk.endswith(".")


def test_a_heading_opens_a_chunk_and_stays_with_its_text():
    """A heading at the end of a chunk names the wrong passage, and the right one has no name."""
    sections = [f"## Part {n}\n\n" + " ".join(SENTENCES[4 * n : 4 * n + 4]) for n in range(20)]
    chunks = texts("\n\n".join(sections), 70, ContentType.MARKDOWN)
    assert len(chunks) == 20
    assert all(chunk.startswith("## Part") for chunk in chunks)


def test_in_plain_text_a_hash_is_no_heading():
    content = (
        "one two three four five\n# six seven eight nine ten\neleven twelve thirteen fourteen fifteen sixteen seventeen"
    )
    assert not any(chunk.startswith("#") for chunk in texts(content, 16))


def test_a_comment_in_a_code_block_is_no_heading():
    content = "# Heading\n\ntext\n\n```sh\n# comment\n\nmake\n```\n\n~~~\n```\n# comment\n~~~\n# Heading\n"
    strong = [content[p.start : p.end] for p in split(content, ContentType.MARKDOWN) if p.rank > PARAGRAPH]
    assert strong == ["# Heading\n", "# Heading\n"]


def test_an_edit_changes_only_the_chunks_around_it():
    """Filling every chunk to the brim moves all borders behind an edit: all of the document's KV is made anew."""
    before = texts(" ".join(SENTENCES), 64)
    after = texts(" ".join([*SENTENCES[:10], "A new sentence that nobody had expected here.", *SENTENCES[10:]]), 64)
    assert len(before) > 80
    assert len(set(after) - set(before)) <= 5


def test_a_word_longer_than_a_chunk_is_cut_anywhere():
    chunks = texts("a" * 100, 16, tokenizer=Characters())
    assert "".join(chunks) == "a" * 100


def test_chunk_objects_carry_exact_ranges_and_ids():
    event = ChangeEvent(tenant="t", doc_id="d", version=3, event_ms=0, content="  " + " ".join(SENTENCES))
    chunks = Chunker(Words(), 64).chunks(event)
    for ordinal, chunk in enumerate(chunks):
        assert (chunk.document, chunk.version, chunk.ordinal) == (event.document, 3, ordinal)
        assert chunk.text == event.content[chunk.char_start : chunk.char_end]
        assert list(chunk.token_ids) == Words().encode(chunk.text)


def test_a_deletion_has_no_chunks():
    assert Chunker(Words(), 64).chunks(ChangeEvent(tenant="t", doc_id="d", version=3, event_ms=0, content=None)) == []


def test_a_text_without_tokens_is_refused():
    """A tokenizer that normalises control characters away would leave a live document without any chunk."""

    class Deaf:
        def encode(self, text):
            return []

    event = ChangeEvent(tenant="t", doc_id="d", version=3, event_ms=0, content="\x01\x02")
    with pytest.raises(EventError, match="no text that the model's tokenizer knows"):
        Chunker(Deaf(), 64).chunks(event)
