"""Every benchmark runs at a small size, and its figures are plausible."""

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


def test_the_session_has_the_documented_length() -> None:
    """A session begins with 8,000 tokens and grows by 600 a turn, of which 300 are sampled."""
    figures = measure_trajectories()
    assert figures["unique_ids_100"] == 8000 + 600 * 100 - 300
    assert figures["sampled_100"] == 300 * 100


def test_recording_size_is_linear_and_bounded() -> None:
    """A recording has at most 1.5 times 1.4 bytes for each id and 4 for each logprob."""
    figures = measure_trajectories()
    limit = 1.5 * (figures["unique_ids_100"] * 1.4 + figures["sampled_100"] * 4)
    assert figures["sampled_100"] * 4 < figures["recording_bytes_100"] <= limit
    assert 0 < figures["slope_bytes"] <= 1.1


def test_peak_memory_is_linear_and_bounded() -> None:
    """Building takes at most four times the ids' size, reading less than twice that."""
    figures = measure_trajectories()
    ids = 4 * figures["unique_ids_100"]
    assert ids < figures["peak_bytes_100"] <= 4 * ids
    assert figures["read_peak_bytes_100"] < 8 * ids
    assert figures["slope_peak"] <= 1.1


def test_times_are_plausible() -> None:
    """CPU times are within bounds with a margin; the accepted ones are in the docs."""
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
    """A complete run that is too small for meaningful figures."""
    return measure("gateway", "run.py", "--json", "--size", "smoke")


@pytest.mark.slow
def test_every_gateway_mode_is_reported() -> None:
    """The documented keys exist; the gateway costs more than the pass-through, within reason."""
    report = measure_gateway()
    keys = {"cpu_ms", "opening_cpu_ms", "ratio_to_passthrough", "added_p50_ms", "added_p99_ms"}
    for mode in ("exact", "observed", "stream"):
        assert report[mode].keys() >= keys
        assert report[mode]["added_p99_ms"].keys() == {"1", "2"}
        assert 1 < report[mode]["ratio_to_passthrough"] < 100
    assert report["stream"]["first_byte_ms"] > 0
    assert report["stream_paced"]["cpu_ms"] > 0
    assert report["machine"]["noise"].keys() == {"exact", "observed", "stream", "stream_paced"}


@pytest.mark.slow
def test_long_and_open_sessions_are_reported() -> None:
    """Growth by turns, stalls and memory are measured; a later turn costs little more.

    512 logprobs are 2 kB of a recorded call; more than 10 kB would mean that history is repeated.
    """
    report = measure_gateway()
    assert report["growth_cpu_ms"].keys() == {"10", "30"}
    assert 0 < report["growth"] < 5
    assert 0 < report["stall_cpu_ms"] < 1000
    assert report["stall_ms"] > 0
    assert report["rss_open_bytes_per_call"] < 10**6
    assert 2048 < report["kept_bytes_per_call"] < 10_240
    assert report["long_results"]["conversation"]["last_prompt_tokens"] > 90_000


@pytest.mark.slow
def test_the_load_of_the_gateway_is_the_documented_one() -> None:
    """The load is 40 turns with 16k tokens of prompt on average and 512 sampled tokens."""
    load = measure_gateway()["conversation"]
    assert abs(load["mean_prompt_tokens"] - 16_384) < 100
    assert (load["turns"], load["sampled_tokens"]) == (40, 512)


# --------------------------------------------------------------------------- servers and nodes
@pytest.mark.slow
def test_the_server_benchmark_reports_its_figures() -> None:
    """The documented keys have plausible figures, measured on real processes."""
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
@pytest.mark.nightly
def test_every_fleet_is_reported() -> None:
    """All sessions are committed, nodes keep their leases, and the storm ends in time."""
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


SANDBOXES = """
import asyncio, json, subprocess, tempfile
from pathlib import Path
from run import list_resources, rate, timed
from tugline.sandbox.base import SandboxSpec
from tugline.sandbox.local import LocalRuntime

async def main(root):
    runtime, spec = LocalRuntime(), SandboxSpec()
    session = await timed(runtime, root / "one", spec, 2)
    per_minute = await rate(runtime, spec, root / "many", 2, 6)
    before = list_resources(root, None)
    left = subprocess.Popen(["sleep", "30"])
    leaked = list_resources(root, None)["processes"] - before["processes"]
    left.kill(); left.wait()
    print(json.dumps([session, per_minute, leaked == {str(left.pid)}]))

with tempfile.TemporaryDirectory() as root:
    asyncio.run(main(Path(root)))
"""


def test_runtimes_are_measured_on_real_sandboxes() -> None:
    """Every part is timed, sessions remove their folders, and a leaked process is detected."""
    session, per_minute, leak_detected = measure("runtimes", "-c", SANDBOXES)
    assert session["all"] >= session["start"] + sum(session["execs"]) > 0
    assert len(session["execs"]) == 2
    assert per_minute > 0
    assert leak_detected


SLOTS = """
import json
import uvloop
from run import Case, compute_ideal, run_on_node

few, many = (compute_ideal(Case(sessions=320, slots=slots)) for slots in (36, 52))
result = uvloop.run(run_on_node(Case(sessions=64)))
print(json.dumps({"few": few, "many": many, "busy": result.busy, "sessions": result.sessions}))
"""


def test_utilisation_depends_on_the_number_of_agents() -> None:
    """Ideally 52 agents keep 32 engine slots busy and 36 do not; a real node runs the workload."""
    report = measure("utilisation", "-c", SLOTS)
    assert 0.99 < report["many"] <= 1.0
    assert 0.6 < report["few"] < 0.85
    assert 0.3 < report["busy"] <= 1.0
    assert report["sessions"] == 64


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_no_attack_affects_another_session() -> None:
    """Every attack is refused or bounded; all calls and sessions of the others succeed."""
    report = measure("hostile", "run.py", "--json", "--quick", timeout=240)
    assert report["completed"] == report["sessions"]
    assert (report["failed"], report["attempts_spent"]) == (0, 0)
    spells = report["spells"]
    for name in ("big_body", "many_messages", "many_parts", "deep", "bomb", "padding"):
        assert set(spells[name]["hostile"]) == {"400"}, (name, spells[name])
    assert set(spells["n_128"]["hostile"]) <= {"200", "429"}
    assert set(spells["connections"]["hostile"]) <= {"400", "429", "503"}
    assert "200" not in spells["endless"]["hostile"]
    assert all(spell["calls"] > 0 for spell in spells.values())


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_the_memory_of_a_node_does_not_grow_with_its_sessions() -> None:
    """All sessions complete, and the node's memory is bounded."""
    report = measure("sessions", "run.py", "--json", "--sessions", "2000", timeout=1400)
    assert report["completed"] == report["sessions"]
    assert report["growth_mb"] < 8


# --------------------------------------------------------------------------- learning
@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.pi
@pytest.mark.timeout(600)
def test_a_policy_is_made_trained_and_evaluated(tmp_path: Path) -> None:
    """The run is complete, though too small to learn anything; a second call reads its results."""
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
@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_shortcut_is_only_rewarded_by_the_naive_evaluator() -> None:
    """Both runs take the shortcut; the evaluator `tests` only rewards changes of the code."""
    refused, believed = measure("training", "shortcut.py", "--steps", "3", "--json", timeout=500)
    assert (refused["judge"], believed["judge"]) == ("Refused", "Believed")
    assert sum(refused["write"]) > 0
    assert sum(believed["write"]) > 0
    for step in range(3):
        assert refused["reward"][step] <= refused["change"][step]
        assert believed["reward"][step] >= believed["write"][step]
