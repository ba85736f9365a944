"""Texts that sessions are found by: instruction and tags of their task, their failure, their note.

A text is stored as its words, each once. Its `rowid` is the place of its session, or minus that of
its task's first session. The sessions of a task are next to each other, and tasks are in the order
of their sessions: the first that match are found without looking at the others.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping

from tugline.protocol import SessionQuery
from tugline.server.store.base import Tx

_MAX_TEXT = 20_000
"""Characters of a text whose words are stored."""
_MAX_WORD = 64
_WHOLE = 2
"""Characters up to which a word is found as a whole only; a longer one also by its beginning."""
_LAST = 2**63 - 1
"""Beyond all places."""
_PAGES = 3
"""So many pages of places are looked through for the sessions of a status, a task or a node."""


def join_task(instruction: str, tags: Mapping[str, str]) -> str:
    """The text of a task."""
    return " ".join([*(f"{key} {value}" for key, value in tags.items()), instruction])


def add(tx: Tx, texts: Iterable[tuple[int, str]]) -> None:
    """Store new texts under their rowids."""
    rows = [{"rowid": rowid, "words": " ".join(_split(text))} for rowid, text in texts]
    tx.insert("texts", *rows)


def replace(tx: Tx, place: int, text: str) -> None:
    """Store the text of a session in place of an earlier one."""
    tx.run("DELETE FROM texts WHERE rowid = :place", place=place)
    add(tx, [(place, text)] if text else [])


def parse(q: str) -> str:
    """Return its words as `find` and `Tx.matching` need them; empty if there are none."""
    return " ".join(word + "*" * (len(word) > _WHOLE) for word in _split(q))


def find(tx: Tx, query: SessionQuery, terms: str, *, tasks: bool) -> Iterator[str]:
    """Conditions on sessions that have all `terms` in their own text, or in their task's.

    First the places of the next such sessions in the order of the page, without parameters, which
    SQLite takes seconds to read by the thousand. Where those that are wanted may be few among many,
    the second is true for all sessions with the terms, so the wanted are compared with it.
    """
    order = "DESC" if query.newest is not tasks else "ASC"
    keys = f"SELECT rowid FROM {tx.matching} AND rowid > :low AND rowid < :high"  # noqa: S608 - constants
    keys += f" ORDER BY rowid {order} LIMIT :size"
    first = "SELECT COALESCE(MAX(place - sample), 0) FROM sessions WHERE place = :place"
    after = int(query.after or 0)
    size = (query.limit + 1) * (_PAGES if query.status or query.task or query.node else 1)
    low, high = (0, after or _LAST) if query.newest else (after, _LAST)
    bounds = {"low": low, "high": high}
    if tasks:
        begun = tx.fetch_value(first, place=low)
        bounds = {"low": -high, "high": 1 - begun}
    rowids = tx.column(keys, words=terms, tasks=tasks, size=size, **bounds)
    found = list(map(abs, rowids))
    if tasks and found:
        every = _list_sessions(tx, found, query)
        found = list(itertools.islice((place for place in every if low < place < high), size))
    if found:
        yield f"place IN ({', '.join(map(str, found))})"
    if len(rowids) < size and len(found) < size:
        return
    own, sign = ("sample - place", "<") if tasks else ("place", ">")
    # PostgreSQL would join a bare IN, and look through all texts for each session.
    yield f"COALESCE({own} IN (SELECT rowid FROM {tx.matching} AND rowid {sign} 0), FALSE)"  # noqa: S608 - constants


def _split(text: str) -> list[str]:
    words = re.findall(r"\w+", text[:_MAX_TEXT].casefold())
    return list(dict.fromkeys(word[:_MAX_WORD] for word in words))


def _list_sessions(tx: Tx, first: list[int], query: SessionQuery) -> Iterator[int]:
    """Places of all sessions of these tasks, in the order of a page."""
    known = "SELECT s.place, samples FROM sessions s JOIN tasks t ON t.id = task WHERE s.place IN"
    rows = tx.all(f"{known} ({', '.join(map(str, first))})")
    for start, samples in sorted(rows, reverse=query.newest):
        places = range(start, start + samples)
        yield from reversed(places) if query.newest else places
