"""HTML and PDF to text: what a reader sees, with its structure, and nothing that is hidden."""

import base64
from contextlib import suppress

import pytest

from ingest.chunking import split
from ingest.formats.html import html_document
from ingest.formats.pdf import pdf_text
from schemas.errors import EventError
from schemas.events import ContentType
from tests.ingest.formats_world import PDFS, message
from tests.ingest.world import document


def text_of(html):
    return html_document(html.encode())[1]


def test_headings_paragraphs_lists_tables_and_code_keep_their_shape():
    page = """<!DOCTYPE html><html><head><title> Leave &amp;
      more </title><style>p {color: red}</style></head><body>
      <nav><a href="/">Home</a></nav>
      <h1>Annual <em>leave</em></h1>
      <p>Everybody has <b>30 days</b>,<br>which is
         a lot.</p>
      <ul><li>book early</li><li>ask:<ol><li>the lead</li><li><p>the team</p></li></ol></li><li></li></ul>
      <table><thead><tr><th>grade</th><th>days</th></tr></thead><tbody>
      <tr><td>a|b</td><td> 30 </td></tr></tbody></table>
      <pre><code>if a:
    b()</code></pre>
      <h3>Notes</h3><div>first<div>second</div>third</div><img alt="a lake">
    </body></html>"""
    title, text = html_document(page.encode())
    assert title == "Leave & more"
    assert text == (
        "Home\n\n"
        "# Annual leave\n\n"
        "Everybody has 30 days,\nwhich is a lot.\n\n"
        "- book early\n- ask:\n  1. the lead\n  2. the team\n\n"
        "| grade | days |\n| --- | --- |\n| a\\|b | 30 |\n\n"
        "```\nif a:\n    b()\n```\n\n"
        "### Notes\n\n"
        "first\n\nsecond\n\nthird\n\n"
        "a lake"
    )


@pytest.mark.parametrize(
    "hidden",
    [
        "<script>secret()</script>",
        "<style>.secret {}</style>",
        "<template>secret</template>",
        "<noscript>secret</noscript>",
        "<!-- secret -->",
        "<p hidden>secret</p>",
        '<div hidden=""><p>secret</p></div>',
        '<span style="display:none">secret</span>',
        '<span style="color: red; DISPLAY : none !important">secret</span>',
        '<span style="visibility: hidden">secret</span>',
        '<span style="font-size:0px">secret</span>',
        '<span style="opacity: 0.0;">secret</span>',
        "<dialog>secret</dialog>",
        '<input type="hidden" value="secret">',
        "<svg><text>secret</text></svg>",
        "<iframe>secret</iframe>",
        "<p hidden>a<b>b</b>secret</p><h2 hidden>secret</h2>",
        '<a title="secret" data-x="secret" onclick="secret()"></a>',
    ],
)
def test_what_a_reader_does_not_see_is_not_indexed(hidden):
    """Bug: instructions in white-on-nothing text of a page were read to the model as if somebody had written them."""
    assert text_of(f"<p>before</p>{hidden}<p>after</p>") == "before\n\nafter"


@pytest.mark.parametrize(
    "seen", ['<p style="opacity: 0.5">x</p>', '<p style="font-size: 0.9em">x</p>', "<dialog open>x</dialog>"]
)
def test_what_only_looks_hidden_is_indexed(seen):
    assert text_of(seen) == "x"


def test_text_that_looks_like_a_heading_does_not_become_one():
    """Bug: `# 1 priority` in a paragraph cut the document there."""
    text = text_of("<h2>real</h2><p># 1 priority</p><p>a<br>## b</p><p>``` c</p>")
    assert text == "## real\n\n\\# 1 priority\n\na\n\\## b\n\n\\``` c"
    strong = [text[p.start : p.end].strip() for p in split(text, ContentType.MARKDOWN) if p.rank > 5]
    assert all(not piece.startswith("# 1") for piece in strong)


def test_a_page_nested_deeper_than_python_recurses_loses_nothing():
    depth = 50_000
    assert text_of("<div>" * depth + "x" + "</div>" * depth + "y") == "x\n\ny"


def test_a_page_without_any_structure_is_its_text():
    assert text_of("just text &lt;b&gt;") == "just text <b>"
    assert text_of("") == ""
    assert text_of("<<<>>>&&&") == "<<<>>>&&&"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("<p>Büro</p>".encode(), "Büro"),
        (b"\xef\xbb\xbf" + "<p>Büro</p>".encode(), "Büro"),
        ("<p>Büro</p>".encode("utf-16"), "Büro"),
        (b'<meta charset="windows-1252"><p>B\xfcro \x80</p>', "Büro €"),
        (b'<meta http-equiv="Content-Type" content="text/html; charset=iso-8859-1"><p>B\xfcro</p>', "Büro"),
    ],
)
def test_a_page_says_in_which_character_set_it_is(source, text):
    assert html_document(source)[1] == text


def test_a_page_in_no_known_character_set_is_refused():
    with pytest.raises(EventError, match="the HTML is not utf-8"):
        html_document(b'<meta charset="rot13"><p>B\xfcro</p>')


def test_the_pages_of_a_pdf_follow_each_other():
    text = pdf_text(PDFS["two pages"])
    assert text.index("Annual leave") < text.index("\n\nSick leave")
    assert "café" in text


def test_a_pdf_that_is_cut_anywhere_is_read_or_refused():
    """Bug: a damaged file raised whatever its parser tripped over, and stopped the pipeline."""
    whole = PDFS["two pages"]
    for end in range(0, len(whole), 97):
        with suppress(EventError):
            assert pdf_text(whole[:end])


def test_a_character_range_counts_in_the_extracted_text(world):
    """What a citation points into is the text that was made, not the page that it was made from."""
    page = "<html><body><script>var x = 1</script><h1>Leave</h1><p>Everybody has 30 days.</p></body></html>"
    world.change(page, 1, content_type=ContentType.HTML)
    world.index()
    event = world.index_parts.events.read(message({"content": page, "content_type": "html"}))
    (point,) = world.qdrant.chunks(document(), 1)
    start, end = point.chunk.char_start, point.chunk.char_end
    assert event.content[start:end] == point.chunk.text == "# Leave\n\nEverybody has 30 days."


def test_an_event_that_is_repeated_after_a_new_release_of_an_extractor_is_no_conflict(world):
    body = {"content": base64.b64encode(PDFS["two pages"]).decode(), "content_type": ContentType.PDF}
    world.change(**{"text": body["content"], "version": 1, "content_type": ContentType.PDF})
    world.index()
    (work,) = world.index(repeat=True)
    assert work.outcome.value == "repeated"
    assert world.texts().startswith("Annual leave")
