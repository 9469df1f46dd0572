#!/usr/bin/env bash
# The documentation names what exists: files behind links, test programs and their cases in docs/cases.md, and every
# option of the programs' --help in docs/design.md.
#   docs_check.sh SOURCE_DIR BUILD_DIR
set -euo pipefail
cd "$1"
build=$2
failed=0
complain() {
    printf '%s\n' "$*" >&2
    failed=1
}

for page in README.md CONTRIBUTING.md docs/*.md docs/performance/*.md; do
    while read -r link; do
        [ -e "$(dirname "$page")/$link" ] || complain "$page links to $link, which is not there"
    done < <(grep -oE '\]\([^)#]+\)' "$page" | sed 's/^](//; s/)$//' | grep -v '^https:' || true)
done

# The last column of a row: programs in backticks, each followed by its cases.
while IFS='|' read -r -a column; do
    program=
    for word in ${column[-1]//[,;]/ }; do
        case $word in
        \`test_*\`)
            program=tests/${word//\`/}.c
            [ -e "$program" ] || complain "docs/cases.md names $program, which is not there"
            ;;
        *_*)
            [ -z "$program" ] || grep -qsE "^[A-Za-z]+\(.*\b$word\b" "$program" ||
                complain "docs/cases.md names the case $word, which $program does not have"
            ;;
        esac
    done
done < <(grep '^|.*test_' docs/cases.md | sed 's/ *| *$//')

for program in moe_layer_bench "moe_tool check" "moe_tool info" "moe_tool op"; do
    # shellcheck disable=SC2086
    help=$("$build"/$program --help)
    while read -r option; do
        grep -qF -e "$option" docs/design.md || complain "docs/design.md lacks $option of $program"
    done < <(grep -oE '^  --[a-z-]+' <<<"$help" | tr -d ' ')
done
exit $failed
