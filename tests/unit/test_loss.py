"""The objective in one visit: value, gradient, and how often it touches the vocabulary."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.blocks import Blocks
from trainer.closed_form import Terms
from trainer.loss import Objective, dpace_weights, teacher_rows

V, H, M = 53, 8, 41
SHAPE = (9, 6)  # blocks, their size
ROWS = torch.tensor([i for i in range(54) if i % 6 and i not in (8, 22, 44, 45)])  # some have no label


def problem(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden = 3 * torch.randn(M, H, generator=generator, dtype=dtype)
    head = torch.randn(V, H, generator=generator, dtype=dtype)
    labels = torch.randint(0, V, (M,), generator=generator)
    weights = torch.rand(M, generator=generator, dtype=dtype)
    return hidden.requires_grad_(), head, labels, weights


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


# -- the parts of the loss, against autograd and against an independent implementation ---------------------

TERMS = [
    Terms(),
    Terms(kl_weight=0.3),
    Terms(kl_weight=0.15, temperature=2.0),
    Terms(kl_weight=1.0, temperature=0.7),
    Terms(cap=0.1),
    Terms(kl_weight=0.4, cap=0.5),
    Terms(kl_weight=0.15, temperature=2.0, cap=0.1),
]


def half_right(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    """As `problem`, and every other row's label is what the drafter says; with a teacher."""
    hidden, head, labels, weights = problem(dtype)
    labels[::2] = (hidden.detach() @ head.T).argmax(-1)[::2]
    teacher = 2 * torch.randn(M, H, generator=torch.Generator().manual_seed(1), dtype=dtype)
    return hidden, head, labels, weights, teacher


def plain_rows(
    hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor, teacher: torch.Tensor, terms: Terms
) -> torch.Tensor:
    """What each row loses, by the book."""
    z, t = hidden @ head.T, terms.temperature
    log_q = F.log_softmax(z, -1)
    ce = F.cross_entropy(z, labels, reduction="none")
    log_p = F.log_softmax(teacher @ head.T / t, -1)
    kl = F.kl_div(F.log_softmax(z / t, -1), log_p, log_target=True, reduction="none").sum(-1)
    entropy = -(log_q.exp() * log_q).sum(-1) * (z.argmax(-1) == labels)
    return (1 - terms.kl_weight) * ce + terms.kl_weight * t**2 * kl + terms.cap * entropy


@pytest.mark.parametrize("terms", TERMS, ids=str)
@pytest.mark.parametrize("chunk_bytes", [1, 1 << 20])  # several chunks, one chunk
def test_every_loss_and_its_gradient_are_what_autograd_gives(
    terms: Terms, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.loss.SCRATCH_BYTES", 1)  # a few rows at a time
    hidden, head, labels, weights, teacher = half_right()
    visit = Objective(head, chunk_bytes, terms=terms)(hidden, labels, weights, teacher=teacher)
    plain = (plain_rows(hidden, head, labels, teacher, terms) * weights).sum()
    torch.testing.assert_close(visit.loss, plain)
    assert 0 < int(visit.correct.sum()) < M
    torch.testing.assert_close(visit.weight, weights.sum())
    (closed,) = torch.autograd.grad(2 * visit.loss, hidden)
    (expected,) = torch.autograd.grad(2 * plain, hidden)
    torch.testing.assert_close(closed, expected, atol=1e-12, rtol=1e-10)


def test_the_parts_are_told_apart() -> None:
    hidden, head, labels, weights, teacher = half_right()
    parts = {}
    for name, terms in (
        ("ce", Terms()),
        ("kl", Terms(kl_weight=1.0, temperature=2.0)),
        ("both", Terms(kl_weight=0.25, temperature=2.0, cap=0.5)),
    ):
        parts[name] = Objective(head, terms=terms)(hidden, labels, weights, teacher=teacher)
    both = parts["both"].parts
    assert set(parts["ce"].parts) == {"ce"}
    torch.testing.assert_close(both["ce"], parts["ce"].loss.detach())
    torch.testing.assert_close(both["kl"], parts["kl"].loss.detach())
    total = 0.75 * both["ce"] + 0.25 * both["kl"] + 0.5 * both["cap"]
    torch.testing.assert_close(parts["both"].loss.detach(), total)


def written_out(ce: torch.Tensor, alpha: float) -> torch.Tensor:
    """The weights of D-PACE, slot by slot as in its paper."""
    grid = dict(zip(ROWS.tolist(), ce.tolist(), strict=True))
    found = []
    for row in ROWS.tolist():
        block, slot = divmod(row, SHAPE[1])
        weight = 0.0
        for end in range(slot, SHAPE[1]):
            at = [block * SHAPE[1] + i for i in range(1, end + 1)]
            if at[-1] in grid:
                weight += torch.tensor(
                    [(1 - alpha) * torch.tensor(-grid[i]).exp() + alpha for i in at if i in grid]
                ).prod()
        found.append(float(weight))
    return torch.tensor(found, dtype=ce.dtype)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("terms", [Terms(), Terms(kl_weight=0.15, temperature=2.0, cap=0.1)], ids=str)
def test_dpace_weighs_a_slot_by_the_accepted_length_that_hangs_on_it(alpha: float, terms: Terms) -> None:
    hidden, head, labels, given, teacher = half_right()
    objective = Objective(head, 1, terms=terms, dpace=alpha)  # chunks end within blocks
    visit = objective(hidden, labels, given, teacher=teacher, rows=ROWS, shape=SHAPE)
    ce = F.cross_entropy(hidden @ head.T, labels, reduction="none").detach()
    weights = written_out(ce, alpha)
    torch.testing.assert_close(dpace_weights(ce, ROWS, SHAPE, alpha), weights, atol=1e-6, rtol=1e-6)
    weights = dpace_weights(ce, ROWS, SHAPE, alpha)
    torch.testing.assert_close(visit.weight, weights.sum())
    plain = (plain_rows(hidden, head, labels, teacher, terms) * weights).sum()  # weights are constants
    torch.testing.assert_close(visit.loss, plain)
    (closed,) = torch.autograd.grad(visit.loss, hidden)
    (expected,) = torch.autograd.grad(plain, hidden)
    torch.testing.assert_close(closed, expected, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("dpace", [None, 0.5])
@pytest.mark.parametrize("terms", [Terms(), Terms(kl_weight=0.15, temperature=2.0, cap=0.1)], ids=str)
def test_micro_batches_add_up_to_the_one_that_holds_them_all(terms: Terms, dpace: float | None) -> None:
    hidden, head, labels, weights, teacher = half_right()
    objective = Objective(head, terms=terms, dpace=dpace)
    whole = objective(hidden, labels, weights, teacher=teacher, rows=ROWS, shape=SHAPE)
    (expected,) = torch.autograd.grad(whole.loss / whole.weight, hidden)
    cut = int((ROWS // SHAPE[1] < 4).sum())  # blocks stay whole
    visits = [
        objective(hidden[p], labels[p], weights[p], teacher=teacher[p], rows=ROWS[p] - first, shape=shape)
        for p, first, shape in (
            (slice(0, cut), 0, (4, SHAPE[1])),
            (slice(cut, M), 4 * SHAPE[1], (SHAPE[0] - 4, SHAPE[1])),
        )
    ]
    total = sum(float(visit.weight) for visit in visits)
    assert total == pytest.approx(float(whole.weight))
    (added,) = torch.autograd.grad(sum(visit.loss for visit in visits), hidden)
    torch.testing.assert_close(added / total, expected, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("terms", TERMS, ids=str)
def test_logits_of_any_size_give_finite_losses_and_gradients(terms: Terms) -> None:
    hidden, head, labels, weights, teacher = half_right(torch.float32)
    hidden = (hidden * 1e4).detach().requires_grad_()
    visit = Objective(head, terms=terms)(hidden, labels, weights, teacher=teacher * 1e4)
    plain = (plain_rows(hidden, head, labels, teacher * 1e4, terms) * weights).sum()
    torch.testing.assert_close(visit.loss, plain)
    visit.loss.backward()
    assert hidden.grad is not None
    assert torch.isfinite(hidden.grad).all()


def test_soft_labels_of_a_head_in_bfloat16_have_their_softmax_in_float32() -> None:
    hidden, head, labels, weights, teacher = half_right(torch.float32)
    head, terms = head.bfloat16(), Terms(kl_weight=0.5, temperature=3.0)
    visit = Objective(head, terms=terms)(hidden, labels, weights, teacher=teacher.bfloat16())
    z, t = (x.bfloat16().matmul(head.T).float() for x in (hidden, teacher))
    eye = torch.eye(V)
    plain = (plain_rows(z, eye, labels, t, terms) * weights).sum()
    torch.testing.assert_close(visit.loss, plain, rtol=1e-5, atol=1e-5)


# -- the K most probable -----------------------------------------------------------------------------------


def test_the_top_k_come_from_the_same_logits() -> None:
    hidden, head, labels, weights, _ = half_right()
    with VocabularyProducts() as counted:
        visit = Objective(head, 1)(hidden, labels, weights, top=5)
    assert counted.rows == M + M
    log_q = F.log_softmax(hidden.detach() @ head.T, -1)
    ordered = log_q.sort(-1, descending=True)
    top = visit.top
    assert top is not None
    torch.testing.assert_close(top.logs, ordered.values[:, :5])
    assert torch.equal(top.first, ordered.indices[:, 0])
    rank = (ordered.indices == labels[:, None]).int().argmax(-1)
    assert torch.equal(top.rank, rank.clamp(max=5))


def test_among_equal_logits_the_label_comes_last() -> None:
    _, head, labels, weights = problem()
    visit = Objective(head)(torch.zeros(M, H, dtype=head.dtype), labels, weights, top=V)
    assert visit.top is not None
    assert (visit.top.rank == V - 1).all()


def test_the_choices_are_the_largest_logits() -> None:
    hidden, head, *_ = problem()
    assert torch.equal(Objective(head, 1).choices(hidden), (hidden @ head.T).argmax(-1))


def test_the_teacher_stands_one_position_before_the_label() -> None:
    last = torch.arange(2 * 20).view(2, 20, 1)  # a state names its row and position
    blocks = Blocks.build([0, 1, 1], [3, 0, 7], 4, slots=4)
    rows = torch.tensor([1, 3, 4 + 2, 8 + 1])
    assert teacher_rows(last, blocks, rows)[:, 0].tolist() == [3, 5, 20 + 1, 20 + 7]


# -- what it costs -----------------------------------------------------------------------------------------


class VocabularyProducts(TorchDispatchMode):
    """Counts rows that go through a product with the head."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            left, right = args[-2:]
            if {V, H} <= {*right.shape[-2:]}:
                self.rows += left.shape[-2]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("terms", "products"),
    [
        (Terms(), 2),
        (Terms(cap=0.1), 2),
        (Terms(kl_weight=0.15, temperature=2.0), 3),
        (Terms(kl_weight=0.15, temperature=2.0, cap=0.1), 3),
    ],
    ids=str,
)
@pytest.mark.parametrize("dpace", [None, 0.5])
def test_a_row_costs_two_products_with_the_vocabulary_and_three_with_soft_labels(
    terms: Terms, products: int, dpace: float | None
) -> None:
    hidden, head, labels, weights, teacher = half_right()
    objective = Objective(head, 1, terms=terms, dpace=dpace)
    with VocabularyProducts() as counted:
        objective(hidden, labels, weights, teacher=teacher, rows=ROWS, shape=SHAPE, top=3).loss.backward()
    assert counted.rows == products * M


def test_without_a_gradient_it_costs_one() -> None:
    hidden, head, labels, weights = problem()
    with VocabularyProducts() as counted:
        Objective(head)(hidden.detach(), labels, weights)
    assert counted.rows == M


class Allocated(TorchDispatchMode):
    """The bytes of every tensor with the vocabulary's width that a call allocates."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = func(*args, **(kwargs or {}))
        given = [x for x in [*args, *(kwargs or {}).values()] if torch.is_tensor(x)]
        known = {x.untyped_storage().data_ptr() for x in given}
        for x in made if isinstance(made, tuple) else (made,):
            if torch.is_tensor(x) and V in x.shape and x.untyped_storage().data_ptr() not in known:
                self.bytes.append(x.untyped_storage().nbytes())
        return made


@pytest.mark.parametrize("terms", [Terms(), Terms(kl_weight=0.15, temperature=2.0, cap=0.1)], ids=str)
def test_logits_take_no_more_room_than_told_and_keep_it(
    terms: Terms, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.loss.SCRATCH_BYTES", 1)
    hidden, head, labels, weights, teacher = half_right(torch.float32)
    budget = 2 * 32 * V * 4
    objective = Objective(head, budget, terms=terms)
    with Allocated() as first:
        objective(hidden, labels, weights, teacher=teacher).loss.backward()
    assert 0 < max(first.bytes) * (2 if terms.soft else 1) <= budget
    scratch = -(-M // 16) * V * 4 if terms.soft else 0
    with Allocated() as second:
        objective(hidden, labels, weights, teacher=teacher).loss.backward()
    assert max(second.bytes, default=0) <= scratch


def test_chunks_are_as_few_as_fit_and_alike() -> None:
    objective = Objective(torch.zeros(V, H), 40 * V * 4)
    for rows, sizes in ((0, []), (40, [40]), (41, [20, 21]), (100, [33, 33, 34])):
        chunks = objective._chunks(rows)
        assert [chunk.stop - chunk.start for chunk in chunks] == sizes
        assert all(a.stop == b.start for a, b in itertools.pairwise(chunks))
