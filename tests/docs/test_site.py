"""The documentation site; test_house.py checks that every page is in its navigation."""

import re
import sys
from pathlib import Path

import pytest

from support.commands import run_program
from tugline.cli.app import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
NAVIGATION = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(500)
def test_the_site_is_built(tmp_path: Path) -> None:
    """The site has no warnings, all its references, and no resources of other hosts."""
    site = tmp_path / "site"
    done = run_program(sys.executable, ROOT / "tools/docs/build_site.py", site, timeout=480)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in NAVIGATION:
        folder = re.sub(r"(README|index)\.md$|\.md$", "", name)
        assert (site / folder / "index.html").is_file(), name
    cli = (site / "docs/reference/cli/index.html").read_text("utf-8")
    assert [name for name in COMMANDS if f'id="tugline-{name}"' not in cli] == []
    assert "schedule.staleness" in (site / "docs/reference/keys/index.html").read_text("utf-8")
    python = (site / "docs/reference/python/index.html").read_text("utf-8")
    assert "max_sampled_tokens" in python
    assert "GroupStream" in python
    loaded = re.compile(r"""<(?:script|img|iframe|link(?! rel="canonical"))[^>]+="https?://[^"]+""")
    pages = {path: path.read_text("utf-8") for path in site.rglob("*.html")}
    assert {
        path.name: loaded.findall(text) for path, text in pages.items() if loaded.search(text)
    } == {}
    styles = [path.read_text("utf-8") for path in site.rglob("*.css")]
    assert not any(re.search(r"url\(['\"]?https?:|@import", text) for text in styles)
