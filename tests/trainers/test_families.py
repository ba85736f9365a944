"""Replay of experts in every family of transformers that is supported."""

from __future__ import annotations

import copy

import pytest
import torch

from support.families import EXPERTS, FAMILIES, REFUSED, TAKEN, make_family
from trainers.forced import find_routers, force
from tugline.errors import ConfigError
from tugline.inference.routers import use_routers
from tugline.trainers.grpo.config import GrpoConfig
from tugline.trainers.grpo.forward import find_used_share
from tugline.trainers.grpo.routes import Routes
from tugline.trainers.grpo.train import Grpo

IDS = torch.randint(3, 48, (2, 12), generator=torch.Generator().manual_seed(1))


def compute(model: torch.nn.Module) -> torch.Tensor:
    """Logits of `IDS`."""
    logits: torch.Tensor = model(input_ids=IDS, use_cache=False).logits
    return logits


def draw_experts(layers: int) -> torch.Tensor:
    """Other experts for each token and layer, without repeats, in any order."""
    generator = torch.Generator().manual_seed(2)
    noise = torch.rand(IDS.numel(), layers, EXPERTS, generator=generator)
    return noise.topk(TAKEN, -1).indices


@pytest.mark.parametrize("name", FAMILIES)
def test_replay_of_the_own_choice_changes_nothing(name: str) -> None:
    """Logits are those of the model as transformers computes it."""
    model = make_family(name).eval()
    with torch.no_grad():
        expected = compute(model)
        routes = Routes(model)
        compute(model)
        assert routes.find_problem() is None
        assert len(routes.routers) == len(find_routers(model)) > 0
        choice = [router.chosen for router in routes.routers if router.chosen is not None]
        routes.replay(torch.stack(choice, 1))
        assert float((compute(model) - expected).abs().max()) <= 1e-6


@pytest.mark.parametrize("name", FAMILIES)
def test_replayed_experts_have_the_weights_and_gradient_of_the_router(name: str) -> None:
    """Logits and gradients equal those of a model that is forced to take the same experts."""
    model = make_family(name).eval()
    forced = copy.deepcopy(model)
    own = compute(model).detach()
    routes = Routes(model)
    experts = draw_experts(len(routes.routers))
    force(forced, experts)
    routes.replay(experts)
    direction = torch.randn(own.shape, generator=torch.Generator().manual_seed(3))
    for each in (model, forced):
        (compute(each) * direction).mean().backward()
    with torch.no_grad():
        logits = compute(model)
        assert float((logits - own).abs().max()) > 1e-2
        assert float((logits - compute(forced)).abs().max()) < 2e-5 * float(logits.abs().max())
    expected = dict(forced.named_parameters())
    for key, parameter in model.named_parameters():
        other = expected[key].grad
        if other is None or parameter.grad is None:
            assert other is parameter.grad, key
            continue
        within = 1e-4 * float(other.abs().max()) + 1e-7
        assert float((parameter.grad - other).abs().max()) < within, key
    for router in use_routers(model):
        assert float(router.weight.grad.abs().max()) > 0  # type: ignore[union-attr]


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_without_experts_are_left_to_the_router(name: str) -> None:
    """With -1 at some tokens, these take the experts that the router chooses."""
    model = make_family(name).eval()
    routes = Routes(model)
    experts = draw_experts(len(routes.routers))
    experts[::2] = -1
    routes.replay(experts)
    with torch.no_grad():
        compute(model)
    routes.compare(experts)
    shares = routes.take_shares(torch.device("cpu"))
    assert shares is not None
    assert all(0 < share <= 1 for share in shares)
    chosen = torch.stack([router.chosen for router in routes.routers], 1)  # type: ignore[misc]
    forced = make_family(name).eval()
    force(forced, torch.where(experts < 0, chosen, experts))
    with torch.no_grad():
        assert float((compute(model) - compute(forced)).abs().max()) < 1e-3


@pytest.mark.parametrize("name", FAMILIES)
def test_a_token_uses_its_share_of_the_experts(name: str) -> None:
    """The share that costs are estimated with is that of the routers."""
    model = make_family(name)
    shape = Routes(model).shape
    assert find_used_share(model.config.get_text_config()) == shape.top_k / shape.experts


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_is_not_supported_is_refused_by_name(name: str) -> None:
    """The error names the class that is not known and the setting that trains without replay."""
    model = make_family(name)
    with pytest.raises(
        ConfigError, match=r"replay_experts: .* is not supported: .*(Router|Mo[eE])"
    ) as caught:
        Grpo(model, GrpoConfig())
    assert "Set it to false" in str(caught.value)
