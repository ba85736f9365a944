"""Recordings keep every call exactly, survive a crash at any byte, and report other damage."""

import errno
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

from recording import killed_writer
from support.calls import make_call, write_calls
from support.commands import run_program
from tugline.errors import CaptureError, EngineError
from tugline.recording.file import MAGIC, Recording, Writer, read
from tugline.recording.records import SampledTokens
from tugline.traces.base import PrefixMerging
from tugline.types import encode

TESTS = Path(__file__).parents[1]
KILLED = 200
CALLS = killed_writer.conversation(0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the examples of property tests."""
    return tmp_path_factory.mktemp("recordings")


@settings(max_examples=150)
@given(data=st.data())
def test_a_torn_tail_is_cut_and_nothing_before_it(folder: Path, data: st.DataObject) -> None:
    """A file that ends at any byte yields complete calls only, and can be continued."""
    path = folder / "torn.rec"
    path.unlink(missing_ok=True)
    calls = CALLS[:4]
    ends = write_calls(path, calls)
    cut = data.draw(st.integers(0, ends[-1]))
    path.write_bytes(path.read_bytes()[:cut])
    whole = sum(end <= cut for end in ends[1:])
    recording = read(path)
    assert len(recording.calls) == whole
    assert recording.torn_bytes == cut - max(end for end in (0, *ends) if end <= cut)
    write_calls(path, calls[whole:])
    assert [encode(item) for item in read(path).calls] == [encode(item) for item in calls]


def test_empty_blocks_after_a_power_cut_are_a_torn_tail(tmp_path: Path) -> None:
    """Zeros from the start of a sector to the end are a torn tail; other zeros are damage."""
    path = tmp_path / "a.rec"
    large = make_call(1, list(range(900, 0, -1)), list(os.urandom(3000)))
    ends = write_calls(path, [CALLS[0], large])
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
def test_the_error_of_a_flipped_bit_has_file_and_offset(folder: Path, data: st.DataObject) -> None:
    """Damage is never silently fewer calls; the calls before it can be salvaged."""
    path = folder / "flip.rec"
    path.unlink(missing_ok=True)
    starts = write_calls(path, CALLS[:3])[:-1]
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
    """A record of 4 GiB is damage and no torn tail, even if its head has a valid checksum."""
    path = tmp_path / "a.rec"
    start = write_calls(path, CALLS[:3])[1]
    data = bytearray(path.read_bytes())
    head = struct.pack("<II", 2**32 - 1, 0)
    data[start : start + 12] = head + struct.pack("<I", zlib.crc32(head))
    path.write_bytes(data)
    with pytest.raises(CaptureError, match=rf"offset {start}: a record claims 4294967295 bytes"):
        read(path)
    assert len(read(path, salvage=True).calls) == 1


def test_an_unknown_record_is_refused(tmp_path: Path) -> None:
    """The error of a complete record of an unknown type has its offset, too."""
    path = tmp_path / "a.rec"
    end = write_calls(path, CALLS[:3])[-1]
    packed = zstandard.ZstdCompressor().compress(b"\x81\xa4type\xa3odd")
    head = struct.pack("<II", len(packed), zlib.crc32(packed))
    record = head + struct.pack("<I", zlib.crc32(head)) + packed
    path.write_bytes(path.read_bytes() + MAGIC + record)
    with pytest.raises(CaptureError, match=f"offset {end + len(MAGIC)} that cannot be decoded"):
        read(path)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"not a recording at all", "is not a recording: it begins with"),
        (b'{"calls": []}', "is not a recording: it begins with"),
        (zstandard.ZstdCompressor().compress(b"x"), "is not a recording: it begins with"),
        (b"TUGREC\x00\x63rest", r"has version 99 .*this release reads version 4"),
        (b"TUGREC\x00\x03rest", r"has version 3 .*this release reads version 4"),
    ],
)
def test_a_foreign_file_is_refused(tmp_path: Path, content: bytes, error: str) -> None:
    """The error has its first bytes or its version; nothing is salvaged."""
    path = tmp_path / "a.rec"
    path.write_bytes(content)
    for salvage in (False, True):
        with pytest.raises(CaptureError, match=rf"a\.rec .*{error}"):
            read(path, salvage=salvage)


def test_the_error_of_a_missing_file_has_its_name(tmp_path: Path) -> None:
    """The error names the file, as that of any file that cannot be read."""
    with pytest.raises(CaptureError, match=r"cannot read recording .*gone\.rec"):
        read(tmp_path / "gone.rec")


def test_a_full_disk_keeps_earlier_calls(tmp_path: Path) -> None:
    """A record that cannot be written is an error, and closes the file."""
    path = tmp_path / "a.rec"
    first, second, third = CALLS[:3]
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


def test_a_failed_flush_closes_no_descriptor_under_a_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of a record must not go to another file that gets the descriptor's number."""
    writer = Writer(tmp_path / "s.rec")
    writing, may_write = threading.Event(), threading.Event()
    failing = threading.Event()
    pwrite = os.pwrite

    def write_slowly(number: int, data: bytes, at: int) -> int:
        writing.set()
        assert may_write.wait(20)
        os.fstat(number)  # still open
        return pwrite(number, data[:7], at)

    def fail(_number: int) -> None:
        failing.set()
        raise OSError(errno.EIO, "the disk fails")

    with ThreadPoolExecutor(2) as threads:
        monkeypatch.setattr(os, "fdatasync", fail)
        flushed = None
        monkeypatch.setattr(os, "pwrite", write_slowly)
        appended = threads.submit(writer.append, make_call(0, [1], [2]))
        assert writing.wait(20)
        flushed = threads.submit(writer.flush)
        failing.wait(0.2)
        may_write.set()
        appended.result(20)
        with pytest.raises(CaptureError, match="the disk fails"):
            flushed.result(20)
    monkeypatch.undo()
    assert writer.closed
    assert len(read(tmp_path / "s.rec").calls) == 1
    with pytest.raises(CaptureError, match="is closed"):
        writer.append(make_call(1, [1], [2]))


def test_closing_waits_for_the_flush_of_another_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is not closed while another thread syncs it."""
    writer = Writer(tmp_path / "s.rec")
    reached, may_continue = threading.Event(), threading.Event()
    flush = os.fdatasync

    def flush_slowly(number: int) -> None:
        reached.set()
        assert may_continue.wait(20)
        flush(number)

    monkeypatch.setattr(os, "fdatasync", flush_slowly)
    with ThreadPoolExecutor(2) as threads:
        flushed = threads.submit(writer.flush)
        assert reached.wait(20)
        closed = threads.submit(writer.close)
        with pytest.raises(TimeoutError):
            closed.result(0.2)
        may_continue.set()
        flushed.result(20)
        closed.result(20)
    assert writer.closed


def test_tokens_without_logprobs_are_refused() -> None:
    """An engine that omits logprobs is an error at the first token (I2)."""
    with pytest.raises(EngineError, match="2 token ids but 0 logprobs"):
        SampledTokens().add([1, 1], [], 0)


def test_two_hundred_killed_writers_lose_no_written_call(tmp_path: Path) -> None:
    """Written calls are read exactly, their ledger balances, and the file can be continued."""
    program = ("-m", "recording.killed_writer", tmp_path, KILLED)
    done = run_program(sys.executable, *program, cwd=TESTS, check=True)
    conversations = [killed_writer.conversation(seed) for seed in range(4)]
    encoded = [[encode(call) for call in calls] for calls in conversations]
    results = json.loads(done.stdout)
    in_the_middle = 0
    for name, index, written, killed in results:
        path = tmp_path / name
        recording = read(path) if path.exists() else Recording()  # killed before it was opened
        calls, count = conversations[index], len(recording.calls)
        assert [encode(call) for call in recording.calls] == encoded[index][:count]
        assert written <= count <= written + 1, name
        ledger = PrefixMerging().build(recording.calls).ledger
        assert ledger.balanced
        assert ledger.sampled == sum(len(call.sampled_ids) for call in calls[:count])
        in_the_middle += killed and 0 < written < len(calls)
        if 0 < count < len(calls):
            write_calls(path, calls[count : count + 1])
            assert len(read(path).calls) == count + 1
    assert len(results) == KILLED
    assert in_the_middle > KILLED // 2, "most were killed while they wrote"
