from __future__ import annotations

import os
from pathlib import Path

from tugline.sandbox.files import collect_artifacts


def collect(home: Path, patterns: tuple[str, ...], logs: Path) -> list[str]:
    """Collect artifacts; returns the paths of the copies."""
    collect_artifacts(home, patterns, logs)
    copies = logs / "home"
    return sorted(str(path.relative_to(copies)) for path in copies.rglob("*") if path.is_file())


def test_matching_files_are_copied(tmp_path: Path) -> None:
    """Paths are kept; ``*`` matches within a name, ``**`` any folders."""
    home, logs = tmp_path / "home", tmp_path / "logs"
    logs_of_a = (".a/log/x.jsonl", ".a/log/2026/11/y.jsonl", ".a/log/y.txt")
    for path in (*logs_of_a, ".b/1/c.json", "c.json"):
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text(path)
    logs.mkdir()
    assert collect(home, (), logs) == collect(tmp_path / "none", ("*",), logs) == []
    assert collect(home, (".a/log/**/*.jsonl", ".b/*/c.json"), logs) == [
        ".a/log/2026/11/y.jsonl",
        ".a/log/x.jsonl",
        ".b/1/c.json",
    ]
    assert (logs / "home/.a/log/2026/11/y.jsonl").read_text() == ".a/log/2026/11/y.jsonl"


def test_links_and_special_files_are_not_copied(tmp_path: Path) -> None:
    """Links, pipes, sparse files and names that cannot be decoded or put are left out."""
    home, logs, secret = tmp_path / "home", tmp_path / "logs", tmp_path / "secret"
    for folder in (home, logs, secret):
        folder.mkdir()
    (secret / "key.log").write_text("secret")
    (home / "key.log").symlink_to(secret / "key.log")
    (home / "folder").symlink_to(secret)
    os.mkfifo(home / "pipe.log")
    for name in ("x\\y.log", "a\nb.log", os.fsdecode(b"\xff.log")):
        (home / name).touch()
    with (home / "huge.log").open("wb") as file:
        file.truncate(65 << 20)
    (home / "own.log").write_text("mine")
    assert collect(home, ("**/*.log",), logs) == ["own.log"]
