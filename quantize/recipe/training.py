"""How a model is trained: the settings of `finetune`, and the `qat` section of a recipe."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from qdqbench.quantize.utils.schema import Frozen, Positive

Weight = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Rate = Annotated[float, Field(gt=0, lt=1)]


class Training(Frozen):
    """Optimization by AdamW, and what it is judged on while it runs; the settings of `finetune`."""

    epochs: Annotated[float, Field(gt=0, le=1000)] = Field(
        default=4, description="Passes over the training rows."
    )
    max_steps: Positive | None = Field(
        default=None, description="Steps that end the epochs early; null: none."
    )
    learning_rate: Rate = Field(default=5e-5, description="Of AdamW, after warm-up.")
    batch_size: Positive = Field(
        default=32, description="Samples of one optimizer step, over all GPUs and accumulated parts."
    )
    gradient_accumulation_steps: Positive = Field(
        default=1, description="Parts that a GPU's share of the batch is split into."
    )
    warmup_ratio: Fraction = Field(
        default=0.1, description="Share of the steps in which the learning rate rises."
    )
    lr_scheduler_type: Literal["linear", "cosine", "constant"] = Field(
        default="linear", description="Course of the learning rate after warm-up."
    )
    weight_decay: Weight = Field(default=0.01, description="AdamW weight decay (weight matrices only).")
    max_grad_norm: Annotated[float, Field(gt=0)] = Field(
        default=1.0, description="Gradients are clipped to it."
    )
    dropout: Fraction | None = Field(
        default=None, description="Of hidden states and attention; null: the model's own."
    )
    precision: Literal["auto", "bf16", "tf32", "fp32"] = Field(
        default="auto",
        description="Arithmetic: bf16 (autocast), tf32 (where the GPU has it, else fp32), fp32, or auto "
        "(bf16 where the GPU has it). bf16 rounds as coarsely as INT8.",
    )
    num_evals: Positive = Field(
        default=10,
        description="Evaluations on the held-out rows, spread over the run, each with a checkpoint.",
    )
    patience: Positive | None = Field(
        default=None, description="Evaluations without gain that end the run; null: none do."
    )
    holdout: Annotated[float, Field(gt=0, le=0.5)] = Field(
        default=0.1, description="Share of the train split to judge on, 1,000 rows at most."
    )
    seed: Annotated[int, Field(ge=0)] = Field(
        default=0, description="Of head, held-out rows, order and dropout."
    )


class Distill(Frozen):
    """Weights of the parts of the loss, which compare with the FP32 model, and with the labels."""

    logits: Weight = Field(
        default=1.0, description="Weight of the KL divergence of the answers; squared error for regression."
    )
    hidden: Weight = Field(
        default=0.0, description="Weight of the squared error of every layer's output, relative to its power."
    )
    labels: Weight = Field(
        default=0.0, description="Weight of the cross entropy with the labels; squared error for regression."
    )
    temperature: Annotated[float, Field(gt=0)] = Field(default=1.0, description="Divides the logits.")

    @model_validator(mode="after")
    def _some(self) -> "Distill":
        if not (self.logits or self.hidden or self.labels):
            raise ValueError("logits, hidden and labels are all 0, so there is nothing to learn from")
        return self


class Qat(Training):
    """Quantization-aware training after PTQ, with its placement; the `qat` section of a recipe."""

    epochs: Annotated[float, Field(gt=0, le=1000)] = Field(
        default=3, description="Passes over the training rows."
    )
    learning_rate: Rate = Field(default=2e-5, description="Of AdamW, after warm-up.")
    precision: Literal["auto", "bf16", "tf32", "fp32"] = Field(
        default="tf32",
        description="Arithmetic: tf32 (where the GPU has it, else fp32), fp32, bf16 (autocast), or auto "
        "(bf16 where the GPU has it). bf16 rounds as coarsely as INT8.",
    )
    dropout: Fraction | None = Field(
        default=0.0,
        description="Of hidden states and attention; null: the model's own. The student starts as a "
        "near copy of its teacher.",
    )
    amax: Literal["frozen", "learned"] = Field(
        default="frozen",
        description="frozen: the calibrated scales stay; learned: the ratio of each amax to its calibrated "
        "value is trained (LSQ, arXiv 1902.08153).",
    )
    amax_learning_rate: Rate = Field(default=1e-3, description="Of learned amax, relative to its value.")
    distill: Distill = Field(default=Distill(), description="Parts of the loss.")
