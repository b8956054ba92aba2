"""Train one model: on this machine, or on N devices of it, or on several machines.

    python train.py config/grt_tiny.py                              # CPU, Mac or one GPU
    torchrun --nproc_per_node=8 train.py config/grt_small.py        # 8 GPUs, or CPU processes where there are none
    python train.py config/grt_tiny.py --max_iters=100 --fresh      # any setting is a flag

The same command again continues the run where it stopped; --fresh starts over and keeps the old run beside it.
Everything random is a function of (seed, step, micro-batch): data order, depth, noise and dropout. So a resumed run
repeats the uninterrupted one, evaluation disturbs nothing, and the split into devices and micro-batches changes no data.
A run lives in out/<run>/: latest.pt and best.pt, config.json, and log.jsonl with one object a line. Settings:
"""
import contextlib
import ctypes
import dataclasses
import functools
import json
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Optional

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import config
from config import ConfigError
from model import CheckpointError, ModelConfig, Transformer, fold, load_checkpoint, sample_depth
from prepare import DataError, open_dataset, publish, publish_text, shuffled, write_json


@dataclass(frozen=True)
class TrainConfig(ModelConfig):
    """Every setting of a run. The defaults are the paper's recipe; a config file says what differs."""
    # what to train on, and where the run goes
    cell: str = ""                        # the run's name; the config file's, unless given
    dataset: str = "stdlib"               # a folder under data/, as prepare.py makes them
    out_dir: str = ""                     # "" is out/<cell>, with budget, match and seed where they are not the usual
    init_from: str = ""                   # start from another run's weights and shape: its folder, or a checkpoint
    fresh: bool = False                   # start over; an old run in out_dir is moved aside
    seed: int = 1337                      # of the initial weights, data order, depth, noise and dropout
    # how long
    max_iters: int = 20_000               # optimizer steps of the standard budget
    budget: float = 1.0                   # times the standard budget: the paper's cells have 0.5, 1 and 2
    match: str = "tokens"                 # tokens, or train_flops: as many steps as cost what `reference` costs to train
    reference: str = ""                   # the dense cell of the same scale, for match=train_flops
    tokens_per_step: int = 491_520        # of one optimizer step, over all devices and micro-batches
    batch_size: int = 12                  # sequences of a micro-batch on one device
    # AdamW
    learning_rate: float = 6e-4           # after warm-up
    min_lr: Optional[float] = None        # at the end of the cosine; None is a tenth of learning_rate
    warmup_iters: int = 2_000             # linear warm-up
    weight_decay: float = 0.1             # on matrices; not on biases and norms
    beta1: float = 0.9                    # AdamW
    beta2: float = 0.95                   # AdamW
    grad_clip: float = 1.0                # largest gradient norm; 0 does not clip
    # evaluation and logging
    eval_interval: int = 1_000            # steps between evaluations; each saves latest.pt first
    eval_tokens: Optional[int] = None     # evaluate on the first so many tokens; None is the whole validation split
    eval_depths: bool = False             # evaluate at every depth 1..R too
    eval_only: bool = False               # evaluate the run's checkpoint, write nothing
    log_interval: int = 10                # steps between progress lines
    logger: str = ""                      # tensorboard or wandb as well
    # the machine
    device: str = "auto"                  # auto, cpu, cuda, cuda:1, mps
    dtype: str = "auto"                   # auto, float32 or bfloat16 (autocast); auto is bfloat16 on GPUs that have it
    compile: Optional[bool] = None        # compile the blocks; None compiles on CUDA
    recompute: bool = False               # keep each core step's input alone and run the step again backward: less memory

    def __post_init__(self):
        super().__post_init__()
        for name in ("max_iters", "batch_size", "tokens_per_step", "eval_interval", "log_interval", "budget", "learning_rate"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)}: must be above 0")
        for name in ("grad_clip", "weight_decay", "min_lr", "warmup_iters"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: must not be negative")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be in [0, 1)")
        if self.eval_tokens is not None and self.eval_tokens < 1:
            raise ValueError(f"eval_tokens={self.eval_tokens}: must be at least 1, or None for all")
        for name, allowed in (("match", ("tokens", "train_flops")), ("dtype", ("auto", "float32", "bfloat16")),
                              ("logger", ("", "tensorboard", "wandb"))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)}: must be {' or '.join(a for a in allowed if a)}")
        if self.match == "train_flops" and not self.reference:
            raise ValueError("match=train_flops needs reference, the dense cell to match")

    @functools.cached_property
    def steps(self):
        """Optimizer steps of this run: the standard number, times the budget, times the price of the reference over
        this model's (executed operations, head included) where training FLOPs are matched."""
        steps = self.max_iters * self.budget
        if self.match == "train_flops":
            reference = config.load(TrainConfig, [self.reference])
            steps *= reference.train_flops_per_token() / self.train_flops_per_token()
        return max(1, round(steps))

    @property
    def run_dir(self):
        name = self.cell or self.variant
        if self.budget != 1 or self.match != "tokens":
            name += f"-{self.budget:g}x-{self.match}"
        if self.seed != TrainConfig.seed:
            name += f"-seed{self.seed}"
        return Path(self.out_dir or Path("out") / name)

    def lr(self, step):
        """Linear warm-up, then a cosine to min_lr at the last step."""
        low = self.learning_rate / 10 if self.min_lr is None else self.min_lr
        if step < self.warmup_iters:
            return self.learning_rate * (step + 1) / (self.warmup_iters + 1)
        progress = (step - self.warmup_iters) / max(1, self.steps - self.warmup_iters)
        return low + 0.5 * (1 + math.cos(math.pi * min(1.0, progress))) * (self.learning_rate - low)


# what a continued run may change without becoming another run
MAY_CHANGE = {"out_dir", "cell", "init_from", "fresh", "reference", "batch_size", "max_iters", "eval_interval", "eval_tokens",
              "eval_depths", "eval_only", "log_interval", "logger", "device", "dtype", "compile", "recompute"}

# bf16 matrix operations per second without sparsity, from NVIDIA's data sheets
PEAK_FLOPS = {"A100": 312e12, "H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "L40S": 362e12}


class TrainError(Exception):
    """A run that cannot go on: one line."""


class Ranks(NamedTuple):
    """Which of how many processes this is (torchrun's environment)."""
    rank: int
    local: int
    world: int


def find_ranks():
    return Ranks(*(int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1))))


def find_device(name, local=0):
    """The torch.device of a `device` setting. Raises ConfigError where the machine lacks it."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(f"cuda:{local}" if name == "cuda" else name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        why = str(error).splitlines()[0]
        raise ConfigError(f"device={name}: not on this machine ({why}); --device=cpu always works") from None
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def keep_freed_memory(device):
    """On a CPU, let glibc keep what a step frees for the next one. Given back, as its defaults do, every page of the
    activations costs a fault when it's taken again: as much time as all elementwise work. The peak stays."""
    libc = ctypes.CDLL(None) if device.type == "cpu" and sys.platform == "linux" else None
    if hasattr(libc, "mallopt"):
        libc.mallopt(-1, -1)    # M_TRIM_THRESHOLD: the heap's end never goes back
        libc.mallopt(-4, 0)     # M_MMAP_MAX: large tensors come from the heap too


def low_precision(dtype, device):
    """Whether a `dtype` setting means bfloat16 on this device."""
    if dtype == "auto":
        return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return dtype == "bfloat16"


def has_compiler(device):
    """Whether torch.compile can work here: for a CPU it writes C++."""
    return device.type != "cpu" or any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++", "cl")))


def wants_compile(compile, device):
    """What a `compile` setting means on this device: None compiles on CUDA, where it pays. Raises ConfigError where it
    cannot."""
    if compile and not has_compiler(device):
        raise ConfigError("compile: no C++ compiler is here; install one, or name it in the environment's CXX")
    return device.type == "cuda" if compile is None else compile


def find_autocast(dtype, device):
    """A function that opens the autocast context of a `dtype` setting."""
    low = low_precision(dtype, device)
    return lambda: torch.autocast(device.type, torch.bfloat16) if low else contextlib.nullcontext()


@contextlib.contextmanager
def weights_cast(model, dtype, device):
    """Within, where a `dtype` setting means bfloat16, linear layers hold their matrices in it, cast once here: by autocast
    each call of a compiled block, a graph of its own, would cast anew, R times a pass. Gradients go back through the cast
    to the parameters, so a backward pass belongs inside; whatever reads model.parameters() does not."""
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)] if low_precision(dtype, device) else []
    weights = [m.weight for m in linears]
    for m in linears:
        m._parameters["weight"] = m.weight.to(torch.bfloat16)
    try:
        yield
    finally:
        for m, weight in zip(linears, weights):
            m._parameters["weight"] = weight


def peak_flops(device):
    """The device's peak in operations per second, None where it is not known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((flops for known, flops in PEAK_FLOPS.items() if known in name), None)


def make_optimizer(model, c, device):
    """AdamW with decay on matrices and embeddings alone, in one fused kernel where there is one."""
    groups = [{"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": c.weight_decay},
              {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=c.learning_rate, betas=(c.beta1, c.beta2), fused=device.type in ("cuda", "cpu"))


def load_windows(stream, starts, T, device):
    """Inputs and targets [B, T], int64, for windows that begin at these token positions."""
    tokens = torch.from_numpy(np.stack([stream.read(start, T + 1) for start in starts]).astype(np.int64))
    if device.type == "cuda":
        tokens = tokens.pin_memory().to(device, non_blocking=True)
    return tokens[:, :-1].to(device), tokens[:, 1:].to(device)


def training_batch(stream, c, step, micro, device):
    """Micro-batch `micro` of optimizer step `step`: every window once an epoch, in an order drawn from the seed."""
    n, T = stream.windows(c.block_size), c.block_size
    first = step * (c.tokens_per_step // T) + micro * c.batch_size
    epochs = (divmod(i, n) for i in range(first, first + c.batch_size))
    return load_windows(stream, [int(shuffled(n, i, fold(c.seed, epoch))) * T for epoch, i in epochs], T, device)


@torch.no_grad()
def evaluate(model, stream, c, device, ranks=Ranks(0, 0, 1), recurrence=None, stopping=lambda: False):
    """Validation loss in nats per token over fixed, non-overlapping windows, noise off; None where it was stopped.
    The windows are shared out among the ranks."""
    n, T = stream.windows(c.block_size), c.block_size
    if c.eval_tokens is not None:
        n = min(n, max(1, c.eval_tokens // T))
    training, autocast = model.training, find_autocast(c.dtype, device)
    model.eval()
    total = torch.zeros(3, dtype=torch.float64)     # nats, windows, ranks that were told to stop
    with weights_cast(model, c.dtype, device):
        for first in range(ranks.rank * c.batch_size, n, ranks.world * c.batch_size):
            if stopping():
                total[2] = 1
                break
            x, y = load_windows(stream, [i * T for i in range(first, min(first + c.batch_size, n))], T, device)
            with autocast():
                loss = model(x, y, recurrence=recurrence, want="none")[1]
            total += torch.tensor([loss.item() * len(x), len(x), 0], dtype=torch.float64)
    model.train(training)
    total = all_sum(total, device, ranks)
    return None if total[2] else (total[0] / total[1]).item()


def all_sum(x, device, ranks):
    """The sum of a tensor over the ranks, on the CPU."""
    if ranks.world > 1:
        x = x.to(device)
        dist.all_reduce(x)
    return x.cpu()


def evaluation(model, dataset, c, device, ranks, stopping):
    """What one evaluation logs: loss in nats per token and bits per byte, at every depth too when asked. None where it
    was stopped."""
    loss = evaluate(model, dataset.val, c, device, ranks, None, stopping)
    if loss is None:
        return None
    bytes_per_token = dataset.bytes_per_token("val")
    found = {"val_loss": loss, "bits_per_byte": loss / math.log(2) / bytes_per_token if bytes_per_token else None}
    if c.variant == "mor":
        model.rule.leaky, model.rule.decisions = True, [0, 0]
        found["val_loss_leaky"] = evaluate(model, dataset.val, c, device, ranks, None, stopping)
        model.rule.leaky = False
        other, decisions = all_sum(torch.tensor(model.rule.decisions, dtype=torch.float64), device, ranks).tolist()
        found["routing_disagreement"] = other / max(1, decisions)
    if c.eval_depths:
        found["val_loss_at_depth"] = {r: evaluate(model, dataset.val, c, device, ranks, r, stopping)
                                      for r in range(1, c.recurrence)}
        found["val_loss_at_depth"][c.recurrence] = loss
    whole = None not in (found.get("val_loss_leaky", 0), *found.get("val_loss_at_depth", {}).values())
    return found if whole else None


def say_evaluation(step, found):
    text = f"step {step}: val loss {found['val_loss']:.4f} nats per token"
    if found["bits_per_byte"]:
        text += f", {found['bits_per_byte']:.4f} bits per byte"
    if "val_loss_leaky" in found:
        text += f"; leaky top-k {found['val_loss_leaky']:.4f}, decisions that differ {found['routing_disagreement']:.1%}"
    if "val_loss_at_depth" in found:
        text += "; at depth " + ", ".join(f"{r}: {loss:.4f}" for r, loss in found["val_loss_at_depth"].items())
    print(text, flush=True)


class Log:
    """log.jsonl, on screen what a person wants of it, and a dashboard if there is one. Rank 0 alone writes."""

    def __init__(self, c, start, header):
        self.path, self.writer, self.wandb = c.run_dir / "log.jsonl", None, None
        if c.logger == "tensorboard":
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise ConfigError("logger=tensorboard needs the package: pip install tensorboard") from None
            self.writer = SummaryWriter(c.run_dir)
        if c.logger == "wandb":
            try:
                import wandb
            except ImportError:
                raise ConfigError("logger=wandb needs the package: pip install wandb") from None
            self.wandb = wandb.init(project="grt", id=c.run_dir.name, resume="allow", config=dataclasses.asdict(c))
        kept = []
        if start and self.path.exists():    # steps after the checkpoint will come again, its own evaluation if it is due
            due = start % c.eval_interval == 0 or start == c.steps
            for line in self.path.read_text().splitlines():
                with contextlib.suppress(ValueError):
                    entry = json.loads(line)
                    if "settings" in entry or entry.get("step", 0) < start + ("val_loss" in entry and not due):
                        kept.append(line)
        publish_text("".join(line + "\n" for line in kept), self.path)
        self.write(header | ({"resumed_at": start} if start else {}))

    def write(self, entry):
        entry = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in entry.items()}   # JSON has no NaN
        with open(self.path, "a") as file:
            file.write(json.dumps(entry) + "\n")
        numbers = {k: v for k, v in entry.items() if isinstance(v, (int, float)) and k != "step"}
        if "step" in entry and self.writer:
            for name, value in numbers.items():
                self.writer.add_scalar(name, value, entry["step"])
        if "step" in entry and self.wandb:
            self.wandb.log(numbers, step=entry["step"])


def git_commit():
    """The commit this code is at, with a + where Python files differ from it; None outside a repository."""
    here = Path(__file__).parent

    def git(*words):
        return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True).stdout.strip()
    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "*.py")
        return git("rev-parse", "--short", "HEAD") + "+" * bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return None


def save_checkpoint(path, checkpoint):
    """Write a dict of tensors and plain values: to a temporary file, flushed to disk, then renamed over `path`, so that
    a reader finds the old file or the new one, whole. Raises CheckpointError, with the old file as it was."""
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(checkpoint, file)
            publish(file, path)
    except (OSError, RuntimeError) as error:    # torch reports a full disk as RuntimeError
        with contextlib.suppress(OSError):
            temporary.unlink()
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "the disk is full or failed"
        raise CheckpointError(f"could not save {path}: {reason}; the file before it is unharmed") from error


def checkpoint_path(where):
    """The checkpoint a person means by a run's folder or a file."""
    where = Path(where)
    if not where.is_dir():
        return where
    return next((where / name for name in ("latest.pt", "best.pt") if (where / name).exists()), where / "latest.pt")


def move_aside(folder):
    """Rename a run's folder to the first free <folder>.old-N. Raises ConfigError where it holds no run."""
    folder = folder.resolve()
    if not any((folder / name).exists() for name in ("log.jsonl", "latest.pt", "best.pt")):
        raise ConfigError(f"{folder} is no run's folder: --fresh will not move it; choose another --out_dir")
    n = 1
    while (aside := folder.with_name(f"{folder.name}.old-{n}")).exists():
        n += 1
    folder.rename(aside)
    print(f"moved the run that was in {folder} to {aside}")


def differences(saved, c, free=MAY_CHANGE):
    """The saved settings that make a run another than c, but for those that are free to change: {name: saved value}."""
    return {k: saved[k] for k, v in dataclasses.asdict(c).items() if k not in free and k in saved and saved[k] != v}


def check_same_run(saved, c):
    """Raise ConfigError where a run's saved settings and today's would make two different runs of it."""
    if changed := differences(saved, c):
        was = ", ".join(f"{k}={v} (now {getattr(c, k)})" for k, v in changed.items())
        raise ConfigError(f"{c.run_dir} holds a run with {was}; choose another --out_dir, or --fresh to move it aside")


def accumulation_steps(c, world):
    """Micro-batches a rank runs for one optimizer step. Raises ConfigError naming the numbers where they do not divide."""
    once = c.batch_size * c.block_size * world
    if c.tokens_per_step % once:
        raise ConfigError(f"tokens_per_step={c.tokens_per_step} is not a multiple of batch_size={c.batch_size} × "
                          f"block_size={c.block_size} × {world} process{'es' * (world > 1)} = {once}")
    return c.tokens_per_step // once


def train(c, should_stop=lambda: False):
    """Run what the settings say, to the end or until should_stop() is true; returns the step reached."""
    ranks = find_ranks()
    main = ranks.rank == 0
    device = find_device(c.device, ranks.local)
    keep_freed_memory(device)
    accumulation = accumulation_steps(c, ranks.world)
    run_dir, steps = c.run_dir, c.steps

    # the data
    if main and ranks.world > 1 and c.dataset == "stdlib":
        open_dataset(c.dataset)             # prepares it where it is missing, once
    if ranks.world > 1:
        dist.barrier()
    dataset = open_dataset(c.dataset)
    if dataset.vocab_size > c.vocab_size:
        raise ConfigError(f"dataset={c.dataset} has {dataset.vocab_size} token ids, vocab_size={c.vocab_size} fewer")
    dataset.train.windows(c.block_size), dataset.val.windows(c.block_size)

    # the model: continued, started from another run, or new
    if main and c.fresh and not c.eval_only and run_dir.exists():
        move_aside(run_dir)
    if ranks.world > 1:
        dist.barrier()
    latest = run_dir / "latest.pt"
    saved, resumed = None, latest.exists() and not (c.fresh and c.eval_only)
    if resumed:
        saved = load_checkpoint(latest)
        if "optimizer" not in saved and not c.eval_only:
            raise ConfigError(f"{latest} holds weights alone; start a run of your own from them: --init_from={run_dir}")
        check_same_run(saved["settings"], c)
        if c.init_from and c.init_from != (began := saved["settings"].get("init_from", "")):
            raise ConfigError(f"{run_dir} holds a run with init_from={began} (now {c.init_from}); choose another --out_dir, or "
                              "--fresh to move it aside")
    elif c.init_from:
        saved = load_checkpoint(checkpoint_path(c.init_from))
    elif c.eval_only:
        raise ConfigError(f"{latest}: no checkpoint to evaluate; train the run first, or name another with --init_from")
    if saved and saved["tokenizer"] != dataset.tokenizer:
        raise ConfigError(f"the checkpoint speaks {saved['tokenizer']} tokens, dataset={c.dataset} {dataset.tokenizer} tokens")
    if resumed and not c.eval_only and saved["data_hash"] != dataset.hash:
        raise ConfigError(f"{run_dir} was trained on other contents of dataset={c.dataset} ({saved['data_hash']}, now "
                          f"{dataset.hash}); --fresh starts over")
    torch.manual_seed(fold(c.seed))
    model = Transformer(c).to(device)
    if saved:
        try:
            model.load_state_dict(saved["model"])
        except RuntimeError as error:
            raise ConfigError(f"the checkpoint's model has another shape: {str(error).splitlines()[1].strip()}") from None
    model.recompute = c.recompute
    compile = wants_compile(c.compile, device)
    if compile:
        model.compile_regions()

    if c.eval_only:
        found = evaluation(model, dataset, c, device, ranks, should_stop)
        if main and found:
            say_evaluation(saved["step"], found)
        return saved["step"]

    optimizer = make_optimizer(model, c, device)
    state = {"step": 0, "evaluated": 0, "best_val_loss": math.inf, "skipped": 0, "skipped_in_a_row": 0}
    if resumed:
        optimizer.load_state_dict(saved["optimizer"])
        state = {k: saved[k] for k in state}
    start, saved = state["step"], None
    if start > steps or start == steps == state["evaluated"]:
        if main:
            print(f"{run_dir} finished its {start} steps, best val loss {state['best_val_loss']:.4f}; "
                  "a larger --max_iters goes on, --fresh starts over")
        return start
    ddp = model
    if ranks.world > 1:
        ddp = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)

    def checkpoint(**more):
        return {"model": model.state_dict(), "settings": dataclasses.asdict(c), "tokenizer": dataset.tokenizer,
                "data_hash": dataset.hash, **state, **more}

    # the log
    parameters = model.num_params()
    peak = peak_flops(device)
    if main:
        run_dir.mkdir(parents=True, exist_ok=True)
        write_json(run_dir / "config.json", dataclasses.asdict(c))
        log = Log(c, start, {
            "settings": dataclasses.asdict(c), "steps": steps, "parameters": parameters["total"], "commit": git_commit(),
            "data_hash": dataset.hash, "tokenizer": dataset.tokenizer, "processes": ranks.world, "device": str(device),
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}})
        print(f"{run_dir}: {c.variant} {c.layout}, {parameters['total']:,} parameters, on {device}"
              + (f" × {ranks.world}" if ranks.world > 1 else "") + (", compiled" if compile else ""))
        print(f"{c.dataset}: {len(dataset.train):,} training tokens; {steps:,} steps of {c.tokens_per_step:,} tokens"
              + (f", continuing at step {start:,}" if start else ""), flush=True)

    model.train()
    clock, since, tokens_since, flops_since, autocast = 0.0, time.perf_counter(), 0, 0.0, find_autocast(c.dtype, device)
    for step in range(start, steps + 1):
        # evaluate, with everything saved first: whatever happens in there, the run can go on from here
        if step > 0 and (step % c.eval_interval == 0 or step == steps):
            clock += time.perf_counter() - since
            if main:
                save_checkpoint(latest, checkpoint(optimizer=optimizer.state_dict()))
            found = evaluation(model, dataset, c, device, ranks, should_stop)
            if found is None:
                break                       # the same command evaluates anew and goes on
            state["evaluated"] = step
            if found["val_loss"] < state["best_val_loss"]:
                state["best_val_loss"] = found["val_loss"]
                if main:
                    save_checkpoint(run_dir / "best.pt", checkpoint())
            if main:
                say_evaluation(step, found)
                log.write({"step": step, **found, "tokens": step * c.tokens_per_step})
            if main and step == steps:
                save_checkpoint(latest, checkpoint(optimizer=optimizer.state_dict()))
            since = time.perf_counter()
        if step == steps:
            break

        # one optimizer step
        depth, lr = sample_depth(c, c.seed, step), c.lr(step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss_sum = torch.zeros((), device=device)
        with weights_cast(model, c.dtype, device):
            for k in range(accumulation):
                micro = k * ranks.world + ranks.rank
                x, y = training_batch(dataset.train, c, step, micro, device)
                torch.manual_seed(fold(c.seed, step, micro))                    # noise and dropout
                with ddp.no_sync() if ddp is not model and k < accumulation - 1 else contextlib.nullcontext():
                    with autocast():
                        loss = ddp(x, y, recurrence=depth, want="none")[1] / accumulation
                    loss.backward()
                loss_sum += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), c.grad_clip or math.inf).item()
        if math.isfinite(norm):
            optimizer.step()
            state["skipped_in_a_row"] = 0
        else:
            state["skipped"] += 1
            state["skipped_in_a_row"] += 1
        optimizer.zero_grad(set_to_none=True)
        state["step"] = step + 1

        # tell, and see whether anyone wants to stop: every rank learns the same
        loss, stop = all_sum(torch.tensor([loss_sum.item(), float(should_stop())], dtype=torch.float64), device, ranks).tolist()
        loss /= ranks.world
        tokens_since += c.tokens_per_step
        flops_since += c.tokens_per_step * c.step_flops_per_token(depth)
        if main and (step % c.log_interval == 0 or step == steps - 1):
            now = time.perf_counter()
            clock, speed = clock + now - since, tokens_since / (clock + now - since)
            eta = (steps - step - 1) * c.tokens_per_step / speed
            mfu = flops_since / clock / (peak * ranks.world) if peak else None
            since, clock, tokens_since, flops_since = now, 0.0, 0, 0.0
            entry = {"step": step, "loss": loss, "lr": lr, "recurrence": depth, "grad_norm": norm,
                     "tokens": (step + 1) * c.tokens_per_step, "tokens_per_s": round(speed), "skipped": state["skipped"]}
            log.write(entry | ({"mfu": mfu} if mfu else {}))
            print(f"step {step}/{steps} | loss {loss:.4f} | depth {depth} | lr {lr:.2e} | {speed:,.0f} tokens/s"
                  + (f" | {mfu:.1%} MFU" if mfu else "") + f" | eta {int(eta // 60)}:{int(eta % 60):02d}", flush=True)
        if state["skipped_in_a_row"] >= 10:
            if main and not latest.exists():
                save_checkpoint(latest, checkpoint(optimizer=optimizer.state_dict()))
            raise TrainError(f"step {step}: the gradient was not finite 10 times in a row; {latest} holds the last good state. "
                             "Try a lower --learning_rate")
        if stop:
            if main:
                save_checkpoint(latest, checkpoint(optimizer=optimizer.state_dict()))
                print(f"stopped after step {step}, saved in {latest}; the same command continues")
            break
    return state["step"]


def read_settings(argv):
    """TrainConfig from the command line; --init_from brings the shape of its model, which flags may still change."""
    c = config.load(TrainConfig, argv, __doc__)
    if not c.init_from:
        return c
    latest, source = c.run_dir / "latest.pt", checkpoint_path(c.init_from)
    if not source.exists() and latest.exists() and not c.fresh:
        source = latest                     # a run that has begun goes on without what it began from
    settings = load_checkpoint(source)["settings"]
    shape = {f.name: settings[f.name] for f in dataclasses.fields(ModelConfig) if f.name in settings}
    c = config.load(TrainConfig, argv, over=shape)          # its variant may say where the run goes
    if checkpoint_path(c.init_from).parent.resolve() == c.run_dir.resolve():
        raise ConfigError(f"init_from={c.init_from} is where this run would go; give it another --out_dir")
    return c


def main(argv=None):
    signals = []

    def note(number, frame):
        if signals:                         # the second time, at once
            raise KeyboardInterrupt
        signals.append(number)
        print(f"\n{signal.Signals(number).name}: saving after this step; once more stops at once", file=sys.stderr)

    ranks, c = find_ranks(), None
    try:
        c = read_settings(sys.argv[1:] if argv is None else argv)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, note)
        if ranks.world > 1:
            dist.init_process_group("nccl" if find_device(c.device, ranks.local).type == "cuda" else "gloo")
        train(c, lambda: bool(signals))
    except (ConfigError, DataError, CheckpointError, TrainError) as error:
        if ranks.rank:
            sys.exit(2)
        config.fail(error)
    except OSError as error:
        config.fail(f"{error.filename or (c and c.run_dir)}: {error.strerror or error}; what was saved before is unharmed")
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
            time.sleep(0.1)     # gloo's threads outlive it: one that still frees a tensor while Python exits aborts the process
    if signals:
        sys.exit(128 + signals[0])


if __name__ == "__main__":
    main()
