#!/usr/bin/env bash
# Asks a run on the cluster to stop at its newest commit; jobs/train.sh with the same arguments goes on from there:
#
#   RAY_ADDRESS=http://127.0.0.1:8265 jobs/stop.sh RUN
#
# It works from wherever the cluster's dashboard is reached, as a job of its own; RAY_ADDRESS, RAY and the token are as
# in jobs/train.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
(($# >= 1)) || fail "the run's name is missing; usage: jobs/stop.sh RUN"
ask stop "$@"
