#!/usr/bin/env bash
# Any command of `ray job`, shown to the cluster's dashboard with its token:
#
#   RAY_ADDRESS=http://127.0.0.1:8265 jobs/job.sh list | logs -f ID | status ID | stop ID
#
# RAY_ADDRESS, RAY and the token are as in jobs/train.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
(($# >= 1)) || fail "the command is missing; usage: jobs/job.sh list | logs -f ID | status ID | stop ID"
use_dashboard
exec "$ray" job "$1" --address "$address" "${@:2}"
