#!/usr/bin/env bash
# A first run on this machine, without a GPU and without a cluster: two islands teach a small model Python, in about two
# minutes on two cores.  `make train` is the same with the set-up before it.
#
#   jobs/quickstart_cpu.sh [KEY=VALUE ...]
#
# The arguments are those of `ray-diloco train`; the same command again continues the run.
#   RAY_DILOCO  the command (default .venv/bin/ray-diloco, else the one on PATH)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
command=${RAY_DILOCO:-$([[ -x .venv/bin/ray-diloco ]] && echo .venv/bin/ray-diloco || echo ray-diloco)}
if ! command -v "$command" >/dev/null; then
  echo "quickstart_cpu.sh: $command is not there. Set up: make venv, or pip install ray_diloco" >&2
  exit 2
fi
exec "$command" train experiment=demo "$@"
