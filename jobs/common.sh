# What the scripts of this folder share; they source it.  After it the current folder is the repository.
#
#   RAY   the ray command (default .venv/bin/ray, else the one on PATH)
#   RUNS  folder of all runs on the head (default ~/ray_diloco/runs)

script=$(basename "$0")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
ray=${RAY:-$([[ -x .venv/bin/ray ]] && echo .venv/bin/ray || echo ray)}
runs=${RUNS:-'~/ray_diloco/runs'}
token=${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}

fail() {
  echo "$script: $1" >&2
  exit 2
}

have_token() {
  [[ -n ${RAY_AUTH_TOKEN:-} || -r $token ]]
}

# Ray speaks TLS where this machine has a certificate of the cluster (jobs/certificates.sh); RAY_USE_TLS decides if set.
use_tls() {
  local folder=${TLS:-$HOME/.ray/tls}
  [[ -z ${RAY_USE_TLS:-} && -r $folder/node.key ]] || return 0
  export RAY_USE_TLS=1
  export RAY_TLS_CA_CERT=$folder/ca.crt RAY_TLS_SERVER_CERT=$folder/node.crt RAY_TLS_SERVER_KEY=$folder/node.key
}

# The dashboard of the cluster, which takes jobs: sees that it answers, and whether it wants the token.
use_dashboard() {
  address=${RAY_ADDRESS:-http://127.0.0.1:8265}
  local code
  code=$(python3 -c '
import sys, urllib.error, urllib.request
try:
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(sys.argv[1] + "/api/jobs/", timeout=10).close()
except urllib.error.HTTPError as error:
    print(error.code)
' "$address" 2>/dev/null) ||
    fail "nobody answers at RAY_ADDRESS=$address; is the cluster up, and the tunnel to its dashboard?"
  if [[ $code == 401 || $code == 403 ]]; then
    export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
    have_token || fail "the cluster asks for its token; copy it from the head's ~/.ray/auth_token into $token"
  fi
}

# Runs a command on the cluster, in the code of this folder, as a job; options of `ray job submit` come before `--`.
submit() {
  # Hidden folders with a character behind the dot: Ray takes the folder itself for `.`.
  local left_out=('.?*' build dist docs runs tests wandb) runtime bytes
  runtime=$(python3 -c '
import json, os, sys
passed = {name: os.environ[name] for name in os.environ.get("PASS", "").split()}
print(json.dumps({"excludes": sys.argv[1:], "env_vars": passed}))
' "${left_out[@]/#//}" __pycache__ 2>/dev/null) || fail "PASS names a variable that is not set: $PASS"
  bytes=$(tar -c "${left_out[@]/#/--exclude=./}" --exclude=__pycache__ . | wc -c)
  echo "uploading at most $((bytes / 1024)) KiB of $PWD to $address, unless it is there already"
  "$ray" job submit --address "$address" --working-dir . --runtime-env-json "$runtime" "$@"
}

# The same for a question: of what is printed the answer alone, without the lines of Ray, which begin with a time, and
# once; of a job that failed Ray prints it again.
ask() {
  use_dashboard
  submit --log-color false -- ray-diloco "$@" 2>&1 |
    sed -E -e '/Status message: Job entrypoint command failed/,$d' -e '/^[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9:,]+|^Running entrypoint for job|^uploading /d'
}
