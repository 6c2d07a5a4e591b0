"""Reference pages that the code determines: what follows `MARK` in each; what stands before is hand-written.

    python tools/pages.py             write them
    python tools/pages.py --check     change nothing; exit status 2 where something would change

The meaning of a field is its `description`. The cause of a finding is the text that its rule raises it with.
"""

import importlib
import inspect
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer.main
from pydantic import BaseModel

import qdqbench
from qdqbench.cli import schemas
from qdqbench.cli.app import app
from qdqbench.cli.commands import EXAMPLES
from qdqbench.eval.bench.results import Bench
from qdqbench.eval.runs.comparison import RunComparison
from qdqbench.eval.runs.results import Results
from qdqbench.eval.runs.study import Study
from qdqbench.eval.selection.auto.results import Auto
from qdqbench.eval.selection.calibration_comparison import CalibrationComparison
from qdqbench.eval.selection.search.results import Search
from qdqbench.eval.selection.sensitivity.results import Sensitivity
from qdqbench.quantize.deployment.predict import Predicted
from qdqbench.quantize.engine.cuda import match
from qdqbench.quantize.engine.cuda import names as cuda
from qdqbench.quantize.engine.cuda.tokens import MOST_TOKENS
from qdqbench.quantize.lint.findings import Kind, fill, read_kinds
from qdqbench.quantize.lint.machines import read_machines
from qdqbench.quantize.models.families.known import FAMILIES
from qdqbench.quantize.recipe.schema import Recipe, family_free_recipes
from qdqbench.quantize.tasks.task import KNOWN, TASK_KINDS
from qdqbench.quantize.training.results import Finetuning
from qdqbench.quantize.utils import errors

ROOT = Path(__file__).resolve().parents[1]
MARK = "<!-- The rest is written by `python tools/pages.py`; a test compares. -->\n"
FILES: dict[str, tuple[type[BaseModel], ...]] = {  # in this order, each schema where it is met first
    "results.json": (Results,),
    "finetune.json": (Finetuning,),
    "study.json": (Study,),
    "bench.json": (Bench,),
    "compare.json": (RunComparison,),
    "sensitivity.json": (Sensitivity,),
    "methods.json": (CalibrationComparison,),
    "search.json": (Search,),
    "auto.json": (Auto,),
    "What other commands print with `--json`": (
        *(
            value
            for value in vars(schemas).values()
            if isinstance(value, type) and value.__module__ == schemas.__name__
        ),
        Predicted,
    ),
}
BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "over",
    "maximum": "at most",
    "exclusiveMaximum": "under",
    "multipleOf": "a multiple of",
}
Schema = Mapping[str, Any]


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [f"| {' | '.join(cells)} |".replace("  |", " |") for cells in (header, *rows)]
    return [lines[0], f"|{'---|' * len(header)}", *lines[1:]]


# Schemas


def reached(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """Return a schema and those that its fields are made of, by name, in the order of the fields."""
    models, waiting = {}, [model]
    while waiting:
        item: Any = waiting.pop(0)
        if isinstance(item, type) and issubclass(item, BaseModel):
            if item.__name__ not in models:
                models[item.__name__] = item
                waiting = [field.annotation for field in item.model_fields.values()] + waiting
        else:
            waiting = [*get_args(item), *waiting]
    return models


def meanings(model: type[BaseModel]) -> dict[str, str]:
    """Return the meaning of each field of a schema."""
    return {name: known.description or "" for name, known in model.model_fields.items()}


def values(field: Schema, anchors: Mapping[str, str]) -> str:
    """Return the values that a JSON Schema allows, in a few words.

    Args:
        anchors: of the tables of schemas, by their names in references.
    """
    if choices := field.get("anyOf") or field.get("oneOf"):
        text = ", or ".join(values(choice, anchors) for choice in choices)
    elif "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        text = f"[{name}](#{anchors[name]})"
    elif "enum" in field or "const" in field:
        text = ", ".join(_code(value) for value in field.get("enum", [field.get("const")]))
    elif "prefixItems" in field:
        text = f"{len(field['prefixItems'])} of: {values(field['prefixItems'][0], anchors)}"
    elif field.get("items"):
        text = f"list of: {values(field['items'], anchors)}"
    elif "pattern" in field:
        text = "string that fits `" + field["pattern"].replace("|", "\\|") + "`"
    elif isinstance(inner := field.get("additionalProperties"), dict):
        text = f"object of: {values(inner, anchors)}"
    else:
        bounds = (f"{word} {field[key]:g}" for key, word in BOUNDS.items() if key in field)
        text = ", ".join([field.get("type", "any"), *bounds])
    return text


def _code(value: Any) -> str:
    return f"`{value if isinstance(value, str) and value else json.dumps(value)}`"


def json_page() -> str:
    """Return the body of json.md: for each file a table of each of its schemas."""
    lines, headings = list[str](), {}
    for title, roots in FILES.items():
        models = [model for root in roots for model in reached(root).values()]
        own = [model for model in dict.fromkeys(models) if model not in headings]
        for model in own:
            taken = model.__name__ in headings.values()
            headings[model] = f"{model.__name__} of {title}" if taken else model.__name__
        lines += [f"## {title}", ""]
        named = {
            model.__name__: headings[model].lower().replace(" ", "-").replace(".", "") for model in models
        }
        for model in own:
            fields = model.model_json_schema(mode="serialization")
            fields = fields.get("properties") or fields["$defs"][model.__name__]["properties"]
            about = " ".join(inspect.cleandoc(model.__doc__ or "").split())
            meaning = meanings(model)
            rows = [[f"`{key}`", values(field, named), meaning.get(key, "")] for key, field in fields.items()]
            lines += [f"### {headings[model]}", "", about, "", *table(["field", "type", "meaning"], rows), ""]
    return "\n".join(lines).rstrip() + "\n"


def recipe_page() -> str:
    """Return the body of recipe.md: one table for the recipe and for each section."""
    schema = Recipe.model_json_schema()
    sections = {"Recipe": schema, **schema["$defs"]}
    anchors = {name: name.lower() for name in sections}
    lines = []
    for name in (name for name in reached(Recipe) if name in sections):
        rows = []
        for key, field in sections[name]["properties"].items():
            meaning = field.get("description")
            if not meaning and (named := re.search(r"#/\$defs/(\w+)", json.dumps(field))):
                meaning = sections[named[1]]["description"]  # when equal
            default = field.get("default")
            shown = "see there" if isinstance(default, dict) else _code(default)
            shown = shown if "default" in field else "required"
            rows.append([f"`{key}`", values(field, anchors), shown, meaning])
        about = sections[name]["description"]
        lines += [f"## {name}", "", about, "", *table(["key", "values", "default", "meaning"], rows), ""]
    return "\n".join(lines)


# What is supported


def _recipes_of_cuda(family: str) -> str:
    every = "those with INT8 attention" if family in match.BIASED else "all of its recipes"
    return every if family in match.FAMILIES else ""


def supported_page() -> str:
    """Return the body of support.md: families, their model types and recipes, and kinds of tasks."""
    free, names = family_free_recipes(), [family.name for family in FAMILIES]
    rows = [
        [family.name, _list(family.model_types), _list(family.inputs), _recipes_of_cuda(family.name)]
        for family in FAMILIES
    ]
    header = ["family", "`model_type` in config.json", "inputs of the graph", "backend `cuda`"]
    lines = [
        *table(header, rows),
        "",
        "The other backends take all families. Backend `cuda` takes all kinds of tasks of those it covers, "
        f"on compute capability {_list(cuda.NAMES[:-1])} and newer ones. It has INT8 attention for heads of "
        f"up to {cuda.ATTENTION_SIZES[-1]} channels. INT8 "
        f"linears have multiples of {cuda.CHANNEL_STEP} channels, next to FP16 attention of "
        f"{cuda.LINEAR_STEP}, and a LayerNorm up to "
        f"{128 * cuda.NORM_PARTS[-1]:,}. A batch has up to {MOST_TOKENS:,} tokens.",
    ]
    for family in FAMILIES:
        if family.needs:
            needs = ", ".join(f"`{name}` {values[0]}" for name, values in family.needs.items())
            lines += ["", f"Of {family.name} only models with {needs}."]
    about = "A recipe is called FAMILY-NAME. With a model NAME alone is enough: its type says which family."
    rows = [
        [f"`{recipe}`", *("yes" if name in having else "" for name in names)]
        for recipe, having in free.items()
    ]
    lines += ["", about, "", *table(["recipe", *names], rows), ""]
    rows = [
        [
            kind.name,
            _list(name for name, task in KNOWN.items() if task.kind is kind),
            kind.model_class,
            ", ".join(dict.fromkeys((*kind.default_metrics, *kind.metrics))),
        ]
        for kind in TASK_KINDS.values()
    ]
    lines += table(["kind of task", "`--task`", "model class", "metrics, the default ones first"], rows)
    lines += zoo_lines()
    lines += ["", "What was measured: [results](../results/README.md).", ""]
    return "\n".join(lines) + "\n"


def _list(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names)


# The command line and the Python API

NAMES = {int: "integer", float: "number", str: "text", bool: "flag", Path: "path", Any: "any"}


def type_words(annotation: Any) -> str:
    """Return the values that a parameter takes, in a few words; None is left out, as the default says it."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_words(inner[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin in (Union, UnionType):
        return ", or ".join(type_words(each) for each in inner if each is not NoneType)
    if origin is list:
        return f"{type_words(inner[0])}, one or more"
    if origin is not None:
        return getattr(origin, "__name__", str(origin)).lower().replace("callable", "function")
    return NAMES.get(annotation) or getattr(annotation, "__name__", str(annotation))


def _default(parameter: inspect.Parameter) -> str:
    if parameter.default is parameter.empty:
        return "required"
    if callable(parameter.default) or any(parameter.default is each for each in (None, False, ())):
        return ""
    return _code(parameter.default)


def _accepted(parameter: inspect.Parameter) -> str:
    """Return the values of an argument; a duration is a number or text such as its default."""
    words = type_words(parameter.annotation)
    return f"{words}, or text" if words == "number" and isinstance(parameter.default, str) else words


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def cli_page() -> str:
    """Return the body of cli.md: every command with its parameters, by panels of the help."""
    program = typer.main.get_command(app)
    panels: dict[str, list[tuple[str, Any]]] = {}
    for name, command in program.commands.items():
        inner = getattr(command, "commands", {})
        entries = [(f"{name} {key}", value) for key, value in inner.items()] or [(name, command)]
        panels.setdefault(command.rich_help_panel, []).extend(entries)
    lines = []
    for panel, entries in panels.items():
        lines += [f"## {panel}", ""]
        for name, command in entries:
            lines += _command_lines(name, command)
    return "\n".join(lines).rstrip() + "\n"


def _command_lines(name: str, command: Any) -> list[str]:
    signature = inspect.signature(command.callback).parameters
    rows, usage = [], []
    for option in command.params:
        parameter = signature[option.name]
        if option.param_type_name == "argument":
            word = option.name.upper() + ("..." if option.nargs != 1 else "")
            usage.append(word if option.required else f"[{word}]")
            shown = f"`{option.name.upper()}`"
        else:
            shown = ", ".join(f"`{flag}`" for flag in (*option.opts, *option.secondary_opts))
        default = "required" if option.required else _default(parameter)
        rows.append([shown, type_words(parameter.annotation), default, _cell(option.help or "")])
    words = " ".join(["qdqbench", name, *usage, "[OPTIONS]"])
    about = [" ".join(part.split()) for part in (command.help or "").split("\n\n")]
    text = "\n\n".join(about)
    header = ["parameter", "values", "default", "meaning"]
    page, example = EXAMPLES[name]
    more = ["```sh", f"qdqbench {example}", "```", "", f"More: [{Path(page).stem}](../{page}).", ""]
    shown = [*table(header, rows), ""] if rows else []
    return [f"### `{name}`", "", text, "", f"    {words}", "", *shown, *more]


def api_page() -> str:
    """Return the body of api.md: functions with their arguments, then types and errors."""
    homes = {name: getattr(importlib.import_module(f"qdqbench.{home}"), name)
             for name, home in (qdqbench._HOME | {"quantize": "_models"}).items()}  # fmt: skip
    lines = ["## Functions", ""]
    for name in qdqbench.__all__:
        if name.islower():
            lines += _function_lines(name, homes[name])
    lines += ["## Types", ""]
    documented = {
        model.__name__ for roots in FILES.values() for root in roots for model in reached(root).values()
    }
    for name in qdqbench.__all__:
        value = homes[name]
        if inspect.isclass(value) and not issubclass(value, Exception):
            lines += [f"### `{name}`", "", _clean(value.__doc__), ""]
            if name in documented:
                lines += [f"Fields: [JSON](json.md#{name.lower()}).", ""]
            elif name == "Recipe":
                lines += ["Fields: [the recipe format](recipe.md).", ""]
            lines += [
                _method_line(method, function)
                for method, function in inspect.getmembers(value, inspect.isfunction)
                if not method.startswith("_")
                and (function.__module__ or "").startswith("qdqbench")
                and method != "facts"  # of its display
            ]
            lines.append("")
    lines += ["## Errors", ""]
    tree = dict(re.findall(r"(\w+) +exit \d +(.+)", inspect.getdoc(errors)))
    rows = [[f"`{name}`", f"{homes[name].exit_code}", tree[name]]
            for name in qdqbench.__all__
            if inspect.isclass(homes[name]) and issubclass(homes[name], Exception)]  # fmt: skip
    lines += table(["error", "exit status", "meaning"], rows)
    return re.sub("\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def _method_line(name: str, function: Callable[..., Any]) -> str:
    """Return a method with its arguments, and what it does without their meanings."""
    taken = [each for each in inspect.signature(function).parameters if each != "self"]
    about = _clean(re.split(r"\n\s*(?:Args|Raises):", inspect.cleandoc(function.__doc__ or ""))[0])
    return f"- `{name}({', '.join(taken)})`: {about}".removesuffix(": ")


def _clean(text: str | None) -> str:
    return " ".join(inspect.cleandoc(text or "").split())


def _function_lines(name: str, function: Callable[..., Any]) -> list[str]:
    about, sections = _docstring(function)
    signature = inspect.signature(function)
    meaning = sections.get("Args", {}) | sections.get("Options", {})
    rows = [
        [f"`{key}`", _accepted(parameter), _default(parameter), _cell(meaning.get(key, ""))]
        for key, parameter in signature.parameters.items()
    ]
    required = [key for key, each in signature.parameters.items() if each.default is each.empty]
    lines = [f"### `{name}({', '.join(required)})`", "", about, ""]
    lines += [*table(["argument", "values", "default", "meaning"], rows), ""]
    if raised := sections.get("Raises"):
        told = "; ".join(f"`{error}`: {when.rstrip('.')}" for error, when in raised.items())
        lines += [f"Raises {told}.", ""]
    return lines


def _docstring(function: Callable[..., Any]) -> tuple[str, dict[str, dict[str, str]]]:
    """Return the text of a docstring, and the entries of its sections by name."""
    about, *rest = re.split(r"^(Args|Raises|Options|Returns):$", inspect.getdoc(function) or "", flags=re.M)
    sections: dict[str, dict[str, str]] = {}
    for title, body in zip(rest[::2], rest[1::2], strict=True):
        entries = re.findall(r"^    (\w[\w, ]*): (.*(?:\n {8,}.*)*)", body, flags=re.M)
        sections[title] = {key: " ".join(text.split()) for keys, text in entries for key in keys.split(", ")}
    return "\n\n".join(" ".join(part.split()) for part in about.strip().split("\n\n")), sections


# Codes of findings


SECTIONS = {
    "graph": "In an ONNX file",
    "engine": "In the layer table of an engine",
    "build": "In several files of one build",
    "log": "In lines of a build log",
}


def checks_page() -> str:
    """Return the body of checks.md: every code with its cause and what to do."""
    lines = []
    for section, title in SECTIONS.items():
        rows = [
            [f"`{code}`", kind.severity, kind.effect, _signs(kind), _cause(kind), _fixes(kind)]
            for code, kind in read_kinds(section).items()
        ]
        columns = ["code", "severity", "effect", "text in the log", "cause", "what to do"]
        if section != "log":
            columns, *rows = [[*row[:3], *row[4:]] for row in (columns, *rows)]
        lines += [f"## {title}", "", *table(columns, rows), ""]
    return "\n".join(lines)


def _signs(kind: Kind) -> str:
    return _cell(", ".join(f"`{text}`" for text in kind.signs))


def _cause(kind: Kind) -> str:
    """Return a cause without the figures that a file fills in."""
    text = fill("; ".join(filter(None, [kind.title, kind.why])))
    text = re.sub(r" \(\{n\} [\w ]+\)|^\{n\} (?!of)", "", text)
    return _cell(re.sub(r"\{\w+\}", "…", text))


def zoo_lines() -> list[str]:
    """Return tables of the model types of transformers: those that are served, and why others are not."""
    heads = json.loads((ROOT / "docs/measured-zoo/types.json").read_text(encoding="utf-8"))
    rows, reasons = [], dict[str, set[str]]()
    for head, found in heads.items():
        rows.append([head, _list(found[""])])
        for reason, types in found.items():
            reasons.setdefault(reason, set()).update(types)
    del reasons[""]
    refused = [
        [_cell(reason.replace("'TYPE'", "model")), _list(sorted(types))] for reason, types in reasons.items()
    ]
    refused.sort(key=lambda row: (-len(row[1]), row[0]))
    about = (
        "`tests/integration/test_zoo.py` takes a tiny model of every type through a run. FP32 logits of "
        "these types equal those of transformers to 1e-3. `qdqbench recipes new` writes the recipe of a type "
        "that has no family above."
    )
    return [
        "", "## Model types of transformers", "", about, "", *table(["head", "`model_type`"], rows),
        "", "The other types are refused by name:", "", *table(["reason", "`model_type`"], refused),
    ]  # fmt: skip


def _fixes(kind: Kind) -> str:
    commands = ("qdqbench ", "trtexec ")
    named = [fill(fix, {"file": "MODEL", "fixed": "FIXED"}) for fix in kind.fixes]
    named = [re.sub(r"\{\w+\}", "…", text).replace("TASK", "sst2") for text in named]
    return _cell("; ".join(f"`{text}`" if text.startswith(commands) else text for text in named))


PAGES = {
    "docs/reference/cli.md": cli_page,
    "docs/reference/api.md": api_page,
    "docs/reference/json.md": json_page,
    "docs/reference/recipe.md": recipe_page,
    "docs/reference/checks.md": checks_page,
    "docs/reference/support.md": supported_page,
}


MACHINE_PAGES = ("README.md", "docs/how-to/choose-a-backend.md")
MACHINES = "<!-- machines -->", "<!-- machines:end -->"  # in pages, around the table of machines


def machines_table(name: str) -> list[str]:
    """Return the machines by name: in brief for the README, else with what INT8 can bring."""
    header = ["machine", "`--backend`", "start with"]
    if name == "README.md":
        alike: dict[tuple[str, str, str], list[str]] = defaultdict(list)
        for row in read_machines():
            alike[row.backend, row.start, "yes" if row.ran else "never"].append(row.names)
        brief = [[", ".join(names), f"`{key[0]}`", f"`{key[1]}`", key[2]] for key, names in alike.items()]
        return table([*header, "run by us"], brief)
    rows = [
        [row.names, f"`{row.backend}`", f"`{row.start}`", row.gains, row.ours, row.others]
        for row in read_machines()
    ]
    return table([*header, "INT8 can bring", "by us", "by others"], rows)


def fill_machines(name: str, text: str) -> str:
    """Return a page with its table of machines, if it has one."""
    begin, end = MACHINES
    if begin not in text:
        return text
    made = "\n".join(machines_table(name))
    before, after = text.partition(begin)[0], text.partition(end)[2]
    return f"{before}{begin}\n\n{made}\n\n{end}{after}"


def main(arguments: list[str]) -> int:
    """Write or check the pages; returns the exit status."""
    stale = []
    for name, page in {**PAGES, **dict.fromkeys(MACHINE_PAGES)}.items():
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        made = f"{text.partition(MARK)[0]}{MARK}\n{page()}" if page else fill_machines(name, text)
        if text != made:
            stale.append(name)
            if arguments != ["--check"]:
                path.write_text(made, encoding="utf-8")
    for name in stale:
        print(f"{name} {'is not what the code says' if arguments == ['--check'] else 'written'}")
    return 2 if stale and arguments == ["--check"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
