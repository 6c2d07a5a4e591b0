"""Options of `serve`."""

from pydantic import Field

from qdqbench.quantize.standalone.server.settings import Settings
from qdqbench.quantize.utils.options import Options


class ServeOptions(Options):
    """Settings of a server."""

    host: str = Field(default=Settings.host, description="Address to listen on.")
    port: int = Field(default=Settings.port, ge=0, le=65535, description="Port; 0: any free one.")
    fronts: int | None = Field(
        default=None, ge=1, le=64, description="Processes that tokenize (default: by the cores)."
    )
    engines: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description="Processes with an engine (default: one for each GPU, on a CPU one).",
    )
    batch_tokens: int = Field(
        default=Settings.batch_tokens,
        ge=512,
        le=65_536,
        description="Maximum tokens per batch of backend cuda.",
    )
    queue: int = Field(
        default=Settings.queue, ge=1, le=16_384, description="Maximum rows a front holds at once."
    )
    timeout: float = Field(
        default=Settings.timeout, ge=0.1, le=600, description="Time limit of a request in seconds."
    )
    max_texts: int = Field(
        default=Settings.max_texts, ge=1, le=1000, description="Maximum texts per request."
    )
    max_characters: int = Field(
        default=Settings.max_characters, ge=1, le=1_000_000, description="Character limit per text."
    )
    max_body_kb: int = Field(default=1024, ge=1, le=16_384, description="Maximum size of a request in KiB.")
    no_fp32: bool = Field(default=False, description="Serve no FP32 model to compare with.")
    watch: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Share of requests of a classification that FP32 answers too, as a metric.",
    )
    dimensions: list[int] = Field(
        default=[], description="Size that embeddings may be cut to, of a model trained for it; repeatable."
    )

    def settings(self) -> Settings:
        """Return them as the server takes them."""
        fields = self.model_dump(exclude={"max_body_kb", "no_fp32"})
        return Settings(**fields, body_bytes=self.max_body_kb << 10)
