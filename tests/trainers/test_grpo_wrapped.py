"""Wrapped models and several processes: the same training as with the bare model in one."""

from __future__ import annotations

import msgspec
import pytest
import torch
import torch.multiprocessing as mp

from trainers.ranks import CASES, CONFIG, batches, lora, train, weights, work
from trainers.sessions import VERSION, tiny
from tugline.trainers.grpo.train import Grpo, StepReport

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT


@pytest.fixture(scope="module")
def ranks(
    tmp_path_factory: pytest.TempPathFactory,
) -> list[dict[str, tuple[torch.Tensor, list[bytes]]]]:
    """Results of both ranks, by case."""
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(work, args=(folder,), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_as_one_does(
    ranks: list[dict[str, tuple[torch.Tensor, list[bytes]]]], case: str
) -> None:
    """Uneven and missing data included: the same weights and the same report on every rank."""
    _, _, _, changes = CASES[case]
    alone = lora() if case == "lora" else tiny()
    start = weights(alone).clone()
    expected = train(alone, msgspec.structs.replace(CONFIG, **changes), slice(None))
    assert float((weights(alone) - start).abs().max()) > 1e-4
    for results in ranks:
        found, encoded = results[case]
        assert float((found - weights(alone)).abs().max()) < 1e-5
        for one, other in zip(encoded, expected, strict=True):
            report = msgspec.json.decode(one, type=StepReport)
            assert (report.updates, report.ledger) == (other.updates, other.ledger)
            assert report.loss == pytest.approx(other.loss, abs=1e-5)
            assert report.grad_norm == pytest.approx(other.grad_norm, abs=1e-5)
            assert report.mismatch is not None
            assert other.mismatch is not None
            assert report.mismatch.total.tokens == other.mismatch.total.tokens
            assert report.mismatch.total.max_abs == pytest.approx(
                other.mismatch.total.max_abs, abs=1e-5
            )


def test_adapters_are_trained_and_nothing_else() -> None:
    """PEFT: every adapter moves, the base stays as it is."""
    model = lora()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = Grpo(model, CONFIG)
    trainer.step(batches()[0], version=VERSION)
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved
    assert all("lora_" in name for name in moved)
    assert {name for name in before if "lora_" in name} == moved
