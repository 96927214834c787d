#!/usr/bin/env bash
# Asks an island of a run on the cluster to finish its segment and leave:
#
#   RAY_ADDRESS=http://127.0.0.1:8265 jobs/drain.sh RUN ISLAND
#
# It works from wherever the cluster's dashboard is reached, as a job of its own; RAY_ADDRESS, RAY and the token are as
# in jobs/train.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
(($# >= 1)) || fail "the run's name is missing; usage: jobs/drain.sh RUN ISLAND"
ask drain "$@"
