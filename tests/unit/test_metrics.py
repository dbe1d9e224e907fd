"""What a drafter's progress is told by, against a count by hand."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
import torch
from test_loss import H, V, VocabularyProducts

from trainer.blocks import Blocks
from trainer.closed_form import Terms
from trainer.data import Batch
from trainer.loss import Objective, Visit
from trainer.metrics import BUDGETS, EVERY, FOLD, RECALL, TOP, Tally
from trainer.tree import depths

CPU = torch.device("cpu")


def visited(outcomes: list[str], padding: int = 1) -> tuple[Visit, torch.Tensor, Blocks]:
    """Blocks by their slots: 1 right, 0 wrong, - without a label; the first is the anchor."""
    size = len(outcomes[0])
    text = "".join(outcomes) + "-" * size * padding
    rows = torch.tensor([i for i, c in enumerate(text) if i % size and c != "-"])
    correct = torch.tensor([text[int(i)] == "1" for i in rows])
    count = len(outcomes)
    blocks = Blocks.build([0] * count, list(range(count)), size, slots=count + padding)
    one = torch.ones(())
    return Visit(loss=6 * one, weight=3 * one, parts={"ce": 6 * one}, correct=correct), rows, blocks


def tallied(*outcomes: list[str]) -> dict[str, Any]:
    tally = Tally(len(outcomes[0][0]), CPU, 0)
    for given in outcomes:
        tally.add(*visited(given))
    return tally.read()


@pytest.mark.parametrize(
    ("blocks", "accepted"),
    [
        (["1111"], 3),  # slot 0 is the anchor and never counts
        (["0111"], 3),
        (["1011"], 0),
        (["1101"], 1),
        (["1111", "1000", "1110"], 5),
        (["0000"], 0),
        (["-1-1"], 1),  # a slot without a label ends the streak
    ],
)
def test_a_streak_ends_at_the_first_slot_that_is_not_right(blocks: list[str], accepted: int) -> None:
    assert tallied(blocks)["tau_hat"] == pytest.approx(1 + accepted / len(blocks))


def test_slots_are_counted_one_by_one() -> None:
    figures = tallied(["-110", "-10-"], ["-01-", "-111"])
    assert figures["accuracy"] == pytest.approx(7 / 10)
    assert figures["slots"]["accuracy"] == [0.75, 0.75, 0.5]
    # Slot 2 was reached by three blocks and right in two of them; of these one has a label at slot 3, right.
    assert figures["slots"]["acceptance"] == [0.75, 0.6667, 0.5]
    assert figures["loss"] == 2.0
    assert "loss_parts" not in figures


def test_without_any_label_there_is_no_figure() -> None:
    figures = Tally(3, CPU, 4).read()
    assert figures == {
        "loss": None,
        "tau_hat": None,
        "accuracy": None,
        "slots": {"accuracy": [None, None], "acceptance": [None, None]},
    }


def test_many_micro_batches_are_summed_as_few() -> None:
    given = [["-110", "-10-"], ["-01-", "-111"]]
    few, many = tallied(*given), tallied(*given * FOLD)
    assert many == few


def test_a_reading_begins_anew() -> None:
    tally = Tally(4, CPU, 0)
    tally.add(*visited(["-111"]))
    assert tally.read()["tau_hat"] == 4
    tally.add(*visited(["-000"]))
    assert tally.read()["tau_hat"] == 1


def test_the_parts_of_the_loss_are_divided_by_the_same_weight() -> None:
    visit, *where = visited(["-111"])
    tally = Tally(4, CPU, 0)
    one = torch.ones(())
    tally.add(Visit(6 * one, 3 * one, {"ce": 3 * one, "kl": 9 * one, "cap": 0 * one}, visit.correct), *where)
    assert tally.read()["loss_parts"] == {"ce": 1.0, "kl": 3.0, "cap": 0.0}


def test_a_look_is_due_at_the_start_and_then_once_a_reading_and_not_too_often() -> None:
    tally = Tally(4, CPU, 4)
    looked = []
    for number in range(3 * EVERY):
        due = tally.due()
        tally.add(*visited(["-111"]))
        if due:
            looked.append(number)
            tally._look, tally._since = types.SimpleNamespace(), 1  # type: ignore[assignment]
        if number in (EVERY + 10, EVERY + 20):
            tally._clear()
    assert looked == [0, EVERY + 11, 2 * EVERY + 11]  # until the reading there was one already
    assert not Tally(4, CPU, 0).due()


# -- a look ------------------------------------------------------------------------------------------------


@pytest.fixture
def looked() -> tuple[dict[str, Any], dict[str, Any]]:
    """Of a micro-batch of two documents, 6 blocks and one of padding: what the tally says, and should say."""
    generator = torch.Generator().manual_seed(0)
    size, slots = 5, 7
    anchors = [2, 5, 9, 1, 4, 14]
    blocks = Blocks.build([0, 0, 0, 1, 1, 1], anchors, size, slots=slots)
    last = torch.randn(2, 16, H, generator=generator)
    head = torch.randn(V, H, generator=generator)
    hidden = torch.randn(slots * size, H, generator=generator)
    labels = torch.zeros(slots, size, dtype=torch.int64)
    weights = torch.zeros(slots, size)
    own = (last @ head.T).argmax(-1)
    for i, anchor in enumerate(anchors):
        for slot in range(1, size):
            if anchor + slot < 16 and (i, slot) != (1, 3):
                weights[i, slot] = 1
                # The drafter is more or less of the target's mind, and the label somewhere in its list.
                at = i * size + slot
                state = last[blocks.rows[i], anchor + slot - 1]
                hidden[at] = state + (0.3 if at % 2 else 1.2) * hidden[at]
                labels[i, slot] = (hidden[at] @ head.T).argsort(descending=True)[
                    (0, 1, 0, 2, 0, 4, 8, 16)[at % 8]
                ]
    rows = torch.from_numpy(np.flatnonzero(weights))
    made = Batch(
        [0, 1], [(0, 0), (1, 0)], [16, 16], torch.zeros(2, 16), None, blocks, labels, labels, weights, rows
    )
    objective = Objective(head, terms=Terms())
    with VocabularyProducts() as counted:
        visit = objective(hidden[rows], labels.flatten()[rows], torch.ones(len(rows)), top=TOP)
    assert counted.rows == len(rows)
    tally = Tally(size, CPU, 3)
    tally.add(visit, rows, blocks)
    tally.look(visit, made, last, objective.choices)
    figures = tally.read()

    log_q = (hidden @ head.T).log_softmax(-1).view(slots, size, V)
    order = log_q.argsort(-1, descending=True)
    rank = (order == labels[..., None]).int().argmax(-1)
    valid = weights > 0
    expected: dict[str, Any] = {
        "recall": {str(k): int(((rank < k) & valid).sum()) / len(rows) for k in RECALL},
        "slots": {str(k): (((rank < k) & valid).sum(0) / valid.sum(0))[1:].tolist() for k in RECALL},
    }
    chosen = [0, 2, 4]
    streaks, reached, same, seen = [], [], 0, 0
    for i in chosen:
        streak, alive = 0, True
        for slot in range(1, size):
            choice = own[blocks.rows[i], anchors[i] + slot - 1]
            seen += 1
            same += int(choice == labels[i, slot])
            alive = alive and bool(order[i, slot, 0] == choice)
            streak += alive
        streaks.append(streak)
        logs = log_q[i, 1:].sort(-1, descending=True).values.tolist()
        reached.append(depths(logs, rank[i, 1:].tolist(), BUDGETS))
    expected["agreement"] = same / seen
    expected["tau_hat_target"] = 1 + sum(streaks) / 3
    expected["tree_tau"] = {str(b): 1 + sum(r[n] for r in reached) / 3 for n, b in enumerate(BUDGETS)}
    return figures, expected


def test_a_look_measures_what_a_count_by_hand_does(looked: tuple[dict[str, Any], dict[str, Any]]) -> None:
    figures, expected = looked
    assert figures["recall"] == expected["recall"]
    for k, shares in expected["slots"].items():
        assert figures["slots"]["recall"][k] == pytest.approx(shares, abs=1e-4)
    assert figures["agreement"] == expected["agreement"]
    assert 0 < figures["agreement"] < 1
    assert figures["tau_hat_target"] == expected["tau_hat_target"] > 1
    assert figures["tree_tau"] == expected["tree_tau"]
    assert figures["tree_tau"]["64"] > 1


def test_data_that_the_target_would_not_write_is_said_once_when_enough_was_seen() -> None:
    tally = Tally(4, CPU, 1)
    tally.same, tally.seen = 100, 499
    assert tally.warning() is None
    tally.same, tally.seen = 400, 500
    assert tally.warning() is None
    tally.same = 215
    said = tally.warning()
    assert said is not None
    assert said.startswith("only 43% of the labels (500 were looked at)")
    assert "\n" not in said
    assert tally.warning() is None
