"""``tugline export``: filters, splits and summaries from a shell, and its mistakes at the door."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from commands import run_command
from exports.made import record
from tugline.cli.app import main


def export(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The command, to its end."""
    return run_command("export", *arguments)


def test_the_summary_is_told_to_people_and_to_scripts(tmp_path: Path) -> None:
    """Every filter is named on the command line; the counts add up."""
    for i in range(8):
        tags = {"level": "hard" if i < 6 else "easy"}
        record(tmp_path / "in", f"s{i}", task=f"t{i // 2}", sample=i % 2, reward=i % 2, tags=tags)
    out = tmp_path / "out"
    filters = [
        "--tag",
        "level=hard",
        "--best-of",
        "1",
        "--min-reward",
        "0.5",
        *("--kind", "main", "--kind", "subagent"),
    ]
    more = ["--status", "completed", "--status", "timed-out", "--exact-only", "--max-length", "9"]
    split = ["--split", "train=0.7,test=0.3", "--seed", "6", "--dedupe"]
    done = export("sft", tmp_path / "in", "--out", out, *filters, *more, *split, "--json")
    assert done.returncode == 0, done.stderr
    output = json.loads(done.stdout)
    assert output["exported"] + sum(output["left_out"].values()) == output["recordings"] == 8
    assert output["left_out"] == {"low_reward": 3, "tag": 2}
    assert {name: one["sessions"] for name, one in output["files"].items()} == {
        "train": 2,
        "test": 1,
    }
    assert (out / "test.jsonl").read_text().count("\n") == 1

    done = export("parquet", tmp_path / "in", "--out", tmp_path / "p", "--builder", "per_request")
    assert done.returncode == 0, done.stderr
    assert "8 of 8 sessions; left out: -" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["parket"], "unknown export 'parket'; did you mean 'parquet'? (known: atif, parquet,"),
        (["sft", "--split", "train=0.9"], "shares must be above 0 and add up to 1"),
        (["sft", "--split", "a=x"], "--split 'a=x' must be names and shares, such as train=0.9"),
        (
            ["sft", "--status", "done"],
            'Invalid value "done" for --status. Choose from: "queued", "init"',
        ),
        (["sft", "--tag", "k"], "--tag 'k' must be key=value"),
        (["sft", "--option", "max_length=3"], "--option max_length=3 is for a builder; name it"),
        (["trl", "--with", "pad=1"], "export 'trl': there is no option 'pad' (its options: none)"),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path,
    arguments: list[str],
    line: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It names the flag, the value and what would be right; the exit code is 2."""
    record(tmp_path, "a")
    form, *rest = arguments
    command = ["tugline", "export", form, str(tmp_path), "--out", str(tmp_path / "out"), *rest]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    (output,) = capsys.readouterr().err.splitlines()
    assert line in output


def test_without_pyarrow_the_extra_is_named() -> None:
    """Chat needs nothing more than the core; a table says what to install."""
    code = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from tugline.plugins import find; find('export', 'sft')\n"
        "from tugline.errors import UsageError\n"
        "try: find('export', 'parquet')\n"
        "except UsageError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert "pip install 'tugline[export]'" in done.stdout, done.stderr
