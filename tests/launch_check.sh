#!/usr/bin/env bash
# launch/lib.sh's environment for mpirun: what it sets for root and for others, on few cores, with a small /dev/shm; and
# that mpirun then starts more ranks than there are cores.
#   launch_check.sh SOURCE_DIR BUILD_DIR
set -euo pipefail
cd "$1"
build=$2
failed=0
complain() {
    printf '%s\n' "$*" >&2
    failed=1
}

# What a machine is like comes from id, nproc and df.
stubs=$(mktemp -d)
trap 'rm -rf "$stubs"' EXIT
stub() {
    printf '#!/bin/sh\necho "%s"\n' "$2" >"$stubs/$1"
    chmod +x "$stubs/$1"
}

# environment RANKS: what is said, and the variables that are then exported.
unset "${!OMPI_@}" "${!PRTE_@}" OMP_NUM_THREADS OPENBLAS_NUM_THREADS
# shellcheck disable=SC2016
set_up='source launch/lib.sh; mpi_environment "$1"; thread_environment "$1"'
environment() { PATH=$stubs:$PATH bash -euc "$set_up; echo exported:; env" bash "$1"; }

# expect WHAT RANKS [!]VARIABLE=VALUE...: said and exported, or with ! neither.
expect() {
    local what=$1 text said exported setting
    text=$(environment "$2")
    said=${text%%exported:*} exported=${text#*exported:}
    shift 2
    for setting in "$@"; do
        if [[ $setting == !* ]]; then
            if grep -q "^${setting#!}=" <<<"$exported"; then complain "$what: ${setting#!} is set"; fi
        else
            grep -qxF -- "$setting" <<<"$exported" || complain "$what: $setting is not exported"
            grep -qxF -- "epmoe:   $setting" <<<"$said" || complain "$what: $setting is not said"
        fi
    done
}

always=(OMPI_MCA_rmaps_base_oversubscribe=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
    OMPI_MCA_hwloc_base_binding_policy=none PRTE_MCA_hwloc_default_binding_policy=none)
root=(OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1)
small=(OMPI_MCA_btl_vader_backing_directory="${TMPDIR:-/tmp}" OMPI_MCA_btl_sm_backing_directory="${TMPDIR:-/tmp}")

stub id 0
stub nproc 4
stub df 64M
expect "root, 4 cores, 64 MiB" 8 "${always[@]}" "${root[@]}" "${small[@]}" OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
stub id 1000
expect "a user" 8 "${always[@]}" "${small[@]}" '!OMPI_ALLOW_RUN_AS_ROOT' '!OMPI_ALLOW_RUN_AS_ROOT_CONFIRM'
stub df 9000M
expect "a large /dev/shm" 2 "${always[@]}" '!OMPI_MCA_btl_vader_backing_directory' '!OMPI_MCA_btl_sm_backing_directory'

# As this machine is, but for a /dev/shm that seems small: the layer's result is right on 8 ranks.
rm "$stubs/id" "$stubs/nproc"
stub df 64M
PATH=$stubs:$PATH bash -euc "$set_up"'; exec timeout 100 mpirun -np "$@"' bash 8 "$build/moe_layer_bench" \
    --backend cpu --checkpoint tests/data/golden/mixtral --tokens 3 --iters 1 --warmup 0 \
    >"$stubs/output" 2>&1 || complain "8 ranks do not run: $(cat "$stubs/output")"
grep -q '^PASS' "$stubs/output" || complain "8 ranks do not say PASS: $(cat "$stubs/output")"
exit $failed
