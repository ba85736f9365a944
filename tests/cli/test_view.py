"""``tugline view`` as a program: what it prints, writes and refuses."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from commands import run_command
from recording.view.synthetic import small, tokenizer
from tugline.cli.view import view
from tugline.errors import CaptureError, UsageError


def tugline(*options: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """The command, to its end, in a folder."""
    return run_command("view", *options, cwd=cwd, env=env)


def test_a_session_is_found_by_its_id_and_piped_without_colour(tmp_path: Path) -> None:
    """Below runs/, with the tokenizer that is kept there."""
    small(tmp_path / "runs" / "one" / "recordings")
    done = tugline("s-1", cwd=tmp_path, FORCE_COLOR="", NO_COLOR="1")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert "I read it." in done.stdout
    assert "masked(client_gone) 6" in done.stdout


def test_json_and_html_at_once(tmp_path: Path) -> None:
    """Stdout is one object, the page is a file, what was written is told on stderr."""
    path = small(tmp_path)
    done = tugline(str(path), "--json", "--html", "page.html", cwd=tmp_path)
    assert json.loads(done.stdout)["header"]["session"]["id"] == "s-1"
    assert done.stderr.startswith("wrote page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_another_tokenizer_can_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the one beside the recording is gone, ids are shown until another is given."""
    path = small(tmp_path)
    for kept in tmp_path.glob("tokenizer-*.json"):
        kept.unlink()
    view(str(path))
    assert "I read it." not in capsys.readouterr().out
    tokenizer().save(tmp_path)
    view(str(path), tokenizer=tmp_path)
    assert "I read it." in capsys.readouterr().out


def test_a_damaged_file_is_shown_as_far_as_it_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error that names file and offset; with --salvage what is before it, and the same words."""
    path = small(tmp_path)
    data = bytearray(path.read_bytes())
    data[-len(data) // 4] ^= 255
    path.write_bytes(data)
    with pytest.raises(CaptureError, match="is damaged at offset"):
        view(str(path))
    view(str(path), salvage=True)
    output = capsys.readouterr().out
    assert f"{path} is damaged at offset" in output
    assert "I read it." in output


@pytest.mark.parametrize(
    ("session", "options", "line"),
    [
        ("nobody", {}, "no recording 'nobody'"),
        ("FILE", {"turn": 9}, "--turn 9: there is no such call .* its calls are 0 to 5"),
        ("FILE", {"builder": "trie"}, "unknown builder 'trie'"),
        ("FILE", {"tokenizer": Path("nothing")}, "cannot read the tokenizer nothing"),
    ],
)
def test_mistakes_are_named(
    tmp_path: Path, session: str, options: dict[str, Any], line: str
) -> None:
    """Whatever cannot be shown is a `UsageError`, which is one line and exit code 2."""
    path = str(small(tmp_path))
    with pytest.raises(UsageError, match=line):
        view(path if session == "FILE" else session, **options)


def test_a_page_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """The path and the reason, in one line."""
    done = tugline(str(small(tmp_path)), "--html", "/no/such/folder/a.html", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == "tugline: /no/such/folder/a.html: No such file or directory\n"
    assert done.stdout == ""
