# Makes the public headers' comments visible to Doxygen: a comment at the start of a line belongs to what follows, one
# behind a field or constant to that. Lines indented within a comment are formulas and tables: they keep their form.
function emit(text) {
    # What goes on below a list's entry is not a formula.
    item = text ~ /^ \*   - / || (item && text ~ /^ \*     /)
    formula = !item && (text ~ /^ \*     +[^ -]/ || text ~ /^ \*  +[A-Z0-9_]+  +/)
    if (formula && !verbatim) print " * @verbatim"
    if (!formula && verbatim) print " * @endverbatim"
    verbatim = formula
    print text
}

!inside && /^\/\* clang-format/ { next }
!inside && /^\/\* -----/ { next }
!inside && /^\/\* / {
    text = "/** " substr($0, 4)
    if (NR == 1) sub(/^\/\*\* /, "/** @file\n * ", text)
    if ($0 !~ /\*\//) {
        inside = 1
        verbatim = item = 0
    }
    print text
    next
}
inside && /\*\// {
    text = $0
    sub(/ *\*\/.*/, "", text)
    if (text != "" && text != " ") emit(text)
    if (verbatim) print " * @endverbatim"
    print " */"
    inside = verbatim = 0
    next
}
inside { emit($0); next }
# A field's or a constant's.
/[;,] +\/\* / { sub(/\/\* /, "/**< ") }
{ print }
