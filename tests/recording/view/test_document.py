"""The page as a file: self-contained, linear in size, the same every time."""

import base64
import gzip
import re
from pathlib import Path

import msgspec

from recording.view.synthetic import Script, encode, long, small, tokenizer
from tugline.recording.file import read
from tugline.recording.view.html_page import render_page
from tugline.recording.view.session_view import TokenText, view_session
from tugline.types import Image, Message, Role


def page(path: Path, builder: str | None = None) -> str:
    """The page of a recording."""
    return render_page(view_session(path, read(path), builder), TokenText(tokenizer()))


def test_the_page_needs_nothing_but_itself(tmp_path: Path) -> None:
    """It names no address, and its own policy forbids the browser to ask for one."""
    text = page(small(tmp_path))
    policy = r"""<meta http-equiv="Content-Security-Policy"\s+content="default-src 'none';"""
    assert re.search(policy, text)
    assert not re.search(r"<\w[^>]*\s(src|href|action)\s*=|https?://|@import|url\(", text)


def test_no_word_of_a_session_stands_in_the_page_as_it_is(tmp_path: Path) -> None:
    """Everything is inside the block of data; only the title has the session's name, escaped."""
    script = Script(tmp_path, name="<s> & co")
    script.call(encode("one"), "</script><b>")
    script.writer.close()
    text = page(script.path)
    assert text.count("</script>") == 2
    assert "<title>&lt;s&gt; &amp; co - Tugline</title>" in text
    assert "<b>" not in text


def test_a_page_is_the_same_every_time(tmp_path: Path) -> None:
    """Equal sessions give equal bytes."""
    path = small(tmp_path)
    assert page(path) == page(path)


def test_the_file_grows_with_the_session_not_with_its_repetitions(tmp_path: Path) -> None:
    """`per_request` repeats every turn in every trace; the page has each token once."""
    path = long(tmp_path, turns=40, base=2000, words=40)
    assert len(page(path, "per_request")) < 1.2 * len(page(path))


def test_a_large_picture_is_named_and_left_out(tmp_path: Path) -> None:
    """A small one is in the page; of a large one the kind and size are told."""
    script = Script(tmp_path)
    urls = ["data:image/png;base64," + "A" * size for size in (400, 400_000)]
    pictures = tuple(Image(url) for url in urls)
    script.call(encode("see"), "yes", messages=(Message(Role.USER, "see", images=pictures),))
    script.writer.close()
    packed = re.search(r'id="data">([^<]*)<', page(script.path))
    assert packed
    block = gzip.decompress(base64.b64decode(packed[1]))
    size = int.from_bytes(block[:4], "little")
    turn = msgspec.json.decode(block[4 : 4 + size])["session"]["turns"][0]
    found = [image["url"] for image in turn["detail"]["messages"][0]["images"]]
    assert found == [urls[0], "left out: data:image/png, 400,022 characters"]
