"""What this project promises, proved offline on a CPU: python -m pytest -q

The FAULTS numbers are those of a list of faults that users of similar projects reported (repository#issue) or that
reading their code shows: 1-14 training, 15-18 generation, 19-23 data, 24 settings. Every test that can be asked of
every system is asked of every system.
"""
import contextlib
import dataclasses
import io
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn as nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import config
import model as model_file
import prepare
import sample
import train
from model import KVCache, ModelConfig, Transformer, fold, load_checkpoint, sample_depth, save_checkpoint

HERE = Path(__file__).parent
torch.set_num_threads(1)        # the models are tiny
SHAPES = {"dense": dict(n_prelude=3, n_core=0, recurrence=1, n_coda=0),
          "looped": dict(n_prelude=1, n_core=2, recurrence=3, n_coda=1),
          "poisson": dict(n_prelude=1, n_core=1, recurrence=3, n_coda=1),
          "mor": dict(n_prelude=1, n_core=2, recurrence=3, n_coda=1),
          "grt": dict(n_prelude=1, n_core=2, recurrence=3, n_coda=1)}
VARIANTS = list(SHAPES)
LOOPS = VARIANTS[1:]
each_variant = pytest.mark.parametrize("variant", VARIANTS)
each_loop = pytest.mark.parametrize("variant", LOOPS)


def tiny(variant, **more):
    return ModelConfig(**dict(variant=variant, n_embd=16, n_head=2, block_size=12, vocab_size=29) | SHAPES[variant] | more)


def make(c, scale=0.2, dtype=torch.float64):
    """A model in which every parameter matters: norms, biases and gates far from their initial values."""
    torch.manual_seed(0)
    model = Transformer(c).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(scale * torch.randn_like(p))
        if c.variant == "grt" and c.gate:
            model.rule.gate_out.bias.sub_(c.gate_bias)
    return model.eval()


def text(c, B=2, T=None, seed=0):
    return torch.randint(c.vocab_size, (B, T or c.block_size), generator=torch.Generator().manual_seed(seed))


def count_operations(run):
    """PyTorch's count of the operations of run(), attention as its matrix products (its CPU kernel is not counted)."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        run()
    return counter.get_total_flops()


def depths(model):
    """The depths worth trying: 1..2R, as far as the model goes."""
    R = model.config.recurrence
    return range(1, (R if model.config.variant == "mor" else 2 * R) + 1)


# ---------------------------------------------------------------------------------------------------------------------
# Model: an independent computation. No module of model.py runs here, only its parameters are read.


class Naive:
    """Every system from its equations: W and f concatenated and applied anew at every step, attention by softmax over a
    mask of who may look at whom, no cache, no gathering."""

    def __init__(self, model):
        self.c, self.p, self.h0 = model.config, dict(model.named_parameters()), getattr(model.rule, "h0", None)
        self.training = model.training

    def linear(self, name, x):
        y = x @ self.p[name + ".weight"].T
        return y + self.p[name + ".bias"] if name + ".bias" in self.p else y

    def norm(self, name, x):
        y = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt() * self.p[name + ".weight"]
        return y + self.p[name + ".bias"] if name + ".bias" in self.p else y

    def attention(self, name, x, may):
        heads = []
        q, k, v = self.linear(name + ".qkv", x).chunk(3, dim=-1)
        for q, k, v in zip(*(y.chunk(self.c.n_head, dim=-1) for y in (q, k, v))):
            scores = q @ k.mT / math.sqrt(k.shape[-1])
            heads.append(torch.softmax(scores.masked_fill(~may, -math.inf), dim=-1) @ v)
        return self.linear(name + ".out", torch.cat(heads, dim=-1))

    def gelu(self, x):
        if self.c.gelu == "tanh":
            return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))

    def blocks(self, part, n, x, may):
        for i in range(n):
            b = f"{part}.{i}"
            x = x + self.attention(b + ".attn", self.norm(b + ".norm1", x), may)
            x = x + self.linear(b + ".mlp.down", self.gelu(self.linear(b + ".mlp.up", self.norm(b + ".norm2", x))))
        return x

    def noisy(self, x):
        return x + self.c.noise * torch.randn_like(x) if self.training and self.c.noise else x

    def looped(self, h, a, core, r):
        return core(h)

    def poisson(self, h, a, core, r):
        if r == 0:
            h = self.h0.expand_as(a)
            if self.training:
                h = nn.init.trunc_normal_(torch.empty_like(a), 0, math.sqrt(2 / 5), -3 * math.sqrt(2 / 5), 3 * math.sqrt(2 / 5))
        W = torch.cat((self.p["rule.project_state.weight"], self.p["rule.project_anchor.weight"]), dim=1)
        return self.norm("rule.norm", core(torch.cat((h, a), dim=-1) @ W.T))

    def grt(self, h, a, core, r):
        p, c, D = self.p, self.c, self.c.n_embd
        u = self.noisy(h)
        if c.anchor:
            W = torch.cat((p["rule.project_state.weight"], p["rule.project_anchor.weight"]), dim=1)
            u = torch.cat((u, a), dim=-1) @ W.T + p["rule.project_state.bias"]
        o = core(u)
        if not c.gate:
            return o
        f1, seen = p["rule.gate_state.weight"], self.norm("rule.norm_state", h)
        if c.anchor:
            f1 = torch.cat((f1, p["rule.gate_anchor.weight"]), dim=1)
            seen = torch.cat((seen, self.norm("rule.norm_anchor", a)), dim=-1)
        hidden = seen @ f1.T + p["rule.gate_state.bias"]
        g = 1 / (1 + torch.exp(-self.noisy(self.linear("rule.gate_out", hidden / (1 + torch.exp(-hidden))))))
        return g * h + (1 - g) * o

    def mor(self, h, a, core, r):
        R, T = self.c.recurrence, h.shape[1]
        if r == 0:
            self.kept, self.penalty = torch.ones(h.shape[:2], dtype=torch.bool), 0.0
        logit = self.linear(f"rule.routers.{r}", h).squeeze(-1)
        before = self.kept
        if self.training:
            k = max(1, T * (R - r) // R)
            rank = (logit[:, :, None] < logit.masked_fill(~before, -math.inf)[:, None, :]).sum(-1)    # kept ones that are better
            self.kept = before & (rank < k)
            p = torch.sigmoid(logit)
            self.penalty = self.penalty - 0.001 * torch.where(self.kept, p, 1 - p).log()[before].mean()
        else:
            self.kept = before & (torch.sigmoid(logit) > 0.5)
        may = torch.ones(T, T, dtype=torch.bool).tril() & (self.kept[:, None, :] | torch.eye(T, dtype=torch.bool))
        return torch.where(self.kept[..., None], h + 0.1 * torch.sigmoid(logit)[..., None] * core(h, may), h)

    def __call__(self, idx, targets, depth):
        c, T, self.penalty = self.c, idx.shape[1], 0.0
        causal = torch.ones(T, T, dtype=torch.bool).tril()
        a = h = self.blocks("prelude", c.n_prelude, self.p["wte.weight"][idx] + self.p["wpe.weight"][:T], causal)
        for r in range(depth if c.n_core else 0):
            h = getattr(self, c.variant)(h, a, lambda x, may=causal: self.blocks("core", c.n_core, x, may), r)
        logits = self.norm("norm", self.blocks("coda", c.n_coda, h, causal)) @ self.p["wte.weight"].T
        loss = -torch.log_softmax(logits, dim=-1).gather(-1, targets[..., None]).mean()
        return logits, loss + self.penalty


RUNGS = [dict(zip(("anchor", "gate", "noise"), rung)) for rung in itertools.product((True, False), (True, False), (0.1, 0.0))]


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("variant, flags", [
    ("dense", {}), ("dense", dict(bias=True, gelu="tanh")), ("looped", {}), ("poisson", {}), ("mor", {}),
    ("mor", dict(bias=True)), ("grt", dict(bias=True, gelu="tanh")), ("grt", dict(n_prelude=0, n_coda=0)),
    *(("grt", rung) for rung in RUNGS)])
def test_agrees_with_the_equations(variant, flags, training):
    """Logits, loss and every gradient of the hoisted, gathered model are those of the equations, noise included."""
    model = make(tiny(variant, **flags)).train(training)
    x, y = text(model.config), text(model.config, seed=1)
    for depth in (1, 2, model.config.recurrence) if variant != "dense" else (1,):
        results = []
        for compute in (lambda: model(x, y, recurrence=depth), lambda: Naive(model)(x, y, depth)):
            torch.manual_seed(7)
            logits, loss = compute()
            grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
            results.append((logits, loss, *(torch.zeros(()) if g is None else g for g in grads)))
        for name, got, wanted in zip(["logits", "loss", *dict(model.named_parameters())], *results):
            assert got.shape == wanted.shape or not got.any() and not wanted.any(), name
            close = 1e-10 if name == "logits" else 1e-6                     # the loss is computed in float32
            assert (got - wanted).abs().max() < close, f"{name} at depth {depth}"


def test_noise_is_new_at_every_step_and_only_in_training():
    """State and gate each get noise of standard deviation 0.1, drawn anew at every step; evaluation draws nothing."""
    model, draws = make(tiny("grt", n_embd=64, block_size=64)), []
    model.rule.noisy = lambda x: draws.append(type(model.rule).noisy(model.rule, x) - x) or x + draws[-1]
    state = torch.get_rng_state()
    model(text(model.config))
    assert torch.equal(state, torch.get_rng_state()) and not any(d.any() for d in draws)
    draws.clear()
    model.train()(text(model.config))
    assert len(draws) == 2 * model.config.recurrence
    for d in draws:
        assert abs(d.std() - 0.1) < 0.005
    for one, other in itertools.combinations(draws, 2):
        assert abs(np.corrcoef(one.detach().flatten(), other.detach().flatten())[0, 1]) < 0.05


# -- counts

SCALES = {"small": (768, 12, 12), "medium": (1024, 16, 24), "large": (1280, 20, 36)}      # D, heads, dense blocks
CELLS = {("small", ""): (1, 1, 10, 1), ("medium", ""): (2, 5, 4, 2), ("large", ""): (1, 5, 6, 5),
         ("small", "_isoparam"): (1, 10, 10, 1), ("medium", "_isoparam"): (2, 20, 4, 2), ("large", "_isoparam"): (3, 30, 6, 3)}
PARAMETERS = {"dense_small": 124_373_760, "dense_medium": 354_599_936, "dense_large": 773_582_080,
              "grt_small": 63_611_904, "grt_medium": 171_073_536, "grt_large": 290_196_480,
              "grt_small_isoparam": 127_326_720, "grt_medium_isoparam": 359_847_936, "grt_large_isoparam": 781_780_480}


def cell(name):
    """The paper's cell: its config file where there is one, checked against the shape written here."""
    family, scale, *iso = name.split("_")
    D, H, blocks = SCALES[scale]
    p, s, R, n = (blocks, 0, 1, 0) if family == "dense" else CELLS[scale, "_isoparam" if iso else ""]
    c = ModelConfig(variant=family, n_embd=D, n_head=H, n_prelude=p, n_core=s, recurrence=R, n_coda=n)
    if (HERE / "config" / f"{name}.py").exists():
        found = config.load(train.TrainConfig, [name])
        assert dataclasses.asdict(found).items() >= dataclasses.asdict(c).items()
    return c


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_counts_of_the_paper(name):
    """All nine counts of the paper's table, exactly, and the parts add up to them."""
    c = cell(name)
    with torch.device("meta"):
        count = Transformer(c).num_params()
    assert count["total"] == PARAMETERS[name] == sum(n for part, n in count.items() if part != "total")
    assert count["rule"] == (5 * c.n_embd**2 + 5 * c.n_embd if c.variant == "grt" else 0)


def test_parameter_count_of_gpt2():
    """With biases and the unpadded vocabulary the dense model is GPT-2."""
    with torch.device("meta"):
        assert Transformer(dataclasses.replace(cell("dense_small"), bias=True, vocab_size=50257)).num_params()["total"] == 124_439_808


@each_variant
def test_core_is_stored_once(variant):
    """FAULTS 5 (MoR#17): the parameters that the core's steps use are one storage each, before and after saving and
    loading, and their number does not depend on R (but for MoR's routers, one a step)."""
    model = make(tiny(variant))
    copy = Transformer(model.config)
    copy.load_state_dict(model.state_dict())
    for m in (model, copy):
        assert len({p.data_ptr() for p in m.parameters()}) == len(list(m.parameters())) == len(m.state_dict())
        used = []
        for block in m.core:
            block.attn.qkv.register_forward_hook(lambda module, *_: used.append(module.weight.data_ptr()))
        m(text(m.config).clamp(max=28))
        assert len(used) == m.config.n_core * m.config.recurrence and len(set(used)) == m.config.n_core
    if variant != "dense":
        more = Transformer(dataclasses.replace(model.config, recurrence=12)).num_params()["total"]
        assert more == model.num_params()["total"] + (9 * 16 if variant == "mor" else 0)


def test_gate_multiplies_the_old_state():
    """Gate 1 leaves the prelude's output, gate 0 is the proposal alone, and a new gate is about sigmoid(4) = 0.98."""
    model = make(tiny("grt"))
    x = text(model.config)
    with torch.no_grad():
        only_prelude = model(x, recurrence=0)[0]
        model.rule.gate_out.weight.zero_()
        model.rule.gate_out.bias.fill_(1e4)
        assert torch.allclose(model(x)[0], only_prelude, atol=1e-12)
        model.rule.gate_out.bias.fill_(-1e4)
        opened = model(x)[0]
        ungated = Transformer(dataclasses.replace(model.config, gate=False)).double().eval()
        ungated.load_state_dict(model.state_dict(), strict=False)
        assert torch.allclose(opened, ungated(x)[0], atol=1e-12) and not torch.allclose(opened, only_prelude, atol=1e-3)
    fresh, gates = Transformer(tiny("grt", n_embd=64)).eval(), []
    h = torch.randn(1, 12, 64)
    kept = fresh.rule.blend(h, torch.zeros_like(h), fresh.rule.start(h)[1][1]) / h
    assert abs(kept.mean() - 1 / (1 + math.exp(-4))) < 0.002


def test_grt_without_its_parts_is_looped():
    """The lowest rung of the ablation ladder is plain depth sharing: same parameters, same results in training too."""
    looped = make(tiny("looped")).train()
    bare = Transformer(tiny("grt", anchor=False, gate=False, noise=0.0)).double().train()
    bare.load_state_dict(looped.state_dict())
    for depth in (1, 3, 5):
        assert torch.equal(bare(text(bare.config), recurrence=depth)[0], looped(text(bare.config), recurrence=depth)[0])


# -- operations

@pytest.mark.parametrize("T", [12, 7])
@pytest.mark.parametrize("variant, flags", [(v, {}) for v in VARIANTS] + [("grt", dict(anchor=a, gate=g)) for a, g in
                                                                         ((True, False), (False, True), (False, False))])
def test_flops_are_those_executed(variant, flags, T):
    """FAULTS 11 (nanoGPT#464, nanochat#147): executed operations per token are PyTorch's own count for every system and
    depth (MoR in training, the others in both modes), and training runs twice as many backwards."""
    c = tiny(variant, **flags)
    model = Transformer(c).train(variant == "mor")
    for depth in depths(model):
        counted = count_operations(lambda: model(text(c, T=T), recurrence=depth))
        assert counted / (2 * T) == pytest.approx(c.flops_per_token(depth, T), rel=1e-12), depth
        assert c.flops_per_token(depth, T) - c.flops_per_token(depth, T, head=False) == 2 * c.n_embd * c.vocab_size


@each_variant
def test_training_flops_are_those_executed(variant):
    """FAULTS 11: the expected cost of training is forward and backward as PyTorch counts them, over the depths drawn."""
    c = tiny(variant, recurrence=SHAPES[variant]["recurrence"] if variant != "poisson" else 6)
    model, cost = Transformer(c).train(), {}
    drawn = [sample_depth(c, 0, step) for step in range(3000)]
    x = text(c)
    for depth in set(drawn):
        cost[depth] = count_operations(lambda: model(x, x, recurrence=depth)[1].backward()) / x.numel()
    # the first layers' inputs are embeddings: nothing is left out, since embeddings have gradients too
    assert c.train_flops_per_token() == pytest.approx(np.mean([cost[d] for d in drawn]), rel=0.02)


@pytest.mark.parametrize("scale, forward, training", [("small", 1.284, 0.781), ("medium", 1.060, 0.725), ("large", 1.061, 0.689)])
def test_flops_of_the_paper(scale, forward, training):
    """The paper's formula, (p + sR + c)(24D² + 4TD) + R 10D², and the ratios to dense that follow from it."""
    grt, dense = cell(f"grt_{scale}"), cell(f"dense_{scale}")
    (D, _, blocks), (p, s, R, n), T = SCALES[scale], CELLS[scale, ""], 1024
    paper = lambda r: (p + s * r + n) * (24 * D**2 + 4 * T * D) + r * 10 * D**2
    of_dense = blocks * (24 * D**2 + 4 * T * D)
    assert dense.flops_per_token(accounting="paper", head=False) == dense.flops_per_token(head=False) == of_dense
    for r in range(1, R + 1):
        assert grt.flops_per_token(r, accounting="paper", head=False) == paper(r)
        assert grt.flops_per_token(r, head=False) == paper(r) - r * 4 * D**2 + 4 * D**2       # anchor's halves once
    assert paper(R) / of_dense == pytest.approx(forward, abs=5e-4)
    ratio = grt.train_flops_per_token(accounting="paper", head=False) / dense.train_flops_per_token(accounting="paper", head=False)
    assert ratio == pytest.approx(training, abs=5e-4)


# -- depth

def test_fold_mixes():
    """Equal arguments give equal numbers; neighbours, orders and lengths give others, spread over all 63 bits."""
    keys = [*itertools.product(range(20), range(20)), *((i,) for i in range(20)), (1, 2, 3), (3, 2, 1), (-1,), (10**30,)]
    numbers = [fold(*k) for k in keys]
    assert numbers == [fold(*k) for k in keys] and len(set(numbers)) == len(keys) and all(0 <= n < 2**63 for n in numbers)
    ones = np.mean([[n >> bit & 1 for bit in range(63)] for n in numbers], axis=0)
    assert abs(ones - 0.5).max() < 0.15


def test_depth_schedules():
    """Uniform: every depth 1..R equally often. Fixed: R. Both functions of (seed, step) alone."""
    c = ModelConfig(recurrence=10)
    drawn = np.array([sample_depth(c, 1, step) for step in range(20_000)])
    assert np.bincount(drawn, minlength=12)[1:11] == pytest.approx(2000, abs=5 * 45) and set(drawn) == set(range(1, 11))
    assert abs(np.corrcoef(drawn[1:], drawn[:-1])[0, 1]) < 0.03
    assert [sample_depth(c, 1, s) for s in (5, 3, 5)] == [drawn[5], drawn[3], drawn[5]]
    assert any(sample_depth(c, 2, s) != drawn[s] for s in range(20))
    assert {sample_depth(tiny("looped"), 1, s) for s in range(50)} == {3}


@pytest.mark.parametrize("R", [4, 10])
def test_heavy_tail_depths_match_the_closed_form(R):
    """100,000 draws of Poisson(e^τ) + 1, τ ~ N(ln R - σ²/2, σ), σ = 1/2, capped at 4R: frequencies, mean, median and mode
    against a quadrature over τ."""
    z = np.linspace(-8, 8, 4001)
    weight = np.exp(-z**2 / 2)
    rate = np.exp(math.log(R) - 0.125 + 0.5 * z)[:, None]
    k = np.arange(0, 4 * R - 1)
    log_factorial = np.array([math.lgamma(i + 1) for i in k])
    pmf = (weight[:, None] / weight.sum() * np.exp(k * np.log(rate) - rate - log_factorial)).sum(0)
    pmf = np.r_[0, pmf, 1 - pmf.sum()]                                       # depths 0..4R, all the tail at the cap
    values, n = np.arange(4 * R + 1), 100_000
    c = tiny("poisson", recurrence=R)
    drawn = np.array([sample_depth(c, 3, step) for step in range(n)])
    found = np.bincount(drawn, minlength=4 * R + 1) / n
    assert len(found) == 4 * R + 1
    assert (abs(found - pmf) < 5 * np.sqrt(pmf / n) + 1e-9).all()
    mean = pmf @ values
    assert abs(mean - (R + 1)) < 0.1 and abs(drawn.mean() - mean) < 4 * math.sqrt(pmf @ (values - mean)**2 / n)
    assert np.median(drawn) == np.searchsorted(pmf.cumsum(), 0.5)
    assert pmf[found.argmax()] > pmf.max() - 3 * math.sqrt(pmf.max() / n)


# -- heavy-tail depth sampling: the truncated gradient

@pytest.mark.parametrize("depth", [3, 8, 9, 13])
@pytest.mark.parametrize("low", [False, True], ids=["float32", "bfloat16"])
def test_gradient_reaches_the_last_eight_steps(depth, low):
    """min(8, r) steps have a gradient and the earlier ones have none. Under autocast a weight cast without gradients in
    an early step must not be what the later ones use: gradients equal those without autocast's cache."""
    c = tiny("poisson")
    model, outputs = make(c, dtype=torch.float32).train(), []
    model.core[0].register_forward_hook(lambda block, args, out: outputs.append(out))
    grads = []
    for cache in (True, False):
        torch.manual_seed(1)
        outputs.clear()
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=low, cache_enabled=cache):
            loss = model(text(c), text(c, seed=1), recurrence=depth)[1]
        for out in outputs:
            out.requires_grad and out.retain_grad()
        loss.backward()
        reached = [out.requires_grad and bool(out.grad.abs().sum() > 0) for out in outputs]
        assert reached == [False] * (depth - min(8, depth)) + [True] * min(8, depth)
        grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, g in grads[0].items():
        assert g.any() and (g - grads[1][name]).norm() < (0.05 if low else 1e-5) * g.norm(), name


def test_gradient_costs_memory_for_eight_steps():
    """What forward saves for backward grows up to 8 steps, and no further."""
    c = tiny("poisson")
    model, saved = Transformer(c).train(), {}
    for depth in (1, 4, 8, 9, 40):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t):
            model(text(c), text(c), recurrence=depth)
        saved[depth] = sum(sizes), len(sizes)
    assert saved[1] < saved[4] < saved[8] == saved[9] == saved[40]


# -- Mixture-of-Recursions

def test_mor_training_executes_less():
    """Gathering the kept tokens saves operations against running the core on all, counted by PyTorch."""
    c, count = tiny("mor", block_size=24), {}
    for training in (True, False):
        model = Transformer(c).train(training)
        count[training] = count_operations(lambda: model(text(c)))
    core = 48 * c.n_core * 24 * c.n_embd**2                 # one step over all tokens, linear layers alone
    assert count[True] < count[False] - 0.9 * core          # steps of 3/3, 2/3, 1/3 of the tokens save one of three


def test_mor_leaks_only_under_its_own_name():
    """Evaluation routes causally. Top-k routing in evaluation is another computation, reached by `leaky` alone, which
    also counts how many decisions it makes otherwise; and a leaky forward pass does look at the future."""
    model = make(tiny("mor"))
    x = text(model.config)
    changed = x.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 29
    causal = model(x)[0]
    assert torch.equal(causal[:, :-1], model(changed)[0][:, :-1]) and model.rule.decisions == [0, 0]
    model.rule.leaky = True
    leaky = model(x)[0]
    other, decisions = model.rule.decisions
    assert decisions == 2 * (12 + 12 + 8) and 0 < other < decisions
    assert not torch.allclose(leaky, causal, atol=1e-3)
    several = [text(model.config, B=16, seed=s) for s in range(4)]
    differ = 0
    for a in several:
        b = a.clone()
        b[:, -1] = (b[:, -1] + 1) % 29
        differ += not torch.allclose(model(a)[0][:, :-1], model(b)[0][:, :-1])
    assert differ
    model.rule.leaky = False
    assert torch.equal(model(x)[0], causal)
    assert "leaky" not in {f.name for f in dataclasses.fields(train.TrainConfig)}
