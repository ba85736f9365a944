from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import structlog
from msgspec.structs import replace

from support.deployment import CALL, deploy, script_task
from tugline import log
from tugline.server.store import sessions
from tugline.web.serve import serve

AGENT = f"""{CALL}
for key, body in (os.environ['OPENAI_API_KEY'], b'{{}}'), ('wrong', body):
    try:
        r.urlopen(r.Request(url, body, {{'authorization': 'Bearer ' + key}}))
    except OSError:
        pass
"""
Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def lines(tmp_path: Path) -> Iterator[Lines]:
    """Reads what is logged from here on."""
    path = tmp_path / "log.jsonl"
    log.configure(level="info", path=path)
    yield lambda: [json.loads(line) for line in path.read_text().splitlines()]
    structlog.get_config()["logger_factory"]._file.close()
    structlog.reset_defaults()
    for handler in list(logging.getLogger().handlers):
        if isinstance(handler, log._LibraryHandler):
            logging.getLogger().removeHandler(handler)


async def test_events_of_a_session_have_its_ids(lines: Lines, tmp_path: Path) -> None:
    """Events of the node, its rollout and the gateway have node, task, session and epoch."""
    async with deploy(tmp_path) as deployment:
        await deployment.run(replace(script_task("t", AGENT), files={}))
        epoch = (await deployment.control.database.read(sessions.get, "t-0")).epoch
    log.get("test").info("after")
    events = lines()
    after = events.pop()
    assert after["event"] == "after"
    assert not {"task", "session", "node"} & after.keys()
    assert [line["event"] for line in events].count("refused") == 2, "the second opens nothing"
    expected = ["refused", "evaluation repeated", "stage failed", "ended"]
    ours = [
        line for line in events if line["event"] in expected and line.get("error") != "Unauthorized"
    ]
    assert [line["event"] for line in ours] == expected
    for line in ours:
        named = (line["task"], line["session"], line["epoch"], line["node"])
        assert named == ("t", "t-0", epoch, "here"), line


async def test_bound_ids_reach_tasks_and_threads(lines: Lines) -> None:
    """Tasks and threads that are started inside the block have the ids; later events do not."""
    say = log.get("test").info

    async def script_task() -> None:
        say("task")

    with log.about(session="s"):
        inside = asyncio.create_task(script_task())
        await asyncio.to_thread(say, "thread")
    await inside
    say("outside")
    by_event = {line["event"]: line.get("session") for line in lines()}
    assert by_event == {"thread": "s", "task": "s", "outside": None}


async def test_records_of_libraries_are_converted(lines: Lines) -> None:
    """An exception is logged with its places but without its text, a warning formatted."""

    async def app(_scope: dict[str, Any], _receive: Any, _send: Any) -> None:
        raise ZeroDivisionError("walrus")

    async with serve(app) as url, aiohttp.ClientSession() as http, http.get(url) as answer:
        assert answer.status == 500
    logging.getLogger("other.part").warning("it %s", "broke")
    loop = asyncio.get_running_loop()
    error = RuntimeError("walrus")
    loop.call_exception_handler({"message": "lost", "exception": error, "future": error})
    failed, server, warned, lost = lines()
    assert (failed["part"], failed["level"]) == ("web", "error")
    assert "test_log.py" in failed["exception"]
    assert failed["exception"].endswith("ZeroDivisionError")
    assert (server["part"], server["level"]) == ("uvicorn.error", "error")
    assert (warned["part"], warned["level"], warned["event"]) == (
        ("other.part", "warning", "it broke")
    )
    assert (lost["part"], lost["event"], lost["exception"]) == ("asyncio", "lost", "RuntimeError")


def test_errors_are_described_without_their_texts() -> None:
    """Causes, contexts and groups have their types and source lines."""
    cause = KeyError("walrus")
    error = ExceptionGroup("walrus", [ValueError("walrus"), cause])
    error.__cause__ = cause
    text = log.describe_error(error)
    assert "walrus" not in text
    names = ["KeyError", "which led to:", "ExceptionGroup", "ValueError", "of:", "KeyError"]
    at = 0
    for name in names:
        at = text.index(name, at)


def test_no_error_is_logged_with_its_local_variables() -> None:
    """No source logs ``exc_info``, for which `structlog` would print local variables."""
    for path in (Path(__file__).parents[1] / "src").rglob("*.py"):
        found = re.findall(r"exc_info=|_log\.exception\(", path.read_text())
        assert not found, f"{path}: use log.describe_error"


def test_colours_need_a_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file or a pipe behind stderr gets no escape sequences."""
    with (tmp_path / "err").open("w") as file:
        monkeypatch.setattr(sys, "stderr", file)
        log.configure()
        log.get("x").warning("plain", key="value")
    text = (tmp_path / "err").read_text()
    assert "plain" in text
    assert "\x1b" not in text


def test_events_go_to_the_current_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that was stderr before and is closed now breaks nothing."""
    first, second = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", first)
    log.configure()
    monkeypatch.setattr(sys, "stderr", second)
    first.close()
    log.get("test").warning("event")
    assert "event" in second.getvalue()


def test_a_full_log_is_rotated(tmp_path: Path) -> None:
    """The last three files are kept; no event is lost or split, also if two processes write."""
    path = tmp_path / "log.jsonl"
    files = [log.RotatingFile(path, max_bytes=1000) for _ in range(2)]
    for number in range(400):
        file = files[number % 2]
        file.write(json.dumps({"number": number}) + "\n")
        file.flush()
    for file in files:
        file.close()
    names = sorted(each.name for each in tmp_path.iterdir())
    assert names == ["log.jsonl", "log.jsonl.1", "log.jsonl.2", "log.jsonl.3"]
    assert all(each.stat().st_size < 1100 for each in tmp_path.iterdir())
    lines = [line for name in (*names[:0:-1], names[0]) for line in _read_lines(tmp_path / name)]
    numbers = [json.loads(line)["number"] for line in lines]
    assert sorted(numbers) == list(range(min(numbers), 400))


def test_a_log_that_cannot_be_rotated_goes_on(tmp_path: Path) -> None:
    """A log whose folder is lost raises no error."""
    folder = tmp_path / "logs"
    folder.mkdir()
    file = log.RotatingFile(folder / "log.jsonl", max_bytes=10)
    shutil.rmtree(folder)
    for _ in range(5):
        file.write("an event\n")
        file.flush()
    file.close()


def _read_lines(path: Path) -> list[str]:
    return path.read_text().splitlines()
