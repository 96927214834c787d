#!/usr/bin/env bash
# Says where a run on the cluster stands, and its islands, or how it ended:
#
#   RAY_ADDRESS=http://127.0.0.1:8265 jobs/status.sh RUN [--json]
#
# It works from wherever the cluster's dashboard is reached, as a job of its own; RAY_ADDRESS, RUNS, RAY and the token
# are as in jobs/train.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
(($# >= 1)) || fail "the run's name is missing; usage: jobs/status.sh RUN [--json]"
ask status --root "$runs" "$@"
