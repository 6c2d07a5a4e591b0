"""A real Triton on a model repository, and the exported clients that ask it: FOLDER [TEXT...]

Run by a Python that has nvidia-pytriton, tritonclient, NumPy 1 and what the model needs: the Python backend
of this Triton (24.10) garbles texts with NumPy 2.
"""

import socket
import subprocess
import sys
import time
from pathlib import Path

from pytriton.triton import Triton, TritonConfig


def main():
    folder, *texts = sys.argv[1:]
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = {"http": one.getsockname()[1], "grpc": other.getsockname()[1]}
    config = TritonConfig(
        model_repository=Path(folder) / "models",
        http_port=ports["http"],
        grpc_port=ports["grpc"],
        allow_metrics=False,
        http_address="127.0.0.1",
        grpc_address="127.0.0.1",
    )
    triton = Triton(config=config)
    triton.run()
    try:
        time.sleep(1)
        if not texts:  # for a load program
            print(f"http://127.0.0.1:{ports['http']}", flush=True)
            time.sleep(600)
        for protocol, port in ports.items():
            client = [
                sys.executable,
                Path(folder) / f"client_{protocol}.py",
                "--url",
                f"127.0.0.1:{port}",
                *texts,
            ]
            print(
                protocol,
                subprocess.run(client, capture_output=True, text=True, check=True).stdout,
                flush=True,
            )
    finally:
        triton.stop()


if __name__ == "__main__":
    main()
