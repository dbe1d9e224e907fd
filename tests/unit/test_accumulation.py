"""A step does not depend on how its documents are spread over micro-batches, whatever the loss."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny
import torch

from trainer.closed_form import Terms
from trainer.data import Batch, Completions, Portions, Reader, write_completions
from trainer.drafter import Drafter
from trainer.drafter_config import DrafterConfig
from trainer.loss import Objective, teacher_rows
from trainer.target import Target

ALL = {"terms": Terms(kl_weight=0.15, temperature=2.0, cap=0.1), "dpace": 0.5}


@pytest.mark.parametrize("extras", [{}, ALL], ids=["plain", "all extras"])
def test_accumulation_over_micro_batches_equals_one_that_holds_them_all(tmp_path: Path, extras: dict) -> None:
    write_completions(tmp_path / "data", tiny.documents(4), {"tokenizer": "x", "target": "tiny"})
    reader = Reader(Completions.open(tmp_path / "data"), Portions(512, 8, 64, 4, 1024, 2.0, 96))
    target = Target(tiny.qwen3(initializer_range=0.3).double(), (0, 2))
    config = DrafterConfig.for_target(
        target.config, block_size=4, num_layers=1, target_layer_ids=(0, 2), mask_token_id=96
    )
    objective = Objective(target.lm_head, **extras)

    def gradient(batches: list[Batch]) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        drafter = Drafter(config).double()
        weight = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            taps, last = target.features(batch.input_ids)
            context = drafter.fuse(taps[:, : batch.blocks.context_length])
            hidden = drafter(target.embed(batch.block_ids), batch.blocks, context).flatten(0, 1)[batch.rows]
            visit = objective(
                hidden,
                batch.labels.flatten()[batch.rows],
                batch.weights.flatten()[batch.rows],
                teacher=teacher_rows(last, batch.blocks, batch.rows),
                rows=batch.rows,
                shape=(len(batch.blocks), 4),
            )
            visit.loss.backward()
            weight += visit.weight
        return {name: p.grad / weight for name, p in drafter.named_parameters() if p.grad is not None}

    numbers = np.arange(4)
    together = gradient([reader._collate(numbers, numbers, 0)])
    apart = gradient([reader._collate(numbers[i : i + 1], np.zeros(1, np.int64), 0) for i in range(4)])
    assert len(together) > 10
    for name, value in together.items():
        torch.testing.assert_close(apart[name], value, atol=1e-12, rtol=1e-9)
