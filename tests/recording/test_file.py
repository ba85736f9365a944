"""Recordings keep every call exactly, survive a crash at any byte, and name any other damage."""

import json
import os
import struct
import sys
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from calls import make_call, write_calls
from commands import run_program
from recording import killed_writer
from tugline.errors import CaptureError, EngineError
from tugline.recording.file import MAGIC, Recording, Writer, read
from tugline.recording.records import SampledTokens
from tugline.traces.base import PrefixMerging
from tugline.types import Call, Message, Role, Tool, encode

TESTS = Path(__file__).parents[1]
KILLED = 200


def growing(turns: int) -> list[Call]:
    """A conversation in which every prompt extends the last."""
    calls, ids = [], list(range(500))
    tools = (Tool("read", "reads", {"type": "object"}),)
    for number in range(turns):
        sampled = [number, number + 1, 7]
        said = (Message(Role.USER, f"hello {number}"),)
        parent = number - 1 if number else None
        calls.append(make_call(number, ids, sampled, parent=parent, messages=said, tools=tools))
        ids = [*ids, *sampled, 9, 9, number]
    return calls


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every example of a property test begins with no file."""
    return tmp_path_factory.mktemp("recordings")


@settings(max_examples=150)
@given(data=st.data())
def test_any_torn_tail_is_cut_and_nothing_before_it(folder: Path, data: st.DataObject) -> None:
    """A file cut at any byte yields whole calls only, and can be written on."""
    path = folder / "torn.rec"
    path.unlink(missing_ok=True)
    calls = growing(4)
    ends = write_calls(path, calls)
    cut = data.draw(st.integers(0, ends[-1]))
    path.write_bytes(path.read_bytes()[:cut])
    whole = sum(end <= cut for end in ends[1:])
    recording = read(path)
    assert len(recording.calls) == whole
    assert recording.torn_bytes == cut - max(end for end in (0, *ends) if end <= cut)
    write_calls(path, calls[whole:])
    assert [encode(item) for item in read(path).calls] == [encode(item) for item in calls]


def test_blocks_that_a_power_cut_left_empty_are_a_torn_tail(tmp_path: Path) -> None:
    """Zeros from a sector's start to the end are a power cut's; zeros from elsewhere are damage."""
    path = tmp_path / "a.rec"
    large = make_call(1, list(range(900, 0, -1)), list(os.urandom(3000)))
    ends = write_calls(path, [*growing(1), large])
    whole = path.read_bytes()
    sector = len(whole) // 512 * 512 - 512
    for left, calls in ((whole + bytes(4096), 2), (whole[:sector] + bytes(len(whole) - sector), 1)):
        path.write_bytes(left)
        recording = read(path)
        assert (len(recording.calls), recording.torn_bytes) == (calls, len(left) - ends[calls])
    path.write_bytes(whole[:-8] + bytes(8))
    with pytest.raises(CaptureError, match=f"offset {ends[1]}: the checksum"):
        read(path)


@settings(max_examples=100)
@given(data=st.data())
def test_any_flipped_bit_names_the_file_and_the_offset(folder: Path, data: st.DataObject) -> None:
    """Damage anywhere is an error, never silently fewer calls; what is before can be salvaged."""
    path = folder / "flip.rec"
    path.unlink(missing_ok=True)
    starts = write_calls(path, growing(3))[:-1]
    whole = bytearray(path.read_bytes())
    place = data.draw(st.integers(len(MAGIC), len(whole) - 1))
    whole[place] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(whole)
    good = sum(start <= place for start in starts) - 1
    with pytest.raises(CaptureError, match=rf"flip\.rec is damaged at offset {starts[good]}: "):
        read(path)
    recording = read(path, salvage=True)
    assert len(recording.calls) == good
    assert f"offset {starts[good]}" in recording.damage
    with pytest.raises(CaptureError, match="damaged"):
        Writer(path)


def test_an_absurd_length_is_refused(tmp_path: Path) -> None:
    """A record that claims 4 GiB is not waited for, however well its head is formed."""
    path = tmp_path / "a.rec"
    start = write_calls(path, growing(3))[1]
    data = bytearray(path.read_bytes())
    head = struct.pack("<II", 2**32 - 1, 0)
    data[start : start + 12] = head + struct.pack("<I", zlib.crc32(head))
    path.write_bytes(data)
    with pytest.raises(CaptureError, match=rf"offset {start}: a record of 4294967295 bytes"):
        read(path)
    assert len(read(path, salvage=True).calls) == 1


def test_a_record_of_another_make_is_refused(tmp_path: Path) -> None:
    """What is whole but makes no sense names its offset, too."""
    path = tmp_path / "a.rec"
    end = write_calls(path, growing(3))[-1]
    packed = zstandard.ZstdCompressor().compress(b"\x81\xa4type\xa3odd")
    head = struct.pack("<II", len(packed), zlib.crc32(packed))
    record = head + struct.pack("<I", zlib.crc32(head)) + packed
    path.write_bytes(path.read_bytes() + MAGIC + record)
    with pytest.raises(CaptureError, match=f"offset {end + len(MAGIC)} that cannot be read"):
        read(path)


@pytest.mark.parametrize(
    ("content", "looks"),
    [
        (b"not a recording at all", "is not a recording: it begins with"),
        (b'{"calls": []}', "is not a recording: it begins with"),
        (zstandard.ZstdCompressor().compress(b"x"), "is not a recording: it begins with"),
        (b"TUGREC\x00\x63rest", r"has version 99 .*only 4 can be read"),
        (b"TUGREC\x00\x03rest", r"has version 3 .*only 4 can be read"),
    ],
)
def test_a_foreign_file_is_refused(tmp_path: Path, content: bytes, looks: str) -> None:
    """The error has its first bytes, or its version, and there is nothing to salvage."""
    path = tmp_path / "a.rec"
    path.write_bytes(content)
    for salvage in (False, True):
        with pytest.raises(CaptureError, match=rf"a\.rec .*{looks}"):
            read(path, salvage=salvage)


def test_a_missing_file_is_one_clear_error(tmp_path: Path) -> None:
    """The error says which file."""
    with pytest.raises(CaptureError, match=r"cannot read recording .*gone\.rec"):
        read(tmp_path / "gone.rec")


def test_a_full_disk_leaves_what_was_acknowledged(tmp_path: Path) -> None:
    """A record that cannot be written is an error that says so, and nothing before it is hurt."""
    path = tmp_path / "a.rec"
    first, second, third = growing(3)
    with Writer(path) as writer:
        writer.append(first)
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, writer._fd)
        os.close(full)
        with pytest.raises(CaptureError, match="free some space"):
            writer.append(second)
        with pytest.raises(CaptureError, match="closed"):
            writer.append(third)
    assert len(read(path).calls) == 1


def test_closing_waits_for_the_flush_of_another_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that ends while its recording is flushed takes no file away from the flush."""
    writer = Writer(tmp_path / "s.rec")
    reached, may_go_on = threading.Event(), threading.Event()
    flush = os.fdatasync

    def flush_slowly(number: int) -> None:
        reached.set()
        assert may_go_on.wait(20)
        flush(number)

    monkeypatch.setattr(os, "fdatasync", flush_slowly)
    with ThreadPoolExecutor(2) as threads:
        flushed = threads.submit(writer.flush)
        assert reached.wait(20)
        closed = threads.submit(writer.close)
        with pytest.raises(TimeoutError):
            closed.result(0.2)
        may_go_on.set()
        flushed.result(20)
        closed.result(20)
    assert writer.closed


def test_tokens_without_logprobs_are_refused() -> None:
    """An engine that leaves logprobs out is told so at the first token (I2)."""
    with pytest.raises(EngineError, match="2 token ids but 0 logprobs"):
        SampledTokens().add([1, 1], [], 0)


def test_two_hundred_killed_writers_lose_no_answered_call(tmp_path: Path) -> None:
    """What was answered is there exactly, the ledger balances, and the file can be gone on with."""
    program = ("-m", "recording.killed_writer", tmp_path, KILLED)
    done = run_program(sys.executable, *program, cwd=TESTS, check=True)
    written = [killed_writer.conversation(seed) for seed in range(4)]
    encoded = [[encode(call) for call in calls] for calls in written]
    fates = json.loads(done.stdout)
    in_the_middle = 0
    for name, which, answered, killed in fates:
        path = tmp_path / name
        found = read(path) if path.exists() else Recording()  # killed before it opened the file
        calls = written[which]
        assert [encode(call) for call in found.calls] == encoded[which][: len(found.calls)]
        assert answered <= len(found.calls) <= answered + 1, name
        ledger = PrefixMerging().build(found.calls).ledger
        assert ledger.balanced
        assert ledger.sampled == sum(len(call.sampled_ids) for call in calls[: len(found.calls)])
        in_the_middle += killed and 0 < answered < len(calls)
        if found.calls and len(found.calls) < len(calls):
            with Writer(path) as writer:
                writer.append(calls[len(found.calls)])
            assert len(read(path).calls) == len(found.calls) + 1
    assert len(fates) == KILLED
    assert in_the_middle > KILLED // 2, "most were killed while they wrote"
