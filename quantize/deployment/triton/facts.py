"""What Triton must be told of a run: tensors, lengths, batches, texts and labels."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from qdqbench.quantize.deployment.asked import read_asked
from qdqbench.quantize.engine.profiles import LENGTH_STEP, Profile
from qdqbench.quantize.pipeline.session import Session
from qdqbench.quantize.tasks.types.classification import CLASSIFICATION
from qdqbench.quantize.utils.errors import UserError

# what the tokenizer tells beside tokens, by the name of the task's kind
EXTRAS = {"token classification": "WORDS", "question answering": "SPANS"}
_TYPES = {
    onnx.TensorProto.FLOAT: "TYPE_FP32",
    onnx.TensorProto.FLOAT16: "TYPE_FP16",
    onnx.TensorProto.INT64: "TYPE_INT64",
    onnx.TensorProto.INT32: "TYPE_INT32",
}


@dataclass(frozen=True)
class Tensor:
    """An input or output as config.pbtxt has it, without the batch."""

    name: str
    type: str
    dims: tuple[int, ...]  # -1: free


@dataclass(frozen=True)
class Facts:
    """Of one run."""

    tokens: list[Tensor]  # inputs of the graph
    outputs: list[Tensor]  # of the graph
    texts: list[str]  # inputs of the tokenizer
    extras: list[Tensor]  # more outputs of the tokenizer
    labels: list[str]  # of a classifier's output
    words: bool  # texts are words between spaces
    truncation: str  # strategy of `tokenizers`
    pad_id: int
    profiles: list[Profile]
    lengths: list[int]  # that texts are padded to
    max_batch: int  # that the profiles take at each of them


def read_facts(session: Session, graph: Path, profiles: Sequence[Profile]) -> Facts:
    """Facts of a run's graph.

    Raises:
        UserError: the profiles take no single row.
    """
    kind = session.config.task.kind
    read = onnx.load(graph, load_external_data=False).graph
    longest = min(session.recipe.export.max_length, max(profile.max[1] for profile in profiles))
    sizes = dict[int, int]()  # most rows of each length
    for wanted in range(LENGTH_STEP, longest + LENGTH_STEP, LENGTH_STEP):
        length = max(min(wanted, longest), min(profile.min[1] for profile in profiles))
        if rows := _most_rows(profiles, length):
            sizes[length] = rows
    if not sizes:
        raise UserError(
            "no profile of the engine takes a batch of one row, and Triton pads no batches; set the smallest "
            "batch of engine.shapes to 1 and build again"
        )
    asked = read_asked(session)
    extra = EXTRAS.get(kind.name)
    return Facts(
        tokens=[_tensor(value) for value in read.input],
        outputs=[_tensor(value) for value in read.output],
        texts=["TEXT", "TEXT_PAIR"][: len(asked.texts)],
        extras=[Tensor(extra, "TYPE_INT64", (-1, 2) if extra == "SPANS" else (-1,))] if extra else [],
        labels=[re.sub(r"\s+", " ", name) for name in asked.labels if kind is CLASSIFICATION],
        words=asked.words,
        truncation=asked.truncation,
        pad_id=session.pad_id,
        profiles=[*profiles],
        lengths=[*sizes],
        max_batch=min(sizes.values()),
    )


def _most_rows(profiles: Sequence[Profile], length: int) -> int:
    """The most rows of this length such that some profile takes each batch up to them."""
    most = 0
    for profile in sorted(profiles, key=lambda each: each.min[0]):
        if profile.min[1] <= length <= profile.max[1] and profile.min[0] <= most + 1:
            most = max(most, profile.max[0])
    return most


def _tensor(value: Any) -> Tensor:
    shape = value.type.tensor_type.shape.dim[1:]
    dims = tuple(-1 if axis.dim_param else int(axis.dim_value) for axis in shape)
    return Tensor(value.name, _TYPES[value.type.tensor_type.elem_type], dims)
