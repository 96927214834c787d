#!/usr/bin/env bash
# Joins this machine to a Ray cluster, in the foreground, until it is told to stop (Ctrl-C, SIGTERM):
#
#   jobs/join.sh HEAD_ADDRESS [REGION] [more options of `ray start`]
#
# HEAD_ADDRESS is the head's address on the private network that all machines share.  REGION becomes the label
# ray.io/availability-region; without it the labels come from LABELS.
#   LABELS      YAML file with the node's labels (default /etc/ray-diloco/labels.yaml)
#   GCS_PORT    port of the head (default 6379)
#   BASE_PORT   first of the 1000 fixed ports of this machine (default 20000; not within Ray's own 10002 to 19999)
#   RAY         the ray command (default .venv/bin/ray, else the one on PATH)
#   TLS         folder with this machine's certificate, if the cluster speaks TLS (default ~/.ray/tls)
# The cluster's token must be in ~/.ray/auth_token: copy it from the head.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

(($# >= 1)) || fail "the head's address is missing; usage: jobs/join.sh HEAD_ADDRESS [REGION]"
head=$1
shift
base=${BASE_PORT:-20000}

if (($# >= 1)) && [[ $1 != -* ]]; then
  labels=(--labels "ray.io/availability-region=$1")
  shift
else
  file=${LABELS:-/etc/ray-diloco/labels.yaml}
  [[ -r $file ]] || fail "no region given and no labels in $file; write 'ray.io/availability-region: NAME' there"
  labels=(--labels-file "$file")
fi

export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
[[ $RAY_AUTH_MODE != token ]] || have_token ||
  fail "no cluster token in $token; copy it from the head: scp $head:.ray/auth_token $token"

# The address from which this machine reaches the head: on a machine with several, Ray may take the wrong one.
own=$(python3 -c '
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
    route.connect((sys.argv[1], 9))
    print(route.getsockname()[0])
' "$head" 2>/dev/null) || fail "no route to $head; is the private network up?"

use_tls

# Whether the head takes this machine's credentials: Ray would try for minutes, and not say what is wrong without TLS.
# A head that does not listen may come yet.
python=$(dirname "$(command -v "$ray")")/python
refused=$([[ ! -x $python ]] || "$python" -c '
import socket, sys
from ray_diloco.cluster.credentials import credentials
from ray_diloco.errors import SecurityError
host, port = sys.argv[1:]
try:
    socket.create_connection((host, int(port)), 10).close()
    with credentials(f"{host}:{port}", 10):
        pass
except SecurityError as error:
    print(error)
except OSError:
    pass
' "$head" "${GCS_PORT:-6379}" 2>/dev/null) || true
[[ -z $refused ]] || fail "$refused"

# A head that is away for a while (it restarts with its state) must not end the island.
export RAY_gcs_rpc_server_reconnect_timeout_s=${RAY_gcs_rpc_server_reconnect_timeout_s:-600}
# How often this machine tells the head how its processes do, for the dashboard and Ray's own metrics: each time 27 kB,
# and every 5 s by default.
export REPORTER_UPDATE_INTERVAL_MS=${REPORTER_UPDATE_INTERVAL_MS:-60000}
# Commands in a job come from the PATH of the node's process.
PATH=$PWD/.venv/bin:$PATH
exec "$ray" start --address "$head:${GCS_PORT:-6379}" --node-ip-address "$own" "${labels[@]}" --block \
  --disable-usage-stats \
  --node-manager-port "$base" \
  --object-manager-port "$((base + 1))" \
  --runtime-env-agent-port "$((base + 2))" \
  --dashboard-agent-grpc-port "$((base + 3))" \
  --dashboard-agent-listen-port "$((base + 4))" \
  --metrics-export-port "$((base + 5))" \
  --min-worker-port "$((base + 100))" \
  --max-worker-port "$((base + 999))" \
  "$@"
