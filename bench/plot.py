#!/usr/bin/env python3
"""Draws what moe_layer_bench measured: the roofline over the number of tokens, and the time of each stage.

    for d in bf16 fp8 w4; do
        build/moe_layer_bench --model deepseek-v3 --tokens 1,4,16,64,256,1024,4096 --dtype $d --format json
    done >runs.jsonl
    bench/plot.py runs.jsonl --plot out.svg

Files hold one JSON object per line, as --format json prints them, of any number of runs; "-" is stdin. The end of the
name decides the format: svg, pdf, png. Needs Matplotlib.
"""

import argparse
import json
import sys

STAGES = ["router", "align", "dispatch", "gemm1", "act", "gemm2", "combine", "shared", "attention"]


def read(paths):
    """The records of whole layers; what --op printed has no stages and is left out."""
    records = []
    for path in paths:
        with sys.stdin if path == "-" else open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except ValueError as error:
                    sys.exit(f"plot.py: {path} line {number} is not JSON: {error}")
                if "stages_us" in record and record["floor_us"]:  # without tokens there is nothing to draw
                    record["tokens"] = most_tokens(record["tokens_per_rank"])
                    records.append(record)
    if not records:
        sys.exit(f"plot.py: {', '.join(paths)}: no line of a layer with tokens: expected what moe_layer_bench --format json prints")
    return records


def most_tokens(tokens):
    return max(tokens) if isinstance(tokens, list) else tokens


def series(records):
    """{label: records in the order of tokens}. The label says what differs between the series."""
    names = ("model", "dtype", "ranks", "transport", "arch", "device")
    differ = [name for name in names if len({str(record[name]) for record in records}) > 1] or ["dtype"]
    result = {}
    for record in records:
        label = ", ".join(f"{record[name]} ranks" if name == "ranks" else str(record[name]) for name in differ)
        result.setdefault(label, []).append(record)
    for runs in result.values():
        runs.sort(key=lambda record: record["tokens"])
    return result


def roof(record):
    """TFLOP/s that the layer would reach at its floor: measured rate times the ratio of the two times."""
    return record["tflops"] * record["us_median"] / record["floor_us"]


def title(records):
    first = records[0]
    same = [str(first[name]) for name in ("model", "device", "arch") if first[name] and
            len({record[name] for record in records}) == 1]
    return ", ".join(same)


def draw_roofline(axes, groups):
    for number, (label, runs) in enumerate(groups.items()):
        color = f"C{number % 10}"
        tokens = [record["tokens"] for record in runs]
        rate = [record["tflops"] for record in runs]
        # The slowest and fastest iteration; rates fall as times rise.
        low = [max(0, r - r * record["us_median"] / record["us_max"]) for r, record in zip(rate, runs)]
        high = [max(0, r * record["us_median"] / record["us_min"] - r) for r, record in zip(rate, runs)]
        axes.errorbar(tokens, rate, yerr=[low, high], fmt="o-", color=color, label=label, gid=f"measured {label}")
        axes.plot(tokens, [roof(record) for record in runs], "--", color=color, gid=f"roof {label}")
        for record, r in zip(runs, rate):
            axes.annotate(f"{record['floor_fraction']:.2f}", (record["tokens"], r), textcoords="offset points",
                          xytext=(0, -12), ha="center", fontsize=7, color=color)
    axes.set(yscale="log", xlabel="tokens per rank", ylabel="TFLOP/s",
             title="measured (with fraction of the floor), and the floor (dashed)")
    axes.set_xscale("log", base=2)
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize=8)


def draw_stages(axes, groups):
    """A bar per run: its stages on top of each other. On CUDA they are timed in runs of their own, so that their sum is
    not the time of the whole."""
    bars = [(label, record) for label, runs in groups.items() for record in runs]
    names = [f"{record['tokens']}" if len(groups) == 1 else f"{record['tokens']}\n{label}" for label, record in bars]
    bottom = [0.0] * len(bars)
    for stage in STAGES:
        share = [100 * record["stages_us"].get(stage, 0) / max(sum(record["stages_us"].values()), 1e-9)
                 for _, record in bars]
        if any(share):
            axes.bar(range(len(bars)), share, bottom=bottom, label=stage, gid=f"stage {stage}")
        bottom = [low + one for low, one in zip(bottom, share)]
    for place, (_, record) in enumerate(bars):
        axes.annotate(f"{record['us_median']:.0f}", (place, 101), ha="center", fontsize=7)
    axes.set_xticks(range(len(bars)), names, fontsize=7, rotation=0 if len(groups) == 1 else 90)
    axes.set(ylim=(0, 108), xlabel="tokens per rank", ylabel="% of the stages' time",
             title="stages (above: us of the whole layer)")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="JSON lines of moe_layer_bench")
    parser.add_argument("--plot", required=True, help="where the picture goes: .svg, .pdf or .png")
    arguments = parser.parse_args()
    try:
        import matplotlib
    except ImportError:
        print("plot.py: skipped: Matplotlib is not installed (Debian: python3-matplotlib)", file=sys.stderr)
        return 77
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
    from matplotlib import pyplot
    records = read(arguments.files)
    groups = series(records)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(14, 6), constrained_layout=True)
    figure.suptitle(title(records))
    draw_roofline(left, groups)
    draw_stages(right, groups)
    try:
        figure.savefig(arguments.plot)
    except (OSError, ValueError) as error:
        sys.exit(f"plot.py: {arguments.plot}: {error}")
    # Not to stdout: there the bench prints its lines.
    print(f"{arguments.plot}: {len(records)} case{'s' * (len(records) != 1)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
