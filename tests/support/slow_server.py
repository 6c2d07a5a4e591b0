"""A server whose model takes longer to load than any test waits: `python -m tests.support.slow_server`."""

from qdqbench.quantize.standalone.server.server import serve
from qdqbench.quantize.standalone.server.settings import Settings

from .fake_served import fake_served


def main():
    print("starting", flush=True)
    serve(fake_served(loads=600.0), Settings(port=0, fronts=2, engines=2), lambda *_: None)


if __name__ == "__main__":
    main()
