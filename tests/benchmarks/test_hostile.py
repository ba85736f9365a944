"""The benchmark of a hostile agent: nothing that it does fails another session."""

import pytest

from benchmarks.conftest import Measure


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_attack_fails_another_session(measure: Measure) -> None:
    """Every attack is refused or bounded; the others' calls and sessions all succeed."""
    report = measure("hostile", "run.py", "--json", "--quick", timeout=240)
    assert (report["failed"], report["completed"], report["attempts_spent"]) == (
        0,
        report["sessions"],
        0,
    )
    spells = report["spells"]
    for name in ("big_body", "many_messages", "many_parts", "deep", "bomb", "padding"):
        assert set(spells[name]["hostile"]) == {"400"}, (name, spells[name])
    assert set(spells["n_128"]["hostile"]) <= {"200", "429"}
    assert set(spells["connections"]["hostile"]) <= {"400", "429", "503"}
    assert "200" not in spells["endless"]["hostile"]
    assert all(one["calls"] > 0 for one in spells.values())
