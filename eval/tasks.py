"""The nine GLUE tasks, and any other text-classification task by naming its columns."""

from pydantic import BaseModel, ConfigDict


class Task(BaseModel):
    """What a task's data looks like and how it is scored."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    text_columns: tuple[str, ...]  # one sentence or a pair
    label_column: str = "label"
    num_labels: int  # 1: regression
    metrics: tuple[str, ...]  # the first is the primary one
    train_split: str = "train"
    eval_splits: tuple[str, ...] = ("validation",)  # MNLI has two, scored apart
