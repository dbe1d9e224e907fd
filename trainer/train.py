"""A training run from its first line to its last: load, resume, train, save, evaluate.

A run of several devices has a process for each. Those that train the drafter are a team: they do the same
steps at the same time, each with its part of a step's micro-batches, and sum their gradients. Rank 0 is one
of them and keeps the books.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import secrets
import time
from pathlib import Path

import torch
from torch import Tensor

from trainer import allocator, checkpoint, compiling, evaluation, gpu, roles, worst
from trainer.channel import Incoming
from trainer.closed_form import Terms
from trainer.config import Settings
from trainer.data import Batch
from trainer.drafter import Drafter
from trainer.errors import counted
from trainer.evaluation import Row
from trainer.features import Features, Here
from trainer.feeding import Feeder, Order, measured_elsewhere
from trainer.finite import Watch
from trainer.loading import load
from trainer.loss import Objective, Visit, teacher_rows
from trainer.metrics import TOP, Tally
from trainer.monitor import HostClock, Interval, Monitor, StopSignal, line, say
from trainer.noise import Noise
from trainer.optim import Optimizer, learning_rate
from trainer.prefetch import Prefetch
from trainer.saving import Saving
from trainer.sinks import Project, Records
from trainer.status import Request
from trainer.sums import GradientSum
from trainer.target import choose_device, choose_devices
from trainer.waiting import waiting
from trainer.world import PeerLost, World

SAVE_FAILED = 1  # exit code if the checkpoint that was asked for could not be written
LOST = 1  # … if another process of the run is gone


class Stopped(Exception):
    """An evaluation was ended, by TERM, SIGINT or a request, and nothing is left to save."""

    def __init__(self, code: int = 0) -> None:
        super().__init__(code)
        self.code = code


def run(settings: Settings, monitor: Monitor) -> int:
    """Returns the exit code. Raises InputError for what can be put right by whoever started it."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    ranks = roles.of(settings).ranks
    number = roles.own_rank()
    devices = choose_devices(ranks[number].device)
    device = devices[0]
    if device.type == "cuda":
        torch.cuda.set_device(device)
        monitor.gauge = functools.partial(gpu.memory, device)
    try:
        world = World(ranks, number, roles.store())
        try:
            if world.rank.role == "target":
                return Feeder(settings, monitor, world, load(settings, monitor, devices)).run()
            return _train(settings, monitor, world, device)
        finally:
            world.close()
    except PeerLost:
        say("another process of this run is gone")
        return LOST


def _train(settings: Settings, monitor: Monitor, world: World, device: torch.device) -> int:
    with contextlib.ExitStack() as stack:
        if world.main:
            stack.enter_context(checkpoint.output_directory(Path(settings.output_dir)))
        trainer = Trainer(settings, monitor, world, device)
        stack.callback(trainer.close)
        return trainer.run()


class Trainer:
    def __init__(
        self,
        settings: Settings,
        monitor: Monitor,
        world: World | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Without a `world` it is a run of one process."""
        self.monitor = monitor
        self.world = world = world or World(roles.of(settings).ranks[:1], 0)
        self.device = device = device or choose_device(world.rank.device)
        on_gpu = device.type == "cuda"
        self.settings = settings = dataclasses.replace(
            settings, drafter_dtype=settings.drafter_type(on_gpu=on_gpu)
        )
        self.output = Path(settings.output_dir)
        self.stop = StopSignal(quiet=not self.world.main)
        self.logged = 0.0  # when the last log line was
        self.records = Records()
        self.clock = gpu.GpuClock() if on_gpu else HostClock()

        alone = world.rank.role == "drafter"  # the target is elsewhere
        loaded = load(settings, monitor, [device], ends=alone)
        self.target, self.completions, self.reader = loaded.target, loaded.completions, loaded.reader
        self.config = loaded.config
        torch.manual_seed(settings.seed)  # only now: making the toy draws numbers too
        self.drafter = Drafter(self.config)
        if settings.init_from_target:
            self.drafter.init_from_target(self.target.model)
        self.drafter.to(self.device)
        self.draft = compiling.Drafting(self.drafter, settings, self.device, say)
        self.optimizer = Optimizer(self.drafter, settings.weight_decay, settings.optimizer)
        head = self.target.lm_head
        self.objective = Objective(
            head.to(self.draft.dtype) if self.draft.dtype == torch.bfloat16 else head,
            settings.loss_chunk_mb and settings.loss_chunk_mb << 20,
            terms=Terms(*settings.soft_labels, settings.cap_lambda),
            dpace=settings.dpace,
        )
        self.tally = Tally(settings.block_size, self.device, settings.sample_blocks)
        self.ahead = Prefetch(self.reader, self.device, stride=len(world.team))
        soft = bool(self.objective.terms.soft)
        self.features: Here | Incoming
        if alone:
            width = self.config.hidden_size
            taps = width * len(self.config.target_layer_ids)
            dtype = getattr(torch, settings.dtype)
            self.features = Incoming(world, self.reader, taps, width, dtype, self.device, soft=soft)
        else:
            keep = settings.cache_features
            self.features = Here(Features(self.target, self.reader, keep=keep, keep_last=soft))
        self.noise = Noise(settings.noise_start, settings.noise_end, settings.noise_type, settings.seed)
        self.watch = Watch(settings.max_nonfinite_steps, self.device)
        self.evaluations = loaded.evaluations(settings)
        self.state = checkpoint.State(
            step=0,
            micro_batch=0,
            epoch=0,
            total=0,  # until it is known where the run begins
            run_id=monitor.run_id,
            settings={**settings.learning(), "data": self.completions.digest, "target": loaded.name},
            per_step=settings.grad_accum * len(world.team),
        )
        self.saving = Saving(settings, monitor, self.state, self.drafter, self.optimizer)
        self.sum = GradientSum(world, self.optimizer, device, self.state.per_step)

    # -- the run ---------------------------------------------------------------------------

    def run(self) -> int:
        """Returns the exit code of the whole run, the same in every process of the team."""
        try:
            code = self._run()
        except PeerLost:
            self._save_what_there_is()
            raise
        self.features.end()
        self.world.order(Order("end", code=code))
        return code

    def _run(self) -> int:
        self._resume()
        self.total = self.state.total = self._steps()
        if self.world.main:
            checkpoint.announce(self.output, self.state, self.config.to_json())
            self._open_records()
            self._describe()
        self._try_out()
        self._evaluate("before")
        self.stop.install()
        self.monitor.progress(self.state.step, self.total)
        self.monitor.phase("training")
        if self.device.type == "cpu":
            allocator.settle()
        self._feed()
        interval = Interval(clock=self.clock)
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
                self._feed()
                interval.started += time.perf_counter() - began
            rate, log = self._step(interval)
            last = self.state.step == self.total
            if log:
                self._log(interval, rate)
                interval, self.logged = Interval(clock=self.clock), time.monotonic()
            wanted = (self.settings.save_interval, self.settings.keep_every)
            if any(every and self.state.step % every == 0 for every in wanted) and not last:
                self._save_by_itself()
        return self._finish()

    def _resume(self) -> None:
        """Rank 0 takes what the newest checkpoint has; the others of the team take it from there."""
        names = ("step", "micro_batch", "epoch", "per_step")
        known = None
        if self.world.main:
            checkpoint.get_ready()
            self.saving.resume(self.reader.batches_per_epoch)
            known = {name: getattr(self.state, name) for name in names}
        for name, value in self.world.tell(known).items():
            setattr(self.state, name, value)
        self.sum = GradientSum(self.world, self.optimizer, self.device, self.state.per_step)
        moments = self.optimizer.state()
        self.world.copy_([*(p.data for p in self.drafter.parameters()), *moments.values()])
        if not self.world.main:
            self.optimizer.load(moments)

    def _describe(self) -> None:
        parameters = sum(p.numel() for p in self.drafter.parameters())
        several = f", {len(self.world.ranks)} processes" if self.world.several else ""
        say(
            f"drafter {parameters / 1e6:.2f} M parameters, taps {list(self.config.target_layer_ids)} · "
            f"data {len(self.completions):,} documents, {self.completions.meta['tokens']:,} tokens, "
            f"{counted(self.reader.batches_per_epoch, 'micro-batch', 'micro-batches')} an epoch · "
            f"{self.device}, {counted(torch.get_num_threads(), 'thread')}{several}"
        )

    def _steps(self) -> int:
        """Optimiser steps of the whole run: those that are done, and what the data that is left gives."""
        left = self.settings.epochs * self.reader.batches_per_epoch - self.state.micro_batch
        steps = self.state.step + max(left, 0) // self.state.per_step
        return max(1, self.state.step, min(steps, self.settings.max_steps or steps))

    def _feed(self) -> None:
        """Have the features of all micro-batches from here on computed, where that is done elsewhere."""
        first = self.state.micro_batch
        end = first + (self.total - self.state.step) * self.state.per_step
        if isinstance(self.features, Incoming):
            self.world.order(Order("serve", first=first, end=end))
            self.features.begin(first, end)

    def _try_out(self) -> None:
        def gradient(batch: Batch) -> None:
            self._gradient(None, batch, Interval())

        worst.rehearse(self.reader, self.device, self.drafter, self.draft, gradient, self.monitor)
        self.watch.features.read()  # of documents that are none
        self.compilations = compiling.Compilations()

    def _step(self, interval: Interval) -> tuple[float, bool]:
        """One optimiser step; returns its learning rate, and whether a log line is due."""
        started = time.perf_counter()
        first, end = self.state.micro_batch, self.state.micro_batch + self.state.per_step
        tokens, labels = 0, 0
        for number in self.world.mine(first, end):
            with interval.part("data"):
                batch = self.ahead.batch(number).to(self.device)
            self._micro_batch(number, batch, interval)
            tokens += batch.tokens
            labels += len(batch.rows)
        tokens, labels, log = map(int, self.world.add([tokens, labels, self._log_due()]))
        s = self.settings
        rate = learning_rate(self.state.step + 1, self.total, s.lr, s.warmup_ratio)
        if labels:
            with interval.part("exchange" if self.world.several else "optimizer"):
                weight = self.sum.close()
            with interval.part("optimizer"):
                self.watch.steps.note(self.optimizer.step(rate, weight, s.grad_clip))
        self.state.step += 1
        self.state.micro_batch = end
        self.state.epoch = end // self.reader.batches_per_epoch
        if self.watch.steps.due:
            self.watch.look(self.state.step)
        interval.steps += 1
        interval.tokens += tokens
        self.monitor.step_done(self.state.step, time.perf_counter() - started, tokens)
        return rate, bool(log)

    def _log_due(self) -> bool:
        """Whether the step in progress ends with a log line; rank 0 says it for all."""
        last = self.state.step + 1 == self.total
        due = not self.logged or last or time.monotonic() - self.logged >= self.settings.log_interval
        return self.world.main and due

    def _micro_batch(self, number: int, batch: Batch, interval: Interval) -> None:
        """Add the gradient of Σ w · (loss of a row) of one micro-batch, and count it."""
        if not len(batch.rows):
            with interval.part("target"):
                self.features.skip(number, batch)
            return
        look = self.tally.due() and self.features.has_last(number)
        visit, last = self._gradient(number, batch, interval, TOP if look else 0)
        with interval.part("backward"):
            self.sum.add(visit.weight)
        with interval.part("objective"):
            self.tally.add(visit, batch.rows, batch.blocks)
        if look:
            # With cached features a pass of the target costs what they save; one is enough to know the data.
            if last is None and not self.tally.seen:
                last = self.features.last(batch)
            self.tally.look(visit, batch, last, self.objective.choices)
        self.features.release()

    def _gradient(
        self, number: int | None, batch: Batch, interval: Interval, top: int = 0
    ) -> tuple[Visit, Tensor | None]:
        """Add the gradient of Σ w · (loss of a row) of one micro-batch, and nothing else.

        Returns the visit, which has the `top` most probable tokens if asked for, and the target's last hidden
        states if they are there. `number` is None for a batch that only has the size of one.
        """
        with interval.part("target"):
            taps, last = self.features(number, batch)
            self.watch.features.note(taps, batch.spans)
            if self.noise and number is not None:
                epoch = number // self.reader.batches_per_epoch
                strength = self.noise.strength(self.state.step + 1, self.total)
                taps = self.noise.add(taps, batch.spans, epoch, strength)
            embeddings = self.target.embed(batch.block_ids)
        with interval.part("forward"):
            rows = self.draft(embeddings, batch.blocks, taps, batch.rows)
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
        own = time.perf_counter() - interval.started
        waits = self.world.add(self.features.waits.take())
        if not self.world.main:
            self.world.gather(self.tally.take())
            return
        mine = self.tally.take()
        figures = self.tally.figures([mine, *self.world.gather(mine)[1:]])
        record = {
            **interval.summary(rate, self.monitor.memory(), figures),
            "nonfinite_steps": self.watch.steps.total,
        }
        if self.world.targets:
            record |= waiting(waits, own, drafters=len(self.world.team))
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
        """Between two steps: do what was asked for, of any of the team. Returns an exit code if that was to
        stop.
        """
        request = self.monitor.asked() if self.world.main else None
        ends = request is not None and request.action == "checkpoint-and-stop"
        stop, asked, ends = map(bool, self.world.add([self.stop.came, request is not None, ends]))
        if not stop and not asked:
            return None
        if stop and self.world.main and not self.stop.came:
            say("another process of this run was told to stop: saving")
        wrong = self._save()
        if stop:
            return 0 if wrong is None else SAVE_FAILED
        if request is not None:
            self._answer(request, wrong)
        return 0 if ends and wrong is None else None

    def _alone_at_a_boundary(self) -> int | None:
        """The same for rank 0 while the others wait for it."""
        request = self.monitor.asked()
        if not self.stop.came and request is None:
            return None
        wrong = self.saving.save()
        if self.stop.came:
            return 0 if wrong is None else SAVE_FAILED
        assert request is not None
        self._answer(request, wrong)
        return 0 if request.action == "checkpoint-and-stop" and wrong is None else None

    def _answer(self, request: Request, wrong: str | None) -> None:
        self.monitor.answer(request, wrong or "done")
        say(f"{request.action} asked for by {request.by or 'somebody'}: {wrong or 'done'}")

    def _save(self) -> str | None:
        """Rank 0 saves, since all of the team have the same; returns what went wrong, to all of them."""
        if self.world.main:
            return self.world.tell(self.saving.save())
        self.monitor.phase("checkpointing", "rank 0 saves")
        wrong = self.world.tell(None)
        self.monitor.phase("training")
        return wrong

    def _save_what_there_is(self) -> None:
        """Another process is gone: rank 0 has all that was learnt up to the last step."""
        if not self.world.main or not self.state.step:
            return
        if self.saving.saved is None or self.saving.saved.state.step < self.state.step:
            say("saving what has been learnt, since another process of this run is gone")
            self.saving.save()

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
            if self.world.main:
                say("stopped during the evaluation, which the next run repeats; the training is saved")
            return 0 if wrong is None else SAVE_FAILED
        return self.world.tell(self._mark_finished(wrong) if self.world.main else None)

    def _mark_finished(self, wrong: str | None) -> int:
        if (place := self.saving.finish(anew=wrong is not None)) is None:
            return SAVE_FAILED
        say(f"finished at step {self.state.step}: {place}")
        return 0

    # -- evaluation and records ------------------------------------------------------------

    def _evaluate(self, when: str) -> None:
        """Real speculative decoding "before" the first step, "during" the training, or "after" the last step.

        Rank 0 sees to it; the others wait for it. What came of the first and the last is kept in the
        checkpoint. Raises Stopped if it was ended.
        """
        evaluations = self.evaluations
        if not evaluations.cases or (when == "before" and self.state.step):
            return
        known = self.state.results.get(when, {})
        is_known = (known.get("of"), known.get("step")) == (evaluations.of, self.state.step)
        if self.world.tell(is_known):
            return
        self.features.end()
        if isinstance(self.features, Incoming):
            self.world.order(Order("evaluate"))
        code = None
        if self.world.main:
            try:
                self._evaluate_here(when)
            except Stopped as stopped:
                code = stopped.code
        elif when != "after":
            self.monitor.phase("evaluating", "rank 0 sees to it")
        if (code := self.world.tell(code)) is not None:
            raise Stopped(code)
        if when == "during":
            self.monitor.phase("training")

    def _evaluate_here(self, when: str) -> None:
        evaluations = self.evaluations
        if when != "after":
            self.monitor.phase("evaluating")
        if when == "during":
            say(f"step {self.state.step}: real speculative decoding of {evaluations.prompts} texts")
        rows = self._measured()
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

    def _measured(self) -> list[Row]:
        if self.world.rank.role == "drafter":
            return measured_elsewhere(self.world, self.drafter, self._evaluation_progress)
        return self.evaluations.measure(self.drafter, self._evaluation_progress)

    def _evaluation_progress(self, text: str) -> None:
        """Between two tokens: what was asked for need not wait for the end of the evaluation."""
        if 0 < self.state.step < self.total:
            if (code := self._alone_at_a_boundary()) is not None:
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
