"""The real pi against the real gateway, in all four dialects, without internet."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from tugline.conformance.cells import cells_of
from tugline.conformance.matrix import check, reached
from tugline.conformance.models import WINDOW
from tugline.conformance.script import END, Fault, Player, tokenizer
from tugline.conformance.sessions import INSTRUCTION, script
from tugline.conformance.worker import checks_of
from tugline.inference.server import create_app
from tugline.testing.scripted_engine import ScriptedEngine
from tugline.web.serve import serve


def all_pass(verdicts: dict[str, str], names: Iterable[str]) -> None:
    """Every check passed; a machine without namespaces skips by name what it cannot measure."""
    seen = {name: verdicts[name] for name in names}
    alone = seen.pop("no_foreign_host")
    assert set(seen.values()) == {"pass"}, seen
    if alone.startswith("fail: no sandbox"):
        pytest.skip(f"all else passed; no_foreign_host needs Linux namespaces ({alone})")
    assert alone == "pass"


@pytest.mark.pi
@pytest.mark.parametrize("dialect", ["openai_chat", "openai_responses", "anthropic", "google"])
async def test_pi_works_in_every_dialect(dialect: str) -> None:
    """Nothing fails, no turn forks, nobody else is asked."""
    cell = next(cell for cell in cells_of("pi") if cell.dialect == dialect)
    result = await check(cell)
    assert (result.turns, result.exact_turns) == (4, 4)
    all_pass(result.checks, checks_of(cell, slow=False))


@pytest.mark.pi
async def test_an_engine_outside_answers_through_the_only_door() -> None:
    """The sandbox reaches the engine that it was given, and still nobody else."""
    words, cell = tokenizer(), cells_of("pi")[0]
    player = Player(words, {INSTRUCTION: script(cell)}, {1: Fault(token_s=0.02)})
    scripted = ScriptedEngine(
        player.reply, vocab_size=words.size, max_model_len=WINDOW, eos_ids=[END]
    )
    app = create_app(scripted, model_name="m")
    async with serve(app) as url, reached(url) as engine:
        result = await check(cell, engine=engine)
    assert result.turns == 4
    all_pass(result.checks, ("completes", "streaming", "usage_seen", "no_foreign_host"))


@pytest.mark.pi
async def test_without_a_sandbox_the_rest_is_checked_and_the_lack_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that allows no namespaces gets verdicts, and one failure that names the reason."""
    (tmp_path / "unshare").write_text(
        "#!/bin/sh\necho 'unshare failed: not permitted' >&2\nexit 1\n"
    )
    (tmp_path / "unshare").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    verdicts = (await check(cells_of("pi")[0])).checks
    assert verdicts.pop("no_foreign_host") == "fail: no sandbox: unshare failed: not permitted"
    assert set(verdicts.values()) == {"pass"}
