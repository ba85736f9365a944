"""Open tables of `tugline export verl` with verl, and write down what it makes of them.

python read_export.py RESULT PLAIN PADDED
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import load_dataset
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
from verl.utils.model import compute_position_id_with_mask

NAMES = [
    "prompts", "responses", "input_ids", "attention_mask", "position_ids", "response_mask",
    "rollout_log_probs", "rm_scores",
]  # fmt: skip


def differing(row: dict[str, Any]) -> list[str]:
    """Columns that are not the tensors of verl's own output of this row."""
    experts = row["routed_experts"]
    output = AgentLoopOutput(
        prompt_ids=row["prompts"],
        response_ids=row["responses"],
        response_mask=row["response_mask"],
        response_logprobs=row["rollout_log_probs"],
        routed_experts=None if experts is None else np.array(experts, np.int16)[:-1],
        reward_score=row["reward"],
        metrics=AgentLoopMetrics(),
    )
    tensors = {name: one for name, one in output.as_dict().items() if torch.is_tensor(one)}
    return [name for name, one in tensors.items() if one.tolist() != row[name]]


def main() -> None:
    """Open both tables."""
    result, plain, padded = sys.argv[1:]
    rows = load_dataset("parquet", data_files=plain, split="train")
    found = [name for row in rows for name in differing(row)]
    table = load_dataset("parquet", data_files=padded, split="train")
    experts = ["routed_experts"] if table[0]["routed_experts"] is not None else []
    batch = DataProto.from_dict(
        tensors={name: torch.tensor(table[:][name]) for name in NAMES + experts},
        non_tensors={"uid": np.array(table["uid"], dtype=object)},
    )
    positions = compute_position_id_with_mask(batch.batch["attention_mask"])
    advantages, _ = compute_grpo_outcome_advantage(
        batch.batch["rm_scores"],
        batch.batch["response_mask"],
        batch.non_tensor_batch["uid"],
        norm_adv_by_std_in_grpo=False,
    )
    made = {
        "rows": len(rows),
        "differing": found,
        "positions": bool((positions == batch.batch["position_ids"]).all()),
        "advantages": advantages.tolist(),
        "experts": batch.batch["routed_experts"].tolist() if experts else None,
    }
    Path(result).write_text(json.dumps(made))


if __name__ == "__main__":
    main()
