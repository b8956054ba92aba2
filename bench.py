"""Every number in the README.

    python bench.py count [config ...]       parameters and operations of cells, the paper's accounting and ours
    python bench.py cells [--scale=small]    the paper's table: the command of every cell, the paper's value, ours
    python bench.py cells --scale=tiny --run the comparison at three tiny scales: trains what results/tiny.json lacks
    python bench.py train [config ...]       speed of training steps, against their bare matrix products and attention calls
    python bench.py decode [config ...]      latency and memory of generation, likewise
    python bench.py quality --run=out/...    what shared keys and values, and early exit, cost a trained model
    python bench.py depth --run=out/a,out/b  loss of trained models at every depth, and with early exit
    python bench.py anatomy --run=out/...    what gate, anchor and states of a trained model do
    python bench.py results                  the tables of results/tiny.json
    python bench.py paper                    the paper's serving table and training speed, on a GPU

Speeds are medians of rounds A B A B ... over all configs in one process, warm-up and compilation excluded. Settings:
"""
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Optional, Union

import numpy as np
import torch
import torch.nn.functional as F

import config
from config import ConfigError
from model import CheckpointError, Gated, KVCache, ModelError, Transformer, from_checkpoint, load_checkpoint
from prepare import DataError, open_dataset, publish_text
from train import (MAY_CHANGE, TrainConfig, checkpoint_path, differences, find_autocast, find_device, has_compiler,
                   keep_freed_memory, load_windows, low_precision, make_optimizer, peak_flops, wants_compile, weights_cast)

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
    run: Union[str, bool] = ""                 # cells: train what is missing; quality, depth, anatomy: a trained run's folder
    seeds: str = "0,1,2"                       # cells --scale=tiny: all for micro's standard budget, the first for everything
    workers: int = 2                           # cells --run: trainings side by side
    json: bool = False                         # print JSON instead of a table
    device: str = "auto"                       # auto, cpu, cuda, cuda:1, mps
    dtype: str = "auto"                        # auto, float32 or bfloat16; auto is bfloat16 on GPUs that have it
    compile: Optional[bool] = None             # None compiles on CUDA; decode: wherever there is a compiler
    rounds: int = 5                            # train, decode: timed rounds
    batch_size: int = 1                        # train, decode: sequences side by side
    block_size: Optional[int] = None           # train: tokens in a sequence; None is the cell's own
    context: int = 128                         # decode: tokens of text before and after the measured ones
    new_tokens: int = 32                       # decode: tokens timed in each round
    kv: str = "full"                           # decode: what the cache keeps of the R steps; "all" compares the four
    exit_kl: str = "5e-2,5e-3,5e-4,5e-5"       # quality, depth: thresholds to try
    windows: int = 256                         # depth, anatomy: validation windows to look at
    svg: str = ""                              # results, depth, anatomy: draw, into this file (needs matplotlib)


def table(rows, titles):
    """Rows of cells as aligned text: names to the left, numbers to the right."""
    rows = [[str(cell) for cell in row] for row in [titles, *rows]]
    first, *others = [max(map(len, column)) for column in zip(*rows)]
    lines = ("  ".join([row[0].ljust(first), *(cell.rjust(w) for cell, w in zip(row[1:], others))]) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


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

# The tiny comparison: three scales that two CPU cores train in about two hours. Each run is a config and flags.
TINY_SCALES = ("nano", "micro", "tiny")
RATES = ("3e-3", "6e-3", "1.2e-2", "2.4e-2")      # the sweep that chose each system's learning rate, at half the budget
# At the middle scale with every seed. Rung 1 of the ladder is looped with sampled depth; the last rung is grt_micro.
REPEATED = [*(f"{system}_micro" for system in SYSTEMS), "grt_micro --match=train_flops", "ladder_1_prelude_coda_micro",
            "grt_micro --cell=grt_micro_half --half_identity"]
# At the middle scale with the first seed. dense_micro_2 is what grt_micro would be without its core; std is GPT-2's initial
# standard deviation, not scaled to the width.
CONTROLS = ["dense_micro --cell=dense_micro_2 --n_prelude=2",
            "ladder_0_looped_micro",
            "ladder_2_noise_micro",
            "ladder_3_anchor_micro",
            "grt_micro_isoparam",
            "grt_micro --cell=grt_micro_fixed --depth_sampling=fixed",
            "grt_micro --cell=grt_micro_bias1 --gate_bias=1",
            "grt_micro --cell=grt_micro_half_bias1 --half_identity --gate_bias=1",
            "ladder_1_prelude_coda_micro --match=train_flops",
            "grt_micro --cell=grt_micro_half --half_identity --match=train_flops",
            "dense_micro --cell=dense_micro_std --init_std=0.02",
            "grt_micro --cell=grt_micro_std --init_std=0.02"]
# What becomes of the gate in four times the tokens and at a quarter of the learning rate, with the first seed
LONGER = ["grt_micro --cell=grt_micro_slow --learning_rate=3e-3",
          "grt_micro --budget=4",
          "grt_micro --cell=grt_micro_slow --learning_rate=3e-3 --budget=4",
          "ladder_1_prelude_coda_micro --cell=ladder_1_micro_slow --learning_rate=3e-3 --budget=4",
          "looped_micro --cell=looped_micro_slow --learning_rate=3e-3 --budget=4",
          "dense_micro --cell=dense_micro_slow --learning_rate=3e-3 --budget=4",
          "dense_micro --cell=dense_micro_2_slow --n_prelude=2 --learning_rate=3e-3 --budget=4"]
# Every system at equal tokens, and at equal training FLOPs; looped costs what dense does.
FIVE_TINY = [*(f"{system}_tiny" for system in SYSTEMS), *(f"{system}_tiny --match=train_flops" for system in SYSTEMS[2:])]
RESULTS = Path("results/tiny.json")
WITHOUT_EFFECT = MAY_CHANGE - {"max_iters", "eval_tokens"}      # settings that leave a finished run's loss what it is
TRAIN_ALONE = ("--eval_depths", "--eval_interval=1000000", "--device=cpu", "--dtype=float32", "--compile=False")


def tiny_runs(seeds):
    """Every run of the tiny comparison as words for train.py, the most telling first: all of it with the first seed, the
    middle scale's standard budget with the others too."""
    first, others = f" --seed={seeds[0]}", [f" --seed={seed}" for seed in seeds[1:]]
    lines = [f"{system}_micro --cell={system}_micro_lr{rate} --learning_rate={rate} --budget=0.5{first}"
             for rate in RATES for system in SYSTEMS if float(rate) != cell(f"{system}_micro").learning_rate]
    lines += [run + first for run in REPEATED + CONTROLS] + [run + seed for seed in others for run in REPEATED]
    lines += [run + first for run in LONGER + FIVE_TINY]
    for budget in ("", " --budget=0.5", " --budget=2"):
        for scale in TINY_SCALES:
            lines += [f"{system}_{scale}{budget}{first}" for system in SYSTEMS]
            lines += [f"grt_{scale} --match=train_flops{budget}{first}"]
    return [tuple(line.split()) for line in dict.fromkeys(lines)]


def paper_runs(scales):
    """Every cell of the paper's tables as words for train.py."""
    found = [(f"{system}_{scale}", f"--budget={budget}") for scale in scales for budget in BUDGETS for system in SYSTEMS]
    found += [(f"grt_{scale}", f"--budget={budget}", "--match=train_flops") for scale in scales for budget in BUDGETS]
    found += [(f"{system}_{scale}_isoparam",) for scale in scales for system in ("grt", "poisson")]
    found += [(name,) for name in LADDER if "small" in scales]
    existing = set(cell_names())
    return [tuple(word for word in run if word != "--budget=1") for run in found if run[0] in existing]


def command(run, launcher="python"):
    return " ".join([launcher, "train.py", f"config/{run[0]}.py", *run[1:]])


def read_log(folder):
    """A run's log: its last header, its last evaluation, and its seconds of training; None where it was never evaluated."""
    path = folder / "log.jsonl"
    entries = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []
    headers, evaluations = [e for e in entries if "settings" in e], [e for e in entries if "val_loss" in e]
    if not headers or not evaluations:
        return None
    progress = [(0, 1), *((e["tokens"], e["tokens_per_s"]) for e in entries if "tokens_per_s" in e)]
    seconds = sum((tokens - before) / speed for (before, _), (tokens, speed) in zip(progress, progress[1:]))
    return headers[-1], evaluations[-1], seconds


def our_value(c, logs, seeded):
    """The validation loss of a cell where it has been trained; * where the run's settings are not the cell's, with how
    they differ. A run that is not finished does not count, nor, `seeded`, one with another seed."""
    for folder, (header, last, _) in logs.items():
        same = all(header["settings"][k] == getattr(c, k) for k in ("cell", "budget", "match", *["seed"] * seeded))
        if same and last["step"] == header["steps"]:
            differ = ", ".join(f"{k}={v}" for k, v in differences(header["settings"], c, WITHOUT_EFFECT).items())
            return f"{last['val_loss']:.3f}" + "*" * bool(differ), f"{folder}: {differ}" if differ else ""
    return "", ""


def cells(b, names):
    if names or b.scale not in ("", "tiny", "small", "medium", "large") or b.run and b.scale != "tiny":
        raise ConfigError("usage: bench.py cells [--scale=tiny|small|medium|large] [--tokens_per_second=N], or "
                          "bench.py cells --scale=tiny --run [--seeds=0,1,2] [--workers=2]")
    if b.run:
        return run_tiny(b)
    if b.scale == "tiny":
        runs = tiny_runs(b.seeds.split(","))
    else:
        runs = paper_runs([b.scale] if b.scale else ["small", "medium", "large"])
    rows, notes = [], []
    logs = {path.parent: log for path in sorted(Path("out").glob("*/log.jsonl")) if (log := read_log(path.parent))}
    for run in runs:
        c = cell(*run)
        value, note = our_value(c, logs, any(word.startswith("--seed=") for word in run))
        notes += [note] if note else []
        hours = ""
        if b.tokens_per_second:
            speed = b.tokens_per_second * cell("dense_small").train_flops_per_token() / c.train_flops_per_token()
            hours = f"{c.steps * c.tokens_per_step / speed / 3600:,.0f}"
        paper = PAPER.get(run[0], "") if len(run) == 1 else ""
        rows.append([command(run, "python" if b.scale == "tiny" else "torchrun --nproc_per_node=8"),
                     f"{c.steps * c.tokens_per_step / 1e9:.3g}", *([hours] if b.tokens_per_second else []),
                     f"{paper:.3f}" if paper else "", value])
    titles = ["command", "G tokens", *(["GPU-hours"] if b.tokens_per_second else []), "paper", "ours"]
    if b.json:
        return print(json.dumps([dict(zip(titles, row)) for row in rows], indent=1))
    print(table(rows, titles))
    print("\nValidation loss in nats per token. The paper publishes its standard budget alone.")
    if notes:
        print("* trained with other settings than the cell's:\n" + "\n".join("  " + note for note in notes))


def settings_of(c):
    """What makes a run what it is, less the defaults: {name: value}."""
    defaults = dataclasses.asdict(TrainConfig())
    return {k: v for k, v in dataclasses.asdict(c).items() if k not in WITHOUT_EFFECT - {"cell"} and defaults[k] != v}


def record(run):
    """What results/tiny.json holds of a finished run; None where it is not finished, or has other settings."""
    c, log = cell(*run), read_log(cell(*run).run_dir)
    if log is None or log[1]["step"] != c.steps or differences(log[0]["settings"], c, WITHOUT_EFFECT):
        return None
    header, last, seconds = log
    measured = {k: last[k] for k in ("val_loss", "val_loss_at_depth", "val_loss_leaky", "routing_disagreement") if k in last}
    return {"command": command(run), "seed": c.seed, "commit": header["commit"], "data_hash": header["data_hash"],
            "versions": header["versions"], "settings": settings_of(c), "parameters": header["parameters"], "steps": c.steps,
            "tokens": c.steps * c.tokens_per_step, "train_flops": c.steps * c.tokens_per_step * c.train_flops_per_token(),
            "seconds": round(seconds), **measured}


def save_results(runs):
    """Put every finished run's record in results/tiny.json, in the order of `runs`, beside those that are there already but
    for runs that have other settings by now; return the runs that have no record."""
    settings = {command(run): settings_of(cell(*run)) for run in runs}
    records = {r["command"]: r for r in read_results() if r["settings"] == settings.get(r["command"], r["settings"])}
    records |= {command(run): found for run in runs if (found := record(run))}
    RESULTS.parent.mkdir(exist_ok=True)
    ordered = [*(records[c] for c in settings if c in records), *(r for c, r in records.items() if c not in settings)]
    publish_text("[\n" + ",\n".join(json.dumps(r) for r in ordered) + "\n]\n", RESULTS)
    return [run for run in runs if command(run) not in records]


def read_results():
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else []


def run_tiny(b):
    """Train every run of the tiny comparison that results/tiny.json lacks, `workers` at a time, and put it there."""
    if b.workers < 1:
        raise ConfigError(f"workers={b.workers}: must be at least 1")
    runs = tiny_runs(b.seeds.split(","))
    corpus = open_dataset(cell(*runs[0]).dataset)       # prepared once, not by every worker
    if other := {r["data_hash"] for r in read_results()} - {corpus.hash}:
        raise ConfigError(f"{RESULTS} holds runs on another corpus ({', '.join(other)}; here {corpus.hash}, for every Python "
                          "has its own library): move it aside to train on yours")
    missing = save_results(runs)
    print(f"{len(runs)} runs, {len(missing)} to train, {b.workers} at a time", flush=True)
    environment = os.environ | {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // b.workers))}
    lock, children, failed = threading.Lock(), [], []

    def train_one(run):
        console = cell(*run).run_dir / "console.txt"
        console.parent.mkdir(parents=True, exist_ok=True)
        with open(console, "a") as file:
            # in a session of its own: Ctrl-C reaches this process alone, which then tells each child once to save and stop
            child = subprocess.Popen([sys.executable, Path(__file__).with_name("train.py"), *run, *TRAIN_ALONE],
                                     stdout=file, stderr=file, env=environment, start_new_session=True)
            children.append(child)
            status = child.wait()
        with lock:
            found = record(run)
            if found is None:
                failed.append(run)
                return print(f"{command(run)}: stopped with status {status}; its last lines are in {console}", flush=True)
            save_results(runs)
            print(f"{command(run)}: {found['val_loss']:.4f} after {found['seconds']} s", flush=True)

    def stop(*_):
        raise KeyboardInterrupt
    signal.signal(signal.SIGTERM, stop)
    with ThreadPoolExecutor(b.workers) as pool:
        try:
            for _ in pool.map(train_one, missing):
                pass
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in children:
                child.terminate()
            raise
    if failed:
        raise ConfigError(f"{len(failed)} of {len(missing)} runs did not finish; the same command continues them")


# ---------------------------------------------------------------------------------------------------------------------
# speed


def products(model, T):
    """The weights [O, I] that a forward pass of T tokens multiplies by, in their order and each with its number of tokens
    and whether training goes back through it, None for an attention call: the work that no implementation can leave out."""
    c, found, gradient = model.config, [], True

    def add(weight, rows=T):
        found.append((weight, rows, gradient))

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
        gradient = step >= c.recurrence - model.rule.backprop_steps
        for name, weight in linear.items():
            if "anchor" not in name:
                add(weight)
        add_blocks(model.core, model.rule.tokens_kept(c, step, T))
    gradient = True
    add_blocks(model.coda)
    add(model.wte.weight)
    return found


def bare(model, B, T, past=0, backward=False):
    """A function that runs the bare products and attention calls of a step of T tokens, with `past` tokens in the cache."""
    c, work, device, dtype = model.config, products(model, T), model.wte.weight.device, model.dtype
    random = lambda *shape: torch.randn(shape, device=device, dtype=dtype)
    shapes = {(w.shape, rows) for w, rows, _ in work if w is not None}
    x, g = ({(shape, rows): random(B * rows, shape[side]) for shape, rows in shapes} for side in (1, 0))
    heads = lambda n: random(B, c.n_head, n, c.n_embd // c.n_head).requires_grad_(backward)
    qkv = {rows: (heads(rows), heads(past + rows), heads(past + rows)) for w, rows, _ in work if w is None}

    def step():
        for w, rows, gradient in work:
            if w is None:
                y = F.scaled_dot_product_attention(*qkv[rows], is_causal=past == 0)
                if backward and gradient:
                    torch.autograd.grad(y, qkv[rows], y.detach())
                continue
            with torch.no_grad():
                F.linear(x[w.shape, rows], w)
                if backward and gradient:
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
    keep_freed_memory(device)
    model = new_model(c, device, torch.float32).train()
    if wants_compile(b.compile, device):
        model.compile_regions()
    optimizer, autocast = make_optimizer(model, c, device), find_autocast(b.dtype, device)
    x = torch.randint(c.vocab_size, (b.batch_size, c.block_size + 1), device=device)

    def step():
        with weights_cast(model, b.dtype, device):
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
    configs = {name: cell(name, *([] if b.block_size is None else [f"--block_size={b.block_size}"])) for name in names}
    steps, rows = {}, []
    if wants_compile(b.compile, device):
        with fresh_compile_cache():
            torch.compile(torch.sin)(torch.ones(64, device=device))      # the compiler's own start is not the first cell's
    for name, c in configs.items():
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        step, model = train_step(c, b, device)
        with fresh_compile_cache():
            first = timed(step, device)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        steps[name] = step, bare(model, b.batch_size, c.block_size, backward=True), first, graphs
    for step, *_ in steps.values():
        step()                      # the reset for a later cell's first step dropped the graphs of those before it
    times = {(name, kind): [] for name in names for kind in (0, 1)}
    for _ in range(b.rounds):
        for name, kind in times:
            times[name, kind].append(timed(steps[name][kind], device))
    firsts = {name: step[2:] for name, step in steps.items()}
    del steps, step, model      # before a fresh process needs as much memory
    for name, c in configs.items():
        seconds, floor = (statistics.median(times[name, kind]) for kind in (0, 1))
        tokens = b.batch_size * c.block_size
        flops = tokens * c.step_flops_per_token(c.recurrence)
        rows.append({"cell": name, "tokens/s": tokens / seconds, "GFLOP/s": flops / seconds / 1e9,
                     "floor GFLOP/s": flops / floor / 1e9, "of floor": floor / seconds,
                     "first s": firsts[name][0], "graphs": firsts[name][1], "MFU": flops / seconds / peak if peak else None,
                     "peak MB": (apart(train_memory, c, b, device) or 0) / 1e6,
                     "counted MB": train_counted(c, b.batch_size) / 1e6})
    for row in rows:
        row["of first"] = row["GFLOP/s"] / rows[0]["GFLOP/s"]
    show(b, rows, f"Training at full depth on {describe(device)}, {b.batch_size} × {b.block_size or 'block_size'} tokens a "
         f"step, AdamW included{', compiled' if wants_compile(b.compile, device) else ''}. "
         "floor: the step's bare matrix products and attention calls.")


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
    decode = model.compiled_decode() if b.compile else model.decode

    @torch.inference_mode()
    def prefill():
        cache.reset()
        model.prefill(prompt, cache)
        if b.compile:
            cache.freeze()

    @torch.inference_mode()
    def step():
        decode(prompt[:, :1].clone(), cache)

    @torch.inference_mode()
    def again():
        model(prompt, want="last")
    return model, cache, prefill, step, again


def decode_memory(c, b, device, kv):
    """Peak bytes of a prompt and a few tokens more, weights and cache included. On a CPU not compiled: there the compiler's
    own memory would count."""
    warm_up(device)
    b = dataclasses.replace(b, compile=b.compile and device.type == "cuda")

    def work():
        model, cache, prefill, step, _ = decoder(c, b, device, kv)
        prefill()
        for _ in range(3):
            step()
        return model, cache
    return peak_memory(work, device)


def bench_decode(b, names):
    device = find_device(b.device)
    compiled = device.type != "mps" and has_compiler(device) if b.compile is None else wants_compile(b.compile, device)
    b = dataclasses.replace(b, compile=compiled)
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
    show(b, rows, f"Decoding on {describe(device)}, {str(model_dtype(b, device))[6:]}, batch {b.batch_size}, after {b.context} "
         f"tokens{', compiled' if b.compile else ''}. floor: the step's bare matrix products and attention calls; "
         "no cache: how many times longer a token takes without it. counted: weights and cache"
         f"{'; peak: not compiled' if b.compile and device.type == 'cpu' else ''}.")


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


# ---------------------------------------------------------------------------------------------------------------------
# results: what the tiny comparison showed


def select(records, cell_name, budget=1.0, match="tokens"):
    """The runs of one cell, one per seed."""
    of = lambda s: (s["cell"], s.get("budget", 1.0), s.get("match", "tokens"))
    return [r for r in records if of(r["settings"]) == (cell_name, budget, match)]


def spread(values):
    """Mean and range over seeds, of one seed its value, of none a dash."""
    values = [v for v in values if v is not None]
    if len(values) < 2:
        return f"{values[0]:.3f}" if values else "–"
    return f"{statistics.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def losses(records, *which):
    return spread([r["val_loss"] for r in select(records, *which)])


def at_depth(record, depth):
    return record.get("val_loss_at_depth", {}).get(str(depth))


def markdown(rows, titles):
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in [titles, ["---"] * len(titles), *rows])


def nine_cells(records):
    """Validation loss by scale, budget and system, at equal tokens and at equal training FLOPs."""
    rows = [[name + (" at dense's training FLOPs" if match != "tokens" else ""),
             *(losses(records, f"{name}_{scale}", budget, match) for scale in TINY_SCALES for budget in map(float, BUDGETS))]
            for match in ("tokens", "train_flops") for name in SYSTEMS if match == "tokens" or name not in ("dense", "looped")]
    return markdown(rows, ["", *(f"{scale} {budget:g}×" for scale in TINY_SCALES for budget in BUDGETS)])


def by_run(records, runs):
    """What each run stores, costs and reaches, with the spread over seeds; training FLOPs are those of the scale's dense
    cell at its standard budget."""
    rows = []
    for run in runs:
        c = cell(*run.split())
        found, dense = select(records, c.cell, c.budget, c.match), select(records, c.reference)
        if found and dense:
            depths = [spread([at_depth(r, d) for r in found]) if c.n_core else "" for d in (1, c.recurrence // 2)]
            rows.append([f"`{run}`", c.layout, f"{found[0]['parameters']:,}",
                         f"{found[0]['train_flops'] / dense[0]['train_flops']:.2f}",
                         spread([r["val_loss"] for r in found]), *depths])
    return markdown(rows, ["run", "layout", "parameters", "training FLOPs of dense", "loss", "at one step", "at half the steps"])


def learning_rates(records):
    """The sweep at the middle scale; bold is the rate that the system's configs have."""
    rows = []
    for system in SYSTEMS:
        chosen = cell(f"{system}_micro").learning_rate
        rows.append([system, *(f"**{losses(records, f'{system}_micro', 0.5)}**" if float(rate) == chosen else
                               losses(records, f"{system}_micro_lr{rate}", 0.5) for rate in RATES)])
    return markdown(rows, ["", *RATES])


def worth_of_depth(records):
    """What a recurrence is worth (Schwethelm et al. 2026, arXiv 2604.21106), by system: φ in

        loss = E + A (N_once + r^φ N_rec)^-α + B D^-β

    fitted to dense's and one system's runs at three scales and three budgets. N_once counts the parameters of prelude and
    coda, N_rec those of core and update, D tokens, r the steps of the evaluation. The interval holds every φ whose least
    squared error exceeds the best one's by at most the variance between seeds.
    """
    noise = [r["val_loss"] for r in select(records, "dense_micro")], [r["val_loss"] for r in select(records, "grt_micro")]
    if min(map(len, noise)) < 2:
        return "Not enough seeds to tell noise from depth."
    variance, rows = statistics.mean(statistics.variance(values) for values in noise), []
    for system, theirs in (("looped", 0.46), ("poisson", 0.38), ("grt", None)):
        points = []
        for name in ("dense", system):
            for scale in TINY_SCALES:
                c = cell(f"{name}_{scale}")
                parts = num_params(c)
                for budget in map(float, BUDGETS):
                    if found := select(records, f"{name}_{scale}", budget):
                        points.append((parts["prelude"] + parts["coda"], parts["core"] + parts["rule"], c.recurrence,
                                       found[0]["tokens"], statistics.mean(r["val_loss"] for r in found)))
        if len(points) < 12:                            # six numbers are fitted
            rows.append([system, "–", "–", "–", len(points), theirs or ""])
            continue
        phi, low, high, error = fit_depth(np.array(points, dtype=float), variance)
        interval = f"{low:.2f} to {high:.2f}"
        if (low, high) == (PHI[0], PHI[-1]):
            interval = f"the runs do not say ({interval})"
        rows.append([system, f"{phi:.2f}", interval, f"{error:.3f}", len(points), theirs or ""])
    return markdown(rows, ["", "φ", "interval", "root mean squared error", "runs", "Schwethelm et al."])


PHI = np.linspace(-0.5, 1.5, 81)


def fit_depth(points, variance):
    """(φ, the ends of its interval, root mean squared error) for rows (N_once, N_rec, r, D, loss). α, β and φ run over a
    grid, and E, A, B >= 0 follow by least squares."""
    once, core, r, D, loss = points.T
    exponents = np.linspace(0.05, 1.5, 20)
    best = np.full(len(PHI), np.inf)
    for i, phi in enumerate(PHI):
        size = once + r**phi * core
        for alpha in exponents:
            for beta in exponents:
                basis = np.stack([np.ones_like(loss), (size / size.mean())**-alpha, (D / D.mean())**-beta], axis=1)
                x = np.linalg.lstsq(basis, loss, rcond=None)[0]
                if (x >= 0).all():
                    best[i] = min(best[i], ((basis @ x - loss)**2).sum())
    inside = PHI[best <= best.min() + variance]
    return PHI[best.argmin()], inside[0], inside[-1], math.sqrt(best.min() / len(loss))


TABLES = {"Scales and budgets": nine_cells, "Learning rates": learning_rates,
          "The middle scale": functools.partial(by_run, runs=REPEATED + CONTROLS),
          "The tiny scale": functools.partial(by_run, runs=FIVE_TINY),
          "Longer and slower": functools.partial(by_run, runs=LONGER),
          "Worth of a step": worth_of_depth}


def results(b, names):
    """Every table that the README has from results/tiny.json, as Markdown, and the picture."""
    records = read_results()
    if not records:
        raise ConfigError(f"{RESULTS}: nothing there; python bench.py cells --scale=tiny --run trains it")
    for title, show_table in TABLES.items():
        print(f"{title}\n\n{show_table(records)}\n")
    if b.svg:
        draw_cells(records, b.svg)


# -- pictures

# one colour and mark for a system everywhere: Okabe & Ito's, which people who see few colours tell apart
STYLE = {"dense": ("#000000", "s"), "looped": ("#E69F00", "v"), "mor": ("#CC79A7", "D"), "poisson": ("#009E73", "^"),
         "grt": ("#0072B2", "o")}


@contextlib.contextmanager
def picture(path, columns, rows=1):
    """Axes to draw on, row by row, written to `path` as SVG: the same bytes from the same numbers."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("pictures need the package: pip install matplotlib") from None
    from matplotlib.figure import Figure
    with matplotlib.rc_context({"svg.hashsalt": "grt", "svg.fonttype": "none", "font.size": 11, "axes.spines.top": False,
                                "axes.spines.right": False, "legend.frameon": False}):
        figure = Figure(figsize=(4.6 * columns, 3.7 * rows), layout="constrained")
        yield figure.subplots(rows, columns, squeeze=False).flatten()
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", facecolor="white", metadata={"Date": None})
    print(f"wrote {path}")


def draw_cells(records, path):
    """Loss against tokens and against training operations, a column for each scale; dashed: at dense's training FLOPs."""
    with picture(path, len(TINY_SCALES), 2) as axes:
        from matplotlib.ticker import EngFormatter, FixedLocator, LogLocator, NullLocator
        for i, ax in enumerate(axes):
            row, column = divmod(i, len(TINY_SCALES))
            key, scale = ("tokens", "train_flops")[row], TINY_SCALES[column]
            for system, (colour, mark) in STYLE.items():
                for match, line, label in (("tokens", "-", system), ("train_flops", "--", None))[:row + 1]:
                    found = [r for budget in BUDGETS for r in select(records, f"{system}_{scale}", float(budget), match)[:1]]
                    ax.plot([r[key] for r in found], [r["val_loss"] for r in found], color=colour, marker=mark,
                            linestyle=line, label=label)
            ax.set(xscale="log", xlabel=("training tokens", "training FLOPs")[row], ylabel="validation loss, nats per byte",
                   title="" if row else scale)
            runs = {r["tokens"] for b in map(float, BUDGETS) for r in select(records, f"dense_{scale}", b)}
            ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if row else FixedLocator(sorted(runs)))
            ax.xaxis.set_minor_locator(NullLocator())
            ax.xaxis.set_major_formatter(EngFormatter())
        axes[0].legend()


def draw_depth(rows, exits, runs, path):
    """Loss against the depth of the evaluation, and against the mean depth of tokens that stop early."""
    with picture(path, 2) as axes:
        for name, variant in runs.items():
            colour, mark = STYLE[variant]
            points = [(row["depth"], row[name]) for row in rows if row.get(name) is not None]
            if variant == "dense":
                axes[0].axhline(points[0][1], color=colour, linestyle="--", label=name)
            else:
                axes[0].plot(*zip(*points), color=colour, marker=mark, label=name)
            early = [(e["steps"], e["loss"]) for e in exits if e["run"] == name]
            if early:
                axes[1].plot(*zip(*early), color=colour, marker=mark, label=name)
        lowest = min(row[name] for row in rows for name in runs if row.get(name) is not None)
        axes[0].set(xlabel="steps of the core", ylabel="validation loss, nats per token", title="every token, fixed depth",
                    ylim=(lowest * 0.98, lowest * 1.5))         # what depth 0 costs may be far above
        axes[1].set(xlabel="mean steps of a token", ylabel="validation loss, nats per token", title="early exit")
        axes[0].legend()


def draw_anatomy(gated, path):
    """The mean gate by step of each run, and linear CKA between the states of the first."""
    first, steps = next(iter(gated)), range(1, max(len(found["gate_mean"]) for found in gated.values()) + 1)
    with picture(path, 2) as axes:
        for (name, found), line in zip(gated.items(), itertools.cycle(("-", "--", ":", "-."))):
            means = found["gate_mean"]
            colour, mark = STYLE["grt"]
            axes[0].plot(range(1, len(means) + 1), means, color=colour, marker=mark, linestyle=line, label=name)
        axes[0].set(xlabel="step", ylabel="mean gate", ylim=(-0.03, 1.03), xticks=list(steps),
                    title="how much of the state is kept")
        axes[0].legend(loc="lower right")
        image = axes[1].imshow(gated[first]["cka"], cmap="viridis", origin="lower")
        labels = ["prelude", *range(1, len(gated[first]["gate_mean"]) + 1)]
        axes[1].set(xticks=range(len(labels)), yticks=range(len(labels)), xticklabels=labels, yticklabels=labels,
                    title=f"linear CKA between states\n{first}")
        axes[1].figure.colorbar(image, ax=axes[1])


# ---------------------------------------------------------------------------------------------------------------------
# what a trained model does


def open_runs(b, command_name):
    """{name: (model, dataset, device)} of the trained runs that --run names."""
    if not isinstance(b.run, str) or not b.run:
        raise ConfigError(f"{command_name} needs a trained run: --run=out/grt_tiny")
    device, found = find_device(b.device), {}
    for folder in b.run.split(","):
        saved = load_checkpoint(checkpoint_path(folder), device)
        found[Path(folder).name] = from_checkpoint(saved).eval(), open_dataset(saved["settings"]["dataset"]), device
    return found


def validation_windows(dataset, T, n, device):
    """Inputs and targets [n, T] from all over the validation split, in batches."""
    total = dataset.val.windows(T)
    n = min(n, total)
    starts = [i * (total // n) * T for i in range(n)]
    for i in range(0, n, 16):
        yield load_windows(dataset.val, starts[i:i + 16], T, device)


def decode_windows(model, dataset, device):
    """Inputs and targets [64, T] for `decoded`."""
    batches = validation_windows(dataset, model.config.block_size, 64, device)
    return [torch.cat(parts) for parts in zip(*batches)]


def decoded(model, x, y, kv="full", recurrence=None, exit_kl=None):
    """Teacher forcing one token at a time: (loss, likeliest tokens [T, B], steps a token took)."""
    B, T = x.shape
    cache = KVCache(model.config, B, T, recurrence, x.device, model.dtype, kv)
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


@torch.inference_mode()
def bench_quality(b, names):
    """Every token reads what the cache kept of the ones before it: loss, how often the likeliest token is the one that the
    full cache gives, and the steps a token took."""
    found = []
    for name, (model, dataset, device) in open_runs(b, "quality").items():
        c = model.config
        x, y = decode_windows(model, dataset, device)
        full = decoded(model, x, y)
        tries = [({"kv": kv}, f"kv={kv}") for kv in (KVCache.SHARING if c.variant != "mor" else ["full"])]
        tries += [({"recurrence": r}, f"recurrence={r}") for r in range(1, c.recurrence)]
        tries += [({"exit_kl": float(t)}, f"exit_kl={t}") for t in b.exit_kl.split(",")] if c.variant != "mor" else []
        for how, label in tries:
            loss, best, steps = decoded(model, x, y, **how)
            found.append({"run": name, "how": label, "loss": round(loss, 4), "change": round(loss - full[0], 4) + 0.0,
                          "same token": (best == full[1]).float().mean().item(), "steps": steps})
    show(b, found, "64 validation windows, one token at a time. same token: the likeliest next token is the full cache's.")


@torch.inference_mode()
def bench_depth(b, names):
    """Loss at every depth from 0 to 2R, the KL divergence between that depth's distribution of the next token and depth
    R's, and what early exit costs."""
    runs, rows, exits, variants = open_runs(b, "depth"), {}, [], {}
    for name, (model, dataset, device) in runs.items():
        c = model.config
        variants[name] = c.variant
        depths = [c.recurrence] if c.variant == "dense" else range(min(2 * c.recurrence, model.rule.most_steps) + 1)
        total, count = {r: torch.zeros(2, dtype=torch.float64) for r in depths}, 0
        for x, y in validation_windows(dataset, c.block_size, b.windows, device):
            full, count = F.log_softmax(model(x)[0].float(), dim=-1), count + y.numel()
            for r in depths:
                p = full if r == c.recurrence else F.log_softmax(model(x, recurrence=r)[0].float(), dim=-1)
                total[r] += torch.stack([-p.gather(2, y[..., None]).sum(), (full.exp() * (full - p)).sum()]).double().cpu()
        for r in depths:
            loss, kl = (total[r] / count).tolist()
            rows.setdefault(r, {"depth": r})[name] = loss
            if c.variant != "dense":
                rows[r][f"{name} KL"] = kl
        if c.variant not in ("dense", "mor"):
            x, y = decode_windows(model, dataset, device)
            for threshold in b.exit_kl.split(","):
                loss, _, steps = decoded(model, x, y, exit_kl=float(threshold))
                exits.append({"run": name, "exit_kl": threshold, "steps": steps, "loss": loss})
    rows = [rows[r] for r in sorted(rows)]
    columns = dict.fromkeys(key for row in rows for key in row)
    rows = [{key: row.get(key) for key in columns} for row in rows]
    title = f"{b.windows} validation windows. KL: from the distribution at full depth, in nats."
    if b.json:
        print(json.dumps({"title": title, "rows": rows, "exits": exits}, indent=1))
    else:
        show(b, rows, title + "\n")
        if exits:
            show(b, exits, "64 windows, one token at a time: a token stops when another step changes its distribution by less.")
    if b.svg:
        draw_depth(rows, exits, variants, b.svg)


# -- anatomy

# what the paper reports of a trained large model
PAPER_ANATOMY = {"loss_at_depth": "5.29 3.77 3.14 … 2.68", "g=0": "12.0", "g=1": "the loss at depth 0", "anchor=zeros": "8.08",
                 "anchor=embedding": "3.73", "anchor=drifting": "3.38", "update_of_proposal": "0.18 → 0.07",
                 "cka": "prelude and step 1: 0.996, later steps a tight cluster"}


@contextlib.contextmanager
def replaced(thing, **methods):
    """A module with other methods for a while; each gets the old one first."""
    for name, method in methods.items():
        setattr(thing, name, functools.partial(method, getattr(thing, name)))
    try:
        yield
    finally:
        for name in methods:
            delattr(thing, name)


def trajectory(model, x):
    """What the steps do with the tokens x [B, T]: lists by step of states (h_0 first), proposals and gates, [B·T, D] each;
    the latter two are empty where the rule has none."""
    states, proposals, gates = [], [], []

    def start(old, a):
        h, shared = old(a)
        states.append(h.flatten(0, 1))
        return h, shared

    def step(old, *args):
        h, shared = old(*args)
        states.append(h.flatten(0, 1))
        return h, shared

    def blend(old, h, proposal, gated):
        proposals.append(proposal.flatten(0, 1))
        return old(h, proposal, gated)

    def gate(old, *args):
        gates.append(old(*args))
        return gates[-1]
    gated = {"blend": blend, "gate": gate} if isinstance(model.rule, Gated) and model.config.gate else {}
    with replaced(model.rule, start=start, step=step, **gated):
        model(x, want="last")
    return states, proposals, [g.flatten(0, 1) for g in gates]


def centered(x):
    """Vectors [n, D] less their mean, in double; exactly zero where all are the same."""
    x = x.double()
    y = x - x.mean(dim=0)
    return y if y.norm() > 1e-9 * x.norm() else torch.zeros_like(y)


def linear_cka(x, y):
    """Similarity of two sets of n vectors, [n, D] and [n, E]: 1 where one is the other turned, scaled and moved, 0 where
    nothing is shared (Kornblith et al. 2019, arXiv 1905.00414)."""
    x, y = centered(x), centered(y)
    scale = (x.t() @ x).norm() * (y.t() @ y).norm()
    return ((x.t() @ y).norm()**2 / scale).item() if scale else 0.0


def effective_rank(x):
    """exp of the entropy of the singular values of x [n, D], centred: how many directions it has (Roy & Vetterli 2007)."""
    values = torch.linalg.svdvals(centered(x))
    p = values / values.sum()
    return torch.exp(-torch.xlogy(p, p).sum()).item() if values.sum() else 0.0


@torch.inference_mode()
def anatomy(model, batches):
    """A look inside: numbers by name, as bench_anatomy prints them; those of the gate and the anchor for GRT alone."""
    rule, R = model.rule, model.config.recurrence
    depths = range(min(R, rule.most_steps) + 1)

    def token_losses(r=None):
        return torch.cat([F.cross_entropy(model(x, recurrence=r)[0].float().transpose(1, 2), y, reduction="none").flatten()
                          for x, y in batches])
    by_depth = torch.stack([token_losses(r) for r in depths]).double()            # [R+1, tokens]
    found = {"loss_at_depth": by_depth.mean(dim=1).tolist()}
    order = by_depth[0].argsort()
    deciles = by_depth[:, order[:len(order) // 10 * 10]].unflatten(1, (10, -1)).mean(dim=2)
    found["gain_by_decile"] = (deciles[:-1] - deciles[1:]).t().tolist()           # easiest first, by step

    states, proposals, gates = (  # by step, of all tokens
        [torch.cat(parts) for parts in zip(*per_batch)] for per_batch in zip(*(trajectory(model, x) for x, _ in batches)))
    found["cka"] = [[linear_cka(x, y) for y in states] for x in states]
    found["effective_rank"] = [effective_rank(h) for h in states]
    found["cosine_of_steps"] = [F.cosine_similarity(x, y, dim=-1).mean().item() for x, y in zip(states, states[1:])]
    if gates:
        found["gate_mean"] = [g.mean().item() for g in gates]
        found["gate_open"] = [(g > 0.95).float().mean().item() for g in gates]
        found["gate_shut"] = [(g < 0.05).float().mean().item() for g in gates]
        found["update_of_proposal"] = [((h - before).norm(dim=-1) / o.norm(dim=-1)).mean().item()
                                       for before, h, o in zip(states, states[1:], proposals)]
        for value in (0.0, 1.0):
            with replaced(rule, gate=lambda old, h, gated: torch.full_like(h, value)):
                found[f"g={value:.0f}"] = token_losses().mean().item()
    if isinstance(rule, Gated) and model.config.anchor:
        pairs = {"W": (rule.project_state, rule.project_anchor)}
        pairs |= {"f": (rule.gate_state, rule.gate_anchor)} if gates else {}
        for name, halves in pairs.items():
            found[f"cosine of {name}'s halves"] = F.cosine_similarity(*(half.weight.flatten() for half in halves), dim=0).item()
        embedding = []
        keep = model.drop.register_forward_hook(lambda module, args, out: embedding.append(out))
        others = {"zeros": torch.zeros_like, "embedding": lambda a: embedding[-1]}
        for name, other in others.items():
            with replaced(rule, start=lambda old, a: (a, old(other(a))[1])):
                found[f"anchor={name}"] = token_losses().mean().item()
        keep.remove()
        start = rule.start
        with replaced(rule, step=lambda old, h, shared, r, core: old(h, start(h)[1], r, core)):
            found["anchor=drifting"] = token_losses().mean().item()
    return found


def bench_anatomy(b, names):
    """What the parts of trained models do, beside what the paper says of its large one; for GRT the gate and the anchor too."""
    everything = {}
    for name, (model, dataset, device) in open_runs(b, "anatomy").items():
        everything[name] = found = anatomy(model, list(validation_windows(dataset, model.config.block_size, b.windows, device)))
        if b.json:
            continue
        line = lambda values: " ".join(f"{v:.3f}" for v in values)
        lines = [(label, line(found[key]), PAPER_ANATOMY.get(key, "")) for key, label in (
            ("loss_at_depth", "loss after 0..R steps"),
            ("gate_mean", "gate, mean by step"), ("gate_open", "share of it above 0.95"),
            ("gate_shut", "share of it below 0.05"), ("update_of_proposal", "‖h_r - h_{r-1}‖ / ‖o_r‖ by step"),
            ("effective_rank", "effective rank of h_0..h_R"), ("cosine_of_steps", "cosine of h_{r-1} and h_r")) if key in found]
        lines += [(key, f"{found[key]:.3f}", PAPER_ANATOMY.get(key, "")) for key in found if isinstance(found[key], float)]
        lines += [(f"CKA of h_{r} with h_0..h_R", line(row), "" if r else PAPER_ANATOMY["cka"])
                  for r, row in enumerate(found["cka"])]
        lines += [(f"gain by step, decile {i} of difficulty", line(row), "") for i, row in enumerate(found["gain_by_decile"], 1)]
        width = max(len(label) for label, _, _ in lines)
        print(f"{name}: {model.config.variant} {model.config.layout}, {b.windows} validation windows")
        for label, values, paper in lines:
            print(f"  {label.ljust(width)}  {values}" + f"   (paper: {paper})" * bool(paper))
        print()
    if b.json:
        print(json.dumps(everything, indent=1))
    if b.svg:
        gated = {name: found for name, found in everything.items() if "gate_mean" in found}
        if not gated:
            raise ConfigError("the picture is of a gate: --run needs a grt model that has one")
        draw_anatomy(gated, b.svg)


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


COMMANDS = {"count": count, "cells": cells, "results": results, "train": bench_train, "decode": bench_decode,
            "quality": bench_quality, "depth": bench_depth, "anatomy": bench_anatomy, "paper": bench_paper}


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
        sys.stdout.flush()
    except BrokenPipeError:               # python bench.py results | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ConfigError, DataError, CheckpointError, ModelError) as error:
        config.fail(error)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
