#!/bin/sh
# Unpack the Python bindings of TensorRT 10 and 11 (without their libraries) into .bindings/VERSION, for
# tests/unit/engine/test_backend_bindings.py. The locks in tests/bindings have the versions and the hashes of their files;
# `echo NAME==VERSION | uv pip compile - --no-deps --universal --generate-hashes` makes one.
# Takes the interpreter as an argument: the wheels are per Python version.
set -eu
cd "$(dirname "$0")/.."
python=${1:-python}
pinned="--quiet --no-deps --only-binary :all: --require-hashes --requirement"
tag=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
for lock in tests/bindings/1*.lock; do
    target=.bindings/$(basename "$lock" .lock)
    if grep -qs "^Tag: $tag-" "$target"/*.dist-info/WHEEL; then
        continue
    fi
    rm -rf "$target"
    mkdir -p "$target"
    # shellcheck disable=SC2086  (options)
    "$python" -m pip download --dest "$target" $pinned "$lock"
    "$python" -m zipfile -e "$target"/*.whl "$target"
    rm "$target"/*.whl
done
