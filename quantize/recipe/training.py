"""How a model is trained: the settings of `finetune`, and the `qat` section of a recipe."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(gt=0)]
Weight = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Rate = Annotated[float, Field(gt=0, lt=1)]


class Training(BaseModel):
    """Optimization by AdamW, and what it is judged on while it runs; the settings of `finetune`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    epochs: Annotated[float, Field(gt=0, le=1000)] = 4
    max_steps: Positive | None = None  # end there, if the epochs go on
    learning_rate: Rate = 5e-5
    batch_size: Positive = 32  # samples of one optimizer step, over all GPUs and accumulated parts
    accumulate: Positive = 1  # parts of a GPU's share of the batch, for memory
    warmup: Fraction = 0.1  # share of the steps
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    weight_decay: Weight = 0.01
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    dropout: Fraction | None = None  # null: the model's own
    precision: Literal["auto", "bf16", "tf32", "fp32"] = "auto"  # auto: bf16 autocast where the GPU has it
    evaluations: Positive = 10  # on the held-out rows, spread over the run
    patience: Positive | None = None  # evaluations without gain that end the run
    holdout: Annotated[float, Field(gt=0, le=0.5)] = 0.1  # share of the train split, 1,000 rows at most
    seed: Annotated[int, Field(ge=0)] = 0


class Distill(BaseModel):
    """Weights of the parts of the loss, which compare with the FP32 model, and with the labels."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    logits: Weight = 1.0  # KL divergence of the answers; squared error for regression
    hidden: Weight = 0.0  # squared error of every layer's output, relative to its power
    labels: Weight = 0.0  # cross entropy; squared error for regression
    temperature: Annotated[float, Field(gt=0)] = 1.0  # of the logits

    @model_validator(mode="after")
    def _some(self) -> "Distill":
        if not (self.logits or self.hidden or self.labels):
            raise ValueError("logits, hidden and labels are all 0, so there is nothing to learn from")
        return self


class Qat(Training):
    """Quantization-aware training after PTQ, with its placement; the `qat` section of a recipe."""

    epochs: Annotated[float, Field(gt=0, le=1000)] = 3
    learning_rate: Rate = 2e-5
    precision: Literal["auto", "bf16", "tf32", "fp32"] = "tf32"  # bf16 rounds as coarsely as INT8
    dropout: Fraction | None = 0.0  # the student starts as a near copy of its teacher
    amax: Literal["frozen", "learnt"] = "frozen"
    amax_learning_rate: Rate = 1e-3  # relative to amax
    distill: Distill = Distill()
