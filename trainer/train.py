"""A training run from its first line to its last: load, resume, train, save, evaluate."""

from __future__ import annotations

import functools
import os
import secrets
import time
from pathlib import Path

import torch
from torch import Tensor

from trainer import allocator, checkpoint, compiling, evaluation, gpu, resuming, roles, worst
from trainer.closed_form import Terms
from trainer.config import Settings
from trainer.data import Batch, Portions, Reader
from trainer.drafter import Drafter
from trainer.drafter_config import DrafterConfig
from trainer.errors import InputError, counted
from trainer.evaluating import Evaluations
from trainer.features import Features
from trainer.finite import Watch, first_not_finite
from trainer.foreign import open_completions
from trainer.loss import Objective, Visit, teacher_rows
from trainer.metrics import TOP, Tally
from trainer.modeldir import default_mask_token, stop_tokens, target_digest, tokenizer_digest
from trainer.monitor import HostClock, Interval, Monitor, StopSignal, line, say
from trainer.noise import Noise
from trainer.optim import Optimizer, learning_rate
from trainer.packing import check_packing
from trainer.prefetch import Prefetch
from trainer.saving import Saving
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
        self.device = choose_device(roles.of(settings).ranks[0].device)
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            monitor.gauge = functools.partial(gpu.memory, self.device)
        self.clock = gpu.GpuClock() if on_gpu else HostClock()
        self.toy_prompts: evaluation.Prompts | None = None  # with the toy target

        monitor.phase("loading")
        target_dir, data_dir = self._inputs()
        monitor.phase("loading", f"target {target_dir}")
        self.completions = open_completions(data_dir, settings.cache, say)
        self.target = Target.load(target_dir, getattr(torch, settings.dtype), self.device)
        if bad := first_not_finite(self.target.model.named_parameters()):
            raise InputError(
                f"--target-model {target_dir}: {bad} holds values that are not finite; copy the model again"
            )
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
        self.draft = compiling.Drafting(self.drafter, settings, self.device, say)
        self.optimizer = Optimizer(self.drafter, settings.weight_decay, settings.optimizer)
        self.objective = Objective(
            self.target.lm_head,
            settings.loss_chunk_mb and settings.loss_chunk_mb << 20,
            terms=Terms(*settings.soft_labels, settings.cap_lambda),
            dpace=settings.dpace,
        )
        self.tally = Tally(settings.block_size, self.device, settings.sample_blocks)
        self.reader = Reader(self.completions, Portions.of(settings, self.config.mask_token_id))
        self.ahead = Prefetch(self.reader, self.device)
        soft = self.objective.terms.soft
        self.features = Features(self.target, self.reader, keep=settings.cache_features, keep_last=soft)
        self.noise = Noise(settings.noise_start, settings.noise_end, settings.noise_type, settings.seed)
        self.watch = Watch(settings.max_nonfinite_steps, self.device)
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
            total=0,  # until it is known where the run begins
            run_id=monitor.run_id,
            settings={**settings.learning(), "data": self.completions.digest, "target": name},
        )
        self.saving = Saving(settings, monitor, self.state, self.drafter, self.optimizer)

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
        self.saving.resume(self.reader.batches_per_epoch)
        self.total = self.state.total = self._steps()
        checkpoint.announce(self.output, self.state, self.config.to_json())
        self._open_records()
        parameters = sum(p.numel() for p in self.drafter.parameters())
        say(
            f"drafter {parameters / 1e6:.2f} M parameters, taps {list(self.config.target_layer_ids)} · "
            f"data {len(self.completions):,} documents, {self.completions.meta['tokens']:,} tokens, "
            f"{counted(self.reader.batches_per_epoch, 'micro-batch', 'micro-batches')} an epoch · "
            f"{self.device}, {counted(torch.get_num_threads(), 'thread')}"
        )
        self._try_out()
        self._evaluate("before")
        self.stop.install()
        self.monitor.progress(self.state.step, self.total)
        self.monitor.phase("training")
        if self.device.type == "cpu":
            allocator.settle()
        interval, logged = Interval(clock=self.clock), 0.0
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
                interval, logged = Interval(clock=self.clock), time.monotonic()
            wanted = (self.settings.save_interval, self.settings.keep_every)
            if any(every and self.state.step % every == 0 for every in wanted) and not last:
                self._save_by_itself()
        return self._finish()

    def _steps(self) -> int:
        """Optimiser steps of the whole run: those that are done, and what the data that is left gives."""
        left = self.settings.epochs * self.reader.batches_per_epoch - self.state.micro_batch
        steps = self.state.step + max(left, 0) // self.settings.grad_accum
        return max(1, self.state.step, min(steps, self.settings.max_steps or steps))

    def _try_out(self) -> None:
        def gradient(batch: Batch) -> None:
            self._gradient(batch, Interval())

        worst.rehearse(self.reader, self.device, self.drafter, self.draft, gradient, self.monitor)
        self.watch.features.read()  # of documents that are none
        self.compilations = compiling.Compilations()

    def _step(self, interval: Interval) -> float:
        """One optimiser step; returns its learning rate."""
        started = time.perf_counter()
        tokens, labels = 0, 0
        weight: Tensor | float = 0.0
        for _ in range(self.settings.grad_accum):
            with interval.part("data"):
                batch = self.ahead.batch(self.state.micro_batch).to(self.device)
            weight += self._micro_batch(batch, interval)
            tokens += batch.tokens
            labels += len(batch.rows)
            self.state.micro_batch += 1
        self.state.step += 1
        self.state.epoch = self.state.micro_batch // self.reader.batches_per_epoch
        s = self.settings
        rate = learning_rate(self.state.step, self.total, s.lr, s.warmup_ratio)
        with interval.part("optimizer"):
            if labels:
                self.watch.steps.note(self.optimizer.step(rate, weight, s.grad_clip))
        if self.watch.steps.due:
            self.watch.look(self.state.step)
        interval.steps += 1
        interval.tokens += tokens
        self.monitor.step_done(self.state.step, time.perf_counter() - started, tokens)
        return rate

    def _micro_batch(self, batch: Batch, interval: Interval) -> Tensor | float:
        """Add the gradient of Σ w · (loss of a row) of one micro-batch, and count it; returns Σ w."""
        if not len(batch.rows):
            return 0.0
        look = self.tally.due()
        visit, last = self._gradient(batch, interval, TOP if look else 0)
        with interval.part("objective"):
            self.tally.add(visit, batch.rows, batch.blocks)
        if look:
            # With cached features a pass of the target costs what they save; one is enough to know the data.
            if last is None and not self.tally.seen:
                last = self.features.last(batch)
            self.tally.look(visit, batch, last, self.objective.choices)
        return visit.weight

    def _gradient(self, batch: Batch, interval: Interval, top: int = 0) -> tuple[Visit, Tensor | None]:
        """Add the gradient of Σ w · (loss of a row) of one micro-batch, and nothing else.

        Returns the visit, which has the `top` most probable tokens if asked for, and the target's last hidden
        states if they are there.
        """
        with interval.part("target"):
            taps, last = self.features(batch)
            taps = taps[:, : batch.blocks.context_length]
            self.watch.features.note(taps, batch.spans)
            if self.noise:
                epoch = self.state.micro_batch // self.reader.batches_per_epoch
                strength = self.noise.strength(self.state.step + 1, self.total)
                taps = self.noise.add(taps, batch.spans, epoch, strength)
            embeddings = self.target.embed(batch.block_ids)
        with interval.part("forward"):
            rows = self.draft(embeddings.float(), batch.blocks, taps.float(), batch.rows)
        labels, weights = batch.labels.flatten()[batch.rows], batch.weights.flatten()[batch.rows]
        with interval.part("objective"):
            teacher = None
            if self.objective.terms.soft and last is not None:
                teacher = teacher_rows(last, batch.blocks, batch.rows)
            shape = (len(batch.blocks), self.settings.block_size)
            visit = self.objective(
                rows, labels, weights, teacher=teacher, rows=batch.rows, shape=shape, top=top
            )
        with interval.part("backward"):
            visit.loss.backward()
        return visit, last

    def _log(self, interval: Interval, rate: float) -> None:
        self.watch.look(self.state.step)
        record = {
            **interval.summary(rate, self.monitor.memory(), self.tally.read()),
            "nonfinite_steps": self.watch.steps.total,
        }
        if pieces := self.compilations.new():
            say(f"compiled {pieces} more pieces of code since the line before")
        say(line(self.state.step, self.total, record))
        self.monitor.record(record)
        self.records.write(self.state.step, {"kind": "training", **record, "epoch": self.state.epoch})
        # What measured data says of itself was said at the start; what the target sampled is its own.
        known = self.completions.meta.keys() & {"agreement", "regenerated"}
        if (warning := self.tally.warning()) and not known:
            say(f"warning: {warning}")

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
        return self.saving.save()

    def _save_by_itself(self) -> None:
        """The save that is due every so many steps; of a run that diverges there is a better one already."""
        self.watch.look(self.state.step)
        if self.watch.steps.in_a_row:
            say(f"no checkpoint at step {self.state.step}, whose gradient was not finite")
        else:
            self._save()

    def _finish(self) -> int:
        """The last checkpoint comes first, so that nothing that follows can lose the training."""
        wrong = self._save()
        self.monitor.phase("finishing")
        try:
            self._evaluate("after")
        except Stopped:
            say("stopped during the evaluation, which the next run repeats; the training is saved")
            return 0 if wrong is None else SAVE_FAILED
        if (place := self.saving.finish(anew=wrong is not None)) is None:
            return SAVE_FAILED
        say(f"finished at step {self.state.step}: {place}")
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
        if when == "during":
            say(f"step {self.state.step}: real speculative decoding of {evaluations.prompts} texts")
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
        if 0 < self.state.step < self.total:
            if (code := self._boundary()) is not None:
                raise Stopped(code)
            self.monitor.phase("evaluating", text)
            return  # a log of steps is not the place for each prompt
        if self.state.step and self.saving.saved and (request := self.monitor.asked()):
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
