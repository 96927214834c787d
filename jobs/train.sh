#!/usr/bin/env bash
# Submits a training run to a Ray cluster and follows its log:
#
#   RAY_ADDRESS=http://127.0.0.1:8265 jobs/train.sh run.name=first model=tiny islands.count=3
#
# The arguments are those of `ray-diloco train`; the same command again continues the run.
#   RAY_ADDRESS  address of the cluster's dashboard (default http://127.0.0.1:8265, the near end of an ssh tunnel)
#   RUNS         folder of all runs on the head (default ~/ray_diloco/runs)
#   FOLLOW=no    return when the job is accepted
#   RAY          the ray command (default .venv/bin/ray, else the one on PATH)
# A cluster with token authentication wants RAY_AUTH_MODE=token here too, and its token in ~/.ray/auth_token.
# Leaving with Ctrl-C leaves the job running; `ray job stop ID` ends it at its newest commit.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

address=${RAY_ADDRESS:-http://127.0.0.1:8265}
runs=${RUNS:-'~/ray_diloco/runs'}
ray=${RAY:-$([[ -x .venv/bin/ray ]] && echo .venv/bin/ray || echo ray)}

python3 -c '
import socket, sys
from urllib.parse import urlsplit
at = urlsplit(sys.argv[1])
socket.create_connection((at.hostname, at.port or 80), 10).close()
' "$address" 2>/dev/null || {
  echo "train.sh: nobody answers at RAY_ADDRESS=$address; is the cluster up, and the tunnel to its dashboard?" >&2
  exit 2
}

left_out=('.*' build dist docs runs tests wandb)
runtime="{\"excludes\": [$(printf '"/%s", ' "${left_out[@]}")\"__pycache__\"]}"
bytes=$(tar -c "${left_out[@]/#/--exclude=./}" --exclude=__pycache__ . | wc -c)
echo "uploading at most $((bytes / 1024)) KiB of $PWD to $address"

follow=()
[[ ${FOLLOW:-yes} == no ]] && follow=(--no-wait)
exec "$ray" job submit --address "$address" --working-dir . --runtime-env-json "$runtime" "${follow[@]}" \
  -- ray-diloco "${COMMAND:-train}" ray.address=auto run.root="$runs" "$@"
