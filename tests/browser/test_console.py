"""The console in a real Chromium, on a real server with sessions.

``make test-browser`` runs these. The committed files must equal a build of the source.
"""

import asyncio
import filecmp
import gzip
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from browser.busy import HOSTILE, fill
from browser.chromium import Tab
from browser.conftest import act_as_client, check_accessibility, enter_token, set_size
from support.server import TOKENS, RunningServer, encode_result
from tugline.server.store.base import Tx

pytestmark = pytest.mark.browser
ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "console"
BUILT = ROOT / "src" / "tugline" / "server" / "console"
PAGES_BUILT = ROOT / "src" / "tugline" / "recording" / "view" / "pages"


PAGES = ["/", "/sessions", "/failures?cause=engine", "/tasks", "/tasks?by=problem", "/nodes"]
_WCAG = '{runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]}'
ROWS = "[...document.querySelectorAll('tbody tr:not(.gap)')]"


@pytest.fixture
async def server(server: RunningServer) -> RunningServer:
    """A server with sessions in every state."""
    await fill(server)
    return server


async def open_page(tab: Tab, server: RunningServer, path: str) -> None:
    """Load a page and wait until it has table rows or a node."""
    await tab.visit(server.url + path)
    await tab.until("document.querySelector('tbody tr, .node')")


async def test_the_token_of_the_link_is_not_sent(tab: Tab, server: RunningServer) -> None:
    """The token is removed from the address and kept in the tab."""
    await tab.until("document.querySelector('tbody tr')")
    assert await tab.js("location.href") == f"{server.url}/"
    await open_page(tab, server, "/sessions")
    assert await tab.js("history.length") > 1
    assert not [url for url in tab.requests if TOKENS.read in url.partition("#")[0]]


async def test_without_a_token_the_console_asks_for_one(tab: Tab, server: RunningServer) -> None:
    """A wrong token shows the server's error, a valid one opens the page."""
    await tab.js("sessionStorage.clear()")
    await tab.visit(f"{server.url}/sessions#token=wrong")
    await tab.until("document.querySelector('form')?.innerText.includes('token is unknown')")
    await enter_token(tab, TOKENS.read)
    await tab.until("document.querySelector('tbody tr') && !document.querySelector('form')")
    tab.errors.clear()  # Chromium logs each status 401


async def test_a_link_with_a_token_works_in_an_open_tab(tab: Tab, server: RunningServer) -> None:
    """Only the fragment changes, which loads nothing; the token is used and leaves the address."""
    await tab.js("sessionStorage.clear()")
    await tab.visit(f"{server.url}/sessions#token=wrong")
    await tab.until("document.querySelector('form')?.innerText.includes('token is unknown')")
    await tab.js(f"location.hash = '#token={TOKENS.read}'")
    await tab.until("document.querySelector('tbody tr') && !document.querySelector('form')")
    assert await tab.js("location.hash") == ""
    tab.errors.clear()  # Chromium logs each status 401


@pytest.mark.parametrize("width", [1440, 800])
@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_every_page_is_accessible(
    tab: Tab, server: RunningServer, theme: str, width: int
) -> None:
    """Each page follows the rules of WCAG 2.2 and fits, in either theme and width."""
    await set_size(tab, width)
    await tab.until("document.querySelector('nav button')")
    if theme == "dark":
        await tab.js("[...document.querySelectorAll('nav button')].at(-2).click()")
    for path in PAGES:
        await open_page(tab, server, path)
        ground = await tab.js("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(15, 19, 24)") is (theme == "dark")
        await tab.until("!document.querySelector('.skeleton')")
        await check_accessibility(tab, path, _WCAG)


async def test_headings_do_not_overlap_in_narrow_windows(tab: Tab, server: RunningServer) -> None:
    """A narrow window omits columns; the others have their whole heading, and none is cut."""
    over = "[...document.querySelectorAll('th')].filter(th => th.scrollWidth > th.clientWidth + 1)"
    cut = """[...document.querySelectorAll('.scroll, .rows')].filter(
      box => box.scrollWidth > box.clientWidth + 1).map(box => box.innerText)"""
    for width in (1400, 1000, 800, 600):
        await set_size(tab, width, 700)
        for path in (*PAGES, "/groups/fix-add"):
            await open_page(tab, server, path)
            wide = await tab.js(f"{over}.map(th => th.innerText)")
            assert wide == [], (width, path)
            assert width < 800 or await tab.js(cut) == [], (width, path)
            assert await tab.js("document.documentElement.scrollWidth <= innerWidth"), (width, path)


async def test_pass_rates_of_each_problem_over_time(tab: Tab, server: RunningServer) -> None:
    """A problem's submissions are one row, the hardest first, with a line through their rates."""
    node = await server.join("gamma")
    for step, rewards in enumerate(([0.0, 0.0], [1.0, 0.0], [1.0, 1.0])):
        for name, values in (("learned", rewards), ("hopeless", [0.0, 0.0])):
            task = f"{step}-{name}"
            tags = {"set": "problems", "instance": name, "validation": "fine"}
            await server.submit(id=task, samples=2, priority=9, tags=tags)
            for work in (await server.lease(node, 2)).work:
                sample = work.session.sample
                data = encode_result(work.session.id, task, sample, values[sample])
                await server.commit(node, work.session.id, work.session.epoch, data)
    await open_page(tab, server, "/tasks?by=problem&tag=set=problems")
    await tab.until(f"{ROWS}.length === 2 && {ROWS}[1].innerText.includes('%')")
    texts = [" ".join(row.split()) for row in await tab.js(f"{ROWS}.map(row => row.innerText)")]
    assert [text.rpartition(" % ")[0] for text in texts] == [
        "hopeless 3 times 6 0.0 % 0.0 % 0.0", "learned 3 times 6 50.0 % 0.0 % 100"
    ]  # fmt: skip
    assert all(text.endswith("fine now") for text in texts)
    line = f"{ROWS}[1].querySelector('path').getAttribute('d')"
    assert await tab.js(line) == "M0.0 23.0L60.0 12.0L120.0 1.0"
    await tab.js(f"{ROWS}[1].querySelector('a').click()")
    await tab.until("new URLSearchParams(location.search).get('tag') === 'instance=learned'")
    await tab.until(f"{ROWS}.length === 3 && {ROWS}[0].innerText.includes('2-learned')")


async def test_the_overview_has_the_latest_sessions(tab: Tab, server: RunningServer) -> None:
    """Running and finished sessions are ordered by their last change; queued ones are not shown."""
    await tab.until(f"{ROWS}.length === 20")
    assert not await tab.js(f"{ROWS}.some(row => row.innerText.includes('queued'))")
    await server.submit(id="new")
    note = {"status": "run", "now": time.time() + 60, "id": "new-0"}
    change = "UPDATE sessions SET status = :status, updated = :now WHERE id = :id"
    await server.control.database.write(Tx.run, change, **note)
    await tab.until(f"{ROWS}[0].innerText.includes('new-0')", seconds=15)


async def test_the_list_is_updated_live(tab: Tab, server: RunningServer) -> None:
    """A new session appears at the top, or behind a button if the list is scrolled."""
    await open_page(tab, server, "/sessions?sort=newest")
    await tab.until("document.querySelector('.connection .live')")
    await server.submit(id="new")
    await tab.until(f"{ROWS}[0].innerText.includes('new-0')", seconds=3)
    await tab.js("document.querySelector('.rows').scrollTop = 300")
    await tab.until("document.querySelector('.rows').scrollTop === 300")
    await server.submit(id="other")
    await tab.until("document.querySelector('button.new')?.innerText === '1 new'")
    assert not await tab.js("document.body.innerText.includes('other-0')")
    await tab.click("button.new")
    await tab.until(f"{ROWS}[0].innerText.includes('other-0')")


async def test_a_queue_does_not_bury_what_ended(tab: Tab, server: RunningServer) -> None:
    """The list begins with the sessions that changed last; the queue is a filter away."""
    await server.submit(id="many", samples=1000)
    await open_page(tab, server, "/sessions")
    await tab.until(f"{ROWS}.some(row => row.innerText.includes('completed'))")
    assert not await tab.js(f"{ROWS}.some(row => row.innerText.includes('queued'))")
    await tab.click("a[href='/sessions?status=queued']")
    await tab.until(f"{ROWS}[0]?.innerText.includes('many-')")


async def test_a_failed_session_opens_its_log(tab: Tab, server: RunningServer) -> None:
    """Others open the conversation; a chosen tab stays."""
    pressed = "document.querySelector('.tabs [aria-pressed=true]')?.innerText"
    page = await server.ask("GET", "/v1/sessions?status=failed&limit=1")
    failed = page.json["sessions"][0]["id"]
    await tab.visit(f"{server.url}/sessions/{failed}")
    await tab.until(f"{pressed} === 'log'")
    await tab.until("document.querySelector('.body').innerText.includes('2 failed, 5 passed')")
    await tab.click(".tabs button")
    await tab.until(f"{pressed} === 'conversation'")
    await tab.visit(f"{server.url}/sessions/fix-add-0")
    await tab.until(f"{pressed} === 'conversation'")


async def test_a_long_list_has_few_elements(tab: Tab, server: RunningServer) -> None:
    """Rows of ten pages are loaded while scrolling, and only visible ones are elements."""
    await server.submit(id="many", samples=1000)
    await open_page(tab, server, "/sessions?status=queued")
    for _ in range(20):
        await tab.js("document.querySelector('.rows').scrollTop = 1e6")
        if await tab.js("document.querySelector('table').ariaRowCount") == "1002":
            break
        await asyncio.sleep(0.3)
    await tab.until(
        "document.querySelector('[role=status]:last-child').innerText === '1002 sessions'"
    )
    await tab.js("document.querySelector('.rows').scrollTop = 1e6")
    await tab.until(f"{ROWS}.at(-1).innerText.includes('csv-quotes-6')")
    assert await tab.js("document.getElementsByTagName('tr').length") < 60


async def test_filters_are_in_the_address(tab: Tab, server: RunningServer) -> None:
    """Chips, the search of the page and the back button change the address."""
    await open_page(tab, server, "/sessions")
    await tab.click("a[href='/sessions?status=failed']")
    await tab.until(f"{ROWS}.length === 2 && {ROWS}.every(row => row.innerText.includes('failed'))")
    await tab.js("history.back()")
    await tab.until(f"{ROWS}.length > 20")
    await tab.key("/")
    await tab.send("Input.insertText", text="cache-3")
    await tab.until(f"{ROWS}.length === 1 && location.search === '?q=cache-3'")
    assert "lru-cache-3" in await tab.js(f"{ROWS}[0].innerText")


async def test_the_console_can_be_used_by_keyboard(tab: Tab) -> None:
    """The keys `g s`, `j`, `k`, `?`, Ctrl-K and Enter lead to a session."""
    await tab.until("document.querySelector('tbody tr')")
    for key in ("g", "s"):
        await tab.key(key)
    await tab.until("location.pathname === '/sessions' && document.querySelector('tbody tr')")
    second = await tab.js(f"{ROWS}[1].innerText")
    for key in ("j", "j", "j", "k"):
        await tab.key(key)
    await tab.until("document.querySelector('tr.chosen')")
    assert await tab.js("document.querySelector('tr.chosen').innerText") == second
    await tab.key("?")
    assert await tab.js("document.querySelector('dialog[aria-label=Keys]').open")
    await tab.key("Escape")
    await tab.send("Input.dispatchKeyEvent", type="keyDown", key="k", modifiers=2)
    await tab.send("Input.insertText", text="fix-add-3")
    await tab.until("document.querySelector('dialog li.chosen')?.innerText.includes('fix-add-3')")
    await tab.key("Enter")
    await tab.until("location.pathname === '/sessions/fix-add-3'")


async def test_an_agents_text_is_never_markup(tab: Tab, server: RunningServer) -> None:
    """In errors, logs and filters markup is shown as text; direction marks are spelled out."""
    await open_page(tab, server, "/failures?cause=engine")
    await tab.until("document.querySelector('pre')?.innerText.includes('2 failed')")
    for place in ("pre", "section p"):
        text = await tab.js(f"document.querySelector({place!r}).innerText")
        assert "<img src=x onerror=alert(1)><script>alert(2)</script>{@html 3}\\u{202e}" in text
    assert await tab.js("document.querySelector('pre').innerText.startsWith('$ pytest')")
    await tab.visit(f"{server.url}/sessions?task=%3Cimg%20src=x%20onerror=alert(1)%3E")
    await tab.until("document.querySelector('.notice')")
    tab.errors.clear()  # Chromium logs the status 422
    await open_page(tab, server, "/")
    assert await tab.js("document.images.length + document.scripts.length") == 1


async def test_a_node_is_drained_with_a_client_token(tab: Tab, server: RunningServer) -> None:
    """A confirmation comes first; with a read token the console asks for a client token."""

    async def drain() -> None:
        await tab.until("!document.querySelector('form')")
        await tab.click(".node button")
        await tab.click("dialog[open] button.primary")

    await open_page(tab, server, "/nodes")
    await act_as_client(tab, drain)
    await tab.until("document.querySelector('.node').innerText.includes('draining')")


async def test_a_failed_session_is_run_again_with_a_client_token(
    tab: Tab, server: RunningServer
) -> None:
    """After a confirmation the same task is submitted with a new id, and its session is opened."""

    async def run_again() -> None:
        await tab.until("document.querySelector('button.chip')")
        await tab.click("button.chip")
        assert task in await tab.js("document.querySelector('dialog[open]').innerText")
        await tab.click("dialog[open] button.primary")

    before = (await server.ask("GET", "/v1/status")).json["tasks_open"]
    await open_page(tab, server, "/failures")
    task = await tab.js("document.querySelector('button.chip').ariaLabel.split(': ')[1]")
    await act_as_client(tab, run_again)
    await tab.until(f"location.pathname.startsWith('/sessions/{task}-again-')")
    path = await tab.js("location.pathname")
    assert path.endswith("-0")
    again = path.removeprefix("/sessions/").removesuffix("-0")
    old = (await server.ask("GET", f"/v1/tasks/{task}/body")).json
    new = (await server.ask("GET", f"/v1/tasks/{again}/body")).json
    assert new == {**old, "id": again, "samples": 1, "group": {**old["group"], "min_usable": None}}
    assert (await server.ask("GET", "/v1/status")).json["tasks_open"] == before + 1


async def test_sessions_are_found_by_text(tab: Tab, server: RunningServer) -> None:
    """The page and Ctrl-K search the text of sessions; a row shows where it was matched."""
    await server.submit(id="words", instruction="Repair the flux capacitor", samples=2)
    await open_page(tab, server, "/sessions")
    await tab.key("/")
    await tab.send("Input.insertText", text="FLUX cap")
    await tab.until(f"{ROWS}.length === 2 && {ROWS}[0].innerText.includes('words-1')")
    assert "in its task" in await tab.js(f"{ROWS}[0].innerText")
    await open_page(tab, server, "/sessions?q=no%20report")
    assert await tab.js(f"{ROWS}.every(row => row.innerText.includes('in its error'))")
    await tab.send("Input.dispatchKeyEvent", type="keyDown", key="k", modifiers=2)
    await tab.send("Input.insertText", text="capacitor")
    await tab.until("document.querySelectorAll('dialog li a').length === 3")
    matches = await tab.js("document.querySelector('dialog ul').innerText")
    assert matches.count("in its task") == 2


async def test_a_note_is_written_with_a_client_token(tab: Tab, server: RunningServer) -> None:
    """A read token has no editor; open pages are updated, and an empty note is removed.

    It is one scenario: the life of a note.
    """
    edit, editor = ".note button", "document.querySelector('dialog[aria-label=Note]')"
    await tab.visit(f"{server.url}/sessions/fix-add-0")
    await tab.until(f"document.querySelector('{edit}')")
    await tab.until("document.querySelector('.connection .live')")
    path = "/v1/sessions/fix-add-0/note"
    note = {"text": f"ask Ann\n{HOSTILE}"}
    assert (await server.ask("PUT", path, "read", json=note)).status == 403
    assert (await server.ask("PUT", path, "client", json=note)).status == 204
    await tab.until("document.querySelector('.note p')?.innerText.includes('ask Ann')")
    assert "{@html 3}\\u{202e}" in await tab.js("document.querySelector('.note p').innerText")
    assert await tab.js("document.images.length + document.scripts.length") == 1
    assert await tab.js(editor) is None
    await tab.click(edit)
    await tab.until("document.querySelector('form')?.innerText.includes('client token')")
    assert await tab.js(editor) is None
    await enter_token(tab, TOKENS.client)
    await tab.until(editor)
    await tab.click(edit)
    await tab.js("document.querySelector('dialog[open] textarea').select()")
    await tab.send("Input.insertText", text="seen by Bob")
    await tab.click("dialog[open] button.primary")
    await tab.until("document.querySelector('.note p')?.innerText === 'seen by Bob'")
    await open_page(tab, server, "/sessions?q=bob")
    assert await tab.js(f"{ROWS}.length") == 1
    assert await tab.js(f"{ROWS}[0].querySelector('.caption[title]').title") == "seen by Bob"
    assert "in its note" in await tab.js(f"{ROWS}[0].innerText")
    await tab.visit(f"{server.url}/sessions/fix-add-0")
    await tab.until(f"{editor} && document.querySelector('.note p')")
    await tab.click(edit)
    empty = "t.value = '', t.dispatchEvent(new Event('input', {bubbles: true}))"
    await tab.js(f"(t => {{ {empty} }})(document.querySelector('dialog[open] textarea'))")
    await tab.click("dialog[open] button.primary")
    await tab.until("!document.querySelector('.note p')")
    assert (await server.ask("GET", "/v1/sessions/fix-add-0")).json["note"] == ""


async def test_the_frame_is_painted_before_the_script_runs(tab: Tab, server: RunningServer) -> None:
    """The page has a skeleton, which the script replaces."""
    page = (await server.ask("GET", "/", None)).body.decode()
    assert 'class="skeleton"' in page
    await tab.until("document.querySelector('tbody tr')")
    assert await tab.js("document.querySelector('.skeleton')") is None
    assert await tab.js("document.querySelectorAll('nav').length") == 1


async def test_a_lost_connection_is_visible(tab: Tab, server: RunningServer) -> None:
    """The dot shows the loss, while the page keeps its rows."""
    await open_page(tab, server, "/sessions")
    await tab.until("document.querySelector('.connection .live')")
    server.app.waits.stop()
    await tab.until("document.querySelector('.connection .lost')")
    assert await tab.js(f"{ROWS}.length") > 20
    tab.errors.clear()  # Chromium logs each status 503


def test_the_committed_files_are_up_to_date(tmp_path: Path) -> None:
    """`make console` changes nothing, and the files are small."""
    npm = shutil.which("npm")
    assert npm, "the console is built with npm"
    if not (SOURCE / "node_modules").exists():
        subprocess.run([npm, "ci", "--silent"], cwd=SOURCE, check=True, timeout=300)
    for config, committed in (("vite.config.ts", BUILT), ("vite.pages.config.ts", PAGES_BUILT)):
        fresh = tmp_path / config
        build = [npm, "exec", "vite", "build", "--", "--config", config, "--outDir", str(fresh)]
        subprocess.run(build, cwd=SOURCE, check=True, timeout=100)
        names = {file.relative_to(fresh) for file in fresh.rglob("*") if file.is_file()}
        assert names == {
            file.relative_to(committed) for file in committed.rglob("*") if file.is_file()
        }
        assert filecmp.cmpfiles(fresh, committed, map(str, names), shallow=False)[1:] == ([], [])
    sizes = {file.name: len(gzip.compress(file.read_bytes())) for file in BUILT.rglob("*.*")}
    (first,) = re.findall(r'src="/assets/([^"]+)"', (BUILT / "index.html").read_text())
    assert sizes[first] <= 120_000
    assert sum(file.stat().st_size for file in BUILT.rglob("*.*")) <= 1_000_000
