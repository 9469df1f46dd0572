#!/usr/bin/env bash
# One MPI job over two hosts on one machine, for tests: namespaces with a network, a name and shared memory of their own,
# joined by two cables. Interface `mgmt` is for mpirun and its daemons, `data` for the ranks.
#   two_hosts.sh [--limit SECONDS] [--cut BYTES | --cut-all BYTES] [--misleading] ARGUMENT OF mpirun...
# mpirun runs on host `one` with a hostfile of both, two slots each, and all else as for a job over real hosts. When
# `data` has carried so many bytes from `one`, --cut takes this cable away, --cut-all both. --misleading gives each host an
# interface `docker0` of the same address and leaves MPI to choose. After the limit mpirun is killed; ranks that outlive it
# by GRACE_S are an error. At the end lines on stdout say what crossed the cables.
# Exits as mpirun does, with 77 and the reason on stderr where namespaces cannot be made, with 125 for ranks left over.
# Nothing outlasts this script, however it ends: all of it is in a process namespace that dies with its first process.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin
GRACE_S=15

skip() {
    printf 'skipped: no two hosts: %s\n' "$*" >&2
    exit 77
}
# can WHAT COMMAND...: a host cannot be made without it.
can() {
    local what=$1 errors
    shift
    errors=$("$@" 2>&1) || skip "$what: ${errors%%$'\n'*}"
}

if [ "${1:-}" != --inside ]; then
    for command in ip unshare nsenter setpriv mount hostname mpirun; do
        command -v "$command" >/dev/null || skip "$command is missing"
    done
    options=(--mount --net --pid --fork --kill-child --mount-proc)
    if [ "$(id -u)" -ne 0 ]; then options+=(--user --map-root-user); fi
    can "unshare" unshare "${options[@]}" true
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    # Waited for in the background, so that a signal ends it at once; it is killed when this shell is.
    setpriv --pdeathsig KILL unshare "${options[@]}" "$0" --inside "$work" "$@" &
    job=$!
    trap 'kill -KILL "$job" 2>/dev/null || true; exit 143' TERM INT HUP
    code=0
    wait "$job" || code=$?
    exit "$code"
fi
work=$2
shift 2
limit_s=90 cut_at='' cut=() misleading=''
while :; do
    case ${1:-} in
    --limit) limit_s=$2 ;;
    --cut) cut_at=$2 cut=(data) ;;
    --cut-all) cut_at=$2 cut=(data mgmt) ;;
    --misleading)
        misleading=1
        shift
        continue
        ;;
    *) break ;;
    esac
    shift 2
done

# ---------------------------------------------------------------------------------------------------------- hosts

# The addresses are those reserved for documentation.
cat >"$work/hosts" <<'HOSTS'
127.0.0.1 localhost
192.0.2.1 one
192.0.2.2 two
HOSTS
printf '%s slots=2\n' one two >"$work/hostfile"

# A process that keeps the namespaces of a host. A rank that took the other host for its own would look for its shared
# memory in vain.
cat >"$work/host.sh" <<'HOST'
set -e
hostname "$1"
mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs /dev/shm
mount --bind "$2/hosts" /etc/hosts
mkdir "$2/$1.tmp"
ip link set lo up
touch "$2/$1.up"
exec sleep infinity
HOST
declare -A host
for name in one two; do
    unshare --mount --net --uts --ipc sh "$work/host.sh" "$name" "$work" 2>"$work/$name.errors" &
    host[$name]=$!
    while [ ! -e "$work/$name.up" ]; do
        kill -0 "${host[$name]}" 2>/dev/null || skip "host $name: $(tail -n 1 "$work/$name.errors")"
        sleep 0.02
    done
done
on() {
    local name=$1
    shift
    nsenter --target "${host[$name]}" --mount --net --uts --ipc --wd="$PWD" env TMPDIR="$work/$name.tmp" "$@"
}

networks=(mgmt:192.0.2 data:198.51.100)
for network in "${networks[@]}"; do
    interface=${network%:*} net=${network#*:}
    can "a cable" ip link add "$interface" netns "${host[one]}" type veth peer name "$interface" netns "${host[two]}"
    number=0
    for name in one two; do
        number=$((number + 1))
        can "an address" on "$name" ip address add "$net.$number/24" dev "$interface"
        can "an interface" on "$name" ip link set "$interface" up
    done
done

if [ -n "$misleading" ]; then
    for name in one two; do
        on "$name" ip link add docker0 type veth peer name container
        on "$name" ip address add 172.17.0.1/16 dev docker0
        on "$name" ip link set docker0 up
        on "$name" ip link set container up
    done
fi

# Takes the place of ssh: agent HOST COMMAND..., the command being text for a shell.
cat >"$work/agent" <<AGENT
#!/bin/sh
name=\$1
shift
case \$name in
$(for name in one two; do printf '%s) pid=%s ;;\n' "$name" "${host[$name]}"; done)
*) echo "no host \$name" >&2; exit 255 ;;
esac
exec nsenter --target "\$pid" --mount --net --uts --ipc --wd=/ env TMPDIR="$work/\$name.tmp" sh -c "\$*"
AGENT
chmod +x "$work/agent"

# ------------------------------------------------------------------------------------------------------------ job

sent() { on "$1" cat "/sys/class/net/$2/statistics/tx_bytes"; }

before=()
for network in "${networks[@]}"; do
    for name in one two; do before+=("$(sent "$name" "${network%:*}")"); done
done

if [ -n "$cut_at" ]; then
    (
        while [ "$(sent one data)" -lt "$cut_at" ]; do sleep 0.05; done
        # All in one process, so that nothing happens between.
        printf 'link set %s down\n' "${cut[@]}" | on one ip -batch -
    ) &
fi
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
# Names of Open MPI 4, then of 5.
export OMPI_MCA_plm_rsh_agent=$work/agent OMPI_MCA_oob_tcp_if_include=mgmt
export PRTE_MCA_plm_ssh_agent=$work/agent PRTE_MCA_prte_if_include=mgmt
if [ -z "$misleading" ]; then export OMPI_MCA_btl_tcp_if_include=data; fi
code=0
on one timeout --signal=KILL "$limit_s" mpirun --hostfile "$work/hostfile" --bind-to none -np 4 "$@" || code=$?

# Both hosts' ranks: here are no processes but those of this job.
ranks_live() { grep -qsz '^OMPI_COMM_WORLD_RANK=' /proc/[0-9]*/environ; }
end=$((SECONDS + GRACE_S))
while ranks_live && [ "$SECONDS" -lt "$end" ]; do sleep 0.1; done
if ranks_live; then
    echo "two_hosts: ranks outlive mpirun by $GRACE_S s" >&2
    code=125
fi

index=0
for network in "${networks[@]}"; do
    for name in one two; do
        after=$(sent "$name" "${network%:*}")
        printf 'two_hosts: %s sent %d bytes on %s\n' "$name" $((after - before[index])) "${network%:*}"
        index=$((index + 1))
    done
done
exit "$code"
