import pytest

pytest.importorskip("starlette", reason="needs starlette: pip install 'qdqbench[serve]'")
pytest.importorskip("prometheus_client", reason="needs prometheus-client: pip install 'qdqbench[serve]'")
pytest.importorskip("uvicorn", reason="needs uvicorn: pip install 'qdqbench[serve]'")
