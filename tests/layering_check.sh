#!/usr/bin/env bash
# The architecture holds: which folder may include which, where MPI may be seen, and that the library neither prints
# nor ends the process nor takes memory behind its own allocator.
#   layering_check.sh SOURCE_DIR
set -euo pipefail
cd "$1"
failed=0

complain() {
    printf '%s:\n%s\n\n' "$1" "$2" >&2
    failed=1
}

# may_include FOLDER ALLOWED: the quoted includes of a folder's files name files of the allowed folders only.
may_include() {
    local folder=$1 allowed=$2 hits
    [ -d "$folder" ] || return 0
    hits=$(grep -rnE '^ *# *include *"' "$folder" | grep -vE "include *\"($allowed)/" || true)
    if [ -n "$hits" ]; then complain "$folder/ may include $allowed only" "$hits"; fi
}
may_include base 'base'
may_include kernels 'base|kernels'
may_include dense_layers 'base|kernels|dense_layers'
may_include comm 'base|kernels|comm'
may_include moe 'base|kernels|dense_layers|comm|moe'

hits=$(grep -nE '^ *# *include' include/epmoe/*.h | grep -vE 'epmoe_mpi.h:[0-9]+:#include <mpi.h>' |
    grep -vE '#include <(stddef|stdint|epmoe/epmoe)\.h>' || true)
if [ -n "$hits" ]; then complain 'a public header includes stddef.h, stdint.h and epmoe only' "$hits"; fi

# forbid MESSAGE REGEX: complains about the lines of code, without comments, that match.
forbid() {
    local message=$1 regex=$2 file hits
    for file in "${files[@]}"; do
        hits=$(sed -e 's@/\*.*\*/@@' -e '\@/\*@,\@\*/@d' "$file" | grep -E "(^|[^a-zA-Z0-9_])($regex)" || true)
        if [ -n "$hits" ]; then complain "$file: $message" "$hits"; fi
    done
}
mapfile -t files < <(find base kernels comm moe dense_layers -name '*.[ch]' -o -name '*.cu*' 2>/dev/null)
[ ${#files[@]} -gt 0 ]
forbid 'the library never ends the process' '(_?exit|abort|quick_exit|_Exit|raise|assert) *\('
forbid 'the library never prints' '(v?f?printf|f?puts|putchar|putc|fputc|fwrite|perror) *\('
mapfile -t files < <(printf '%s\n' "${files[@]}" | grep -v '^comm/bootstrap_mpi\.c$')
forbid 'only comm/bootstrap_mpi.c sees MPI' '# *include *[<"](mpi|epmoe/epmoe_mpi)\.h'
mapfile -t files < <(printf '%s\n' "${files[@]}" | grep -v '^base/memory\.c$')
forbid 'memory comes from epmoei_alloc' '(malloc|calloc|realloc|aligned_alloc|posix_memalign|strdup|asprintf) *\('
# It is a library of its own, on the public interface.
files=(comm/bootstrap_mpi.c)
forbid 'libepmoe_mpi uses the public headers only' '# *include *"'
mapfile -t files < <(printf '%s\n' "${files[@]}" | grep -vE '^comm/(bootstrap|transport)_nccl\.c$')
forbid 'only comm/*_nccl.c see NCCL' '# *include *[<"]nccl(_device)?\.h'
exit $failed
