#!/usr/bin/env bash
# run.sh COMMAND...: a command of a CUDA build of PyTorch with a stand-in for the GPU, as in
#   test/stand_in/run.sh python -m pytest -p stand_in.gpu test/op --backend tritongraph --device cuda
# Everything between Dynamo and the driver runs as on a machine with a GPU, slowly: see gpu.py.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
packages="$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
runtime="$(find "$packages/nvidia" -name 'libcudart.so.*' | head -1)"
[ -n "$runtime" ] || { echo "a CUDA build of PyTorch is needed: pip install torch" >&2; exit 2; }
headers="$(dirname "$(dirname "$runtime")")/include"
name="$(basename "$runtime")"
built="$(mktemp -d)"
trap 'rm -rf "$built"' EXIT
echo "$name { global: *; };" >"$built/versions"
g++ -w -O1 -fPIC -shared -I"$headers" -I"$packages/triton/backends/nvidia/include" \
    "$here/runtime.cpp" "$here/done.cpp" -o "$built/$name" \
    -Wl,-soname,"$name" -Wl,--version-script="$built/versions" -ldl
g++ -w -O1 -fPIC -shared "$here/driver.cpp" -o "$built/libcuda.so.1" -Wl,-soname,libcuda.so.1
LD_LIBRARY_PATH="$built" LD_PRELOAD="$built/$name" STAND_IN_RUNTIME="$name" \
    OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" \
    PYTHONPATH="$here/../..:$here/..${PYTHONPATH:+:$PYTHONPATH}" "$@"
