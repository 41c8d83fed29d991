"""From a recipe to a trained model, top to bottom."""

import gc
import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from models.config import TextFacts
from models.decoder import Decoder
from models.loss import IGNORED
from parallel.attention import choose_attention
from parallel.config import MeshDegrees
from parallel.dist import World, on_all, on_main, on_main_first
from parallel.errors import UserError
from parallel.float8 import precompute_scales
from parallel.materialize import materialize
from parallel.mesh import build_mesh
from parallel.nodes import placement
from parallel.order import parallelize
from parallel.reduce import clip_gradients, gradient_norm, sum_over_processes
from recipes.checkpoint.checkpoints import Checkpoints
from recipes.checkpoint.folder import newest_whole
from recipes.cluster.stragglers import Stragglers
from recipes.data.loader import DataLoader
from recipes.data.text.tokenizer import Tokenizer
from recipes.evaluation.evaluate import mean_loss, show_sample
from recipes.files.exit_codes import CANNOT_WRITE, FINISHED, POISONED, PREEMPTED, ended_by
from recipes.files.layout import CHECKPOINTS, DATA, EXPORT, LOG_FILE, PROFILE
from recipes.files.lock import FolderLock
from recipes.metrics.clock import END, FIRST_STEP, LOADING, LOG, SAVE, STEP, VALIDATION, RunClock
from recipes.metrics.float8_samples import CastSampler
from recipes.metrics.goodput import SKIPPED, Goodput
from recipes.metrics.profile import StepProfiler
from recipes.metrics.throughput import AttentionLength, Throughput, peak_memory_gib
from recipes.metrics.writer import MetricsWriter
from recipes.optimization.optimizer import build_optimizer
from recipes.optimization.schedule import learning_rate
from recipes.optimization.skip_steps import NonFiniteRun, StepGuard, backward
from recipes.rules import require_fits_world
from recipes.schema import Recipe
from recipes.training.console import UNSAVED, Console, contents, interrupted_message, run_header, step_line, summary
from recipes.training.environment import environment
from recipes.training.interruption import Interruption
from recipes.training.run_folder import check_output_folder, claim_run_folder, data_before, require_same_data
from recipes.weights.convert import export_model, load_weights
from recipes.weights.locate import FROM_WEIGHTS, Description, Weights, checkpoint_files, initial_weights


class Trainer:
    """One run: builds everything in the order of ARCHITECTURE.md, then steps."""

    def __init__(self, recipe: Recipe, world: World, console: Console, clock: RunClock | None = None) -> None:
        self.recipe, self.world, self.console = recipe, world, console
        self.clock = clock or RunClock(world.device)
        require_fits_world(recipe.mesh, recipe.batch, nodes=world.nodes)
        on_main_first(world, lambda: check_output_folder(recipe))
        self.folder, self.lock = recipe.run.folder, FolderLock()
        on_main(world, lambda: self.lock.take(self.folder, log=console.log))
        self.resume_step = on_main(world, lambda: newest_whole(self.folder / CHECKPOINTS, log=console.log))
        self.mesh_degrees: MeshDegrees = recipe.mesh.fit(world.size, nodes=len(world.nodes))

        mesh = build_mesh(self.mesh_degrees, device_type=world.device.type)
        with torch.device("meta"):
            self.model = Decoder(recipe.model, loss_chunks=recipe.batch.loss_chunks)
        report = placement(self.mesh_degrees, world.nodes)
        report += choose_attention(recipe.attention, device_type=world.device.type)
        report += parallelize(
            self.model,
            mesh,
            float8=recipe.float8,
            activation_checkpointing=recipe.activation_checkpointing,
            compile=recipe.compile,
            fsdp=recipe.fsdp,
        )
        materialize(
            self.model,
            device=world.device,
            keep_on=torch.device("cpu") if recipe.fsdp.cpu_offload else None,
            seed=recipe.run.seed,
            init_parameter=self.model.init_parameter,
        )
        self._load_weights()
        self.sharded = cast(FSDPModule, self.model)  # what fully_shard made of its class
        self.parameters = list(self.model.parameters())
        self.optimizer = build_optimizer(self.model, recipe.optimizer)
        self.throughput = Throughput(
            recipe.model,
            tokens_per_step=recipe.batch.global_batch_size * recipe.batch.sequence_length,
            sequence_length=recipe.batch.sequence_length,
            devices=world.size,
            device=world.device,
        )
        self.attention_length = AttentionLength(world.device)
        headline, *lines = run_header(
            recipe.run.name, recipe.model, recipe.data, recipe.batch, self.mesh_degrees, self.throughput, report
        )
        console.log(headline, style="bold")
        for line in lines:
            console.log("  " + line)
        self.loader = DataLoader(
            recipe.data,
            recipe.batch,
            world=world,
            data_rank=world.rank,
            data_ranks=self.mesh_degrees.data_parallel,
            seed=recipe.run.seed,
            vocabulary=recipe.model.vocabulary,
            tokenizer=self._tokenizer,
            resumed_data_state=partial(data_before, self.folder, self.resume_step),
            log=console.log,
        )

        self.checkpoints = Checkpoints(
            self.folder / CHECKPOINTS,
            keep=recipe.checkpoint.keep,
            keep_every=recipe.checkpoint.keep_every,
            asynchronous=recipe.checkpoint.asynchronous,
            log=console.log,
            files=checkpoint_files(self._description()) | {DATA: json.dumps(self.loader.data_state, indent=2) + "\n"},
        )
        self.guard = StepGuard(recipe.run, device=world.device, replicas=self.mesh_degrees.replicate)
        progress = self._resume()
        self.clock.step = progress.get("step", 0)
        self.goodput = Goodput(self.clock, before=progress)
        self.stragglers = Stragglers(world, self.clock, model=self.model, head=self.model.norm)
        if recipe.checkpoint.every and self.step < recipe.run.steps:
            self.checkpoints.require_room(self.parameters, moments=getattr(torch, recipe.optimizer.state_dtype))
        # Only now: until here a signal ends the process, and a run that could not start leaves nothing behind.
        self.interruption = Interruption()
        self._open_folder()
        if self.step < recipe.run.steps:  # a finished run reads nothing more, and has its list
            self.loader.list_bad_rows_in(self.folder)
        self.validation_loss: float | None = None
        self.metrics = MetricsWriter(
            self.folder,
            enabled=world.is_main,
            wandb_project=recipe.metrics.wandb_project if recipe.metrics.wandb else None,
            run_name=recipe.run.name,
            recipe=asdict(recipe),
            before=progress,
            log=console.log,
        )

    # The loop

    @property
    def step(self) -> int:
        """Steps that are done."""
        return self.clock.step

    def run(self) -> int:
        """Train to the last step; returns the exit code."""
        self.began, self.first_step = time.perf_counter(), self.step
        self.clock.begin(END)  # what follows the loop, whichever way that ends
        try:
            with collected_by_hand(), self.clock(FIRST_STEP):
                number = self._loop()
            self.console.end_progress()
            return self._stop_early(number) if number else self._finish()
        except NonFiniteRun as poisoned:
            self.console.end_progress()
            return self._give_up(poisoned)
        except Exception as error:
            number = self.interruption.noted
            if not number or isinstance(error, UserError):
                raise
            # Sent to every process of the job, it ended a compiler, say, or a rank that had two of them.
            self.console.log(f"{signal.Signals(number).name} ended the run in the middle of a step; NOT SAVED")
            return ended_by(number)

    def _loop(self) -> int:
        """Train to the last step, or to the signal that is returned."""
        recipe, log = self.recipe, self.console.log
        profiler = StepProfiler(recipe.profile, self.world, folder=self.folder / PROFILE, clock=self.clock, log=log)
        sampler = CastSampler(self.model, recipe.float8, self.world, self.folder, clock=self.clock, log=log)
        while self.step < recipe.run.steps:
            with profiler.step(), sampler.step(self.step + 1):
                loss, norm = self._train_step()
            self.clock.count_step()
            if self._due(recipe.metrics.every) or self.step == self.first_step + 1:
                self._log(loss, norm)
            if self._due(recipe.validation.every):
                self._validate()
            if self._due(recipe.checkpoint.every):
                self._save()
            self.checkpoints.report()
            if number := self.interruption.agreed():
                return number
        return self.interruption.agreed_now()

    def _train_step(self) -> tuple[Tensor, Tensor]:
        """One optimizer step. Returns this process's part of the mean loss, and the gradient norm before clipping."""
        recipe = self.recipe
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate(self.step)
        with self.clock(LOADING):
            batches = self.loader.batch(self.step)
        self.attention_length.count(documents for _, _, documents in batches)
        counts = [(targets != IGNORED).sum() for _, targets, _ in batches]
        target_tokens = sum_over_processes(torch.stack(counts).sum())
        loss = torch.zeros((), device=self.world.device)
        for index, (inputs, targets, documents) in enumerate(self.clock.with_progress(batches)):
            last = index == len(batches) - 1
            self.sharded.set_requires_gradient_sync(last)  # inner micro-batches reduce no gradients
            if not recipe.fsdp.reshard_after_forward:
                self.sharded.set_reshard_after_backward(last)  # ZeRO-2 gathers the weights once per step
            micro_loss = self.model(inputs, targets, documents=documents) / target_tokens
            backward(micro_loss)
            loss += micro_loss.detach()
        norm = gradient_norm(self.parameters)
        if recipe.optimizer.grad_clip > 0:
            clip_gradients(self.parameters, norm=norm, max_norm=recipe.optimizer.grad_clip)
        # torch's fused kernels leave parameters, moments and step counters alone where this is 1. (for GradScaler)
        skip = self.guard.should_skip(self.step + 1, loss=loss, norm=norm).to(self.parameters[0].device)
        self.optimizer.found_inf = skip  # type: ignore[attr-defined]
        self.optimizer.step()
        self.optimizer.zero_grad()
        if recipe.float8.all_gather:
            precompute_scales(self.model)
        return loss, norm

    def _due(self, every: int) -> bool:
        """Whether something done every so many steps (0 = never) is due after the step just taken."""
        return every > 0 and (self.step % every == 0 or self.step == self.recipe.run.steps)

    def _learning_rate(self, step: int) -> float:
        return learning_rate(
            step, peak=self.recipe.optimizer.lr, steps=self.recipe.run.steps, schedule=self.recipe.schedule
        )

    # At logged steps, validations, checkpoints

    def _log(self, loss: Tensor, norm: Tensor) -> None:
        mean_loss = self.stragglers.gather(loss)  # here the host waits for the device
        step_seconds, data_seconds = self.clock.seconds_per_step()
        with self.clock(LOG):
            self.goodput.move(STEP, LOADING, self.stragglers.waited_for_data())
            self._note_skipped()
            slow, names = self.stragglers.compare()
            row: dict[str, Any] = {
                "step": self.step,
                "tokens": self._tokens(),
                "loss": mean_loss,
                "grad_norm": norm.item(),
                "lr": self._learning_rate(self.step - 1),
                "step_seconds": step_seconds,
                "data_seconds": data_seconds,
                "epochs": self.loader.epochs(self.step),
                **self.throughput.row(step_seconds, attention_length=self.attention_length.take()),
                "peak_memory_gib": peak_memory_gib(self.world.device),
                **self.goodput.row(),
                **slow,
            }
            self.metrics.write(row)
            self.loader.note_bad_rows()
            self.console.log(step_line(row, self.recipe.run.steps))
            for name in names:
                self.console.log(f"step {self.step:>6}  {name}")
            self.console.progress(self.step, self.recipe.run.steps, f"loss {mean_loss:.3f}")
            gc.collect()
        self.clock.restart()

    def _validate(self) -> None:
        with self.clock.synchronized(VALIDATION):
            held_out = self.clock.with_progress(self.loader.validation_batches(self.recipe.validation.batches))
            self.validation_loss = mean_loss(self.model, held_out, device=self.world.device)
            if self.step > self.first_step:  # else a finished run was started again, and has this row
                row = {"step": self.step, "tokens": self._tokens(), "validation_loss": self.validation_loss}
                self.metrics.write(row)
            self.console.log(f"step {self.step:>6}  validation loss {self.validation_loss:.4f}", style="bold")

    def _save(self) -> None:
        self._note_skipped()  # a run that goes on from here does not come by these steps again
        with self.clock.synchronized(SAVE):
            self.metrics.sync()
            progress: dict[str, Any] = {
                "sequences": self.step * self.recipe.batch.global_batch_size,
                "tokens": self._tokens(),
                "trained_on": self.loader.checksums(self.step) if self.world.is_main else {},  # whose record is kept
            }
            progress |= self.guard.state() | self.metrics.state()
            progress |= self.goodput.state(finished=self.step == self.recipe.run.steps)
            self.checkpoints.save(self.model, self.optimizer, step=self.step, progress=progress)

    def _note_skipped(self) -> None:
        """Log the steps that were skipped since the last call. Raises NonFiniteRun where they were too many."""
        for step, norm in self.guard.skipped():
            self.goodput.move(STEP, SKIPPED, self.clock.seconds_per_step()[0])
            row = {"step": step, "tokens": self._tokens(step), "skipped": True, "grad_norm": norm}
            self.metrics.write(row | {"documents": self.loader.documents(step - 1)})
            self.console.log(f"step {step:>6}  SKIPPED, gradient norm {norm:.2f}; metrics.jsonl names its documents")

    def _save_last(self) -> bool:
        """Save this step, unless that has happened; try again if it failed. Whether it is saved now."""
        if self.checkpoints.finish() != self.step and self.recipe.checkpoint.every:
            self._save()
        return self.checkpoints.finish() == self.step

    def _load_weights(self) -> None:
        """Start from model.weights, unless this run has a checkpoint to go on from."""
        self.context_length = self.recipe.batch.sequence_length
        if not self.recipe.model.weights:
            return
        weights = self._weights()
        self.context_length = max(self.context_length, weights.facts.context_length)
        if self.resume_step is None:
            on_all(self.world, lambda: load_weights(self.model, weights))
            self.console.log(f"weights from {weights.path}")

    def _weights(self) -> Weights:
        """Where the run starts from."""
        return initial_weights(self.recipe.model.weights, self.folder)

    def _tokenizer(self) -> str | Tokenizer:
        spec = self.recipe.data.tokenizer
        return self._weights().tokenizer if spec == FROM_WEIGHTS else spec

    def _description(self) -> Description:
        """What goes with the weights wherever they go."""
        facts = TextFacts(self.context_length, eos_token_id=self.loader.tokenizer.end_of_document)
        return Description(self.recipe.model, facts, self.loader.tokenizer.backend.to_str())

    def _resume(self) -> dict[str, Any]:
        """Load the newest checkpoint of this run that is intact, if there is one. Returns what it says of the run."""
        if self.resume_step is None:
            return {}
        check = partial(require_same_data, facts=self.loader.data_state)
        progress = self.checkpoints.resume(self.model, self.optimizer, step=self.resume_step, check=check)
        if progress["step"] < self.recipe.run.steps:  # a finished run reads nothing more
            self.loader.require_trained_on(progress.get("trained_on", {}), batches=progress["step"])
        self.guard.restore(progress)
        if self.recipe.float8.all_gather:
            precompute_scales(self.model)
        return progress

    # The first and the last word

    def _open_folder(self) -> None:
        """Make the run's folder, if need be, and say in it what runs here and where."""
        facts = environment(world_size=self.world.size, device=self.world.device)
        claim = partial(claim_run_folder, self.recipe, done=self.step, environment=facts, lock=self.lock)
        for note in on_main(self.world, claim):
            self.console.log(note)
        self.console.open_log(self.folder / LOG_FILE)

    def _stop_early(self, number: int) -> int:
        """A signal: save, if the run saves at all."""
        self._note_skipped()
        saved = self._save_last()
        self._end(
            interrupted_message(signal.Signals(number).name, self.step, saved=saved, every=self.recipe.checkpoint.every)
        )
        return PREEMPTED if saved else ended_by(number)

    def _give_up(self, poisoned: NonFiniteRun) -> int:
        """More steps would come to nothing, and checkpoints of them would push out better ones."""
        saved = self.checkpoints.finish()
        place = "no checkpoint was saved" if saved is None else f"{self.checkpoints.path(saved)} is as it was"
        self._end(f"stopped: {poisoned}; metrics.jsonl names their documents; {place}")
        return POISONED

    def _finish(self) -> int:
        """Say what came out, and where it is."""
        self._note_skipped()
        recipe, done, saved = self.recipe, self.step - self.first_step, self._save_last()
        seconds = time.perf_counter() - self.began
        if done == 0:
            self.console.log(f"this run has its {recipe.run.steps} steps already; --run.steps N makes it longer")
            if recipe.validation.every:
                self._validate()
        if recipe.validation.sample_tokens:
            device, seed, log = self.world.device, recipe.run.seed, self.console.log
            show_sample(
                self.model,
                self.loader,
                recipe.batch,
                recipe.validation.sample_tokens,
                device=device,
                seed=seed,
                log=log,
            )
        if recipe.checkpoint.export_hf and saved:
            export_model(self.model, self.folder / EXPORT, self._description(), world=self.world)
        if done:
            tokens = done * self.throughput.tokens_per_step
            self.console.log(summary(done, tokens, seconds, validation_loss=self.validation_loss), style="bold")
        unsaved = bool(recipe.checkpoint.every) and not saved
        self._end(UNSAVED if unsaved else contents(self.folder))
        return CANNOT_WRITE if unsaved else FINISHED

    def _end(self, last_word: str) -> None:
        self.console.log(self.goodput.line())
        self.console.log(last_word)
        self.loader.close()
        self.metrics.close()
        self.interruption.end()

    def _tokens(self, step: int | None = None) -> int:
        """Seen after so many steps, else by now."""
        return (self.step if step is None else step) * self.throughput.tokens_per_step


@contextmanager
def collected_by_hand() -> Iterator[None]:
    """Inside, garbage is collected only where gc.collect() is called. What is there at the beginning is left alone.

    Python would collect in the middle of any step, on each rank in another one, and all ranks wait for the slowest.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
