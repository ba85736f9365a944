"""Cost of a session between gateway and trainer: bytes, time and memory by its length.

Sessions of 10, 100 and 400 turns are recorded, read back and built by `prefix_merging`. Nothing
waits, so times are medians of this thread's CPU time, on which other load has less effect than on
wall-clock time. `docs/benchmarks.md` explains each figure.

    python benchmarks/trajectories/run.py [--json] [--quick]
"""

# ruff: noqa: INP001, T201 - programs that print, not a package
from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zstandard
from session import BASE, RESULT, SAMPLED, TextSource, calls

from tugline.recording import file as recordings
from tugline.recording.codec import Record
from tugline.recording.records import Header
from tugline.traces.base import PrefixMerging
from tugline.types import PluginSpec, Session, Task, decode

TURNS = (10, 100, 400)
REPEATS = {"full": 41, "quick": 9, "smoke": 3}
DECODED = 40
"""Number of calls of the session for `measure_decoding`."""
_ID, _ALLOWANCE, _LOGPROB, _SLACK = 4, 1.4, 4, 1.5


def note(text: str) -> None:
    """Print progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def timed(work: Callable[[], object], repeats: int) -> list[float]:
    """Repeat `work`, after one unmeasured run; return CPU milliseconds of each repetition."""
    work()
    gc.collect()
    gc.disable()
    spent = []
    for _ in range(repeats):
        began = time.thread_time()
        work()
        spent.append(1e3 * (time.thread_time() - began))
    gc.enable()
    return spent


def peak(work: Callable[[], object]) -> int:
    """Peak memory that `work` allocates, in bytes."""
    gc.collect()
    tracemalloc.start()
    result = work()
    size = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    del result
    return size


def record(source: TextSource, path: Path, turns: int) -> list[float]:
    """Write a session; return the CPU milliseconds of each call."""
    task = Task(
        id="bench",
        instruction="Mend the tests.",
        harness=PluginSpec("pi"),
        evaluator=PluginSpec("tests"),
    )
    session = Session(id="bench-0-0", task="bench", sample=0)
    header = Header(session=session, task=task, created=0.0, tugline="bench", engine="vllm")
    spent = []
    with recordings.Writer(path, header) as writer:
        for call in calls(source, turns):
            began = time.thread_time()
            writer.append(call)
            spent.append(1e3 * (time.thread_time() - began))
    return spent


def measure(source: TextSource, folder: Path, turns: int, repeats: int) -> dict[str, float]:
    """Measure a session of `turns` turns."""
    note(f"{turns} turns")
    path = folder / f"{turns}.rec"
    appended = record(source, path, turns)
    recorded = recordings.read(path).calls
    builder = PrefixMerging()
    built = builder.build(recorded)
    last = recorded[-1]
    if len(built.traces) != 1 or built.ledger.trained != turns * SAMPLED:
        msg = f"{turns} turns were built as {len(built.traces)} traces with {built.ledger}"
        raise RuntimeError(msg)
    times = timed(lambda: builder.build(recorded), repeats)
    low, middle, high = statistics.quantiles(times, n=4)
    return {
        "recording_bytes": path.stat().st_size,
        "unique_ids": len(last.prompt_ids) + len(last.sampled_ids),
        "sampled": turns * SAMPLED,
        "append_cpu_ms": statistics.median(appended),
        "read_ms": statistics.median(timed(lambda: recordings.read(path), repeats)),
        "read_peak_bytes": peak(lambda: recordings.read(path)),
        "build_ms": middle,
        "build_noise": (high - low) / middle,
        "peak_bytes": peak(lambda: builder.build(recorded)),
    }


def measure_decoding(source: TextSource, folder: Path, repeats: int) -> dict[str, float]:
    """Time to read 40 calls, and the time of each part of it."""
    note(f"reading {DECODED} calls")
    path = folder / "decoded.rec"
    record(source, path, DECODED)
    data = path.read_bytes()

    def frames() -> list[bytes]:
        return [frame.data for frame in recordings.read_frames(path, data) if frame.data]

    def inflate() -> list[bytes]:
        stream = zstandard.ZstdDecompressor().decompressobj()
        return [stream.decompress(frame) for frame in packed]

    def parse() -> list[msgspec.Struct]:
        return [decode(record, Record) for record in inflated]  # type: ignore[arg-type]

    packed, inflated = frames(), []
    inflated = inflate()
    whole, framing, zstd, msgpack = (
        statistics.median(timed(work, repeats))
        for work in (lambda: recordings.read(path), frames, inflate, parse)
    )
    return {
        "whole": whole,
        "checksums": framing,
        "zstd": zstd,
        "msgpack": msgpack,
        "numpy and joining": whole - framing - zstd - msgpack,
    }


def slope(by_turns: dict[int, dict[str, float]], key: str) -> float:
    """Log-log slope of `key` over the number of turns, by least squares."""
    turns, values = np.log(list(by_turns)), np.log([row[key] for row in by_turns.values()])
    return round(float(np.polyfit(turns, values, 1)[0]), 3)


def run(size: str) -> dict[str, Any]:
    """Run every measurement; the size ``smoke`` leaves out the longest session."""
    repeats, began = REPEATS[size], time.time()
    lengths = TURNS[:2] if size == "smoke" else TURNS
    note("training a tokenizer")
    source = TextSource()
    with tempfile.TemporaryDirectory(prefix="tugline-bench-") as folder:
        by_turns = {turns: measure(source, Path(folder), turns, repeats) for turns in lengths}
        parts = measure_decoding(source, Path(folder), repeats)
    hundred = by_turns[100]
    limit = _SLACK * (hundred["unique_ids"] * _ALLOWANCE + hundred["sampled"] * _LOGPROB)
    figures: dict[str, Any] = {
        "slope_time": slope(by_turns, "build_ms"),
        "slope_bytes": slope(by_turns, "recording_bytes"),
        "slope_read": slope(by_turns, "read_ms"),
        "slope_peak": slope(by_turns, "peak_bytes"),
        **{f"{key}_100": _rounded(value) for key, value in hundred.items()},
        "recording_bytes_limit_100": round(limit),
        "peak_to_ids_100": round(hundred["peak_bytes"] / (_ID * hundred["unique_ids"]), 2),
        "decode_ms_40": _rounded(parts.pop("whole")),
        "decode_parts_ms_40": {name: _rounded(value) for name, value in parts.items()},
        "by_turns": {
            str(turns): {key: _rounded(value) for key, value in row.items()}
            for turns, row in by_turns.items()
        },
    }
    figures["session"] = {"base": BASE, "sampled_a_turn": SAMPLED, "result_a_turn": RESULT}
    figures["machine"] = {
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "repeats": repeats,
        "seconds": round(time.time() - began),
    }
    return figures


def _rounded(value: float) -> float:
    return value if isinstance(value, int) else round(value, 3)


def table(figures: dict[str, Any]) -> str:
    """Format the figures as text."""
    columns = ("recording_bytes", "append_cpu_ms", "read_ms", "build_ms")
    head = f"{'turns':>6}{'unique ids':>12}" + "".join(f"{name:>27}" for name in columns)
    rows = [head]
    for turns, values in figures["by_turns"].items():
        row = f"{turns:>6}{values['unique_ids']:>12}"
        rows.append(row + "".join(f"{values[name]:>27}" for name in columns))
    plain = {key: value for key, value in figures.items() if key != "by_turns"}
    return "\n".join([*rows, *(f"{key}: {value}" for key, value in plain.items())])


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    quick = parser.add_argument("--quick", action="store_const", const="quick", dest="size")
    quick.help = "fewer repetitions, rougher figures"
    parser.add_argument("--size", choices=REPEATS, help=argparse.SUPPRESS)
    parser.set_defaults(size="full")
    options = parser.parse_args()
    figures = run(options.size)
    print(json.dumps(figures) if options.json else table(figures))


if __name__ == "__main__":
    main()
