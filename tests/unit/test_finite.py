"""NaN in weights, features and gradients is named, counted, and in the end too much."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trainer.finite import NOT_FINITE, Diverged, FeatureCheck, LostSteps, first_not_finite

NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize("value", [NAN, INFINITY, -INFINITY])
def test_the_tensor_that_holds_it_is_named(value: float) -> None:
    tensors = {"a": torch.zeros(3), "ids": torch.zeros(2, dtype=torch.int64), "none": torch.zeros(0)}
    tensors["b"] = torch.ones(4, 4, dtype=torch.bfloat16)
    assert first_not_finite(tensors.items()) is None
    tensors["b"][2, 1] = value
    assert first_not_finite(tensors.items()) == "b"


def test_the_documents_of_a_row_that_is_not_finite_are_named_once() -> None:
    check = FeatureCheck()
    assert check.read() == []
    for value in (1.0, NAN, INFINITY):
        features = torch.zeros(3, 5, 4)
        features[1, 2, 3] = value
        check.note(features, [(10, 0, 0, 5), (11, 1, 0, 2), (12, 1, 2, 3), (13, 2, 0, 5)])
    assert check.read() == [11, 12]
    assert check.read() == []


def test_features_that_cancel_out_are_still_not_finite() -> None:
    check = FeatureCheck()
    check.note(torch.tensor([[[INFINITY, -INFINITY]], [[3e38, 1.0]]]), [(0, 0, 0, 1), (1, 1, 0, 1)])
    assert check.read() == [0]


def noted(most: int, norms: list[Tensor | float | None]) -> LostSteps:
    lost = LostSteps(most, torch.device("cpu"))
    for norm in norms:
        lost.note(norm)
    return lost


def test_lost_steps_are_counted_whoever_noticed_them() -> None:
    lost = noted(3, [1.0, torch.tensor(NAN), None, torch.tensor(2.0), INFINITY])
    assert lost.due
    assert (lost.read(), lost.total, lost.in_a_row) == (3, 3, 1)
    lost.note(1.0)
    assert (lost.read(), lost.total, lost.in_a_row) == (0, 3, 0)


def test_too_many_in_a_row_end_the_run_even_if_others_came_before_anybody_looked() -> None:
    assert noted(3, [None, None, 1.0, None, None]).read() == 4
    with pytest.raises(Diverged, match="3 steps in a row had a gradient that is not finite") as caught:
        noted(3, [1.0, None, None, None, 1.0]).read()
    assert caught.value.code == NOT_FINITE == 3
