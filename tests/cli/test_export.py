"""``tugline export``: filters, splits and summaries."""

from __future__ import annotations

import json
from pathlib import Path

from exports.made import record
from support.commands import run_command, run_python


def test_the_summary_counts_every_filter(tmp_path: Path) -> None:
    """Exported and excluded sessions add up, as text and as JSON."""
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
    """Chat exports need only the core; the error of table exports names the extra to install."""
    done = run_python(
        "import sys; sys.modules['pyarrow'] = None\n"
        "from tugline.plugins import find\n"
        "find('export', 'sft'), find('export', 'parquet')"
    )
    assert done.stderr.endswith("with pyarrow, which needs: pip install 'tugline[export]'\n")
