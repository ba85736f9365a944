"""Benchmarks run at a small size, through every measure, and their figures can be true."""

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.programs import ROOT, measure

REBUILD = ROOT.parent / "tools" / "warm_start" / "rebuild.py"


# --------------------------------------------------------------------------- trajectories
@functools.cache
def measure_trajectories() -> Any:
    """Sessions of 10 and 100 turns, with few repetitions."""
    return measure("trajectories", "run.py", "--json", "--size", "smoke")


def test_the_session_is_the_one_that_is_spoken_of() -> None:
    """8,000 tokens, then 600 a turn, of which 300 are sampled."""
    figures = measure_trajectories()
    assert figures["unique_ids_100"] == 8000 + 600 * 100 - 300
    assert figures["sampled_100"] == 300 * 100


def test_bytes_are_linear_and_few() -> None:
    """The limit is 1.5 times 1.4 bytes an id and 4 a logprob."""
    figures = measure_trajectories()
    limit = 1.5 * (figures["unique_ids_100"] * 1.4 + figures["sampled_100"] * 4)
    assert figures["sampled_100"] * 4 < figures["recording_bytes_100"] <= limit
    assert 0 < figures["slope_bytes"] <= 1.1


def test_memory_is_linear_and_little() -> None:
    """Building holds less than four times the ids, reading less than twice the build's bound."""
    figures = measure_trajectories()
    ids = 4 * figures["unique_ids_100"]
    assert ids < figures["peak_bytes_100"] <= 4 * ids
    assert figures["read_peak_bytes_100"] < 8 * ids
    assert figures["slope_peak"] <= 1.1


def test_times_are_told() -> None:
    """CPU times; the bounds leave a busy machine some room, the accepted ones are in the docs."""
    figures = measure_trajectories()
    assert 0 < figures["build_ms_100"] <= 50
    assert 0 < figures["decode_ms_40"] <= 20
    assert 0 < figures["slope_time"] < 1.5
    assert figures["decode_parts_ms_40"].keys() == {
        "checksums", "zstd", "msgpack", "numpy and joining",
    }  # fmt: skip


# --------------------------------------------------------------------------- the gateway
@functools.cache
def measure_gateway() -> Any:
    """A run that is too small to mean anything, from end to end."""
    return measure("gateway", "run.py", "--json", "--size", "smoke")


@pytest.mark.slow
def test_every_mode_of_the_gateway_has_its_figures() -> None:
    """The documented keys are there; the gateway costs more than forwarding and not a fortune."""
    told = measure_gateway()
    keys = {"cpu_ms", "opening_cpu_ms", "ratio_to_passthrough", "added_p50_ms", "added_p99_ms"}
    for mode in ("exact", "observed", "stream"):
        assert told[mode].keys() >= keys
        assert told[mode]["added_p99_ms"].keys() == {"1", "2"}
        assert 1 < told[mode]["ratio_to_passthrough"] < 100
    assert told["stream"]["first_byte_ms"] > 0
    assert told["stream_paced"]["cpu_ms"] > 0
    assert told["machine"]["noise"].keys() == {"exact", "observed", "stream", "stream_paced"}


@pytest.mark.slow
def test_what_lasts_in_the_gateway_has_its_figures() -> None:
    """Turns, stalls and memory of open sessions are measured; a later turn does not cost a lot.

    512 logprobs alone are 2 kB of a call; more than 10 would mean that history is stored again.
    """
    told = measure_gateway()
    assert told["growth_cpu_ms"].keys() == {"10", "30"}
    assert 0 < told["growth"] < 5
    assert 0 < told["stall_cpu_ms"] < 1000
    assert told["stall_ms"] > 0
    assert told["rss_open_bytes_per_call"] < 10**6
    assert 2048 < told["kept_bytes_per_call"] < 10_240
    assert told["long_results"]["conversation"]["last_prompt_tokens"] > 90_000


@pytest.mark.slow
def test_the_load_is_what_the_figures_are_quoted_for() -> None:
    """A 16k-token prompt on average, 40 turns, 512 sampled tokens."""
    load = measure_gateway()["conversation"]
    assert abs(load["mean_prompt_tokens"] - 16_384) < 100
    assert (load["turns"], load["sampled_tokens"]) == (40, 512)


# --------------------------------------------------------------------------- servers and nodes
@pytest.mark.slow
def test_a_server_has_its_figures() -> None:
    """The documented keys are there, from real processes, with figures that can be true."""
    report = measure("server", "run.py", "--json", "--size", "smoke")
    assert report["store"] == "sqlite"
    assert report["sessions_per_s"] > 1
    assert 0 < report["dispatch_p50_ms"] <= report["dispatch_p99_ms"]
    assert 0 < report["idle_dispatch_p50_ms"] <= report["idle_dispatch_p99_ms"]
    assert report["submit_per_s"] > 100
    assert report["queued"] == 2000
    assert 0 < report["list_ms"] < 5000
    assert 0 < report["status_ms"] < 5000
    assert report["rss_growth_mb"] < report["rss_mb"]
    assert report["long_polls_open"] == report["long_polls"] == 20


@pytest.mark.slow
def test_every_fleet_has_its_figures() -> None:
    """Every session is committed, by nodes that keep their leases, and a storm ends soon."""
    report = measure("cluster", "run.py", "--json", "--quick")
    sizes = [(row["nodes"], row["servers"]) for row in report["rows"]]
    assert sizes == [(10, 1), (100, 1), (100, 2)]
    for row in report["rows"]:
        assert row["sessions_per_s"] > 1
        assert 0 < row["dispatch_p50_ms"] <= row["dispatch_p99_ms"]
        assert 0 < row["server_cpu_ms_per_session"] < 100
        assert 5 < row["statements_per_session"] < 200
        assert row["wal_bytes_per_session"] > 500
        assert row["rejoined"] == row["failed_calls"] == 0
    storm = report["storm"]
    assert storm["died"] == 30
    assert storm["sessions_lost"] > 0
    assert storm["beyond_lease_s"] < 30


BOXES = """
import asyncio, json, subprocess, tempfile
from pathlib import Path
from run import leaks, rate, there, timed
from tugline.sandbox.base import SandboxSpec
from tugline.sandbox.local import LocalRuntime

async def main(root):
    runtime, spec = LocalRuntime(), SandboxSpec()
    one = await timed(runtime, root / "one", spec, 2)
    many = await rate(runtime, spec, root / "many", 2, 6)
    before = there(root, None)
    left = subprocess.Popen(["sleep", "30"])
    seen = there(root, None)["processes"] - before["processes"]
    left.kill(); left.wait()
    print(json.dumps([one, many, len(seen), seen == {str(left.pid)}]))

with tempfile.TemporaryDirectory() as root:
    asyncio.run(main(Path(root)))
"""


def test_figures_of_runtimes_are_of_real_boxes() -> None:
    """Every part takes its time, sessions remove their folders, a process left over is counted."""
    one, many, seen, named = measure("runtimes", "-c", BOXES)
    assert one["all"] >= one["start"] + sum(one["execs"]) > 0
    assert len(one["execs"]) == 2
    assert many > 0
    assert (seen, named) == (1, True)


SLOTS = """
import json
import uvloop
from run import Case, ideal, on_node

few, many = (ideal(Case(sessions=320, slots=slots)) for slots in (36, 52))
seen = uvloop.run(on_node(Case(sessions=64)))
print(json.dumps({"few": few, "many": many, "busy": seen.busy, "sessions": seen.sessions}))
"""


def test_the_use_of_an_engine_gets_near_the_ideal() -> None:
    """52 agents keep 32 slots full if they are always ready, 36 cannot; the node really runs."""
    report = measure("utilisation", "-c", SLOTS)
    assert 0.99 < report["many"] <= 1.0
    assert 0.6 < report["few"] < 0.85
    assert 0.3 < report["busy"] <= 1.0
    assert report["sessions"] == 64


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_attack_fails_another_session() -> None:
    """Every attack is refused or bounded; the others' calls and sessions all succeed."""
    report = measure("hostile", "run.py", "--json", "--quick", timeout=240)
    assert report["completed"] == report["sessions"]
    assert (report["failed"], report["attempts_spent"]) == (0, 0)
    spells = report["spells"]
    for name in ("big_body", "many_messages", "many_parts", "deep", "bomb", "padding"):
        assert set(spells[name]["hostile"]) == {"400"}, (name, spells[name])
    assert set(spells["n_128"]["hostile"]) <= {"200", "429"}
    assert set(spells["connections"]["hostile"]) <= {"400", "429", "503"}
    assert "200" not in spells["endless"]["hostile"]
    assert all(one["calls"] > 0 for one in spells.values())


# --------------------------------------------------------------------------- learning
@pytest.mark.slow
@pytest.mark.pi
@pytest.mark.timeout(600)
def test_a_policy_is_made_trained_and_tried(tmp_path: Path) -> None:
    """A policy that has learned next to nothing: what is shown is that the figures are there.

    Run again it only reads what there is.
    """
    policy, runs = tmp_path / "policy", tmp_path / "runs"
    small = ("--blocks", "--harness", "pi", "--sessions", "2", "--steps", "2", "1", "1")
    subprocess.run([sys.executable, REBUILD, policy, *small], check=True, timeout=300)
    options = (
        "--json", "--harness", "pi", "--seeds", "0", "--steps", "1", "--tasks-per-step", "1",
        "--samples", "2", "--heldout", "3", "--cross", "2", "--policy", policy,
        "--out", runs, "--plot", tmp_path / "plot.png",
    )  # fmt: skip
    result = measure("learn", "run.py", *options, timeout=500)
    (run,) = result["runs"]
    assert (run["harness"], run["sessions"], run["failed"]) == ("pi", 3 + 2 + 3, 0)
    assert run["before"]["tasks"] == run["after"]["tasks"] == 3
    assert result["cross"]["pi"]["pi"]["tasks"] == 2
    assert (tmp_path / "plot.png").stat().st_size > 1000
    assert measure("learn", "run.py", *options, timeout=60) == result


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_only_a_believed_shortcut_is_rewarded() -> None:
    """Both runs offer it; of the evaluator `tests` only changes of the code have a reward."""
    refused, believed = measure("training", "shortcut.py", "--steps", "3", "--json", timeout=500)
    assert (refused["judge"], believed["judge"]) == ("Refused", "Believed")
    assert sum(refused["write"]) > 0
    assert sum(believed["write"]) > 0
    for step in range(3):
        assert refused["reward"][step] <= refused["change"][step]
        assert believed["reward"][step] >= believed["write"][step]
