"""The stages of a run: each reads files and the configuration, and writes files into the run directory."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from qdqbench.quantize import files
from qdqbench.quantize.pipeline import Stage
from qdqbench.quantize.session import Session

PARITY_SAMPLES, PARITY_BATCH = 64, 16
FP32, FP16, INT8 = "model.fp32.onnx", "model.fp16.onnx", "model.int8.onnx"


def embedded(session: Session) -> list[Path]:
    """Generate the default task and train its small BERT."""
    from qdqbench.eval.embedded import write_embedded

    run = write_embedded(
        session.folder / "embedded",
        seed=session.config.seed,
        progress=lambda fraction: session.progress(round(1000 * fraction), 1000),
    )
    return sorted(path for path in run.model_dir.parent.rglob("*") if path.is_file())


def baseline(session: Session) -> list[Path]:
    """Evaluate the FP32 model."""
    from qdqbench.eval.runners import torch_runner

    return [_evaluate(session, "fp32", torch_runner(session.fp32_model))]


def quantize(session: Session) -> list[Path]:
    """Calibrate and record every amax."""
    from qdqbench.eval.data import equal_length_batches, iter_encoded
    from qdqbench.quantize import ptq

    settings = session.recipe.calibration
    plan = session.plan
    split = session.split(settings.split, limit=settings.samples, seed=settings.seed)
    samples = iter_encoded(split, session.config.task, session.tokenizer, session.recipe.export.max_length)
    batches = equal_length_batches(samples, settings.batch_size, pad_id=session.pad_id)
    total, seen = len(split.dataset), 0

    def progress(count: int) -> None:
        nonlocal seen
        seen += count
        session.progress(seen, total)

    model = session.new_model()
    record = ptq.calibrate(model, plan, (batch for _, batch in batches), settings, progress)
    record.data |= {"source": split.source, "split": settings.split, "fingerprint": split.fingerprint}
    session.notes += record.notes
    path = session.folder / "calibration.json"
    ptq.write_record(path, record)
    return [path]


def fake_quant(session: Session) -> list[Path]:
    """Evaluate the fake-quant model."""
    from qdqbench.eval.runners import torch_runner

    return [_evaluate(session, "fake_quant", torch_runner(session.fake_quant_model))]


def export(session: Session) -> list[Path]:
    """Write the FP32 and FP16 twins, and the INT8 graph when the recipe quantizes."""
    from qdqbench.quantize import export as exporter
    from qdqbench.quantize.export import ExportSettings, save

    recipe, plan = session.recipe, session.plan
    form = weight_form(session)
    twin = exporter.trace(session.fp32_model, recipe.export.opset)
    jobs = [(twin, "fp32", FP32), (twin, "fp16", FP16)]
    if recipe.quantizes:
        jobs.append(
            (exporter.trace(session.fake_quant_model, recipe.export.opset), recipe.precision.compute, INT8)
        )
    paths = []
    for number, (traced, compute, name) in enumerate(jobs):
        settings = ExportSettings(recipe.export.opset, compute, form)  # type: ignore[arg-type]
        save(exporter.finish(traced, plan, settings), session.folder / name, recipe.name)
        paths.append(session.folder / name)
        session.progress(number + 1, len(jobs))
    return paths


def check(session: Session) -> list[Path]:
    """Check the graph that will be built, against the recipe."""
    from qdqbench.quantize.check import check_file, to_json

    report = check_file(graph_path(session), expected_quantized=expected_modules(session))
    path = session.folder / "check.json"
    files.write_json(path, to_json(report))
    return [path]


def parity(session: Session) -> list[Path]:
    """Compare ONNX Runtime with the fake-quant model, layer by layer, on padded batches."""
    import onnx

    from qdqbench.eval.parity import compare_layers

    path = session.folder / "parity.json"
    result = compare_layers(
        onnx.load(graph_path(session)), session.fake_quant_model, _parity_batches(session)
    )
    files.write_json(path, result.model_dump(mode="json"))
    return [path]


def onnxruntime(session: Session) -> list[Path]:
    """Evaluate the exported graph in ONNX Runtime."""
    from qdqbench.eval.runners import onnxruntime_runner

    return [_evaluate(session, "onnxruntime", onnxruntime_runner(graph_path(session)))]


def build(session: Session) -> list[Path]:
    """Build the engine and prove its INT8 layers, or record why there is none."""
    from qdqbench.quantize.build import build as build_engine
    from qdqbench.quantize.build import sidecar_path
    from qdqbench.quantize.errors import MissingDevice
    from qdqbench.quantize.trt import Profile

    engine, shapes = session.recipe.engine, session.recipe.engine.shapes
    folder, record = session.folder / "engine", session.folder / "build.json"
    path = folder / graph_path(session).with_suffix(".engine").name
    low, opt, high = zip(shapes.batch, shapes.length, strict=True)
    try:
        result = build_engine(
            graph_path(session),
            path,
            backend=engine.backend,
            profiles=[Profile(min=low, opt=opt, max=high)],
            expected_gemms=expected_gemms(session),
            expected_attention=len(session.plan.attention),
            compute_capability=engine.compute_capability,
            layers_path=session.folder / "layers.json",
            progress=lambda _, fraction: session.progress(round(1000 * fraction), 1000),
        )
    except MissingDevice as error:
        files.write_json(record, {"skipped": str(error)})
        return [record]
    files.write_json(record, result.model_dump(mode="json"))
    return [record, path, sidecar_path(path), session.folder / "layers.json"]


def engine(session: Session) -> list[Path]:
    """Evaluate the engine where a GPU runs it, or record why not."""
    from qdqbench.quantize.engine_run import EngineRunner
    from qdqbench.quantize.gpu import find_gpu

    record = session.folder / "engine.json"
    built = files.read_json(session.folder / "build.json")
    gpu = find_gpu()
    if "skipped" in built:
        reason = f"no engine was built: {built['skipped']}"
    elif gpu is None:
        reason = "no GPU here to run it on"
    else:
        path = session.folder / "engine" / built["file"]
        with EngineRunner(path, graph_path(session)) as runner:
            logits = _evaluate(
                session, "engine", runner, batch_size=min(session.config.batch_size, runner.max_batch)
            )
        files.write_json(record, {"detail": f"{built['backend']} {built['version']} on {gpu.name}"})
        return [record, logits]
    files.write_json(record, {"skipped": reason})
    return [record]


def graph_path(session: Session) -> Path:
    """The graph that the recipe is about."""
    if session.recipe.quantizes:
        return session.folder / INT8
    return session.folder / (FP16 if session.recipe.precision.compute == "fp16" else FP32)


def weight_form(session: Session) -> Any:
    """Form of per-channel weights: the recipe's, or the default of the backend that will build."""
    from qdqbench.quantize.export import default_weight_form
    from qdqbench.quantize.trt import preferred_backend

    asked = session.recipe.export.weights
    return default_weight_form(preferred_backend(session.recipe.engine.backend)) if asked == "auto" else asked


def expected_modules(session: Session) -> set[str]:
    """Modules whose MatMuls must be in INT8."""
    return set(session.plan.int8) | set(session.plan.attention)


def expected_gemms(session: Session) -> list[str]:
    """ONNX MatMul and Gemm nodes that must run in INT8."""
    from qdqbench.quantize.build import gemm_names
    from qdqbench.quantize.graph import module_of

    modules = expected_modules(session)
    return [name for name in gemm_names(graph_path(session)) if module_of(name) in modules]


def _evaluate(session: Session, stage: str, runner: Any, batch_size: int | None = None) -> Path:
    """Write logits and labels of every evaluation split as arrays."""
    from qdqbench.eval.runners import predict

    total, seen = sum(len(encoded.labels) for _, encoded in session.eval_splits.values()), 0

    def progress(count: int) -> None:
        nonlocal seen
        seen += count
        session.progress(seen, total)

    arrays: dict[str, Any] = {}
    for name, (_, encoded) in session.eval_splits.items():
        arrays[f"{name}.logits"] = predict(
            runner,
            encoded,
            pad_id=session.pad_id,
            batch_size=batch_size or session.config.batch_size,
            stage=stage,
            progress=progress,
        )
        arrays[f"{name}.labels"] = encoded.labels
    path = session.folder / "logits" / f"{stage}.npz"
    with files.atomic_path(path) as temporary, temporary.open("wb") as stream:
        np.savez(stream, **arrays)
    return path


def _parity_batches(session: Session) -> Iterator[dict[str, Any]]:
    """A seeded draw in random order, so that the batches are padded."""
    from qdqbench.eval.data import pad

    _, encoded = next(iter(session.eval_splits.values()))
    count = len(encoded.labels)
    order = np.random.default_rng(session.config.seed).permutation(count)[:PARITY_SAMPLES]
    for start in range(0, len(order), PARITY_BATCH):
        session.progress(start, len(order))
        rows = order[start : start + PARITY_BATCH].tolist()
        yield pad(
            [(row, encoded.input_ids[row], encoded.token_type_ids[row]) for row in rows], session.pad_id
        )[1]


def _model(session: Session) -> Any:
    return [session.model_sha256, session.config.task.model_dump(), session.recipe.export.max_length]


def _evaluation(session: Session) -> Any:
    from qdqbench.eval.sources import source_fingerprint

    task = session.config.task
    data = [source_fingerprint(task, session.data_source, split) for split in task.eval_splits]
    return [_model(session), data, session.config.limit, session.config.batch_size]


def _placement(session: Session) -> Any:
    recipe = session.recipe
    return [_model(session), [rule.model_dump() for rule in recipe.rules], recipe.attention]


def _calibration(session: Session) -> Any:
    from qdqbench.eval.sources import source_fingerprint

    settings = session.recipe.calibration
    data = source_fingerprint(session.config.task, session.data_source, settings.split)
    return [_placement(session), data, settings.model_dump()]


def _exported(session: Session) -> Any:
    recipe = session.recipe
    return [
        _placement(session),
        recipe.export.model_dump(),
        recipe.precision.model_dump(),
        weight_form(session),
        recipe.name,
    ]


def _built(session: Session) -> Any:
    from qdqbench.quantize.gpu import find_gpu
    from qdqbench.quantize.trt import available_backends

    return [_placement(session), session.recipe.engine.model_dump(), available_backends(), str(find_gpu())]


def stages(session: Session) -> dict[str, Stage]:
    """The stages of this run, in order: the embedded default trains first, a twin is not quantized."""
    first = () if session.config.model else ("embedded",)
    quantized = session.recipe.quantizes
    calibrated = (*first, "quantize") if quantized else first
    listed = [
        Stage("baseline", baseline, first, _evaluation),
        Stage("export", export, calibrated, _exported),
        Stage("check", check, ("export",), _placement),
        Stage("onnxruntime", onnxruntime, (*first, "export"), _evaluation),
        Stage("build", build, ("export",), _built),
        Stage("engine", engine, (*first, "export", "build"), lambda s: [_evaluation(s), _built(s)]),
    ]
    if quantized:
        listed[1:1] = [
            Stage("quantize", quantize, first, _calibration),
            Stage("fake_quant", fake_quant, calibrated, _evaluation),
        ]
        position = next(i for i, stage in enumerate(listed) if stage.name == "check") + 1
        drawn = Stage("parity", parity, (*calibrated, "export"), lambda s: [_evaluation(s), s.config.seed])
        listed.insert(position, drawn)
    if first:
        listed.insert(0, Stage("embedded", embedded, (), lambda s: s.config.seed))
    return {stage.name: stage for stage in listed}
