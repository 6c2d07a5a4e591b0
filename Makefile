PYTHON ?= python3

.PHONY: test lint types docs bindings clean

test: ## everything that CI runs, in .venv
	$(PYTHON) dev.py test

lint: ## in the active environment
	ruff check .
	ruff format --check .

types:
	python tools/check_types.py

docs: ## the site, in build/docs; needs pip install -e '.[docs]'
	zensical build --strict

bindings: ## TensorRT 10 and 11 bindings for tests/unit/engine/test_backend_bindings.py
	tools/fetch_bindings.sh

clean:
	rm -rf build .mypy_cache .ruff_cache .pytest_cache .hypothesis
