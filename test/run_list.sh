#!/usr/bin/env bash
# run_list.sh BACKEND FOLDER true|false|all [pytest arguments]: the lists of one folder, with dynamic
# shapes, static shapes, or both. BACKEND in the environment takes the place of the first argument,
# DYNAMIC that of a missing third one.
set -euo pipefail
backend="${BACKEND:-$1}"
folder="$(cd "$2" && pwd)"
shift 2
cd "$(dirname "${BASH_SOURCE[0]}")/.."

run() {
    local list="$1" dynamic="$2"
    shift 2
    python -m pytest -c "$folder/$list.ini" --backend "$backend" --dynamic "$dynamic" "$@"
}

case "${1:-${DYNAMIC:-}}" in
    false) run static false "${@:2}" ;;
    true) run dynamic true "${@:2}" ;;
    all)
        run static false "${@:2}"
        run dynamic true "${@:2}"
        ;;
    *)
        echo "usage: run_test_$(basename "$folder").sh true|false|all [pytest arguments]" >&2
        exit 2
        ;;
esac
