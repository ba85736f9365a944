"""Random programs of a whole system are killed, again and again."""

import contextlib
import os
from pathlib import Path

import pytest

from chaos.audit import audit, format_table, gather
from chaos.fleet import Fleet
from chaos.postgres import postgres
from chaos.storm import Storm

WHOLE, CORE = (500, 100), (40, 8)
"""Sessions and kills of a storm, on each store."""
SEED = int(os.environ.get("TUGLINE_CHAOS_SEED", "20"))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_kill_9_of_any_program_loses_nothing(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], pytestconfig: pytest.Config
) -> None:
    """Server, nodes, engine, agents, receiver and trainer are killed; every check passes."""
    usual = CORE if pytestconfig.option.core else WHOLE
    sessions = int(os.environ.get("TUGLINE_CHAOS_SESSIONS", usual[0]))
    kills = int(os.environ.get("TUGLINE_CHAOS_KILLS", usual[1]))
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(postgres()) if kind == "postgres" else None
        fleet = Fleet(tmp_path / "run", store.url if store else None)
        stack.enter_context(contextlib.closing(fleet))
        fleet.launch()
        storm = Storm(fleet, sessions=sessions, kills=kills, seed=SEED)
        others = [storm.freeze_a_node] * (kills // 25)
        others += [store.crash] * max(1, kills // 40) if store else []
        log = storm.run(tuple(others))
        rows = audit(fleet, log, gather(fleet))
    with capsys.disabled():
        print(f"\n{kind}, seed {SEED}\n{format_table(rows)}")  # noqa: T201
    assert [row for row in rows if not row.passed] == []
