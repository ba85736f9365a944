"""A training run of seconds: a random model, an agent with one call, a random reward."""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import msgspec
import yaml
from transformers import PreTrainedTokenizerFast

from support.models import make_qwen3
from tugline.demo.run import WARM_START
from tugline.errors import EvaluatorError
from tugline.evaluators.base import SessionOutcome
from tugline.trainers.sinks import METRICS, read_lines
from tugline.types import Ledger

AGENT = """
import json, os, urllib.request as r
messages = [{"role": "user", "content": os.environ["TUGLINE_INSTRUCTION"]}]
head = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
for _ in range(1):
    body = json.dumps({"model": "m", "messages": messages}).encode()
    answer = json.load(r.urlopen(r.Request(url, body, head)))["choices"][0]["message"]
    if len(answer["content"] or "") % 2:
        break
    messages += [answer, {"role": "user", "content": "Go on."}]
"""
"""An agent of one call."""


TRL_ON_CPU: dict[str, Any] = {"use_cpu": True, "bf16": False, "activation_checkpointing": False}
TRL_ON_CPU |= {"report_to": [], "save_strategy": "no"}
"""Arguments of TRL's trainers for a short run without a GPU."""


def by_chance(outcome: SessionOutcome) -> float:
    """Earn 1 for an odd sum of the sampled ids."""
    return float(sum(int(call.sampled_ids.sum()) for call in outcome.calls) % 2)


def by_sample(outcome: SessionOutcome) -> float:
    """Earn 1 in every second session of a task, so that each step has a signal."""
    return float(int(outcome.calls[0].session.rpartition("-")[2]) % 2)


def by_name(outcome: SessionOutcome) -> float:
    """Earn 1 in every session of about half of the groups, and in every second one of the others.

    It depends on nothing but the name of the session.
    """
    group, _, sample = outcome.calls[0].session.rpartition("-")
    return float(zlib.crc32(group.encode()) % 2 or int(sample) % 2)


def never(_outcome: SessionOutcome) -> float:
    """Earn nothing."""
    return 0.0


UNAVAILABLE: list[int] | None = None
"""None: the judge is never available; else it fails once for each item."""


def unavailable(outcome: SessionOutcome) -> float:
    """Fail, as with a judge that is away."""
    if UNAVAILABLE is None or UNAVAILABLE:
        if UNAVAILABLE:
            UNAVAILABLE.pop()
        msg = "the judge is away"
        raise EvaluatorError(msg)
    return by_chance(outcome)


def load_tokenizer() -> PreTrainedTokenizerFast:
    """The demo's vocabulary as a tokenizer of transformers."""
    end = "<|im_end|>"
    vocabulary = str(WARM_START / "tokenizer.json")
    return PreTrainedTokenizerFast(tokenizer_file=vocabulary, eos_token=end, pad_token=end)


def make_model(folder: Path) -> Path:
    """Write a random model with the demo's vocabulary, and its tokenizer."""
    model = make_qwen3(vocab_size=1400, max_position_embeddings=512, eos_token_id=2)
    model.save_pretrained(folder)
    shutil.copy(WARM_START / "tokenizer.json", folder)
    return folder


def write_config(folder: Path, **sections: Any) -> Path:
    """Write the configuration of a run of three steps of two groups of two sessions."""
    make_model(folder / "model")
    for name, count in (("train", 5), ("test", 2)):
        rows = [{"id": f"{name}{i}", "question": f"Say {i}."} for i in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "agent.py").write_text(AGENT)

    config = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    command = ["python3", "-IS", str(folder / "agent.py")]
    config["template"]["harness"]["options"]["command"] = command
    for name, values in sections.items():
        own = config.get(name)
        config[name] = own | values if own and values else values
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def check_totals(run: Path, state: dict[str, Any], steps: int, sessions: int) -> list[Any]:
    """Check that a finished run counted each step and token once; the metrics of its steps."""
    assert (state["step"], state["sessions"], state["failed"]) == (steps, sessions, 0)
    rows = [row for row in read_lines(run / METRICS) if "rollout/reward" in row]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    ledger = msgspec.convert(state["ledger"], Ledger)
    assert ledger.balanced
    assert sum(row["rollout/sampled"] for row in rows) == ledger.sampled
    return rows
