"""The Python blocks of each page run, in a folder of their own."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^```python[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_RUN = yaml.safe_load(Path(__file__).with_name("not_run.yaml").read_text(encoding="utf-8"))
FOREIGN = {"verl", "tinker", "tugline_tinker"}
"""Modules of those blocks that no extra installs."""
FILES = {"docs/configuration.md": {"mine.yaml": "steps: 40\n"}}
"""Files that the blocks of a page need."""


def list_blocks(page: str) -> list[str]:
    """Python blocks of a page, in order."""
    return _BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))


PAGES = sorted(
    name
    for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*/README.md")]
    if list_blocks(name := path.relative_to(ROOT).as_posix())
)


def keep_imports(code: str) -> ast.Module:
    """The imports of a block that cannot be run and may have ``await`` outside of functions."""
    tree = compile(code, "block", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    assert isinstance(tree, ast.Module)
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {node: getattr(node, "module", None) or node.names[0].name for node in imports}
    return ast.Module([node for node in imports if names[node] not in FOREIGN], [])


@pytest.mark.parametrize("page", PAGES)
def test_python_of_the_pages_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks of a page share their names; of those in `NOT_RUN` the imports are run."""
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.get(page, {}).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    scope: dict[str, Any] = {"__name__": "page"}
    for number, code in enumerate(list_blocks(page)):
        program = keep_imports(code) if number in NOT_RUN.get(page, {}) else code
        exec(compile(program, f"{page}, block {number}", "exec"), scope)  # noqa: S102


def test_excluded_blocks_exist() -> None:
    """Each reason has its block, and most blocks are run."""
    counts = {page: len(list_blocks(page)) for page in PAGES}
    assert [
        (page, n) for page, reason in NOT_RUN.items() for n in reason if n >= counts[page]
    ] == []
    assert sum(counts.values()) - sum(map(len, NOT_RUN.values())) >= 8
