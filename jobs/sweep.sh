#!/usr/bin/env bash
# Submits a sweep to a Ray cluster and follows its log:
#
#   RAY_ADDRESS=http://127.0.0.1:8265 jobs/sweep.sh sweep=outer model=tiny islands.count=3
#
# The arguments are those of `ray-diloco tune`; the same command again goes on with what is left.  Trials run side by
# side where the cluster has room.  RAY_ADDRESS, RUNS, FOLLOW, RAY and the token are as for jobs/train.sh;
# `jobs/job.sh stop ID` ends a sweep, whose trials go on from their newest commits.
exec env COMMAND=tune "$(dirname "${BASH_SOURCE[0]}")/train.sh" "$@"
