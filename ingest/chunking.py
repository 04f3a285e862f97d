"""Text to chunks: pure functions, the same chunks for the same text everywhere.

A document is taken apart into pieces (sentences, list items, lines of code) and put together again into chunks of
at most `max_tokens` tokens of the LLM. Where a chunk ends is decided by the text around the border and not by how
much came before: among the borders in the second half of the room the strongest wins (heading over paragraph over
line over sentence over word), and between equals a checksum of the text behind the border. So borders find their
old places again a chunk or two behind an edit, and a long document keeps most of its KV when a paragraph is put
in at its top; filling every chunk to the brim would move all borders behind it.

Chunks do not overlap. White space between two chunks belongs to neither; nothing else is left out.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from schemas.chunk import Chunk
from schemas.errors import EventError
from schemas.events import ChangeEvent, ContentType

# How good a border in front of a piece is. Headings rank 9 (level 1) down to 4 (level 6).
HEADING, PARAGRAPH, LINE, SENTENCE, WORD, CHARACTER = 10, 3, 2, 1, 0, -1

_SENTENCE_END = re.compile(r"(?<=[.!?…])[\"'\u201d\u2019)\]]*\s+|(?<=[\u3002\uff01\uff1f])")
_HEADING = re.compile(r" {0,3}(#{1,6})(?:\s|$)")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_ITEM = re.compile(r"\s*(?:[-*+•|>]|\d{1,3}[.)])\s")
_TERMINAL = tuple('.!?…:;"\u201d)\u3002\uff01\uff1f')


class Encoder(Protocol):
    """The LLM's tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Token ids without special tokens."""
        ...


@dataclass(frozen=True)
class Piece:
    """`content[start:end]`; `rank` says how good a border there is in front of it."""

    start: int
    end: int
    rank: int


@dataclass(frozen=True)
class Chunker:
    """Cuts change events with one tokenizer and one limit."""

    tokenizer: Encoder
    max_tokens: int

    def chunks(self, event: ChangeEvent) -> list[Chunk]:
        """The chunks of the event's content, in order; `[]` for a deletion.

        Raises:
            EventError: the tokenizer finds nothing in the text.
        """
        if event.content is None:
            return []
        spans = cut(event.content, event.content_type, self.tokenizer, self.max_tokens)
        if not spans:
            raise EventError("the document has no text that the model's tokenizer knows", stage="plan")
        return [
            Chunk(event.document, event.version, ordinal, event.content[start:end], start, end, token_ids)
            for ordinal, (start, end, token_ids) in enumerate(spans)
        ]


def cut(
    content: str, content_type: ContentType, tokenizer: Encoder, max_tokens: int
) -> list[tuple[int, int, tuple[int, ...]]]:
    """Cut `content` into `(start, end, token ids)`: in order, without overlap, none empty or only white space."""
    pieces: list[Piece] = []
    sizes: list[int] = []
    for piece in split(content, content_type):
        for part, size in _fit(content, piece, tokenizer, max_tokens):
            pieces.append(part)
            sizes.append(size)
    spans = []
    first = 0
    while first < len(pieces):
        room = max_tokens
        while True:
            last = _border(content, pieces, sizes, first, room)
            start, end = _trim(content, pieces[first].start, pieces[last - 1].end)
            token_ids = tuple(tokenizer.encode(content[start:end])) if start < end else ()
            # Pieces count a little differently alone than together: where the sum was too optimistic, take less.
            if len(token_ids) <= max_tokens or last - first == 1:
                break
            room = min(room - 1, sum(sizes[first:last]) - (len(token_ids) - max_tokens))
        if token_ids:
            spans.append((start, end, token_ids))
        first = last
    return spans


def split(content: str, content_type: ContentType) -> Iterator[Piece]:
    """Take `content` apart at heading, paragraph, line and sentence borders; the pieces cover it without gaps."""
    markdown = content_type is ContentType.MARKDOWN
    fence = ""  # the marker that opened the code block we are in
    rank, position, after_heading = PARAGRAPH, 0, False
    ended = True  # the line before ended a sentence
    for line in content.splitlines(keepends=True):
        end = position + len(line)
        bare = line.strip()
        marker = _FENCE.match(line) if markdown else None
        heading = _HEADING.match(line) if markdown and not fence else None
        if not bare:
            rank = max(rank, PARAGRAPH if not fence else LINE)
            yield Piece(position, end, CHARACTER)
            position = end
            continue
        if heading:
            rank = HEADING - len(heading.group(1))
        elif after_heading:
            rank = CHARACTER  # a heading stays with what it is about
        elif fence:
            rank = max(rank, WORD)
        elif marker or _ITEM.match(line):
            rank = max(rank, LINE)
        elif ended:
            rank = max(rank, SENTENCE)
        else:
            rank = max(rank, WORD)
        if fence or heading or marker:
            yield Piece(position, end, rank)
        else:
            yield from _sentences(line, position, rank)
        if marker and not fence:
            fence = marker.group(1)
        elif marker and bare.strip(fence[0]) == "" and len(bare) >= len(fence):
            fence = ""
        ended = bare.endswith(_TERMINAL)
        rank, position, after_heading = CHARACTER, end, heading is not None


def _sentences(line: str, offset: int, rank: int) -> Iterator[Piece]:
    start = 0
    for match in _SENTENCE_END.finditer(line):
        if match.end() > start:
            yield Piece(offset + start, offset + match.end(), rank if start == 0 else SENTENCE)
            start = match.end()
    if start < len(line):
        yield Piece(offset + start, offset + len(line), rank if start == 0 else SENTENCE)


def _fit(content: str, piece: Piece, tokenizer: Encoder, max_tokens: int) -> Iterator[tuple[Piece, int]]:
    """The piece with its number of tokens, halved at word borders (or anywhere) until each part fits."""
    text = content[piece.start : piece.end]
    # A token stands for at least one byte in four of a character; 16 characters a token is far beyond any tokenizer,
    # so a text that long needs no counting to be too long.
    size = len(tokenizer.encode(text)) if len(text) <= 64 * max_tokens else max_tokens + 1
    if size <= max_tokens or len(text) < 2:
        yield piece, size
        return
    half = len(text) // 2
    space = max(text.rfind(" ", half // 2, half), text.rfind("\t", half // 2, half))
    middle = piece.start + (space + 1 if space >= 0 else half)
    yield from _fit(content, Piece(piece.start, middle, piece.rank), tokenizer, max_tokens)
    rank = WORD if space >= 0 else CHARACTER
    yield from _fit(content, Piece(middle, piece.end, rank), tokenizer, max_tokens)


def _border(content: str, pieces: Sequence[Piece], sizes: Sequence[int], first: int, room: int) -> int:
    """The index of the piece that the next chunk begins with: in `first + 1 .. len(pieces)`."""
    total, best, choice = 0, (-2, 0), first + 1
    for index in range(first, len(pieces)):
        if index > first and 2 * total >= room:
            piece = pieces[index]
            value = (piece.rank, zlib.crc32(content[piece.start : piece.end].strip().encode()))
            if value > best:
                best, choice = value, index
        total += sizes[index]
        if total > room:
            return choice if best[0] >= CHARACTER else max(index, first + 1)
    return len(pieces)


def _trim(content: str, start: int, end: int) -> tuple[int, int]:
    text = content[start:end]
    bare = text.strip()
    start += len(text) - len(text.lstrip())
    return start, start + len(bare)
