"""Copy the runs of other SQLite stores into one, for a console that compares them.

Ids of tasks and sessions are unique only within a store, so they get a prefix. Nodes, events, and
what consumers and webhooks have read are not copied.
"""

import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
from msgspec.structs import replace

from tugline.server.store.sessions import decode_view
from tugline.server.store.sqlite import Sqlite
from tugline.server.store.tasks import pack, unpack

_NAME = ":prefix || {0}"
_PLACE = "{0} + :place"
_POSITION = "{0} + :event"
_TABLES = {
    "runs": {},
    "run_steps": {},
    "tasks": {
        "id": _NAME,
        "judges": _NAME,
        "place": _PLACE,
        "released": _POSITION,
        "body": "rename_task({0}, :prefix)",
        "callback": "NULL",
        "deadline": "NULL",
    },
    "sessions": {"id": _NAME, "task": _NAME, "judges": _NAME, "place": _PLACE, "node": "NULL"},
    "results": {
        "session": _NAME,
        "task": _NAME,
        "judges": _NAME,
        "position": _POSITION,
        "blob": "CASE {0} WHEN '' THEN '' ELSE :prefix || {0} END",
        "view": "rename_result({0}, :prefix, :event)",
    },
    "verdicts": {"session": _NAME},
    "time_spent": {},
    "telemetry": {"node": _NAME},
}
"""Columns of each table that do not stay as they are; NULL stays NULL."""


def snapshot(store: Path, into: Path) -> None:
    """Copy the file of a store, which a server may be using, and bring it to the newest layout."""
    with (
        closing(sqlite3.connect(f"{store.absolute().as_uri()}?mode=rw", uri=True)) as source,
        closing(sqlite3.connect(into)) as copy,
    ):
        source.backup(copy)
    driver = Sqlite(into)
    driver.prepare()
    driver.release()


def merge(store: Path, other: Path, prefix: str) -> None:
    """Add the runs of `other` to `store`; both have the newest layout."""
    with closing(sqlite3.connect(store, isolation_level=None)) as connection:
        connection.create_function("rename_task", 2, _rename_task, deterministic=True)
        connection.create_function("rename_result", 3, _rename_result, deterministic=True)
        connection.execute("ATTACH :other AS other", {"other": str(other)})
        connection.execute("BEGIN")
        at = dict(connection.execute("SELECT name, at FROM main.positions"))
        values = {"prefix": prefix, "place": at["places"], "event": at["events"]}
        for table, changed in _TABLES.items():
            columns = [row[1] for row in connection.execute(f"PRAGMA other.table_info({table})")]
            expressions = [changed.get(name, "{0}").format(name) for name in columns]
            connection.execute(
                f"INSERT INTO main.{table} ({', '.join(columns)})"  # noqa: S608 - names of the layout
                f" SELECT {', '.join(expressions)} FROM other.{table}",
                values,
            )
        connection.execute(
            "INSERT INTO main.texts (rowid, words)"
            " SELECT rowid + sign(rowid) * :place, words FROM other.texts",
            values,
        )
        connection.execute(
            "UPDATE main.positions SET at = at"
            " + (SELECT at FROM other.positions AS o WHERE o.name = positions.name)"
        )
        connection.execute("COMMIT")


def _rename_task(body: bytes, prefix: str) -> bytes:
    task = unpack(body)
    return pack(replace(task, id=prefix + task.id)).body


def _rename_result(packed: bytes, prefix: str, offset: int) -> bytes:
    view = decode_view(packed)
    renamed = replace(
        view,
        position=view.position + offset,
        session=prefix + view.session,
        task=prefix + view.task,
        judges=view.judges and prefix + view.judges,
    )
    return msgspec.msgpack.encode(renamed)
