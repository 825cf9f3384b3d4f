#!/bin/sh
# All tests of the eager device: sh test/device/run_tests.sh [pytest options]
cd "$(dirname "$0")/../.." || exit 1
exec python -m pytest test/device "$@"
