"""Builds one checked Recipe from a TOML file, its bases and the command line. Imports no torch."""

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli

from models.config import CUSTOM, FROM_CONFIG, FROM_WEIGHTS, ModelConfig
from models.registry import FAMILIES, LATENT, PLACES
from models.sizes import SIZES
from parallel.errors import UserError
from recipes.files.added import FORMATS, SOURCES
from recipes.files.exit_codes import FINISHED
from recipes.files.layout import CHECKPOINTS, RECIPE, checkpoint_steps
from recipes.files.lock import own_name
from recipes.files.reading import SHOWN, fault, read_whole, toml_table, user_path
from recipes.recipe.fields import (
    BEFORE,
    COMMAND_LINE,
    Problem,
    Written,
    default_recipe,
    field_types,
    recipes_of,
    refusal,
    refusal_of,
    sections,
    states_all,
    toml,
    unknown_key,
    unknown_section,
    value_of,
)
from recipes.recipe.paths import ROOT, settle_paths
from recipes.recipe.rules import broken_rules
from recipes.recipe.schema import Recipe, RunConfig, StageConfig

if TYPE_CHECKING:
    from recipes.recipe.command_line import Flags
    from recipes.weights.locate import InitialWeights, Weights

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
BENCHMARKS = CONFIGS / "benchmarks"
LARGEST_RECIPE = 1_000_000
"""Bytes of the largest file of a recipe. Looking for what was meant by each wrong key of a larger one takes hours."""

NO_SHAPE = ("name", "weights", "config", "dropout")
"""The fields of [model] that say where its shape comes from, or what else is done with it."""

SHAPE = tuple(field.name for field in fields(ModelConfig) if field.default is MISSING and field.name != "name")
"""The fields of [model] without a default."""

Layer = tuple[str, dict[str, Any]]
"""(where it was written, its sections)."""


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe, and what loading it found on the disk."""

    recipe: Recipe
    weights: "Weights | None" = None
    """What the run starts from; None if neither model.weights nor data.tokenizer needs any, or without the rules."""
    origins: Mapping[str, str] | None = None
    """Field -> the file that wrote it, or "command line"; None for a recipe that was not loaded."""


def load(path: str | Path, arguments: Sequence[str] = (), **options: Any) -> Recipe:
    """The recipe alone; takes and raises what load_run does."""
    return load_run(path, arguments, **options).recipe


def load_run(
    path: str | Path,
    arguments: Sequence[str] = (),
    *,
    over: Sequence[Layer] = (),
    processes: int | None = None,
    nodes: int | None = None,
    rules: bool = True,
    elsewhere: bool = False,
    kind: type[Recipe] | None = None,
    only: Collection[str] = (),
) -> LoadedRecipe:
    """Load a recipe and locate the weights it starts from, once. Raises one UserError that lists everything wrong.

    Earlier layers of this list override later ones: command line, the last of `over`, file, its base, that file's
    base, the model size, the schema's defaults.

    Args:
        path, arguments: the TOML file, and the `--section.field value ...` of the command line.
        over: layers between the two.
        processes, nodes: check that the layout fits these numbers; None = any.
        rules: False skips the rules across fields and the look at the data, for a recipe that is only read.
        elsewhere: True skips only the look at the data and the weights, for a recipe that will run on another machine.
        kind: the class of a recipe with the same plug-ins, which are then not looked for; None = as written.
        only: the sections to read. No plug-in is loaded, and what is wrong elsewhere has its default. () = all.
    """
    chain = read_chain(user_path(path))
    kind = kind or (Recipe if only else kind_of([*chain, *over], arguments))
    if rules and (kind.loads or FORMATS or SOURCES):  # of this recipe, and of no other
        from recipes.plugins.loading import activate

        activate(kind.loads)
    options = {"rules": rules, "elsewhere": elsewhere, "processes": processes, "nodes": nodes, "only": only}
    with recipes_of(kind):
        return _load(path, [*chain, *over], arguments, kind, file="" if over else chain[-1][0], **options)


def kind_of(layers: Sequence[Layer], arguments: Sequence[str]) -> type[Recipe]:
    """The class of the recipe of these layers and flags. Raises UserError for plug-ins that cannot be loaded."""
    flags: Flags = []
    if any(argument.startswith("--plugins.") for argument in arguments):
        from recipes.recipe import command_line

        flags = command_line.split(arguments)[0]
    if not flags and not any("plugins" in tables for _, tables in layers):
        return Recipe
    from recipes.recipe.plugins import kind_for

    return kind_for(layers, flags)


def _load(
    path: str | Path, layers: Sequence[Layer], arguments: Sequence[str], kind: type[Recipe], **options: Any
) -> LoadedRecipe:
    """As load_run(), of whose options some are those of broken_rules()."""
    rules, elsewhere, only = options.pop("rules"), options["elsewhere"], options.pop("only")
    run, before = Written(), None
    problems: list[Problem] = []
    tables_of_stages: tuple[Any, str] = ([], "")
    for origin, tables in layers:
        tables_of_stages = (tables["stages"], origin) if "stages" in tables else tables_of_stages
        problems += _read({name: table for name, table in tables.items() if name != "stages"}, origin, run)
        run.put(_of_old_run(tables), origin)
    of_stages: dict[str, Flags] = {}
    if arguments:
        from recipes.recipe import command_line  # tyro takes a third of the time that --check needs

        flags, of_stages, unexpected = command_line.split(arguments)
        before = _assemble(run, None)
        overrides, wrong = command_line.parse(flags, before)
        problems += unexpected + wrong + run.put(overrides, COMMAND_LINE)
        if overrides.get("run.name") == "auto":
            run.values["run.name"] = own_name(_folder(run.values).with_name(Path(path).stem))
    problems += settle_paths(run)
    _keep_values_of_run(run)
    if kind is not Recipe or run.values.get("plugins.versions"):
        from recipes.recipe.plugins import settle_versions

        problems += settle_versions(run, kind, strict=rules)
    weights = _initial_weights(run.values)
    if not any(problem.key == "model.name" for problem in problems):
        problems += _size(run, weights)[1]
    configs: tuple[StageConfig, ...] = ()
    stages: list[Written] = []
    if tables_of_stages[0] != [] or of_stages:
        from recipes.recipe.stage_tables import read_stages

        configs, stages, wrong = read_stages(*tables_of_stages, of_stages, _assemble(run, weights), run)
        problems += wrong
    recipe = replace(_assemble(run, weights), stages=configs)
    if rules:
        wrong_keys = {problem.key for problem in problems}
        problems += broken_rules(recipe, weights, [run, *stages], wrong=wrong_keys, before=before, **options)
    if problems := [one for one in problems if not only or {*only} & {*one.key.split(".")}]:
        raise refusal(problems, where=shown(Path(path)))
    needs_weights = rules and not elsewhere and (recipe.model.weights or recipe.data.tokenizer == FROM_WEIGHTS)
    return LoadedRecipe(recipe, weights.found if weights and needs_weights else None, run.origins)


def _of_old_run(tables: Mapping[str, Any]) -> dict[str, Any]:
    """What the recipe.toml of a run of an older version leaves unsaid, if these tables are one."""
    keys = {f"{section}.{name}" for section, table in tables.items() if isinstance(table, dict) for name in table}
    return {key: value for key, value in BEFORE.items() if key not in keys} if states_all(keys) else {}


def _keep_values_of_run(run: Written) -> None:
    """Let a run that goes on, and a fork, keep the values of the fields of BEFORE that are not written now."""
    with suppress(UserError):  # the start says what is wrong with the folder
        folders, trunk = [_folder(run.values)], run.values.get("run.continue_from", "")
        if not checkpoint_steps(folders[0] / CHECKPOINTS):
            path = user_path(trunk)
            path = path if os.path.exists(path) else path.with_name(path.name.rpartition("@")[0] or path.name)
            folders = [path, *path.absolute().parents[:2]] if trunk else []  # it may be one checkpoint
        if file := next((folder / RECIPE for folder in folders if os.path.isfile(folder / RECIPE)), None):
            run.put(kept_values(file, run.values), shown(file))


def kept_values(file: Path, written: Collection[str]) -> dict[str, Any]:
    """The values that a run with this recipe.toml keeps of the fields of BEFORE, but for those that are written now."""
    unwritten = BEFORE.keys() - {*written}
    old = load(file, rules=False, only=("data",)) if unwritten else Recipe()
    return {key: value_of(old, key) for key in unwritten}


def _folder(values: Mapping[str, Any]) -> Path:
    """The run's folder, by these values."""
    return RunConfig(**{key: values[f"run.{key}"] for key in ("name", "output") if f"run.{key}" in values}).folder


def print_help(arguments: list[str], *, usage: str) -> int:
    """Print what --help shows beside these arguments: a recipe with its overrides, a section, both or neither. Returns
    the exit code."""
    from recipes.recipe import command_line

    named = arguments[1:]  # after the recipe, perhaps a section of one of its plug-ins
    with recipes_of(kind_of(read_chain(user_path(arguments[0])), named) if named else Recipe):
        arguments, section = command_line.split_section(arguments)
    recipe = load(arguments[0], arguments[1:], rules=False) if arguments else None
    with recipes_of(type(recipe) if recipe else Recipe):
        command_line.print_help(recipe, usage=usage, section=section)
    return FINISHED


def _initial_weights(values: Mapping[str, Any]) -> "InitialWeights | None":
    """What finds the weights, or the config, that these values name; None if they name neither."""
    named = {key: values.get(key, "") for key in ("model.weights", "model.config", "model.name", "data.tokenizer")}
    if not (named["model.weights"] or named["model.config"] or {FROM_WEIGHTS, FROM_CONFIG} & {*named.values()}):
        return None
    from recipes.weights.locate import InitialWeights

    return InitialWeights(named["model.weights"], _folder(values), named["model.config"])


def to_toml(recipe: Recipe) -> str:
    """The whole recipe with every field in effect, as TOML that loads back to an equal recipe."""
    tables = asdict(replace(recipe, stages=()))
    del tables["stages"]
    if not recipe.plugins.modules:
        del tables["plugins"]
    if recipe.model.by_transformers:  # its shape is in its config.json
        tables["model"] = {name: tables["model"][name] for name in NO_SHAPE}
    del tables["data"]["source" if recipe.data.mixture else "mixture"]
    del tables["validation"]["source" if recipe.validation.sources else "sources"]
    ends = [{} if stage in recipe.stages[-1:] else {"until": stage.until} for stage in recipe.stages]
    stages = [{"name": one.name, **end, **one.changes} for one, end in zip(recipe.stages, ends, strict=True)]
    return "\n".join(
        "\n".join([head, *(f"{name} = {toml(value)}" for name, value in values.items()), ""])
        for head, values in [(f"[{name}]", values) for name, values in tables.items()]
        + [("[[stages]]", values) for values in stages]
    )


def _read(tables: dict[str, Any], origin: str, run: Written) -> list[Problem]:
    """Put the values of one file over those of its bases; returns what is wrong with them."""
    problems: list[Problem] = []
    values: dict[str, Any] = {}
    for section, table in tables.items():
        if section not in sections() and isinstance(table, dict):
            problems.append(Problem(f"[{section}]", unknown_section(section), "", origin))
        elif section not in sections():
            problems.append(Problem(section, unknown_key(section), toml(table), origin))
        elif not isinstance(table, dict):
            message = f"is a section; write [{section}] on a separate line and its keys below"
            problems.append(Problem(section, message, toml(table), origin))
        else:
            values |= {f"{section}.{name}": value for name, value in table.items()}
    if states_all(values):  # the recipe.toml of a run
        from recipes.recipe.synonyms import GONE

        values = {key: value for key, value in values.items() if key not in GONE}
    return problems + run.read(values, origin, lambda key: None if key in field_types() else unknown_key(key))


def _assemble(run: Written, weights: "InitialWeights | None") -> Recipe:
    """The recipe of these values over size and defaults. weights: know the model of "from_..."; None = any will do."""
    values: dict[str, dict[str, Any]] = {section: {} for section in sections()}
    for key, value in run.values.items():
        section, _, name = key.partition(".")
        values[section][name] = value
    size, fields_of_model = _size(run, weights)[0], values.pop("model")
    if size.by_transformers:  # _size refuses the other fields
        fields_of_model = {name: value for name, value in fields_of_model.items() if name in NO_SHAPE}
    model = replace(size, **fields_of_model)
    given = {section: sections()[section](**fields) for section, fields in values.items()}
    return replace(default_recipe(), model=model, **given)


def _size(run: Written, weights: "InitialWeights | None") -> tuple[ModelConfig, list[Problem]]:
    """The model that provides the [model] fields these values omit, and what is wrong with its name; the schema's
    default where there is none."""
    default = Recipe().model
    known = (
        f"the sizes in models/sizes.py are {', '.join([*SIZES, *FAMILIES])}; {FROM_WEIGHTS} takes the model of"
        f" model.weights, {FROM_CONFIG} that of model.config, and {CUSTOM} the fields that you write"
    )
    if "model.name" not in run.values:
        missing = f'is missing; write name = "smollm3_debug" below [model]; {known}'
        return default, [Problem("model.name", missing)]
    name, origin = run.values["model.name"], run.origins["model.name"]
    if size := FAMILIES.get(name, SIZES.get(name)):
        return replace(size, name=name), []
    if name == CUSTOM:  # what has a default is not that of another size
        rule = 'is missing; name = "custom" takes nothing from a size; write it below [model]'
        missing_fields = [field for field in SHAPE if f"model.{field}" not in run.values]
        size = ModelConfig(name=CUSTOM, **{field: getattr(default, field) for field in SHAPE})
        return size, [Problem(f"model.{field}", rule, "", origin) for field in missing_fields]
    if name in (FROM_WEIGHTS, FROM_CONFIG):
        return _size_of(name, run, weights)
    close = get_close_matches(name, [*SIZES, *FAMILIES, FROM_WEIGHTS, FROM_CONFIG, CUSTOM], n=1)
    hint = f"did you mean {toml(close[0])}? " if close else ""
    return default, [Problem("model.name", f"unknown size; {hint}{known}", toml(name), origin)]


def _size_of(name: str, run: Written, weights: "InitialWeights | None") -> tuple[ModelConfig, list[Problem]]:
    """As _size(), of weights or a config."""
    default, key = Recipe().model, "model.weights" if name == FROM_WEIGHTS else "model.config"
    path, origin = run.values.get(key, ""), run.origins.get(key, run.origins["model.name"])
    problems = [] if path else [Problem(key, f'is missing; name = "{name}" takes its model', "", origin)]
    # In a resolved recipe no field of the shape is missing; older versions did not write some of them.
    shape = {f"model.{field.name}" for field in fields(ModelConfig)}
    later = {"logit_softcap", "full_attention_layers", "sparse_every", "further_dense_layers", "expert_groups_by"}
    later |= {"attention_sinks", "biases", "rope_truncate", *PLACES, *LATENT}
    shape -= {f"model.{field}" for field in (*NO_SHAPE, "upcycle", *later)}
    if weights is None or shape <= run.values.keys():
        return default, problems
    if refused := refusal_of(weights.model):
        return default, problems or [Problem(key, refused, toml(path), origin)]
    if weights.model().by_transformers and path:
        message = "belongs to config.json for a model of transformers; remove it here"
        problems = [
            Problem(key, message, toml(value), run.origins[key])
            for key, value in run.values.items()
            if key.startswith("model.") and key.partition(".")[2] not in NO_SHAPE
        ]
    return weights.model(), problems


def read_chain(path: Path) -> list[Layer]:
    """(file, its sections), from the outermost base to the file itself."""
    chain: list[Path] = []
    seen: set[Path] = set()  # resolved
    layers: list[Layer] = []
    while True:
        named_by = f" (base of {shown(chain[-1])})" if chain else ""
        if path.resolve() in seen:
            names = " -> ".join(shown(file) for file in [*chain, path])
            raise UserError(f"the bases of {shown(chain[0])} form a circle: {names}; remove one of these base lines")
        seen.add(path.resolve())
        tables = read_toml(path, named_by)
        base = tables.pop("base", None)
        chain.append(path)
        layers.insert(0, (shown(path), tables))
        if base is None:
            return layers
        if not isinstance(base, str):
            raise UserError(f'base = {toml(base)} in {shown(path)}: must be a file name; write base = "other.toml"')
        beside, in_checkout = user_path(path.parent / base), ROOT / base
        path = in_checkout if in_checkout.is_file() and not beside.exists() else beside


def read_toml(path: Path, named_by: str = "") -> dict[str, Any]:
    """The contents of one TOML file. Raises UserError with the position of a syntax error."""
    file = shown(path) + named_by
    try:
        text = read_whole(path, most=LARGEST_RECIPE).decode("utf-8-sig")
        return toml_table(text)
    except IsADirectoryError:
        inside = ", ".join(sorted(recipe.name for recipe in path.glob("*.toml"))) or "no .toml file"
        raise UserError(f"{file} is a folder, not a recipe; it contains {inside}") from None
    except FileNotFoundError:
        raise UserError(f"{file} does not exist; {_similar(path)}") from None
    except OSError as error:
        raise fault(f"{file} cannot be read", error) from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UserError(f"{file} is not UTF-8 text (line {line}, byte {error.start}); save it as UTF-8") from None
    except tomli.TOMLDecodeError as error:
        line_text = (text.splitlines() or [""])[min(error.lineno, len(text.splitlines())) - 1]
        first = max(0, error.colno - 1 - SHOWN // 2)  # of a line of megabytes, what is around the error
        hint = '; strings need "quotes", booleans are true and false' if error.msg == "Invalid value" else ""
        raise UserError(
            f"{file} is not TOML: line {error.lineno}, column {error.colno}: {error.msg}{hint}\n"
            f"  {line_text[first : first + SHOWN]}\n  {' ' * (error.colno - 1 - first)}^"
        ) from None
    except ValueError as error:  # such as numbers with thousands of digits
        raise UserError(f"{file} cannot be read: {error}") from None


def _similar(path: Path) -> str:
    """The hint for a recipe that does not exist."""
    if path.is_symlink():
        return f"it is a link to '{path.readlink()}', which is not there; mend the link"
    here = {file.stem: file for folder in (BENCHMARKS, CONFIGS, path.parent) for file in sorted(folder.glob("*.toml"))}
    close = [path.stem] if path.stem in here else get_close_matches(path.stem, here, n=3)
    if close:
        return f"did you mean {' or '.join(shown(here[stem]) for stem in close)}?"
    return f"recipes are in {shown(CONFIGS)}: {', '.join(sorted(file.stem for file in CONFIGS.glob('*.toml')))}"


def shown(path: Path) -> str:
    """The path as a user would type it in the current folder."""
    relative = os.path.relpath(path)
    return os.path.normpath(path) if relative.startswith("..") else relative
