"""``tugline view``: the terminal, JSON and pages."""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.parse import unquote

import pytest

from recording.view.synthetic import add_patch, small, tokenizer
from support.commands import run_command
from support.server import flip_bit
from tugline.cli.view import view
from tugline.patch import FileChange, Patch
from tugline.recording.folder import patch_name
from tugline.recording.view import html_page


def test_a_session_is_viewed_in_the_terminal_as_json_and_as_a_page(tmp_path: Path) -> None:
    """An id is looked up below runs/; a pipe gets no colour, and stderr names the page."""
    small(tmp_path / "runs" / "one" / "recordings")
    plain = run_command("view", "s-1", cwd=tmp_path, env={"FORCE_COLOR": "", "NO_COLOR": "1"})
    assert plain.returncode == 0, plain.stderr
    assert "\x1b" not in plain.stdout
    assert "I read it." in plain.stdout
    assert "masked(client_gone) 6" in plain.stdout
    done = run_command("view", "s-1", "--json", "--html", "page.html", cwd=tmp_path)
    assert json.loads(done.stdout)["header"]["session"]["id"] == "s-1"
    assert done.stderr.startswith("wrote page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_run_is_a_folder_of_pages(tmp_path: Path) -> None:
    """A table links to each session's page; an unreadable recording has a row with the error."""
    runs = tmp_path / "runs"
    small(runs / "one" / "recordings", name="<b> & 1")
    small(runs / "two", name="again.1")
    small(runs / "two", name="again.2")
    flip_bit(small(runs / "two", name="broken"))
    done = run_command("view", "runs", "--html", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    wrote = r"wrote out/index.html: 4 sessions, 3 pages, [\d.]+ MB; 1 without a page"
    assert re.match(wrote, done.stdout)
    index = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    links = [unquote(link) for link in re.findall('href="([^"]+)"', index)]
    assert links == ["one/recordings/<b> & 1.0.html", *(f"two/again.{n}.0.html" for n in (1, 2))]
    for link in links:
        assert (tmp_path / "out" / link).read_text(encoding="utf-8").startswith("<!doctype html>")
    assert "&lt;b&gt; &amp; 1</a><td>t-1<td>completed<td>0.5<td>6<td>85<td>79<td>0.0<td>" in index
    assert "<td>broken<td><td>unreadable" in index
    assert "<script" not in index
    assert "<b>" not in index
    again = run_command("view", "runs", "--html", "out", cwd=tmp_path)
    assert (again.returncode, again.stderr) == (2, "tugline: out: File exists\n")


def test_a_run_that_is_too_large_has_the_first_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sessions without a page have their figures in the table, with the reason."""
    for name in ("a", "b", "c"):
        small(tmp_path / "run", name=name)
    monkeypatch.setattr(html_page, "_MAX_RUN", 200_000)
    view(str(tmp_path / "run"), html=tmp_path / "out")
    summary = "3 sessions, 1 pages, 0.1 MB; 2 without a page, for the reason in their rows"
    assert summary in capsys.readouterr().out
    index = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    pageless = re.findall(r"<td>([bc])<td>t-1<td>completed.*no page: the limit of", index)
    assert pageless == ["b", "c"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"index.html", "a.0.html"}


def test_the_last_attempt_of_a_session_has_the_page(tmp_path: Path) -> None:
    """Earlier attempts of a session have no page."""
    first = small(tmp_path / "run")
    first.with_name("s-1.2.rec").write_bytes(first.read_bytes())
    view(str(tmp_path / "run"), html=tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"index.html", "s-1.2.html"}


def test_another_tokenizer_can_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the tokenizer beside the recording, ids are shown unless another is given."""
    path = small(tmp_path)
    for kept in tmp_path.glob("tokenizer-*.json"):
        kept.unlink()
    view(str(path))
    assert "I read it." not in capsys.readouterr().out
    tokenizer().save(tmp_path)
    view(str(path), tokenizer=tmp_path)
    assert "I read it." in capsys.readouterr().out


def test_a_patch_is_printed_and_named(tmp_path: Path) -> None:
    """The view names the patch, `--patch` prints it; none or a damaged one is an error."""
    path = small(tmp_path)
    none = run_command("view", str(path), "--patch", cwd=tmp_path)
    assert (none.returncode, "names no patch" in none.stderr) == (2, True)
    digest = add_patch(path, Patch({"a.py": FileChange(b"fail\n")}, ("b: left out",)))
    assert f"{digest[:16]} (--patch prints it)" in run_command("view", str(path)).stdout
    printed = run_command("view", str(path), "--patch", cwd=tmp_path)
    assert printed.stdout.endswith("@@ -1 +1 @@\n-pass\n+fail\n# b: left out\n"), printed.stderr
    flip_bit(tmp_path / patch_name(digest))
    damaged = run_command("view", str(path), "--patch", cwd=tmp_path)
    assert damaged.returncode != 0
    assert "is damaged" in damaged.stderr
