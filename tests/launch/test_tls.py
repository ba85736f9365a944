"""A server with a self-signed certificate, a node and clients."""

from __future__ import annotations

import json
import subprocess

import pytest

from launch.processes import EXACT, World, task, write
from support.certificates import make_certificate
from support.commands import TUGLINE, run_program


def _start(world: World, **settings: str) -> None:
    tls = {"tls_cert": "cert.pem", "tls_key": "key.pem", **settings}
    (world.folder / "server.yaml").write_text(json.dumps({"server": tls}))
    world.tugline("server", "up", "--no-node", "--port", "0", "--config", "server.yaml")


def _call(world: World, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the installed program, which reads the trusted certificates when it is imported."""
    return run_program(TUGLINE, *options, cwd=world.folder)


@pytest.mark.slow
def test_sessions_run_over_https(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that does not trust the certificate fails; a node and clients that do work."""
    make_certificate(world.folder)
    _start(world)
    world.wait_for_log("server", "the server is up at https://127.0.0.1:")
    url = world.read_data("server.json", "url")
    refused = _call(world, "status")
    assert refused.returncode != 0
    assert "certificate verify failed" in refused.stderr

    monkeypatch.setenv("SSL_CERT_FILE", str(world.folder / "cert.pem"))
    join = world.read_data("tokens.json", "join")
    options = ("--server", url, "--slots", "2", "--engine", world.engine(), *EXACT)
    world.tugline("a", "node", "--name", "a", *options, TUGLINE_JOIN_TOKEN=join)
    world.wait_for_log("a", "is up: 2 slots")
    tasks = write(world.folder / "t.jsonl", [task("t")])
    done = _call(world, "submit", tasks, "--wait", "--json")
    assert done.returncode == 0, done.stderr
    views = [json.loads(line) for line in _call(world, "results", "--json").stdout.splitlines()]
    assert [view["status"] for view in views] == ["completed"] * 2


def test_a_key_without_its_certificate_is_refused(world: World) -> None:
    """The error names both files."""
    make_certificate(world.folder)
    (world.folder / "key.pem").write_text("nothing")
    _start(world)
    assert world.running.pop("server").wait(20) != 0
    message = f"certificate {world.folder / 'cert.pem'} and key {world.folder / 'key.pem'} cannot"
    assert f"{message} be used" in world.read_log("server")
