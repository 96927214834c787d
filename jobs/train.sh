#!/usr/bin/env bash
# Submits a training run to a Ray cluster and follows its log:
#
#   RAY_ADDRESS=http://127.0.0.1:8265 jobs/train.sh run.name=first model=tiny islands.count=3
#
# The arguments are those of `ray-diloco train`; the same command again continues the run.
#   RAY_ADDRESS  address of the cluster's dashboard (default http://127.0.0.1:8265, the near end of an ssh tunnel)
#   RUNS         folder of all runs on the head (default ~/ray_diloco/runs)
#   PASS         names of variables that the run needs too, as in "WANDB_API_KEY HF_TOKEN"; members can read them
#   FOLLOW=no    return when the job is accepted
#   RAY          the ray command (default .venv/bin/ray, else the one on PATH)
# A cluster that asks for a token gets the one in ~/.ray/auth_token: copy it from the head.
# Leaving with Ctrl-C leaves the job running; `jobs/job.sh logs -f ID` follows its log again.  `jobs/status.sh RUN` says
# where it stands, `jobs/stop.sh RUN` ends it at its newest commit.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
use_dashboard

run=run
for argument in "$@"; do
  [[ $argument != run.name=* && $argument != sweep=* ]] || run=${argument#*=}
done
follow=()
[[ ${FOLLOW:-yes} != no ]] || follow=(--no-wait)
# The job is named after the run, so that `jobs/job.sh list` can be read.
id=${run//[^A-Za-z0-9._-]/-}-$(date -u +%Y%m%d-%H%M%S)-$$
echo "job $id; its log from anywhere: jobs/job.sh logs -f $id"
submit --submission-id "$id" "${follow[@]}" \
  -- ray-diloco "${COMMAND:-train}" ray.address=auto run.root="$runs" "$@"
