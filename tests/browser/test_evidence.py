"""The console's pages of a session, a group and a comparison, in a real Chromium.

The sessions are recordings that are rebuilt to trajectories and committed as by a node.
"""

import json
import sys
from pathlib import Path
from urllib.parse import parse_qsl

import pytest

from browser.busy import append_log
from browser.chromium import Tab
from browser.conftest import (
    DRAWN,
    TOKEN_FACTS,
    TOKENS_BOX,
    TURNS,
    Evidence,
    check_accessibility,
    open_page,
    set_size,
)
from recording.view.synthetic import (
    HOSTILE,
    LAST_WORD,
    Script,
    add_patch,
    encode,
    long,
    small,
    whole,
)
from support.commands import run_program
from tugline.patch import FileChange, Patch
from tugline.protocol import Work
from tugline.recording.file import read
from tugline.recording.trajectories import rebuild
from tugline.types import Boundary, Cause, Failure, Message, Reward, Role, Status

pytestmark = pytest.mark.browser
DIFF = f"--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-pass\n+{HOSTILE}\n"
REPORT = {"diff": DIFF, "passed": 1, "total": 2, "output": f"FAILED {HOSTILE}\n1 failed"}


async def commit_group(evidence: Evidence) -> list[Work]:
    """Commit a group `mend`: one sample passes, one passes by half, one is timed out."""
    work = await evidence.lease("mend", 3)
    recording = small(evidence.recordings)
    trajectory = rebuild(read(recording))
    seconds = {"init": 1.2, "ready": 0.4, "run": 11.0, "build": 0.1, "eval": 2.5}
    evidence.store_recording(work[0], recording)
    await append_log(
        evidence.server, evidence.node, work[0], f"\x1b[32mworking\x1b[0m\n{HOSTILE}\n"
    )
    reward = Reward(1.0, {"tests": 1.0, "style": 0.5})
    await evidence.commit(work[0], trajectory, reward=reward, report=REPORT, seconds=seconds)
    await evidence.commit(work[1], trajectory, reward=Reward(0.5), report=REPORT, seconds=seconds)
    failure = Failure(Boundary.AGENT, f"agent_s is over: {HOSTILE}", Cause.AGENT_TIMEOUT)
    late = {"status": Status.TIMED_OUT, "reward": Reward(0.0), "failure": failure}
    await evidence.commit(work[2], trajectory, **late)
    return work


async def test_a_session_has_turns_ledger_and_tabs(tab: Tab, evidence: Evidence) -> None:
    """The page of a session also has its outcome, reward, colours and messages."""
    work = await commit_group(evidence)
    name = work[0].session.id
    text = await open_page(
        tab, evidence.server, f"/sessions/{name}", f"{DRAWN} && document.querySelector('.answer')"
    )
    for expected in ("completed", "reward 1", "+0.500 against the group's mean 0.500", "4 to 5"):
        assert expected in text, text
    assert "sampled =" in text
    assert await tab.js(f"{TURNS}.length") == 6
    await tab.key("]")
    await tab.until("location.search.includes('turn=1')")
    text = await tab.js("document.querySelector('.body').innerText")
    assert HOSTILE.split(" \x1b")[0] in text
    assert "\\u{1b}[31m" in text
    await tab.key("t")
    await tab.until("location.search.includes('colour=logprob')")
    await tab.until("document.querySelector('.legend').innerText.includes('p ≥ 0.99')")
    await tab.key("t")
    await tab.until("document.querySelector('.legend').innerText.includes('≤ 0.02 nats')")
    contents = {
        "patch": "+++ b/a.py",
        "tests": "1 failed",
        "log": "working",
        "timings": "waiting for a slot",
        "json": '"sampled"',
    }
    for i, (name, content) in enumerate(contents.items()):
        await tab.click(f".tabs button:nth-child({i + 2})")
        await tab.until(f"location.search.includes('tab={name}')")
        has_text = f"document.querySelector('.body').innerText.includes({json.dumps(content)})"
        await tab.until(has_text)
    await tab.js(f"{TOKENS_BOX}.focus()")
    await tab.key("Home")
    await tab.until(f"{TOKEN_FACTS}.includes('position 0')")


async def test_a_stored_patch_is_on_the_page(tab: Tab, evidence: Evidence) -> None:
    """The stored changes are shown if the evaluator's report has none; else the reason why not."""
    work = await evidence.lease("mend", 2)
    for each, patch in zip(work, (Patch({"b.py": FileChange(b"x = 1\n")}), None), strict=True):
        recording = small(evidence.recordings, f"{each.session.id}-made")
        if patch is not None:
            add_patch(recording, patch)
        trajectory = rebuild(read(recording))
        evidence.store_recording(each, recording)
        await evidence.commit(each, trajectory, reward=Reward(1.0), report={})
    text = "document.querySelector('.body').innerText"
    await open_page(
        tab, evidence.server, "/sessions/mend-0?tab=patch", f"{text}.includes('+x = 1')"
    )
    assert "+++ b/b.py" in await tab.js(text)
    await open_page(
        tab, evidence.server, "/sessions/mend-1?tab=patch", f"{text}.includes('no patch')"
    )


def test_entropy_is_the_mean_surprise_around_a_token() -> None:
    """Up to eight tokens on either side in the same answer are averaged; context has no class."""
    colours = Path(__file__).resolve().parents[2] / "console" / "src" / "lib" / "colours.ts"
    script = Path(__file__).with_name("entropy.mjs")
    node = Path(sys.executable).with_name("node")
    done = run_program(node, script, colours, check=True)
    classes, labels = json.loads(done.stdout)
    bounds = [0.02, 0.1, 0.25, 0.5, 1, 2]
    means = [0.0] * 2 + [1.8 * k / (8 + 1 + min(8, 1 + k)) for k in range(1, 9)]  # from its start
    assert classes[0] == classes[21] == 0
    assert classes[1:11] == [sum(mean > bound for bound in bounds) + 1 for mean in means]
    assert classes[11:21] == [5, *[6] * 9]
    assert classes[22:] == [7, 7]  # two tokens share one mean, 2.65
    assert labels == ["context", *(f"≤ {bound} nats" for bound in bounds), "> 2 nats"]


async def test_turns_are_found_by_their_text(tab: Tab, evidence: Evidence) -> None:
    """Turns with the text are listed, and the first is shown; the address has the search."""
    name = (await commit_group(evidence))[0].session.id
    await open_page(
        tab, evidence.server, f"/sessions/{name}", "document.querySelector('[data-search]')"
    )
    await tab.key("/")
    for letter in LAST_WORD:
        await tab.key(letter)
    await tab.until(f"{TURNS}.length === 1")
    assert await tab.js(f"{TURNS}[0].querySelector('strong').innerText") == "5"
    query = dict(parse_qsl(await tab.js("location.search.slice(1)")))
    assert (query["q"], query["turn"]) == (LAST_WORD, "5")
    assert await tab.js("document.querySelector('mark').innerText") == LAST_WORD
    await tab.key("Escape")
    await tab.until(f"{TURNS}.length === 6")


@pytest.mark.parametrize("width", [1440, 800])
@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_every_page_is_accessible(
    tab: Tab, evidence: Evidence, theme: str, width: int
) -> None:
    """Each page follows every rule of axe and fits, in either theme and width."""
    await commit_group(evidence)
    await set_size(tab, width)
    await tab.js(f"localStorage.setItem('theme', '{theme}')")
    for path in (
        "/sessions/mend-0?turn=1",
        "/sessions/mend-2?colour=advantage&list=traces",
        "/sessions/mend-0?view=tokens",
        *(f"/sessions/mend-0?tab={name}" for name in ("patch", "tests", "log", "timings", "json")),
        "/groups/mend",
        "/compare/mend-0/mend-1",
    ):
        await open_page(tab, evidence.server, path, "document.querySelector('table, canvas')")
        await check_accessibility(tab, path)


async def test_a_session_without_its_recording_shows_ids(tab: Tab, evidence: Evidence) -> None:
    """The ids are those of the trajectory, and the page names what is missing."""
    work = await commit_group(evidence)
    text = await open_page(tab, evidence.server, f"/sessions/{work[2].session.id}", DRAWN)
    assert "agent: agent timeout" in text
    assert "Used for training." in text
    assert "Ids are shown instead of text" in text
    assert f"tugline view {work[2].session.id}" in text


async def test_an_agents_text_is_never_markup(tab: Tab, evidence: Evidence) -> None:
    """An end of script and an image with a handler are shown as text in every tab and page."""
    name = (await commit_group(evidence))[0].session.id
    for tab_name in ("conversation", "patch", "tests", "log"):
        path = f"/sessions/{name}?turn=1&tab={tab_name}"
        has_text = "document.querySelector('.body').textContent.includes('<img src=x')"
        await open_page(tab, evidence.server, path, f"{DRAWN} && {has_text}")
        assert await tab.js("document.images.length") == 0
        assert await tab.js("document.scripts.length") == 1
    for path in ("/groups/mend", "/sessions/mend-2"):
        await open_page(
            tab,
            evidence.server,
            path,
            "document.querySelector('main').textContent.includes('<img src=x')",
        )
        assert await tab.js("document.images.length") == 0


async def test_a_running_session_is_updated_live(tab: Tab, evidence: Evidence) -> None:
    """The calls so far, and then the result, appear without a reload."""
    (work,) = await evidence.lease("live", 1)
    recording = small(evidence.recordings)
    trajectory = rebuild(read(recording))
    name = work.session.id
    await open_page(tab, evidence.server, f"/sessions/{name}", "document.querySelector('.list')")
    assert await tab.js(f"{TURNS}.length") == 0
    evidence.store_recording(work, recording)
    await tab.until(f"{TURNS}.length === 6")
    await evidence.commit(work, trajectory, reward=Reward(0.25))
    await tab.until("document.querySelector('main').innerText.includes('reward 0.25')")


async def test_a_group_compares_its_samples(tab: Tab, evidence: Evidence) -> None:
    """The page has rewards on one axis, advantages, the pass rate and a link to compare two."""
    await commit_group(evidence)
    ready = "document.querySelectorAll('.maps canvas').length === 3"
    text = await open_page(tab, evidence.server, "/groups/mend", ready)
    assert "1 of 3 pass" in text
    assert "(6 to 79 %, Wilson 95 %)" in text
    assert await tab.js("document.querySelectorAll('circle').length") == 3
    cells = await tab.js(
        "[...document.querySelectorAll('tbody tr')].map(r => r.cells[4].innerText)"
    )
    assert cells == ["+0.500", "0.000", "−0.500"]  # noqa: RUF001 - a minus sign
    for name in ("mend-0", "mend-1"):
        await tab.js(f"document.querySelector('[aria-label=\"Compare {name}\"]').click()")
    await tab.until("location.search.includes('mend-1')")
    await tab.js("document.querySelector('button.primary').click()")
    await tab.until("location.pathname === '/compare/mend-0/mend-1'")


def answer(script: Script, ids: list[int], text: str) -> list[int]:
    """Make a call; all ids after it."""
    return whole(script.call(ids, text, messages=(Message(Role.USER, "Go on."),)))


async def test_a_comparison_has_the_first_divergence(tab: Tab, evidence: Evidence) -> None:
    """The first divergent position is shown, and the words that differ behind it are marked."""
    work = await evidence.lease("pair", 2)
    prompt, shared = encode("You mend code."), "I read the file."
    seconds = ("now the agent writes with care", "now the tests fail because the agent reads")
    traces = []
    for each, second in zip(work, seconds, strict=True):
        script = Script(evidence.recordings, name=each.session.id)
        ids = answer(script, prompt, shared)
        traces.append(answer(script, ids, second))
        recording = script.end()
        await evidence.commit(each, rebuild(read(recording)))
        evidence.store_recording(each, recording)
    expected = next(k for k, (a, b) in enumerate(zip(*traces, strict=False)) if a != b)
    path = f"/compare/{work[0].session.id}/{work[1].session.id}"
    text = await open_page(tab, evidence.server, path, "document.querySelector('#divergence')")
    assert await tab.js("document.querySelector('#divergence').innerText") == f"{expected:,}"
    assert "the same" in text
    assert "differ" in text
    marks = await tab.js(
        "[...document.querySelectorAll('.turns mark')].map(m => m.textContent).join('|')"
    )
    assert "writes" in marks
    assert "because" in marks
    assert "now" not in marks


async def test_a_long_session_is_drawn_quickly(
    tab: Tab, evidence: Evidence, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With 250,000 tokens the page has few elements, and End goes to the last token."""
    (work,) = await evidence.lease("long", 1)
    trajectory = rebuild(read(long(tmp_path, length=300)))
    last = len(trajectory.traces[0].ids) - 1
    assert last > 250_000
    await evidence.commit(work, trajectory)
    await open_page(tab, evidence.server, f"/sessions/{work.session.id}?colour=logprob", DRAWN)
    drawn = "performance.getEntriesByName('tokens drawn')[0].startTime"
    resources = "performance.getEntriesByType('resource')"
    loaded = f"{resources}.find(each => each.name.endsWith('/trajectory')).responseEnd"
    after, total = await tab.js(f"{drawn} - {loaded}"), await tab.js(drawn)
    with capsys.disabled():
        sys.stdout.write(
            f"\n{last + 1:,} tokens are drawn {after:.0f} ms after loading (budget 400 ms), "
            f"{total:.0f} ms after the navigation\n"
        )
    assert await tab.js("document.getElementsByTagName('*').length") < 4000
    await tab.js(f"{TOKENS_BOX}.focus()")
    await tab.key("End")
    await tab.until(f"{TOKEN_FACTS}.includes('position {last:,}')")
