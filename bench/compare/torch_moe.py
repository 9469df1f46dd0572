#!/usr/bin/env python3
"""Times the same MoE layers in PyTorch and prints them beside moe_layer_bench's.

    moe_layer_bench --model qwen3-30b-a3b --tokens 1,16,256,4096 --format json >ours.jsonl
    bench/compare/torch_moe.py ours.jsonl

Reads the bench's JSON lines (one rank, bf16, a preset, routing uniform or one-expert), or takes a case from --model
with --tokens, and then has nothing to compare with. See README.md beside this file for what is timed and how.
"""

import argparse
import json
import math
import statistics
import sys

import numpy as np
import torch
import torch.nn.functional as F

SHAPES = {  # hidden, intermediate, experts, top k, shared intermediate
    "mixtral-8x7b": (4096, 14336, 8, 2, 0),
    "mixtral-8x22b": (6144, 16384, 8, 2, 0),
    "qwen3-30b-a3b": (2048, 768, 128, 8, 0),
    "qwen3-235b-a22b": (4096, 1536, 128, 8, 0),
    "deepseek-v3": (7168, 2048, 256, 8, 2048),
    "kimi-k2": (7168, 2048, 384, 8, 2048),
    "glm-4.5": (5120, 1536, 160, 8, 1536),
    "olmoe-1b-7b": (2048, 1024, 64, 8, 0),
}
SIGMOID = {"deepseek-v3": (8, 4, 2.5), "kimi-k2": (1, 1, 2.827), "glm-4.5": (1, 1, 2.5)}  # groups, kept, scale
NOT_RENORMALIZED = {"olmoe-1b-7b"}

FLUSH_BYTES = 256 << 20
LOW_LOGIT = -120.0
CHECKED_TOKENS = 8
TOLERANCE = 2e-2


# --------------------------------------------------------------------------------------------------------- routing


def mix(z):
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class Generator:
    """The bench's generators of all tokens side by side (random.h)."""

    STEP = np.uint64(0x9E3779B97F4A7C15)
    ROUTING = np.uint64(2)

    def __init__(self, seed, num_tokens):
        key = mix(np.array([seed], np.uint64) + self.STEP * self.ROUTING)
        self.state = mix(key + self.STEP * (np.arange(num_tokens, dtype=np.uint64) + np.uint64(1)))

    def below(self, n):
        self.state = self.state + self.STEP
        return ((mix(self.state) >> np.uint64(32)) * np.uint64(n) >> np.uint64(32)).astype(np.int64)

    def shuffle(self, n, count):
        """[T,count]: the first of items 0..n-1 shuffled."""
        rows = np.arange(len(self.state))
        items = np.tile(np.arange(n), (len(rows), 1))
        for i in range(count):
            other = i + self.below(n - i)
            taken = items[rows, other].copy()
            items[rows, other] = items[:, i]
            items[:, i] = taken
        return items[:, :count]


def draw(case):
    """ids [T,k], those that the bench drew."""
    tokens, experts, k = case["tokens"], case["num_experts"], case["top_k"]
    if case["routing"] == "one-expert":
        return np.tile(np.arange(k), (tokens, 1))
    groups, kept, _ = SIGMOID.get(case["model"], (1, 1, 1))
    size = experts // groups
    with np.errstate(over="ignore"):
        generator = Generator(case["seed"], tokens)
        chosen = generator.shuffle(groups, kept)
        places = generator.shuffle(kept * size, k)
    return np.take_along_axis(chosen, places // size, 1) * size + places % size


# ----------------------------------------------------------------------------------------------------------- layer


def grouped_mm(x, weight, offsets):
    """x [M,K] times weight [E,N,K] of each row's expert; rows of expert e end at offsets[e]."""
    function = getattr(F, "grouped_mm", None) or torch._grouped_mm
    return function(x, weight.transpose(1, 2), offs=offsets)


def swiglu(h):
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


class Layer:
    def __init__(self, case):
        self.model, self.k = case["model"], case["top_k"]
        d, f, experts, shared = case["hidden"], case["intermediate"], case["num_experts"], case["shared_intermediate"]
        self.router = random_matrix(experts, d)
        self.gate_up = random_matrix(experts, 2 * f, d)
        self.down = random_matrix(experts, d, f)
        self.shared_gate_up = random_matrix(2 * shared, d) if shared else None
        self.shared_down = random_matrix(d, shared) if shared else None
        self.experts = torch.arange(experts, device="cuda", dtype=torch.int16)
        self.bias = torch.zeros(experts, device="cuda")

    def route(self, x, forced):
        """The logits are computed and then replaced, as the bench does."""
        F.linear(x, self.router)
        if self.model not in SIGMOID:
            weights, ids = torch.topk(torch.softmax(forced, dim=-1), self.k, dim=-1)
            if self.model not in NOT_RENORMALIZED:
                weights = weights / weights.sum(-1, keepdim=True)
            return weights, ids
        groups, kept, scale = SIGMOID[self.model]
        scores = torch.sigmoid(forced)
        choice = scores + self.bias
        if groups > 1:
            by_group = choice.view(len(x), groups, -1)
            best = by_group.topk(2, dim=-1).values.sum(-1).topk(kept, dim=-1, sorted=False).indices
            mask = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter_(1, best, False)
            choice = by_group.masked_fill(mask.unsqueeze(-1), -math.inf).view_as(choice)
        ids = choice.topk(self.k, dim=-1).indices
        weights = scores.gather(1, ids)
        return weights / weights.sum(-1, keepdim=True) * scale, ids

    def forward(self, x, forced, combine):
        weights, ids = self.route(x, forced)
        flat, order = torch.sort(ids.view(-1).to(torch.int16), stable=True)
        offsets = torch.searchsorted(flat, self.experts, right=True, out_int32=True)
        tokens = order.div(self.k, rounding_mode="floor")
        h = swiglu(grouped_mm(x.index_select(0, tokens), self.gate_up, offsets))
        y = combine(grouped_mm(h, self.down, offsets), weights, order, tokens, len(x))
        if self.shared_gate_up is not None:
            y += F.linear(swiglu(F.linear(x, self.shared_gate_up)), self.shared_down)
        return y


def combine_index_add(rows, weights, order, tokens, num_tokens):
    weighted = rows.mul_(weights.view(-1).index_select(0, order).to(rows.dtype).unsqueeze(1))
    return rows.new_zeros(num_tokens, rows.shape[1]).index_add_(0, tokens, weighted)


def unpermute(rows, order):
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return rows.index_select(0, inverse)


def combine_sum(rows, weights, order, tokens, num_tokens):
    slots = unpermute(rows, order).view(num_tokens, -1, rows.shape[1])
    return slots.mul_(weights.to(rows.dtype).unsqueeze(-1)).sum(1)


def combine_bmm(rows, weights, order, tokens, num_tokens):
    slots = unpermute(rows, order).view(num_tokens, -1, rows.shape[1])
    return torch.bmm(weights.to(rows.dtype).unsqueeze(1), slots).squeeze(1)


COMBINES = (combine_index_add, combine_sum, combine_bmm)


def random_matrix(*shape):
    """Variance 1/K. Never zeros: a device multiplies these faster."""
    return torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(std=shape[-1] ** -0.5)


# ---------------------------------------------------------------------------------------------------------- timing


def check(layer, x, ids, forced, out):
    """The first tokens in fp32, expert by expert."""
    count = min(CHECKED_TOKENS, len(x))
    weights, chosen = layer.route(x, forced)
    assert all(set(a) == set(b) for a, b in zip(chosen.tolist(), ids.tolist())), "the router chose other experts"
    for t in range(count):
        row, expected = x[t].float(), torch.zeros(x.shape[1], device="cuda")
        for weight, e in zip(weights[t].tolist(), chosen[t].tolist()):
            gate, up = (layer.gate_up[e].float() @ row).chunk(2)
            expected += weight * (layer.down[e].float() @ (F.silu(gate) * up))
        if layer.shared_gate_up is not None:
            gate, up = (layer.shared_gate_up.float() @ row).chunk(2)
            expected += layer.shared_down.float() @ (F.silu(gate) * up)
        error = ((out[t].float() - expected).norm() / expected.norm()).item()
        assert error < TOLERANCE, f"token {t} is wrong by {error:.2e}"


def time_graph(run, flush, warmup, iters):
    """Median of replays in us, and what the last one computed. The cache is filled by reading, as the bench does."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    times = []
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for i in range(warmup + iters):
        flush.sum()
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        if i >= warmup:
            times.append(1e3 * start.elapsed_time(stop))
    return statistics.median(times), out


def time_case(case, layer, flush, warmup, iters):
    tokens = case["tokens"]
    ids = draw(case)
    if case.get("load") is not None:
        load = np.bincount(ids.ravel(), minlength=case["num_experts"]).max() * case["num_experts"] / ids.size
        if abs(load - case["load"]) > 1e-6 * load:
            sys.exit(f"{case['model']} T={tokens}: the drawn load is {load}, the bench's {case['load']}")
    x = torch.randn(tokens, case["hidden"], device="cuda").bfloat16()
    forced = torch.full((tokens, case["num_experts"]), LOW_LOGIT, device="cuda")
    forced.scatter_(1, torch.from_numpy(ids).cuda(), torch.linspace(1, -1, case["top_k"], device="cuda").repeat(tokens, 1))
    best, name = math.inf, ""
    for combine in COMBINES:
        us, out = time_graph(lambda: layer.forward(x, forced, combine), flush, warmup, iters)
        check(layer, x, ids, forced, out)
        if us < best:
            best, name = us, combine.__name__.removeprefix("combine_")
    return best, name


# ------------------------------------------------------------------------------------------------------------ main


def reason_to_skip(line):
    if "op" in line:
        return "a single op"
    if line["ranks"] != 1 or line["dtype"] != "bf16":
        return f"{line['ranks']} ranks in {line['dtype']}: one rank in bf16 is compared"
    if line["model"] not in SHAPES:
        return "this script does not know the model"
    if line["routing"] not in ("uniform", "one-expert"):
        return f"routing {line['routing']} is not drawn here"
    return None if line["tokens_per_rank"] else "no tokens"


def read_cases(paths):
    cases = []
    for path in paths:
        with sys.stdin if path == "-" else open(path, encoding="utf-8") as file:
            for text in file:
                line = json.loads(text)
                reason = reason_to_skip(line)
                if reason:
                    print(f"skipped {line['model']}: {reason}", file=sys.stderr)
                    continue
                keys = ("model", "hidden", "intermediate", "num_experts", "top_k", "shared_intermediate", "routing", "seed")
                cases.append({key: line[key] for key in keys} | {
                    "tokens": line["tokens_per_rank"], "ours": line["us_median"], "floor": line["floor_us"],
                    "load": line["load_max_over_mean"]})
    return cases


def make_cases(model, tokens, routing, seed):
    d, f, experts, k, shared = SHAPES[model]
    return [{"model": model, "hidden": d, "intermediate": f, "num_experts": experts, "top_k": k,
             "shared_intermediate": shared, "routing": routing, "seed": seed, "tokens": int(count)}
            for count in tokens.split(",")]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="output of moe_layer_bench --format json; - reads stdin")
    parser.add_argument("--model", choices=sorted(SHAPES), help="without files")
    parser.add_argument("--tokens", default="1,16,64,128,256,1024,4096,8192")
    parser.add_argument("--routing", choices=("uniform", "one-expert"), default="uniform")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--iters", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--format", choices=("table", "json"), default="table")
    args = parser.parse_args()
    if bool(args.files) == bool(args.model):
        parser.error("give files of the bench's JSON, or --model")
    cases = read_cases(args.files) if args.files else make_cases(args.model, args.tokens, args.routing, args.seed)
    if not cases:
        sys.exit("nothing to compare")
    torch.manual_seed(args.seed)
    flush = torch.ones(FLUSH_BYTES // 4, device="cuda")
    if args.format == "table":
        print(f"PyTorch {torch.__version__} on {torch.cuda.get_device_name()}, us, median of {args.iters} graph replays")
        print(f"{'model':<18} {'tokens':>7} {'torch':>10} {'epmoe':>10} {'torch/epmoe':>12} {'floor':>10}  combine")
    layer, made = None, None
    with torch.inference_mode():
        for case in cases:
            if made != case["model"]:
                layer = None  # first, so that two layers never lie in memory together
                torch.cuda.empty_cache()
                layer, made = Layer(case), case["model"]
            us, combine = time_case(case, layer, flush, args.warmup, args.iters)
            ours, floor = case.get("ours"), case.get("floor")
            if args.format == "json":
                print(json.dumps({"model": case["model"], "tokens": case["tokens"], "torch_us": us, "epmoe_us": ours,
                                  "ratio": us / ours if ours else None, "floor_us": floor, "combine": combine}))
            else:
                texts = [f"{value:.1f}" if value else "-" for value in (us, ours)]
                ratio = f"{us / ours:.2f}" if ours else "-"
                print(f"{case['model']:<18} {case['tokens']:>7} {texts[0]:>10} {texts[1]:>10} {ratio:>12} "
                      f"{f'{floor:.1f}' if floor else '-':>10}  {combine}")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
