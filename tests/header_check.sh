#!/usr/bin/env bash
# The public headers compile alone, as C11 and as C++17, without a warning, every INIT macro included; epmoe.h reaches
# no header of CUDA, NCCL or MPI, whether one is installed or not.
#   header_check.sh SOURCE_DIR [MPI INCLUDE FOLDER...]      with folders epmoe_mpi.h is checked too
set -euo pipefail
include=$1/include
shift
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# A program that uses every INIT macro of epmoe.h.
{
    printf '#include <epmoe/epmoe.h>\n#include <epmoe/epmoe.h>\nint main(void)\n{\n    int wrong = 0;\n'
    sed -n 's/^#define \(EPMOE_[A-Z_]*_INIT\) *EPMOE_STRUCT_INIT(\([a-z_]*\)).*/\1 \2/p' "$include/epmoe/epmoe.h" |
        while read -r macro type; do
            printf '    { %s value = %s; wrong += value.struct_size != sizeof value; }\n' "$type" "$macro"
        done
    printf '    return wrong;\n}\n'
} >"$work/use.c"
[ "$(grep -c _INIT "$work/use.c")" -ge 10 ]
cp "$work/use.c" "$work/use.cpp"

warnings=(-pedantic -Wall -Wextra -Wshadow -Werror)
"${CC:-cc}" -std=c11 "${warnings[@]}" -I"$include" "$work/use.c" -o "$work/use_c"
"$work/use_c"
"${CXX:-c++}" -std=c++17 "${warnings[@]}" -I"$include" "$work/use.cpp" -o "$work/use_cpp"
"$work/use_cpp"
reached=$("${CC:-cc}" -std=c11 -M -I"$include" "$work/use.c" | grep -oiE '[^ /]*(cuda|cublas|nccl|mpi)[^ /]*\.h' |
    grep -v '^epmoe' || true)
if [ -n "$reached" ]; then
    printf 'epmoe.h reaches headers that it must not need:\n%s\n' "$reached" >&2
    exit 1
fi

if [ $# -gt 0 ]; then
    mpi=("${@/#/-isystem}")
    printf '#include <epmoe/epmoe_mpi.h>\nint main(void) { return 0; }\n' >"$work/mpi.c"
    cp "$work/mpi.c" "$work/mpi.cpp"
    "${CC:-cc}" -std=c11 "${warnings[@]}" -I"$include" "${mpi[@]}" -c "$work/mpi.c" -o "$work/mpi.o"
    "${CXX:-c++}" -std=c++17 "${warnings[@]}" -I"$include" "${mpi[@]}" -c "$work/mpi.cpp" -o "$work/mpi.o"
fi
