"""Files that are replaced whole; tests/server/test_blobs.py has writes to a full disk."""

from __future__ import annotations

from pathlib import Path

from tugline.atomic import write_file


def test_a_file_is_replaced_with_its_mode(tmp_path: Path) -> None:
    """The write replaces an old file, and a draft that a crash left."""
    path = tmp_path / "token"
    path.write_text("old")
    (tmp_path / "token.part").write_text("half of someth")
    write_file(path, b"new", 0o600)
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"new", 0o600)
    assert [each.name for each in tmp_path.iterdir()] == ["token"]
