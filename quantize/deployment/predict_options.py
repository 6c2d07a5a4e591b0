"""Options of `predict`."""

from pathlib import Path

from qdqbench.quantize.utils.options import Options
from qdqbench.quantize.utils.schema import field


class PredictOptions(Options):
    """Answer files of any number of texts with a run's engine, in order; a killed call resumes.

    CSV, JSON lines, Parquet, text, a folder of them, or a folder that datasets saved.
    """

    run: Path = field("Run directory.", json_schema_extra={"positional": True})
    data: Path = field("File or folder of rows.")
    out: Path = field("Parquet file to write: the rows with their answers.")
    text_column: list[str] | None = field(
        "Column of texts; repeatable (default: the task's, or the only one of texts).", default=None
    )
    keep: list[str] | None = field("Column to pass on; repeatable (default: all).", default=None)
    limit: int | None = field("Answer this many rows only.", default=None, ge=1)
    prompt: str | None = field(
        "Embeddings: before each text (default: as the run was evaluated).", default=None
    )
    processes: int | None = field(
        "Processes, each with an engine (default: one for each GPU, on a CPU one).",
        default=None,
        ge=1,
        le=1024,
    )
    threads: int | None = field(
        "Threads of each engine on a CPU (default: its share of the cores).", default=None, ge=1
    )
    batch: int | None = field(
        "Most rows of a batch that is padded (default: 32 on a CPU, else the profile's).", default=None, ge=1
    )
    overwrite: bool = field("Replace the file, and parts of a killed call.", default=False)
