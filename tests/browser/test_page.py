"""The HTML page of a session in a real Chromium: content, keyboard, requests and speed.

``make test-browser`` runs these. Times are printed and not compared with a limit.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from browser.chromium import Tab, chromium
from recording.view.synthetic import HOSTILE, LAST_WORD, START, Script, long, small, tokenizer, view
from tugline.recording.records import RecordedEvent, RecordedEventKind
from tugline.recording.view.html_page import render_page
from tugline.recording.view.session_view import TokenText, ViewedSession

pytestmark = pytest.mark.browser
SCROLL = Path(__file__).with_name("scroll.js").read_text()


def write_page(recording: Path) -> tuple[Path, ViewedSession]:
    """Write the page of a recording beside it; its path, and the view of the session."""
    session = view(recording)
    file = recording.with_suffix(".html")
    file.write_text(render_page(session, TokenText(tokenizer())), encoding="utf-8")
    return file, session


@pytest.fixture
async def tab(tmp_path: Path) -> AsyncIterator[Tab]:
    """An empty page; in the end there are no errors and no requests but for one file."""
    async with chromium(tmp_path / "profile") as tab:
        yield tab
        assert tab.errors == []
        assert [url.partition(":")[0] for url in tab.requests] == ["file"]


@pytest.fixture
async def session(tab: Tab, tmp_path: Path) -> ViewedSession:
    """The small session, with its page open."""
    file, session = write_page(small(tmp_path))
    await tab.open(file)
    return session


async def test_a_long_session_scrolls_with_few_elements(
    tab: Tab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With 100k tokens the document stays small while scrolling to the last token."""
    file, session = write_page(long(tmp_path))
    last = session.view.traces[0].length - 1
    assert last > 90_000
    await tab.open(file)
    ready = await tab.js("performance.now()")
    await tab.js("tugline.showTokens()")
    await tab.js("document.getElementById('fold').click()")
    assert await tab.js("tugline.tokens.from.length") > 4000, "nothing is folded now"
    times = await tab.js(SCROLL)
    steps = [f"{p50:.0f} ms (p95: {p95:.0f})" for p50, p95 in (times["work"], times["frames"])]
    with capsys.disabled():
        sys.stdout.write(
            f"\npage of {last + 1:,} tokens, {file.stat().st_size / 1e3:,.0f} kB: ready after "
            f"{ready:.0f} ms; a step of 23 new rows takes {steps[0]}, its frame {steps[1]}\n"
        )
    assert times["nodes"] < 5000
    await tab.js("document.getElementById('tokens').focus()")
    await tab.key("End")
    assert await tab.js(f"document.querySelector('[data-k=\"{last}\"]').textContent")
    assert f"position {last:,}" in await tab.js("document.getElementById('token').textContent")


async def test_a_click_on_a_token_shows_its_details(tab: Tab, session: ViewedSession) -> None:
    """Its id, logprob, version and call, as in the recording."""
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
    for key, kind in (("2", " h"), ("3", " h"), ("4", " v"), ("1", " trained")):
        await tab.key(key)
        colour = await tab.js("document.querySelector('.k.here').className")
        assert kind in colour


@pytest.mark.usefixtures("session")
async def test_a_models_text_is_never_markup(tab: Tab) -> None:
    """An end of script, an image with a handler and direction marks are shown as text."""
    await tab.js("tugline.openTurn(1)")
    text = await tab.js("document.getElementById('conversation').innerText")
    assert HOSTILE.split(" \x1b")[0] in text
    assert "\\u{1b}[31m" in text
    assert "\u202e" not in text
    assert await tab.js("document.images.length") == 0
    await tab.js("tugline.showTokens()")
    stream = await tab.js("[...document.querySelectorAll('.k')].map(k => k.textContent).join('')")
    assert HOSTILE.split(" \x1b")[0] in stream
    assert "界🙂" in stream, "a character of several tokens is whole"
    assert await tab.js("document.scripts.length") == 2


@pytest.mark.parametrize("pane", ["conversation", "tokens"])
async def test_search_finds_a_distant_word(tab: Tab, tmp_path: Path, pane: str) -> None:
    """After `/` and the word, the match is in sight and marked; Escape ends the search."""
    file, session = write_page(long(tmp_path, turns=40, base=500))
    await tab.open(file)
    await tab.key("t" if pane == "tokens" else "c")
    await tab.key("/")
    for letter in LAST_WORD:
        await tab.key(letter)
    await tab.until("document.getElementById('found').value.startsWith('1 of 1')")
    if pane == "tokens":
        hits = "[...document.querySelectorAll('.hit')].map(hit => hit.textContent).join('')"
        assert await tab.js(hits) == LAST_WORD
    else:
        assert await tab.js("document.querySelector('mark').textContent") == LAST_WORD
        assert await tab.js("tugline.call") == session.calls[-1].number
    await tab.key("Escape")
    assert not await tab.js("document.querySelector('mark, .hit')")


async def test_the_page_can_be_used_by_keyboard(tab: Tab, session: ViewedSession) -> None:
    """Turns, views, answers, theme and help."""
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


async def test_a_fork_links_to_its_origin(tab: Tab, session: ViewedSession) -> None:
    """The tree has each trace below its parent, with a link to the last shared token."""
    await tab.click("[data-list='traces']")
    await tab.until(f"document.querySelectorAll('#traces .entry').length === {len(session.traces)}")
    await tab.click("#traces .entry:nth-child(2) a")
    assert await tab.js("tugline.index") == 0
    assert await tab.js("tugline.tokens.here") == session.view.traces[1].shared - 1


async def test_traces_are_rebuilt_from_their_parents(tab: Tab, session: ViewedSession) -> None:
    """The ids and logprobs in the page equal those of the builder's traces."""
    for index, trace in enumerate(session.traces):
        name = f"tugline.traces[{index}]"
        ids = await tab.js(f"[...{name}.places].map(place => {name}.page.ids[place])")
        assert ids == trace.ids.tolist()
        assert await tab.js(f"[...{name}.logprobs]") == pytest.approx(trace.logprobs.tolist())


@pytest.mark.parametrize("events", [0, 1])
async def test_a_session_without_calls_has_a_page(tab: Tab, tmp_path: Path, events: int) -> None:
    """As of a harness that made no request; without events, there is no time to draw."""
    script = Script(tmp_path)
    for _ in range(events):
        script.writer.append_record(RecordedEvent(RecordedEventKind.PAUSED, START))
    file, _ = write_page(script.end())
    await tab.open(file)
    assert "no calls" in await tab.js("document.getElementById('conversation').innerText")
    await asyncio.sleep(0.2)  # size observers run late; `tab` collects their errors
