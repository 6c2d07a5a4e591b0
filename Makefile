PYTHON ?= python3

.PHONY: test lint types bindings benchmark clean

test: lint types ## everything that CI runs
	pytest

lint:
	ruff check .
	ruff format --check .

types: ## links let mypy see the mapped folders as one package
	mkdir -p build/types/qdqbench
	for name in quantize eval recipes; do ln -sfn ../../../$$name build/types/qdqbench/$$name; done
	mypy

bindings: ## TensorRT 10 and 11 bindings for tests/unit/test_trt_bindings.py
	tests/fetch_bindings.sh

clean:
	rm -rf build .mypy_cache .ruff_cache .pytest_cache .hypothesis
