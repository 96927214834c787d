#!/usr/bin/env bash
# Asks a run on the cluster for a number of islands, in all or of regions:
#
#   RAY_ADDRESS=http://127.0.0.1:8265 jobs/scale.sh RUN N | REGION=N …
#
# It works from wherever the cluster's dashboard is reached, as a job of its own; RAY_ADDRESS, RAY and the token are as
# in jobs/train.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
(($# >= 1)) || fail "the run's name is missing; usage: jobs/scale.sh RUN N | REGION=N …"
ask scale "$@"
