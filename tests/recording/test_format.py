"""The file format is that of docs/format.md, and an independent reader can read it."""

import json
import re
import sys
from pathlib import Path

import msgspec
import numpy as np

from recording.killed_writer import conversation
from support.calls import make_header
from support.commands import run_program
from tugline.recording.file import MAGIC, VERSION, Writer
from tugline.recording.records import RecordedEvent, RecordedEventKind
from tugline.types import Image, Message, Role

ROOT = Path(__file__).parents[2]
READER = ROOT / "examples" / "read_recording.py"


def test_the_example_reads_the_whole_format(tmp_path: Path) -> None:
    """The example reads a header, forks, images, events, sections and a torn tail."""
    path, calls = tmp_path / "a.rec", conversation(1)[:60]
    url = "data:image/png;base64," + "QUJD" * 500
    for number in (20, 40):
        message = Message(Role.USER, "look", images=(Image(url, 1, "high"),))
        calls[number] = msgspec.structs.replace(calls[number], messages=(message,))
    for part in (calls[:30], calls[30:]):
        with Writer(path, make_header()) as writer:
            for call in part:
                writer.append(call)
                writer.append_record(
                    RecordedEvent(RecordedEventKind.REPAIRED, 1.0, call.number, "{}")
                )
    path.write_bytes(path.read_bytes() + b"torn")
    done = run_program(sys.executable, READER, path, "--json", check=True)
    plain = msgspec.to_builtins(calls, builtin_types=(bytes,), enc_hook=np.ndarray.tolist)
    assert [json.loads(line) for line in done.stdout.splitlines()] == json.loads(json.dumps(plain))


def test_the_example_does_not_import_the_package() -> None:
    """The example imports nothing of Tugline, and is short enough to be read."""
    source = READER.read_text(encoding="utf-8")
    assert not re.search(r"^ *(import|from) tugline", source, re.MULTILINE)
    assert len(source.splitlines()) < 85


def test_the_page_describes_this_version() -> None:
    """docs/format.md has the version, the magic bytes and every kind of event."""
    page = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")
    assert f"version {VERSION}" in page
    assert MAGIC.hex(" ") in page
    assert [kind for kind in RecordedEventKind if f"`{kind}`" not in page] == []
