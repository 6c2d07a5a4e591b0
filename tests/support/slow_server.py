"""A server whose model takes longer to load than any test waits: `python -m tests.support.slow_server`."""

import time
from typing import Any

from qdqbench.quantize.deployment.server.server import serve
from qdqbench.quantize.deployment.server.settings import Settings


class SlowServed:
    """Stands for a run: larger than a pipe holds, and never loaded."""

    weight = b"x" * (1 << 18)

    def __init__(self) -> None:
        self.held = self.weight

    def open_model(self, name: str) -> Any:
        time.sleep(600)


def main() -> None:
    served: Any = SlowServed()
    print("starting", flush=True)
    serve(served, Settings(port=0, workers=2), lambda *_: None)


if __name__ == "__main__":
    main()
