#!/bin/sh
# Unpack the Python bindings of TensorRT 10 and 11 (without their libraries) into .bindings/VERSION, for
# tests/unit/engine/test_backend_bindings.py, and Triton's client into .bindings/triton, for tests/integration/test_triton.py
# (beside the environment, since it wants an older protobuf and ml-dtypes).
# Takes the interpreter as an argument: the wheels are per Python version.
set -eu
cd "$(dirname "$0")/.."
python=${1:-python}
for version in 10.16.0.72 11.4.0.106; do
    target=.bindings/$version
    tag=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
    if grep -qs "^Tag: $tag-" "$target"/*.dist-info/WHEEL; then
        continue
    fi
    rm -rf "$target"
    mkdir -p "$target"
    "$python" -m pip download --quiet --no-deps --only-binary :all: --dest "$target" \
        "tensorrt_cu13_bindings==$version"
    "$python" -m zipfile -e "$target"/*.whl "$target"
    rm "$target"/*.whl
done
target=.bindings/triton
wanted="tritonclient==2.73.0 grpcio==1.85.1 python-rapidjson==1.25 $("$python" -V)"
if [ "$(cat "$target/wanted" 2>/dev/null)" != "$wanted" ]; then
    rm -rf "$target"
    # shellcheck disable=SC2086  (three packages)
    "$python" -m pip install --quiet --no-deps --only-binary :all: --target "$target" ${wanted%% Python*}
    echo "$wanted" >"$target/wanted"
fi
