#!/usr/bin/env bash
# A first run on this machine, without a GPU and without a cluster: two islands teach a small model Python, in two to
# four minutes on two cores.  `make train` is the same with the set-up before it.
#
#   jobs/quickstart_cpu.sh [KEY=VALUE ...]
#
# The arguments are those of `ray-diloco train`; the same command again continues the run.
#   RAY_DILOCO  the command, by its full path (default .venv/bin/ray-diloco, else the one on PATH)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

command=${RAY_DILOCO:-$([[ -x .venv/bin/ray-diloco ]] && echo .venv/bin/ray-diloco || echo ray-diloco)}
command -v "$command" >/dev/null || fail "$command is not there; set it up: make venv, or pip install ."
exec "$command" train experiment=demo "$@"
