"""Settings of a server, which are also the options of `serve`."""

from typing import Literal

from pydantic import Field

from qdqbench.quantize.utils.options import Options

ModelName = Literal["engine", "fp32"]


class Settings(Options):
    """Settings of a server."""

    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port; 0: any free one.")
    workers: int = Field(default=1, ge=1, le=64, description="Worker processes, each with its own engine.")
    max_batch: int = Field(default=32, ge=1, description="Maximum rows per batch.")
    max_wait_ms: float = Field(default=2.0, ge=0, le=1000, description="Time to wait for more rows, in ms.")
    queue: int = Field(default=256, ge=1, le=100_000, description="Maximum rows a worker holds at once.")
    timeout: float = Field(default=10.0, ge=0.1, le=600, description="Time limit of a request in seconds.")
    max_texts: int = Field(default=64, ge=1, le=1000, description="Maximum texts per request.")
    max_characters: int = Field(default=20_000, ge=1, le=1_000_000, description="Character limit per text.")
    max_body_kb: int = Field(default=1024, ge=1, le=16_384, description="Maximum size of a request in KiB.")
    no_fp32: bool = Field(default=False, description="Serve no FP32 model to compare with.")

    @property
    def models(self) -> tuple[ModelName, ...]:
        return ("engine",) if self.no_fp32 else ("engine", "fp32")

    @property
    def body_bytes(self) -> int:
        return self.max_body_kb << 10
