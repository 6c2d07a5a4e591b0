"""Options of `predict` and `serve`."""

from pathlib import Path

from qdqbench.quantize.standalone.server.settings import Settings
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


class ServeOptions(Options):
    """Settings of a server."""

    host: str = field("Address to listen on.", default=Settings.host)
    port: int = field("Port; 0: any free one.", default=Settings.port, ge=0, le=65535)
    fronts: int | None = field("Processes that tokenize (default: by the cores).", default=None, ge=1, le=64)
    engines: int | None = field(
        "Processes with an engine (default: one for each GPU, on a CPU one).", default=None, ge=1, le=64
    )
    batch_tokens: int = field(
        "Maximum tokens per batch of backend cuda.", default=Settings.batch_tokens, ge=512, le=65_536
    )
    queue: int = field("Maximum rows a front holds at once.", default=Settings.queue, ge=1, le=16_384)
    timeout: float = field("Time limit of a request in seconds.", default=Settings.timeout, ge=0.1, le=600)
    max_texts: int = field("Maximum texts per request.", default=Settings.max_texts, ge=1, le=1000)
    max_characters: int = field(
        "Character limit per text.", default=Settings.max_characters, ge=1, le=1_000_000
    )
    max_body_kb: int = field("Maximum size of a request in KiB.", default=1024, ge=1, le=16_384)
    no_fp32: bool = field("Serve no FP32 model to compare with.", default=False)
    watch: float = field(
        "Share of requests of a classification that FP32 answers too, as a metric.", default=0.0, ge=0, le=1
    )
    dimensions: list[int] = field(
        "Size that embeddings may be cut to, of a model trained for it; repeatable.", default=[]
    )

    def settings(self) -> Settings:
        """Return them as the server takes them."""
        fields = self.model_dump(exclude={"max_body_kb", "no_fp32"})
        return Settings(**fields, body_bytes=self.max_body_kb << 10)
