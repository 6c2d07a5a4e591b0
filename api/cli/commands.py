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
_FOLDER = typer.Argument(help="Run directory.", show_default=False)
RUN: Parameters = {"run": (Annotated[Path, _FOLDER], REQUIRED)}
TARGET: Parameters = {"target": (Annotated[Path | None, _FOLDER], None)}
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

PAGES = "docs"  # in a checkout or an sdist
EXAMPLES: dict[str, tuple[str, str]] = {  # by command: page and example, which end its help
    "run": (
        "how-to/your-data.md",
        "run int8-linears --model my-model --data reviews.csv --text-column review --label-column sentiment",
    ),
    "auto": ("how-to/auto.md", "auto --model my-model --task sst2 --budget 30m --min-speedup 1.2"),
    "quantize": ("reference/run-directory.md", "quantize runs/a"),
    "export": ("explanation/the-graph.md", "export runs/a"),
    "evaluate": ("tutorials/read-the-report.md", "evaluate runs/a --json"),
    "report": ("tutorials/read-the-report.md", "report runs/a"),
    "build": ("how-to/choose-a-backend.md", "build runs/a"),
    "verify": ("explanation/what-is-proven.md", "verify runs/a"),
    "recipes list": ("how-to/choose-a-recipe.md", "recipes list --model my-model"),
    "recipes show": ("reference/recipe.md", "recipes show int8-linears --model my-model"),
    "recipes validate": ("how-to/write-a-recipe.md", "recipes validate mine.yaml"),
    "recipes new": ("how-to/write-a-recipe.md", "recipes new --model my-model"),
    "recipes from-cache": (
        "how-to/calibrators-to-qdq.md",
        "recipes from-cache calibration.cache --model my-model --onnx my-model.onnx",
    ),
    "recipes schema": ("reference/recipe.md", "recipes schema"),
    "check": ("how-to/is-it-int8.md", "check model.onnx"),
    "inspect": ("how-to/is-it-int8.md", "inspect runs/a --all"),
    "diagnose": ("how-to/int8-is-slower.md", "diagnose model.onnx build.log"),
    "fix": ("how-to/fix-a-foreign-onnx.md", "fix model.onnx --out model.fixed.onnx"),
    "compare": ("how-to/compare-runs.md", "compare runs/a runs/b"),
    "bench": ("how-to/measure-speed.md", "bench runs/a --batch 8 --length 128"),
    "timings": ("reference/run-directory.md", "timings runs/a"),
    "doctor": ("how-to/install.md", "doctor --backend openvino"),
    "sensitivity": ("how-to/sensitivity.md", "sensitivity int8-attention --model my-model --task sst2"),
    "compare-calibration": (
        "how-to/compare-calibration.md",
        "compare-calibration int8-linears --model my-model --task sst2",
    ),
    "search": ("how-to/search.md", "search int8-attention --model my-model --task sst2 --trials 40"),
    "qat": ("how-to/qat.md", "qat int8-attention-qat --model my-model --task sst2"),
    "finetune": ("how-to/qat.md", "finetune --model bert-base-uncased --task sst2 --seeds 3"),
    "deploy": ("how-to/deploy.md", "deploy runs/a --out my-service"),
    "predict": ("how-to/predict-files.md", "predict runs/a --data reviews.csv --out answers.parquet"),
    "push": ("how-to/other-libraries.md", "push runs/a OWNER/NAME --private"),
    "serve": ("how-to/serve.md", "serve runs/a --port 8000"),
    "export-triton": ("how-to/triton.md", "export-triton runs/a --out model-repository"),
    "study": ("how-to/qat.md", "study bert-int8-attention-qat --model bert-base-uncased --task mrpc"),
}
