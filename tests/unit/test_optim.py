"""Flat AdamW equals PyTorch's, parameter by parameter; the schedule; clipping."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from trainer.optim import BETAS, Optimizer, _norms, learning_rate, orthogonal


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7, bias=False), nn.LayerNorm(7), nn.Linear(7, 3, bias=False))


def backward(module: nn.Module, seed: int, scale: float = 1.0) -> None:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
    (scale * module(x).pow(2).sum()).backward()


def test_flat_updates_equal_those_of_each_parameter() -> None:
    ours, theirs = model(), model()
    optimizer = Optimizer(ours, weight_decay=0.1)
    groups = [
        {"params": [p for p in theirs.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in theirs.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=0.01, betas=BETAS)
    for step in range(5):
        backward(ours, step)
        norm = optimizer.step(0.01, divisor=8.0, clip=0.5)
        backward(theirs, step)
        for p in theirs.parameters():
            p.grad /= 8.0
        expected = nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        reference.step()
        reference.zero_grad()
        assert float(norm) == pytest.approx(float(expected), rel=1e-5)
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-5)


def test_gradients_of_two_micro_batches_add_up() -> None:
    once, twice = model(), model()
    a, b = Optimizer(once, 0.0), Optimizer(twice, 0.0)
    backward(once, 0, scale=3.0)
    backward(twice, 0, scale=1.0)
    backward(twice, 0, scale=2.0)
    a.step(0.1, 6.0, 0.0)
    b.step(0.1, 6.0, 0.0)
    for x, y in zip(once.parameters(), twice.parameters(), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_forgotten(kind: str) -> None:
    module = model()
    optimizer = Optimizer(module, 0.1, kind)
    backward(module, 1)
    optimizer.step(0.1, 1.0, 1.0)
    before = [p.clone() for p in module.parameters()]
    state = {name: value.clone() for name, value in optimizer.state().items()}
    backward(module, 0, scale=math.inf)
    assert not torch.isfinite(optimizer.step(0.1, 1.0, 1.0))
    for name, value in optimizer.state().items():
        assert torch.equal(value, state[name]), name
    for x, y in zip(before, module.parameters(), strict=True):
        assert torch.equal(x, y)
        assert not y.grad.any()
    backward(module, 0)
    assert torch.isfinite(optimizer.step(0.1, 1.0, 1.0))
    assert not torch.equal(before[0], next(iter(module.parameters())))


def test_the_state_is_named_by_parameter_and_restores_the_optimizer() -> None:
    module, other = model(), model()
    optimizer, restored = Optimizer(module, 0.1), Optimizer(other, 0.1)
    for step in range(3):
        backward(module, step)
        optimizer.step(0.01, 1.0, 1.0)
    state = {name: value.clone() for name, value in optimizer.state().items()}
    names = {name for name, _ in module.named_parameters()}
    assert set(state) == {"step"} | {f"{k}.{n}" for k in ("exp_avg", "exp_avg_sq") for n in names}
    other.load_state_dict(module.state_dict())
    restored.load(state)
    for o, m in ((optimizer, module), (restored, other)):
        backward(m, 9)
        o.step(0.01, 1.0, 1.0)
    for x, y in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(x, y)


def test_the_rate_warms_up_then_falls_to_almost_nothing() -> None:
    rates = [learning_rate(step, 100, 1.0, 0.1) for step in range(1, 101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == 1.0
    assert max(rates) == 1.0
    assert all(a > b for a, b in pairwise(rates[9:]))
    assert 0 < rates[-1] < 0.001
    assert learning_rate(1, 1, 1.0, 0.0) == pytest.approx(0.5)


def test_the_norm_of_many_numbers_keeps_its_digits() -> None:
    numbers = torch.full((3_000_001,), 1e-3)
    assert float(_norms(numbers).norm()) == pytest.approx(1e-3 * 3_000_001**0.5, rel=1e-6)


# -- muon --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 16)])
def test_orthogonal_makes_every_direction_about_equally_strong(shape: tuple[int, int]) -> None:
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0)) ** 3
    before, after = torch.linalg.svdvals(x), torch.linalg.svdvals(orthogonal(x))
    assert (before.amax(-1) / before.amin(-1)).min() > 4
    assert after.amax() < 1.3
    assert after.quantile(0.1) > 0.5


def wide() -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(5, 7, bias=False), nn.LayerNorm(7), nn.Linear(7, 5, bias=False))
    made.append(nn.Linear(5, 7, bias=False))  # another of the first one's shape
    return made


def test_muon_updates_each_matrix_by_its_own_momentum_made_orthogonal() -> None:
    ours, theirs = wide(), wide()
    optimizer = Optimizer(ours, weight_decay=0.1, kind="muon")
    momenta = {name: torch.zeros_like(p) for name, p in theirs.named_parameters() if p.dim() == 2}
    for step in range(3):
        backward(ours, step)
        backward(theirs, step)
        for p in theirs.parameters():
            p.grad /= 8.0
        optimizer.step(0.01, divisor=8.0, clip=0.0)
        with torch.no_grad():
            for name, p in theirs.named_parameters():
                if p.dim() == 2:
                    momenta[name] = 0.95 * momenta[name] + 0.05 * p.grad
                    update = orthogonal((0.05 * p.grad + 0.95 * momenta[name])[None])[0]
                    p *= 1 - 0.01 * 0.1
                    p -= 0.01 * 0.2 * max(p.shape) ** 0.5 * update
        for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            if mine.dim() == 2:
                torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-4, msg=name)
            else:  # AdamW's, so that both go on from the same point
                other.data.copy_(mine.data)
        theirs.zero_grad()


def test_muon_leaves_embeddings_and_vectors_to_adamw() -> None:
    module = nn.ModuleDict(
        {"embed": nn.Embedding(6, 4), "norm": nn.LayerNorm(4), "proj": nn.Linear(4, 4, bias=False)}
    )
    names = set(Optimizer(module, 0.1, "muon").state())
    assert "exp_avg_sq.embed.weight" in names
    assert "exp_avg_sq.norm.bias" in names
    assert "momentum.proj.weight" in names
    assert "exp_avg.proj.weight" not in names


def test_muon_goes_on_from_its_saved_state_bit_for_bit() -> None:
    straight, first, second = wide(), wide(), wide()
    optimizers = [Optimizer(m, 0.1, "muon") for m in (straight, first, second)]
    for step in range(4):
        backward(straight, step)
        optimizers[0].step(0.01, 2.0, 1.0)
        module, optimizer = (first, optimizers[1]) if step < 2 else (second, optimizers[2])
        if step == 2:
            second.load_state_dict(first.state_dict())
            optimizer.load({name: value.clone() for name, value in optimizers[1].state().items()})
        backward(module, step)
        optimizer.step(0.01, 2.0, 1.0)
    for x, y in zip(straight.parameters(), second.parameters(), strict=True):
        assert torch.equal(x, y)
