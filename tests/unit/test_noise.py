"""Noise on the context: as strong as asked for, only where documents are, and the same after a resume."""

from __future__ import annotations

import pytest
import torch

from trainer.noise import Noise

ZEROS = torch.zeros(2, 40, 8)
SPANS = [(7, 0, 0, 30), (3, 1, 5, 10), (4, 1, 15, 25)]  # document 4 ends beyond its row's context


def added(noise: Noise, epoch: int = 0, spans: list[tuple[int, int, int, int]] = SPANS) -> torch.Tensor:
    return noise.add(ZEROS, spans, epoch, strength=0.5)


def test_the_strength_goes_along_a_straight_line_from_the_first_step_to_the_last() -> None:
    noise = Noise(0.05, 0.01)
    assert [noise.strength(step, 5) for step in range(1, 6)] == pytest.approx([0.05, 0.04, 0.03, 0.02, 0.01])
    assert noise.strength(1, 1) == 0.05


def test_without_noise_the_features_are_what_they_were() -> None:
    assert not Noise()
    assert Noise(0, 0.1)
    assert Noise(0.1, 0).add(ZEROS, SPANS, 0, strength=0.0) is ZEROS


@pytest.mark.parametrize("kind", ["uniform", "gaussian"])
def test_noise_has_the_strength_and_the_shape_that_was_asked_for(kind: str) -> None:
    features = torch.zeros(1, 2000, 50)
    drawn = Noise(1, 1, kind).add(features, [(0, 0, 0, 2000)], 0, strength=0.5)
    assert not features.any()
    assert float(drawn.mean()) == pytest.approx(0, abs=0.01)
    if kind == "uniform":  # (rand - 1/2) · 2 · strength
        assert float(drawn.abs().max()) == pytest.approx(0.5, rel=1e-3)
        assert float(drawn.std()) == pytest.approx(0.5 / 3**0.5, rel=0.01)
    else:
        assert float(drawn.std()) == pytest.approx(0.5, rel=0.01)


def test_noise_lies_where_documents_are_and_nowhere_else() -> None:
    drawn = added(Noise(1, 1)).abs().amin(-1) > 0
    assert drawn[0].tolist() == [True] * 30 + [False] * 10
    assert drawn[1].tolist() == [False] * 5 + [True] * 35


def test_what_a_document_gets_depends_on_seed_epoch_and_document_alone() -> None:
    torch.manual_seed(99)
    before = torch.get_rng_state()
    first = added(Noise(1, 1, seed=5))
    assert torch.equal(first, added(Noise(1, 1, seed=5)))
    elsewhere = added(Noise(1, 1, seed=5), spans=[(4, 0, 2, 25)])  # another row, place and batch
    assert torch.equal(elsewhere[0, 2:27], first[1, 15:40])
    for other in (added(Noise(1, 1, seed=6)), added(Noise(1, 1, seed=5), epoch=1)):
        assert not torch.isclose(other, first)[0, :30].any()
    assert torch.equal(torch.get_rng_state(), before)
