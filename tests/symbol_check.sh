#!/usr/bin/env bash
# A shared library exports the public names and nothing else, and every function that its header declares.
#   symbol_check.sh HEADER LIBRARY
set -euo pipefail
header=$1 library=$2

exported=$(nm -D --defined-only "$library" | awk '$2 != "A" {sub(/@.*/, "", $3); print $3}' | sort)
stray=$(grep -v '^epmoe_' <<<"$exported" || true)
if [ -n "$stray" ]; then
    printf '%s exports more than epmoe_ names:\n%s\n' "$library" "$stray" >&2
    exit 1
fi
declared=$(grep -oE '^EPMOE_API [^;(]*\(' "$header" | grep -oE 'epmoe_[a-z0-9_]+\(' | tr -d '(' | sort)
missing=$(comm -23 <(printf '%s\n' "$declared") <(printf '%s\n' "$exported"))
undeclared=$(comm -13 <(printf '%s\n' "$declared") <(printf '%s\n' "$exported"))
if [ -n "$missing$undeclared" ]; then
    printf '%s\n  declared, not exported: %s\n  exported, not declared: %s\n' \
        "$library" "${missing//$'\n'/ }" "${undeclared//$'\n'/ }" >&2
    exit 1
fi
printf '%s: %s symbols\n' "$(basename "$library")" "$(wc -l <<<"$exported")"
