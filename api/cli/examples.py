"""An example and a page for each command: they end its help, and docs/reference/cli.md has them too."""

PAGES = "docs"  # in a checkout or an sdist
EXAMPLES: dict[str, tuple[str, str]] = {  # by command: its page in `PAGES`, and the example after `qdqbench`
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


def epilog(command: str) -> str:
    """Return the end of a command's help."""
    page, example = EXAMPLES[command]
    return f"Example: qdqbench {example}\n\nMore: {PAGES}/{page}"
