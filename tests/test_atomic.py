"""Files that are replaced whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from leased import limited_files
from tugline.atomic import write_file


def test_a_file_is_replaced_with_its_mode(tmp_path: Path) -> None:
    """Over an old file, and over a draft that a crash left."""
    path = tmp_path / "token"
    path.write_text("old")
    (tmp_path / "token.part").write_text("half of someth")
    write_file(path, b"new", 0o600)
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"new", 0o600)
    assert [each.name for each in tmp_path.iterdir()] == ["token"]


def test_the_old_file_stays_if_the_new_one_does_not_fit(tmp_path: Path) -> None:
    """As on a full disk."""
    path = tmp_path / "state"
    write_file(path, b"old")
    with limited_files(1000), pytest.raises(OSError, match="too large"):
        write_file(path, b"x" * 2000)
    assert path.read_bytes() == b"old"
