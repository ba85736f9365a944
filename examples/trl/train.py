"""Train with TRL on sessions of Tugline.

python examples/trl/train.py examples/trl/repair.yaml runs/trl [--resume]
"""

import argparse
from importlib.resources import files
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from trl import GRPOConfig, GRPOTrainer
from tugline_trl import TuglineRollouts, reward

from tugline.errors import UsageError
from tugline.trainers.config import TrainConfig, read_config
from tugline.trainers.grpo.config import GrpoConfig

TRANSLATED = {
    "lr", "betas", "max_grad_norm", "kl", "clip_low", "clip_high", "advantage",
    "gradient_checkpointing", "tree_packing", "micro_tokens", "sessions_per_update",
}  # fmt: skip
"""Supported keys of `grpo`; the last three only affect the computation of Tugline's trainer."""
SCALE = {"grpo": "group", "dr_grpo": "none"}


def make_arguments(config: TrainConfig, out: Path, **changes: object) -> GRPOConfig:
    """Translate the configuration of a run. Raises `UsageError` for unsupported keys."""
    schedule, update, default = config.schedule, config.grpo, GrpoConfig()
    for name in update.__struct_fields__:
        value = getattr(update, name)
        if name not in TRANSLATED and value != getattr(default, name):
            msg = f"grpo.{name} is {value!r}: leave it out; set the options of TRL in train.py"
            raise UsageError(msg)
    values: dict[str, object] = {
        "output_dir": str(out / "trl"),
        "max_steps": schedule.steps,
        "num_generations": schedule.samples,
        "per_device_train_batch_size": schedule.tasks_per_step * schedule.samples,
        "temperature": config.template.get("sampling", {}).get("temperature", 1.0),
        "learning_rate": update.lr,
        "lr_scheduler_type": "constant",
        "adam_beta1": update.betas[0],
        "adam_beta2": update.betas[1],
        "max_grad_norm": update.max_grad_norm,
        "beta": update.kl,
        "epsilon": update.clip_low,
        "epsilon_high": update.clip_high,
        "loss_type": "dapo",
        "scale_rewards": SCALE[update.advantage],
        "save_steps": schedule.checkpoint_every or 1,
        "save_total_limit": schedule.keep,
        "logging_steps": 1,
        "seed": schedule.seed,
        "bf16": torch.cuda.is_available(),
        "use_cpu": not torch.cuda.is_available(),
        "activation_checkpointing": update.gradient_checkpointing,
        "report_to": [],
    }
    return GRPOConfig(**(values | changes))


def main() -> None:
    """Run TRL's training loop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--no-experts", action="store_true", help="train without replaying experts")
    parser.add_argument(
        "--no-kept", action="store_true", help="leave tokens of top-p, top-k and min-p untrained"
    )
    options = parser.parse_args()
    config = read_config(options.config, Path(str(files("tugline.demo"))) / "warm_start_model")
    model = AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32)
    fits = {"experts": not options.no_experts, "kept": not options.no_kept}
    with TuglineRollouts(config, options.config.absolute().parent, options.out, **fits) as rollouts:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            rollout_func=rollouts,
            train_dataset=rollouts.dataset(),
            processing_class=load_tokenizer(model),
            args=make_arguments(config, options.out),
        )
        trainer.train(resume_from_checkpoint=options.resume)
        print(f"version {rollouts.version}; {rollouts.tokens_left_out} tokens were left out")


def load_tokenizer(model: PreTrainedModel) -> PreTrainedTokenizerBase:
    """Load the tokenizer for TRL, with the end-of-turn token of the model's generation config."""
    tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
    ends = model.generation_config.eos_token_id
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(
        ends[0] if isinstance(ends, list) else ends
    )
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


if __name__ == "__main__":
    main()
