"""The objective in one visit: value, gradient, and how often it touches the vocabulary."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.loss import Objective, accepted_tokens

V, H, M = 53, 8, 41


def problem(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden = 3 * torch.randn(M, H, generator=generator, dtype=dtype)
    head = torch.randn(V, H, generator=generator, dtype=dtype)
    labels = torch.randint(0, V, (M,), generator=generator)
    weights = torch.rand(M, generator=generator, dtype=dtype)
    return hidden.requires_grad_(), head, labels, weights


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 20])  # several chunks, one chunk
def test_loss_and_gradient_equal_a_plain_cross_entropy(chunk_bytes: int) -> None:
    hidden, head, labels, weights = problem()
    visit = Objective(head, chunk_bytes)(hidden, labels, weights)
    plain = (F.cross_entropy(hidden @ head.T, labels, reduction="none") * weights).sum()
    torch.testing.assert_close(visit.loss, plain)
    (closed,) = torch.autograd.grad(2 * visit.loss, hidden)
    (expected,) = torch.autograd.grad(2 * plain, hidden)
    torch.testing.assert_close(closed, expected, atol=1e-12, rtol=1e-10)
    assert torch.equal(visit.correct, (hidden @ head.T).argmax(-1) == labels)


def test_a_tie_counts_as_wrong() -> None:
    """Else a drafter whose logits are all equal would be right everywhere."""
    _, head, labels, weights = problem()
    visit = Objective(head)(torch.zeros(M, H, dtype=head.dtype, requires_grad=True), labels, weights)
    assert not visit.correct.any()
    torch.testing.assert_close(visit.loss, weights.sum() * torch.tensor(V, dtype=head.dtype).log())


def test_the_closed_form_gradient_is_that_of_finite_differences() -> None:
    hidden, head, labels, weights = problem()
    objective = Objective(head)
    assert torch.autograd.gradcheck(lambda h: objective(h, labels, weights).loss, (hidden,))


def test_logits_of_any_size_give_a_finite_loss() -> None:
    hidden, head, labels, weights = problem(torch.float32)
    visit = Objective(head)((hidden * 1e4).detach().requires_grad_(), labels, weights)
    assert torch.isfinite(visit.loss)
    plain = (F.cross_entropy((hidden * 1e4) @ head.T, labels, reduction="none") * weights).sum()
    torch.testing.assert_close(visit.loss, plain)


def test_a_head_in_bfloat16_still_has_its_softmax_in_float32() -> None:
    hidden, head, labels, weights = problem(torch.float32)
    head = head.bfloat16()
    visit = Objective(head)(hidden, labels, weights)
    logits = (hidden.bfloat16() @ head.T).float()
    plain = (F.cross_entropy(logits, labels, reduction="none") * weights).sum()
    assert visit.loss.dtype == torch.float32
    torch.testing.assert_close(visit.loss, plain, rtol=1e-6, atol=1e-6)
    (closed,) = torch.autograd.grad(visit.loss, hidden)
    expected = (logits.softmax(-1) - F.one_hot(labels, V)) * weights[:, None] @ head.float()
    torch.testing.assert_close(closed, expected, rtol=0.02, atol=0.02)


class VocabularyProducts(TorchDispatchMode):
    """Counts rows that go through a product with the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            left, right = args[-2:]
            if V in right.shape:
                self.rows += left.shape[0]
        return func(*args, **(kwargs or {}))


def test_a_row_costs_two_products_with_the_vocabulary() -> None:
    hidden, head, labels, weights = problem()
    objective = Objective(head, 1)
    with VocabularyProducts() as counted:
        objective(hidden, labels, weights).loss.backward()
    assert counted.rows == 2 * M


def test_without_a_gradient_it_costs_one() -> None:
    hidden, head, labels, weights = problem()
    with VocabularyProducts() as counted:
        Objective(head)(hidden.detach(), labels, weights)
    assert counted.rows == M


@pytest.mark.parametrize(
    ("blocks", "accepted"),
    [
        (["1111"], 3),  # slot 0 is the anchor and never counts
        (["0111"], 3),
        (["1011"], 0),
        (["1101"], 1),
        (["1111", "1000", "1110"], 5),
        (["0000"], 0),
    ],
)
def test_a_streak_ends_at_the_first_wrong_slot(blocks: list[str], accepted: int) -> None:
    grid = torch.tensor([[c == "1" for c in block] for block in blocks])
    rows = torch.arange(grid.numel()).view(grid.shape)[:, 1:].flatten()
    assert accepted_tokens(grid.flatten()[rows], rows, *grid.shape) == accepted


def test_a_slot_without_a_label_ends_the_streak() -> None:
    assert accepted_tokens(torch.tensor([True, True]), torch.tensor([1, 3]), 1, 4) == 1
