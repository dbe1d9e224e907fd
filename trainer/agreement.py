"""How far the data is the target's own: the share of labels that are the target's likeliest token.

A drafter is served with a target that writes its own text. Trained on text that somebody else wrote it
learns to foresee what the target would not say, and drafts badly though every curve looks well. Greedy
answers of the target give 1 up to rounding, its answers at temperature 1 somewhat less, other people's
answers far less.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from trainer.completions import Completions
from trainer.data_meta import FOREIGN
from trainer.errors import InputError
from trainer.target import Target

LOGIT_BYTES = 256 << 20  # logits in memory at one time


@dataclass(frozen=True)
class Agreement:
    """`equal` of `labels` supervised tokens, in `documents` documents, are the target's likeliest."""

    equal: int
    labels: int
    documents: int

    @property
    def share(self) -> float:
        return self.equal / self.labels if self.labels else 0.0

    def sentence(self, directory: object, temperature: float | None = None) -> str:
        """For people; begins with "warning" where the data was hardly written by this target.

        `temperature`: of the target's own answers, where it is known that these are.
        """
        text = (
            f"{self.share:.1%} of {self.labels:,} labels are what the target itself finds likeliest "
            f"({self.documents:,} documents)"
        )
        if temperature:
            return f"agreement: {text}; it wrote them at temperature {temperature:g}"
        if self.share >= FOREIGN:
            return f"agreement: {text}"
        return (
            f"warning: only {text}: {directory} was not written by this target, or with another chat "
            "template, and a drafter learns from it what the target will not say; let it write the answers "
            "with python -m trainer.prepare --regenerate"
        )


@torch.no_grad()
def measure(target: Target, completions: Completions, labels: int) -> Agreement:
    """Look at `labels` labels or a few more, of documents that are spread evenly over the data: always the
    same ones. Raises InputError if there is none.
    """
    equal = seen = documents = 0
    for index in _spread(len(completions)):
        ids, mask = completions.document(index)
        completions.check_ids(ids, [index])
        at = np.flatnonzero(mask[1:])  # the position before each label
        if not len(at):
            continue
        tokens = torch.from_numpy(np.asarray(ids, dtype=np.int64)).to(target.device)
        hidden = target.decoder(input_ids=tokens[None, : at[-1] + 1], use_cache=False).last_hidden_state[0]
        where = torch.from_numpy(at).to(target.device)
        equal += _equal(target, hidden[where], tokens[where + 1])
        seen += len(at)
        documents += 1
        if seen >= labels:
            break
    if not seen:
        raise InputError(f"--data-dir {completions.directory}: there is not one supervised token in it")
    return Agreement(equal, seen, documents)


def _spread(count: int) -> np.ndarray:
    """All numbers below `count`, such that the first few of them lie evenly spread."""
    step = max(1, round(count * 0.6180339887))
    while np.gcd(step, count) != 1:
        step += 1
    return np.arange(count) * step % count


def _equal(target: Target, hidden: torch.Tensor, labels: torch.Tensor) -> int:
    """How many of `labels` [n] are the argmax of the logits of `hidden` [n, H]."""
    rows = max(1, LOGIT_BYTES // (target.lm_head.shape[0] * hidden.element_size()))
    found = 0
    for some, expected in zip(hidden.split(rows), labels.split(rows), strict=True):
        found += int(((some @ target.lm_head.T).argmax(-1) == expected).sum())
    return found


def keep(completions: Completions, found: Agreement, target: str) -> None:
    """Write the measurement into data.json, which is replaced whole. It is no part of the data's digest."""
    path = completions.directory / "data.json"
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    value["agreement"] = {**asdict(found), "share": round(found.share, 4), "target": target}
    temporary = path.with_name(f".data.json.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise InputError(
            f"--data-dir {completions.directory}: data.json cannot be written ({error.strerror})"
        ) from None
