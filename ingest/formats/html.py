"""HTML to markdown: what a reader sees, with its headings, lists, tables and code blocks; no scripts, no hidden text.

Parsed by Lexbor (through selectolax), as browsers do. The walk over the tree is a loop: pages may be nested deeper
than Python can recurse. Style sheets are not applied; hidden is what its own attributes hide.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from schemas.errors import EventError
from schemas.events import MAX_LABEL_CHARACTERS

if TYPE_CHECKING:
    from selectolax.lexbor import LexborNode

_DROPPED = frozenset(
    (
        "head",
        "script",
        "style",
        "template",
        "noscript",
        "iframe",
        "object",
        "embed",
        "svg",
        "canvas",
        "audio",
        "video",
        "map",
        "datalist",
    )
)
_BLOCKS = frozenset(
    (
        "address",
        "article",
        "aside",
        "blockquote",
        "body",
        "center",
        "dd",
        "details",
        "dialog",
        "div",
        "dl",
        "dt",
        "fieldset",
        "figcaption",
        "figure",
        "footer",
        "form",
        "header",
        "hgroup",
        "hr",
        "main",
        "nav",
        "ol",
        "p",
        "pre",
        "section",
        "summary",
        "table",
        "tbody",
        "tfoot",
        "thead",
        "ul",
    )
)
_HEADINGS = {f"h{n}": "#" * n + " " for n in range(1, 7)}
_CELLS = ("td", "th")
_HIDDEN_STYLE = re.compile(
    r"(?:^|;)\s*(?:display\s*:\s*none|visibility\s*:\s*(?:hidden|collapse)|opacity\s*:\s*0*\.?0*\s*(?:;|!|$)"
    r"|font-size\s*:\s*0*\.?0*(?:px|pt|em|rem|%)?\s*(?:;|!|$))",
    re.IGNORECASE,
)
_META_CHARSET = re.compile(rb"<meta[^>]{0,200}?charset\s*=\s*[\"']?([\w.-]{1,40})", re.IGNORECASE)
_LINE = re.compile(r"\s*(?:- |\d+\. |\| )")  # a list item or a table row
_LOOKS_LIKE_MARKUP = re.compile(r"^(?=#{1,6}\s|```|~~~)", re.MULTILINE)
_CHARSETS = frozenset({"utf-16", "utf-16le", "utf-16be", "windows-1252", "iso-8859-1", "iso-8859-15", "windows-1251"})


def html_document(source: bytes) -> tuple[str | None, str]:
    """Title and text of a page.

    Raises:
        EventError: the bytes are in no character set that can be read.
    """
    from selectolax.lexbor import LexborHTMLParser

    tree = LexborHTMLParser(_decoded(source))
    titles = tree.css("title") if tree.head is not None else []
    title = " ".join(titles[0].text().split())[:MAX_LABEL_CHARACTERS] if titles else None
    writer = _Writer()
    if tree.body is not None:
        _walk(tree.body, writer)
    return title or None, writer.text()


def _decoded(source: bytes) -> str:
    for mark, charset in ((b"\xef\xbb\xbf", "utf-8-sig"), (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16")):
        if source.startswith(mark):
            return _decode(source, charset)
    try:
        return source.decode()
    except UnicodeDecodeError:
        named = _META_CHARSET.search(source[:1024])
        charset = named.group(1).decode("ascii", "replace").lower() if named else ""
        return _decode(source, charset if charset in _CHARSETS else "utf-8")


def _decode(source: bytes, charset: str) -> str:
    try:
        return source.decode(charset)
    except UnicodeDecodeError as error:
        raise EventError(f"the HTML is not {charset}: {error.reason} at byte {error.start}") from error


def _walk(root: LexborNode, writer: _Writer) -> None:
    """Every visible node, entered and left in the order of the document."""
    node = root
    inside: list[LexborNode] = []
    while True:
        if node.is_text_node:
            writer.write(node.text_content or "")
        elif _is_seen(node):
            writer.enter(node)
            child = node.first_child
            if child is not None:
                inside.append(node)
                node = child
                continue
            writer.leave(node)
        while inside and node.next is None:
            node = inside.pop()
            writer.leave(node)
        following = node.next
        if not inside or following is None:
            return
        node = following


def _is_seen(node: LexborNode) -> bool:
    tag = node.tag
    if tag is None or tag in _DROPPED or not tag[0].isalnum():  # comments, declarations
        return False
    attributes = node.attributes
    if tag == "dialog" and "open" not in attributes:
        return False
    return "hidden" not in attributes and not _HIDDEN_STYLE.search(attributes.get("style") or "")


class _Writer:
    """Puts markdown together: blocks, and within each the text so far."""

    def __init__(self) -> None:
        self._blocks: list[str] = []
        self._inline: list[str] = []
        self._prefix = ""  # of the block that is open
        self._lists: list[int | None] = []  # the number of the next item; None in lists without numbers
        self._pre = 0
        self._cells: list[str] | None = None  # of the table row that is open
        self._row = 0

    def text(self) -> str:
        """All blocks, an empty line between them; list items and table rows on lines that follow each other."""
        self._end_block()
        parts: list[str] = []
        before = ""
        for block in self._blocks:
            kind = "" if (line := _LINE.match(block)) is None else "row" if line.group().endswith("| ") else "item"
            if parts:
                parts.append("\n" if kind and kind == before else "\n\n")
            parts.append(block)
            before = kind
        return "".join(parts)

    def write(self, text: str) -> None:
        """Text as it stands in the page."""
        self._inline.append(text)

    def enter(self, node: LexborNode) -> None:
        """An element begins."""
        tag = node.tag or ""
        if tag in _HEADINGS:
            self._end_block()
            self._prefix = _HEADINGS[tag]
        elif tag == "li":
            self._end_block()
            self._prefix = self._item()
        elif tag == "tr":
            self._end_block()
            self._cells = []
        elif tag in _CELLS:
            if self._cells is not None:
                self._take_cell()
        elif tag == "table":
            self._end_block()
            self._row = 0
        elif tag == "br":
            self._inline.append("\n" if self._pre else "\x00")
        elif tag == "img":
            self._inline.append(f" {node.attributes.get('alt') or ''} ")
        elif tag in _BLOCKS and self._cells is None:
            self._end_block()
            if tag in ("ul", "ol"):
                self._lists.append(1 if tag == "ol" else None)
            self._pre += tag == "pre"

    def leave(self, node: LexborNode) -> None:
        """An element ends."""
        tag = node.tag or ""
        if tag in _CELLS and self._cells is not None:
            self._take_cell(always=True)
        elif tag == "tr":
            self._end_row()
        elif tag in _HEADINGS or tag == "li":
            self._end_block()
            self._prefix = ""
        elif tag in _BLOCKS and self._cells is None:
            self._end_block()
            if tag in ("ul", "ol") and self._lists:
                self._lists.pop()
            self._pre = max(0, self._pre - (tag == "pre"))

    def _item(self) -> str:
        indent = "  " * max(0, len(self._lists) - 1)
        number = self._lists[-1] if self._lists else None
        if number is None:
            return f"{indent}- "
        self._lists[-1] = number + 1
        return f"{indent}{number}. "

    def _take_cell(self, always: bool = False) -> None:
        assert self._cells is not None
        text = self._taken().replace("\n", " ").replace("|", "\\|")
        if text or always:
            self._cells.append(text)

    def _end_row(self) -> None:
        if self._cells is None:
            return
        self._take_cell()
        if any(self._cells):
            self._blocks.append(f"| {' | '.join(self._cells)} |")
            if self._row == 0:
                self._blocks.append("| " + " | ".join("---" for _ in self._cells) + " |")
            self._row += 1
        self._cells = None

    def _end_block(self) -> None:
        if self._cells is not None:
            self._take_cell()
            return
        if self._pre:
            code = "".join(self._inline).strip("\n")
            self._inline = []
            if code.strip():
                fence = "```"
                while fence in code:
                    fence += "`"
                self._blocks.append(f"{fence}\n{code}\n{fence}")
            return
        prefix, self._prefix = self._prefix, ""
        text = self._taken()
        if not text:
            self._prefix = prefix if prefix.strip() and not prefix.startswith("#") else ""
            return
        text = _LOOKS_LIKE_MARKUP.sub(r"\\", text)
        self._blocks.append(prefix + (text.replace("\n", " ") if prefix.startswith("#") else text))

    def _taken(self) -> str:
        """The open text with its white space collapsed; a zero byte stands for a line break."""
        lines = "".join(self._inline).split("\x00")
        self._inline = []
        return "\n".join(" ".join(line.split()) for line in lines).strip()
