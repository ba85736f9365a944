"""Which server is meant, and which token it is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from tugline.client.transport import find_server
from tugline.errors import UsageError


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder without a server."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TUGLINE_SERVER", raising=False)
    monkeypatch.delenv("TUGLINE_TOKEN", raising=False)
    return tmp_path


def up(folder: Path, url: str = "http://127.0.0.1:7700") -> None:
    """As ``tugline up`` leaves a folder."""
    folder.mkdir()
    (folder / "server.json").write_text(f'{{"url": "{url}"}}')
    (folder / "tokens.json").write_text('{"client": "c", "join": "j", "read": "r"}')


def test_what_is_told_goes_first(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags before the environment, before the folder; a folder that is named before both.

    On the machine of the server nothing needs to be told.
    """
    up(here / "tugline-data")
    assert find_server() == ("http://127.0.0.1:7700", "c")
    assert find_server("http://127.0.0.1:7700/") == ("http://127.0.0.1:7700", "c")
    up(here / "other", "http://other:1")
    monkeypatch.setenv("TUGLINE_SERVER", "http://env:1")
    monkeypatch.setenv("TUGLINE_TOKEN", "e")
    assert find_server() == ("http://env:1", "e")
    assert find_server("http://flag:1", "f") == ("http://flag:1", "f")
    monkeypatch.delenv("TUGLINE_TOKEN")
    assert find_server(folder="other") == ("http://other:1", "c")


def test_a_token_goes_to_its_own_server_only(here: Path) -> None:
    """That of the folder is not shown to a server elsewhere."""
    up(here / "tugline-data")
    with pytest.raises(UsageError, match="no token for http://evil:1: give --token"):
        find_server("http://evil:1")


def test_without_any_it_says_what_to_do(here: Path) -> None:
    """How to start one, or how to name it; a damaged file is named."""
    with pytest.raises(UsageError, match="start one with `tugline up`"):
        find_server()
    up(here / "tugline-data")
    (here / "tugline-data" / "server.json").write_text("{")
    with pytest.raises(UsageError, match=r"server\.json cannot be read"):
        find_server()
