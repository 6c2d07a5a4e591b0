"""How a model is trained: the settings of `finetune`, and the `qat` section of a recipe."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from qdqbench.quantize.utils.schema import Frozen, Positive, field

Weight = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Rate = Annotated[float, Field(gt=0, lt=1)]


class Training(Frozen):
    """Optimization by AdamW, and what it is judged on while it runs; the settings of `finetune`."""

    epochs: Annotated[float, Field(gt=0, le=1000)] = field("Passes over the training rows.", 4)
    max_steps: Positive | None = field("Steps that end the epochs early; null: none.")
    learning_rate: Rate = field("Of AdamW, after warm-up.", 5e-5)
    batch_size: Positive = field("Samples of one optimizer step, over all GPUs and accumulated parts.", 32)
    gradient_accumulation_steps: Positive = field("Parts that a GPU's share of the batch is split into.", 1)
    warmup_ratio: Fraction = field("Share of the steps in which the learning rate rises.", 0.1)
    lr_scheduler_type: Literal["linear", "cosine", "constant"] = field(
        "Course of the learning rate after warm-up.", "linear"
    )
    weight_decay: Weight = field("AdamW weight decay (weight matrices only).", 0.01)
    max_grad_norm: Annotated[float, Field(gt=0)] = field("Gradients are clipped to it.", 1.0)
    dropout: Fraction | None = field("Of hidden states and attention; null: the model's own.")
    precision: Literal["auto", "bf16", "tf32", "fp32"] = field(
        "Arithmetic: bf16 (autocast), tf32 (where the GPU has it, else fp32), fp32, or auto (bf16 where "
        "the GPU has it). bf16 rounds as coarsely as INT8.",
        "auto",
    )
    num_evals: Positive = field("Evaluations on the held-out rows over the run, each with a checkpoint.", 10)
    patience: Positive | None = field("Evaluations without gain that end the run; null: none do.")
    holdout: float = field("Share of the train split to judge on, 1,000 rows at most.", 0.1, gt=0, le=0.5)
    seed: Annotated[int, Field(ge=0)] = field("Of head, held-out rows, order and dropout.", 0)


class Distill(Frozen):
    """Weights of the parts of the loss, which compare with the FP32 model, and with the labels."""

    logits: Weight = field("Weight of the KL divergence of the answers; squared error for regression.", 1.0)
    hidden: Weight = field("Weight of the squared error of every layer's output, relative to its power.", 0.0)
    labels: Weight = field("Weight of the cross entropy with the labels; squared error for regression.", 0.0)
    temperature: Annotated[float, Field(gt=0)] = field("Divides the logits.", 1.0)

    @model_validator(mode="after")
    def _some(self) -> "Distill":
        if not (self.logits or self.hidden or self.labels):
            raise ValueError("logits, hidden and labels are all 0, so there is nothing to learn from")
        return self


class Qat(Training):
    """Quantization-aware training after PTQ, with its placement; the `qat` section of a recipe."""

    epochs: Annotated[float, Field(gt=0, le=1000)] = field("Passes over the training rows.", 3)
    learning_rate: Rate = field("Of AdamW, after warm-up.", 2e-5)
    precision: Literal["auto", "bf16", "tf32", "fp32"] = field(
        "Arithmetic: tf32 (where the GPU has it, else fp32), fp32, bf16 (autocast), or auto (bf16 where "
        "the GPU has it). bf16 rounds as coarsely as INT8.",
        "tf32",
    )
    dropout: Fraction | None = field(
        "Of hidden states and attention; null: the model's. The student is a near copy of its teacher.", 0.0
    )
    amax: Literal["frozen", "learned"] = field(
        "frozen: calibrated scales; learned: their ratio is trained (LSQ, arXiv 1902.08153).", "frozen"
    )
    amax_learning_rate: Rate = field("Of learned amax, relative to its value.", 1e-3)
    distill: Distill = field("Parts of the loss.", Distill())
