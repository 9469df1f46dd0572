#!/usr/bin/env bash
# Proves launch/quickstart.sh, launch/test.sh and the examples against an installed library on a bare system: a minimal
# Debian root made by debootstrap in DIR, and in it a clone of this repository (what is committed) and nothing else. Runs
# as root; needs debootstrap and the network. DIR/root and a log of each step stay.
#
#   launch/bare_system.sh DIR [SUITE (default bookworm) [MIRROR]]
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/lib.sh

if [ $# -lt 1 ] || [ $# -gt 3 ]; then die "expected DIR [SUITE [MIRROR]]"; fi
suite=${2:-bookworm} mirror=${3:-http://deb.debian.org/debian}
[ "$(id -u)" -eq 0 ] || die "debootstrap and chroot need root"
command -v debootstrap >/dev/null || die "there is no debootstrap: install debootstrap (Debian's name)"
mkdir -p "$1"
dir=$(cd "$1" && pwd)
system=$dir/root
[ ! -e "$system" ] || die "$system exists: expected a folder without a root"

# inside COMMAND: in the root, with an environment, processes and mounts of its own, which all end with it.
inside() {
    # shellcheck disable=SC2016
    unshare --mount --pid --fork --kill-child bash -euc '
        root=$1
        mount -t proc proc "$root/proc"
        mount -t sysfs -o ro sysfs "$root/sys"
        mount -t tmpfs -o mode=755 tmpfs "$root/dev"
        for node in null zero full random urandom tty; do
            touch "$root/dev/$node"
            mount --bind "/dev/$node" "$root/dev/$node"
        done
        mkdir "$root/dev/pts" "$root/dev/shm"
        mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
        mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
        ln -s pts/ptmx "$root/dev/ptmx"
        ln -s /proc/self/fd "$root/dev/fd"
        for stream in 0:stdin 1:stdout 2:stderr; do ln -s "fd/${stream%:*}" "$root/dev/${stream#*:}"; done
        # The shell stays, as the init that takes in what the jobs under test leave behind.
        exec chroot "$root" /usr/bin/env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin \
            bash -c "cd /root/epmoe && { $2; }; exit \$?"
    ' bash "$system" "$1" </dev/null
}

# timed LOG COMMAND...: its output in LOG, shown where it fails; says how long it took.
timed() {
    local log=$dir/$1 start=$SECONDS
    shift
    if ! "$@" >"$log" 2>&1; then
        tail -n 60 "$log"
        die "failed after $((SECONDS - start)) s: $*; all of its output is in $log"
    fi
    say "$((SECONDS - start)) s: $*"
}

timed debootstrap.log debootstrap --variant=minbase "$suite" "$system" "$mirror"
cp -L /etc/resolv.conf /etc/hosts "$system/etc/"
git clone -q --no-hardlinks . "$system/root/epmoe"
timed quickstart.log inside launch/quickstart.sh
tail -n 20 "$dir/quickstart.log"
timed test.log inside launch/test.sh
grep -A 100 'tests passed' "$dir/test.log"
timed examples.log inside 'cmake --install build --prefix /opt/epmoe &&
    cmake -S examples -B build-examples -DCMAKE_PREFIX_PATH=/opt/epmoe && cmake --build build-examples &&
    build-examples/one_rank && build-examples/ops && build-examples/routing_test &&
    mpirun --allow-run-as-root --oversubscribe -np 2 build-examples/two_ranks'
tail -n 5 "$dir/examples.log"
