"""The table of all commands: what each takes, the function that it runs, and what its help says."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from qdqbench import _options as options
from qdqbench.cli.options import REQUIRED, Parameters, RecipeName, StartRecipe
from qdqbench.quantize.deployment.options import PredictOptions, ServeOptions
from qdqbench.quantize.utils.names import DEFAULT_QAT
from qdqbench.quantize.utils.options import Options

BUILD = "Build the engine, prove its INT8 layers, verify its outputs if it runs here."
SCHEMA = "Print the JSON Schema of a recipe: editors complete and check YAML with it."
TIMINGS = "Show wall time, CPU time and peak memory of each stage of a finished run."
SERVE = "Answer requests over HTTP with a run's engine, and compare it with FP32 on a page."
RUN: Parameters = {
    "run": (Annotated[Path, typer.Argument(help="Run directory.", show_default=False)], REQUIRED)
}
TARGET: Parameters = {
    "target": (Annotated[Path | None, typer.Argument(help="Run directory.", show_default=False)], None)
}
RECIPE: Parameters = {"recipe": (StartRecipe, None)}
QAT_RECIPE: Parameters = {"recipe": (RecipeName, DEFAULT_QAT)}
ANY_RECIPE: Parameters = {"recipe": (RecipeName, REQUIRED)}


@dataclass(frozen=True)
class Command:
    """A row; its function, in a module of this folder, makes an `Answer` of arguments and options."""

    function: str
    options: type[Options]
    arguments: Parameters = field(default_factory=dict)  # before the options
    about: str = ""  # its help; of its options by default
    steps: str | None = ""  # what each is that has a bar of its own; None: nothing is shown
    resumes: bool = False  # what an interrupted call left
    json: bool = True
    html: bool = False  # a page of its report on request

    @property
    def help(self) -> str:
        return self.about or str(self.options.__doc__)


def _stage(name: str, about: str) -> Command:
    return Command(f"run.{name}", options.StageOptions, about=about, steps="stage", resumes=True)


COMMANDS: dict[str, dict[str, Command]] = {  # by what they are for, as help shows them
    "Run": {
        "recipes list": Command("recipes.list_recipes", options.ListOptions),
        "recipes show": Command("recipes.show", options.ShowOptions, ANY_RECIPE),
        "recipes validate": Command("recipes.validate", options.ValidateOptions),
        "recipes new": Command("recipes.new", options.NewRecipeOptions),
        "recipes from-cache": Command("recipes.from_cache", options.CacheRecipeOptions),
        "recipes schema": Command("recipes.print_schema", Options, about=SCHEMA, json=False),
        "run": Command("run.run", options.RunOptions, RECIPE, steps="stage", resumes=True),
        "auto": Command("tune.auto", options.AutoOptions, resumes=True),
        "quantize": _stage("quantize", "Calibrate: write calibration.json (amax, data, lengths)."),
        "export": _stage("export", "Write the INT8 ONNX file and its FP32 and FP16 twins."),
        "evaluate": _stage("evaluate", "Measure accuracy of every stage."),
        "report": Command("run.report", options.ReportOptions, steps="stage"),
        "build": _stage("build", BUILD),
        "verify": _stage("verify", "Verify the outputs of the engine, if it runs here."),
    },
    "Inspect": {
        "check": Command("lint.check", options.CheckCommandOptions, html=True),
        "inspect": Command("lint.inspect", options.InspectOptions, html=True),
        "diagnose": Command("lint.diagnose", options.DiagnoseOptions, html=True),
        "fix": Command("lint.fix", options.FixCommandOptions, html=True),
        "compare": Command("compare.compare", options.CompareOptions),
        "bench": Command("run.bench", options.BenchOptions, TARGET),
        "timings": Command("compare.timings", options.StageOptions, about=TIMINGS),
        "doctor": Command("lint.doctor", options.DoctorOptions, html=True),
    },
    "Tune": {
        "sensitivity": Command("tune.sensitivity", options.SensitivityOptions, RECIPE, resumes=True),
        "compare-calibration": Command(
            "tune.compare_calibration", options.CalibrationOptions, RECIPE, resumes=True
        ),
        "search": Command("tune.search", options.SearchCommandOptions, RECIPE, resumes=True),
    },
    "Train": {
        "qat": Command("run.run", options.QatOptions, QAT_RECIPE, steps="stage", resumes=True),
        "finetune": Command("run.finetune", options.FinetuneOptions, steps="training", resumes=True),
    },
    "Deploy": {
        "deploy": Command("serve.deploy", options.DeployOptions),
        "predict": Command("serve.predict", PredictOptions, resumes=True),
        "push": Command("serve.push", options.PushOptions),
        "serve": Command("serve.serve", ServeOptions, RUN, about=SERVE, steps=None, json=False),
        "export-triton": Command("serve.export_triton", options.TritonOptions),
    },
    "Maintainers": {"study": Command("run.study", options.StudyOptions, resumes=True)},
}
