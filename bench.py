"""Every number in the README.

    python bench.py count [config ...]       parameters and operations of cells, the paper's accounting and ours
    python bench.py cells [--scale=tiny]     the paper's table: the command of every cell, the paper's value, ours
    python bench.py train [config ...]       speed of training steps, against their bare matrix products and attention calls
    python bench.py decode [config ...]      latency and memory of generation, likewise
    python bench.py quality --run=out/...    what shared keys and values, and early exit, cost a trained model
    python bench.py paper                    the paper's serving table and training speed, on a GPU

Speeds are medians of rounds A B A B ... over all configs in one process, warm-up and compilation excluded. Settings:
"""
import contextlib
import dataclasses
import functools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import torch
import torch.nn.functional as F

import config
from config import ConfigError
from model import CheckpointError, KVCache, ModelError, Transformer, from_checkpoint, load_checkpoint
from prepare import DataError, open_dataset
from train import (MAY_CHANGE, TrainConfig, checkpoint_path, find_autocast, find_device, load_windows, low_precision,
                   make_optimizer, peak_flops, wants_compile)

SYSTEMS = ("dense", "looped", "mor", "poisson", "grt")
LADDER = ("ladder_0_looped", "ladder_1_prelude_coda", "ladder_2_noise", "ladder_3_anchor", "ladder_4_gate")
BUDGETS = (0.5, 1, 2)

# validation losses at 9.83 billion tokens that the paper reports; its half and double budgets are not published
PAPER = {"dense_small": 3.15, "mor_small": 3.30, "poisson_small": 3.23, "grt_small": 3.14,
         "dense_medium": 2.84, "mor_medium": 3.02, "poisson_medium": 2.97, "grt_medium": 2.89,
         "dense_large": 2.71, "mor_large": 2.91, "poisson_large": 2.93, "grt_large": 2.77,
         "grt_small_isoparam": 3.04, "grt_medium_isoparam": 2.76, "grt_large_isoparam": 2.65, "poisson_medium_isoparam": 2.74,
         # the ladder: 3.157 for dense, and the change each rung brings
         "ladder_0_looped": 3.264, "ladder_1_prelude_coda": 3.229, "ladder_2_noise": 3.211, "ladder_3_anchor": 3.189,
         "ladder_4_gate": 3.141}


@dataclass(frozen=True)
class BenchConfig:
    """Every setting of bench.py."""
    scale: str = ""                            # cells: tiny, small, medium or large alone; "" is the paper's three
    tokens_per_second: Optional[float] = None  # cells: what dense_small trains at on one GPU; prices every cell in GPU-hours
    json: bool = False                         # print JSON instead of a table
    device: str = "auto"                       # auto, cpu, cuda, cuda:1, mps
    dtype: str = "auto"                        # auto, float32 or bfloat16; auto is bfloat16 on GPUs that have it
    compile: Optional[bool] = None             # None compiles on CUDA
    rounds: int = 5                            # train, decode: timed rounds
    batch_size: int = 1                        # train, decode: sequences side by side
    context: int = 128                         # decode: tokens of text before and after the measured ones
    new_tokens: int = 32                       # decode: tokens timed in each round
    kv: str = "full"                           # decode: what the cache keeps of the R steps; "all" compares the four
    exit_kl: str = "5e-2,5e-3,5e-4,5e-5"       # quality: thresholds to try
    run: str = ""                              # quality: the trained run


def table(rows, titles):
    """Rows of cells as aligned text: names to the left, numbers to the right."""
    rows = [[str(cell) for cell in row] for row in [titles, *rows]]
    first, *others = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join([row[0].ljust(first), *(cell.rjust(w) for cell, w in zip(row[1:], others))]).rstrip() for row in rows)


def cell_names():
    """Every cell under config/: the files that say which variant they train, themselves or through their base."""
    files = sorted(Path(config.__file__).parent.glob("[!_]*.py"))
    return [f.stem for f in files if "variant" in config.read_file(TrainConfig, f.stem)]


@functools.cache
def cell(name, *flags):
    return config.load(TrainConfig, [name, *flags])


def num_params(c):
    """Parameters by part, nothing allocated."""
    with torch.device("meta"):
        return Transformer(c).num_params()


# ---------------------------------------------------------------------------------------------------------------------
# count


ACCOUNTINGS = {"paper": "paper's formula", "paper_head": "and the head", "executed": "executed", "executed_head": "and the head"}


def count_cell(name):
    """What a cell stores, runs and costs, beside the dense cell of its scale."""
    c = cell(name)
    dense, found = cell(c.reference), {"cell": name, "layout": c.layout, "parameters": num_params(c)}
    found["fewer_than_dense"] = 1 - found["parameters"]["total"] / num_params(dense)["total"]
    for key in ACCOUNTINGS:
        how = {"accounting": key.removesuffix("_head"), "head": key.endswith("_head")}
        forward, train = c.flops_per_token(**how), c.train_flops_per_token(**how)
        found[key] = {"forward": forward, "forward_of_dense": forward / dense.flops_per_token(**how),
                      "train": train, "train_of_dense": train / dense.train_flops_per_token(**how)}
    tokens = [cell(name, f"--budget={b}").steps * c.tokens_per_step for b in BUDGETS]
    found["runs"] = [{"budget": b, "tokens": n, "train_flops": n * c.train_flops_per_token(),
                      "train_flops_of_dense": c.train_flops_per_token() / dense.train_flops_per_token()}
                     for b, n in zip(BUDGETS, tokens)]
    return found


def count(b, names):
    found = [count_cell(name) for name in names or cell_names()]
    if b.json:
        return print(json.dumps(found, indent=1))
    for f in found if names else []:
        print(f"{f['cell']}: {f['layout']}")
        print(table([[part, f"{n:,}"] for part, n in f["parameters"].items() if n], ["parameters", ""]))
        print(f"{f['fewer_than_dense']:.1%} fewer than dense\n")
        print(table([[label, f"{f[key]['forward'] / 1e6:,.4g}", f"{f[key]['forward_of_dense']:.3f}",
                      f"{f[key]['train'] / 1e6:,.4g}", f"{f[key]['train_of_dense']:.3f}"] for key, label in ACCOUNTINGS.items()],
                    ["MFLOP per token", "forward", "of dense", "training, expected", "of dense"]) + "\n")
        print(table([[f"{run['budget']:g}x", f"{run['tokens'] / 1e9:.4g}", f"{run['train_flops'] / 1e18:.4g}",
                      f"{run['train_flops_of_dense']:.3f}"] for run in f["runs"]],
                    ["budget", "G tokens", "EFLOP to train", "of dense"]) + "\n")
    if not names:
        print(table([[f["cell"], f["layout"], f"{f['parameters']['total']:,}", f"{f['fewer_than_dense']:.1%}",
                      f"{f['executed']['forward'] / 1e6:,.4g}", *(f"{f[key]['forward_of_dense']:.3f}" for key in ACCOUNTINGS),
                      *(f"{f[key]['train_of_dense']:.3f}" for key in ("paper", "executed_head")),
                      f"{f['runs'][1]['tokens'] / 1e9:.4g}", f"{f['runs'][1]['train_flops'] / 1e18:.4g}"] for f in found],
                    ["cell", "layout", "parameters", "fewer", "MFLOP/token", "paper", "+head", "executed", "+head",
                     "train, paper", "executed+head", "G tokens", "EFLOP"]))
        print("\nMFLOP/token: forward, executed, head not counted. paper ... +head: forward of dense by the paper's formula "
              "and as executed.\ntrain: expected training operations a token, of dense. G tokens, EFLOP: the standard budget.")


# ---------------------------------------------------------------------------------------------------------------------
# cells


def trained_runs(folder="out"):
    """Every run under out/ that has been evaluated: its settings, and the last evaluation."""
    for path in sorted(Path(folder).glob("*/log.jsonl")):
        entries = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        evaluations = [e for e in entries if "val_loss" in e]
        if entries and "settings" in entries[0] and evaluations:
            yield path.parent, entries[0]["settings"], entries[0]["steps"], evaluations[-1]


def our_value(c, runs):
    """The validation loss of a cell where it has been trained; * where the run's settings are not the cell's, with how
    they differ. A run that is not finished does not count."""
    for folder, settings, steps, last in runs:
        if (settings["cell"], settings["budget"], settings["match"]) == (c.cell, c.budget, c.match) and last["step"] == steps:
            mine = dataclasses.asdict(c)
            free = MAY_CHANGE - {"max_iters"}
            differ = [f"{k}={settings.get(k)}" for k in mine if k not in free and settings.get(k) != mine[k]]
            return f"{last['val_loss']:.3f}" + "*" * bool(differ), f"{folder}: {', '.join(differ)}" if differ else ""
    return "", ""


def cells(b, names):
    if names or b.scale not in ("", "tiny", "small", "medium", "large"):
        raise ConfigError("usage: bench.py cells [--scale=tiny|small|medium|large] [--tokens_per_second=N]")
    rows, notes, runs = [], [], list(trained_runs())
    scales = [b.scale] if b.scale else ["small", "medium", "large"]
    wanted = [(f"{system}_{scale}", f"--budget={budget}") for scale in scales for budget in BUDGETS for system in SYSTEMS]
    wanted += [(f"grt_{scale}", f"--budget={budget}", "--match=train_flops") for scale in scales for budget in BUDGETS]
    wanted += [(f"{system}_{scale}_isoparam",) for scale in scales for system in ("grt", "poisson")]
    wanted += [(name + ("_tiny" if b.scale == "tiny" else ""),) for name in LADDER if b.scale in ("", "tiny", "small")]
    existing = set(cell_names())
    for name, *flags in wanted:
        if name not in existing:
            continue
        flags = [flag for flag in flags if flag != "--budget=1"]
        c = cell(name, *flags)
        value, note = our_value(c, runs)
        notes += [note] if note else []
        hours = ""
        if b.tokens_per_second:
            speed = b.tokens_per_second * cell("dense_small").train_flops_per_token() / c.train_flops_per_token()
            hours = f"{c.steps * c.tokens_per_step / speed / 3600:,.0f}"
        paper = PAPER.get(name, "") if not flags else ""
        launcher = "python" if b.scale == "tiny" else "torchrun --nproc_per_node=8"
        rows.append([" ".join([launcher, "train.py", f"config/{name}.py", *flags]), f"{c.steps * c.tokens_per_step / 1e9:.3g}",
                     *([hours] if b.tokens_per_second else []), f"{paper:.3f}" if paper else "", value])
    titles = ["command", "G tokens", *(["GPU-hours"] if b.tokens_per_second else []), "paper", "ours"]
    if b.json:
        return print(json.dumps([dict(zip(titles, row)) for row in rows], indent=1))
    print(table(rows, titles))
    print("\nValidation loss in nats per token. The paper publishes its standard budget alone.")
    if notes:
        print("* trained with other settings than the cell's:\n" + "\n".join("  " + note for note in notes))


# ---------------------------------------------------------------------------------------------------------------------
# speed


def products(model, T):
    """The weights [O, I] that a forward pass of T tokens multiplies by, in their order and each with its number of
    tokens, None for an attention call: the work that no implementation of the model can leave out."""
    c, found = model.config, []

    def add(weight, rows=T):
        found.append((weight, rows))

    def add_blocks(blocks, rows=T):
        for block in blocks:
            for weight in (block.attn.qkv.weight, None, block.attn.out.weight, block.mlp.up.weight, block.mlp.down.weight):
                add(weight, rows)
    linear = {name: m.weight for name, m in model.rule.named_modules() if isinstance(m, torch.nn.Linear) and m.out_features > 1}
    add_blocks(model.prelude)
    for name, weight in linear.items():
        if "anchor" in name:
            add(weight)
    for step in range(c.recurrence):
        for name, weight in linear.items():
            if "anchor" not in name:
                add(weight)
        add_blocks(model.core, model.rule.tokens_kept(c, step, T))
    add_blocks(model.coda)
    add(model.wte.weight)
    return found


def bare(model, B, T, past=0, backward=False):
    """A function that runs the bare products and attention calls of a step of T tokens, with `past` tokens in the cache."""
    c, work, device, dtype = model.config, products(model, T), model.wte.weight.device, model.dtype
    random = lambda *shape: torch.randn(shape, device=device, dtype=dtype)
    shapes = {(w.shape, rows) for w, rows in work if w is not None}
    x, g = ({(shape, rows): random(B * rows, shape[side]) for shape, rows in shapes} for side in (1, 0))
    heads = lambda n: random(B, c.n_head, n, c.n_embd // c.n_head).requires_grad_(backward)
    qkv = {rows: (heads(rows), heads(past + rows), heads(past + rows)) for w, rows in work if w is None}

    def step():
        for w, rows in work:
            if w is None:
                y = F.scaled_dot_product_attention(*qkv[rows], is_causal=past == 0)
                if backward:
                    torch.autograd.grad(y, qkv[rows], y.detach())
                continue
            with torch.no_grad():
                F.linear(x[w.shape, rows], w)
                if backward:
                    g[w.shape, rows] @ w
                    g[w.shape, rows].t() @ x[w.shape, rows]
    return step


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(function, device):
    synchronize(device)
    start = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - start


def warm_up(device):
    """Start the thread pools and libraries, whose memory is not the model's."""
    torch.mm(torch.ones(64, 64, device=device), torch.ones(64, 64, device=device))


def peak_memory(work, device):
    """Most bytes that were allocated while work() ran, counted from before it: of CUDA memory, or of this process's
    resident memory on Linux; None elsewhere. work() returns what must stay alive."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before, kept = torch.cuda.memory_allocated(device), work()
        return torch.cuda.max_memory_allocated(device) - before
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    read = lambda key: next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith(key))
    Path("/proc/self/clear_refs").write_text("5")          # forget the peak so far
    before, kept = read("VmRSS"), work()
    return read("VmHWM") - before


def apart(function, *args):
    """function(*args) in a fresh process: memory is measured where nothing else lives."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)


def new_model(c, device, dtype):
    """A freshly initialised model, built in its final type and place."""
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with device:
            return Transformer(c)
    finally:
        torch.set_default_dtype(torch.float32)


def model_dtype(b, device):
    return torch.bfloat16 if low_precision(b.dtype, device) else torch.float32


# -- train


def train_step(c, b, device):
    """A function that takes one optimizer step at full depth on random tokens, and its model."""
    model = new_model(c, device, torch.float32).train()
    if wants_compile(b.compile, device):
        model.compile_regions()
    optimizer, autocast = make_optimizer(model, c, device), find_autocast(b.dtype, device)
    x = torch.randint(c.vocab_size, (b.batch_size, c.block_size + 1), device=device)

    def step():
        with autocast():
            loss = model(x[:, :-1], x[:, 1:], want="none")[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), c.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return step, model


def train_memory(c, b, device):
    """Peak bytes of two training steps, parameters and optimizer included."""
    warm_up(device)

    def work():
        step, model = train_step(c, b, device)
        step(), step()
        return step, model
    return peak_memory(work, device)


def train_counted(c, B):
    """Bytes of a float32 training step on paper: parameters, gradients and AdamW's two moments, and what autograd keeps
    for the backward pass. Per token that is 17D numbers a block (input, both norms' outputs, q, k, v, attention's output
    before and after its heads are joined, the residual in between, the MLP's hidden layer before and after GELU), and 9D
    a step of GRT's update (noisy state, core's input, norm, the gate's three layers, proposal, state, gate). Passing
    buffers, a chunk of logits above all, are not counted."""
    per_token = c.n_embd * (17 * c.executed_blocks() + 9 * c.recurrence * (c.variant == "grt"))
    return 16 * num_params(c)["total"] + 4 * B * c.block_size * per_token


def bench_train(b, names):
    device = find_device(b.device)
    names = names or ["dense_small", "grt_small"]
    peak = peak_flops(device)
    steps, rows = {}, []
    for name in names:
        c = cell(name)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        step, model = train_step(c, b, device)
        with fresh_compile_cache():
            first = timed(step, device)
            timed(step, device)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        steps[name] = step, bare(model, b.batch_size, c.block_size, backward=True), first, graphs
    times = {(name, kind): [] for name in names for kind in (0, 1)}
    for _ in range(b.rounds):
        for name, kind in times:
            times[name, kind].append(timed(steps[name][kind], device))
    for name in names:
        c, (seconds, floor) = cell(name), (statistics.median(times[name, kind]) for kind in (0, 1))
        tokens = b.batch_size * c.block_size
        flops = 3 * tokens * c.flops_per_token()
        rows.append({"cell": name, "tokens/s": tokens / seconds, "GFLOP/s": flops / seconds / 1e9,
                     "floor GFLOP/s": flops / floor / 1e9, "of floor": floor / seconds, "first s": steps[name][2], "graphs": steps[name][3],
                     "MFU": flops / seconds / peak if peak else None, "peak MB": (apart(train_memory, c, b, device) or 0) / 1e6,
                     "counted MB": train_counted(c, b.batch_size) / 1e6})
    for row in rows:
        row["of first"] = row["GFLOP/s"] / rows[0]["GFLOP/s"]
    show(b, rows, f"Training at full depth on {describe(device)}, {b.batch_size} × block_size tokens a step, AdamW included"
         f"{', compiled' if wants_compile(b.compile, device) else ''}. floor: the step's bare matrix products and attention calls.")


@contextlib.contextmanager
def fresh_compile_cache():
    """Compile from nothing in here: no graph that an earlier run left on disk."""
    with tempfile.TemporaryDirectory() as folder:
        before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        try:
            yield
        finally:
            os.environ.pop("TORCHINDUCTOR_CACHE_DIR")
            if before is not None:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


# -- decode

WARM_UP = 4    # tokens decoded before the clock counts


def decoder(c, b, device, kv):
    """A model, its cache, and three functions: prefill() fills the cache with `context` tokens, step() decodes one more,
    again() computes what step() would without a cache, from the first token on."""
    model = new_model(c, device, model_dtype(b, device)).eval()
    cache = KVCache(c, b.batch_size, b.context + max(b.new_tokens, WARM_UP), None, device, model.dtype, kv)
    prompt = torch.randint(c.vocab_size, (b.batch_size, b.context), device=device)
    decode = model.compiled_decode() if wants_compile(b.compile, device) else model.decode

    @torch.inference_mode()
    def prefill():
        cache.reset()
        model(prompt, cache=cache, want="last")
        if wants_compile(b.compile, device):
            cache.freeze()

    @torch.inference_mode()
    def step():
        decode(prompt[:, :1].clone(), cache)

    @torch.inference_mode()
    def again():
        model(prompt, want="last")
    return model, cache, prefill, step, again


def decode_memory(c, b, device, kv):
    """Peak bytes of a prompt and a few tokens more, weights and cache included."""
    warm_up(device)

    def work():
        model, cache, prefill, step, _ = decoder(c, b, device, kv)
        prefill()
        for _ in range(3):
            step()
        return model, cache
    return peak_memory(work, device)


def bench_decode(b, names):
    device = find_device(b.device)
    names = names or ["dense_small", "grt_small"]
    what = [(name, kv) for name in names for kv in (KVCache.SHARING if b.kv == "all" and cell(name).recurrence > 1 else
                                                    ["full" if b.kv == "all" or cell(name).recurrence == 1 else b.kv])]
    parts, rows = {}, []
    for name, kv in what:
        model, cache, prefill, step, again = decoder(cell(name), b, device, kv)
        parts[name, kv] = model, cache, prefill, step, bare(model, b.batch_size, 1, b.context), again
        prefill()
        first = timed(step, device)
        for _ in range(WARM_UP - 1):
            step()
        rows.append({"cell": name, "kv": kv, "first s": first})
    prefills, times, floors, uncached = ({key: [] for key in what} for _ in range(4))
    for _ in range(b.rounds):
        for key in what:
            model, cache, prefill, step, floor, again = parts[key]
            prefills[key].append(timed(prefill, device))
            uncached[key].append(timed(again, device))
            times[key] += [timed(step, device) for _ in range(b.new_tokens)]
            floors[key] += [timed(floor, device) for _ in range(b.new_tokens)]
    for row, key in zip(rows, what):
        model, cache = parts[key][:2]
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        ms, floor = (1e3 * statistics.median(t[key]) for t in (times, floors))
        row |= {"ms/token": ms, "p95": 1e3 * statistics.quantiles(times[key], n=20)[-1],
                "of first": ms / rows[0].get("ms/token", ms), "floor ms": floor, "of floor": ms / floor,
                "no cache": 1e3 * statistics.median(uncached[key]) / ms,
                "prefill tokens/s": b.batch_size * b.context / statistics.median(prefills[key]), "weights MB": weights / 1e6,
                "cache MB": cache.num_bytes() / 1e6, "counted MB": (weights + cache.num_bytes()) / 1e6}
    parts.clear()
    for row, key in zip(rows, what):
        row["peak MB"] = (apart(decode_memory, cell(key[0]), b, device, key[1]) or 0) / 1e6
        row["rest MB"] = row["peak MB"] - row["counted MB"]
    show(b, rows, f"Decoding on {describe(device)}, {str(model_dtype(b, device))[6:]}, batch {b.batch_size}, after {b.context} tokens"
         f"{', compiled' if wants_compile(b.compile, device) else ''}. floor: the step's bare matrix products and attention calls; "
         "no cache: how many times longer a token takes without it. counted: weights and cache.")


def show(b, rows, title):
    """Rows of numbers as a table with its conditions, or as JSON."""
    if b.json:
        return print(json.dumps({"title": title, "rows": rows}, indent=1))

    def style(x):
        if x is None or isinstance(x, str):
            return x or ""
        return f"{x:,.0f}" if abs(x) >= 1000 or x == int(x) else f"{x:.4g}" if abs(x) >= 10 else f"{x:.3f}"
    print(table([[style(v) for v in row.values()] for row in rows], list(rows[0])))
    print("\n" + title)


def describe(device):
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({torch.get_num_threads()} threads)" if device.type == "cpu" else device.type


# -- quality


@torch.inference_mode()
def bench_quality(b, names):
    """Teacher forcing, one token at a time over validation windows: every token reads what the cache kept of the ones
    before it. Loss, how often the likeliest token is the one that the full cache gives, and the steps a token took."""
    if not b.run:
        raise ConfigError("quality needs a trained run: --run=out/grt_tiny")
    device = find_device(b.device)
    saved = load_checkpoint(checkpoint_path(b.run), device)
    model, dataset = from_checkpoint(saved).eval(), open_dataset(saved["settings"]["dataset"])
    T = model.config.block_size
    rows = min(64, dataset.val.windows(T))
    x, y = load_windows(dataset.val, [i * (dataset.val.windows(T) // rows) * T for i in range(rows)], T, device)

    def measure(kv="full", recurrence=None, exit_kl=None):
        cache = KVCache(model.config, rows, T, recurrence, device, model.dtype, kv)
        loss, best, steps = 0.0, [], 0.0
        for t in range(T):
            if exit_kl is not None and t:
                logits, depth = model.exit_early(x[:, t:t + 1], cache, exit_kl)
                steps += depth.float().mean().item() / (T - 1)
            else:
                logits = model.decode(x[:, t:t + 1], cache)
            loss += F.cross_entropy(logits[:, 0].float(), y[:, t]).item() / T
            best.append(logits[:, 0].argmax(dim=-1))
        return loss, torch.stack(best), steps if exit_kl is not None else cache.recurrence

    full, found = measure(), []
    tries = [({"kv": kv}, f"kv={kv}") for kv in KVCache.SHARING] if model.config.variant != "mor" else [({}, "kv=full")]
    tries += [({"recurrence": r}, f"recurrence={r}") for r in range(1, model.config.recurrence)]
    tries += [({"exit_kl": float(t)}, f"exit_kl={t}") for t in b.exit_kl.split(",")] if model.config.variant != "mor" else []
    for how, label in tries:
        loss, best, steps = measure(**how)
        found.append({"how": label, "loss": round(loss, 4), "change": round(loss - full[0], 4),
                      "same token": (best == full[1]).float().mean().item(), "steps": steps})
    show(b, found, f"{b.run}: {rows} validation windows of {T} tokens, one token at a time. "
         "same token: the likeliest next token is the full cache's.")


def bench_paper(b, names):
    """The paper's serving table (large, compiled, batch 1, bf16: 3.33 ms a token dense, 3.67 GRT; 1,570 MB and 639 MB)
    and the training speed of small and large."""
    device = find_device(b.device)
    if device.type != "cuda":
        raise ConfigError(f"the paper's table is a GPU's; on {device.type}, python bench.py decode dense_large grt_large "
                          "--dtype=bfloat16 gives that machine's")
    for context in (128, 896):
        bench_decode(dataclasses.replace(b, context=context, new_tokens=64, kv="all"), ["dense_large", "grt_large"])
    bench_train(dataclasses.replace(b, batch_size=8), ["dense_small", "grt_small", "dense_large", "grt_large"])


COMMANDS = {"count": count, "cells": cells, "train": bench_train, "decode": bench_decode, "quality": bench_quality,
            "paper": bench_paper}


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    try:
        if argv[:1] in (["--help"], ["-h"], []):
            print(config.help_text(BenchConfig, __doc__))
            return
        if argv[0] not in COMMANDS:
            raise ConfigError(f"bench.py {argv[0]}: no such command; there are {', '.join(COMMANDS)}")
        flags, names = [a for a in argv[1:] if a.startswith("-")], [a for a in argv[1:] if not a.startswith("-")]
        COMMANDS[argv[0]](config.load(BenchConfig, flags, __doc__), [config.find(name).stem for name in names])
    except (ConfigError, DataError, CheckpointError, ModelError) as error:
        config.fail(error)


if __name__ == "__main__":
    main()
