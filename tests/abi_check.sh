#!/usr/bin/env bash
# The binary interface is the one of the committed list: every public struct with the place and size of its fields,
# every enum constant, every exported symbol. A change of the list is a change that callers who do not compile anew
# would see: fields appended at a struct's end, new constants and new symbols are compatible, all else is not.
#   abi_check.sh HEADER LIBRARY LIST [INCLUDE FOLDER...]       EPMOE_ABI_WRITE=1 writes LIST instead
set -euo pipefail
header=$1 library=$2 list=$3
shift 3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
flags=(-std=c11 "-I$(dirname "$(dirname "$header")")" "${@/#/-isystem}")

# Only what stands in the header itself: the preprocessor's line marks say where a line is from.
"${CC:-cc}" "${flags[@]}" -E "$header" | awk -v header="$header" '
    /^# [0-9]+ "/ { inside = index($3, "\"" header "\"") == 1; next }
    inside' >"$work/text"

# A program that prints the layouts. Fields that are functions are named in their parentheses; the fields of a struct
# never hold braces, so that a closing one ends it.
{
    printf '#include "%s"\n#include <stdio.h>\nint main(void)\n{\n' "$(realpath "$header")"
    { tr '\n' ' ' <"$work/text" | grep -oE 'typedef (struct|enum) [a-z0-9_]+ \{[^}]*\} *[a-z0-9_]+;' || true; } |
        while read -r _ kind name body; do
            body=${body#\{} body=${body%\}*}
            if [ "$kind" = enum ]; then
                # shellcheck disable=SC2001
                sed 's/, */\n/g' <<<"$body" | sed -nE 's/^ *([A-Z0-9_]+).*/\1/p' |
                    sed 's/.*/    printf("constant & %lld\\n", (long long)&);/'
                continue
            fi
            printf '    printf("struct %s %%zu\\n", sizeof(%s));\n' "$name" "$name"
            sed 's/; */\n/g' <<<"$body" | sed -E 's/.*\(\*([a-z0-9_]+)\).*/\1/; s/\[[^]]*\] *$//; s/.*[ *]//' |
                grep . | while read -r field; do
                printf '    printf("    %s %%zu %%zu\\n", offsetof(%s, %s), sizeof(((%s *)0)->%s));\n' \
                    "$field" "$name" "$field" "$name" "$field"
            done
        done
    printf '    return 0;\n}\n'
} >"$work/layout.c"
"${CC:-cc}" "${flags[@]}" -o "$work/layout" "$work/layout.c"
{
    printf '# struct NAME BYTES, then its fields: NAME OFFSET BYTES; constant NAME VALUE; symbol NAME. 64-bit systems.\n'
    "$work/layout"
    nm -D --defined-only "$library" | awk '$2 != "A" {sub(/@.*/, "", $3); print "symbol " $3}' | LC_ALL=C sort
} >"$work/list"

if [ "${EPMOE_ABI_WRITE:-0}" = 1 ]; then
    cp "$work/list" "$list"
    exit 0
fi
if ! diff -u "$list" "$work/list" >&2; then
    cat >&2 <<END
The binary interface is not that of $list (- the list, + this build). If that is meant: what is not an addition needs a
new minor version (CMakeLists.txt, epmoe.h) and a line in CHANGELOG.md; then
    EPMOE_ABI_WRITE=1 $0 $header $library $list
END
    exit 1
fi
printf '%s: %s structs, %s constants, %s symbols\n' "$(basename "$list")" \
    "$(grep -c '^struct' "$list" || true)" "$(grep -c '^constant' "$list" || true)" "$(grep -c '^symbol' "$list")"
