"""The HTML page of a session: self-contained, linear in size, reproducible."""

import base64
import gzip
import hashlib
import re
from importlib.resources import files
from pathlib import Path

import msgspec

from recording.view.synthetic import Script, encode, long, small, tokenizer, view
from tugline.recording.view.html_page import render_page
from tugline.recording.view.session_view import TokenText
from tugline.types import Image, Message, Role


def page(path: Path, builder: str | None = None) -> str:
    """The page of a recording."""
    return render_page(view(path, builder), TokenText(tokenizer()))


def allow(content: str) -> str:
    """The source of a content security policy that allows an inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def test_the_page_is_self_contained(tmp_path: Path) -> None:
    """The page has no address, and its policy allows only its own script, style and images."""
    text = page(small(tmp_path))
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy"\s+content="([^"]*)"', text)
    (script,) = re.findall(r'<script type="module">(.*?)</script>', text, re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    assert policy.split("; ") == [
        "default-src 'none'",
        f"script-src {allow(script)}",
        f"style-src {allow(style)}",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    markup = text.replace(script, "")
    assert not re.search(r"<\w[^>]*\s(src|href|action)\s*=|https?://|@import|url\(", markup)


def test_the_page_without_a_session_is_small() -> None:
    """The empty page, which the file of every session repeats, has at most 120 kB."""
    pages = files("tugline.recording.view") / "pages"
    assert len((pages / "session.html").read_bytes()) <= 120_000


def test_no_text_of_a_session_is_markup(tmp_path: Path) -> None:
    """All text is inside the block of data; the title has the session's name, escaped."""
    script = Script(tmp_path, name="<s> & {{ data }}")
    script.call(encode("one"), "</script><!-- <script> \u2028 <b>")
    script.writer.close()
    text = page(script.path)
    assert text.count("</script>") == 2
    assert "<title>&lt;s&gt; &amp; {{ data }} - Tugline</title>" in text
    assert re.search(r'id="data">[A-Za-z0-9+/=]+</script>', text)
    assert "<b>" not in text


def test_a_page_is_reproducible(tmp_path: Path) -> None:
    """Equal sessions give equal bytes."""
    path = small(tmp_path)
    assert page(path) == page(path)


def test_the_page_has_each_token_once(tmp_path: Path) -> None:
    """The builder `per_request` repeats every turn in every trace, but the page does not."""
    path = long(tmp_path, turns=40, base=2000, length=40)
    assert len(page(path, "per_request")) < 1.2 * len(page(path))


def test_a_large_image_is_left_out(tmp_path: Path) -> None:
    """A small image is in the page; of a large one it has the type and the size."""
    script = Script(tmp_path)
    urls = ["data:image/png;base64," + "A" * size for size in (400, 400_000)]
    images = tuple(Image(url) for url in urls)
    script.call(encode("see"), "yes", messages=(Message(Role.USER, "see", images=images),))
    script.writer.close()
    packed = re.search(r'id="data">([^<]*)<', page(script.path))
    assert packed
    block = gzip.decompress(base64.b64decode(packed[1]))
    size = int.from_bytes(block[:4], "little")
    turn = msgspec.json.decode(block[4 : 4 + size])["session"]["turns"][0]
    urls_in_page = [image["url"] for image in turn["detail"]["messages"][0]["images"]]
    assert urls_in_page == [urls[0], "left out: data:image/png, 400,022 characters"]
