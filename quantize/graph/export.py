"""Export to strongly typed ONNX by TorchScript: the one place with exporter flags.

The TorchDynamo exporter fails on ModelOpt's quantizers. Exporting a half model gives FP16 scales, with
which TensorRT-RTX keeps the INT32 sums of per-channel weights as FP16 before it scales them: they overflow.
"""

import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import onnx

from qdqbench.quantize.graph import rewrites
from qdqbench.quantize.graph.index import name_runs, prune
from qdqbench.quantize.graph.precision import constants_to_initializers, drop_noop_casts, halve_table, to_fp16
from qdqbench.quantize.graph.weights import drop_zero_biases, factor_scales, fold_weights
from qdqbench.quantize.models.families.known import family_of
from qdqbench.quantize.models.load import is_large
from qdqbench.quantize.models.rounding import fold_rounding
from qdqbench.quantize.recipe.plan import Plan, list_bias_free_linears
from qdqbench.quantize.recipe.schema import Recipe
from qdqbench.quantize.tasks.kinds.kind import LOGITS
from qdqbench.quantize.utils import files
from qdqbench.quantize.utils.errors import CheckFailed, UserError
from qdqbench.quantize.utils.limits import BackendName, takes_fp32_graph
from qdqbench.quantize.utils.system.quiet import unprinted

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VARYING = ("batch", "length")  # axes; the others have the size that the model gives them
IR_VERSION = 10  # the newest that TensorRT 10 and ONNX Runtime 1.23 both read
WeightForm = Literal["channel", "factored"]
Compute = Literal["fp16", "fp32"]


# A graph in the form that each backend runs best; docs/explanation/why-it-is-fast.md has what each one buys.
FORMS: dict[BackendName, WeightForm] = {
    "tensorrt": "channel",  # it has per-channel epilogues
    # puts a scalar scale into the GEMM and fuses the Mul after it, which measured 1.5x faster
    "tensorrt_rtx": "factored",
    "cuda": "channel",
    "openvino": "channel",
    "onnxruntime": "channel",
}


@dataclass(frozen=True)
class ExportSettings:
    opset: int
    compute: Compute
    weights: WeightForm
    merge_qkv: bool = True  # one scalar for the factored weights of q, k and v, so that an engine merges them
    recipe: str = ""  # its name, for the metadata
    for_gpu: bool = True  # rewritten for what the kernels of TensorRT fuse

    @classmethod
    def of(cls, recipe: Recipe, backend: BackendName, compute: Compute | None = None) -> "ExportSettings":
        """Return a recipe's settings for a backend; but for TensorRT the graph is in FP32."""
        export, for_gpu = recipe.export, not takes_fp32_graph(backend)
        return cls(
            export.opset,
            compute or (recipe.precision.compute if for_gpu else "fp32"),
            FORMS[backend] if export.weight_scales == "auto" else export.weight_scales,
            export.qkv_scales == "shared",
            recipe.name,
            for_gpu,
        )


def trace(
    model: "PreTrainedModel", opset: int, outputs: Mapping[str, tuple[str, ...]] = LOGITS
) -> onnx.ModelProto:
    """Export an FP32 model in eval mode by TorchScript, fake-quantized or not, as an FP32 ONNX graph.

    Inputs are int64 [batch, length]; outputs are float32, with the names and axes in `outputs`.
    UserError: the exporter fails, or writes control flow.
    """
    import torch

    device, inputs = next(model.parameters()).device, list(family_of(model.config).inputs)
    ids = torch.ones(2, 16, dtype=torch.long, device=device)
    with fold_rounding(model), unprinted(), tempfile.TemporaryDirectory(prefix="qdqbench-trace-") as folder:
        path = Path(folder) / "model.onnx"  # torch writes weights next to it if they exceed 2 GiB
        warnings.simplefilter("ignore")  # the exporter's advice on its own deprecation
        try:
            torch.onnx.export(
                model,
                (),
                str(path),
                kwargs=dict.fromkeys(inputs, ids),
                opset_version=opset,
                dynamo=False,
                input_names=inputs,
                output_names=list(outputs),
                do_constant_folding=True,
                dynamic_axes={name: {0: "batch", 1: "length"} for name in inputs}
                | {
                    name: {i: axis for i, axis in enumerate(axes) if axis in VARYING}
                    for name, axes in outputs.items()
                },
            )
        except Exception as error:
            raise UserError(f"ONNX export failed in torch: {type(error).__name__}: {error}") from error
        traced = onnx.load(path)
    if branches := [node.name for node in traced.graph.node if node.op_type in ("If", "Loop", "Scan")]:
        raise UserError(
            f"a {model.config.model_type!r} exports with control flow ({', '.join(branches[:4])}), which no "
            "engine of quantized layers has; give an encoder of another type"
        )
    if is_large(model):
        table: Any = model.get_input_embeddings().weight
        halve_table(traced, tuple(table.shape))
    name_runs(traced.graph, model)
    constants_to_initializers(traced)
    drop_noop_casts(traced)
    prune(traced)
    traced.ir_version = IR_VERSION
    return traced


def finish_graph(
    traced: onnx.ModelProto,
    plan: Plan,
    settings: ExportSettings,
    notes: list[str] | None = None,
    done: dict[str, int] | None = None,
) -> onnx.ModelProto:
    """Type the graph of a traced model: INT8 weights, their form, FP16 with FP32 islands. A new model.

    `notes` takes what the user should know of the graph, `done` how often each rewrite was made.
    CheckFailed: a weight of the plan was not quantized, or a constant does not fit FP16.
    """
    model = onnx.ModelProto()
    model.CopyFrom(traced)
    folded = fold_weights(model)
    # a traced model without quantizers is a twin: nothing to fold
    if folded and (lost := sorted(set(plan.int8) - set(folded))):
        raise CheckFailed(f"the exported graph has no quantized weight for {', '.join(lost)}")
    done = {} if done is None else done
    if folded:
        rewrites.share_scaled_inputs(model)
        done["dropped biases"] = drop_zero_biases(model, list_bias_free_linears(plan))
        done["tanh GELU"] = sum(map(rewrites.is_tanh_gelu, model.graph.node))
    if settings.weights == "factored":
        factor_scales(model, merge=settings.merge_qkv)
    if folded and settings.for_gpu:
        # a copy of q, k and v that is needed anyway costs the same in either order
        straight = bool(plan.attention) and rewrites.has_direct_heads(model)
        joined = rewrites.join_heads(model)
        turned = rewrites.use_sequence_first(model) if straight else 0
        done |= {"joined heads": joined, "tokens first": turned}
        note = rewrites.note_unjoined(plan.family, folded, max(joined, turned))
        if note and notes is not None:
            notes.append(note)
        done["short GELU"] = rewrites.shorten_gelu(model)
    elif folded:
        done["clipped linears"] = rewrites.clip_scaled_linears(model)
    if settings.compute == "fp16":
        to_fp16(model, fp32_modules=plan.fp32)
    prune(model)
    return model


def write_graph(
    traced: onnx.ModelProto, plan: Plan, settings: ExportSettings, path: Path, notes: list[str] | None = None
) -> dict[str, int]:
    """Finish a traced model and save it, quantized or not; return how often each rewrite was made."""
    done: dict[str, int] = {}
    save(finish_graph(traced, plan, settings, notes, done), path, settings.recipe)
    return done


def save(model: onnx.ModelProto, path: Path, recipe: str) -> None:
    """Write a graph atomically, with the recipe's name in its metadata; CheckFailed if it is not valid."""
    onnx.helper.set_model_props(model, {"qdqbench.recipe": recipe})
    data = model.SerializeToString(deterministic=True)
    try:
        onnx.checker.check_model(data, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise CheckFailed(f"the exported graph for {path.name} is not valid ONNX: {error}") from error
    files.write_bytes(path, data)
