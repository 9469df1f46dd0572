#!/usr/bin/env python3
"""The gain of 4-bit experts over bf16 ones, from lines of `moe_layer_bench --format json`.

    w4_curve.py LINES... BASE

reads the lines of all files ("-" = stdin) and writes BASE.csv: for every model, machine and number of tokens the times
of each dtype and how many times faster than bf16 it is, as the whole layer and in its two expert products. With
matplotlib installed it also writes BASE.svg. A line whose check failed, or that was not checked, is an error: a wrong
result has no speed.
"""
import csv
import json
import sys

COLUMNS = ["model", "device", "arch", "ranks", "tokens", "dtype", "us_median", "us_min", "us_max", "floor_us",
           "floor_fraction", "gemm_us", "layer_over_bf16", "gemm_over_bf16"]


def read(paths):
    lines = []
    for path in paths:
        with (sys.stdin if path == "-" else open(path, encoding="utf-8")) as file:
            lines += [json.loads(line) for line in file if line.strip()]
    return lines


def key(line):
    """What must be equal for two times to be compared."""
    return (line["model"], line["device"] or line["backend"], line["arch"], line["ranks"], line["graph"],
            line["routing"], line["seed"], line["tokens_per_rank"])


def gemm_us(line):
    times = [line["stages_us"].get(stage) for stage in ("gemm1", "gemm2")]
    return None if None in times else sum(times)


def ratio(base, own):
    return base / own if base and own else None


def rows_of(lines):
    base = {}
    for line in lines:
        if "op" in line or isinstance(line["tokens_per_rank"], list):
            raise ValueError("a line is not of a layer with the same tokens on all ranks")
        if line["wrong"] != 0:
            raise ValueError(f"{line['model']} {line['dtype']} T {line['tokens_per_rank']}: "
                             + ("not checked" if line["wrong"] is None else f"{line['wrong']} values are wrong"))
        if line["dtype"] == "bf16":
            base[key(line)] = line
    rows = []
    for line in sorted(lines, key=lambda one: (str(key(one)[:-1]), one["dtype"], one["tokens_per_rank"])):
        of = base.get(key(line))
        if of is None:
            raise ValueError(f"{line['model']} T {line['tokens_per_rank']}: there is no line of bf16 to compare with")
        rows.append({
            **{name: line[name] for name in COLUMNS if name in line},
            "device": line["device"] or line["backend"],
            "tokens": line["tokens_per_rank"],
            "gemm_us": gemm_us(line),
            "layer_over_bf16": ratio(of["us_median"], line["us_median"]),
            "gemm_over_bf16": ratio(gemm_us(of), gemm_us(line)),
        })
    return rows


def write_csv(rows, path):
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({name: f"{value:.4g}" if isinstance(value, float) else value for name, value in row.items()})


def plot(rows, path):
    import matplotlib
    matplotlib.use("svg")
    from matplotlib import pyplot
    matplotlib.rcParams["svg.hashsalt"] = "w4_curve"  # the same lines give the same file
    models = sorted({(row["model"], row["device"]) for row in rows})
    figure, axes = pyplot.subplots(1, len(models), figsize=(6.4 * len(models), 4.2), squeeze=False)
    for axis, (model, device) in zip(axes[0], models):
        here = [row for row in rows if (row["model"], row["device"]) == (model, device) and row["dtype"] != "bf16"]
        for dtype in sorted({row["dtype"] for row in here}):
            for name, style, label in (("layer_over_bf16", "-o", "layer"), ("gemm_over_bf16", "--s", "expert products")):
                points = [(row["tokens"], row[name]) for row in here if row["dtype"] == dtype and row[name]]
                if points:
                    axis.plot(*zip(*points), style, markersize=4, label=f"{dtype}, {label}")
        axis.axhline(1, color="grey", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.set_xlabel("tokens")
        axis.set_ylabel("times as fast as bf16")
        axis.set_title(f"{model} on {device}", fontsize=10)
        axis.grid(True, linewidth=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main(argv):
    if len(argv) < 3:
        print(__doc__, file=sys.stderr)
        return 2
    *paths, base = argv[1:]
    try:
        rows = rows_of(read(paths))
        write_csv(rows, base + ".csv")
    except (OSError, ValueError, KeyError) as error:
        print(f"w4_curve.py: {error!r}" if isinstance(error, KeyError) else f"w4_curve.py: {error}", file=sys.stderr)
        return 1
    try:
        plot(rows, base + ".svg")
    except ImportError as error:
        print(f"w4_curve.py: no plot: {error}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
