"""What the processes of `prebuild` do: compile a model for some shapes, or build an engine with its kernels.

    python -m qdqbench.eval.bench.prebuild_worker compile RUN MODE SHAPES
    python -m qdqbench.eval.bench.prebuild_worker engine SPEC
    python -m qdqbench.eval.bench.prebuild_worker export FOLDER MODEL RECIPE SEED LONGEST

Prints a line of JSON, {"error": ""}.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from qdqbench.eval.bench import peers
from qdqbench.eval.bench.gpu import EngineSpec, build_engine, marker
from qdqbench.eval.bench.target import model_target, recipe_for
from qdqbench.quantize.engine.runtime.engine import Engine
from qdqbench.quantize.models.families.known import family_named
from qdqbench.quantize.pipeline.session import Session, read_config


def compile_shapes(run: Path, mode: str, pairs: Sequence[tuple[int, int]]) -> None:
    """Compile a run's model in FP16, as a bench does, for each (batch, length)."""
    import torch

    session = Session(read_config(run), run)
    inputs = family_named(session.recipe.model.family).inputs
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = peers.sdpa_model(session.new_model(), "fp16", device)
    with peers.tf32_allowed():
        for batch, length in pairs:
            forward = peers.compiled_forward(model, mode, dynamic=False)
            with torch.inference_mode():
                forward(**peers.example(inputs, batch, length, device))
            torch.compiler.reset()
            path = marker(run / "bench", mode, (batch, length))
            path.parent.mkdir(exist_ok=True)
            path.touch()


def export_recipe(folder: Path, model: str, recipe: str, seed: int, longest: int) -> None:
    """Export a model by a recipe, as the bench does that takes it up afterwards."""
    model_target(model, recipe_for(model, recipe), folder, seed, longest)


def prepare_engine(spec: EngineSpec) -> None:
    """Build an engine, and run every shape once, so that its runtime cache holds their kernels."""
    build_engine(spec)
    with Engine(spec.engine, spec.onnx, runtime_cache=spec.cache) as loaded:
        for batch, length in spec.shapes:
            loaded.bind(batch, length, graph=False).close()


def main(arguments: Sequence[str]) -> None:
    """Do one task."""
    error, what = "", arguments[0]
    try:
        if what == "compile":
            compile_shapes(Path(arguments[1]), arguments[2], json.loads(arguments[3]))
        elif what == "export":
            model, recipe, seed, longest = arguments[2:]
            export_recipe(Path(arguments[1]), model, recipe, int(seed), int(longest))
        else:
            prepare_engine(EngineSpec.model_validate_json(arguments[1]))
    except Exception as caught:  # compilers fail in a hundred ways; the bench says which
        error = " ".join(f"{caught}".split())[:300] or type(caught).__name__
    print(json.dumps({"error": error}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
