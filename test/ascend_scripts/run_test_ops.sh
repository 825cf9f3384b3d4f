#!/usr/bin/env bash
# run_test_ops.sh true|false|all [pytest arguments]: dynamic shapes, static shapes, or both.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
cd "$here/../.."

run() {
    local list="$1" dynamic="$2"
    shift 2
    python -m pytest -c "$here/ops/$list.ini" --backend "${BACKEND:-ascendgraph}" \
        --dynamic "$dynamic" "$@"
}

case "${1:-}" in
    false) run static false "${@:2}" ;;
    true) run dynamic true "${@:2}" ;;
    all)
        run static false "${@:2}"
        run dynamic true "${@:2}"
        ;;
    *)
        echo "usage: $0 true|false|all [pytest arguments]" >&2
        exit 2
        ;;
esac
