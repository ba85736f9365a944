"""`examples/swe_gym` at toy size with weights that a real engine serves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engines import servers
from engines.conftest import FURTHEST
from support.commands import TUGLINE
from support.swe_gym import STEPS, make_start, read_metrics, run
from tugline.sandbox.bubblewrap import Bubblewrap

WINDOW = "32768"
FLAGS = (
    *("--dtype", "bfloat16", "--language-model-only"),
    *("--max-model-len", WINDOW, "--max-num-batched-tokens", WINDOW, "--no-enable-prefix-caching"),
)
"""On a CPU vLLM computes the toy's model in bfloat16 only, and dies of a request with a seed whose
prompt it computes in parts."""


@pytest.mark.engines
@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_the_toy_is_trained_with_vllm(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Two steps of the toy's own file with vLLM in bfloat16: no session fails, weights arrive."""
    if reason := Bubblewrap().check_available():
        pytest.skip(reason)
    example = make_start(tmp_path, "--engine", "vllm")
    start = example / "toy" / "start" / "sft" / "model"
    with servers.running("vllm", start, tmp_path, *FLAGS) as server:
        run(example, TUGLINE, "train", "toy/train.yaml", "--engine", server.url, "--out", "run")
    metrics = read_metrics(example / "run")
    for step in STEPS:
        own = metrics[step]
        assert (own["rollout/sessions"], own["rollout/failed"]) == (12, 0)
        assert own["rollout/signal"] >= 1
        assert own["update/updates"] == 1
        assert own["update/mismatch/total/tokens"] == own["update/tokens_trained"] > 0
        assert own["update/mismatch/total/mean_abs"] < 0.01
        assert own["publish/arrived"] == pytest.approx(1, abs=0.1)
        assert own["publish/max_abs_dlogprob"] < 1
    record_property(FURTHEST, max(metrics[step]["publish/max_abs_dlogprob"] for step in STEPS))
