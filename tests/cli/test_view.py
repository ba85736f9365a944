"""``tugline view`` as a program: what it prints, writes and refuses."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from commands import run_command
from recording.view.synthetic import small, tokenizer
from tugline.cli.view import view
from tugline.errors import CaptureError, UsageError
from tugline.recording.view import html_page


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


def test_a_run_is_a_folder_of_pages(tmp_path: Path) -> None:
    """A table with a link to each session's page; what cannot be read says so in its row."""
    runs = tmp_path / "runs"
    small(runs / "one" / "recordings", name="<b> & 1")
    small(runs / "two", name="again.1")
    later = small(runs / "two", name="again.2")
    damaged = small(runs / "two", name="broken")
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 255
    damaged.write_bytes(data)
    done = tugline("runs", "--html", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    wrote = r"wrote out/index.html: 4 sessions, 3 pages, [\d.]+ MB; 1 without a page"
    assert re.match(wrote, done.stdout)
    index = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    links = [unquote(link) for link in re.findall('href="([^"]+)"', index)]
    assert links == ["one/recordings/<b> & 1.0.html", *(f"two/again.{n}.0.html" for n in (1, 2))]
    for link in links:
        assert (tmp_path / "out" / link).read_text(encoding="utf-8").startswith("<!doctype html>")
    assert "&lt;b&gt; &amp; 1</a><td>t-1<td>completed<td>0.5<td>6<td>87<td>81<td>0.0<td>" in index
    assert "<td>broken<td><td>unreadable" in index
    assert "<script" not in index
    assert "<b>" not in index
    assert later.stem in index
    again = tugline("runs", "--html", "out", cwd=tmp_path)
    assert again.returncode == 1
    assert again.stderr == "tugline: out: File exists\n"


def test_a_run_that_is_too_large_has_the_first_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others stand in the table, with their figures and why they have no page."""
    for name in ("a", "b", "c"):
        small(tmp_path / "run", name=name)
    monkeypatch.setattr(html_page, "_MAX_RUN", 100_000)
    view(str(tmp_path / "run"), html=tmp_path / "out")
    assert (
        "3 sessions, 1 pages, 0.1 MB; 2 without a page, as the rows say" in capsys.readouterr().out
    )
    index = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert re.findall(r"<td>([bc])<td>t-1<td>completed.*no page: the others have", index) == [
        "b",
        "c",
    ]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"index.html", "a.0.html"}


def test_the_last_attempt_of_a_session_has_the_page(tmp_path: Path) -> None:
    """As everywhere: an earlier one does not count."""
    first = small(tmp_path / "run")
    first.with_name("s-1.2.rec").write_bytes(first.read_bytes())
    view(str(tmp_path / "run"), html=tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "index.html",
        "s-1.2.html",
    ]


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
