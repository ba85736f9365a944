"""``tugline export`` and ``tugline rebuild``: filters, splits, builders and summaries."""

from __future__ import annotations

import json
from pathlib import Path

from exports.made import record
from recording.view.synthetic import small
from support.commands import run_command, run_python
from tugline.recording.trajectories import read_folder


def test_the_summary_counts_every_filter(tmp_path: Path) -> None:
    """As text and as JSON; exported and excluded sessions add up."""
    for i in range(8):
        tags = {"level": "hard" if i < 6 else "easy"}
        record(tmp_path / "in", f"s{i}", task=f"t{i // 2}", sample=i % 2, reward=i % 2, tags=tags)
    filters = (
        "--tag level=hard --best-of 1 --min-reward 0.5 --kind main --kind subagent --exact-only"
        " --status completed --status timed-out --max-length 9"
        " --split train=0.7,test=0.3 --seed 6 --dedupe --json"
    )
    done = run_command("export", "sft", "in", "--out", "out", *filters.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    output = json.loads(done.stdout)
    assert output["exported"] + sum(output["left_out"].values()) == output["recordings"] == 8
    assert output["left_out"] == {"low_reward": 3, "tag": 2}
    sessions = {name: file["sessions"] for name, file in output["files"].items()}
    assert sessions == {"train": 2, "test": 1}
    assert (tmp_path / "out" / "test.jsonl").read_text().count("\n") == 1

    options = ("parquet", "in", "--out", "p", "--builder", "per_request")
    done = run_command("export", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "8 of 8 sessions; left out: -" in done.stdout


def test_without_pyarrow_the_extra_is_named() -> None:
    """Chat exports need only the core; the error of table exports says what to install."""
    done = run_python(
        "import sys; sys.modules['pyarrow'] = None\n"
        "from tugline.plugins import find\n"
        "find('export', 'sft'), find('export', 'parquet')"
    )
    assert done.stderr.endswith("with pyarrow, which needs: pip install 'tugline[export]'\n")


def test_a_folder_is_rebuilt_with_another_builder_and_its_options(tmp_path: Path) -> None:
    """The index is printed as JSON, and a trainer can load its files."""
    small(tmp_path / "in")
    command = "rebuild in --builder per_request --option max_length=300 --out out --json"
    done = run_command(*command.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    index = json.loads(done.stdout)
    assert index["builder"] == {"name": "per_request", "options": {"max_length": 300}}
    (entry,) = index["entries"]
    (trajectory,) = read_folder(tmp_path / "out")
    assert (entry["session"], entry["file"]) == ("s-1", "s-1.traj")
    assert entry["traces"] == len(trajectory.traces) == 6
    assert max(len(trace.ids) for trace in trajectory.traces) == 300


def test_a_damaged_recording_is_named_with_exit_code_1(tmp_path: Path) -> None:
    """The others are rebuilt."""
    small(tmp_path / "in")
    (tmp_path / "in" / "b.0.rec").write_bytes(b"not a recording")
    done = run_command("rebuild", "in", "--out", "out", cwd=tmp_path)
    assert done.returncode == 1
    assert "b.0.rec" in done.stdout
    assert "1 of 2 recordings" in done.stdout
    assert len(list(read_folder(tmp_path / "out"))) == 1
