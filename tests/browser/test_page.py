"""The HTML page of a session in a real Chromium: content, keyboard, requests and speed.

``make test-browser`` runs these. Times are printed and not compared with a limit.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from browser.chromium import Tab, chromium
from browser.conftest import DRAWN, TOKEN_FACTS, TOKENS_BOX, TURNS, check_accessibility
from recording.view.synthetic import (
    HOSTILE,
    LAST_WORD,
    START,
    Script,
    encode,
    long,
    small,
    tokenizer,
    view,
)
from support.commands import run_program
from tugline.recording.file import read
from tugline.recording.records import RecordedEvent, RecordedEventKind
from tugline.recording.view.html_page import pack_recording, render_page
from tugline.recording.view.session_view import TokenText, ViewedSession, view_session
from tugline.types import Image, Message, Role

pytestmark = pytest.mark.browser
SCROLL = Path(__file__).with_name("scroll.js").read_text()
PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJ"
    "AAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
CHOSEN = "document.querySelector('[aria-label=Turns] [aria-selected=true] strong').innerText"
TEXT = "document.querySelector('.detail .body').innerText"


def write_page(recording: Path) -> tuple[Path, ViewedSession]:
    """Write the page of a recording beside it; its path, and the view of the session."""
    session = view(recording)
    file = recording.with_suffix(".html")
    file.write_text(render_page(session, TokenText(tokenizer())), encoding="utf-8")
    return file, session


@pytest.fixture
async def tab(tmp_path: Path) -> AsyncIterator[Tab]:
    """An empty page; in the end there are no errors and no requests but for files and data."""
    async with chromium(tmp_path / "profile") as tab:
        yield tab
        assert tab.errors == []
        assert [url for url in tab.requests if not url.startswith(("file:", "data:"))] == []
        assert sum(url.startswith("file:") for url in tab.requests) == 1


@pytest.fixture
async def session(tab: Tab, tmp_path: Path) -> ViewedSession:
    """The small session, with its page open."""
    file, session = write_page(small(tmp_path))
    await tab.open(file)
    await tab.until(DRAWN)
    return session


async def test_a_long_session_scrolls_with_few_elements(
    tab: Tab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With 100k tokens the document stays small while scrolling to the last token."""
    file, session = write_page(long(tmp_path))
    last = session.view.traces[0].length - 1
    assert last > 90_000
    await tab.open(file)
    await tab.until(DRAWN)
    ready = await tab.js("performance.getEntriesByName('tokens drawn')[0].startTime")
    rows = f"{TOKENS_BOX}.scrollHeight / 18"
    folded = await tab.js(rows)
    await tab.key("v")
    await tab.key("f")
    await tab.until(f"{rows} > {folded}")
    assert await tab.js(rows) > 4000, "nothing is folded now"
    times = await tab.js(SCROLL)
    steps = [f"{p50:.0f} ms (p95: {p95:.0f})" for p50, p95 in (times["work"], times["frames"])]
    with capsys.disabled():
        sys.stdout.write(
            f"\npage of {last + 1:,} tokens, {file.stat().st_size / 1e3:,.0f} kB: drawn after "
            f"{ready:.0f} ms; a step of 23 new rows takes {steps[0]}, its frame {steps[1]}\n"
        )
    assert times["drawn"] >= 199, "a step draws its rows"
    assert times["nodes"] < 2000
    await tab.js(f"{TOKENS_BOX}.focus()")
    await tab.key("End")
    await tab.until(f"{TOKEN_FACTS}.includes('position {last:,}')")


async def test_a_very_long_session_is_drawn_quickly(
    tab: Tab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A page of 250,000 tokens is drawn; the time from its decoded data on is printed."""
    file, session = write_page(long(tmp_path, length=300))
    length = session.view.traces[0].length
    assert length > 250_000
    await tab.open(file)
    await tab.until(DRAWN)
    time = "performance.getEntriesByName('{}')[0].startTime"
    decoded = await tab.js(time.format("data decoded"))
    drawn = await tab.js(time.format("tokens drawn"))
    with capsys.disabled():
        sys.stdout.write(
            f"\npage of {length:,} tokens: drawn {drawn - decoded:.0f} ms after its data was "
            f"decoded (budget 400 ms), {drawn:.0f} ms after the navigation\n"
        )


async def hover(tab: Tab, x: float, y: float) -> str:
    """Move the mouse to a position in the tokens; the facts that are shown then."""
    left, top = await tab.js(f"(b => [b.x, b.y])({TOKENS_BOX}.getBoundingClientRect())")
    at = {"x": left + x, "y": top + y}
    await tab.send("Input.dispatchMouseEvent", type="mouseMoved", **at)
    await tab.js("new Promise(requestAnimationFrame)")
    return await tab.js(TOKEN_FACTS)


async def test_a_token_shows_its_details(tab: Tab, session: ViewedSession) -> None:
    """Mouse and keys show id, logprob, version and call, as in the recording."""
    trace = session.traces[0]
    span = trace.spans[1]
    row, margin = 18, 72
    heights = [row * i + row / 2 for i in range(30)]
    facts = [await hover(tab, margin + 2, y) for y in heights]
    at = next(
        y for y, text in zip(heights, facts, strict=True) if f"position {span.start:,}" in text
    )
    left, top = await tab.js(f"(b => [b.x, b.y])({TOKENS_BOX}.getBoundingClientRect())")
    for kind in ("mousePressed", "mouseReleased"):
        where = {"x": left + margin + 2, "y": top + at, "button": "left", "clickCount": 1}
        await tab.send("Input.dispatchMouseEvent", type=kind, **where)
    await tab.until(f"{CHOSEN} === '{span.call}'")
    await tab.js(f"{TOKENS_BOX}.focus()")
    await hover(tab, 0, -200)
    for _ in range(2):
        await tab.key("ArrowRight")
    k = span.start + 2
    await tab.until(f"{TOKEN_FACTS}.includes('position {k:,}')")
    text = await tab.js(TOKEN_FACTS)
    assert f"id {trace.ids[k]}" in text
    assert f"call {span.call}" in text
    assert f"version {span.version}" in text
    assert f"logprob −{-trace.logprobs[k]:.3f}" in text  # noqa: RUF001 - a minus sign
    assert "trainable" in text
    legend = "document.querySelector('.legend').innerText"
    for key, words in (("2", "p ≥ 0.99"), ("3", "nats"), ("4", "version 5"), ("1", "trainable")):
        await tab.key(key)
        await tab.until(f"{legend}.includes('{words}')")


async def test_a_context_token_links_to_the_first_call_with_it(
    tab: Tab, session: ViewedSession
) -> None:
    """The link shows the call's conversation; a context token has no sampled values."""
    await tab.key("v")
    await tab.js(f"{TOKENS_BOX}.focus()")
    k = session.traces[0].spans[0].end
    await tab.key("Home")
    await tab.key("]")
    await tab.until(f"{TOKEN_FACTS}.includes('call 0')")
    for _ in range(k - session.traces[0].spans[0].start):
        await tab.key("ArrowRight")
    await tab.until(f"{TOKEN_FACTS}.includes('position {k:,}')")
    text = await tab.js(TOKEN_FACTS)
    assert "context" in text
    assert "logprob" not in text
    await tab.click("[aria-label=Tokens] [aria-live] button")
    await tab.until(f"{CHOSEN} === '1' && {TEXT}.includes('after call 0')")
    assert await tab.js(TOKENS_BOX) is None


@pytest.mark.usefixtures("session")
async def test_a_models_text_is_never_markup(tab: Tab) -> None:
    """An end of script, an image with a handler and direction marks are shown as text."""
    await tab.key("]")
    await tab.until(f"{CHOSEN} === '1'")
    text = await tab.js(TEXT)
    assert HOSTILE.split(" \x1b")[0] in text
    assert "\\u{1b}[31m" in text
    assert "\u202e" not in text
    assert await tab.js("document.images.length") == 0
    assert await tab.js("document.scripts.length") == 2


async def test_images_in_messages_are_visible(tab: Tab, tmp_path: Path) -> None:
    """The content security policy allows images that are in the file."""
    script = Script(tmp_path)
    images = (Image(PIXEL), Image("https://example.com/a.png"))
    script.call(encode("see"), "yes", messages=(Message(Role.USER, "see", images=images),))
    file, _ = write_page(script.end())
    await tab.open(file)
    await tab.until("document.images[0]?.naturalWidth === 1")
    assert await tab.js("document.images.length") == 1
    assert "image: https://example.com/a.png" in await tab.js(TEXT)


@pytest.mark.parametrize("pane", ["turns", "tokens with the focus", "tokens at full height"])
async def test_search_finds_a_distant_word(tab: Tab, tmp_path: Path, pane: str) -> None:
    """After `/` and the word, the match is in sight; Escape ends the search."""
    file, session = write_page(long(tmp_path, turns=40, base=500))
    await tab.open(file)
    await tab.until(DRAWN)
    if pane == "tokens with the focus":
        await tab.js(f"{TOKENS_BOX}.focus()")
    elif pane == "tokens at full height":
        await tab.key("v")
    await tab.key("/")
    for letter in LAST_WORD:
        await tab.key(letter)
    found = "[...document.querySelectorAll('output')].map(each => each.innerText.trim()).join('')"
    await tab.until(f"{found} === '1 of 1'")
    if pane != "turns":
        text = tokenizer().decode(encode(LAST_WORD)[:1])
        await tab.until(f"{TOKEN_FACTS}.includes('call {session.calls[-1].number}')")
        assert f"“{text}”" in await tab.js(TOKEN_FACTS)
    else:
        assert await tab.js("document.querySelector('mark').textContent") == LAST_WORD
        assert await tab.js(CHOSEN) == str(session.calls[-1].number)
        assert await tab.js(f"{TURNS}.length") == 1
        panes = "['mark', '.detail .body']"
        edges = f"{panes}.map(name => document.querySelector(name).getBoundingClientRect())"
        in_sight = "mark.top >= body.top && mark.bottom <= body.bottom"
        assert await tab.js(f"(([mark, body]) => {in_sight})({edges})")
    await tab.key("Escape")
    await tab.until(f"{found} === ''")
    assert await tab.js("document.querySelector('mark')") is None


async def test_search_steps_through_matches(tab: Tab, session: ViewedSession) -> None:
    """Enter goes to the next match and Shift+Enter back; after the last one comes the first."""
    answers = {call.number: call.answer for call in session.calls}
    calls = [str(n) for n, answer in answers.items() if answer and "it" in answer.content.lower()]
    assert len(calls) == 2
    for key in ("/", "i", "t"):
        await tab.key(key)
    for call in (*calls, calls[0]):
        await tab.until(f"{CHOSEN} === '{call}'")
        await tab.key("Enter")
    await tab.until(f"{CHOSEN} === '{calls[1]}'")
    back = {"key": "Enter", "text": "\r", "modifiers": 8}
    await tab.send("Input.dispatchKeyEvent", type="keyDown", **back)
    await tab.until(f"{CHOSEN} === '{calls[0]}'")


async def test_the_page_can_be_used_by_keyboard(tab: Tab, session: ViewedSession) -> None:
    """Keys select turns and tokens, hide the details, change the theme and open the help."""
    for keys, chosen in (("jj", "2"), ("k", "1"), ("]", "2"), ("[", "1")):
        for key in keys:
            await tab.key(key)
        await tab.until(f"{CHOSEN} === '{chosen}'")
    await tab.js("document.querySelector('[role=listbox]').focus()")
    await tab.key("ArrowDown")
    await tab.until(f"{CHOSEN} === '2'")
    await tab.key("v")
    await tab.until("getComputedStyle(document.querySelector('.detail')).display === 'none'")
    await tab.js(f"{TOKENS_BOX}.focus()")
    await tab.key("Home")
    await tab.key("]")
    await tab.key("]")
    start = session.traces[0].spans[1].start
    await tab.until(f"{TOKEN_FACTS}.includes('position {start:,}')")
    await tab.key("ArrowRight")
    await tab.until(f"{TOKEN_FACTS}.includes('position {start + 1:,}')")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = await tab.js(ground)
    await tab.key("d")
    assert await tab.js(ground) != light
    await tab.key("?")
    assert await tab.js("document.querySelector('dialog').open")


async def test_a_fork_links_to_its_origin(tab: Tab, session: ViewedSession) -> None:
    """The tree has each trace below its parent, with a link to the last shared token."""
    await tab.click(".list .chips button:nth-child(2)")
    count = "document.querySelectorAll('[role=option]').length"
    await tab.until(f"{count} === {len(session.traces)}")
    shared = session.view.traces[1].shared
    origin = f"{TOKEN_FACTS}.includes('position {shared - 1:,}')"
    await tab.click("[role=option]:nth-child(2) .link")
    await tab.until(origin)
    await tab.js("document.querySelector('[role=listbox]').focus()")
    await tab.key("ArrowDown")
    await tab.until("document.querySelectorAll('[role=option]')[1].ariaSelected === 'true'")
    assert not await tab.js(origin)
    await tab.key("ArrowLeft")
    await tab.until(origin)


def test_traces_are_rebuilt_from_their_parents(tmp_path: Path) -> None:
    """The ids and logprobs equal those of the builder's traces, and whole characters are shown."""
    path = small(tmp_path)
    module = Path(__file__).resolve().parents[2] / "console" / "src" / "lib" / "recording.ts"
    node = Path(sys.executable).with_name("node")
    script = Path(__file__).with_name("decode.mjs")
    packed = tmp_path / "packed"
    packed.write_bytes(pack_recording(path))
    done = run_program(node, script, module, packed, check=True)
    decoded = json.loads(done.stdout)
    traces = view(path).traces
    assert len(decoded) == len(traces)
    for (ids, logprobs, _), trace in zip(decoded, traces, strict=True):
        assert ids == trace.ids.tolist()
        assert logprobs == pytest.approx(trace.logprobs.tolist())
    assert HOSTILE in "".join(decoded[0][2])


@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_the_page_is_accessible(tab: Tab, session: ViewedSession, theme: str) -> None:
    """Turns, traces, each tab, each view and the keys follow every rule of axe."""
    assert session.traces
    light = await tab.js("document.documentElement.dataset.theme") == "light"
    if light is (theme == "dark"):
        await tab.key("d")
    await check_accessibility(tab, "turns")
    for number in range(2, 5):
        await tab.click(f".tabs button:nth-child({number})")
        await check_accessibility(tab, f"tab {number}")
    await tab.click(".list .chips button:nth-child(2)")
    for view_name in ("tokens", "conversation"):
        await tab.key("v")
        await check_accessibility(tab, view_name)
    await tab.key("?")
    await check_accessibility(tab, "keys")


@pytest.mark.parametrize("width", [1400, 1000, 600])
async def test_the_page_fits_windows_of_any_width(
    tab: Tab, session: ViewedSession, width: int
) -> None:
    """Nothing is wider than the window; in a narrow one, the panes are below each other."""
    assert session.traces
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    await tab.send("Emulation.setDeviceMetricsOverride", **size)
    await tab.js("new Promise(requestAnimationFrame)")
    assert await tab.js("document.documentElement.scrollWidth <= innerWidth")
    edges = "['.list', '.detail'].map(pane => document.querySelector(pane).getBoundingClientRect())"
    below = await tab.js(f"(([list, detail]) => detail.top >= list.bottom)({edges})")
    assert below is (width == 600)


async def test_the_page_of_a_damaged_recording_states_the_damage(tab: Tab, tmp_path: Path) -> None:
    """The page has the calls before the damage, and no result."""
    path = small(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])
    session = view_session(path, read(path, salvage=True))
    file = path.with_suffix(".html")
    file.write_text(render_page(session, TokenText(tokenizer())), encoding="utf-8")
    await tab.open(file)
    text = await tab.js("document.querySelector('header').innerText")
    assert "no result" in text
    assert "bytes at the end are an incomplete record" in text
    assert 0 < await tab.js(f"{TURNS}.length") == len(session.calls) < 6


@pytest.mark.parametrize("events", [0, 1])
async def test_a_session_without_calls_has_a_page(tab: Tab, tmp_path: Path, events: int) -> None:
    """A harness that made no request has a page; without events, there is no time to draw."""
    script = Script(tmp_path)
    for _ in range(events):
        script.writer.append_record(RecordedEvent(RecordedEventKind.PAUSED, START))
    file, _ = write_page(script.end())
    await tab.open(file)
    text = await tab.js("document.querySelector('.list').innerText")
    assert ("paused" if events else "no calls") in text
    await asyncio.sleep(0.2)  # size observers run late; `tab` collects their errors
