"""``tugline plan``: figures, limits and warnings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.conftest import Run

PLAN = (
    *("plan", "--gpus=4", "--model-tps=1000", "--turns=10", "--turn-tokens=100", "--prompt=1000"),
    *("--result-tokens=200", "--token-ms=10", "--tool-s=1", "--tool-cpu-s=0", "--eval-s=10"),
)
PI = ("--harness", "pi")


def test_a_plan_follows_from_the_constants(run_here: Run) -> None:
    """Four sessions of 1,000 tokens per second have the figures that were computed by hand."""
    plan = json.loads(run_here(*PLAN, *PI, "--json").stdout)
    assert plan["sessions_per_hour"] == pytest.approx(4 * 3600)
    assert plan["session_s"] == pytest.approx(0.8 + 10 * 0.034 + 10 * 1.0 + 10 * 1 + 10)
    assert plan["open_sessions"] == 125
    assert plan["busy"] == 1.0
    assert plan["kv_tokens"] == 125 * (1000 + 4000) // 2
    gateway_s = 10 * (0.0016 + 0.0000068 * 5) + 1000 * 0.000043 + 0.05
    assert plan["gateway_cores"] == pytest.approx(4 * gateway_s)
    assert plan["agent_cores"] == pytest.approx(4 * 11.14)
    assert plan["nodes_for"] == {"processors": 2, "memory": 1}
    assert plan["disk_gb_per_day"] == pytest.approx(4 * 86400 * (4000 * 1.5 + 7000) / 1e9)
    assert (plan["nodes"], plan["slots"], plan["servers"]) == (2, 63, 1)


@pytest.mark.parametrize(
    ("options", "limit"),
    [("--harness pi --cores 8", "processors"), ("--harness qwen_code --memory-gb 16", "memory")],
)
def test_the_scarcest_resource_decides(options: str, limit: str, run_here: Run) -> None:
    """The number of nodes follows from the limit that is reached first, the slots from it."""
    command = [*PLAN, *options.split()]
    plan = json.loads(run_here(*command, "--json").stdout)
    most = max(plan["nodes_for"], key=plan["nodes_for"].get)
    assert (most, plan["nodes"]) == (limit, plan["nodes_for"][limit])
    assert plan["slots"] * plan["nodes"] >= plan["open_sessions"]
    assert f"the bottleneck is {limit}" in run_here(*command).stdout


def test_a_step_with_too_few_sessions_is_reported(run_here: Run) -> None:
    """25 of 125 sessions keep a fifth of the engines busy."""
    out = run_here(*PLAN, *PI, "--sessions", "25").stdout
    assert "25 sessions a step keep 20% of the engines busy" in out


# --------------------------------------------------------------------------- a training file
@pytest.fixture
def training(tmp_path: Path) -> None:
    """A training file, and a model of which only config.json is there."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
        "max_position_embeddings": 40_960,
    }
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    settings = {
        "model": "model",
        "tasks": {"taskset": {"name": "jsonl", "options": {"path": "tasks.jsonl"}}},
        "template": {"harness": {"name": "pi", "options": {"context_window": 32_768}}},
        "engine": {"urls": ["http://127.0.0.1:8000", "http://127.0.0.1:8001"]},
        "fsdp": True,
        "grpo": {"autocast": "bfloat16"},
        "schedule": {"steps": 20, "tasks_per_step": 4, "samples": 8},
    }
    (tmp_path / "train.json").write_text(json.dumps(settings))


FILE = ("plan", "train.json")
WIDE = ("--set", "grpo.micro_tokens=163840", "--gpu-memory=24")


@pytest.mark.usefixtures("training")
def test_a_training_file_has_a_plan_of_its_gpus(run_here: Run) -> None:
    """The file gives engines, sessions and harness; the agents are planned at the same rate."""
    report = json.loads(run_here(*FILE, "--ranks=2", "--price=2", "--json").stdout)
    planned = report["training"]
    assert (planned["layout"]["ranks"], planned["layout"]["engines"]) == (2, 2)
    assert planned["weights"] == 596_049_920
    assert planned["fits"]
    assert planned["pass_tokens"] == 32_768
    assert planned["cost"] == pytest.approx(planned["hours"] * 4 * 2)
    per_hour = 32 / planned["seconds"]["sampling"] * 3600
    assert report["agents"]["sessions_per_hour"] == pytest.approx(per_hour)
    out = run_here(*FILE, "--ranks=2", "--price=2").stdout
    for part in ("optimizer", "cache", "sampling", "assumed"):
        assert part in out
    assert "fits        yes" in out


@pytest.mark.usefixtures("training")
def test_what_does_not_fit_is_an_error_with_a_way_out(run_here: Run) -> None:
    """The exit code is 1, and the change that the plan names makes it 0."""
    refused = run_here(*FILE, *WIDE, "--ranks=2")
    assert refused.returncode == 1
    [line] = [line for line in refused.stdout.splitlines() if line.startswith("fits")]
    change = line.split("it fits with ")[1]
    assert run_here(*FILE, *WIDE, "--ranks=2", *change.split()).returncode == 0


@pytest.mark.usefixtures("training")
@pytest.mark.parametrize(
    ("options", "layout"),
    [
        ("--ranks 4 --gpus 4", "8 of 80 GiB: 4 for 4 engines, 4 for the trainer"),
        ("--ranks 8 --gpus 8", "16 of 80 GiB: 8 for 8 engines, 8 for the trainer"),
        ("--ranks 8 --gpus 8 --engine-gpus 2", "16 of 80 GiB: 8 for 4 engines, 8 for"),
        ("--gpus 1 --engine-share 0.4 --set lora.rank=8", "1 of 80 GiB, of which engines take 40%"),
    ],
)
def test_layouts(options: str, layout: str, run_here: Run) -> None:
    """Engines have GPUs of their own, or a share of the trainer's."""
    assert layout in run_here(*FILE, *options.split()).stdout


def test_options_of_a_training_need_its_file(run_here: Run) -> None:
    """They would have no effect without it, and the engines' figures are needed then."""
    assert "--set a=1 requires the file" in run_here(*PLAN, "--set", "a=1").stderr
    assert "requires the file" in run_here(*PLAN, "--ranks", "2").stderr
    assert "--gpus is missing" in run_here("plan", "--model-tps", "1").stderr
