"""Tasks of the lm-evaluation-harness on our models: its questions, its scores, our forward passes.

Every process makes all requests of a task and computes its share of them, so that all know all answers, and the numbers
do not depend on how many there are. Tokens, truncation and prefixes are those of the harness's own class for models of
transformers (HFLM): its numbers on the exported folder are ours.
"""

import json
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import datasets
import lm_eval.api.task
import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import evaluate
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, handle_non_serializable, make_disjoint_window, make_table

from models.hf_config import INSTALL
from parallel.errors import UserError
from recipes.evaluation.opened import Sampling
from recipes.evaluation.scoring import Prompt, Scored, continuations, log_likelihoods
from recipes.files.border import foreign
from recipes.weights.companions import repetition_penalty
from recipes.weights.description import Description
from recipes.weights.hf_folder import write_description

SEED = 1234
"""Seed of the examples in prompts: the harness's own."""
MAX_NEW_TOKENS = 256
"""New tokens for a task that does not say how many: the harness's own."""
SAMPLING = ("do_sample", "temperature", "top_k", "top_p")
"""The generation settings of a task that are honoured, beside `until` and the number of tokens."""


class HarnessModel(TemplateLM):
    """Our model, as the harness asks it."""

    def __init__(self, scored: Scored, description: Description) -> None:
        """Raises UserError for a description that cannot be used."""
        super().__init__()
        self.scored, self._vocabulary = scored, description.model.vocabulary
        self._repetition_penalty = repetition_penalty(description.companions, where=Path())
        ends = description.ends(where=Path())  # before its texts are written, so that this place is not named
        self.tokenizer = tokenizer_of(description)
        self.ends = {*ends, self.tokenizer.eos_token_id}

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has nothing before it."""
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else begin

    @property
    def max_length(self) -> int:
        return self.scored.max_length

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The tokens of a text; a text that spells out the beginning token gets no other one."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.tokenizer.decode(self.prefix_token_id))
        with foreign("the tokenizer cannot encode a task's text"):
            ids: list[int] = self.tokenizer.encode(string, add_special_tokens=add_special_tokens)
        if (largest := max(ids, default=0)) >= self._vocabulary:
            token = self.tokenizer.convert_ids_to_tokens(largest)
            raise UserError(
                f"a task's text holds token {largest}, {token!r}, but the model has {self._vocabulary} rows"
            )
        return ids

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """(log-likelihood, whether it is the greedy text) of each continuation of a context."""
        for request in requests:
            if not request.args[1]:
                raise UserError(f"{request.task_name}: document {request.doc_id} has an empty choice or target")
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
        for (context, continuation), _, tokens in requests:
            if not 1 <= len(tokens) <= self.max_length:
                raise UserError(
                    f"a task's target of {len(tokens)} tokens cannot be scored by a model that looks at"
                    f" {self.max_length}: {(context or '')[-50:]!r} {continuation[:50]!r}"
                )
        return log_likelihoods(self.scored, [(context, tokens) for _, context, tokens in requests])

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """The log-likelihood of each text, cut into windows that the model can look at."""
        windows, owners = [], []
        for number, request in enumerate(requests):
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for window in map(make_disjoint_window, rolling):
                windows.append(window)
                owners.append(number)
        totals = [0.0] * len(requests)
        for number, (nats, _) in zip(owners, log_likelihoods(self.scored, windows), strict=True):
            totals[number] += nats
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """The text after each prompt, up to where the task says that it ends."""
        asked = [self._prompt(*request.args, task=request.task_name, seed=n) for n, request in enumerate(requests)]
        answers = continuations(self.scored, [prompt for prompt, _ in asked])
        return [
            postprocess_generated_text(self.tokenizer.decode(answer, skip_special_tokens=True), stop, None)
            for answer, (_, stop) in zip(answers, asked, strict=True)
        ]

    def _prompt(self, context: str, settings: dict[str, Any], *, task: str, seed: int) -> tuple[Prompt, list[str]]:
        """What to continue, and the texts that end it. Raises UserError for settings that cannot be honoured."""
        found: dict[str, Any] = dict(normalize_gen_kwargs(settings, MAX_NEW_TOKENS))
        stop = handle_stop_sequences(found.pop("until"), eos=self.tokenizer.decode(self.eot_token_id))
        tokens, sampled = found.pop("max_gen_toks"), {name: found.pop(name, None) for name in SAMPLING}
        if found:
            raise UserError(
                f"{task}: generation_kwargs {', '.join(found)}: not known here; take them out of the task, or export"
                " the model and let the harness's own `lm_eval` command evaluate it"
            )
        if (room := self.max_length - tokens) < 1:
            raise UserError(
                f"{task}: its answers may have {tokens} tokens, but the model looks at {self.max_length};"
                " write a smaller max_gen_toks into the task"
            )
        sampling = Sampling(
            tokens,
            temperature=float(sampled["temperature"] or 0) if sampled["do_sample"] else 0.0,
            top_k=int(sampled["top_k"] or 0),
            top_p=float(1 if sampled["top_p"] is None else sampled["top_p"]),
            seed=seed,
            repetition_penalty=self._repetition_penalty,
        )
        ids = self.tok_encode(context)[-room:] or [self.prefix_token_id]
        return Prompt(ids, self.ends, partial(self._holds, self._lengths(stop)), sampling), stop

    def _lengths(self, stop: list[str]) -> dict[str, int]:
        """How many of the last tokens may spell out each of these texts: two more than its own, as for the harness."""
        return {text: len(self.tokenizer.encode(text, add_special_tokens=False)) + 2 for text in stop if text}

    def _holds(self, stop: dict[str, int], text: Sequence[int]) -> bool:
        return any(end in self.tokenizer.decode(text[-length:]) for end, length in stop.items())


def tokenizer_of(description: Description) -> Any:
    """transformers' tokenizer of an export of these weights. Raises UserError without transformers."""
    try:
        from models.transformers import read_tokenizer
    except ImportError:
        raise UserError(INSTALL) from None
    with TemporaryDirectory(prefix="shardwright-") as place:
        write_description(Path(place), description, dtype="float32")
        with foreign("transformers refuses the tokenizer and its settings"):
            return read_tokenizer(Path(place))


def harness_model(scored: Scored, description: Description) -> HarnessModel:
    """The model of a checkpoint, a folder or a run, as the harness asks it. Raises UserError."""
    if description.model.is_encoder_decoder:
        raise UserError("tasks are evaluated with models that continue a text, not with encoder-decoder models")
    return HarnessModel(scored, description)


# Tasks


@dataclass(frozen=True)
class Tasks:
    """Tasks whose data is there."""

    loaded: Mapping[str, Any]
    """The tasks as TaskManager.load() returns them."""
    limit: int | None
    """Documents of each task; None = all."""

    @property
    def directions(self) -> dict[str, bool | None]:
        """ "TASK/METRIC" -> whether a higher value is better, None where the task does not say."""
        return {
            _row(name, metric, filters.name): task.higher_is_better().get(metric)
            for name, task in self.loaded["tasks"].items()
            for metric in task.aggregation()
            for filters in task._filters
        }


def load_tasks(names: Sequence[str], *, limit: int | None = None, examples: int | None = None) -> Tasks:
    """Load tasks by name, wildcard, YAML file or folder, with their data. Raises UserError with the first problem.

    names: those of tasks. limit: documents of each; None = all. examples: in each prompt; None = as the task says.
    """
    folders = [name for name in names if Path(name).is_dir()]
    files = [name for name in names if name not in folders and name.endswith((".yaml", ".yml"))]
    plain = [name for name in names if name not in (*folders, *files)]
    for file in files:
        if not Path(file).is_file():
            raise UserError(f"task {file!r} does not exist; write the path of a YAML file, or the name of a task")
    with _quiet():
        with foreign(f"tasks {', '.join(names)} cannot be looked for"):
            manager = TaskManager(include_path=folders or None, include_defaults=bool(plain))
        wanted = [*files, *_in_folders(manager, folders), *_known(manager, plain)]
        loaded: dict[str, Any] = {"tasks": {}, "groups": {}, "group_map": {}}
        for name in dict.fromkeys(wanted):
            with foreign(f"task {name!r} cannot be loaded", _hint):  # tasks are programs, and read data
                found = dict(manager.load([name]))
            for part, of_task in found.items():
                loaded[part] |= of_task
        for task in loaded["tasks"].values():
            _prepare(task, examples)
    return Tasks(loaded, limit)


def _in_folders(manager: TaskManager, folders: list[str]) -> list[str]:
    """The tasks that the YAML files of these folders define, without those of their groups."""
    roots = [Path(folder).resolve() for folder in folders]
    found = [
        name
        for name, entry in manager.task_index.items()
        if entry.kind.name in ("TASK", "PY_TASK")
        and any(root in Path(entry.yaml_path or "").resolve().parents for root in roots)
    ]
    if folders and not found:
        raise UserError(f"{' and '.join(folders)}: no YAML file there defines a task")
    return found


def _known(manager: TaskManager, names: list[str]) -> list[str]:
    """The tasks, groups and tags of these names, which may hold wildcards."""
    found = []
    for name in names:
        matches = manager.match_tasks([name])
        if not matches:
            near = get_close_matches(name, manager.all_tasks, n=3)
            hint = f"did you mean {' or '.join(near)}" if near else "`lm_eval ls tasks` lists them"
            raise UserError(f"the lm-evaluation-harness has no task {name!r}; {hint}; files end in .yaml")
        found += matches
    return found


def _hint(error: BaseException) -> str:
    """What to do about data that is neither on the disk nor within reach; "" for other errors."""
    from_hub = type(error).__module__.partition(".")[0] in ("datasets", "huggingface_hub", "httpx", "requests")
    if not (from_hub or isinstance(error, ConnectionError)):
        return ""
    return "load it once where there is a network, with HF_HOME a folder that this machine has too"


def _prepare(task: Any, examples: int | None) -> None:
    """Set the number of examples, as the harness does, and make the request of one document, to see that it can be."""
    default = task.get_config("num_fewshot")
    if examples is not None and default != 0:
        task.set_config(key="num_fewshot", value=examples)
    elif default is None:
        task.set_config(key="num_fewshot", value=0)
    name = task.config.task
    for what, problem in (("UNSAFE_CODE", "runs code that models write"), ("MULTIMODAL", "asks about pictures")):
        if getattr(task, what, False):
            raise UserError(f"task {name!r} {problem}, which is not supported; take it out")
    with foreign(f"task {name!r}: the prompt of its first document cannot be made"):
        task.set_fewshot_seed(seed=SEED)
        task.build_all_requests(limit=1)


def require_answerable(model: HarnessModel, tasks: Tasks) -> None:
    """Raises UserError if the model cannot answer the first document of a task."""
    for name, task in tasks.loaded["tasks"].items():
        for request in task.instances:
            if request.request_type == "generate_until":
                model._prompt(*request.args, task=name, seed=0)
            elif request.request_type not in ("loglikelihood", "loglikelihood_rolling"):
                raise UserError(f"task {name!r} asks for {request.request_type}, which is not supported; take it out")


def results_of(model: HarnessModel, tasks: Tasks, *, bootstraps: int = 0) -> dict[str, Any]:
    """The harness's results: for each task and group, "METRIC,FILTER" -> value. All processes call it and get the same.

    bootstraps: samples for the standard errors of metrics that are not means; 0 = no standard errors at all.
    """
    for task in tasks.loaded["tasks"].values():
        task.set_fewshot_seed(seed=SEED)  # the same examples every time
    scoring = foreign(f"tasks {', '.join(tasks.loaded['tasks'])}: the code of one fails", "repair it, or leave it out")
    with _quiet(), scoring, patch.dict("os.environ", DISABLE_MULTIPROC="1"):  # a process that computes must not fork
        found = evaluate(model, dict(tasks.loaded), limit=tasks.limit, bootstrap_iters=bootstraps, log_samples=False)
    assert found is not None, "every process is rank 0 for the harness"
    return dict(found)


def rows_of(results: Mapping[str, Any]) -> dict[str, float]:
    """ "TASK/METRIC" or, for another filter than the harness's default, "TASK/METRIC,FILTER" -> value."""
    found = {}
    for name, metrics in results["results"].items():
        for key, value in metrics.items():
            metric, _, filters = key.partition(",")
            if isinstance(value, int | float) and not metric.endswith("_stderr") and filters:
                found[_row(name, metric, filters)] = float(value)
    return found


def _row(task: str, metric: str, filters: str) -> str:
    return f"{task}/{metric}" + (f",{filters}" if filters != "none" else "")


def tables(results: Mapping[str, Any]) -> str:
    """The results as the harness prints them."""
    found = make_table(dict(results))
    return found + ("\n" + make_table(dict(results), "groups") if results.get("groups") else "")


def as_json(results: Mapping[str, Any]) -> str:
    """The results as the harness writes them."""
    return json.dumps(results, indent=2, default=handle_non_serializable, ensure_ascii=False)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the harness's progress bars and notes, and give it global random numbers that do not disturb ours."""
    before, their = random.getstate(), np.random.get_state()
    random.seed(0)
    np.random.seed(SEED)
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        with patch.object(lm_eval.api.task, "tqdm", lambda items, **_: items):
            yield
    finally:
        logger.setLevel(level)
        datasets.enable_progress_bars()
        random.setstate(before)
        np.random.set_state(their)
