"""The training loop of one run, and the ways in which it ends."""

import signal
import time
from contextlib import ExitStack

from parallel.errors import CorruptState, UserError
from recipes.files.exit_codes import CANNOT_WRITE, CORRUPTED, FINISHED, POISONED, PREEMPTED, ended_by
from recipes.metrics.clock import END, FIRST_STEP, LOADING, SAVE, VALIDATION
from recipes.optimization.skip_steps import NonFiniteRun
from recipes.training.build_run import Run
from recipes.training.console import BORDER_UNSAVED, NOT_SAVED, UNSAVED, done_line, interrupted_message, last_lines
from recipes.training.step import Measured, corruption, require_sound_state, train_step, without_garbage_collection


class Trainer:
    """Trains a run to its last step, or to whatever ends it earlier."""

    def __init__(self, run: Run) -> None:
        self.built_run, self.recipe, process = run, run.stage.recipe, run.process
        self.world, self.console, self.clock = process.world, process.console, process.clock
        self.built, self.loader, self.checkpoints, self.memory = run.built, run.loader, run.checkpoints, run.memory
        self.guard, self.recorder, self.interruption = run.guard, run.recorder, process.interruption
        self.stage, self.first_step = run.stage, process.clock.step
        has_copies = self.built.mesh.degrees.have_copies(tied=self.recipe.model.tied_embeddings)
        self.check_replicas_every = self.recipe.run.check_replicas_every if has_copies else 0
        self.validation_loss: dict[str, float] = {}

    @property
    def step(self) -> int:
        """Completed steps."""
        return self.clock.step

    def run(self) -> int | None:
        """Train to the last step; returns the exit code, or None if another stage follows."""
        self.clock.begin(FIRST_STEP)
        try:
            with ExitStack() as after, without_garbage_collection():
                after.callback(self.clock.begin, END)  # however the loop ends
                number = self._loop()
            self.console.end_progress()
            return self._stop_early(number) if number else self._finish()
        except (NonFiniteRun, CorruptState) as error:
            return self._give_up(error)
        except Exception as error:
            if self.checkpoints:
                self.checkpoints.finish(failed=True)
            number = self.interruption.noted
            if not number or isinstance(error, UserError):
                raise
            done = self.step == self.recipe.run.steps
            self.console.log(self.interruption.cut_short(error, self.recipe.run.folder, done=done))
            return ended_by(number)

    def _loop(self) -> int:
        """Train to the last step of the stage, or until a signal, which is returned."""
        while self.step < self.stage.last:
            measured = self.take_step()
            self.clock.count_step()
            if self._due(self.recipe.metrics.every) or self.step == self.first_step + 1:
                self.recorder.log_step(self.step, measured, learning_rate=self.stage.learning_rate(self.step - 1))
            if self._due(self.check_replicas_every):
                require_sound_state(self.built, self.world)
            if self._due(self.recipe.validation.every):
                self.validate()
            if self._due(self.recipe.checkpoint.every):
                self._save()
            if self._due(self.recipe.checkpoint.memory_every) and self.step < self.stage.last:
                self._save(in_memory=True)
            if self.checkpoints:
                self.checkpoints.report()
                self.checkpoints.prepare(self.built.model, self.built.optimizer)
            if number := self.interruption.agreed():
                return number
        return self.interruption.agreed_now()

    def take_step(self) -> Measured:
        """Take the next step."""
        with ExitStack() as stack:
            for observer in self.built_run.observers:
                stack.enter_context(observer.step(self.step + 1))
            with self.clock(LOADING):
                batches = self.loader.batch(self.step)
            if self.recorder.counts_lengths:
                self.recorder.lengths.count(batches)
            return train_step(
                self.built,
                batches,
                step=self.step + 1,
                learning_rate=self.stage.learning_rate(self.step),
                guard=self.guard,
                clock=self.clock,
                is_logged=self._due(self.recipe.metrics.every, ahead=1) or self.step == self.first_step,
            )

    def _due(self, every: int, *, ahead: int = 0) -> bool:
        """Whether something done every so many steps (0 = never) is due after the step just taken, or so far ahead."""
        return every > 0 and ((step := self.step + ahead) % every == 0 or step == self.stage.last)

    def validate(self) -> None:
        from recipes.training.validation import validate

        with self.clock.synchronized(VALIDATION):
            self.validation_loss = validate(self.built_run)
            self.recorder.end_validation(self.step, self.built_run.tasks())

    def _save(self, *, in_memory: bool = False) -> None:
        to = self.memory if in_memory else self.checkpoints
        assert to is not None
        self.recorder.log_skipped()  # a run that resumes from here does not take these steps again
        with self.clock.synchronized(SAVE):
            require_sound_state(self.built, self.world)  # last, so that little happens before it is copied
            self.recorder.metrics.sync()
            progress = self.loader.progress(self.step) | self.guard.state()
            progress |= self.recorder.state(finished=self.step == self.recipe.run.steps)
            to.save(self.built.model, self.built.optimizer, step=self.step, progress=progress)

    def _save_last(self) -> bool:
        """Save this step unless it is saved already, trying again after a failure. Returns whether it is saved."""
        if self.checkpoints is None:
            return False
        if self.checkpoints.finish() != self.step and self.recipe.checkpoint.every:
            self._save()
        return self.checkpoints.finish() == self.step

    def _stop_early(self, number: int) -> int:
        """End the run after a signal: save, if the run saves at all. Returns the exit code."""
        self.recorder.log_skipped()
        saved, every = self._save_last(), self.recipe.checkpoint.every
        self._end(interrupted_message(signal.Signals(number).name, self.step, saved=saved, every=every), safe=saved)
        return PREEMPTED if saved else ended_by(number)

    def _give_up(self, error: NonFiniteRun | CorruptState) -> int:
        """End the run after too many skipped steps or with a corrupt state, unsaved: that would replace better ones."""
        self.console.end_progress()
        if isinstance(error, NonFiniteRun):  # NaN in a weight skips all steps, too
            error = corruption(self.built, self.world) or error
        safe = "no checkpoint was saved"
        if self.checkpoints and (saved := self.checkpoints.finish()) is not None:
            safe = f"{self.checkpoints.path(saved)} is as it was"
        if isinstance(error, CorruptState):
            self._end(f"CORRUPTED after step {self.step}: {error}; {safe}; run the same command again")
            return CORRUPTED
        self._end(f"stopped: {error}; metrics.jsonl names their documents; {safe}")
        return POISONED

    def _finish(self) -> int | None:
        """End the run after its last step: log the results and where they are. After another stage, hand over."""
        self.recorder.log_skipped()
        recipe, process = self.recipe, self.built_run.process
        done, saved = self.step - process.first_step, self._save_last()
        seconds = time.perf_counter() - process.trains_since
        if self.stage.last < recipe.run.steps:
            return self._hand_over(saved=saved)
        if done == 0:
            self.console.log(f"this run has its {recipe.run.steps} steps already; --run.steps N makes it longer")
            if recipe.validation.every:
                self.validate()
        if recipe.validation.sample_tokens or recipe.checkpoint.export_hf:
            from recipes.training.validation import write_results

            write_results(self.built_run, saved=saved, write_report=self.recorder.write_report)
        self.recorder.log_consumed(self.step)
        if done:
            tokens = self.loader.tokens(self.step) - self.loader.tokens(process.first_step)
            self.console.log(done_line(done, tokens, seconds, validation_loss=self.validation_loss), style="bold")
            self.recorder.log_plan(self.step)
            if not recipe.checkpoint.every:
                self.console.log(NOT_SAVED)
        is_safe = saved or not recipe.checkpoint.every
        self._end("" if is_safe else UNSAVED, safe=is_safe)
        return FINISHED if is_safe else CANNOT_WRITE

    def _hand_over(self, *, saved: bool) -> int | None:
        """End what does not go on after the last step of a stage. Returns None if the next stage can follow."""
        self.recorder.log_plan(self.step)
        if not saved:
            self._end(BORDER_UNSAVED, safe=False)
            return CANNOT_WRITE
        if number := self.interruption.agreed_now():
            return self._stop_early(number)
        self.loader.close()
        self.interruption.can_wait = False  # until the next stage is built
        self.clock.rebuild()
        return None

    def _end(self, last_line: str, *, safe: bool = True) -> None:
        """last_line: "" for the results, which the report completes. safe: whether no copy in memory is needed."""
        if self.memory:
            self.memory.end(keep=not safe)
        self.console.log(self.recorder.goodput.line())
        if last_line:
            self.console.log(last_line)
        self.loader.close()
        self.recorder.close(in_a_hurry=bool(self.interruption.noted))
        for line in [] if last_line else last_lines(self.recipe.run.folder, self.recipe.model, self.recipe.data):
            self.console.log(line)
        self.interruption.end()
