"""Search texts of sessions: instruction and tags of the task, failure, and note.

A text is stored as its distinct words. Its `rowid` is the place of its session or, for a task,
minus the place of the first session. The sessions of a task are adjacent and tasks have the order
of their sessions, so the first matches are found without reading the others.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping

from tugline.protocol import SessionQuery
from tugline.server.store.base import Tx

_MAX_TEXT = 20_000
"""Maximum number of indexed characters of a text."""
_MAX_WORD = 64
_MAX_WHOLE = 2
"""Maximum length of words that match only whole words; longer words match prefixes."""
_LAST = 2**63 - 1
"""Upper bound of places."""
_PAGES = 3
"""Pages of places that are read for a search filtered by status, task or node."""


def join_task(instruction: str, tags: Mapping[str, str]) -> str:
    """Return the search text of a task."""
    return " ".join([*(f"{key} {value}" for key, value in tags.items()), instruction])


def add(tx: Tx, texts: Iterable[tuple[int, str]]) -> None:
    """Store new texts by rowid."""
    rows = [{"rowid": rowid, "words": " ".join(_split(text))} for rowid, text in texts]
    tx.insert("texts", *rows)


def replace(tx: Tx, place: int, text: str) -> None:
    """Replace the text of a session."""
    tx.run("DELETE FROM texts WHERE rowid = :place", place=place)
    add(tx, [(place, text)] if text else [])


def parse(q: str) -> str:
    """Convert a query to the words for `find` and `Tx.matching`; empty if it has none."""
    return " ".join(word + "*" * (len(word) > _MAX_WHOLE) for word in _split(q))


def find(tx: Tx, query: SessionQuery, terms: str, *, tasks: bool) -> Iterator[str]:
    """Yield conditions for sessions with all `terms` in their own text, or in the task's.

    The first lists the places of the next such sessions in the order of the page, without
    parameters, since SQLite takes seconds for thousands of them. The second, for filters that few
    of these sessions pass, holds for all sessions with the terms.
    """
    order = "DESC" if query.newest is not tasks else "ASC"
    keys = f"SELECT rowid FROM {tx.matching} AND rowid > :low AND rowid < :high"  # noqa: S608 - constants
    keys += f" ORDER BY rowid {order} LIMIT :size"
    first = "SELECT COALESCE(MAX(place - sample), 0) FROM sessions WHERE place = :place"
    after = int(query.after or 0)
    size = (query.limit + 1) * (
        _PAGES if query.status or query.task or query.node or query.run else 1
    )
    low, high = (0, after or _LAST) if query.newest else (after, _LAST)
    bounds = {"low": low, "high": high}
    if tasks:
        start = tx.fetch_value(first, place=low)
        bounds = {"low": -high, "high": 1 - start}
    rowids = tx.column(keys, words=terms, tasks=tasks, size=size, **bounds)
    places = list(map(abs, rowids))
    if tasks and places:
        every = _list_sessions(tx, places, query)
        places = list(itertools.islice((place for place in every if low < place < high), size))
    if places:
        yield f"place IN ({', '.join(map(str, places))})"
    if len(rowids) < size and len(places) < size:
        return
    own, sign = ("sample - place", "<") if tasks else ("place", ">")
    # PostgreSQL would join a bare IN, and scan all texts for each session.
    yield f"COALESCE({own} IN (SELECT rowid FROM {tx.matching} AND rowid {sign} 0), FALSE)"  # noqa: S608 - constants


def _split(text: str) -> list[str]:
    words = re.findall(r"\w+", text[:_MAX_TEXT].casefold())
    return list(dict.fromkeys(word[:_MAX_WORD] for word in words))


def _list_sessions(tx: Tx, first: list[int], query: SessionQuery) -> Iterator[int]:
    """Yield the places of all sessions of these tasks, in the order of a page."""
    known = "SELECT s.place, samples FROM sessions s JOIN tasks t ON t.id = task WHERE s.place IN"
    rows = tx.all(f"{known} ({', '.join(map(str, first))})")
    for start, samples in sorted(rows, reverse=query.newest):
        places = range(start, start + samples)
        yield from reversed(places) if query.newest else places
