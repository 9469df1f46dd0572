#!/usr/bin/env python3
"""Line coverage of the host code, from the counters that a build with gcc --coverage left.

    coverage.py BUILD

asks gcov for the counts of every object in BUILD and adds them up per source line, whichever object or process ran it.
Lines that only stand in for a backend that the build lacks (the other side of `#if EPMOE_HAVE_CUDA`) do not count. It
prints a line per folder, writes BUILD/uncovered.txt (every file with the lines that nothing ran), and fails when the
library, the tools or the bench have less than 90 % of their lines covered.
"""
import concurrent.futures
import json
import os
import pathlib
import re
import subprocess
import sys

PARTS = {"library": ["base", "comm", "dense_layers", "kernels", "moe"], "tools": ["tools"], "bench": ["bench"]}
REQUIRED = 0.9
ROOT = pathlib.Path(__file__).resolve().parent.parent


def stand_ins(path):
    """The lines of a source that are compiled because CUDA or NCCL is not there."""
    lines, stack = set(), []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        directive = re.match(r"\s*#\s*(if|ifdef|ifndef|elif|else|endif)\b(.*)", text)
        if not directive:
            if any(absent for absent, _ in stack):
                lines.add(number)
            continue
        word, condition = directive.groups()
        if word in ("if", "ifdef", "ifndef"):
            backend = re.search(r"EPMOE_HAVE_(CUDA|NCCL)", condition)
            negated = word == "ifndef" or condition.strip().startswith("!")
            stack.append((bool(backend and negated), bool(backend and not negated)))
        elif word in ("elif", "else"):
            stack[-1] = (stack[-1][1], False)
        else:
            stack.pop()
    return lines


def gcov(note):
    """The counts of one object, run or not, as (source, line, count)."""
    build = note.parent
    answer = subprocess.run(["gcov", "--json-format", "--stdout", note.name], cwd=build, capture_output=True, text=True)
    if answer.returncode != 0:
        sys.exit(f"coverage: gcov failed on {note}: {answer.stderr.strip()}")
    found = []
    for text in answer.stdout.splitlines():
        report = json.loads(text)
        for file in report["files"]:
            source = os.path.normpath(os.path.join(report["current_working_directory"], file["file"]))
            found += [(source, line["line_number"], line["count"]) for line in file["lines"]]
    return found


def ranges(numbers):
    """1, 2, 3, 7 as "1-3 7"."""
    runs = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def collect(build):
    folders = {folder for part in PARTS.values() for folder in part}
    files = {}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for found in pool.map(gcov, sorted(build.rglob("*.gcno"))):
            for source, line, count in found:
                path = pathlib.Path(source)
                if ROOT in path.parents and path.relative_to(ROOT).parts[0] in folders:
                    counts = files.setdefault(path, {})
                    counts[line] = max(counts.get(line, 0), count)
    for path, counts in files.items():
        for line in stand_ins(path):
            counts.pop(line, None)
    return {path.relative_to(ROOT).as_posix(): counts for path, counts in sorted(files.items()) if counts}


def main():
    if len(sys.argv) != 2 or not pathlib.Path(sys.argv[1]).is_dir():
        sys.exit("usage: coverage.py BUILD, a folder built with gcc --coverage")
    build = pathlib.Path(sys.argv[1]).resolve()
    files = collect(build)
    if not files:
        sys.exit(f"coverage: {build} has no counters: was it built with gcc --coverage?")

    def show(name, chosen):
        lines = sum(len(files[path]) for path in chosen)
        covered = sum(count > 0 for path in chosen for count in files[path].values())
        share = covered / lines if lines else 0.0
        print(f"{name:<14}{lines:>7}{covered:>9}{100 * share:>8.1f} %")
        return share

    print(f"{'':<14}{'lines':>7}{'covered':>9}")
    low = []
    for part, folders in PARTS.items():
        if len(folders) > 1:
            for folder in folders:
                show("  " + folder + "/", [path for path in files if path.startswith(folder + "/")])
        covered = show(part, [path for path in files if path.split("/")[0] in folders])
        if covered < REQUIRED:
            low.append(part)
    left = {path: [line for line, count in counts.items() if count == 0] for path, counts in files.items()}
    with (build / "uncovered.txt").open("w", encoding="utf-8") as out:
        for path in sorted(left, key=lambda path: -len(left[path])):
            if left[path]:
                out.write(f"{path}: {len(left[path])} of {len(files[path])} lines: {ranges(left[path])}\n")
    print(f"The lines that nothing ran: {build / 'uncovered.txt'}")
    if low:
        sys.exit(f"coverage: less than {100 * REQUIRED:.0f} % of the lines are covered: {', '.join(low)}")


if __name__ == "__main__":
    main()
