"""Load a model and a tokenizer from a folder (``config.json``, safetensors, ``tokenizer.json``).

Errors name the missing part: torch, the folder, a file in it, or a supported architecture.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tugline.chat.tokenizer import Tokenizer
from tugline.errors import UsageError
from tugline.plugins import import_extra

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def load(
    folder: Path, *, dtype: torch.dtype | None = None
) -> tuple[PreTrainedModel, Tokenizer, frozenset[int]]:
    """Return the model in evaluation mode, its tokenizer and its end-of-answer ids.

    With `dtype` None, the model has the type of its checkpoint. Remote code is never run. Raises
    `UsageError` with a message of one line.
    """
    model = _load_model(folder, dtype=dtype or "auto")
    tokenizer = Tokenizer.load(folder)
    return model, tokenizer, _eos_ids(model, tokenizer)


def load_empty(
    folder: Path, *, dtype: torch.dtype
) -> tuple[PreTrainedModel, Tokenizer, frozenset[int]]:
    """Return what `load` does, in training mode and with the model's weights on the meta device.

    Buffers that are not in the files, such as those of rotary embeddings, have their values.
    """
    accelerate = import_extra("accelerate", "train", "loading a model by rank")
    described = _load_model(folder, dtype=dtype, device_map="meta")
    with accelerate.init_empty_weights():
        model = type(described)(described.config)
    model.tie_weights()
    own = dict(described.named_parameters())
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(own[name].dtype)
    model._weight_conversions = described._weight_conversions  # noqa: SLF001 - no public name
    model.generation_config = described.generation_config
    tokenizer = Tokenizer.load(folder)
    return model, tokenizer, _eos_ids(model, tokenizer)


def check_model_folder(folder: Path) -> None:
    """Raise `UsageError` if a folder is not that of a model."""
    if not folder.is_dir():
        msg = f"{folder} is not a folder; give a model folder with config.json and *.safetensors"
        raise UsageError(msg)
    for file in ("config.json", "tokenizer.json"):
        if not (folder / file).is_file():
            msg = f"{folder} is not a complete Hugging Face model folder: {file} is missing"
            raise UsageError(msg)


def _load_model(folder: Path, **options: Any) -> PreTrainedModel:
    check_model_folder(folder)
    transformers = import_extra("transformers", "train", "the embedded engine")
    transformers.utils.logging.disable_progress_bar()
    try:
        model: PreTrainedModel = transformers.AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, **options
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(f"cannot load the model in {folder}: {reason}") from error
    return model


def _eos_ids(model: PreTrainedModel, tokenizer: Tokenizer) -> frozenset[int]:
    settings = getattr(model, "generation_config", None)
    named = settings.eos_token_id if settings is not None else None
    ids = {named} if isinstance(named, int) else set(named or ())
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(ids)
