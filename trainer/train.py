"""A training run from its first line to its last: load, resume, train, save, evaluate."""

from __future__ import annotations

import dataclasses
import os
import secrets
import time
from pathlib import Path

import torch

from trainer import checkpoint, evaluation, resuming
from trainer.config import Settings
from trainer.data import Batch, Portions, Reader
from trainer.drafter import Drafter
from trainer.drafter_config import DrafterConfig
from trainer.errors import InputError
from trainer.evaluating import Evaluations
from trainer.features import Features
from trainer.foreign import open_completions
from trainer.loss import Objective, accepted_tokens
from trainer.modeldir import default_mask_token, stop_tokens, target_digest, tokenizer_digest
from trainer.monitor import Interval, Monitor, StopSignal, line, say
from trainer.optim import Optimizer, learning_rate
from trainer.packing import check_packing
from trainer.prefetch import Prefetch
from trainer.sinks import Project, Records
from trainer.status import Request
from trainer.target import Target, choose_device

SHM_VARIABLE = "DRAFTHOUSE_SHM"  # where weights lie in memory
SAVE_FAILED = 1  # exit code if the checkpoint that was asked for could not be written


class Stopped(Exception):
    """An evaluation was ended, by TERM, SIGINT or a request, and nothing is left to save."""

    def __init__(self, code: int = 0) -> None:
        super().__init__(code)
        self.code = code


def run(settings: Settings, monitor: Monitor) -> int:
    """Returns the exit code. Raises InputError for what can be put right by whoever started it."""
    with checkpoint.output_directory(Path(settings.output_dir)):
        if settings.threads:
            torch.set_num_threads(settings.threads)
        trainer = Trainer(settings, monitor)
        try:
            return trainer.run()
        finally:
            trainer.close()


class Trainer:
    def __init__(self, settings: Settings, monitor: Monitor) -> None:
        self.settings = settings
        self.monitor = monitor
        self.output = Path(settings.output_dir)
        self.stop = StopSignal()
        self.records = Records()
        self.saved: checkpoint.Found | None = None  # this run's last checkpoint; its state is of its step
        self.device = choose_device(settings.device)
        self.toy_prompts: evaluation.Prompts | None = None  # with the toy target

        monitor.phase("loading")
        target_dir, data_dir = self._inputs()
        monitor.phase("loading", f"target {target_dir}")
        self.completions = open_completions(data_dir, settings.cache, say)
        self.target = Target.load(target_dir, getattr(torch, settings.dtype), self.device)
        vocabulary = self.target.config.vocab_size
        self.completions.check_target(tokenizer_digest(target_dir), vocabulary)
        if settings.packing:
            check_packing(self.target.config)
        mask = settings.mask_token_id
        self.config = DrafterConfig.for_target(
            self.target.config,
            block_size=settings.block_size,
            num_layers=settings.num_draft_layers,
            target_layer_ids=settings.target_layer_ids,
            num_taps=settings.num_taps,
            sliding_window=settings.sliding_window,
            mask_token_id=default_mask_token(target_dir, vocabulary) if mask is None else mask,
        )
        self.target.tap(self.config.target_layer_ids)
        torch.manual_seed(settings.seed)  # only now: making the toy draws numbers too
        self.drafter = Drafter(self.config)
        if settings.init_from_target:
            self.drafter.init_from_target(self.target.model)
        self.drafter.to(self.device)
        self.optimizer = Optimizer(self.drafter, settings.weight_decay, settings.optimizer)
        self.objective = Objective(self.target.lm_head)
        self.reader = Reader(
            self.completions,
            Portions(
                token_budget=settings.token_budget,
                max_batch_size=settings.max_batch_size,
                max_seq_len=settings.max_seq_len,
                block_size=settings.block_size,
                max_anchors=settings.max_anchors,
                gamma=settings.decay,
                mask_token_id=self.config.mask_token_id,
                sliding_window=settings.sliding_window,
                seed=settings.seed,
                packing=settings.packing,
            ),
        )
        self.ahead = Prefetch(self.reader, self.device)
        self.features = Features(self.target, self.reader, keep=settings.cache_features)
        steps = settings.epochs * self.reader.batches_per_epoch // settings.grad_accum
        self.total = max(1, min(steps, settings.max_steps or steps))
        name = resuming.target_name(target_digest(target_dir), toy=settings.target_model == "toy")
        self.evaluations = Evaluations(
            settings,
            self.target,
            target_dir,
            name,
            self.completions,
            self.toy_prompts,
            stop_tokens(target_dir),
        )
        self.state = checkpoint.State(
            step=0,
            micro_batch=0,
            epoch=0,
            total=self.total,
            run_id=monitor.run_id,
            settings={
                **settings.learning(),
                "data": self.completions.digest,
                "target": name,
            },
        )

    def _inputs(self) -> tuple[str, str]:
        """Directories of the target and the data; the toy's are made now if they are not there."""
        if self.settings.target_model != "toy":
            assert self.settings.data_dir
            return self.settings.target_model, self.settings.data_dir
        from trainer import toy

        shm = Path(os.environ.get(SHM_VARIABLE) or "/dev/shm/drafthouse")
        made = toy.ensure(self.settings.cache, shm, self.monitor.report)
        self.toy_prompts = made.prompts
        return str(made.target_dir), self.settings.data_dir or str(made.data_dir)

    # -- the run ---------------------------------------------------------------------------

    def run(self) -> int:
        checkpoint.get_ready()
        self._resume()
        checkpoint.announce(self.output, self.state, self.config.to_json())
        self._open_records()
        parameters = sum(p.numel() for p in self.drafter.parameters())
        say(
            f"drafter {parameters / 1e6:.2f} M parameters, taps {list(self.config.target_layer_ids)} · "
            f"data {len(self.completions):,} documents, {self.completions.meta['tokens']:,} tokens, "
            f"{self.reader.batches_per_epoch} micro-batches an epoch · {self.device}, "
            f"{torch.get_num_threads()} threads"
        )
        self._evaluate("before")
        self.stop.install()
        self.monitor.progress(self.state.step, self.total)
        self.monitor.phase("training")
        interval, logged = Interval(), 0.0
        while self.state.step < self.total:
            if (code := self._boundary()) is not None:
                return code
            if self.evaluations.due(self.state.step):
                # Here and not after the step, since a run that resumes at this step repeats it.
                began = time.perf_counter()
                try:
                    self._evaluate("during")
                except Stopped as stopped:
                    return stopped.code
                interval.started += time.perf_counter() - began
            rate = self._step(interval)
            last = self.state.step == self.total
            if not logged or last or time.monotonic() - logged >= self.settings.log_interval:
                self._log(interval, rate)
                interval, logged = Interval(), time.monotonic()
            if self.state.step % self.settings.save_interval == 0 and not last:
                self._save()
        return self._finish()

    def _step(self, interval: Interval) -> float:
        """One optimiser step; returns its learning rate."""
        started = time.perf_counter()
        tokens, weight = 0, 0.0
        for _ in range(self.settings.grad_accum):
            with interval.part("data"):
                batch = self.ahead.batch(self.state.micro_batch).to(self.device)
            weight += self._micro_batch(batch, interval)
            tokens += batch.tokens
            self.state.micro_batch += 1
        self.state.step += 1
        self.state.epoch = self.state.micro_batch // self.reader.batches_per_epoch
        s = self.settings
        rate = learning_rate(self.state.step, self.total, s.lr, s.warmup_ratio)
        with interval.part("optimizer"):
            if weight and self.optimizer.step(rate, weight, s.grad_clip) is None:
                say(f"warning: step {self.state.step} had a gradient that is not finite and changed nothing")
        interval.steps += 1
        interval.tokens += tokens
        self.monitor.step_done(self.state.step, time.perf_counter() - started, tokens)
        return rate

    def _micro_batch(self, batch: Batch, interval: Interval) -> float:
        """Add the gradient of Σ w·CE of one micro-batch; returns Σ w."""
        if not len(batch.rows):
            return 0.0
        with interval.part("target"):
            taps = self.features(batch)[:, : batch.blocks.context_length]
            embeddings = self.target.embed(batch.block_ids)
        with interval.part("forward"):
            hidden = self.drafter(embeddings.float(), batch.blocks, self.drafter.fuse(taps.float()))
            rows = hidden.flatten(0, 1)[batch.rows]
        labels, weights = batch.labels.flatten()[batch.rows], batch.weights.flatten()[batch.rows]
        with interval.part("objective"):
            visit = self.objective(rows, labels, weights)
        with interval.part("backward"):
            visit.loss.backward()
        weight = float(weights.sum())
        interval.loss += float(visit.loss.detach())
        interval.weight += weight
        interval.accepted += accepted_tokens(visit.correct, batch.rows, *batch.labels.shape)
        interval.blocks += batch.blocks.kept
        interval.correct += int(visit.correct.sum())
        interval.slots += len(batch.rows)
        return weight

    def _log(self, interval: Interval, rate: float) -> None:
        record = interval.summary(rate, self.monitor.memory())
        say(line(self.state.step, self.total, record))
        self.monitor.record(record)
        self.records.write(self.state.step, {"kind": "training", **record, "epoch": self.state.epoch})

    # -- stop, save, resume ---------------------------------------------------------------------------

    def _boundary(self) -> int | None:
        """Between two steps: do what was asked for. Returns an exit code if that was to stop."""
        if self.stop.came:
            return 0 if self._save() is None else SAVE_FAILED
        request = self.monitor.asked()
        if request is None:
            return None
        wrong = self._save()
        self._answer(request, wrong)
        if request.action == "checkpoint-and-stop" and wrong is None:
            return 0
        return None

    def _answer(self, request: Request, wrong: str | None) -> None:
        self.monitor.answer(request, wrong or "done")
        say(f"{request.action} asked for by {request.by or 'somebody'}: {wrong or 'done'}")

    def _save(self) -> str | None:
        """Save a checkpoint; returns what went wrong, which is also said, and does not end the training."""
        self.monitor.phase("checkpointing")
        try:
            self.state.rng = bytes(torch.get_rng_state().tolist()).hex()
            path = self._write_checkpoint()
        except Exception as error:  # whatever it is, what has been learnt is worth another attempt
            self.saved = None
            wrong = " ".join(str(error).split())
            if not isinstance(error, checkpoint.SaveError):
                wrong = f"no checkpoint at step {self.state.step}: {type(error).__name__}: {wrong}"
            say(f"warning: {wrong}")
            self.monitor.phase("training", f"checkpoint failed: {wrong}")
            return wrong
        self.saved = checkpoint.Found(path, dataclasses.replace(self.state))
        say(f"checkpoint {path}")
        self.monitor.checkpoint(path, self.state.step)
        self.monitor.phase("training")
        return None

    def _write_checkpoint(self) -> Path:
        """Once per step: the tensors of a step are what they are, so a second save renews the state alone."""
        if self.saved and self.saved.state.step == self.state.step:
            checkpoint.finish(checkpoint.Found(self.saved.path, self.state))
            return self.saved.path
        return checkpoint.save(
            self.output,
            self.state,
            self.drafter.state_dict(),
            self.optimizer.state(),
            self.config.to_json(),
            self.settings.keep_checkpoints,
        )

    def _resume(self) -> None:
        if self.settings.resume == "never":
            return
        found = checkpoint.newest(self.output, say)
        if found is None:
            return
        ours = self.state.settings
        if why := resuming.superseded(found, ours):
            say(why)
            return
        shape = DrafterConfig.from_json(checkpoint.read_config(found))
        if wrong := resuming.refusal(found, shape, self.config, ours):
            raise InputError(wrong)
        if changed := resuming.changed(found, ours):
            say(f"warning: resuming with other settings than before: {', '.join(changed)}")
        drafter, optimizer = checkpoint.load(found)
        self.drafter.load_state_dict(drafter)
        self.optimizer.load(optimizer)
        torch.set_rng_state(torch.tensor(list(bytes.fromhex(found.state.rng)), dtype=torch.uint8))
        self.state.step = found.state.step
        self.state.micro_batch = found.state.micro_batch
        self.state.epoch = found.state.epoch
        self.state.results = {
            when: result for when, result in found.state.results.items() if isinstance(result, dict)
        }
        self.state.wandb_id = found.state.wandb_id
        if found.path.parent == self.output / self.state.run_id:  # an earlier attempt of this run
            self.saved = found
            self.state.sequence = found.state.sequence
        self.monitor.checkpoint(found.path, found.state.step)
        say(f"resumed from {found.path} at step {found.state.step}")

    def _finish(self) -> int:
        """The last checkpoint comes first, so that nothing that follows can lose the training."""
        wrong = self._save()
        self.monitor.phase("finishing")
        try:
            self._evaluate("after")
        except Stopped:
            say("stopped during the evaluation, which the next run repeats; the training is saved")
            return 0 if wrong is None else SAVE_FAILED
        self.state.finished = True
        if wrong is not None:
            wrong = self._save()
            return 0 if wrong is None else SAVE_FAILED
        assert self.saved is not None
        try:
            checkpoint.finish(checkpoint.Found(self.saved.path, self.state))
        except checkpoint.SaveError as error:
            say(f"warning: {error}")
            return SAVE_FAILED
        say(f"finished at step {self.state.step}: {self.saved.path}")
        return 0

    # -- evaluation and records ------------------------------------------------------------

    def _evaluate(self, when: str) -> None:
        """Real speculative decoding "before" the first step, "during" the training, or "after" the last step.

        What came of the first and the last is kept in the checkpoint. Raises Stopped if it was ended.
        """
        evaluations = self.evaluations
        if not evaluations.cases or (when == "before" and self.state.step):
            return
        known = self.state.results.get(when, {})
        if (known.get("of"), known.get("step")) == (evaluations.of, self.state.step):
            return
        if when != "after":
            self.monitor.phase("evaluating")
        rows = evaluations.measure(self.drafter, self._evaluation_progress)
        if when != "during":
            kept = {"of": evaluations.of, "step": self.state.step, "rows": evaluation.as_json(rows)}
            self.state.results[when] = kept
        earlier = self.state.results.get("before", {}) if when != "before" else {}
        title = f"speculative decoding, block {self.config.block_size}"
        if when == "during":
            title += f", step {self.state.step}"
        for text in evaluations.lines(rows, title, earlier):
            say(text)
        self.records.write(self.state.step, {"kind": "evaluation", **evaluation.metrics(rows)})
        self.monitor.metrics(**evaluation.metrics(rows))
        if when == "during":
            self.monitor.phase("training")

    def _evaluation_progress(self, text: str) -> None:
        """Between two tokens: what was asked for need not wait for the end of the evaluation."""
        if self.state.step < self.total:
            if self.state.step and (code := self._boundary()) is not None:
                raise Stopped(code)
            self.monitor.phase("evaluating")
        elif self.saved and (request := self.monitor.asked()):
            self._answer(request, None)  # the last checkpoint is already there
            if request.action == "checkpoint-and-stop":
                raise Stopped
        if self.stop.came:
            raise Stopped
        self.monitor.report(text)

    def _open_records(self) -> None:
        wandb = None
        if self.settings.wandb_project:
            # Random, since run ids repeat from host to host; kept in the checkpoint, so that it is continued.
            self.state.wandb_id = self.state.wandb_id or secrets.token_hex(8)
            name = self.settings.wandb_run_name or self.monitor.run_id
            wandb = Project(self.settings.wandb_project, name, self.state.wandb_id)
        run_dir = self.monitor.run_dir
        self.records.open(run_dir, self.state.step, wandb, self.output, self.state.settings)
        for name, where in self.records.links.items():
            self.monitor.link(name, where)

    def close(self) -> None:
        self.ahead.close()
        self.records.close()
