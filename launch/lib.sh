# shellcheck shell=bash
# What the launch scripts share: installing what a build needs, building, and the environment that mpirun needs here.
# To be sourced. Everything it does to the machine or the environment it says first.

say() { printf 'epmoe: %s\n' "$*"; }
die() {
    printf 'epmoe: %s\n' "$*" >&2
    exit 1
}

# ------------------------------------------------------------------------------------------------------- packages

# compiles HEADER LIBRARY: the C compiler finds both.
compiles() {
    printf '#include <%s>\nint main(void) { return 0; }\n' "$1" |
        cc -x c - -I/usr/include/openblas -o /dev/null "-l$2" >/dev/null 2>&1
}

# have PACKAGE: what the Debian package of this name brings is there, however it came.
have() {
    case $1 in
    gcc) command -v cc ;;
    g++) command -v c++ ;;
    make) command -v make || command -v ninja ;;
    pkg-config) command -v pkg-config ;;
    clang-format) command -v clang-format ;;
    cmake) command -v cmake ;;
    git) command -v git ;;
    openmpi-bin) command -v mpirun ;;
    libopenmpi-dev) command -v mpicc ;;
    libopenblas-dev) compiles cblas.h openblas ;;
    libjansson-dev) compiles jansson.h jansson ;;
    libcriterion-dev) compiles criterion/criterion.h criterion ;;
    *) die "no check is known for the package $1" ;;
    esac >/dev/null
}

# have_candidates PACKAGE...: apt's lists know all of them.
have_candidates() {
    local package
    for package in "$@"; do
        apt-cache policy "$package" 2>/dev/null | grep -q 'Candidate: [^(]' || return 1
    done
}

# need PACKAGE...: installs those that are missing. EPMOE_INSTALL=0 only says which.
need() {
    local package missing=() root=()
    for package in "$@"; do
        have "$package" || missing+=("$package")
    done
    [ ${#missing[@]} -gt 0 ] || return 0

    local command="apt-get install -y --no-install-recommends ${missing[*]}"
    command -v apt-get >/dev/null ||
        die "missing here, by Debian's names: ${missing[*]}. This system has no apt-get: install them by its own means."
    [ "${EPMOE_INSTALL:-1}" != 0 ] || die "missing here: ${missing[*]}. As root: $command"
    if [ "$(id -u)" -ne 0 ]; then
        command -v sudo >/dev/null || die "missing here: ${missing[*]}, and there is no sudo. As root: $command"
        root=(sudo)
    fi
    root+=(env DEBIAN_FRONTEND=noninteractive)

    say "installing ${missing[*]}"
    if ! have_candidates "${missing[@]}"; then
        "${root[@]}" apt-get update -q || die "apt-get update failed. As root: apt-get update && $command"
    fi
    local install=(apt-get install -q -y --no-install-recommends "${missing[@]}")
    # Lists that are older than the mirror name files that are gone: a new list mends that.
    "${root[@]}" "${install[@]}" || { "${root[@]}" apt-get update -q && "${root[@]}" "${install[@]}"; } ||
        die "the packages could not be installed. As root: apt-get update && $command"
    for package in "${missing[@]}"; do
        have "$package" || die "$package is installed, but what it should bring is not found"
    done
}

need_to_build() { need gcc g++ cmake make libopenblas-dev libjansson-dev openmpi-bin libopenmpi-dev; }

# ---------------------------------------------------------------------------------------------------------- build

# build DIR [CMAKE ARGUMENT...]: configures (again) and builds. A folder keeps the generator it was made with.
build() {
    local dir=$1 generator=()
    shift
    if [ ! -f "$dir/CMakeCache.txt" ] && command -v ninja >/dev/null; then generator=(-G Ninja); fi
    # The last of two -D of a name counts.
    cmake -S . -B "$dir" "${generator[@]}" ${EPMOE_CUDA:+"-DEPMOE_CUDA=$EPMOE_CUDA"} "$@"
    if grep -q '^CMAKE_CUDA_FLAGS:' "$dir/CMakeCache.txt" && [ ! -e /dev/nvidiactl ] &&
        ! grep -q '^EPMOE_CUDA:[A-Z]*=OFF' "$dir/CMakeCache.txt"; then
        say "the CUDA kernels are built, too, though there is no GPU here: minutes; EPMOE_CUDA=OFF leaves them out"
    fi
    cmake --build "$dir" --parallel "$(cores)"
}

# ------------------------------------------------------------------------------------------------------------ MPI

# The cores this process may use: its affinity mask, and a container's CPU quota.
cores() {
    local count quota period
    count=$(nproc)
    if read -r quota period 2>/dev/null </sys/fs/cgroup/cpu.max && [ "$quota" != max ]; then
        quota=$(((quota + period - 1) / period))
        if [ "$quota" -lt "$count" ]; then count=$quota; fi
    fi
    echo "$count"
}

set_variable() {
    export "$1=$2"
    say "  $1=$2"
}

# mpi_environment RANKS: exports what mpirun needs to start that many ranks on this machine, and prints it, so that a
# command by hand can set the same. Names beginning with OMPI_MCA_ are Open MPI 4's, with PRTE_MCA_ Open MPI 5's; other
# MPIs ignore both.
mpi_environment() {
    local ranks=$1 shm
    say "environment for mpirun:"
    if [ "$(id -u)" -eq 0 ]; then
        set_variable OMPI_ALLOW_RUN_AS_ROOT 1
        set_variable OMPI_ALLOW_RUN_AS_ROOT_CONFIRM 1
        # Root without CAP_SYS_PTRACE is root in a container, where reading a peer's memory may be forbidden.
        if ! ((0x$(awk '/^CapEff:/ {print $2}' /proc/self/status) >> 19 & 1)); then
            set_variable OMPI_MCA_btl_vader_single_copy_mechanism none
            set_variable OMPI_MCA_smsc '^cma'
        fi
    fi
    # Open MPI counts physical cores as slots and refuses more ranks than these.
    set_variable OMPI_MCA_rmaps_base_oversubscribe 1
    set_variable PRTE_MCA_rmaps_default_mapping_policy :oversubscribe
    # A rank bound to one core would run all its threads there.
    set_variable OMPI_MCA_hwloc_base_binding_policy none
    set_variable PRTE_MCA_hwloc_default_binding_policy none
    # Ranks of one machine exchange through files in /dev/shm, some MiB each; a container has often 64 MiB in all.
    shm=$(df --output=avail -BM /dev/shm 2>/dev/null | tr -dc '0-9\n' | tail -n 1)
    if [ "${shm:-0}" -lt $((64 * ranks)) ]; then
        say "  /dev/shm has only ${shm:-0} MiB free (docker: --shm-size=1g), so MPI's shared files go elsewhere:"
        set_variable OMPI_MCA_btl_vader_backing_directory "${TMPDIR:-/tmp}"
        set_variable OMPI_MCA_btl_sm_backing_directory "${TMPDIR:-/tmp}"
    fi
}

# thread_environment RANKS: the ranks share the cores, with one thread each where there are more ranks than cores.
# What the caller has set stays.
thread_environment() {
    local ranks=$1 count threads
    count=$(cores)
    threads=$((count > ranks ? count / ranks : 1))
    say "$ranks ranks on $count cores:"
    set_variable OMP_NUM_THREADS "${OMP_NUM_THREADS:-$threads}"
    set_variable OPENBLAS_NUM_THREADS "${OPENBLAS_NUM_THREADS:-$threads}"
}
