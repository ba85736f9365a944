"""Ask verl's own agent loop manager for sessions, in a local Ray, and write down its rows.

python run_verl.py RESULT MODEL TASK PROMPTS SESSIONS
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue as tq
import verl
from hydra import compose, initialize_config_dir
from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import AdvantageEstimator
from verl.trainer.ppo.v1 import AgentLoopManagerTQ
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

COLUMNS = (
    "prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores", "input_ids",
    "position_ids",
)  # fmt: skip
LOOP = Path(__file__).parents[3] / "examples/verl/loop.yaml"


def make_config(model: str, sessions: int) -> Any:
    """The configuration of verl, with what its recipe changes."""
    rollout = "actor_rollout_ref.rollout"
    with initialize_config_dir(
        str(Path(verl.__file__).parent / "trainer/config"), version_base=None
    ):
        return compose(
            "ppo_trainer",
            overrides=[
                f"actor_rollout_ref.model.path={model}",
                f"{rollout}.name=vllm",
                f"{rollout}.n={sessions}",
                f"{rollout}.temperature=0.7",
                f"{rollout}.agent.num_workers=2",
                f"{rollout}.agent.default_agent_loop=tugline",
                f"{rollout}.agent.agent_loop_config_path={LOOP}",
            ],
        )


def make_prompts(task: str, names: list[str]) -> TensorDict:
    """As verl's trainer hands them over."""
    messages = [{"role": "user", "content": "do"}]
    return TensorDict(
        {
            "uid": NonTensorStack(*names),
            "index": NonTensorStack(*range(len(names))),
            "raw_prompt": NonTensorStack(*(messages for _ in names)),
            "extra_info": NonTensorStack(*({"task": task} for _ in names)),
            "global_steps": NonTensorData(1),
        },
        batch_size=[len(names)],
    )


def main() -> None:
    """Run the prompts to their end."""
    result, model, task, count, sessions = sys.argv[1:]
    names = [f"prompt{n}" for n in range(int(count))]
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=True)
    config = make_config(model, int(sessions))
    tq.init()
    manager = AgentLoopManagerTQ.create(config=config, llm_client=None)
    prompts = make_prompts(task, names)
    tags = [{"is_prompt": True, "status": "pending", "global_steps": 1} for _ in names]
    tq.kv_batch_put(keys=names, partition_id="train", tags=tags)
    manager.generate_sequences(prompts)
    while True:
        known = tq.kv_list("train")["train"]
        if all(known[name]["status"] in {"finished", "failure"} for name in names):
            break
        time.sleep(0.2)
    keys = sorted(key for key in known if key not in names)
    data = tq.kv_batch_get(keys=keys, partition_id="train")
    advantages = compute_advantages(keys, data)
    rows = [
        {"key": key, "tag": known[key], "advantages": advantages[i].tolist()}
        | {name: data[name][i].tolist() for name in COLUMNS}
        | {name: data[name][i] for name in ("num_turns", "extra_fields")}
        for i, key in enumerate(keys)
    ]
    status = {name: known[name]["status"] for name in names}
    Path(result).write_text(json.dumps({"prompts": status, "rows": rows}))


def compute_advantages(keys: list[str], data: TensorDict) -> torch.Tensor:
    """Have verl compare the sessions of each prompt, without dividing by the deviation."""
    names = ["response_mask", "rm_scores"]
    batch = DataProto(batch=data.select(*names).to_padded_tensor())
    batch.batch["token_level_rewards"] = batch.batch["rm_scores"]
    batch.non_tensor_batch["uid"] = np.array([key.rsplit("_", 2)[0] for key in keys], dtype=object)
    done = compute_advantage_for_multi_trajectories(
        batch, keys, adv_estimator=AdvantageEstimator.GRPO, norm_adv_by_std_in_grpo=False
    )
    return done.batch["advantages"]


if __name__ == "__main__":
    main()
