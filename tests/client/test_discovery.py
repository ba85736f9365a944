"""Which server and which token a client uses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tugline.client.transport import find_server
from tugline.errors import UsageError


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder without a server, as the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TUGLINE_SERVER", raising=False)
    monkeypatch.delenv("TUGLINE_TOKEN", raising=False)
    return tmp_path


def make_data_folder(folder: Path, url: str = "http://127.0.0.1:7700") -> None:
    """Make a folder as ``tugline up`` leaves it."""
    folder.mkdir()
    (folder / "server.json").write_text(f'{{"url": "{url}"}}')
    (folder / "tokens.json").write_text('{"client": "c", "join": "j", "read": "r"}')


def test_sources_of_url_and_token(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An argument or a named folder precedes the environment, which precedes files."""
    make_data_folder(here / "tugline-data")
    assert find_server() == ("http://127.0.0.1:7700", "c")
    assert find_server("http://127.0.0.1:7700/") == ("http://127.0.0.1:7700", "c")
    make_data_folder(here / "other", "http://other:1")
    monkeypatch.setenv("TUGLINE_SERVER", "http://env:1")
    monkeypatch.setenv("TUGLINE_TOKEN", "e")
    assert find_server() == ("http://env:1", "e")
    assert find_server("http://flag:1", "f") == ("http://flag:1", "f")
    monkeypatch.delenv("TUGLINE_TOKEN")
    assert find_server(folder="other") == ("http://other:1", "c")


def test_a_token_is_only_sent_to_its_own_server(here: Path) -> None:
    """The token of the folder is not used for another URL."""
    make_data_folder(here / "tugline-data")
    with pytest.raises(
        UsageError,
        match=r"no token for http://evil:1; give the one of the server's tokens\.json with --token",
    ):
        find_server("http://evil:1")


def test_errors_say_how_to_name_a_server(here: Path) -> None:
    """Without a server the error names `tugline up`; a damaged file is an error that names it."""
    with pytest.raises(UsageError, match="start one with `tugline up`"):
        find_server()
    make_data_folder(here / "tugline-data")
    (here / "tugline-data" / "server.json").write_text("{")
    with pytest.raises(UsageError, match=r"server\.json cannot be read"):
        find_server()
