"""A tiny target and drafters for it, made once for all tests of a process."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
from torch.nn.functional import cross_entropy

from trainer.blocks import Blocks
from trainer.drafter import Drafter
from trainer.drafter_config import DrafterConfig
from trainer.speculative import plain
from trainer.target import Target

BLOCK = 5
TAPS = (0, 2)
MASK = 96
NEW = 16
PROMPTS = [[3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 2, 8], [1, 6, 1, 8, 0, 3]]
SHARP = {"initializer_range": 0.3}  # weights so large that the texts go in no circles


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small only lose by sharing their work, most of all on a busy machine. (To be imported.)"""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def target(kind: str = "qwen3") -> Target:
    return Target(getattr(tiny, kind)(**SHARP), TAPS)


def config(**changes: object) -> DrafterConfig:
    shape = SimpleNamespace(**tiny.SHAPE)
    chosen = {"block_size": BLOCK, "num_layers": 2, "target_layer_ids": TAPS, "mask_token_id": MASK}
    return DrafterConfig.for_target(shape, **{**chosen, **changes})


@functools.cache
def untrained() -> Drafter:
    torch.manual_seed(1)
    return Drafter(config()).eval()


@functools.cache
def trained() -> Drafter:
    """It has learnt some of what the Qwen3 says to PROMPTS: some of its guesses are right."""
    of = target()
    ids = torch.tensor([text.tokens for text in plain(of, PROMPTS, NEW + BLOCK)[0]])
    start, end = len(PROMPTS[0]), ids.shape[1] - BLOCK
    anchors = list(range(start, end)) * len(ids)
    rows = [row for row in range(len(ids)) for _ in range(start, end)]
    blocks = Blocks.build(rows, anchors, BLOCK)
    inputs = torch.full((len(rows), BLOCK), MASK)
    inputs[:, 0] = ids[rows, anchors]
    labels = torch.stack([ids[r, a + 1 : a + BLOCK] for r, a in zip(rows, anchors, strict=True)])
    torch.manual_seed(2)
    drafter = Drafter(config())
    optimizer = torch.optim.Adam(drafter.parameters(), lr=0.02)
    taps = of.features(ids)[0]
    for _ in range(30):
        hidden = drafter(of.embed(inputs), blocks, drafter.fuse(taps))[:, 1:]
        loss = cross_entropy((hidden @ of.lm_head.T).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter.eval()


def save(drafter: Drafter, place: Path) -> Path:
    """A checkpoint as far as decoding reads it."""
    from safetensors.torch import save_file

    place.mkdir()
    save_file(drafter.state_dict(), place / "drafter.safetensors")
    (place / "config.json").write_text(json.dumps(drafter.config.to_json()))
    return place
