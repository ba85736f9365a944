"""The format is what docs/format.md says: a reader that knows nothing of Tugline reads it."""

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from recording.killed_writer import conversation
from rig import ASK, in_turn, rig
from tugline.recording.file import MAGIC, VERSION, Writer, read
from tugline.recording.records import RecordedEvent, RecordedEventKind
from tugline.types import Call, Image, Message, Role

ROOT = Path(__file__).parents[2]
READER = ROOT / "examples" / "read_recording.py"


def read_by_example(path: Path) -> list[dict[str, Any]]:
    """What the example says of a recording."""
    done = subprocess.run(
        [sys.executable, str(READER), str(path), "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def ours(call: Call) -> dict[str, Any]:
    """A call as JSON has it."""
    plain = msgspec.to_builtins(call, builtin_types=(bytes,), enc_hook=np.ndarray.tolist)
    as_json: dict[str, Any] = json.loads(json.dumps(plain))
    return as_json


async def test_the_example_reads_what_a_gateway_wrote(tmp_path: Path) -> None:
    """A real session of three turns, one of them a fork."""
    async with rig(tmp_path, in_turn("one", "two", "three")) as it:
        first = await it.ask()
        more = [*ASK, {"role": "assistant", "content": first["content"]}]
        await it.ask([*more, {"role": "user", "content": "And then?"}])
        await it.ask([{"role": "user", "content": "Something \u00e4lse entirely."}])
    path = tmp_path / "s1.0.rec"
    calls = read(path).calls
    assert len(calls) == 3
    assert read_by_example(path) == [ours(call) for call in calls]


def test_the_example_reads_everything_the_format_has(tmp_path: Path) -> None:
    """Forks, pictures, events, sections and a torn tail."""
    path, calls = tmp_path / "a.rec", conversation(1)[:60]
    url = "data:image/png;base64," + "QUJD" * 500
    for number in (20, 40):
        seen = Message(Role.USER, "look", images=(Image(url, 1, "high"),))
        calls[number] = msgspec.structs.replace(calls[number], messages=(seen,))
    for part in (calls[:30], calls[30:]):
        with Writer(path) as writer:
            for call in part:
                writer.append(call)
                writer.append_record(
                    RecordedEvent(RecordedEventKind.REPAIRED, 1.0, call.number, "{}")
                )
    path.write_bytes(path.read_bytes() + b"torn")
    assert read_by_example(path) == [ours(call) for call in calls]


def test_the_example_owes_nothing_to_the_package() -> None:
    """It imports none of ours and is short enough to be read."""
    source = READER.read_text(encoding="utf-8")
    tree = ast.walk(ast.parse(source))
    imported = {one.module for one in tree if isinstance(one, ast.ImportFrom)}
    assert not any("tugline" in str(name) for name in imported)
    assert "import tugline" not in source
    assert len(source.splitlines()) < 85


def test_the_page_tells_this_version() -> None:
    """docs/format.md has the magic that is written, and every kind of event."""
    page = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")
    assert f"version {VERSION}" in page
    assert MAGIC.hex(" ") in page
    assert [kind for kind in RecordedEventKind if f"`{kind}`" not in page] == []
