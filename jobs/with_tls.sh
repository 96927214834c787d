#!/usr/bin/env bash
# Runs a command that speaks to Ray, or a Ray, with TLS where this machine has a certificate of the cluster:
#
#   jobs/with_tls.sh ray start --head …
#   jobs/with_tls.sh ray-diloco status RUN --address HEAD:6379
#
#   TLS  folder with ca.crt, node.crt and node.key (default ~/.ray/tls); see jobs/certificates.sh
set -euo pipefail
here=$PWD
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
(($# >= 1)) || fail "the command is missing"
use_tls
cd "$here"
exec "$@"
