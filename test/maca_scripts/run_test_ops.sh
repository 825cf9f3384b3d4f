#!/usr/bin/env bash
# run_test_ops.sh true|false|all [pytest arguments]: dynamic shapes, static shapes, or both.
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
exec "$here/../run_list.sh" macagraph "$here/ops" "$@"
