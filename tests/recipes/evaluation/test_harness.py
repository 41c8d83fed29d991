"""Tasks of the lm-evaluation-harness: its own numbers for the exported folder, on any mesh, and its messages."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parallel.dist import start, stop
from parallel.errors import UserError
from recipes.weights.convert import load_weights
from recipes.weights.locate import find_weights
from tests.build import build_model, cpu_mesh
from tests.meshes import mesh_config, on_each_mesh
from tests.tasks import CONTEXT, DOCUMENTS, write_model, write_tasks

pytest.importorskip("lm_eval", reason="the lm-evaluation-harness is not installed: pip install -e '.[evaluation]'")

from recipes.evaluation import harness
from recipes.evaluation.scoring import Scored

CPU = torch.device("cpu")
QUESTION = "Document 3: words and numbers, more "
# Spaces at the end, an empty context, a special token in the text, contexts above the model's length, equal rows.
PAIRS = [
    ("Page 1:", " naïve words"),
    ("Page 1: ", "numbers"),
    ("", "words and numbers"),
    ("", "<|endoftext|>words"),
    ("<|endoftext|>Page", " 7"),
    (QUESTION * 9, " 1"),
    (QUESTION * 9, " 2"),
    ("Page 2:" * 40, "words and numbers, " * 5),
]
TEXTS = [document["page"] for document in DOCUMENTS["pages"]] + ["", "naïve words and numbers, " * 60]
PROMPTS = [(QUESTION, {}), (QUESTION * 9, {"until": ["um", "\n"]}), ("Page", {"until": "a"}), ("Page 4:", {})]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks") / "tasks")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")


def requests(kind: str) -> list[Any]:
    """Requests of each kind, as the harness makes them."""
    arguments: dict[str, list[tuple[Any, ...]]] = {
        "loglikelihood": [*PAIRS],
        "loglikelihood_rolling": [(text,) for text in TEXTS],
        "generate_until": [(text, {"max_gen_toks": 24} | settings) for text, settings in PROMPTS],
    }
    return [
        SimpleNamespace(args=one, task_name="t", doc_id=number, request_type=kind)
        for number, one in enumerate(arguments[kind])
    ]


KINDS = ("loglikelihood", "loglikelihood_rolling", "generate_until")


def ours(folder: Path, mesh: str = "1.1.1.1", *, batch_tokens: int = 128) -> Any:
    """Our model of a folder, as the harness asks it."""
    weights = find_weights(folder)
    config = mesh_config(mesh)
    model, _ = build_model(weights.model, mesh=config)
    load_weights(model, weights)
    scored = Scored(model, cpu_mesh(config), CPU, torch.float32, CONTEXT, batch_tokens)
    return harness.harness_model(scored, weights.description)


def answers(mesh: str, folder: Path) -> dict[str, list[Any]]:
    """Our answers to all requests, on the mesh of these processes."""
    start("cpu", seed=0)
    model = ours(folder, mesh)
    found = {kind: getattr(model, kind)(requests(kind)) for kind in KINDS}
    stop()
    return found


def require_equal(found: dict[str, list[Any]], expected: dict[str, list[Any]]) -> None:
    for (nats, greedy), (their_nats, their_greedy) in zip(found[KINDS[0]], expected[KINDS[0]], strict=True):
        assert (nats, greedy) == (pytest.approx(their_nats, rel=1e-6), their_greedy)
    assert found[KINDS[1]] == pytest.approx(expected[KINDS[1]], rel=1e-6)
    assert found[KINDS[2]] == expected[KINDS[2]]


@pytest.mark.slow
def test_answers_are_those_of_the_harness_itself_on_any_number_of_processes(folder: Path) -> None:
    pytest.importorskip("accelerate", reason="the harness's own model class needs accelerate, which is not installed")
    from lm_eval.models.huggingface import HFLM

    theirs = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=1)
    assert theirs.max_length == CONTEXT
    expected = {kind: getattr(theirs, kind)(requests(kind), disable_tqdm=True) for kind in KINDS}
    assert len({*expected[KINDS[2]]}) == len(PROMPTS), "answers that differ"
    for mesh in ("1.1.1.1", "1.3.1.1"):
        for found in on_each_mesh([mesh], answers, folder)[mesh]:
            require_equal(found, expected)


def begin_texts(folder: Path, *, named: bool, settings: dict[str, Any]) -> Path:
    """Let tokenizer.json alone begin texts with a token, which tokenizer_config.json names or not."""
    from tokenizers import Tokenizer, processors

    file, config = folder / "tokenizer.json", folder / "tokenizer_config.json"
    library = Tokenizer.from_file(str(file))
    begin = "a"  # any token with a row in the embedding
    template = {"single": f"{begin} $A", "special_tokens": [(begin, library.token_to_id(begin))]}
    library.post_processor = processors.TemplateProcessing(**template)
    library.save(str(file))
    if named:
        config.write_text(json.dumps(json.loads(config.read_text()) | {"bos_token": begin}))
    generation = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(generation | settings))
    return folder


@pytest.mark.parametrize("named", [False, True])
def test_a_beginning_that_only_the_tokenizer_adds_counts_as_for_the_harness(
    named: bool, tmp_path: Path, alone: None
) -> None:
    """And so does the repetition penalty of the folder's generation settings."""
    pytest.importorskip("accelerate", reason="the harness's own model class needs accelerate, which is not installed")
    from lm_eval.models.huggingface import HFLM

    folder = begin_texts(write_model(tmp_path), named=named, settings={"repetition_penalty": 1.3})
    assert json.loads((folder / "config.json").read_text())["bos_token_id"] is None
    theirs = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=1)
    expected = {kind: getattr(theirs, kind)(requests(kind), disable_tqdm=True) for kind in KINDS}
    require_equal({kind: getattr(ours(folder), kind)(requests(kind)) for kind in KINDS}, expected)


def test_a_beginning_that_config_json_alone_names_does_not_count_as_for_the_harness(
    tmp_path: Path, alone: None
) -> None:
    pytest.importorskip("accelerate", reason="the harness's own model class needs accelerate, which is not installed")
    from lm_eval.models.huggingface import HFLM

    folder = write_model(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"bos_token_id": 5}))
    theirs = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=1)
    expected = {kind: getattr(theirs, kind)(requests(kind), disable_tqdm=True) for kind in KINDS}
    require_equal({kind: getattr(ours(folder), kind)(requests(kind)) for kind in KINDS}, expected)


def test_token_without_a_row_in_the_embedding_is_an_error_of_the_task(tmp_path: Path, alone: None) -> None:
    folder, images = write_model(tmp_path), [f"<image{n}>" for n in range(300)]
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"extra_special_tokens": images}))
    model = ours(folder)
    assert model.tok_encode("words and numbers")
    with pytest.raises(UserError, match=r"a task's text holds token \d{3}, '<image299>', but the model has 300 rows"):
        model.loglikelihood([SimpleNamespace(args=("a <image299>", " b"), task_name="t", doc_id=0)])


def test_batches_of_any_size_give_the_same_answers(folder: Path, alone: None) -> None:
    first, second = (
        {kind: getattr(ours(folder, batch_tokens=tokens), kind)(requests(kind)) for kind in KINDS}
        for tokens in (1, 10_000)
    )
    require_equal(first, second)


@pytest.mark.slow
def test_results_are_those_of_the_harness_on_tasks(folder: Path, tasks: Path, alone: None) -> None:
    pytest.importorskip("accelerate", reason="the harness's own model class needs accelerate, which is not installed")
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    names = [str(tasks / f"{name}.yaml") for name in ("choices", "texts", "answers")]
    theirs = simple_evaluate(
        HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=1),
        tasks=names,
        num_fewshot=1,
        limit=5,
        bootstrap_iters=0,
        task_manager=TaskManager(include_defaults=False),
    )
    loaded = harness.load_tasks(names, limit=5, examples=1)
    for _ in range(2):  # the second time with the same examples
        found = harness.results_of(ours(folder), loaded)
        rows = harness.rows_of(found)
        assert rows.keys() == {"choices/acc", "texts/bits_per_byte", "answers/exact_match"} == loaded.directions.keys()
        assert rows == pytest.approx(harness.rows_of(theirs), rel=1e-6)
        assert found["n-shot"] == theirs["n-shot"] == {"choices": 1, "texts": 1, "answers": 1}
    assert loaded.directions["choices/acc"] is True and loaded.directions["texts/bits_per_byte"] is False
    assert json.loads(harness.as_json(found))["results"]["choices"]["acc,none"] == rows["choices/acc"]


def test_folder_of_tasks_means_all_of_them(tasks: Path) -> None:
    assert set(harness.load_tasks([str(tasks)]).loaded["tasks"]) == {"choices", "texts", "answers"}


def with_changes(tasks: Path, folder: Path, name: str, changes: dict[str, str]) -> str:
    """A copy of a task with words of it replaced."""
    text = (tasks / f"{name}.yaml").read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    (folder / "changed.yaml").write_text(text)
    return str(folder / "changed.yaml")


@pytest.mark.parametrize(
    ("task", "changes", "message"),
    [
        ("choices", {"questions.jsonl": "gone.jsonl"}, "'.*changed.yaml' cannot be loaded: FileNotFoundError"),
        ("choices", {"{{question}}": "{{question"}, "cannot be loaded: TemplateSyntaxError"),
        ("choices", {"{{question}}": "{{question.a.b}}"}, "cannot be loaded: UndefinedError"),
        ("choices", {"test_split: test": "test_split: dev"}, "cannot be loaded|cannot be made"),
        ("choices", {"multiple_choice": "guess"}, "cannot be loaded: .*invalid output_type"),
        (
            "choices",
            {"dataset_path: json": "dataset_path: nobody/nothing"},
            "cannot be loaded: .*; load it once where there is a network",
        ),
        ("texts", {'doc_to_text: ""': 'doc_to_text: "'}, "cannot be loaded: .*Error"),
    ],
)
def test_task_that_cannot_be_used_is_refused(
    task: str, changes: dict[str, str], message: str, tasks: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        harness.load_tasks([with_changes(tasks, tmp_path, task, changes)])


def test_task_that_ends_the_program_is_refused(
    tasks: Path, folder: Path, tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ends.py").write_text("import sys\n\ndef now(*_):\n    sys.exit(0)\n")
    with pytest.raises(UserError, match=r"cannot be (loaded|made): it calls sys\.exit\(0\)"):
        harness.load_tasks([with_changes(tasks, tmp_path, "choices", {'"{{question}}"': "!function ends.now"})])
    changed = with_changes(tasks, tmp_path, "choices", {"aggregation: mean": "aggregation: !function ends.now"})
    with pytest.raises(UserError, match=r"tasks choices: the code of one fails: it calls sys\.exit\(0\); repair it"):
        harness.results_of(ours(folder), harness.load_tasks([changed]))
    loaded, model = harness.load_tasks([str(tasks / "choices.yaml")]), ours(folder)
    monkeypatch.setattr(harness, "log_likelihoods", lambda *_: [][0])
    with pytest.raises(IndexError):  # ours, which the harness called
        harness.results_of(model, loaded)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"max_gen_toks: 24": "max_gen_toks: 64"},
            "64 tokens, but the model looks at 64; write a smaller max_gen_toks",
        ),
        ({"do_sample: false": "num_beams: 3"}, "generation_kwargs num_beams: not known here"),
    ],
)
def test_answers_that_the_model_cannot_give_are_refused_before_all_requests(
    changes: dict[str, str], message: str, tasks: Path, folder: Path, tmp_path: Path, alone: None
) -> None:
    loaded = harness.load_tasks([with_changes(tasks, tmp_path, "answers", changes)])
    with pytest.raises(UserError, match=message):
        harness.require_answerable(ours(folder), loaded)


def test_sampled_answers_differ_between_prompts_and_not_between_runs(folder: Path, alone: None) -> None:
    asked = requests("generate_until")
    for request in asked:
        request.args = (QUESTION, {"max_gen_toks": 12, "do_sample": True, "temperature": 1.5, "top_k": 50})
    first, second = (ours(folder).generate_until(asked) for _ in range(2))
    assert first == second and len({*first}) == len(asked)


def test_target_above_the_length_of_the_model_is_refused(folder: Path, alone: None) -> None:
    [request, *_] = requests("loglikelihood")
    request.args = ("Page", "xyz%" * 60)
    with pytest.raises(UserError, match="cannot be scored by a model that looks at 64"):
        ours(folder).loglikelihood([request])


def test_random_numbers_of_the_process_are_as_before(tasks: Path) -> None:
    import random

    import numpy as np

    before = random.getstate(), np.random.get_state()[1].tolist()
    harness.load_tasks([str(tasks / "choices.yaml")], examples=2)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
