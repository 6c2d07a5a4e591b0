"""The options of a server, of the command line too."""

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

ModelName = Literal["engine", "fp32"]


@dataclass(frozen=True)
class Settings:
    """How a run is served."""

    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000
    workers: Annotated[int, typer.Option(min=1, max=64, help="Processes, each with its engine.")] = 1
    max_batch: Annotated[int, typer.Option(min=1, help="Rows of a batch at most.")] = 32
    max_wait_ms: Annotated[float, typer.Option(min=0, max=1000, help="Wait for more rows.")] = 2.0
    queue: Annotated[int, typer.Option(min=1, max=100_000, help="Rows of a worker at once.")] = 256
    timeout: Annotated[float, typer.Option(min=0.1, max=600, help="Seconds of a request.")] = 10.0
    max_texts: Annotated[int, typer.Option(min=1, max=1000, help="Texts of a request.")] = 64
    max_characters: Annotated[int, typer.Option(min=1, max=1_000_000, help="Of a text.")] = 20_000
    max_body_kb: Annotated[int, typer.Option(min=1, max=16_384, help="Of a request, KiB.")] = 1024
    no_fp32: Annotated[bool, typer.Option("--no-fp32", help="Without the FP32 model to compare with.")] = (
        False
    )

    @property
    def models(self) -> tuple[ModelName, ...]:
        """Names of the models that are served."""
        return ("engine",) if self.no_fp32 else ("engine", "fp32")

    @property
    def body_bytes(self) -> int:
        """Most bytes of a body."""
        return self.max_body_kb << 10
