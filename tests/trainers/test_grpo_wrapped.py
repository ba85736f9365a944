"""Wrapped models in two processes train as the plain model does in one process."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import peft
import pytest
import torch
import torch.multiprocessing as mp

from trainers.ranks import (
    ALONE,
    CASES,
    CONFIG,
    LOADED,
    RESUMED,
    SAVED,
    batches,
    lora,
    publish,
    resume_with_two,
    train,
    train_rest,
    train_until_killed,
    work,
)
from trainers.sessions import VERSION, tiny, weights
from trainers.test_hub import make_source, read
from tugline.inference.load import load
from tugline.trainers.grpo import checkpoint
from tugline.trainers.grpo.train import Grpo, StepReport
from tugline.trainers.models import Placement, load_model

pytestmark = [
    # two processes that wait for each other, on a machine that may be busy
    pytest.mark.timeout(600),
    # PEFT's call
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]


Ranks = list[dict[str, tuple[torch.Tensor, list[bytes]]]]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for both ranks."""
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(home: Path) -> Ranks:
    """Results of both ranks, by case."""
    for kind in {kind for kind, _, _ in LOADED.values()}:
        make_source(home / kind, kind)
    mp.spawn(work, args=(home,), nprocs=2)
    return [torch.load(home / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_as_one(ranks: Ranks, case: str) -> None:
    """Both ranks have the weights and reports of one process, also with uneven or no data."""
    _, _, _, changes = CASES[case]
    alone = ALONE.get(case, tiny)()
    start = weights(alone).clone()
    expected = train(alone, msgspec.structs.replace(CONFIG, **changes), slice(None))
    assert float((weights(alone) - start).abs().max()) > 1e-4
    assert expected[1].skipped_because_of == ("t0/2",)
    last = expected[-1]
    assert (last.importance_bounded if "importance" not in changes else last.clip_fraction) > 0.1
    for results in ranks:
        trained, encoded = results[case]
        # two ranks have other trees than one process; AdamW enlarges small differences
        within = 5e-5 if case == "hybrid" else 1e-5
        assert float((trained - weights(alone)).abs().max()) < within
        for data, other in zip(encoded, expected, strict=True):
            report = msgspec.json.decode(data, type=StepReport)
            assert (report.updates, report.ledger) == (other.updates, other.ledger)
            assert report.skipped_because_of == other.skipped_because_of
            for name in ("loss", "grad_norm", "importance_bounded", "clip_fraction", "ratio_mean"):
                expected_value = pytest.approx(getattr(other, name), rel=1e-5, abs=1e-5)
                assert getattr(report, name) == expected_value
            assert report.terms == pytest.approx(other.terms, rel=1e-5, abs=1e-5)
            assert report.figures == pytest.approx(other.figures, rel=1e-5, abs=1e-5)
            assert report.mismatch.total.tokens == other.mismatch.total.tokens
            assert report.mismatch.total.max_abs == pytest.approx(
                other.mismatch.total.max_abs, rel=1e-5, abs=1e-5
            )


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_has_the_same_weights(ranks: Ranks, home: Path, name: str) -> None:
    """A resumed run equals an uninterrupted one, also with another number of processes."""
    straight = Grpo(lora() if name == "lora" else tiny(), CONFIG)
    for batch in batches()[:SAVED]:
        straight.step(batch, version=VERSION)
    alone = Grpo(lora(seed=9) if name == "lora" else tiny(seed=9), CONFIG)
    checkpoint.load(home / name / f"step-{SAVED:06d}", alone)
    expected = train_rest(straight, slice(None))
    resumed = [each[f"resumed {name}"][0] for each in ranks]
    for trained in (train_rest(alone, slice(None)), *resumed):
        assert float((trained - expected).abs().max()) < 1e-5


@pytest.mark.parametrize("name", LOADED)
def test_ranks_load_their_parts_of_a_model(ranks: Ranks, home: Path, name: str) -> None:
    """Together they have the weights and types of a model that one process loads."""
    kind, placement, adapter = LOADED[name]
    alone = load_model(home / kind, replace(placement, sharded=False), adapter, seed=3).model
    types = [str(each.dtype).encode() for each in alone.parameters()]
    for results in ranks:
        whole, found = results[f"loaded {name}"]
        assert torch.equal(whole, weights(alone).float())
        assert found == types
    frozen = {each.dtype for each in alone.parameters() if not each.requires_grad}
    assert frozen == ({torch.bfloat16} if adapter else set())
    trained = {each.dtype for each in alone.parameters() if each.requires_grad}
    assert trained == {torch.float32}


def test_a_sharded_model_that_computes_in_bfloat16_keeps_float32_weights(
    ranks: Ranks, home: Path
) -> None:
    """A step differs from one under autocast by the rounding of bfloat16 only."""
    model = load_model(home / "qwen3", Placement(torch.device("cpu"))).model
    start = weights(model)
    trainer = Grpo(model, msgspec.structs.replace(CONFIG, autocast="bfloat16"))
    expected = trainer.step(batches()[0], version=VERSION)
    moved = weights(model) - start
    for results in ranks:
        trained, (encoded,) = results["bfloat16"]
        report = msgspec.json.decode(encoded, type=StepReport)
        assert report.grad_norm == pytest.approx(expected.grad_norm, rel=0.05)
        assert trained.dtype == torch.float32
        assert float(torch.cosine_similarity(trained - start, moved, dim=0)) > 0.9
    assert torch.equal(ranks[0]["bfloat16"][0], ranks[1]["bfloat16"][0])


@pytest.mark.usefixtures("ranks")
def test_a_sharded_model_is_written_as_a_whole_one(home: Path, tmp_path: Path) -> None:
    """Published model and checkpoint have the source's names and the bytes of a whole model."""
    alone = tmp_path / "alone"
    (alone / "published").mkdir(parents=True)
    shutil.copytree(home / "qwen3_moe", alone / "qwen3_moe")
    publish(alone, load(alone / "qwen3_moe", dtype=torch.float32)[0])
    name = "model.safetensors"
    whole = (alone / "published" / name).read_bytes()
    assert whole == (home / "published" / name).read_bytes()
    assert read(home / "published").keys() == read(home / "qwen3_moe").keys()
    saved = Path("saved", "step-000001", name)
    assert (alone / saved).read_bytes() == (home / saved).read_bytes()


def test_each_rank_copies_a_part_of_a_checkpoint(ranks: Ranks) -> None:
    """Together the ranks hold each weight once while a checkpoint is written."""
    whole = sum(each.numel() for each in tiny().state_dict().values())
    parts = [int(each["copied"][0]) for each in ranks]
    assert sum(parts) == whole
    assert min(parts) > 0.3 * whole


@pytest.mark.usefixtures("ranks")
def test_peft_reads_a_saved_adapter(home: Path) -> None:
    """PEFT loads the same weights; the base model is not in the checkpoint."""
    saved = home / "lora" / f"step-{SAVED:06d}"
    theirs = peft.PeftModel.from_pretrained(tiny(), saved, is_trainable=True)
    mine = Grpo(lora(seed=9), CONFIG)
    checkpoint.load(saved, mine)
    assert torch.equal(weights(theirs), weights(mine.model))
    assert not (saved / "model.safetensors").exists()


@pytest.mark.slow
def test_a_run_of_four_processes_is_killed_and_resumed_by_two(tmp_path: Path) -> None:
    """One rank dies in the middle of an update; in the end the weights are those of one process."""
    with pytest.raises((mp.ProcessExitedException, mp.ProcessRaisedException)):
        mp.spawn(train_until_killed, args=(tmp_path,), nprocs=4)
    assert checkpoint.latest(tmp_path) == tmp_path / f"step-{SAVED:06d}"
    mp.spawn(resume_with_two, args=(tmp_path,), nprocs=2)
    alone = Grpo(tiny(), CONFIG)
    for batch in batches():
        alone.step(batch, version=VERSION)
    for rank in range(2):
        trained = torch.load(tmp_path / f"resumed{rank}.pt", weights_only=True)
        assert float((trained - weights(alone.model)).abs().max()) < 1e-5
