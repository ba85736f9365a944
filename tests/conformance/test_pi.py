"""The real pi against the real gateway, in all four dialects, without internet."""

from __future__ import annotations

import pytest

from tugline.conformance.cells import cells_of
from tugline.conformance.worker import checks_of
from tugline.conformance.matrix import check


@pytest.mark.pi
@pytest.mark.parametrize("dialect", ["openai_chat", "openai_responses", "anthropic", "google"])
async def test_pi_works_in_every_dialect(dialect: str) -> None:
    """Nothing fails, no turn forks, nobody else is asked."""
    cell = next(cell for cell in cells_of("pi") if cell.dialect == dialect)
    result = await check(cell)
    assert result.checks == dict.fromkeys(checks_of(cell, slow=False), "pass")
    assert (result.turns, result.exact_turns) == (4, 4)
