"""Trainers and other programs that need torch, started without the seconds that importing it takes."""

from __future__ import annotations

import atexit
import functools
import os
import subprocess
from collections.abc import Sequence

from deployed import CHECKOUT
from forked import Python

PRELOADED = (
    "torch",
    "transformers.models.qwen3.modeling_qwen3",
    "trainer.train",
    "trainer.toy",
    "tensorboard.summary.writer.event_file_writer",
)


@functools.cache
def python() -> Python:
    """With one thread for each: what tests train is so small that more would only spin."""
    started = Python(PRELOADED, CHECKOUT, OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
    atexit.register(started.close)
    return started


def trainer(flags: Sequence[str], timeout: float = 200) -> subprocess.CompletedProcess[str]:
    """``python -m trainer FLAGS``."""
    return python().run(["-m", "trainer", *flags], CHECKOUT, os.environ, timeout)
