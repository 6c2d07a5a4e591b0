import pytest

pytest.importorskip("fastapi", reason="needs fastapi: pip install 'qdqbench[serve]'")
pytest.importorskip("prometheus_client", reason="needs prometheus-client: pip install 'qdqbench[serve]'")
pytest.importorskip("uvicorn", reason="needs uvicorn: pip install 'qdqbench[serve]'")
