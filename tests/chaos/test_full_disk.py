import contextlib
import errno
import json
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.fleet import Fleet, until
from chaos.storm import body

SIZE = 24 << 20


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """A server whose folder is on a small disk of its own, and a node that is not."""
    disk = tmp_path / "run" / "server"
    disk.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(disk)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False, timeout=10)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        fleet = Fleet(tmp_path / "run", slots=4)
        with contextlib.closing(fleet):
            fleet.launch(nodes=1)
            yield fleet
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True, timeout=10)


def fill(file: Path) -> None:
    """Leave not a byte."""
    with contextlib.suppress(OSError), file.open("wb", buffering=0) as out:
        for size in (1 << 16, 1 << 10, 1):
            try:
                while True:
                    out.write(os.urandom(size))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_full_disk_refuses_work_and_loses_none(fleet: Fleet) -> None:
    """What was accepted ends once there is room; what was refused was refused clearly."""
    api, draw = fleet.api(), random.Random(3)
    ballast = fleet.folder / "server" / "ballast"
    tasks = [
        {**body(f"f{n}", draw, fleet.callback), "callback": None, "group": {}} for n in range(12)
    ]
    api.post("/v1/tasks", tasks[:8])
    until(lambda: bool(fleet.agents()), "agents to run")
    fill(ballast)
    refusals = []
    for task in tasks[8:]:
        status, text = api.once("POST", "/v1/tasks", json.dumps(task).encode())
        refusals.append((status, json.loads(text)))
    assert {status for status, _ in refusals} == {503}, refusals
    assert all("disk" in told["detail"] or "full" in told["detail"] for _, told in refusals)
    assert api.get("/v1/status")["tasks_open"] >= 1, "reading goes on"
    ballast.unlink()
    api.post("/v1/tasks", tasks[8:])
    until(lambda: api.get("/v1/status")["tasks_open"] == 0, "all tasks to end", 90)
    results = api.get("/v1/results?limit=1000")["items"]
    assert len({one["session"] for one in results}) == len(results) == 12 * 4
    assert {one["status"] for one in results} == {"completed"}
    assert not fleet.deserters
