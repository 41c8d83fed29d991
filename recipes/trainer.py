"""From a recipe to a trained model, top to bottom."""

import json
import platform
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import cast

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from models.decoder import Decoder
from models.hf import TextFacts
from models.loss import IGNORED
from parallel.config import MeshConfig
from parallel.dist import Agreement, World, from_main, on_all, on_main, on_main_first, start, stop
from parallel.errors import UserError
from parallel.float8 import precompute_scales
from parallel.materialize import materialize
from parallel.mesh import build_mesh
from parallel.order import parallelize
from parallel.reduce import clip_gradients, gradient_norm, sum_over_processes
from recipes.checkpoint import Checkpoints
from recipes.console import Console
from recipes.convert import export_model, load_weights
from recipes.data import TokenSequences, prepare
from recipes.evaluate import continuation, mean_loss
from recipes.hf_folder import Description
from recipes.metrics import MetricsWriter, StepClock, Throughput, environment, peak_memory_gib
from recipes.optimizer import build_optimizer
from recipes.profile import StepProfiler
from recipes.report import introduction, step_line, summary
from recipes.rules import require_valid
from recipes.run_folder import DATA, check_output_folder, claim_run_folder, require_same_data, run_folder
from recipes.schedule import learning_rate
from recipes.schema import Recipe
from recipes.weights import CHECKPOINTS, FROM_WEIGHTS, checkpoint_files, checkpoint_steps, starting_point


def train(recipe: Recipe) -> int:
    """Run a recipe in this process, one of those the launcher started.

    Returns the exit code: 0, or 128 + the signal that ended it (130 for Ctrl-C), as shells have it.
    A UserError that concerns all ranks is printed once, by rank 0.
    """
    world = start(recipe.run.device, seed=recipe.run.seed)
    try:
        with Console(silent=not world.is_main) as console:
            return Trainer(recipe, world, console).run()
    except UserError as error:
        if world.is_main:
            raise
        # Rank 0 most likely says the same, and then the launcher ends the others: leave it the time to speak.
        time.sleep(10)
        raise UserError(f"rank {world.rank}: {error}") from None
    except KeyboardInterrupt:
        if world.is_main:
            print("\ninterrupted; nothing was saved since the last checkpoint")
        return 128 + signal.SIGINT
    finally:
        stop()


class Trainer:
    """One run: builds everything in the order of ARCHITECTURE.md, then steps."""

    def __init__(self, recipe: Recipe, world: World, console: Console) -> None:
        self.recipe, self.world, self.console = recipe, world, console
        require_valid(recipe, processes=world.size)
        on_main_first(world, lambda: check_output_folder(recipe))
        self.folder = run_folder(recipe)
        # Rank 0 decides: another node may not see the newest checkpoint yet.
        self.resume_step: int | None = from_main(world, max(checkpoint_steps(self.folder / CHECKPOINTS), default=None))
        self.mesh_degrees: MeshConfig = recipe.mesh.fit(world.size)

        mesh = build_mesh(recipe.mesh, world_size=world.size, device_type=world.device.type)
        with torch.device("meta"):
            self.model = Decoder(recipe.model, loss_chunks=recipe.batch.loss_chunks)
        report = parallelize(
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
        headline, *lines = introduction(
            recipe.run.name, recipe.model, recipe.batch, self.mesh_degrees, self.throughput, report
        )
        console.say(headline, style="bold")
        for line in lines:
            console.say("  " + line)
        self._open_data()

        self.checkpoints = Checkpoints(
            self.folder / CHECKPOINTS,
            keep=recipe.checkpoint.keep,
            files=checkpoint_files(self._description()) | {DATA: json.dumps(self.data_facts, indent=2) + "\n"},
        )
        self.step = self.saved_step = self._resume()
        self._open_folder()  # only now: a run that could not start leaves nothing behind
        self.agreement = Agreement()
        self.interrupted_by: signal.Signals | None = None
        self.interrupted_at = 0.0
        self.validation_loss: float | None = None
        self.metrics = MetricsWriter(
            self.folder,
            enabled=world.is_main,
            wandb_project=recipe.metrics.wandb_project if recipe.metrics.wandb else None,
            run_name=recipe.run.name,
            recipe=asdict(recipe),
        )
        self.metrics.cut_back(self.step)

    # The loop

    def run(self) -> int:
        """Train to the last step; returns the exit code."""
        recipe = self.recipe
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._interrupt)
        self.began, self.first_step = time.perf_counter(), self.step
        self.clock = StepClock(self.world.device)
        profiler = StepProfiler(
            recipe.profile, self.world, folder=self.folder / "profile", clock=self.clock, say=self.console.say
        )
        while self.step < recipe.run.steps:
            with profiler.step():
                loss, norm = self._train_step()
            self.step += 1
            self.clock.count_step()
            if self._due(recipe.metrics.every) or self.step == self.first_step + 1:
                self._log(loss, norm)
            if self._due(recipe.validation.every):
                self._validate()
            if self._due(recipe.checkpoint.every):
                self._save()
            if self.agreement.any(self.interrupted_by is not None):
                return self._stop_early()
        return self._finish()

    def _train_step(self) -> tuple[Tensor, Tensor]:
        """One optimizer step. Returns this process's part of the mean loss, and the gradient norm before clipping."""
        recipe = self.recipe
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate(self.step)
        with self.clock.loading():
            inputs, targets = self._sequences(self.training, self.step)  # (b, T) each
        target_tokens = sum_over_processes((targets != IGNORED).sum())
        micro_batches = list(self._micro_batches(inputs, targets))
        loss = torch.zeros((), device=self.world.device)
        for index, (micro_inputs, micro_targets) in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            self.sharded.set_requires_gradient_sync(last)  # inner micro-batches reduce no gradients
            if not recipe.fsdp.reshard_after_forward:
                self.sharded.set_reshard_after_backward(last)  # ZeRO-2 gathers the weights once per step
            micro_loss = self.model(micro_inputs, micro_targets) / target_tokens
            micro_loss.backward()
            loss += micro_loss.detach()
        norm = gradient_norm(self.parameters)
        if recipe.optimizer.grad_clip > 0:
            clip_gradients(self.parameters, norm=norm, max_norm=recipe.optimizer.grad_clip)
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

    # Data

    def _open_data(self) -> None:
        data = self.recipe.data
        prepared = on_main_first(
            self.world,
            lambda: prepare(
                source=data.source,
                text_field=data.text_field,
                tokenizer=(
                    starting_point(self.recipe.model.weights, self.folder).tokenizer()
                    if data.tokenizer == FROM_WEIGHTS
                    else data.tokenizer
                ),
                validation_fraction=data.validation_fraction,
                cache=Path(data.cache).expanduser(),
                report=self.console.say,
            ),
        )
        self.tokenizer = prepared.tokenizer
        self.data_facts = {"tokenizer": prepared.tokenizer.fingerprint, "tokens": prepared.fingerprint}
        if (facts := from_main(self.world, self.data_facts)) != self.data_facts:
            raise UserError(
                f"data: {platform.node()} sees another text or tokenizer than rank 0 ({self.data_facts} and {facts})"
                "; all nodes need the same files and the same Python"
            )
        if (entries := self.tokenizer.vocabulary) > self.recipe.model.vocabulary:
            raise UserError(
                f"data.tokenizer has {entries} entries, more than model.vocabulary = {self.recipe.model.vocabulary}"
                f"; write model.vocabulary = {entries} or another tokenizer"
            )
        length, seed = self.recipe.batch.sequence_length, self.recipe.run.seed
        self.training = TokenSequences(prepared.train, sequence_length=length, seed=seed)
        # Shuffled too, so that a few batches are a fair sample; whatever the seed of the run, always the same one.
        self.validation = TokenSequences(prepared.validation, sequence_length=length, seed=0)

    def _sequences(self, source: TokenSequences, batch: int, *, once: bool = False) -> tuple[Tensor, Tensor]:
        """This process's share of global batch number `batch`: inputs and targets, (b, T) each, on the device.

        once: what the source would repeat to fill the batch has no targets that count.
        """
        share = self.recipe.batch.global_batch_size // self.mesh_degrees.data_parallel
        first = batch * self.recipe.batch.global_batch_size + self.world.rank * share
        rows = torch.from_numpy(source.rows(first, share))  # (b, T + 1)
        if self.world.device.type == "cuda":
            rows = rows.pin_memory()
        rows = rows.to(self.world.device, non_blocking=True)
        inputs, targets = rows[:, :-1], rows[:, 1:]
        if once and first + share > len(source):
            targets = targets.clone()
            targets[max(0, len(source) - first) :] = IGNORED
        return inputs, targets

    def _micro_batches(self, inputs: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        size = self.recipe.batch.micro_batch_size
        return zip(inputs.split(size), targets.split(size), strict=True)

    # At logged steps, validations, checkpoints

    def _log(self, loss: Tensor, norm: Tensor) -> None:
        mean_loss = sum_over_processes(loss).item()  # here the host waits for the device
        step_seconds, data_seconds = self.clock.seconds_per_step()
        row = {
            "step": self.step,
            "tokens": self._tokens(),
            "loss": mean_loss,
            "grad_norm": norm.item(),
            "lr": self._learning_rate(self.step - 1),
            "step_seconds": step_seconds,
            "data_seconds": data_seconds,
            **self.throughput.row(step_seconds),
            "peak_memory_gib": peak_memory_gib(self.world.device),
        }
        self.metrics.write(row)
        self.console.say(step_line(row, self.recipe.run.steps))
        self.console.progress(self.step, self.recipe.run.steps, f"loss {mean_loss:.3f}")
        self.clock.restart()

    def _validate(self) -> None:
        with self.clock.paused():
            available = -(-len(self.validation) // self.recipe.batch.global_batch_size)
            self.validation_loss = mean_loss(
                self.model,
                (
                    micro_batch
                    for batch in range(min(self.recipe.validation.batches, available))
                    for micro_batch in self._micro_batches(*self._sequences(self.validation, batch, once=True))
                ),
                device=self.world.device,
            )
            if self.step > self.first_step:  # else a finished run was started again, and has this row
                row = {"step": self.step, "tokens": self._tokens(), "validation_loss": self.validation_loss}
                self.metrics.write(row)
            self.console.say(f"step {self.step:>6}  validation loss {self.validation_loss:.4f}", style="bold")

    def _save(self) -> None:
        with self.clock.paused():
            self.checkpoints.save(self.model, self.optimizer, step=self.step)
            self.saved_step = self.step
            self.console.say(f"step {self.step:>6}  saved {self.checkpoints.path(self.step)}")

    def _load_weights(self) -> None:
        """Start from model.weights, unless this run has a checkpoint to go on from."""
        self.context_length = self.recipe.batch.sequence_length
        if not self.recipe.model.weights:
            return
        weights = starting_point(self.recipe.model.weights, self.folder)
        self.context_length = max(self.context_length, weights.facts.context_length)
        if self.resume_step is None:
            on_all(self.world, lambda: load_weights(self.model, weights))
            self.console.say(f"weights from {weights.path}")

    def _description(self) -> Description:
        """What goes with the weights wherever they go."""
        facts = TextFacts(self.context_length, eos_token_id=self.tokenizer.end_of_document)
        return Description(self.recipe.model, facts, self.tokenizer.backend.to_str())

    def _resume(self) -> int:
        """Load the newest checkpoint of this run, if there is one. Returns the steps done."""
        if self.resume_step is None:
            return 0
        path = self.checkpoints.path(self.resume_step)
        on_main_first(self.world, lambda: require_same_data(path, self.data_facts))
        self.checkpoints.load(self.model, self.optimizer, step=self.resume_step)
        if self.recipe.float8.all_gather:
            precompute_scales(self.model)
        self.console.say(f"resumed from {path}")
        return self.resume_step

    # The first and the last word

    def _open_folder(self) -> None:
        """Make the run's folder, if need be, and say in it what runs here and where."""
        facts = environment(world_size=self.world.size, device=self.world.device)
        for note in on_main(self.world, lambda: claim_run_folder(self.recipe, done=self.step, environment=facts)):
            self.console.say(note)
        self.console.open_log(self.folder / "log.txt")

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """First Ctrl-C or SIGTERM: stop after the step. A later one (not the same one twice): stop at once."""
        if self.interrupted_by is not None and time.perf_counter() - self.interrupted_at > 1:
            raise KeyboardInterrupt
        self.interrupted_by, self.interrupted_at = signal.Signals(number), time.perf_counter()

    def _stop_early(self) -> int:
        self.console.end_progress()
        if self.recipe.checkpoint.every:
            if self.step != self.saved_step:
                self._save()
            self.console.say(f"interrupted after step {self.step}; the same command goes on from there")
        else:
            self.console.say(f"interrupted after step {self.step}; nothing saved, as checkpoint.every = 0")
        self._close()
        return 128 + (self.interrupted_by or signal.SIGINT)

    def _finish(self) -> int:
        """Say what came out, and where it is."""
        self.console.end_progress()
        recipe, done = self.recipe, self.step - self.first_step
        seconds = time.perf_counter() - self.began
        if done == 0:
            self.console.say(f"this run has its {recipe.run.steps} steps already; --run.steps N makes it longer")
            if recipe.validation.every:
                self._validate()
        if recipe.validation.sample_tokens:
            self._sample()
        if recipe.checkpoint.export_hf:
            export_model(self.model, self.folder / "hf", self._description(), world=self.world)
        if done:
            tokens = done * self.throughput.tokens_per_step
            self.console.say(summary(done, tokens, seconds, validation_loss=self.validation_loss), style="bold")
        if self.world.is_main:
            contents = " ".join(sorted(path.name for path in self.folder.iterdir() if not path.name.startswith(".")))
            self.console.say(f"written to {self.folder}: {contents}")
        self._close()
        return 0

    def _close(self) -> None:
        self.metrics.close()
        self.agreement.end()

    def _sample(self) -> None:
        """Let the model continue the beginning of a held-out document."""
        prompt = self.validation.rows(0, 1)[0, : min(32, self.recipe.batch.sequence_length // 2)].tolist()
        answer = continuation(
            self.model,
            prompt,
            tokens=self.recipe.validation.sample_tokens,
            shape=(self.recipe.batch.micro_batch_size, self.recipe.batch.sequence_length),
            device=self.world.device,
            seed=self.recipe.run.seed,
        )
        self.console.say("a held-out text, and how the model goes on:", style="bold")
        self.console.say(self.tokenizer.decode(prompt), style="dim")
        self.console.say(self.tokenizer.decode(answer))

    def _tokens(self) -> int:
        return self.step * self.throughput.tokens_per_step
