"""Losses and advantages of the user, and the terms of a loss."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from trl.trainer.utils import entropy_from_logits

from trainers.sessions import VERSION, groups, sample, session, tiny, weights
from tugline.config import from_mapping
from tugline.errors import ConfigError, UnknownPlugin, UsageError
from tugline.trainers.config import CONFIG, TrainConfig, store_config
from tugline.trainers.grpo.config import GrpoConfig
from tugline.trainers.grpo.logits import TargetLogprobs, TargetScores
from tugline.trainers.grpo.samples import list_tool_tokens, prepare
from tugline.trainers.grpo.train import Grpo
from tugline.types import Kept, Reason, TraceKind

PAGE = (Path(__file__).parents[2] / "docs" / "objectives.md").read_text()
CODE = "\n".join(re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
"""The functions that the documentation shows."""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a module `mine` with the functions of the page."""
    path = tmp_path / "mine.py"
    path.write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    yield path
    sys.modules.pop("mine", None)


def write(path: Path, body: str) -> None:
    """Define the functions `loss`, `advantage` and `credit`, whose results are the expression."""
    imports = "import numpy as np, torch\n"
    loss = f"def loss(new, tokens, config):\n    return {body}\n"
    advantage = f"def advantage(group, config):\n    return {body}\n"
    credit = f"def credit(calls, config):\n    return {body}\n"
    path.write_text(imports + loss + advantage + credit)


# --------------------------------------------------------------------------- as documented
@pytest.mark.usefixtures("mine")
def test_functions_of_the_page_train() -> None:
    """Weights change; advantages are relative to the median; figures are means over tokens."""
    model = tiny()
    config = GrpoConfig(loss="mine:quadratic", advantage="mine:from_median", lr=1e-2)
    before = weights(model)
    batch = groups(model)
    for number, task in enumerate(("t0", "t1")):  # rewards 1 0 0 0: the median is 0
        own = [i for i, each in enumerate(batch) if each.task == task]
        batch[own[2]] = replace(batch[own[2]], reward=batch[own[1]].reward)
        assert len(own) == 4, number
    report = Grpo(model, config).step(batch, version=VERSION)
    assert (report.updates, report.updates_skipped) == (1, 0)
    assert not torch.equal(before, weights(model))
    assert 0 <= report.figures["penalty"] < 1e-6  # on policy
    assert report.figures["far"] == 0
    assert report.ledger.trained == sum(each.ledger.trained for each in batch)


@pytest.mark.usefixtures("mine")
def test_an_advantage_of_zeros_has_no_signal() -> None:
    """Groups whose sessions all have the advantage 0 are dropped."""
    batch = [replace(each, reward=groups(tiny())[0].reward) for each in groups(tiny())]
    report = Grpo(tiny(), GrpoConfig(advantage="mine:from_median")).step(batch, version=VERSION)
    assert report.ledger.dropped == {Reason.NO_SIGNAL: sum(e.ledger.trained for e in batch)}


@pytest.mark.usefixtures("mine")
def test_credit_of_the_page_is_given() -> None:
    """Calls of a sub-agent have half of the outcome; the baseline is the other session's mean."""
    batch = groups(tiny(), samples=2)[:2]
    main, helper = batch[0].traces
    batch[0] = replace(batch[0], traces=(main, replace(helper, kind=TraceKind.SUBAGENT)))
    config = GrpoConfig(credit="mine:half_to_helpers", advantage="rloo")
    samples, _ = prepare(batch, config, version=VERSION)
    mean = (main.trained + helper.trained / 2) / (main.trained + helper.trained)
    for row, advantage in zip(samples, [1.0, 0.5, -mean], strict=True):
        assert row.advantages[row.loss_mask] == pytest.approx(advantage)


# --------------------------------------------------------------------------- wrong results
@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("new", "must return a tensor of losses and a mapping of figures"),
        ("(new.sum(), {})", r"the losses must be of shape \(\d+,\), not \(\)"),
        ("(new.double(), {})", "the losses must be of torch.float32, not torch.float64"),
        ("(new.tolist(), {})", "the losses must be a tensor, not list"),
        ("(tokens.old, {})", "the losses have no gradient"),
        ("(new, {'far': new[1:]})", r"far must be of shape \(\d+,\), not \(\d+,\)"),
    ],
)
def test_a_wrong_loss_is_reported(mine: Path, body: str, problem: str) -> None:
    """The error names the function and the sessions of the pass."""
    write(mine, body)
    trainer = Grpo(tiny(), GrpoConfig(loss="mine:loss"))
    with pytest.raises(ConfigError, match=rf"'mine:loss': .*{problem}.*sessions: .*t0/0"):
        trainer.step(groups(tiny()), version=VERSION)


def test_a_loss_that_is_not_finite_is_skipped(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The update is skipped; report and warning name the session, the warning the function."""
    write(mine, "(new * torch.where(tokens.advantage < 0, torch.nan, 1.0), {})")
    model = tiny()
    before = weights(model)
    report = Grpo(model, GrpoConfig(loss="mine:loss")).step(groups(model)[:4], version=VERSION)
    assert (report.updates, report.updates_skipped) == (0, 1)
    assert torch.equal(before, weights(model))
    assert report.skipped_because_of == ("t0/1", "t0/3")
    warned = [line for line in capsys.readouterr().out.splitlines() if "losses are not" in line]
    assert all(part in warned[0] for part in ("mine:loss", "t0/1", "t0/3"))


@pytest.mark.parametrize(
    ("body", "problem", "session"),
    [
        ("group.rewards[1:]", r"must be of shape \(4,\), not \(3,\)", "t0/0, t0/1, t0/2, t0/3"),
        ("group.rewards.tolist()", "must return an array of floats, not list", "t0/0"),
        ("group.tokens", "must return an array of floats, not int64", "t0/0"),
        ("group.rewards * np.array([1, 1, np.nan, 1])", "must be finite", "t0/2"),
    ],
)
def test_a_wrong_advantage_is_reported(mine: Path, body: str, problem: str, session: str) -> None:
    """The error names the function and the sessions."""
    write(mine, body)
    trainer = Grpo(tiny(), GrpoConfig(advantage="mine:advantage"))
    with pytest.raises(ConfigError, match=rf"'mine:advantage': .*{problem}.*sessions: {session}"):
        trainer.step(groups(tiny()), version=VERSION)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("np.zeros(1)", r"the rewards must be of shape \(4,\), not \(1,\)"),
        ("calls.numbers", "must return an array of floats, not int64"),
        ("1.0", "must return an array of floats, not float"),
        ("np.array([0, 1, np.nan, 1])", r"rewards must be finite, not \[0.0, 1.0, nan, 1.0\]"),
    ],
)
def test_wrong_credit_is_reported(mine: Path, body: str, problem: str) -> None:
    """The error names the function and the session."""
    write(mine, body)
    trainer = Grpo(tiny(), GrpoConfig(credit="mine:credit"))
    with pytest.raises(ConfigError, match=rf"'mine:credit': .*{problem} \(session: t0/0\)"):
        trainer.step(groups(tiny()), version=VERSION)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"loss": "clipp"}, "loss is 'clipp', must be one of clip, .*, or module:function"),
        ({"advantage": "mean"}, "advantage is 'mean', must be one of grpo, "),
        ({"loss": "gmpo", "ratio_level": "trace"}, "the loss 'gmpo' has ratios of tokens only"),
        ({"advantage": "a:b", "credit": "trace"}, "credit is 'trace'"),
        ({"advantage": "a:b", "repeated": "penalise"}, "repeated is 'penalise'"),
        ({"credit": "mean"}, "credit is 'mean', must be one of session, call, trace, return"),
        ({"turn_discount": 0.5}, "credit is 'session'; only 'return' has a discount"),
    ],
)
def test_wrong_names_are_refused(changes: dict[str, Any], error: str) -> None:
    """The error has the known names, or what does not fit together."""
    with pytest.raises(ConfigError, match=error):
        GrpoConfig(**changes)


@pytest.mark.parametrize(
    ("former", "now"),
    [({"reward": "per_trace"}, "credit"), ({"drop_truncated": True}, "truncated")],
)
def test_former_keys_are_refused(former: dict[str, Any], now: str) -> None:
    """The error has the present name."""
    unknown = f"unknown key '{next(iter(former))}'; did you mean '{now}'"
    with pytest.raises(ConfigError, match=unknown):
        from_mapping(former, GrpoConfig)


def test_a_missing_module_is_reported() -> None:
    """The error has the key, the name and Python's reason."""
    with pytest.raises(UnknownPlugin, match=r"grpo.loss 'no_such:loss' cannot be loaded: No mod"):
        Grpo(tiny(), GrpoConfig(loss="no_such:loss"))


# --------------------------------------------------------------------------- resuming
@pytest.mark.parametrize("option", ["loss", "advantage", "credit"])
def test_a_run_is_not_resumed_with_a_changed_function(mine: Path, option: str) -> None:
    """The stored configuration has the digest of the file; the error names the function."""
    names = ("mine:quadratic", "mine:from_median", "mine:half_to_helpers")
    name = dict(zip(("loss", "advantage", "credit"), names, strict=True))[option]
    folder = mine.parent / "run"
    folder.mkdir()
    given = {"tasks": {"taskset": {"name": "jsonl"}}, "template": {}, "grpo": {option: name}}
    config = from_mapping(given, TrainConfig)
    store_config(folder, config)
    assert '"digests"' in (folder / CONFIG).read_text()
    store_config(folder, config)
    mine.write_text(CODE + "\n")
    with pytest.raises(UsageError, match=f"grpo.{option} '{name}': its file has changed since"):
        store_config(folder, config)


def test_a_function_without_a_file_is_refused(tmp_path: Path) -> None:
    """The error says that the source of a compiled function is unknown."""
    given = {"tasks": {"taskset": {"name": "jsonl"}}, "template": {}, "grpo": {"loss": "math:exp"}}
    with pytest.raises(ConfigError, match=r"grpo.loss 'math:exp' has no source file"):
        store_config(tmp_path, from_mapping(given, TrainConfig))


# --------------------------------------------------------------------------- terms
@pytest.mark.parametrize("chunk", [3, 1024])
@pytest.mark.parametrize("loss", ["clip", "gmpo"])
def test_the_loss_is_the_sum_of_its_terms(chunk: int, loss: str) -> None:
    """Each term has its coefficient and divisor; entropy is divided by the trained tokens."""
    config = GrpoConfig(
        loss=loss, kl=0.1, entropy=0.2, normalisation="sequence", logits_chunk=chunk
    )
    report = Grpo(tiny(), config, tiny(1)).step(groups(tiny()), version=VERSION)
    assert {*report.terms} == {"policy", "kl", "entropy"}
    assert report.loss == pytest.approx(sum(report.terms.values()), abs=1e-7)
    assert report.terms["entropy"] == pytest.approx(-0.2 * report.figures["entropy"])
    assert 0 < report.figures["entropy"] < np.log(48)


@pytest.mark.parametrize("tools", [True, False])
def test_the_cross_entropy_is_that_of_transformers(*, tools: bool) -> None:
    """It is the mean over tool output, and that over the tokens of given samples, each a term."""
    batch = groups(tiny())
    config = GrpoConfig(cross_entropy=0.3, tool_tokens=tools, tree_packing=tools, lr=1e-9)
    given = sample([5, 6, 7, 8, 9], [False, True, True, False, True], session="text")
    report = Grpo(tiny(), config).step(batch, version=VERSION, supervised=[given])
    model = tiny()
    labelled = {"supervised": [(given.input_ids, given.loss_mask)]}
    for own in (each for done in batch for each in done.traces if tools):
        first, last = own.spans
        place = np.arange(len(own.ids))
        between = (place >= first.end) & (place < last.start)
        labelled.setdefault("cross_entropy", []).append((own.ids, between))
    assert {*report.terms} == {"policy", *labelled}
    for term, rows in labelled.items():
        total, count = 0.0, 0
        for ids, mask in rows:
            inputs = torch.tensor(ids, dtype=torch.long)[None]
            labels = torch.where(torch.tensor(mask)[None], inputs, -100)
            chosen = int(mask.sum())
            total += model(inputs, labels=labels).loss.item() * chosen
            count += chosen
        assert report.terms[term] == pytest.approx(0.3 * total / count, rel=1e-5)
    assert report.loss == pytest.approx(sum(report.terms.values()), abs=1e-6)
    assert report.ledger.trained == sum(each.ledger.trained for each in batch)


def test_tool_output_of_several_traces_is_chosen_once() -> None:
    """Of a trace and its beginning, each token between answers is chosen in one of them."""
    samples, _ = prepare(groups(tiny()), GrpoConfig(), version=VERSION)
    (one,) = list_tool_tokens(samples[:1])
    assert [each.trained for each in list_tool_tokens([samples[0]] * 3)] == [one.trained]
    other = replace(samples[0], session="other")
    assert len(list_tool_tokens([samples[0], other])) == 2


@pytest.mark.parametrize(("normalisation", "expected"), [("token", 40 / 13), ("sequence", 1.0)])
def test_the_largest_weight_of_a_session_is_reported(normalisation: str, expected: float) -> None:
    """One session with ten traces and three with one have weights 10:1, or the same."""
    first = groups(tiny())[0].traces[0]
    batch = [
        session([first] * (10 if n == 0 else 1), task="t", sample=n, reward=float(n % 2))
        for n in range(4)
    ]
    config = GrpoConfig(normalisation=normalisation)  # type: ignore[arg-type]
    report = Grpo(tiny(), config).step(batch, version=VERSION)
    assert report.largest_session == pytest.approx(expected)


def test_the_divergence_in_the_reward_changes_advantages() -> None:
    """With the policy as reference nothing changes; with another, equal rewards have a signal."""
    batch = [replace(each, reward=groups(tiny())[0].reward) for each in groups(tiny())]
    config = GrpoConfig(kl_reward=0.5)
    same = Grpo(tiny(), config, tiny())
    penalties = same._compute_penalties(batch, VERSION, None)
    assert {*penalties} == {each.session for each in batch}
    assert max(map(abs, penalties.values())) < 1e-4
    report = Grpo(tiny(), config, tiny(1)).step(batch, version=VERSION)
    assert report.ledger.trained == sum(each.ledger.trained for each in batch)
    assert Grpo(tiny(), GrpoConfig()).step(batch, version=VERSION).ledger.trained == 0


def test_whitened_advantages_have_mean_0_and_deviation_1() -> None:
    """REINFORCE++ scales over the trained tokens of the whole step."""
    config = GrpoConfig(advantage="reinforce_plus_plus")
    samples, _ = prepare(groups(tiny()), config, version=VERSION)
    values = np.concatenate([each.advantages[each.loss_mask] for each in samples])
    assert values.mean() == pytest.approx(0, abs=1e-6)
    assert values.std(ddof=1) == pytest.approx(1, abs=1e-5)


# --------------------------------------------------------------------------- entropy
def draw_logits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of 5 tokens over 11 ids, targets, and temperatures; float64."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 11, generator=generator, dtype=torch.float64) * 3
    return logits, torch.arange(5), torch.tensor([1.0, 0.7, 1.3, 1.0, 2.0], dtype=torch.float64)


def test_entropies_are_those_of_trl() -> None:
    """Entropy, log probability and gradient of both agree with TRL's function within 1e-10."""
    logits, target, temperature = draw_logits()
    factors = torch.arange(1.0, 6, dtype=torch.float64)
    theirs = logits.clone().requires_grad_()
    scaled = theirs / temperature[:, None]
    entropy = entropy_from_logits(scaled)
    logprob = scaled.log_softmax(1).gather(1, target[:, None])[:, 0]
    (factors * entropy + logprob).sum().backward()
    leaf = logits.clone().requires_grad_()
    own_logprob, own_entropy = TargetScores.apply(leaf * 1, target, temperature, None)
    (factors * own_entropy + own_logprob).sum().backward()
    for own, other in ((own_entropy, entropy), (own_logprob, logprob)):
        assert float((own - other).detach().abs().max()) < 1e-10
    assert float((leaf.grad - theirs.grad).abs().max()) < 1e-10


def test_entropies_are_those_of_the_kept_ids() -> None:
    """A row with a kept set has entropy and gradient of the logits of its ids alone."""
    logits, target, temperature = draw_logits()
    kept = Kept(np.array([0, 3, 3, 3, 3, 3], np.int32), np.array([0, 4, 7], np.int32))
    leaf = logits.clone().requires_grad_()
    logprob, entropy = TargetScores.apply(leaf * 1, target, temperature, kept)
    (entropy + logprob).sum().backward()
    alone = logits[:1, [0, 4, 7]].clone().requires_grad_()
    small = TargetScores.apply(alone * 1, target[:1], temperature[:1], None)
    (small[0] + small[1]).sum().backward()
    assert entropy[0].item() == pytest.approx(small[1].item())
    assert torch.allclose(leaf.grad[:1, [0, 4, 7]], alone.grad)
    assert int((leaf.grad[0] != 0).sum()) == 3
    assert bool(leaf.grad.isfinite().all())


def test_entropies_keep_no_other_array_over_the_vocabulary() -> None:
    """What is kept for the backward pass are the logits, as for log probabilities alone."""
    kept: list[tuple[int, ...]] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    counts = []
    for function in (TargetLogprobs, TargetScores):
        kept.clear()
        leaf = draw_logits()[0].requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            function.apply(leaf * 1, *draw_logits()[1:], None)
        counts.append(sum(11 in shape for shape in kept))
    assert counts == [1, 1]
