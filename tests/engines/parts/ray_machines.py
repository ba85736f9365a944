"""A Ray cluster of four machines on this one, for a test: commands on stdin, answers on stdout.

Commands are lines such as ``add n5``, ``kill n2`` and ``drain n3``; each is answered with the
cluster's address.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ray.cluster_utils import Cluster


def main() -> None:
    """Start it, and do what is asked until stdin ends."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    machines = {name: _add(cluster, name) for name in ("n1", "n2", "n3", "n4")}
    say(cluster.address)
    for line in sys.stdin:
        what, name = line.split()
        if what == "add":
            machines[name] = _add(cluster, name)
        elif what == "kill":
            cluster.remove_node(machines.pop(name), allow_graceful=False)
        elif what == "drain":
            _drain(cluster.address, machines[name].node_id)
        say(cluster.address)
    os._exit(0)  # what is left ends with this process


def say(line: str) -> None:
    """Answer."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _add(cluster: Cluster, name: str) -> object:
    return cluster.add_node(num_cpus=1, node_name=name, object_store_memory=80 << 20)


def _drain(address: str, node_id: str) -> None:
    """Announce that a machine will be taken away, as a cloud does before it preempts one."""
    subprocess.run(
        [
            Path(sys.executable).with_name("ray"), "drain-node", "--address", address,
            "--node-id", node_id, "--reason", "DRAIN_NODE_REASON_PREEMPTION",
            "--reason-message", "a test", "--deadline-remaining-seconds", "120",
        ],
        check=True,
        stdout=sys.stderr,
    )  # fmt: skip


if __name__ == "__main__":
    main()
