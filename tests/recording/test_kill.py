"""``kill -9`` of a writer at any moment loses no answered call and leaves no half a record."""

import json
import sys
from pathlib import Path

from commands import run_program
from recording import killed_writer
from tugline.recording.file import Recording, Writer, read
from tugline.traces.base import PrefixMerging
from tugline.types import encode

TESTS = Path(__file__).parents[1]
TIMES = 200


def test_two_hundred_killed_writers_lose_no_answered_call(tmp_path: Path) -> None:
    """What was answered is there exactly, the ledger balances, and the file can be gone on with."""
    program = ("-m", "recording.killed_writer", tmp_path, TIMES)
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
    assert len(fates) == TIMES
    assert in_the_middle > TIMES // 2, "most were killed while they wrote"
