"""Recordings keep every call exactly, survive a crash at any byte, and name any other damage."""

import os
import struct
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from calls import make_call
from tugline.errors import CaptureError, EngineError
from tugline.recording.file import MAGIC, Writer, read
from tugline.recording.records import SampledTokens
from tugline.types import Call, Message, Role, Tool, VersionSpan, encode


def call(number: int, prompt: list[int], sampled: list[int]) -> Call:
    """A call as the gateway writes it."""
    return make_call(
        number,
        prompt,
        sampled,
        parent=number - 1 if number else None,
        messages=(Message(Role.USER, f"hello {number}"),),
        tools=(Tool("read", "reads", {"type": "object"}),),
        logprobs=-np.ones(len(sampled), np.float32),
    )


def growing(turns: int) -> list[Call]:
    """A conversation in which every prompt extends the last."""
    calls, ids = [], list(range(500))
    for number in range(turns):
        sampled = [number, number + 1, 7]
        calls.append(call(number, ids, sampled))
        ids = [*ids, *sampled, 9, 9, number]
    return calls


def test_a_turn_costs_what_is_new(tmp_path: Path) -> None:
    """The last of forty turns takes no more bytes than the second (I7)."""
    with Writer(tmp_path / "a.rec") as writer:
        sizes = [writer.append(item) for item in growing(40)]
    assert max(sizes[2:]) < 1.2 * min(sizes[2:])
    assert max(sizes[2:]) < 300


@settings(max_examples=150)
@given(data=st.data())
def test_any_torn_tail_is_cut_and_nothing_before_it(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """A file cut at any byte yields whole calls only, and can be written on."""
    path = tmp_path_factory.getbasetemp() / "torn.rec"
    path.unlink(missing_ok=True)
    calls = growing(4)
    ends = [len(MAGIC)]
    with Writer(path) as writer:
        for item in calls:
            ends.append(ends[-1] + writer.append(item))
    cut = data.draw(st.integers(0, ends[-1]))
    path.write_bytes(path.read_bytes()[:cut])
    whole = sum(end <= cut for end in ends[1:])
    recording = read(path)
    assert len(recording.calls) == whole
    assert recording.torn_bytes == cut - max(end for end in (0, *ends) if end <= cut)
    with Writer(path) as writer:
        for item in calls[whole:]:
            writer.append(item)
    assert [encode(item) for item in read(path).calls] == [encode(item) for item in calls]


def test_unfilled_blocks_at_the_end_are_a_torn_tail(tmp_path: Path) -> None:
    """A file system that lost its last blocks to a power cut leaves zeros; they are dropped."""
    path = tmp_path / "a.rec"
    with Writer(path) as writer:
        writer.append(growing(1)[0])
    path.write_bytes(path.read_bytes() + bytes(4096))
    assert len(read(path).calls) == 1


def test_a_record_whose_blocks_were_not_all_filled_is_a_torn_tail(tmp_path: Path) -> None:
    """Zeros from a sector's start to the end are a power cut's; zeros from elsewhere are damage."""
    path = tmp_path / "a.rec"
    with Writer(path) as writer:
        first = len(MAGIC) + writer.append(growing(1)[0])
        writer.append(call(1, list(range(900, 0, -1)), list(os.urandom(3000))))
    whole = path.read_bytes()
    sector = len(whole) // 512 * 512 - 512
    path.write_bytes(whole[:sector] + bytes(len(whole) - sector))
    assert (len(read(path).calls), read(path).torn_bytes) == (1, len(whole) - first)
    path.write_bytes(whole[:-8] + bytes(8))
    with pytest.raises(CaptureError, match=f"offset {first}: the checksum"):
        read(path)


def written(path: Path, turns: int = 3) -> list[int]:
    """Write a recording; returns the offset of each record."""
    starts = [len(MAGIC)]
    with Writer(path) as writer:
        for item in growing(turns):
            starts.append(starts[-1] + writer.append(item))
    return starts[:-1]


@settings(max_examples=100)
@given(data=st.data())
def test_any_flipped_bit_names_the_file_and_the_offset(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Damage anywhere is an error, never silently fewer calls; what is before can be salvaged."""
    path = tmp_path_factory.getbasetemp() / "flip.rec"
    path.unlink(missing_ok=True)
    starts = written(path)
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
    starts = written(path)
    data = bytearray(path.read_bytes())
    head = struct.pack("<II", 2**32 - 1, 0)
    data[starts[1] : starts[1] + 12] = head + struct.pack("<I", zlib.crc32(head))
    path.write_bytes(data)
    with pytest.raises(CaptureError, match=rf"offset {starts[1]}: a record of 4294967295 bytes"):
        read(path)
    assert len(read(path, salvage=True).calls) == 1


def test_a_record_of_another_make_is_refused(tmp_path: Path) -> None:
    """What is whole but makes no sense names its offset, too."""
    path = tmp_path / "a.rec"
    start = path.stat().st_size if written(path) and path.exists() else 0
    packed = zstandard.ZstdCompressor().compress(b"\x81\xa4type\xa3odd")
    head = struct.pack("<II", len(packed), zlib.crc32(packed))
    record = head + struct.pack("<I", zlib.crc32(head)) + packed
    path.write_bytes(path.read_bytes() + MAGIC + record)
    with pytest.raises(CaptureError, match=f"offset {start + len(MAGIC)} that cannot be read"):
        read(path)


@pytest.mark.parametrize(
    ("content", "looks"),
    [
        (b"not a recording at all", "is no recording: it begins with"),
        (b'{"calls": []}', "is no recording: it begins with"),
        (zstandard.ZstdCompressor().compress(b"x"), "is no recording: it begins with"),
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


def test_versions_join_into_spans() -> None:
    """Tokens of one policy version form one span; a swap starts another."""
    sampled = SampledTokens()
    for version in (3, 3, 4):
        sampled.add([1, 1], [0.0, 0.0], version)
    assert sampled.versions == [VersionSpan(3, 0, 4), VersionSpan(4, 4, 6)]
    assert [len(array) for array in sampled.join()] == [6, 6]


def test_tokens_without_logprobs_are_refused() -> None:
    """An engine that leaves logprobs out is told so at the first token (I2)."""
    with pytest.raises(EngineError, match="2 token ids but 0 logprobs"):
        SampledTokens().add([1, 1], [], 0)
