"""python -u -m trainer: train a DFlash drafter. The flags are in trainer/config.py, the run in
trainer/train.py.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer import config, nodes, ranks, roles, sinks
from trainer.errors import InputError, to_the_end
from trainer.monitor import Monitor, say
from trainer.status import RANK_VARIABLE, RUN_DIR_VARIABLE

# Idle OpenMP threads sleep instead of spinning. On a machine that others use too, a spinning pair took six
# times as long for the same steps. It must be set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 trained or stopped as asked, 1 a checkpoint was lost, 2 wrong input, 3 it
    diverged, 4 no step for too long; of several ranks that of the first to fail.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        request = config.parse(argv)
        settings = request.settings
        if request.print_config:
            say(json.dumps(dataclasses.asdict(settings), indent=1))
            return 0
        if request.check_config:
            say(config_check(settings, gpu_memory=request.gpu_memory))
            sinks.check(settings.wandb_project)  # last: what a run takes is worth knowing without it
            return 0
        return train(settings, argv)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.code


def train(settings: config.Settings, argv: Sequence[str]) -> int:
    """With several devices, start `argv` anew as a rank for each; in a rank, or with one device, train."""
    places = roles.of(settings).ranks
    rank = ranks.own(places)
    where = settings.run_dir or os.environ.get(RUN_DIR_VARIABLE)
    if where and not Path(where).is_dir():
        raise InputError(f"--run-dir {where}: there is no such directory; make it first (mkdir -p {where})")
    if len(places) > 1 and rank is None:
        # What a check imports (torch, for a target's kernels) ends with it: who waits for the ranks
        # holds neither memory nor a GPU.
        code = ranks.apart(lambda: check_start(settings))
        if code and settings.node == 0:
            return code
        command = [sys.executable, "-u", "-m", "trainer", *argv]
        return ranks.launch(
            command,
            [place for place in places if place.node in (None, settings.node)],
            stall_timeout=settings.stall_timeout,
            threads=settings.threads is not None,
            meeting=nodes.meeting(settings, wrong=code) if settings.nodes > 1 else None,
        )
    monitor = Monitor(Path(where) if where else None, rank or places[0], settings.stall_timeout)
    try:
        if rank is None:
            check_start(settings)  # before torch is imported: the answer is there at once
        monitor.phase("loading", "importing torch")
        from trainer.train import run

        code = run(settings, monitor)
        if code == 0 and len(places) > 1:
            monitor.phase("finishing")  # its end is expected now
        return code
    finally:
        monitor.close()


def check_start(settings: config.Settings) -> None:
    """All that can be told of a start without torch, said once. Raises InputError."""
    from trainer import checkpoint

    check_devices(settings, starting=True)
    sinks.check(settings.wandb_project)
    checkpoint.check_free(Path(settings.output_dir))
    if settings.target_model != "toy":
        say(config_check(settings, weights=True))


def check_devices(settings: config.Settings, *, starting: bool) -> None:
    """Raises InputError for devices that are not here."""
    from trainer import device

    device.check(settings.device)
    for flag, numbers in (
        ("--target-gpus", settings.target_gpus),
        ("--drafter-gpus", settings.drafter_gpus),
    ):
        if numbers is not None:
            device.check_gpus(flag, numbers, starting=starting)


def config_check(settings: config.Settings, *, weights: bool = False, gpu_memory: float | None = None) -> str:
    """Check what can be checked from small files: the target's config.json, the data's data.json.

    `weights` adds the headers of the weights, and whether its kernels can be imported. Returns one line that
    describes the run, one on the kernels of a target that has some, and, without `weights`, what the run will
    take, and whether GPUs of `gpu_memory` GB (None: of those here, if there are any) hold it. Raises
    InputError.
    """
    from trainer import estimate, fitting, resuming, toy
    from trainer.data_meta import check_length, check_meta, known_meta, template_warning
    from trainer.drafter_config import DrafterConfig
    from trainer.kernels import kernels
    from trainer.modeldir import (
        check_weights,
        default_mask_token,
        mask_token_warning,
        read_config,
        template_digest,
        text_config,
        tokenizer_digest,
    )
    from trainer.packing import check_packing
    from trainer.prompts import read_prompts

    check_devices(settings, starting=weights)
    made_here = settings.target_model == "toy"
    target = toy.wanted().shape if made_here else text_config(settings.target_model)
    tokenizer = "" if made_here else tokenizer_digest(settings.target_model)
    mask = settings.mask_token_id
    if mask is None:
        last = target.vocab_size - 1  # the toy's own
        mask = last if made_here else default_mask_token(settings.target_model, target.vocab_size)
    drafter = DrafterConfig.for_target(
        target,
        block_size=settings.block_size,
        num_layers=settings.num_draft_layers,
        target_layer_ids=settings.target_layer_ids,
        num_taps=settings.num_taps,
        sliding_window=settings.sliding_window,
        mask_token_id=mask,
    )
    resuming.check(settings, drafter)
    if settings.packing:
        check_packing(vars(target))
    if made_here:
        if settings.data_dir:
            known_meta(settings.data_dir)
        found = estimate.estimate(settings, drafter, target, 0)
        needs = [*estimate.lines(settings, found, 0), *fitting.lines(settings, found, target, gpu_memory)]
        return "\n".join(["settings are valid; the toy target is made at the start", *needs])
    assert settings.data_dir
    meta = known_meta(settings.data_dir)
    check_meta(settings.data_dir, meta, tokenizer, target.vocab_size)
    check_length(settings.data_dir, meta.get("longest"), settings.block_size)
    warnings = [template_warning(settings.data_dir, meta, template_digest(settings.target_model))]
    if settings.mask_token_id is not None:
        warnings.append(mask_token_warning(settings.target_model, mask))
    if weights:
        check_weights(settings.target_model)
    if settings.eval_file:
        where, place = Path(settings.eval_file), Path(settings.target_model)
        read_prompts(where, place, target.vocab_size, chat=settings.eval_chat, flag="--eval-file")
    fast = kernels(read_config(settings.target_model), load=weights)
    if settings.require_fast_kernels:
        fast.require()
    described = (
        f"target {settings.target_model}: {drafter.num_target_layers} layers, width {drafter.hidden_size}, "
        f"vocabulary {drafter.vocab_size:,} · drafter: {drafter.num_hidden_layers} layers, block "
        f"{drafter.block_size}, from the target's layers {list(drafter.target_layer_ids)}, mask token {mask} "
        f"· data {settings.data_dir}: {_documents(meta)}"
    )
    tokens = 0 if weights else int(meta.get("tokens") or 0)
    needs = []
    if not weights:
        found = estimate.estimate(settings, drafter, target, tokens)
        needs = estimate.lines(settings, found, tokens)
        needs += fitting.lines(settings, found, target, gpu_memory)
    return "\n".join(filter(None, [described, fast.line(), *warnings, *needs]))


def _documents(meta: dict[str, Any]) -> str:
    if meta["documents"] is None:
        return f"another trainer's, {len(meta['shards'])} files"
    return f"{meta['documents']:,} documents"


if __name__ == "__main__":
    # USR1 prints every thread's stack, even if Python's lock is held for ever; launch asks for it.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing to save yet: no traceback either
    sys.exit(to_the_end(main) if RANK_VARIABLE not in os.environ else ranks.leave(main))
