"""Every number in the README.

    python bench.py count [config ...]       parameters and operations of cells, the paper's accounting and ours
    python bench.py cells [--scale=tiny]     the paper's table: the command of every cell, the paper's value, ours

Settings:
"""
import dataclasses
import functools
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import torch

import config
from config import ConfigError
from model import CheckpointError, Transformer
from prepare import DataError
from train import MAY_CHANGE, TrainConfig

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


def table(rows, titles):
    """Rows of cells as aligned text: names to the left, numbers to the right."""
    rows = [[str(cell) for cell in row] for row in [titles, *rows]]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))).rstrip()
                     for row in rows)


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


def count_cell(name):
    """What a cell stores, runs and costs, beside the dense cell of its scale."""
    c = cell(name)
    dense, found = cell(c.reference), {"cell": name, "layout": c.layout, "parameters": num_params(c)}
    found["fewer_than_dense"] = 1 - found["parameters"]["total"] / num_params(dense)["total"]
    for key, accounting, head in (("paper", "paper", False), ("paper_head", "paper", True),
                                  ("executed", "executed", False), ("executed_head", "executed", True)):
        forward, train = (f(accounting=accounting, head=head) for f in (c.flops_per_token, c.train_flops_per_token))
        base = [f(accounting=accounting, head=head) for f in (dense.flops_per_token, dense.train_flops_per_token)]
        found[key] = {"forward": forward, "forward_of_dense": forward / base[0], "train": train, "train_of_dense": train / base[1]}
    tokens = [cell(name, f"--budget={b}").steps * c.tokens_per_step for b in BUDGETS]
    found["runs"] = [{"budget": b, "tokens": n, "train_flops": n * c.train_flops_per_token()} for b, n in zip(BUDGETS, tokens)]
    return found


def count(b, names):
    found = [count_cell(name) for name in names or cell_names()]
    if b.json:
        return print(json.dumps(found, indent=1))
    for f in found if names else []:
        print(f"{f['cell']}: {f['layout']}")
        print(table([[part, f"{n:,}"] for part, n in f["parameters"].items() if n], ["parameters", ""]))
        print(f"{f['fewer_than_dense']:.1%} fewer than dense\n")
        print(table([[label, f"{f[key]['forward'] / 1e6:,.1f}", f"{f[key]['forward_of_dense']:.3f}", f"{f[key]['train'] / 1e6:,.1f}",
                      f"{f[key]['train_of_dense']:.3f}"] for label, key in
                     (("paper's formula", "paper"), ("and the head", "paper_head"), ("executed", "executed"), ("and the head", "executed_head"))],
                    ["MFLOP per token", "forward", "of dense", "training, expected", "of dense"]) + "\n")
        print(table([[f"{run['budget']:g}x", f"{run['tokens'] / 1e9:.4g}", f"{run['train_flops'] / 1e18:.4g}"] for run in f["runs"]],
                    ["budget", "G tokens", "EFLOP to train"]) + "\n")
    if not names:
        print(table([[f["cell"], f["layout"], f"{f['parameters']['total']:,}", f"{f['fewer_than_dense']:.1%}",
                      f"{f['executed']['forward'] / 1e6:,.1f}", *(f"{f[k]['forward_of_dense']:.3f}" for k in ("paper", "paper_head", "executed", "executed_head")),
                      *(f"{f[k]['train_of_dense']:.3f}" for k in ("paper", "executed_head")), f"{f['runs'][1]['tokens'] / 1e9:.4g}",
                      f"{f['runs'][1]['train_flops'] / 1e18:.4g}"] for f in found],
                    ["cell", "layout", "parameters", "fewer", "MFLOP/token", "paper", "+head", "executed", "+head", "train, paper",
                     "executed+head", "G tokens", "EFLOP"]))
        print("\nMFLOP/token: forward, executed, head not counted. paper ... +head: forward of dense by the paper's formula and as "
              "executed.\ntrain: expected training operations a token, of dense. G tokens, EFLOP: the standard budget (1x).")


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
            differ = [f"{k}={settings.get(k)}" for k in mine if k not in MAY_CHANGE - {"max_iters"} and settings.get(k) != mine[k]]
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


COMMANDS = {"count": count, "cells": cells}


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
    except (ConfigError, DataError, CheckpointError) as error:
        config.fail(error)


if __name__ == "__main__":
    main()
