#!/usr/bin/env bash
# The API reference is made without a warning and describes every public function, struct and status. 77 without Doxygen.
#   doxygen_check.sh SOURCE_DIR
set -euo pipefail
cd "$1"
if ! command -v doxygen >/dev/null; then
    echo 'skipped: no doxygen'
    exit 77
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
{
    cat docs/Doxyfile
    printf 'OUTPUT_DIRECTORY = %s\nGENERATE_HTML = NO\nGENERATE_XML = YES\n' "$work"
} >"$work/Doxyfile"
if ! doxygen "$work/Doxyfile" >"$work/log" 2>&1 || [ -s "$work/log" ]; then
    cat "$work/log" >&2
    exit 1
fi
failed=0
expect() {
    while read -r name; do
        grep -qrF "<$1>$name</$1>" "$work/xml" || { printf 'the reference lacks %s\n' "$name" >&2 && failed=1; }
    done
}
expect name < <(grep -ohE '^EPMOE_API [^;(]*\(' include/epmoe/*.h | grep -oE 'epmoe_[a-z0-9_]+\(' | tr -d '(')
expect name < <(sed -n 's/^    X(\(ERROR_[A-Z_]*\), .*/EPMOE_\1/p' include/epmoe/epmoe.h)
expect compoundname < <(sed -n 's/^typedef struct \([a-z0-9_]*_t\) {$/\1/p' include/epmoe/epmoe.h)
# A function's comment has come with it.
grep -qrF 'Stable counting sort of the T*k slots by expert' "$work/xml" || failed=1
exit $failed
