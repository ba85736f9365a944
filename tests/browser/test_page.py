"""The page of a session in a real Chromium: what it shows, what it asks for, whether it is smooth.

``make test-browser`` runs these. Times are printed, not judged: this machine has other work.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from browser.chromium import Tab, chromium
from recording.view.synthetic import HOSTILE, LAST_WORD, long, small
from tugline.recording.file import read
from tugline.recording.tokenizer_file import load_tokenizer
from tugline.recording.view.html_page import render_page
from tugline.recording.view.session_view import TokenText, ViewedSession, view_session

pytestmark = pytest.mark.browser
SCROLL = Path(__file__).with_name("scroll.js").read_text()


def page(recording: Path) -> tuple[Path, ViewedSession]:
    """Its page, written beside it, and what it tells."""
    found = read(recording)
    assert found.header
    session = view_session(recording, found)
    file = recording.with_suffix(".html")
    file.write_text(
        render_page(session, TokenText(load_tokenizer(recording, found.header))), encoding="utf-8"
    )
    return file, session


@pytest.fixture
async def tab(tmp_path: Path) -> AsyncIterator[Tab]:
    """A page to go somewhere with; in the end it has neither complained nor asked the network."""
    async with chromium(tmp_path / "profile") as one:
        yield one
        assert one.complaints == []
        assert [url for url in one.requests if not url.startswith("file:")] == []
        assert len(one.requests) == 1, "one file is all it needs"


@pytest.fixture
async def session(tab: Tab, tmp_path: Path) -> ViewedSession:
    """The small session, whose page is open."""
    file, session = page(small(tmp_path))
    await tab.open(file)
    return session


async def test_a_long_session_scrolls_with_few_elements(
    tab: Tab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """100k tokens: the document stays small wherever one scrolls, and the last token is reached."""
    file, session = page(long(tmp_path))
    last = session.view.traces[0].length - 1
    assert last > 90_000
    await tab.open(file)
    ready = await tab.js("performance.now()")
    await tab.js("tugline.showTokens()")
    await tab.js("document.getElementById('fold').click()")
    assert await tab.js("tugline.tokens.from.length") > 4000, "nothing is folded now"
    found = await tab.js(SCROLL)
    steps = [f"{p50:.0f} ms (p95: {p95:.0f})" for p50, p95 in (found["work"], found["frames"])]
    with capsys.disabled():
        sys.stdout.write(
            f"\npage of {last + 1:,} tokens, {file.stat().st_size / 1e3:,.0f} kB: ready after "
            f"{ready:.0f} ms; a step of 23 new rows takes {steps[0]}, its frame {steps[1]}\n"
        )
    assert found["nodes"] < 5000
    await tab.js("document.getElementById('tokens').focus()")
    await tab.key("End")
    assert await tab.js(f"document.querySelector('[data-k=\"{last}\"]').textContent")
    assert f"position {last:,}" in await tab.js("document.getElementById('token').textContent")


async def test_a_click_on_a_token_tells_what_is_known(tab: Tab, session: ViewedSession) -> None:
    """Its id, logprob, version and call are those of the recording."""
    trace = session.traces[0]
    span = trace.spans[1]
    k = span.start + 2
    await tab.js(f"tugline.openTrace(0, {span.start})")
    await tab.click(f'[data-k="{k}"]')
    text = await tab.js("document.getElementById('token').innerText")
    assert f"id {trace.ids[k]}" in text
    assert f"call {span.call}" in text
    assert f"version {span.version}" in text
    assert f"logprob −{-trace.logprobs[k]:.3f}" in text  # noqa: RUF001 - a minus sign
    assert "trained" in text
    colour = await tab.js("document.querySelector('.k.here').className")
    for key, kind in (("2", " h"), ("3", " h"), ("4", " v"), ("1", " trained")):
        await tab.key(key)
        colour = await tab.js("document.querySelector('.k.here').className")
        assert kind in colour


@pytest.mark.usefixtures("session")
async def test_what_a_model_wrote_is_text_and_nothing_else(tab: Tab) -> None:
    """An end of script, a picture with a handler and marks of direction are shown, not obeyed."""
    await tab.js("tugline.openTurn(1)")
    text = await tab.js("document.getElementById('conversation').innerText")
    assert HOSTILE.split(" \x1b")[0] in text
    assert "\\u{1b}[31m" in text
    assert "\u202e" not in text
    assert await tab.js("document.images.length") == 0
    await tab.js("tugline.showTokens()")
    stream = await tab.js("[...document.querySelectorAll('.k')].map(k => k.textContent).join('')")
    assert HOSTILE.split(" \x1b")[0] in stream
    assert "界🙂" in stream, "a character of several tokens is put together again"
    assert await tab.js("document.scripts.length") == 2


@pytest.mark.parametrize("view", ["conversation", "tokens"])
async def test_search_finds_a_word_far_away(tab: Tab, tmp_path: Path, view: str) -> None:
    """Typed like a person does: `/`, the word, Enter; the place is in sight and marked."""
    file, session = page(long(tmp_path, turns=40, base=500))
    await tab.open(file)
    await tab.key("t" if view == "tokens" else "c")
    await tab.key("/")
    for letter in LAST_WORD:
        await tab.key(letter)
    await tab.until("document.getElementById('found').value.startsWith('1 of 1')")
    if view == "tokens":
        hits = "[...document.querySelectorAll('.hit')].map(hit => hit.textContent).join('')"
        assert await tab.js(hits) == LAST_WORD
    else:
        assert await tab.js("document.querySelector('mark').textContent") == LAST_WORD
        assert await tab.js("tugline.call") == session.calls[-1].number
    await tab.key("Escape")
    assert not await tab.js("document.querySelector('mark, .hit')")


async def test_the_keyboard_leads_everywhere(tab: Tab, session: ViewedSession) -> None:
    """Turns, views, answers, theme and help without a mouse."""
    await tab.key("j")
    await tab.key("j")
    assert await tab.js("tugline.call") == 2
    await tab.key("k")
    assert await tab.js("tugline.call") == 1
    await tab.key("t")
    await tab.js("document.getElementById('tokens').focus()")
    await tab.key("Home")
    await tab.key("]")
    await tab.key("]")
    assert await tab.js("tugline.tokens.here") == session.traces[0].spans[1].start
    await tab.key("ArrowRight")
    assert await tab.js("tugline.tokens.here") == session.traces[0].spans[1].start + 1
    ground = "getComputedStyle(document.body).backgroundColor"
    light = await tab.js(ground)
    await tab.key("d")
    assert await tab.js(ground) != light
    await tab.key("?")
    assert await tab.js("document.getElementById('help').open")


async def test_a_fork_links_to_where_it_left(tab: Tab, session: ViewedSession) -> None:
    """The tree shows each trace below its parent, with a link to the last token they share."""
    await tab.click("[data-list='traces']")
    await tab.until(f"document.querySelectorAll('#traces .entry').length === {len(session.traces)}")
    await tab.click("#traces .entry:nth-child(2) a")
    assert await tab.js("tugline.index") == 0
    assert await tab.js("tugline.tokens.here") == session.view.traces[1].shared - 1


async def test_each_trace_is_put_together_from_what_its_parent_has(
    tab: Tab, session: ViewedSession
) -> None:
    """The ids and logprobs in the page are those of the builder's traces, one by one."""
    for index, trace in enumerate(session.traces):
        one = f"tugline.traces[{index}]"
        ids = await tab.js(f"[...{one}.places].map(place => {one}.page.ids[place])")
        assert ids == trace.ids.tolist()
        assert await tab.js(f"[...{one}.logprobs]") == pytest.approx(trace.logprobs.tolist())


async def test_a_session_without_calls_is_shown(tab: Tab, tmp_path: Path) -> None:
    """A harness that never asked for anything has a page, too."""
    recording = small(tmp_path)
    found = read(recording)
    found.calls = ()
    file = tmp_path / "none.html"
    file.write_text(render_page(view_session(recording, found), TokenText(None)), encoding="utf-8")
    await tab.open(file)
    assert "no calls" in await tab.js("document.getElementById('conversation').innerText")
    await asyncio.sleep(0.2)  # observers of sizes run late; `tab` sees what they complain about
