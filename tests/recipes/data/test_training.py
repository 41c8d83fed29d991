"""Complete runs on text of every kind, and runs that change their number of processes."""

import json
import math
import shutil
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from parallel.dist import start, stop
from recipes.data.config import DataConfig
from recipes.data.tokens.prepare import write_shards
from recipes.recipe.schema import Recipe
from tests.processes import run_processes
from tests.recipes.data.text.test_hub import c4, tiny_stories
from tests.recipes.data.texts import shards_in, tokenizer_for, work_on, write_rows
from tests.recipes.data.tokens.test_token_files import write_datatrove, write_megatron
from tests.training import change, rows, run_all, train

pytestmark = pytest.mark.slow


def run_on(processes: int, *recipes: Recipe) -> None:
    """Run recipes one after the other; one process is this one, which keeps the locks of its run folders."""
    if processes > 1:
        run_processes(processes, run_all, [*recipes])
        return
    world = start("cpu", seed=0)
    try:
        for recipe in recipes:
            train(recipe, world)
    finally:
        stop()


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("sources")
    texts = write_rows(folder / "rows.jsonl", 400)
    with (folder / "rows.jsonl").open("a") as file:
        file.write('{"text": "cut\n')
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / "table.parquet")
    (folder / "plain.txt").write_text("\n\n".join(texts * 3))
    return {
        "lines": str(folder / "rows.jsonl"),
        "parquet": str(folder / "table.parquet"),
        "text": str(folder / "plain.txt"),
        "c4": f"hf:{c4(folder / 'c4')}:en",
        "stories": f"hf:{tiny_stories(folder / 'stories')}",
    }


def test_run_trains_on_every_kind_of_source(small: Recipe, sources: dict[str, str]) -> None:
    recipes = [
        change(
            small,
            run={"name": name.replace(" ", "_"), "steps": 2},
            data={"source": source, "tokenizer": "train:300", "validation_fraction": 0.2},
            checkpoint={"every": 0},
        )
        for name, source in sources.items()
    ]
    run_on(2, *recipes)
    for recipe in recipes:
        assert [row["step"] for row in rows(recipe)] == [1, 2]
        assert math.isfinite(rows(recipe)[-1]["loss"])
    quarantine = recipes[0].run.folder / "quarantine.jsonl"
    (row,) = map(json.loads, quarantine.read_text().splitlines())
    assert (row["source"], row["row"]) == (sources["lines"], 401)
    assert not (recipes[1].run.folder / "quarantine.jsonl").exists()


def test_masked_mixture_resumes_on_other_numbers_of_processes(small: Recipe, sources: dict[str, str]) -> None:
    mixture = {sources["lines"]: 0.6, sources["c4"]: 0.3, sources["stories"]: 0.1}
    whole = change(
        small,
        run={"name": "whole", "steps": 10},
        data={
            "source": DataConfig().source,
            "mixture": mixture,
            "tokenizer": "train:300",
            "validation_fraction": 0.2,
            "document_mask": True,
            "shuffle_tokens": 3000,
        },
        batch={"global_batch_size": 12},
        checkpoint={"every": 100},
        schedule={"kind": "constant", "warmup_steps": 2},
    )
    elastic = change(whole, run={"name": "elastic"})
    run_on(1, whole)
    for processes, until in ((4, 3), (3, 7), (1, 10)):
        run_on(processes, change(elastic, run={"steps": until}))
    expected, found = rows(whole), rows(elastic)
    assert [row["step"] for row in found] == [row["step"] for row in expected] == list(range(1, 11))
    for row, then in zip(found, expected, strict=True):
        assert row["loss"] == pytest.approx(then["loss"], rel=1e-5)
        assert row["attention_length"] == then["attention_length"]  # the very same documents
        assert set(row["epochs"]) == set(mixture)


def test_chats_resume_on_other_numbers_of_processes_and_keep_their_template(small: Recipe, tmp_path: Path) -> None:
    with (tmp_path / "chats.jsonl").open("w") as file:
        for number in range(200):
            messages = [
                {"role": "user", "content": f"What is {number}?" + " Or so." * (number % 4)},
                {"role": "assistant", "content": f"It is {number * 7919 % 1000}."},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    (tmp_path / "chat.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    )
    whole = change(
        small,
        run={"name": "whole_chats", "steps": 6},
        data={
            "source": str(tmp_path / "chats.jsonl"),
            "messages_field": "messages",
            "chat_template": str(tmp_path / "chat.jinja"),
            "tokenizer": "train:300",
            "validation_fraction": 0.2,
        },
        batch={"sequence_length": 128, "global_batch_size": 12},
        checkpoint={"every": 100},
        schedule={"kind": "constant", "warmup_steps": 2},
        validation={"every": 3},
    )
    elastic = change(whole, run={"name": "elastic_chats"})
    run_on(3, change(elastic, run={"steps": 2}))
    run_on(1, whole, change(elastic, run={"steps": 6}))
    expected, found = rows(whole), rows(elastic)
    assert [row["step"] for row in found if "loss" in row] == list(range(1, 7))
    for name in ("loss", "validation_loss", "tokens", "epochs"):
        then, now = ([row[name] for row in all_rows if name in row] for all_rows in (expected, found))
        assert now[-1] == (pytest.approx(then[-1], rel=1e-5) if "loss" in name else then[-1])
    assert 0 < found[-1]["tokens"] < 6 * 12 * 128, "padding is counted"
    (checkpoint,) = (elastic.run.folder / "checkpoints").glob("*6")
    assert (checkpoint / "chat_template.jinja").read_text() == (tmp_path / "chat.jinja").read_text()


def test_resume_refuses_a_source_that_changed(small: Recipe, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 400)
    recipe = change(
        small,
        run={"name": "changed", "steps": 2},
        data={"source": str(tmp_path / "rows.jsonl"), "tokenizer": "train:300", "validation_fraction": 0.2},
        checkpoint={"every": 2},
    )
    run_on(1, recipe)
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"text": "one more"}\n')
    with pytest.raises(Exception, match=r"trained on other text behind .*rows\.jsonl.* then, .* now\."):
        run_on(1, change(recipe, run={"steps": 4}))
    from recipes.data.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(
        "train:300", sources=[str(tmp_path / "rows.jsonl")], text_field="text", cache=tmp_path, log=lambda line: None
    )
    (tmp_path / "tokenizer.json").write_text(tokenizer.json)
    fixed = change(recipe, run={"name": "fixed"}, data={"tokenizer": str(tmp_path / "tokenizer.json")})
    run_on(1, fixed)
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"text": "and another"}\n')
    with pytest.raises(
        Exception, match=r"other text behind .*: 1 files with [\d,]+ bytes then, 1 files with [\d,]+ byt"
    ):
        run_on(1, change(fixed, run={"steps": 4}))


def test_resume_refuses_text_that_was_prepared_in_the_meantime(small: Recipe, tmp_path: Path) -> None:
    """The tokens are the same but not their order: prepared shards are shuffled as a whole from the start."""
    (tmp_path / "text").mkdir()
    write_rows(tmp_path / "text" / "rows.jsonl", 400)
    tokenizer = tokenizer_for(tmp_path / "text")
    (tmp_path / "tokenizer.json").write_text(tokenizer.json)
    recipe = change(
        small,
        run={"name": "prepared", "steps": 2},
        data={
            "source": str(tmp_path / "text"),
            "tokenizer": str(tmp_path / "tokenizer.json"),
            "validation_fraction": 0.2,
            "shuffle_tokens": 1000,
        },
        checkpoint={"every": 2},
    )
    run_on(1, recipe)
    (tmp_path / "text").rename(tmp_path / "raw")
    shards_in(tmp_path / "text", work_on(tmp_path / "raw", tokenizer=tokenizer))
    with pytest.raises(Exception, match=r"another order of .*: text that is tokenized .* then, prepared shards now"):
        run_on(1, change(recipe, run={"steps": 4}))


def test_resume_refuses_tokens_that_differ_when_made_again(small: Recipe, tmp_path: Path) -> None:
    """A file that is unreadable only for a while: the source looks the same but gives other tokens."""
    (tmp_path / "in").mkdir()
    for name in ("a", "b"):
        write_rows(tmp_path / "in" / f"{name}.jsonl", 200, name=name)
    tokenizer = tokenizer_for(tmp_path / "in" / "a.jsonl")
    (tmp_path / "tokenizer.json").write_text(tokenizer.json)
    cache = tmp_path / "cache"
    recipe = change(
        small,
        run={"name": "again", "steps": 2},
        data={
            "source": str(tmp_path / "in"),
            "tokenizer": str(tmp_path / "tokenizer.json"),
            "validation_fraction": 0.2,
            "bad_row_budget": 0.9,
            "cache": str(cache),
        },
        checkpoint={"every": 2},
    )
    work = work_on(tmp_path / "in", tokenizer=tokenizer)

    def make(*, lacking: bool) -> None:
        shutil.rmtree(cache, ignore_errors=True)
        shards = write_shards(cache / "tokens" / work.fingerprint, work)
        found = [next(shards)]
        if lacking:
            (tmp_path / "in" / "b.jsonl").rename(tmp_path / "b.jsonl")
        found += shards
        if lacking:
            (tmp_path / "b.jsonl").rename(tmp_path / "in" / "b.jsonl")
        assert len(found) > 2 and any(shard.unread for shard in found) == lacking

    for processes, until in ((2, 2), (1, 4)):
        make(lacking=False)
        run_on(processes, change(recipe, run={"steps": until}))
    other = change(recipe, run={"name": "other"})
    make(lacking=True)
    run_on(1, other)
    gives = r"the {} global batches that this run .* have changed: .*/in' gives different tokens, .* A file {}"
    with pytest.raises(Exception, match=gives.format(4, "cannot be read now: repair it, remove .*tokens/")):
        run_on(1, change(recipe, run={"steps": 6}))
    make(lacking=False)
    with pytest.raises(Exception, match=gives.format(2, "could not be read then, or .*: restore the old data.cache")):
        run_on(1, change(other, run={"steps": 6}))


def test_tokens_of_other_trainers_train_as_the_same_text_on_two_processes_and_then_on_one(
    small: Recipe, tmp_path: Path
) -> None:
    texts, held = write_rows(tmp_path / "rows.jsonl", 300), write_rows(tmp_path / "held.jsonl", 60, 300)
    tokenizer = tokenizer_for(tmp_path / "rows.jsonl")
    for name in ("rows", "held"):
        shards_in(tmp_path / name, work_on(tmp_path / f"{name}.jsonl", fraction=0, tokenizer=tokenizer))
    tokens = [[[*tokenizer.ids(text), tokenizer.end_of_document] for text in some] for some in (texts, held)]
    ours = change(
        small,
        run={"name": "ours_prepared"},
        data={
            "source": str(tmp_path / "rows"),
            "tokenizer": str(tmp_path / "rows" / "tokenizer.json"),
            "validation_fraction": 0.0,
            "document_mask": True,
        },
        checkpoint={"every": 100},
        validation={"every": 3, "source": str(tmp_path / "held")},
    )
    theirs = change(
        ours,
        run={"name": "theirs"},
        data={"source": write_megatron(tmp_path / "rows.bin", tokens[0])},
        validation={"source": write_datatrove(tmp_path / "held.ds", tokens[1])},
    )
    for processes, steps in ((2, 3), (1, 6)):
        run_on(processes, *(change(recipe, run={"steps": steps}) for recipe in (ours, theirs)))
    assert [row["step"] for row in rows(theirs) if "loss" in row] == list(range(1, 7))
    compared = ("loss", "grad_norm", "validation_loss", "attention_length", "tokens")
    expected, found = ([[row.get(name) for name in compared] for row in rows(recipe)] for recipe in (ours, theirs))
    assert found == expected
