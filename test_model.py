"""What this project promises, proved offline on a CPU: python -m pytest -q

The FAULTS numbers are those of a list of faults that users of similar projects reported (repository#issue) or that
reading their code shows: 1-14 training, 15-18 generation, 19-23 data, 24 settings. Every test that can be asked of
every system is asked of every system.
"""
import contextlib
import dataclasses
import errno
import gzip
import hashlib
import http.server
import importlib.util
import io
import itertools
import json
import math
import os
import pickle
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
import requests
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import bench
import config
import model as model_file
import prepare
import sample
import train
from model import KVCache, ModelConfig, Transformer, fold, load_checkpoint, sample_depth
from train import save_checkpoint

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
            x = self.norm(b + ".after1", x) if self.c.variant == "poisson" else x
            x = x + self.linear(b + ".mlp.down", self.gelu(self.linear(b + ".mlp.up", self.norm(b + ".norm2", x))))
            x = self.norm(b + ".after2", x) if self.c.variant == "poisson" else x
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
        p, c = self.p, self.c
        u = self.noisy(h)
        if c.anchor:
            W = torch.cat((p["rule.project_state.weight"], p["rule.project_anchor.weight"]), dim=1)
            u = torch.cat((u, a), dim=-1) @ W.T + p["rule.project_anchor.bias"]
        o = core(u)
        if not c.gate:
            return o
        f1, seen = p["rule.gate_state.weight"], self.norm("rule.norm_state", h)
        if c.anchor:
            f1 = torch.cat((f1, p["rule.gate_anchor.weight"]), dim=1)
            seen = torch.cat((seen, self.norm("rule.norm_anchor", a)), dim=-1)
        hidden = seen @ f1.T + p["rule.gate_anchor.bias" if c.anchor else "rule.gate_state.bias"]
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
    fresh = Transformer(tiny("grt", n_embd=64)).eval()
    h = torch.randn(1, 12, 64)
    kept = fresh.rule.blend(h, torch.zeros_like(h), fresh.rule.start(h)[1][1]) / h
    assert abs(kept.mean() - 1 / (1 + math.exp(-4))) < 0.002
    half = Transformer(tiny("grt", half_identity=True)).eval()
    h, a = torch.randn(2, 1, 12, 16)
    assert torch.allclose(half.rule.project(h, half.rule.start(a)[1][0]), (h + a) / 2, atol=1e-6)


@each_variant
def test_initial_spread(variant):
    """Matrices and embeddings start at init_std, those that end a residual branch at init_std / √(2 · executed blocks);
    biases at 0, the gate's at gate_bias, norms at 1."""
    torch.manual_seed(0)
    c = tiny(variant, n_embd=64, bias=True, init_std=0.3, gate_bias=2.0)
    blocks = c.n_prelude + c.n_core * c.recurrence + c.n_coda
    for name, p in Transformer(c).named_parameters():
        if p.dim() == 2:
            small = name.endswith(("attn.out.weight", "mlp.down.weight"))
            assert p.std().item() == pytest.approx(0.3 / math.sqrt(2 * blocks) if small else 0.3, rel=0.3 if p.numel() < 100 else 0.08), name
        else:
            start = 2.0 if name == "rule.gate_out.bias" else 0.0 if name.endswith("bias") else 1.0
            assert torch.equal(p, torch.full_like(p, start)), name


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


# ---------------------------------------------------------------------------------------------------------------------
# Training: the real train.main on a small corpus

FLAGS = dict(dataset="mini", n_embd=16, n_head=2, block_size=16, vocab_size=257, tokens_per_step=128, batch_size=8,
             max_iters=6, warmup_iters=2, learning_rate=3e-3, eval_interval=3, log_interval=1, device="cpu")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """data/ with a small dataset called mini, written by prepare.py."""
    folder, draw = tmp_path_factory.mktemp("corpus"), np.random.default_rng(0)
    lines = (" ".join("".join(draw.choice(list("aeiounst"), 5)) for _ in range(12)) for _ in range(250))
    (folder / "some.txt").write_text("\n\n".join(lines))
    assert prepare.main([str(folder / "some.txt"), "--name=mini", f"--data_dir={folder / 'data'}"]) == 0
    return folder / "data"


@pytest.fixture
def work(corpus, tmp_path, monkeypatch):
    """An empty folder to run in, with the corpus in reach; signal handlers as before afterwards."""
    (tmp_path / "data").symlink_to(corpus)
    monkeypatch.chdir(tmp_path)
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    yield tmp_path
    for number, handler in handlers.items():
        signal.signal(number, handler)


def flags(variant, out, **more):
    settings = FLAGS | SHAPES[variant] | dict(variant=variant, out_dir=out) | more
    return [f"--{name}={value}" for name, value in settings.items()]


def status(main, argv):
    """The exit status of main(argv)."""
    try:
        return main(argv) or 0
    except SystemExit as end:
        return end.code or 0


def run(variant="grt", out="run", **more):
    """Train; the exit status."""
    return status(train.main, flags(variant, out, **more))


def log(out="run"):
    """The log's entries without what depends on the clock: (training, validation)."""
    entries = [json.loads(line) for line in Path(out, "log.jsonl").read_text().splitlines()]
    entries = [{k: v for k, v in e.items() if k != "tokens_per_s"} for e in entries if "settings" not in e]
    return [e for e in entries if "loss" in e], [e for e in entries if "val_loss" in e]


def checkpoint(out="run", name="latest.pt"):
    return load_checkpoint(Path(out, name))


def same(a, b):
    """Equal bit for bit, tensors in dicts and lists included."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def without_folder(saved):
    return saved | {"settings": {k: v for k, v in saved["settings"].items() if k != "out_dir"}}


def at_step(monkeypatch, *steps, do=lambda: signal.raise_signal(signal.SIGTERM)):
    """Do something in the middle of these optimizer steps, once each."""
    real, left = train.training_batch, list(steps)

    def training_batch(stream, c, step, micro, device):
        if step in left:
            left.remove(step)
            do()
        return real(stream, c, step, micro, device)
    monkeypatch.setattr(train, "training_batch", training_batch)


def error_line(capsys, *words):
    """The one line that was printed to stderr, which must contain these words."""
    err = capsys.readouterr().err.strip()
    assert err.startswith("error: ") and "\n" not in err, err
    for word in words:
        assert word in err, err
    return err


@each_variant
def test_resume_is_bit_exact(variant, work, monkeypatch):
    """FAULTS 1 (nanoGPT#467, #294): stopped by SIGTERM three times, once right before an evaluation, and continued by the
    same command: parameters, optimizer, losses, depths, noise, dropout and the log are those of the run left alone."""
    more = dict(dropout=0.1, max_iters=8)
    assert run(variant, "straight", **more) == 0
    at_step(monkeypatch, 0, 2, 4)
    for steps in (1, 3, 5):
        assert run(variant, **more) == 128 + signal.SIGTERM
        assert checkpoint()["step"] == steps
    assert run(variant, **more) == 0
    assert log() == log("straight")
    for name in ("latest.pt", "best.pt"):
        assert same(without_folder(checkpoint(name=name)), without_folder(checkpoint("straight", name)))


def test_evaluation_disturbs_nothing(work):
    """FAULTS 1: how often, and at which depths, a run evaluates changes no loss and no parameter."""
    run(out="seldom", eval_interval=100)
    run(out="often", eval_interval=1, eval_depths=True)
    assert log("seldom")[0] == log("often")[0] and same(checkpoint("seldom")["model"], checkpoint("often")["model"])


# -- one optimizer step, however it is split


def record(variant, out, **more):
    """Train, noise off; every step's gradient before clipping and its depth, and the exit status."""
    seen, clip, depth = types.SimpleNamespace(grads=[], depths=[]), nn.utils.clip_grad_norm_, train.sample_depth

    def recorded_clip(parameters, *rest):
        parameters = list(parameters)
        seen.grads.append([p.grad.clone() for p in parameters])
        return clip(parameters, *rest)

    def recorded_depth(*args):
        seen.depths.append(depth(*args))
        return seen.depths[-1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.utils, "clip_grad_norm_", recorded_clip)
        patch.setattr(train, "sample_depth", recorded_depth)
        patch.setattr(model_file.HeavyTail, "start", lambda rule, x: (rule.h0.expand_as(x), rule.project_anchor(x)))
        seen.status = run(variant, out, noise=0.0, **more)
    return vars(seen)


def one_of_two_ranks():
    """What each process of the test below does: every variant, and a run stopped by a signal to one rank alone."""
    rank, results = int(os.environ["RANK"]), {}
    init = train.dist.init_process_group
    train.dist.init_process_group = lambda *args: train.dist.is_initialized() or init(*args)       # once for all runs
    train.dist.destroy_process_group = lambda: None
    for name in [*VARIANTS, "stopped", "continued"]:
        variant, out = (name, f"two-{name}") if name in VARIANTS else ("grt", "two-stopped")
        with pytest.MonkeyPatch.context() as patch:
            if name == "stopped" and rank == 1:
                at_step(patch, 1)
            results[name] = record(variant, out, batch_size=4)
    torch.save(results, f"rank{rank}.pt")


def test_micro_batches_and_ranks_change_nothing(work):
    """FAULTS 2 (nanoGPT#145, modded-nanogpt#146, build-nanogpt#30): 1×8, 4×2 accumulated and 2 ranks × 4 give the same
    gradients, losses and parameters. FAULTS 3 (parameter-golf#835): all ranks draw the same depths, also after a stop
    that only one of them was asked for. FAULTS 9: validation loss is the same too."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", __file__]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [torch.load(f"rank{r}.pt") for r in (0, 1)]
    for variant in VARIANTS:
        one = record(variant, f"one-{variant}", batch_size=8)
        for out, other in ((f"four-{variant}", record(variant, f"four-{variant}", batch_size=2)),
                           (f"two-{variant}", ranks[0][variant]), (f"two-{variant}", ranks[1][variant])):
            assert other["status"] == 0 and other["depths"] == one["depths"]
            for step, (a, b) in enumerate(zip(one["grads"], other["grads"], strict=True)):
                assert all((x - y).abs().max() < 1e-5 for x, y in zip(a, b)), f"{out}, step {step}"
            for a, b in zip(itertools.chain(*log(out)), itertools.chain(*log(f"one-{variant}")), strict=True):
                assert a == pytest.approx(b, abs=1e-5)
            for name, p in checkpoint(out)["model"].items():
                assert torch.allclose(p, checkpoint(f"one-{variant}")["model"][name], atol=1e-5), f"{out} {name}"
    assert [r["stopped"]["status"] for r in ranks] == [0, 128 + signal.SIGTERM]
    for r in ranks:
        assert r["stopped"]["depths"] + r["continued"]["depths"] == ranks[0]["grt"]["depths"]
    assert log("two-stopped") == log("two-grt") and same(checkpoint("two-stopped")["model"], checkpoint("two-grt")["model"])


def test_commit_is_marked_where_python_files_differ(tmp_path, monkeypatch):
    """A run that writes results into the tree it was started from must not call the next run's code changed."""
    def git(*words):
        subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", *words], cwd=tmp_path, check=True, capture_output=True)
    monkeypatch.setattr(train, "__file__", str(tmp_path / "train.py"))
    assert train.git_commit() is None
    for name in ("train.py", "results.json", "config/cell.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("0")
    git("init"), git("add", "."), git("commit", "-m", "0")
    clean = train.git_commit()
    assert re.fullmatch("[0-9a-f]{7,}", clean)
    (tmp_path / "results.json").write_text("1")
    (tmp_path / "new.py").write_text("1")
    assert train.git_commit() == clean
    (tmp_path / "config/cell.py").write_text("1")
    assert train.git_commit() == clean + "+"


def test_logged_loss_is_the_mean(work, monkeypatch):
    """FAULTS 12 (nanochat#52): the logged loss is the mean over the step's micro-batches (over ranks: test above)."""
    losses, forward = [], Transformer.forward

    def recorded(model, *args, **more):
        logits, loss = forward(model, *args, **more)
        if model.training:
            losses.append(loss.item())
        return logits, loss
    monkeypatch.setattr(Transformer, "forward", recorded)
    run(batch_size=2, max_iters=3)
    assert [e["loss"] for e in log()[0]] == pytest.approx([np.mean(losses[i:i + 4]) for i in (0, 4, 8)], abs=1e-6)
    assert not any("mfu" in e for e in log()[0]), "FAULTS 11: no MFU on a device whose peak is unknown"


def test_every_window_once_an_epoch(corpus):
    """Data order is a function of (seed, step, micro-batch): each epoch visits every window once, in an order of its own."""
    data = prepare.open_dataset("mini", corpus)
    c = train.TrainConfig(block_size=512, tokens_per_step=1024, batch_size=1)
    n, whole = data.train.windows(512), data.train.read(0, len(data.train)).astype(np.int64)
    order = []
    for i in range(2 * n):
        x, y = train.training_batch(data.train, c, i // 2, i % 2, torch.device("cpu"))
        start = next(s for s in range(0, n * 512, 512) if np.array_equal(whole[s:s + 512], x[0]))
        assert np.array_equal(whole[start + 1:start + 513], y[0])
        order.append(start)
    assert sorted(order[:n]) == sorted(order[n:]) == list(range(0, n * 512, 512)) and order[:n] != order[n:] != sorted(order[n:])


# -- compilation

needs_compiler = pytest.mark.skipif(not train.has_compiler(torch.device("cpu")), reason="no C++ compiler")


@contextlib.contextmanager
def watched_compiler(monkeypatch, backend=None):
    """Compile from scratch, every fall-back to eager an error; yields a function that counts the graphs so far."""
    counters = torch._dynamo.utils.counters
    torch._dynamo.reset()
    counters.clear()
    if backend:
        for owner, name in ((nn.Module, "compile"), (torch, "compile")):
            real = getattr(owner, name)
            monkeypatch.setattr(owner, name, lambda what, real=real, **more: real(what, **more | {"backend": backend, "mode": None}))
    with torch._dynamo.config.patch(fail_on_cache_limit_hit=True):
        yield lambda: counters["stats"]["unique_graphs"]
    assert not counters["graph_break"]
    torch._dynamo.reset()


@each_variant
def test_graphs_do_not_grow_with_depth(variant, monkeypatch):
    """FAULTS 4 (pytorch#167504): R = 1..12, training and evaluation: a few graphs, all of them met by R = 12, 1 and 2, no
    recompile limit, no graph break, and the losses of the uncompiled model."""
    with watched_compiler(monkeypatch, "eager") as graphs:
        for R in (12, 1, 2, *range(3, 12)):
            c = tiny(variant, recurrence=1 if variant == "dense" else R)
            plain, compiled = make(c, dtype=torch.float32), make(c, dtype=torch.float32)
            compiled.compile_regions()
            for training in (True, False):
                losses = []
                for model in (plain, compiled):
                    torch.manual_seed(R)
                    losses.append(model.train(training)(text(c), text(c, seed=1))[1])
                    if training:
                        losses[-1].backward()
                assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-5)
            if R == 2:
                few = graphs()
    assert 1 <= few == graphs() <= 12


@each_variant
def test_a_compiled_run_meets_no_limit(variant, work, monkeypatch):
    """FAULTS 4: a run with everything in it (depths that change, evaluation at each, a last batch that is smaller, leaky
    evaluation) and its continuation never fall back to eager. Traced, but not compiled to machine code."""
    with watched_compiler(monkeypatch, "eager") as graphs:
        assert run(variant, compile=True, eval_depths=True, batch_size=4) == 0
        before = graphs()
        assert run(variant, compile=True, eval_depths=True, batch_size=4, max_iters=12) == 0
        assert 1 <= before <= graphs() <= before + 3 <= 24     # poisson's depths above 8; torch 2.6 guards on max_iters
    run(variant, "eager", eval_depths=True, batch_size=4)
    assert [e["loss"] for e in log()[0][:3]] == pytest.approx([e["loss"] for e in log("eager")[0][:3]], abs=1e-4)


@needs_compiler
@pytest.mark.parametrize("variant, how", [("grt", {}), ("grt", {"compile": True}), ("poisson", {"compile": True, "recompute": True})],
                         ids=str)
def test_weights_are_cast_once_a_step(variant, how, work, monkeypatch):
    """In bfloat16 each linear layer's matrix is cast once an optimizer step and once an evaluation, whatever depth and
    number of micro-batches, and its gradients come back through that cast; the losses are those of autocast alone."""
    def casts(out):
        with watched_compiler(monkeypatch, "aot_eager"), torch.profiler.profile(record_shapes=True) as profile:
            assert run(variant, out, dtype="bfloat16", batch_size=2, tokens_per_step=64, eval_tokens=32, max_iters=2, noise=0.0,
                       **how) == 0
        return [e.input_shapes[0] for e in profile.events() if e.name == "aten::_to_copy"].count([4 * 16, 16])
    steps, micro_batches, blocks = 2, 2, 4 if variant == "grt" else 3
    assert casts("run") == blocks * (steps * (1 + micro_batches) + 1)
    monkeypatch.setattr(train, "weights_cast", lambda *ignored: contextlib.nullcontext())
    assert casts("autocast") > blocks * (steps * (1 + micro_batches) + 1)
    assert [e["loss"] for e in log()[0]] == pytest.approx([e["loss"] for e in log("autocast")[0]], abs=1e-3)


def test_without_a_compiler(work, monkeypatch, capsys):
    """Where torch.compile has no C++ compiler, asking for it is one line; bench.py decode does without."""
    assert run(max_iters=1) == 0
    monkeypatch.setattr(train.shutil, "which", lambda name: None)
    for main, words in ((train.main, flags("grt", "other", compile=True)), (sample.main, ["--run=run", "--device=cpu", "--compile"]),
                        (bench.main, ["decode", "--device=cpu", "--compile"])):
        capsys.readouterr()
        assert status(main, words) == 2 and capsys.readouterr().err == (
            "error: compile: no C++ compiler is here; install one, or name it in the environment's CXX\n")
    assert status(bench.main, ["decode", "grt_tiny", "--device=cpu", "--context=8", "--new_tokens=2", "--rounds=1"]) == 0
    assert "compiled" not in capsys.readouterr().out


@needs_compiler
def test_compiled_checkpoint_is_plain(work, monkeypatch):
    """FAULTS 7 (nanoGPT#325): a compiled run's checkpoint has the plain names, loads strictly into an uncompiled model,
    and continues in an uncompiled run."""
    with watched_compiler(monkeypatch) as graphs:
        assert run(compile=True, noise=0.0, max_iters=3, eval_interval=3) == 0 and 1 <= graphs() <= 10
    saved = checkpoint()
    plain = model_file.from_checkpoint(saved)
    assert saved["model"].keys() == dict(plain.named_parameters()).keys()
    assert run(compile=False, noise=0.0, max_iters=4) == 0 and checkpoint()["step"] == 4
    run(out="eager", noise=0.0, max_iters=3, eval_interval=3)
    for a, b in zip(log()[0][:3], log("eager")[0]):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-4)


# -- however a run ends

def leaves_a_whole_run(out="run", step=None):
    """The run's checkpoint loads into a model and says how far it got."""
    saved = checkpoint(out)
    assert all(p.isfinite().all() for p in model_file.from_checkpoint(saved).parameters())
    assert step is None or saved["step"] == step
    return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_stops(number, work):
    """FAULTS 6 (nanochat#446, nanoGPT#60, #210): Ctrl-C and SIGTERM, to a process of its own, in the middle of a step."""
    command = [sys.executable, HERE / "train.py", *flags("grt", "run", max_iters=10**6, eval_interval=10**6)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not (line := process.stdout.readline()).startswith("step 3/"):
            assert line, process.stderr.read()
        process.send_signal(number)
        out, err = process.communicate(timeout=300)
    assert process.returncode == 128 + number and "Traceback" not in err and "same command continues" in out
    last = int(re.findall(r"step (\d+)/", out)[-1] if "step" in out else 3)
    assert leaves_a_whole_run(step=last + 1)


def test_a_run_ends_with_exactly_its_steps(work, monkeypatch, capsys):
    """FAULTS 10 (nanoGPT#332): max_iters = N makes N updates and saves the last, though N is no multiple of
    eval_interval and (FAULTS 6) even if that is larger; the same command then says that the run is finished."""
    for N, interval in ((5, 3), (5, 100), (1, 1)):
        updates = []
        with monkeypatch.context() as patch:
            real = torch.optim.AdamW.step
            patch.setattr(torch.optim.AdamW, "step", lambda optimizer: updates.append(1) or real(optimizer))
            assert run(out=f"run-{N}-{interval}", max_iters=N, eval_interval=interval) == 0
            saved = checkpoint(f"run-{N}-{interval}")
            assert len(updates) == N and leaves_a_whole_run(f"run-{N}-{interval}", step=N)
            assert {int(s["step"]) for s in saved["optimizer"]["state"].values()} == {N}
            capsys.readouterr()
            assert run(out=f"run-{N}-{interval}", max_iters=N, eval_interval=interval) == 0
        assert len(updates) == N and f"finished its {N} steps" in capsys.readouterr().out
    assert same(checkpoint("run-5-3")["model"], checkpoint("run-5-100")["model"])
    assert [e["step"] for e in log("run-5-3")[0]] == [0, 1, 2, 3, 4] and [e["step"] for e in log("run-5-3")[1]] == [3, 5]


@pytest.mark.parametrize("interval, steps", [(4, [2, 4, 8]), (3, [2, 4, 6, 8])])
def test_extending_a_run_keeps_its_log(interval, steps, work):
    """A finished run that is given more steps keeps every entry of its log, the last validation among them, each once."""
    run(max_iters=4, eval_interval=2)
    before = log()
    run(max_iters=8, eval_interval=interval)
    training, validation = log()
    assert training[:4] == before[0] and validation[:2] == before[1] and [e["step"] for e in validation] == steps


def test_an_exception_in_evaluation_loses_nothing(work, monkeypatch):
    """FAULTS 6: everything is saved before an evaluation; the run goes on from there and makes up for the evaluation."""
    run(out="straight")
    with monkeypatch.context() as patch:
        patch.setattr(train, "evaluate", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run()
    assert leaves_a_whole_run(step=3)
    assert run() == 0 and log() == log("straight") and same(checkpoint()["model"], checkpoint("straight")["model"])


@each_variant
def test_a_signal_in_evaluation_loses_nothing(variant, work, monkeypatch):
    """FAULTS 6: an evaluation that is told to stop stops, in whichever of its parts it is; the rest comes later."""
    run(variant, "straight", eval_depths=True)
    real, calls = train.load_windows, itertools.count()

    def counted(*args):
        next(calls)
        return real(*args)
    with monkeypatch.context() as patch:
        patch.setattr(train, "load_windows", counted)
        run(variant, "counted", eval_depths=True)
    per_evaluation = (next(calls) - 6) // 2
    for k, at in enumerate(3 + per_evaluation * part // 8 for part in (0, 3, 4, 7)):     # after the first three steps
        calls = itertools.count()

        def stopping(*args):
            if next(calls) == at:
                signal.raise_signal(signal.SIGTERM)
            return real(*args)
        with monkeypatch.context() as patch:
            patch.setattr(train, "load_windows", stopping)
            assert run(variant, f"run{k}", eval_depths=True) == 128 + signal.SIGTERM
        assert leaves_a_whole_run(f"run{k}")
        assert run(variant, f"run{k}", eval_depths=True) == 0
        assert log(f"run{k}") == log("straight")


def test_a_kill_in_the_middle_of_a_save(tmp_path):
    """FAULTS 6: SIGKILL when half of a checkpoint is written leaves the old one, and the next save succeeds."""
    path = tmp_path / "latest.pt"
    old, new = ({"model": {"w": torch.full((1000,), value)}, "settings": {}} for value in (1.0, 2.0))
    save_checkpoint(path, old)
    real = torch.save
    if not (child := os.fork()):
        def half(value, file):
            data = io.BytesIO()
            real(value, data)
            target = open(file, "wb") if isinstance(file, (str, os.PathLike)) else file
            target.write(data.getvalue()[:2000])
            target.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        torch.save = half
        save_checkpoint(path, new)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert same(load_checkpoint(path), old)
    save_checkpoint(path, new)
    assert same(load_checkpoint(path), new)


needs_full_disk = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")


@needs_full_disk
def test_a_full_disk_while_saving(work, capsys):
    """FAULTS 6: no space for a checkpoint is one line and status 2; the one before it still loads and continues."""
    run(out="straight")
    run(max_iters=3)
    before = Path("run/latest.pt").read_bytes()
    Path("run/latest.pt.tmp").symlink_to("/dev/full")
    capsys.readouterr()
    assert run() == 2
    error_line(capsys, "run/latest.pt")
    assert Path("run/latest.pt").read_bytes() == before and leaves_a_whole_run(step=3)
    assert run() == 0 and leaves_a_whole_run(step=6)


@needs_full_disk
@pytest.mark.parametrize("name", ["log.jsonl.tmp", "config.json.tmp", "best.pt.tmp"])
def test_a_full_disk_elsewhere(name, work, capsys):
    """FAULTS 6: no space for the log, the settings or the best checkpoint is one line and status 2 as well."""
    Path("run").mkdir()
    Path("run", name).symlink_to("/dev/full")
    assert run() == 2
    error_line(capsys, "run")


@needs_full_disk
def test_a_full_disk_does_not_cost_the_log(work, monkeypatch):
    """FAULTS 6: continuing a run on a full disk does not empty the log that it has."""
    run(max_iters=3)
    before = Path("run/log.jsonl").read_text()
    real = open

    def full(file, mode="r", *args, **more):
        handle = real(file, mode, *args, **more)             # "w" empties the file, as it does on a full disk
        return handle if mode.startswith("r") or "log.jsonl" not in str(file) else real("/dev/full", mode)
    monkeypatch.setattr("builtins.open", full)
    monkeypatch.setattr("io.open", full)
    assert run() == 2
    monkeypatch.undo()
    assert Path(work, "run/log.jsonl").read_text().startswith(before)


def nan_at(monkeypatch, bad):
    """The loss of these optimizer steps is not a number. Returns a list that gets the parameters before each step."""
    forward, step, parameters = Transformer.forward, itertools.count(), []

    def poisoned(model, *args, **more):
        logits, loss = forward(model, *args, **more)
        if model.training:
            parameters.append({k: v.clone() for k, v in model.state_dict().items()})
            loss = loss * (math.nan if next(step) in bad else 1)
        return logits, loss
    monkeypatch.setattr(Transformer, "forward", poisoned)
    return parameters


@each_variant
def test_a_gradient_that_is_not_finite_is_skipped(variant, work, monkeypatch):
    """FAULTS 8 (nanoGPT#215, #167, #554): that step changes neither parameters nor optimizer, and is counted."""
    parameters = nan_at(monkeypatch, {1, 3, 4})
    assert run(variant) == 0
    unchanged = [same(a, b) for a, b in zip(parameters, parameters[1:] + [checkpoint()["model"]])]
    assert unchanged == [False, True, False, True, True, False]
    assert [e["skipped"] for e in log()[0]] == [0, 1, 1, 2, 3, 3] and checkpoint()["skipped"] == 3
    assert {int(s["step"]) for s in checkpoint()["optimizer"]["state"].values()} == {3}
    assert leaves_a_whole_run(step=6)


@pytest.mark.parametrize("interval", [3, 1000])
def test_ten_bad_gradients_in_a_row_stop_the_run(interval, work, monkeypatch, capsys):
    """FAULTS 8: one clear line, status 2, and the checkpoint that the line speaks of is there and good; nine do not."""
    assert len(nan_at(monkeypatch, range(2, 11))) == 0
    assert run(out="nine", max_iters=12) == 0
    monkeypatch.undo()
    monkeypatch.chdir(work)
    parameters = nan_at(monkeypatch, range(2, 100))
    capsys.readouterr()
    assert run(max_iters=20, eval_interval=interval) == 2
    error_line(capsys, "10 times in a row", "run/latest.pt")
    assert len(parameters) == 12 and leaves_a_whole_run() and same(checkpoint()["model"], parameters[2])


# -- validation

@each_variant
def test_validation_loss_is_one_number(variant, corpus, monkeypatch):
    """FAULTS 9 (torchtitan#1759, llm-baselines#16): twice the same, whatever the batch size, the world size, the depth
    schedule or the model's mode; it is the mean over all non-overlapping windows; and no randomness is used."""
    data = prepare.open_dataset("mini", corpus)
    settings = FLAGS | SHAPES[variant] | dict(variant=variant, dropout=0.2)
    c = train.TrainConfig(**settings)
    model, cpu = make(c, dtype=torch.float32).train(), torch.device("cpu")
    tokens, T = torch.from_numpy(data.val.read(0, len(data.val)).astype(np.int64)), 16
    x, y = (tokens[i:i + (len(tokens) - 1) // T * T].view(-1, T) for i in (0, 1))
    with torch.no_grad():
        logits, _ = model.eval()(x)
    wanted = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()).item()
    model.train()
    state = torch.get_rng_state()
    losses = [train.evaluate(model, data.val, dataclasses.replace(c, batch_size=b), cpu) for b in (8, 8, 1, 7, 1000)]
    if variant != "mor":
        losses += [train.evaluate(model, data.val, dataclasses.replace(c, depth_sampling=d), cpu) for d in ("fixed", "uniform", "poisson")]
    assert losses[0] == losses[1] and losses == pytest.approx([wanted] * len(losses), abs=1e-5)
    assert model.training and torch.equal(state, torch.get_rng_state())
    parts = []
    monkeypatch.setattr(train, "all_sum", lambda total, *_: parts.append(total) or total)
    for rank in range(3):
        train.evaluate(model, data.val, c, cpu, train.Ranks(rank, 0, 3))
    nats, windows, stopped = sum(parts).tolist()
    assert nats / windows == pytest.approx(wanted, abs=1e-5) and windows == len(x) and not stopped
    assert abs(train.evaluate(model, data.val, dataclasses.replace(c, eval_tokens=64), cpu) - wanted) > 1e-4


def test_evaluation_reports(work):
    """Depths 1..R when asked; bits per byte; for MoR the leaky loss under its own name, with the disagreement."""
    for variant in ("grt", "mor"):
        run(variant, variant, eval_depths=True)
    for variant in ("grt", "mor"):
        entry = log(variant)[1][-1]
        assert list(entry["val_loss_at_depth"]) == ["1", "2", "3"] and entry["val_loss_at_depth"]["3"] == entry["val_loss"]
        data = prepare.open_dataset("mini")
        tokens = data.meta["splits"]["val"]["tokens"] / data.meta["splits"]["val"]["text_bytes"]
        assert entry["bits_per_byte"] == pytest.approx(entry["val_loss"] / math.log(2) * tokens)
    assert {k for k in entry if "leaky" in k} == {"val_loss_leaky"} and entry["val_loss_leaky"] != entry["val_loss"]
    assert 0 <= entry["routing_disagreement"] <= 1


def everything(folder):
    return {p: (p.stat().st_mtime_ns, p.read_bytes() if p.is_file() else None) for p in Path(folder).rglob("*")}


def test_eval_only_writes_nothing(work, capsys):
    """FAULTS 10: --eval_only reports the run's loss and changes no file, whatever other flags say."""
    assert run(eval_only=True) == 2
    error_line(capsys, "run/latest.pt", "--init_from")
    run()
    before = everything(work)
    capsys.readouterr()
    for more in ({}, dict(fresh=True), dict(max_iters=50), dict(init_from="run", out_dir="elsewhere")):
        if "fresh" not in more:
            assert run(eval_only=True, **more) == 0
            assert f"val loss {log()[1][-1]['val_loss']:.4f}" in capsys.readouterr().out
        else:
            run(eval_only=True, **more)
        assert everything(work) == before


def test_fresh_moves_the_old_run_aside(work):
    """--fresh starts over and deletes nothing; other settings in the same folder are refused; --init_from finetunes."""
    run()
    old = {p.name: content for p, content in everything("run").items()}
    assert run(learning_rate=1.0) == 2
    assert run(fresh=True, seed=5) == 0
    assert {p.name: content for p, content in everything("run.old-1").items()} == old
    assert not same(checkpoint()["model"], checkpoint("run.old-1")["model"])
    assert run(fresh=True) == 0 and Path("run.old-2/latest.pt").exists()
    assert status(train.main, ["--init_from=run", "--dataset=mini", "--tokens_per_step=128", "--batch_size=8", "--max_iters=1",
                               "--learning_rate=1e-30", "--out_dir=tuned", "--device=cpu"]) == 0
    for name, p in checkpoint("tuned")["model"].items():
        assert torch.allclose(p, checkpoint()["model"][name])


def test_fresh_moves_nothing_but_runs(work, capsys):
    """--fresh with the name of a file, or of a folder that is no run's: refused, and both stay."""
    Path("notes").mkdir()
    for out_dir in ("notes", "notes.txt", "."):
        Path("notes.txt").write_text("mine"), Path("notes/a.txt").write_text("mine")
        before = everything(work)
        assert run(out=out_dir, fresh=True) == 2 and everything(work) == before
        error_line(capsys, "no run's folder")


def test_a_source_is_not_trained_over(work, capsys):
    """--init_from keeps the source's files: where the source is the run's own folder, and where another run is."""
    run("dense", "out/dense"), run("grt", "out/grt")
    words = ["--dataset=mini", "--tokens_per_step=128", "--batch_size=8", "--max_iters=12", "--device=cpu"]
    before = everything(work)
    for more in ([], ["--fresh"]):
        assert status(train.main, ["--init_from=out/dense", *words, *more]) == 2 and everything(work) == before
        error_line(capsys, "init_from=out/dense", "--out_dir")
    assert status(train.main, ["--init_from=out/dense", "--out_dir=out/grt", *words]) == 2 and everything(work) == before
    run("dense", "mine"), capsys.readouterr()
    assert run("dense", "out/dense", init_from="mine", max_iters=12) == 2
    error_line(capsys, "out/dense", "init_from", "now mine")
    assert {k: v for k, v in everything(work).items() if k in before} == before


# -- the machine

def test_readme_commands_parse():
    """FAULTS 13 (nanoGPT#304, #293, #654): every train.py and sample.py command of the README has settings that exist."""
    commands = re.findall(r"(train|sample)\.py((?: +(?:--\S+|config/\S+))*)", (HERE / "README.md").read_text())
    assert commands
    for program, words in commands:
        config.load(train.TrainConfig if program == "train" else sample.SampleConfig, words.replace("`", "").split())


def test_the_first_command_runs_as_printed(work, capsys):
    """FAULTS 13: config/grt_tiny.py, with nothing but fewer steps, makes its own data and trains on what the machine
    has; python sample.py then speaks without a flag."""
    Path("data").unlink()
    assert status(train.main, ["config/grt_tiny.py", "--max_iters=2", "--eval_tokens=256"]) == 0
    assert leaves_a_whole_run("out/grt_tiny", step=2)
    capsys.readouterr()
    assert status(sample.main, ["--max_new_tokens=3"]) == 0
    assert "grt 1+1×6+1" in capsys.readouterr().err


def test_a_batch_that_does_not_divide(work, capsys):
    """FAULTS 14 (nanochat#532): the error names the numbers."""
    assert run(batch_size=7) == 2
    error_line(capsys, "tokens_per_step=128", "batch_size=7", "block_size=16", "112")
    assert not Path("run").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Generation


def slow_continuation(model, idx, n, recurrence=None, n_vocab=None):
    """The greedy continuation, every logit computed from the whole visible text; when the window is full, its last half
    is the new context."""
    size, seen, out = model.config.block_size, idx[:, -model.config.block_size:], idx
    for _ in range(n):
        if seen.shape[1] > size:
            seen = seen[:, -(size // 2):]
        token = model(seen, recurrence=recurrence)[0][:, -1, :n_vocab].argmax(-1, keepdim=True)
        seen, out = torch.cat((seen, token), dim=1), torch.cat((out, token), dim=1)
    return out


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@each_variant
def test_greedy_with_cache_is_greedy_without(variant, dtype):
    """FAULTS 15 (nanoGPT#613, x-transformers#219): for every system and depth, past block_size, twice over, in a batch."""
    model, seen = make(tiny(variant), scale=0.4, dtype=dtype), set()
    for depth in (None, *depths(model)):
        x = text(model.config, B=3, T=5)
        wanted = slow_continuation(model, x, 30, depth)
        for cached in (True, False):
            assert torch.equal(model.generate(x, 30, temperature=0, recurrence=depth, cached=cached), wanted)
        seen |= set(wanted[:, 5:].flatten().tolist())
    assert len(seen) > 2, "a text that repeats itself proves little"
    assert not model.training and model.train().generate(x, 1).shape == (3, 6) and model.training


@each_variant
def test_every_way_to_fill_the_cache_is_exact(variant):
    """FAULTS 15, 16 (MoR#9, #10): a text read at once, token by token or in uneven pieces: the same logits at every
    depth; with room for no token more."""
    model = make(tiny(variant))
    x, T = text(model.config, B=3), model.config.block_size
    for depth in depths(model):
        whole = model(x, recurrence=depth)[0]
        for pieces in ([T], [1] * T, [5, 1, 4, 2], [1, T - 1]):
            cache = KVCache(model.config, 3, recurrence=depth, dtype=torch.float64)
            got = torch.cat([model(piece, recurrence=depth, cache=cache)[0] for piece in x.split(pieces, dim=1)], dim=1)
            assert (got - whole).abs().max() < 1e-10, (depth, pieces)
        with pytest.raises(ValueError, match="do not fit"):
            model(x[:, :1], recurrence=depth, cache=cache)


@each_variant
def test_a_long_prompt_is_read_in_pieces(variant, monkeypatch):
    """No pass of a generation reads more than prefill_chunk tokens, also where the window has slid, and only the last
    piece of a prompt goes through the head; the text is that of one pass over everything."""
    model, seen = make(tiny(variant), scale=0.3), []
    forward = model.forward
    monkeypatch.setattr(model, "prefill_chunk", 4)
    monkeypatch.setattr(model, "forward", lambda idx, **how: seen.append((idx.shape[1], how["want"])) or forward(idx, **how))
    x = text(model.config, T=9)
    got = model.generate(x, 6, temperature=0)
    T = model.config.block_size
    slid = [(4, "none"), (2, "last")]                       # 9 + 4 tokens are one too many: the last 6 are read again
    assert seen == [(4, "none"), (4, "none"), (1, "last")] + [(1, "last")] * (T - 9) + slid + [(1, "last")], seen
    monkeypatch.undo()
    assert torch.equal(got, slow_continuation(model, x, 6))
    pieces, whole = KVCache(model.config, 2, dtype=torch.float64), KVCache(model.config, 2, dtype=torch.float64)
    model.prefill_chunk = 4
    assert torch.allclose(model.prefill(x, pieces)[:, 0], model(x, cache=whole)[0][:, -1], atol=1e-10)
    for mine, theirs in (pieces.keys, whole.keys), (pieces.values, whole.values):
        assert torch.allclose(torch.stack(mine), torch.stack(theirs), atol=1e-10)


@each_loop
def test_shared_caches(variant):
    """FAULTS 15: with one step every sharing mode is exact; with more, the others are smaller approximations that agree
    on the prompt; MoR, whose steps hold different tokens, refuses them by name."""
    model = make(tiny(variant), scale=0.3)
    x = text(model.config, T=5)
    for kv in ("mean", "first", "last"):
        if variant == "mor":
            with pytest.raises(ValueError, match=f"kv={kv}"):
                model.generate(x, 5, kv=kv)
            continue
        sizes = [KVCache(model.config, 1, sharing=mode).num_bytes() for mode in ("full", kv)]
        assert sizes[1] / sizes[0] == (2 + model.config.n_core) / (2 + 3 * model.config.n_core)
        assert torch.equal(model.generate(x, 7, temperature=0, recurrence=1, kv=kv), slow_continuation(model, x, 7, 1))
        caches = [KVCache(model.config, 2, dtype=torch.float64, sharing=mode) for mode in ("full", kv)]
        prompt, after = zip(*((model(x, cache=cache)[0], model(x[:, :1], cache=cache)[0]) for cache in caches))
        assert torch.allclose(*prompt, atol=1e-12) and not torch.allclose(*after, atol=1e-6)


@pytest.mark.parametrize("variant", ["looped", "poisson", "grt"])
def test_exit_stores_and_returns_the_last_step_run(variant):
    """A threshold of 0 never exits: the greedy text is the full one, in R steps a token. A large one exits at step 2."""
    model = make(tiny(variant), scale=0.3)
    for exit_kl, steps in ((0.0, 3), (1e9, 2)):
        taken = []
        got = model.generate(text(model.config, T=5), 7, temperature=0, exit_kl=exit_kl, depths=taken)
        assert set(torch.stack(taken).flatten().tolist()) == {steps}
        assert exit_kl or torch.equal(got, slow_continuation(model, text(model.config, T=5), 7))


@needs_compiler
def test_compiled_decoding(monkeypatch):
    """One graph for every token, at every position, with the texts of uncompiled decoding."""
    for variant in VARIANTS:
        model = make(tiny(variant), scale=0.4, dtype=torch.float32)
        with watched_compiler(monkeypatch, "eager") as graphs:
            got = model.generate(text(model.config, T=5), 20, temperature=0, compile=True)
            assert graphs() == 1, variant
        assert torch.equal(got, slow_continuation(model, text(model.config, T=5), 20)), variant


@needs_compiler
def test_compiled_decoding_of_many_kinds(monkeypatch):
    """Depths, batches and sharings follow each other in one process: each has its graph, and the tokens are the uncompiled
    ones. A changed depth must not become a symbol, nor nine kinds meet the compiler's limit of eight."""
    with watched_compiler(monkeypatch, "eager") as graphs:
        dense = make(tiny("dense"), dtype=torch.float32)
        assert dense.generate(text(dense.config, T=5), 20, temperature=0, compile=True).shape == (2, 25) and graphs() == 1
        model = make(tiny("grt"), scale=0.4, dtype=torch.float32)
        kinds = [dict(recurrence=r) for r in range(1, 7)] + [dict(kv=kv) for kv in ("mean", "first", "last")]
        for made, (B, kind) in enumerate([(2, kind) for kind in kinds] + [(1, {}), (3, {})], start=2):
            idx = text(model.config, B=B, T=5)
            got = model.generate(idx, 20, temperature=0, compile=True, **kind)
            assert torch.equal(got, model.generate(idx, 20, temperature=0, **kind)) and graphs() == made, kind


@each_variant
def test_the_future_is_not_seen(variant):
    """FAULTS 16: changing token t changes no logit before t, and some logit from t on, at every depth; rows of a batch do
    not see each other."""
    model = make(tiny(variant))
    x = text(model.config, B=3)
    for depth in depths(model):
        before = model(x, recurrence=depth)[0]
        for t in range(model.config.block_size):
            changed = x.clone()
            changed[0, t] = (changed[0, t] + 1) % 29
            after = model(changed, recurrence=depth)[0]
            assert torch.equal(before[0, :t], after[0, :t]) and not torch.equal(before[0, t], after[0, t])
            assert torch.equal(before[1:], after[1:])


@each_variant
def test_every_depth_is_finite(variant):
    """FAULTS 18 (recurrent-pretraining#15): depths 0..2R give finite losses, in training and out of it; MoR, which has a
    router per recursion, refuses depths beyond R in words."""
    model = make(tiny(variant), dtype=torch.float32)
    x = text(model.config)
    for depth in (0, *depths(model)):
        for training in (True, False):
            assert model.train(training)(x, x, recurrence=depth)[1].isfinite()
        assert model.generate(x[:, :3], 3, recurrence=depth).shape == (2, 6)
    for wrong in (-1, model.config.recurrence + 1) if variant == "mor" else (-1,):
        with pytest.raises(ValueError, match=f"recurrence={wrong}"):
            model(x, recurrence=wrong)


def test_ids_beyond_the_tokenizer_are_never_drawn():
    """Whatever the padding's logits are, temperatures and top_k: ids from n_vocab on do not appear."""
    model = make(tiny("grt"), dtype=torch.float32)
    with torch.no_grad():
        model.wte.weight[20:] = 100 * torch.randn(9, 16)
    x = text(model.config, B=50, T=4) % 20
    assert (model.generate(x, 8, temperature=0) >= 20).any()
    for how in (dict(temperature=0), dict(temperature=1.0), dict(temperature=100.0), dict(top_k=1), dict(top_k=25), dict(top_k=10**6)):
        assert (model.generate(x, 8, n_vocab=20, **how) < 20).all(), how


def test_tokens_are_drawn_from_the_distribution():
    """Temperature and top_k mean what they say, and the seed alone decides."""
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    for temperature, top_k in ((1.0, None), (0.5, None), (2.0, 2)):
        p = torch.exp(logits / temperature).double()
        p[[] if top_k is None else [0, 3]] = 0
        draw = model_file.choose(logits.expand(40_000, 4), temperature, top_k, torch.Generator().manual_seed(0))
        assert (torch.bincount(draw, minlength=4) / 40_000 - p / p.sum()).abs().max() < 0.01
    model, x = make(tiny("grt")), text(tiny("grt"), B=4, T=3)
    state = torch.get_rng_state()
    one, again, other = (model.generate(x, 20, seed=s) for s in (1, 1, 2))
    assert torch.equal(one, again) and not torch.equal(one, other) and torch.equal(state, torch.get_rng_state())
    assert torch.equal(model.generate(x, 20, top_k=1), model.generate(x, 20, temperature=0))


# -- sample.py

@pytest.fixture(scope="session")
def spoken(corpus, tmp_path_factory):
    """A folder with out/grt and out/mor, trained for a step; block_size is 16."""
    folder, before = tmp_path_factory.mktemp("spoken"), os.getcwd()
    os.chdir(folder)
    os.symlink(corpus, "data")
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    for variant in ("mor", "grt"):
        assert run(variant, f"out/{variant}", max_iters=1, vocab_size=300) == 0
    for number, handler in handlers.items():
        signal.signal(number, handler)
    os.chdir(before)
    return folder


def say(capsys, *words):
    """What sample.py prints for these words, its first line on stderr, and its exit status."""
    capsys.readouterr()
    code = status(sample.main, ["--device=cpu", "--max_new_tokens=20", *words])
    out, err = capsys.readouterr()
    return out, err.strip(), code


def test_prompts(spoken, monkeypatch, capsys, tmp_path):
    """FAULTS 17 (nanoGPT#434): empty, many bytes a character, longer than block_size, from a file, with `=`, a number and
    the words for special tokens: each is continued. FAULTS 24: the prompt is the text as it was given."""
    monkeypatch.chdir(spoken)
    for prompt in ("", "a=b", "123", "None", "é🙂", "x" * 100, "<|endoftext|>", "--help me", "two\nlines\0"):
        out, err, code = say(capsys, f"--start={prompt}")
        assert code == 0 and out.startswith(prompt) and err.startswith("out/grt/"), err
        (tmp_path / "prompt.txt").write_text(prompt, newline="")
        assert say(capsys, f"--file={tmp_path / 'prompt.txt'}")[0] == out
    assert say(capsys, "--seed=1")[0] == say(capsys, "--seed=1")[0] != say(capsys, "--seed=2")[0]
    assert say(capsys, "--num_samples=3", "--start=ab")[0].count("ab") >= 3


def test_prompts_that_cannot_be_read(spoken, monkeypatch, capsys, tmp_path):
    """FAULTS 17: half a surrogate pair, a file that is not UTF-8, is a folder or is missing, two prompts at once: one line
    and status 2."""
    monkeypatch.chdir(spoken)
    (tmp_path / "latin1").write_bytes("né".encode("latin-1"))
    for words, named in ((["--start=\udcff"], "UTF-8"), ([f"--file={tmp_path / 'latin1'}"], "latin1"), ([f"--file={tmp_path}"], str(tmp_path)),
                         (["--file=missing.txt"], "missing.txt"), (["--start=a", "--file=b"], "start and file")):
        out, err, code = say(capsys, *words)
        assert code == 2 and not out and err.startswith("error: ") and "\n" not in err and named in err, words


def test_sample_refuses_in_one_line(spoken, monkeypatch, capsys, tmp_path):
    """No checkpoint, a broken one, a depth the model does not have, settings without sense: one line and status 2."""
    monkeypatch.chdir(spoken)
    (tmp_path / "broken.pt").write_bytes((spoken / "out/grt/latest.pt").read_bytes()[:5000])
    (tmp_path / "empty.pt").write_bytes(b"")
    torch.save({"model": {}}, tmp_path / "foreign.pt")
    for words in (["--run=nowhere"], [f"--run={tmp_path / 'broken.pt'}"], [f"--run={tmp_path / 'empty.pt'}"], [f"--run={tmp_path / 'foreign.pt'}"],
                  ["--run=out/mor", "--recurrence=4"], ["--recurrence=0"], ["--num_samples=0"], ["--temperature=-1"], ["--top_k=0"],
                  ["--kv=some"], ["--run=out/mor", "--kv=mean"], ["--device=abacus"], ["--dtype=float16"], ["--temprature=1"], ["--top_k=x"]):
        out, err, code = say(capsys, *words)
        assert code == 2 and not out and err.splitlines()[-1].startswith("error: ") and len(err.splitlines()) <= 2, words
    monkeypatch.chdir(tmp_path)
    assert "python train.py config/grt_tiny.py" in say(capsys)[1]


def test_sample_as_a_program(spoken):
    """Exit statuses and text of the program itself: bytes that are not UTF-8, a terminal that is not."""
    def program(*words, **env):
        command = [sys.executable, HERE / "sample.py", "--device=cpu", "--max_new_tokens=20", *words]
        return subprocess.run(command, cwd=spoken, env=os.environ | env, capture_output=True, timeout=300)
    bad = program(b"--start=\xff")
    assert bad.returncode == 2 and bad.stderr.count(b"\n") == 1 and b"UTF-8" in bad.stderr
    ascii_only = program("--start=é", PYTHONIOENCODING="ascii")
    assert ascii_only.returncode == 0 and b"Traceback" not in ascii_only.stderr


@pytest.mark.parametrize("words", [["sample.py", "--device=cpu", "--max_new_tokens=20"], ["bench.py", "count", "grt_tiny"]])
def test_a_closed_pipe_is_no_error(words, spoken):
    """As behind `| head`: a reader that went away ends the program without an error."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as gone:
        done = subprocess.run([sys.executable, HERE / words[0], *words[1:]], cwd=spoken, stdout=gone, stderr=subprocess.PIPE,
                              timeout=300)
    assert done.returncode == 0 and b"Error" not in done.stderr


# ---------------------------------------------------------------------------------------------------------------------
# Speed and memory


@pytest.mark.parametrize("sharing", KVCache.SHARING)
def test_what_a_shared_slot_holds(sharing):
    """After R steps a core block's slot holds the mean, the first or the last of the R keys; prelude and coda their own."""
    c = tiny("grt")
    cache, draw = KVCache(c, 2, sharing=sharing), torch.Generator().manual_seed(0)
    for start, T in (0, 4), (4, 1), (5, 1):
        _, slots = cache.open(T)
        new = [torch.randn(2, c.n_head, T, c.n_embd // c.n_head, generator=draw) for _ in range(c.executed_blocks())]
        for slot, k in zip(slots, new):
            slot.append(k, -k, None)
        core = torch.stack(new[1:-1]).view(c.recurrence, c.n_core, *new[0].shape)
        want = {"full": core.flatten(0, 1), "mean": core.mean(dim=0), "first": core[0], "last": core[-1]}[sharing]
        want = torch.cat((new[0][None], want, new[-1][None]))
        assert torch.allclose(torch.stack(cache.keys)[..., start:start + T, :], want, atol=1e-6)
        assert torch.allclose(torch.stack(cache.values)[..., start:start + T, :], -want, atol=1e-6)
    assert cache.length == 6


@pytest.mark.parametrize("name, tokens, sharing, megabytes", [
    ("dense_large", 128, "full", 1571), ("grt_large", 128, "full", 604), ("dense_large", 1024, "full", 1736),
    ("grt_large", 1024, "full", 769), ("grt_large", 1024, "mean", 638)])
def test_serving_memory_by_count(name, tokens, sharing, megabytes):
    """Weights and cache in bf16, batch 1, of the paper's large models."""
    c = config.load(train.TrainConfig, [name])
    with torch.device("meta"):
        weights = 2 * Transformer(c).num_params()["total"]
    assert round((weights + KVCache(c, 1, tokens, device="meta", dtype=torch.bfloat16, sharing=sharing).num_bytes()) / 1e6) == megabytes


@pytest.mark.parametrize("variant", ["dense", "looped", "poisson", "grt"])
def test_early_exit(variant):
    """A threshold of 0 never exits and is plain decoding; a huge one exits at the second step, with the logits of that
    depth; skipped steps store the last computed keys; a row's exit does not depend on the other rows."""
    c = tiny(variant, recurrence=1 if variant == "dense" else 4)
    model, idx = make(c), text(c, T=8)

    def decode(threshold, rows=slice(None)):
        cache = KVCache(c, len(idx[rows]), dtype=torch.float64)
        with torch.no_grad():
            model(idx[rows, :5], cache=cache)
            if threshold is None:
                return model.decode(idx[rows, 5:6], cache), None, cache
            return *model.exit_early(idx[rows, 5:6], cache, threshold), cache

    def cut_to(depth):
        """The logits after `depth` steps of the sixth token, the five before it at full depth."""
        whole, part = decode(None)[2], KVCache(c, len(idx), recurrence=depth, dtype=torch.float64)
        n = c.n_prelude + depth * c.n_core
        for mine, theirs in (part.keys, whole.keys), (part.values, whole.values):
            mine[:n], mine[n:] = theirs[:n], theirs[len(theirs) - c.n_coda:]
        part.length = 5
        with torch.no_grad():
            return model.decode(idx[:, 5:6], part)

    plain, _, cache = decode(None)
    logits, steps, exact = decode(0.0)
    assert torch.allclose(plain, logits, atol=1e-12) and torch.allclose(torch.stack(cache.keys), torch.stack(exact.keys), atol=1e-12)
    assert steps.tolist() == [c.recurrence] * 2
    if variant == "dense":
        return
    logits, steps, cache = decode(math.inf)
    assert steps.tolist() == [2, 2]
    assert torch.allclose(logits, cut_to(2), atol=1e-12)
    core = torch.stack(cache.keys[c.n_prelude:-c.n_coda])[..., 5, :].unflatten(0, (c.recurrence, c.n_core))
    assert torch.equal(core[2], core[1]) and torch.equal(core[3], core[1]) and not torch.equal(core[1], core[0])
    # a threshold between the two rows' divergences at step 2: one leaves, one stays
    threshold = F.kl_div(cut_to(1).log_softmax(-1), cut_to(2).log_softmax(-1), log_target=True, reduction="none").sum(-1).mean().item()
    logits, steps, _ = decode(threshold)
    assert steps.min() == 2 < steps.max()
    for row in (0, 1):
        alone, depth, _ = decode(threshold, slice(row, row + 1))
        assert depth[0] == steps[row] and torch.allclose(alone[0], logits[row], atol=1e-12)


def test_generation_refuses_what_it_cannot_do():
    for variant, how in (("mor", dict(exit_kl=1e-3)), ("mor", dict(kv="mean")), ("grt", dict(exit_kl=1e-3, kv="last")),
                         ("grt", dict(exit_kl=1e-3, recurrence=0)), ("grt", dict(kv="mode"))):
        model = make(tiny(variant))
        with pytest.raises(ValueError, match="exit_kl|kv="):
            model.generate(text(model.config, T=3), 3, **how)


@needs_compiler
@pytest.mark.parametrize("variant", ["dense", "mor", "grt"])
def test_one_graph_decodes_a_text(variant, monkeypatch):
    """The compiled step gives the uncompiled tokens, by one graph for all positions, also past block_size."""
    model = make(tiny(variant), dtype=torch.float32)
    idx = text(model.config, T=3)
    with watched_compiler(monkeypatch) as graphs:
        assert torch.equal(model.generate(idx, 15, temperature=0, compile=True), model.generate(idx, 15, temperature=0))
        assert graphs() == 1


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the setting")
def test_freed_memory_is_not_faulted_in_again():
    """32 MB taken and freed again and again, first until the heap has room: ten further times fault in less than once
    its 8,192 pages of 4 KB."""
    program = """if True:
        import resource, torch, train
        train.keep_freed_memory(torch.device("cpu"))
        faults = []
        for _ in range(21):
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
            torch.ones(8 << 20)
        print(faults[20] - faults[10])"""
    faults = int(subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60).stdout)
    assert faults < 4096


@pytest.mark.parametrize("variant", LOOPS)
def test_recomputation_changes_memory_alone(variant):
    """--recompute: the same loss and gradients bit for bit, noise included, and fewer bytes kept."""
    found = []
    for recompute in (False, True):
        c, kept = tiny(variant, recurrence=6), []
        model = make(c).train()
        model.recompute = recompute
        torch.manual_seed(3)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
            loss = model(text(c), text(c, seed=1), want="none")[1]
        loss.backward()
        found.append(([loss, *(p.grad for p in model.parameters())], sum(kept)))
    assert same(found[0][0], found[1][0]) and found[1][1] < 0.6 * found[0][1]


@pytest.mark.parametrize("chunk", [5, 64])
def test_chunked_loss_is_cross_entropy(chunk, monkeypatch):
    monkeypatch.setattr(model_file.ChunkedCrossEntropy, "chunk", chunk)
    torch.manual_seed(0)
    x, W, targets = (30 * torch.randn(13, 8)).double().requires_grad_(), torch.randn(31, 8).double().requires_grad_(), torch.randint(31, (13,))
    for scale in (1.0, 0.3):
        ours, plain = model_file.ChunkedCrossEntropy.apply(x, W, targets), F.cross_entropy(x @ W.t(), targets)
        assert ours.item() == pytest.approx(plain.item(), abs=1e-10)
        for a, b in zip(torch.autograd.grad(scale * ours, (x, W)), torch.autograd.grad(scale * plain, (x, W))):
            assert torch.allclose(a, b, atol=1e-10)
    with torch.autocast("cpu", torch.bfloat16):
        low = model_file.ChunkedCrossEntropy.apply(x.float() / 30, W.float(), targets)
    product = (x.float() / 30).bfloat16() @ W.bfloat16().t()             # the head's product is autocast, the softmax is not
    assert low.dtype == torch.float32 and low.item() == pytest.approx(F.cross_entropy(product.float(), targets).item(), rel=1e-6)
    assert low.item() != pytest.approx(F.cross_entropy((x / 30) @ W.t(), targets).item(), rel=1e-6)


def test_evaluation_computes_no_gradient():
    """Under no_grad the chunked loss costs the head's product alone, as the plain one does, and is the same."""
    c = tiny("grt")
    model, x = make(c).eval(), text(c)
    with torch.no_grad():
        losses = [model(x, x, want=want)[1].item() for want in ("all", "none")]
        plain, chunked = (count_operations(lambda: model(x, x, want=want)) for want in ("all", "none"))
    assert chunked == plain and losses[0] == pytest.approx(losses[1], abs=1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# The bench


@each_variant
def test_the_floor_is_the_model_s_own_products(variant):
    """The products that bench.py times alone are all of the model's operations but routers and lookups."""
    c = tiny(variant, recurrence={"dense": 1, "poisson": 10}.get(variant, 3))    # 10: two without gradient
    model, T = make(c).train(), c.block_size
    work = bench.products(model, T)
    counted = sum(2 * rows * w.numel() if w is not None else 4 * rows**2 * c.n_embd for w, rows, _ in work)
    routers = c.variant == "mor" and T * model.rule.flops(c, c.recurrence, T)
    assert counted + routers == T * c.flops_per_token()
    x = text(c, B=1)
    step = count_operations(lambda: model(x, x)[1].backward())
    floor = count_operations(bench.bare(model, 1, T, backward=True))
    assert floor == pytest.approx(step, rel=0.02) and T * c.step_flops_per_token(c.recurrence) == pytest.approx(step, rel=0.02)


def test_bench_count(capsys):
    assert status(bench.main, ["count", "grt_medium", "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)
    assert found["parameters"]["total"] == 171_073_536
    assert round(found["paper"]["forward_of_dense"], 3) == 1.060 and round(found["paper"]["train_of_dense"], 3) == 0.725
    assert [run["tokens"] for run in found["runs"]] == [4_915_200_000, 9_830_400_000, 19_660_800_000]
    dense = config.load(train.TrainConfig, ["dense_medium"])
    assert found["runs"][1]["train_flops"] == pytest.approx(9_830_400_000 * found["executed_head"]["train_of_dense"] * dense.train_flops_per_token())


def test_isoflops_cells_are_matched():
    """Forward operations within 7% of dense at medium and large, by the paper's formula; at small GRT alone is more."""
    for scale in ("nano", "micro", "tiny", "small", "medium", "large"):
        dense = config.load(train.TrainConfig, [f"dense_{scale}"])
        for system in ("looped", "poisson", "mor", "grt"):
            c = config.load(train.TrainConfig, [f"{system}_{scale}"])
            ratio = c.flops_per_token(accounting="paper", head=False) / dense.flops_per_token(accounting="paper", head=False)
            assert abs(ratio - 1) < 0.07 or (system, scale) == ("grt", "small") or scale in bench.TINY_SCALES
            text = config.find(c.cell).read_text()
            said = [float(x) for x in re.findall(r"head not counted: (\d(?:\.\d+)?)", text)]
            assert said == [pytest.approx(ratio, abs=6e-4)], "the file states another mismatch"


def test_match_spends_the_operations_of_dense():
    for name in ("grt_small", "grt_tiny", "poisson_medium", "mor_tiny"):
        for budget in (0.5, 2):
            c = config.load(train.TrainConfig, [name, "--match=train_flops", f"--budget={budget}"])
            dense = config.load(train.TrainConfig, [c.reference, f"--budget={budget}"])
            assert c.steps * c.train_flops_per_token() == pytest.approx(dense.steps * dense.train_flops_per_token(), rel=1 / c.steps)


def test_bench_cells_reads_runs(work, capsys):
    """Our value is the last evaluation of a finished run; * where its settings are not the cell's."""
    def put(folder, cell_name, last, *more):
        c = config.load(train.TrainConfig, [cell_name, "--seed=0", *more])
        Path("out", folder).mkdir(parents=True)
        entries = [{"settings": dataclasses.asdict(c), "steps": c.steps}, {"step": 3, "val_loss": 9.0}, {"step": last or c.steps, "val_loss": 1.25}]
        Path("out", folder, "log.jsonl").write_text("".join(json.dumps(e) + "\n" for e in entries))
    put("a", "grt_tiny", None)
    put("b", "dense_tiny", None, "--learning_rate=1")
    put("c", "mor_tiny", 7)
    assert status(bench.main, ["cells", "--scale=tiny", "--json"]) == 0
    ours = {row["command"]: row["ours"] for row in json.loads(capsys.readouterr().out)}
    assert ours["python train.py config/grt_tiny.py --seed=0"] == "1.250"
    assert ours["python train.py config/dense_tiny.py --seed=0"] == "1.250*"
    assert ours["python train.py config/mor_tiny.py --seed=0"] == ours["python train.py config/grt_tiny.py --budget=2 --seed=0"] == ""


def test_bench_measures(capsys):
    """train and decode run and report what they promise; no figure is checked here."""
    assert status(bench.main, ["decode", "dense_tiny", "grt_tiny", "--kv=all", "--context=8", "--new_tokens=2", "--rounds=1", "--compile=False", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(r["cell"], r["kv"]) for r in rows] == [("dense_tiny", "full")] + [("grt_tiny", kv) for kv in KVCache.SHARING]
    assert all(r["ms/token"] > 0 and r["weights MB"] + r["cache MB"] == pytest.approx(r["counted MB"]) for r in rows)
    assert status(bench.main, ["train", "grt_tiny", "dense_tiny", "--block_size=8", "--rounds=1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [r["cell"] for r in rows] == ["grt_tiny", "dense_tiny"] and rows[0]["of first"] == 1
    for r in rows:
        flops = 3 * config.load(train.TrainConfig, [r["cell"], "--block_size=8"]).flops_per_token()
        assert r["graphs"] == 0 and r["GFLOP/s"] * 1e9 == pytest.approx(r["tokens/s"] * flops)


def test_bench_quality(work, capsys):
    assert run(max_iters=2) == 0
    capsys.readouterr()
    assert status(bench.main, ["quality", "--run=run", "--exit_kl=1e9", "--json"]) == 0
    rows = {r["how"]: r for r in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["kv=full"]["change"] == 0 and rows["kv=full"]["same token"] == 1
    assert rows["exit_kl=1e9"]["steps"] == pytest.approx(2)
    model = model_file.from_checkpoint(checkpoint()).eval()
    stream, T = prepare.open_dataset("mini").val, model.config.block_size
    n = min(64, stream.windows(T))
    x, y = train.load_windows(stream, [i * (stream.windows(T) // n) * T for i in range(n)], T, torch.device("cpu"))
    assert rows["kv=full"]["loss"] == pytest.approx(model(x, y)[1].item(), abs=1e-4)


def test_depth_of_a_trained_model(work, capsys):
    """Every depth from 0 to 2R by a plain loop; the divergence is from full depth; a dense model has one depth."""
    assert run("looped", "out/a", max_iters=2, init_std=0.3) == run("dense", "out/b", max_iters=2) == run("mor", "out/c", max_iters=2) == 0
    capsys.readouterr()
    assert status(bench.main, ["depth", "--run=out/a,out/b,out/c", "--windows=5", "--exit_kl=1e9,0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    model = model_file.from_checkpoint(checkpoint("out/a")).eval()
    stream, T, R = prepare.open_dataset("mini").val, model.config.block_size, model.config.recurrence
    starts = [i * (stream.windows(T) // 5) * T for i in range(5)]
    x, y = train.load_windows(stream, starts, T, torch.device("cpu"))
    assert [row["depth"] for row in found["rows"]] == list(range(2 * R + 1))
    full = torch.softmax(model(x)[0], dim=-1)
    for row in found["rows"]:
        p = torch.softmax(model(x, recurrence=row["depth"])[0], dim=-1)
        assert row["a"] == pytest.approx(F.cross_entropy(p.log().flatten(0, 1), y.flatten()).item(), abs=1e-5)
        assert row["a KL"] == pytest.approx((full * (full / p).log()).sum(dim=-1).mean().item(), abs=1e-5)
        assert (row["b"] is not None) == (row["depth"] == 1) and (row["c"] is not None) == (row["depth"] <= R)
    assert max(row["a KL"] for row in found["rows"]) > 1e-2, "enough to tell the two directions apart"
    assert [(e["run"], e["exit_kl"], e["steps"]) for e in found["exits"]] == [("a", "1e9", pytest.approx(2)), ("a", "0", pytest.approx(R))]
    assert status(bench.main, ["depth"]) == 2
    error_line(capsys, "--run=")


def test_anatomy_by_other_means():
    """Forced gates and other anchors are models that can be built: no gate, no step, weights of zero."""
    c = tiny("grt")
    model, x = make(c, scale=0.3, dtype=torch.float32), text(c, B=6)
    y, loss = text(c, B=6, seed=1), lambda model, **how: model(x, y, **how)[1].item()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    found = bench.anatomy(model, [(x[:4], y[:4]), (x[4:], y[4:])])
    assert same(before, dict(model.state_dict())) and not {"start", "step", "blend", "gate"} & vars(model.rule).keys()

    def other(edit, **more):
        twin = Transformer(dataclasses.replace(c, **more)).eval()
        twin.load_state_dict(before, strict=False)
        edit(twin)
        return twin

    def no_anchor(twin):
        twin.rule.project_anchor.weight.data.zero_()
        twin.rule.gate_anchor.weight.data.zero_()
    assert found["loss_at_depth"] == pytest.approx([loss(model, recurrence=r) for r in range(c.recurrence + 1)], abs=1e-5)
    assert found["g=1"] == pytest.approx(loss(model, recurrence=0), abs=1e-5)
    assert found["g=0"] == pytest.approx(loss(other(lambda twin: None, gate=False)), abs=1e-5)
    assert found["anchor=zeros"] == pytest.approx(loss(other(no_anchor)), abs=1e-5)
    assert len({round(found[k], 4) for k in ("g=0", "g=1", "anchor=zeros", "anchor=embedding", "anchor=drifting")} | {round(loss(model), 4)}) == 6

    # by hand: the states, the gate, the update, the anchors that are no model
    naive, may = Naive(model), torch.ones(12, 12, dtype=torch.bool).tril()
    embedded = model.wte.weight[x] + model.wpe.weight[:12]
    a = naive.blocks("prelude", 1, embedded, may)

    def states(anchor_of):
        h, seen = a, []
        for _ in range(c.recurrence):
            anchor = anchor_of(h)
            u = torch.cat((h, anchor), -1) @ torch.cat((before["rule.project_state.weight"], before["rule.project_anchor.weight"]), 1).T
            o = naive.blocks("core", 2, u + before["rule.project_anchor.bias"], may)
            hidden = naive.linear("rule.gate_state", naive.norm("rule.norm_state", h)) + naive.linear("rule.gate_anchor", naive.norm("rule.norm_anchor", anchor))
            g = torch.sigmoid(naive.linear("rule.gate_out", F.silu(hidden)))
            seen.append((h, o, g, g * h + (1 - g) * o))
            h = seen[-1][3]
        return seen, h

    def ending(h):
        return F.cross_entropy((naive.norm("norm", naive.blocks("coda", 1, h, may)) @ model.wte.weight.T).flatten(0, 1), y.flatten()).item()
    seen, _ = states(lambda h: a)
    for r, (h, o, g, new) in enumerate(seen):
        assert found["gate_mean"][r] == pytest.approx(g.mean().item(), abs=1e-5)
        assert found["gate_open"][r] == pytest.approx((g > 0.95).float().mean().item(), abs=1e-3)
        assert found["gate_shut"][r] == pytest.approx((g < 0.05).float().mean().item(), abs=1e-3)
        assert found["update_of_proposal"][r] == pytest.approx(((new - h).norm(dim=-1) / o.norm(dim=-1)).mean().item(), rel=1e-4)
        cosine = (h * new).sum(-1) / h.norm(dim=-1) / new.norm(dim=-1)
        assert found["cosine_of_steps"][r] == pytest.approx(cosine.mean().item(), abs=1e-4)
    assert found["anchor=embedding"] == pytest.approx(ending(states(lambda h: embedded)[1]), abs=1e-5)
    assert found["anchor=drifting"] == pytest.approx(ending(states(lambda h: h)[1]), abs=1e-5)
    left, right = before["rule.project_state.weight"].flatten(), before["rule.project_anchor.weight"].flatten()
    assert found["cosine of W's halves"] == pytest.approx((left @ right / left.norm() / right.norm()).item(), abs=1e-5)

    # deciles: 7 of 72 tokens each, easiest at depth 0 first
    first, last = (F.cross_entropy(model(x, recurrence=r)[0].transpose(1, 2), y, reduction="none").flatten() for r in (0, c.recurrence))
    order = first.argsort()
    for i in range(10):
        tenth = order[7 * i:7 * i + 7]
        assert sum(found["gain_by_decile"][i]) == pytest.approx((first[tenth] - last[tenth]).mean().item(), abs=1e-4)


def test_similarity_and_rank():
    """CKA from Gram matrices, as its definition has it, and what must not change it; the rank of what has a known one."""
    torch.manual_seed(0)
    x, y = torch.randn(40, 6).double(), torch.randn(40, 9).double()
    center = torch.eye(40).double() - 1 / 40
    K, L = center @ x @ x.T @ center, center @ y @ y.T @ center
    assert bench.linear_cka(x, y) == pytest.approx(((K * L).sum() / (K.norm() * L.norm())).item())
    constant = torch.full((40, 6), 0.1)         # heavy-tail's h_0 is the same for every token
    assert bench.effective_rank(constant) == bench.linear_cka(constant, x) == bench.linear_cka(x, constant) == 0
    turned = 3 * x @ torch.linalg.qr(torch.randn(6, 6).double()).Q + 5
    assert bench.linear_cka(x, turned) == pytest.approx(1)
    basis = torch.linalg.qr(center @ torch.randn(40, 4).double()).Q
    assert bench.effective_rank(7 * basis @ torch.eye(4, 9).double()) == pytest.approx(4)
    assert bench.effective_rank(basis[:, :1] @ torch.randn(1, 9).double() + 2) == pytest.approx(1)
    p = torch.tensor([8.0, 4.0, 2.0, 2.0]).double() / 16
    assert bench.effective_rank(basis @ torch.diag(p)) == pytest.approx(math.exp(-(p * p.log()).sum()))


def test_bench_anatomy(work, capsys):
    assert run("grt", "out/a", max_iters=2) == run("looped", "out/b", max_iters=2) == run("mor", "out/c", max_iters=2) == 0
    capsys.readouterr()
    assert status(bench.main, ["anatomy", "--run=out/a,out/b,out/c", "--windows=4"]) == 0
    out = capsys.readouterr().out
    assert [out.count(words) for words in ("paper: 12.0", "effective rank", "decile 10")] == [1, 3, 3]
    assert status(bench.main, ["anatomy", "--run=out/b", "--windows=4", "--svg=x.svg"]) == 2 and not Path("x.svg").exists()
    error_line(capsys, "gate")


def small_comparison(monkeypatch):
    """Three runs of seconds in place of the tiny comparison."""
    more = [f"--{k}={v}" for k, v in (FLAGS | dict(max_iters=3)).items() if k != "out_dir"]
    runs = [(f"{name}_micro", *more, *words) for name, *words in (("grt", "--seed=0"), ("grt", "--seed=1"), ("dense", "--seed=0"))]
    monkeypatch.setattr(bench, "tiny_runs", lambda seeds: runs)
    return runs


def test_comparison_trains_what_is_missing(work, monkeypatch, capsys):
    """A second call trains nothing; what results/tiny.json lacks, or has with other settings, is trained; a run that fails is
    named and the others go on; records hold what the logs hold, those of runs outside the plan stay, other corpora are
    refused."""
    runs, path = small_comparison(monkeypatch), Path("results/tiny.json")
    go = lambda: status(bench.main, ["cells", "--scale=tiny", "--run", "--workers=2"])
    path.parent.mkdir()
    dataset = prepare.open_dataset("mini")
    another = {"command": "another", "settings": {}, "data_hash": dataset.hash}
    path.write_text(json.dumps([another, another | {"command": bench.command(runs[0])}]))
    assert go() == 0 and "3 runs, 3 to train" in capsys.readouterr().out
    *records, last = json.loads(path.read_text())
    assert last == another and [r["command"] for r in records] == [*map(bench.command, runs)]
    for run_words, r in zip(runs, records):
        c = bench.cell(*run_words)
        model = model_file.from_checkpoint(checkpoint(c.run_dir)).eval()
        assert r["val_loss"] == train.evaluate(model, dataset.val, c, torch.device("cpu"))
        assert r["val_loss_at_depth"][str(c.recurrence)] == r["val_loss"] and len(r["val_loss_at_depth"]) == c.recurrence
        assert (r["seed"], r["tokens"], r["data_hash"]) == (c.seed, 3 * c.tokens_per_step, dataset.hash)
        assert r["train_flops"] == r["tokens"] * c.train_flops_per_token() and r["parameters"] == model.num_params()["total"]
        again = config.load(train.TrainConfig, [], over=r["settings"])
        assert again.lr(2) == c.lr(2) and bench.num_params(again) == bench.num_params(c)
    shutil.rmtree("out/grt_micro-seed1")
    assert go() == 0 and "3 runs, 0 to train" in capsys.readouterr().out
    before = path.read_text()
    path.write_text(json.dumps([another, records[0]]))
    log_file = Path("out/dense_micro-seed0/log.jsonl")
    log_file.write_text(log_file.read_text().replace('"beta1": 0.9', '"beta1": 0.8'))
    Path("out/dense_micro-seed0/latest.pt").write_bytes(b"not a checkpoint")
    assert go() == 2
    out, err = capsys.readouterr()
    assert "3 runs, 2 to train" in out and "1 of 2" in err and "dense_micro-seed0/console.txt" in out
    assert "not a whole checkpoint" in Path("out/dense_micro-seed0/console.txt").read_text()
    without_time = lambda text: [{k: v for k, v in r.items() if k != "seconds"} for r in json.loads(text)]
    assert without_time(path.read_text()) == [r for r in without_time(before) if r["command"] != bench.command(runs[2])]
    path.write_text(json.dumps([another | {"data_hash": "elsewhere"}]))
    assert go() == 2 and "elsewhere" in error_line(capsys, "another corpus") and "elsewhere" in path.read_text()
    assert status(bench.main, ["cells", "--scale=small", "--run"]) == status(bench.main, ["cells", "--scale=tiny", "--run", "--workers=0"]) == 2


def test_comparison_is_stopped_and_continued(work, monkeypatch, capsys):
    """SIGTERM to the comparison: its trainings save and stop, and the same command goes on from there. A terminal's Ctrl-C,
    which goes to a process group, would reach them by the comparison alone: a second signal would make them stop unsaved."""
    small_comparison(monkeypatch)
    groups, popen = [], subprocess.Popen

    def started(*args, **more):
        child = popen(*args, **more)
        groups.append(os.getpgid(child.pid))
        return child
    monkeypatch.setattr(bench.subprocess, "Popen", started)
    long = [run + ("--max_iters=100000", "--log_interval=1") for run in bench.tiny_runs(())[:1]]
    monkeypatch.setattr(bench, "tiny_runs", lambda seeds: long)
    log_file = Path("out/grt_micro-seed0/log.jsonl")

    def stop():
        while not log_file.exists() or log_file.read_text().count("tokens_per_s") < 3:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)
    threading.Thread(target=stop).start()
    assert status(bench.main, ["cells", "--scale=tiny", "--run", "--workers=1"]) == 130
    assert len(groups) == 1 and groups[0] != os.getpgid(0)
    reached = checkpoint("out/grt_micro-seed0")["step"]
    assert 3 <= reached < 100000 and "saved in" in Path("out/grt_micro-seed0/console.txt").read_text()
    shorter = [long[0][:-2] + (f"--max_iters={reached + 2}", "--log_interval=1")]
    monkeypatch.setattr(bench, "tiny_runs", lambda seeds: shorter)
    assert status(bench.main, ["cells", "--scale=tiny", "--run", "--workers=1"]) == 0
    assert f"continuing at step {reached}" in Path("out/grt_micro-seed0/console.txt").read_text()


def test_plan_of_the_comparison():
    """With one seed: five systems at three scales and three budgets, GRT at equal training FLOPs, the ladder, the sweep, a
    control for each part; each run once and in a folder of its own. Other seeds add the middle scale's standard budget."""
    one, three = bench.tiny_runs(["0"]), bench.tiny_runs(["0", "1", "2"])
    folders = [bench.cell(*run).run_dir for run in three]
    assert len(set(folders)) == len(folders) and set(one) < set(three)
    for scale in ("nano", "micro", "tiny"):
        for budget in (0.5, 1, 2):
            for system in bench.SYSTEMS:
                c = bench.cell(f"{system}_{scale}", *([f"--budget={budget}"] if budget != 1 else []), "--seed=0")
                assert c.run_dir in folders and (c.variant, c.budget) == (system, budget)
            assert sum((c := bench.cell(*run)).match == "train_flops" and c.budget == budget and c.cell == f"grt_{scale}" for run in one) == 1
    more = [bench.cell(*run) for run in three if run not in one]
    assert {c.seed for c in more} == {1, 2} and {c.budget for c in more} == {1} and {c.n_embd for c in more} == {48}
    assert {c.variant for c in more if c.match == "tokens"} == set(bench.SYSTEMS)


def test_tables_in_the_readme():
    """Every table that the README has from results/tiny.json is what `bench.py results` makes of the file."""
    records, readme = json.loads((HERE / "results" / "tiny.json").read_text()), (HERE / "README.md").read_text()
    assert len(records) > 50
    for title, make_table in bench.TABLES.items():
        assert make_table(records) in readme, title


def entry(cell_name, loss, **more):
    """A record as results/tiny.json has them."""
    return {"settings": {"cell": cell_name} | more, "val_loss": loss, "parameters": 10, "tokens": 1e6 * loss, "train_flops": 2.0,
            "val_loss_at_depth": {"1": loss + 1, "3": loss + 2}}


def test_tables_from_records():
    """One seed gives its value, several their mean and range, none a dash."""
    records = [entry("grt_micro", 1.5), entry("grt_micro", 1.7), entry("grt_micro", 9, budget=2.0), entry("dense_micro", 1.25)]
    rows = {line.split(" | ")[0]: line for line in bench.nine_cells(records).splitlines()}
    assert len(rows) == 2 + 5 + 3
    assert rows["| grt"] == "| grt | – | – | – | – | 1.600 (1.500 to 1.700) | 9.000 | – | – | – |"
    assert "| `grt_micro` | 1+1×6+1 | 10 | 1.00 | 1.600 (1.500 to 1.700) | 2.600 (2.500 to 2.700) | 3.600 (3.500 to 3.700) |" in bench.TABLES["The middle scale"](records)


def test_worth_of_a_step():
    """The fit finds the φ that made the losses, and the interval holds it; with noise and without."""
    def points(phi, noise=0.0):
        rng = np.random.default_rng(0)
        shapes = [(90e3, 0, 1), (30e3, 40e3, 4), (200e3, 0, 1), (60e3, 80e3, 6), (500e3, 0, 1), (90e3, 150e3, 8)]
        return np.array([(once, core, r, D, 0.9 + 30 * (once + r**phi * core)**-0.4 + 80 * D**-0.35 + noise * rng.normal())
                         for once, core, r in shapes for D in (2e6, 4e6, 8e6)])
    for phi in (0.2, 0.6):
        found, low, high, error = bench.fit_depth(points(phi), 1e-8)
        assert found == pytest.approx(phi, abs=0.04) and low <= found <= high and error < 1e-3
        found, low, high, error = bench.fit_depth(points(phi, 0.002), 0.002**2)
        assert low - 0.1 <= phi <= high + 0.1 and error == pytest.approx(0.002, rel=0.6)


@pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="matplotlib is not installed")
def test_pictures(work, capsys):
    """Each picture is SVG, small, the same bytes from the same numbers, with its words as text."""
    assert run("grt", "out/a", max_iters=2) == run("dense", "out/b", max_iters=2) == 0
    Path("results").mkdir()
    Path("results/tiny.json").write_text(json.dumps([entry("grt_micro", 1.5), entry("grt_micro", 1.25, budget=2.0), entry("dense_tiny", 1.5)]))
    for words, said in ((["results"], "training FLOPs"), (["depth", "--run=out/a,out/b", "--windows=4", "--exit_kl=1,0"], "mean steps of a token"),
                        (["anatomy", "--run=out/a", "--windows=4"], "linear CKA")):
        for name in ("x.svg", "y.svg"):
            assert status(bench.main, [*words, f"--svg=pictures/{name}"]) == 0
        svg = Path("pictures/x.svg").read_text()
        assert svg == Path("pictures/y.svg").read_text() and said in svg and len(svg) < 150_000
        ElementTree.fromstring(svg)


def test_pictures_need_a_package(work, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    Path("results").mkdir()
    Path("results/tiny.json").write_text("[]")
    assert status(bench.main, ["results"]) == 2
    error_line(capsys, "cells --scale=tiny --run")
    with pytest.raises(config.ConfigError, match="pip install matplotlib"), bench.picture("x.svg", 1):
        pass
    assert not Path("x.svg").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Data: the format on disk, the corpora, and downloads from a server that misbehaves


def data_run(capsys, *argv):
    """Run prepare.main; return (status, stdout, stderr). A failure is one line and leaves nothing half-written."""
    status = prepare.main([str(a) for a in argv])
    out, err = capsys.readouterr()
    return status, out, err


def data_refused(capsys, *argv):
    """Run prepare.main, which must refuse: status 2 and one line, which is returned."""
    status, _, err = data_run(capsys, *argv)
    line = err.strip().splitlines()[-1]
    assert status == 2 and line.startswith("prepare.py: ") and "Traceback" not in err, err
    return line


def data_bytes(folder):
    """{name: content} of the files that make a dataset."""
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.suffix == ".bin" or p.name == "meta.json"}


def data_documents(stream, tokenizer):
    """The texts of a TokenStream."""
    tokens = stream.read(0, len(stream))
    ends = np.flatnonzero(tokens == tokenizer.eot_token)
    assert len(ends) and ends[-1] == len(tokens) - 1
    return [tokenizer.decode(part[:-1].tolist()) for part in np.split(tokens, ends + 1)[:-1]]


def data_gpt2():
    """GPT-2's tokenizer, where its vocabulary is at hand."""
    cache = os.environ.get("TIKTOKEN_CACHE_DIR", "")
    names = [hashlib.sha1(url.encode()).hexdigest() for url in prepare.GPT2_VOCABULARY]
    if not all(os.path.exists(os.path.join(cache, name)) for name in names):
        pytest.skip("needs GPT-2's vocabulary: set TIKTOKEN_CACHE_DIR to a folder that holds it")
    return prepare.get_tokenizer("gpt2")


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(prepare, "SHARD_TOKENS", 1000)


def test_data_stdlib(tmp_path, capsys):
    dataset = prepare.open_dataset("stdlib", tmp_path)
    assert "preparing it" in capsys.readouterr().out
    assert (dataset.tokenizer, dataset.vocab_size, dataset.separator) == ("byte", 257, 256)
    assert 3e5 < len(dataset.val) < 1.2e6 and 7e6 < len(dataset.train) < 2e7
    assert 0.99 < dataset.bytes_per_token("val") < 1
    assert int(dataset.train.read(0, 100_000).max()) <= 256
    first = data_bytes(tmp_path / "stdlib")
    assert data_run(capsys, "stdlib", f"--data_dir={tmp_path}")[0] == 0
    assert data_bytes(tmp_path / "stdlib") == first
    assert data_run(capsys, "stdlib", f"--data_dir={tmp_path}/b", "--workers=3")[0] == 0
    assert data_bytes(tmp_path / "b" / "stdlib") == first
    assert prepare.open_dataset("stdlib", tmp_path / "b").hash == dataset.hash


def test_data_stdlib_by_many(tmp_path):
    """The ranks of a run may all find the corpus missing: one prepares it, the others wait, all read the same."""
    program = "import prepare, sys; print(prepare.open_dataset('stdlib', sys.argv[1]).hash)"
    ranks = [subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True,
                              cwd=os.path.dirname(prepare.__file__)) for _ in range(3)]
    outputs = [r.communicate(timeout=60)[0] for r in ranks]
    assert [r.returncode for r in ranks] == [0, 0, 0] and len({o.split()[-1] for o in outputs}) == 1
    assert sum("tokens from" in o for o in outputs) == 1


def test_data_own_text(tmp_path, capsys):
    """Files, folders and JSON lines; duplicates on one side; no document lost; the order of arguments is irrelevant."""
    notes = tmp_path / "notes"
    (notes / "deep").mkdir(parents=True)
    texts = {f"note {i}: {'na' * (i % 7)} é\u2028 <|endoftext|> {i}\r\n" for i in range(60)}
    for i, text in enumerate(sorted(texts)[:30]):
        (notes / f"{i}.txt").write_bytes(text.encode())
        (notes / "deep" / f"copy{i}.md").write_bytes(b"\xef\xbb\xbf" + text.encode())     # the same, after a BOM
    (notes / "picture.png").write_bytes(b"\x89PNG\0\0\xff")
    (notes / ".hidden").write_text("secret")
    with gzip.open(tmp_path / "book.jsonl.gz", "wt", encoding="utf-8") as f:
        for i, t in enumerate(sorted(texts)[30:]):
            f.write(json.dumps({"text": t, "id": 1}, ensure_ascii=i % 2) + "\n\n")
    args = ["--name=mine", "--val_fraction=0.3"]
    assert data_run(capsys, notes, tmp_path / "book.jsonl.gz", f"--data_dir={tmp_path}/a", *args)[0] == 0
    assert data_run(capsys, tmp_path / "book.jsonl.gz", notes, f"--data_dir={tmp_path}/b", *args)[0] == 0
    assert data_bytes(tmp_path / "a" / "mine") == data_bytes(tmp_path / "b" / "mine")
    dataset = prepare.open_dataset("mine", tmp_path / "a")
    byte = prepare.get_tokenizer("byte")
    train, val = data_documents(dataset.train, byte), data_documents(dataset.val, byte)
    assert set(train) | set(val) == texts and not set(train) & set(val) and len(train) + len(val) == 90
    assert 5 < len(val) < 50
    for split, documents in ("train", train), ("val", val):
        meta = dataset.meta["splits"][split]
        assert meta["documents"] == len(documents) and meta["text_bytes"] == sum(len(d.encode()) for d in documents)


@pytest.mark.parametrize("text", ["Some lines.\nMore of them.\n\n" * 60, "word " * 800, "x" * 5000, "é" * 3000,
                                  "日本語" * 2000, "\n\n".join(map(str, range(100_000)))])
def test_data_single_file(tmp_path, capsys, text):
    """One file gives both splits, whatever it looks like, and no character is lost."""
    (tmp_path / "my.txt").write_text("start " + text, encoding="utf-8")
    assert data_run(capsys, tmp_path / "my.txt", f"--data_dir={tmp_path}")[0] == 0
    dataset = prepare.open_dataset("my", tmp_path)
    documents = [d for s in (dataset.train, dataset.val) for d in data_documents(s, prepare.get_tokenizer("byte"))]
    assert "".join(sorted("".join(documents))) == "".join(sorted("start " + text))
    assert len(dataset.train) > 200 and len(dataset.val) > 200


def test_data_gpt2_tokens(tmp_path, capsys):
    gpt2 = data_gpt2()
    for text in "<|endoftext|>", "a<|endoftext|>b", " " * 300_000, "\u2028\r\n\t é\0", "x" * 100_000, "don't 12345 日本語 🙂":
        tokens = prepare.encode_batch(gpt2, [text], 0)[1]["train"]
        assert tokens.dtype == np.uint16 and tokens.tolist() == gpt2.encode_ordinary(text) + [50256]
    texts = ["A text that says <|endoftext|>.", "half a pair \ud83d of surrogates", "spaces" + " " * 3000 + "end"] * 2
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": t + str(i)}) for i, t in enumerate(texts)))
    assert data_run(capsys, tmp_path / "a.jsonl", f"--data_dir={tmp_path}", "--tokenizer=gpt2")[0] == 0
    dataset = prepare.open_dataset("a", tmp_path)
    assert (dataset.vocab_size, dataset.separator) == (50257, 50256)
    documents = [d for s in (dataset.train, dataset.val) for d in data_documents(s, gpt2)]
    expected = [(t + str(i)).encode("utf-16", "surrogatepass").decode("utf-16", "replace") for i, t in enumerate(texts)]
    assert "".join(sorted("".join(documents))) == "".join(sorted("".join(expected)))
    assert dataset.bytes_per_token("train") > 1


def test_data_stream(tmp_path, small_shards, capsys):
    """Reads cross shard borders, keep no file open, survive pickling; windows count their targets."""
    (tmp_path / "long.txt").write_text("\n\n".join(f"{i} " + "lorem ipsum " * (i % 9) for i in range(300)))
    assert data_run(capsys, tmp_path / "long.txt", f"--data_dir={tmp_path}")[0] == 0
    dataset = prepare.open_dataset("long", tmp_path)
    files = sorted((tmp_path / "long").glob("train*.bin"))
    assert len(files) > 10 and all(f.stat().st_size == 2000 for f in files[:-1])
    everything = np.concatenate([np.fromfile(f, "<u2") for f in files])
    stream = pickle.loads(pickle.dumps(dataset.train))
    assert len(stream) == len(everything)
    end = len(stream)
    for start, n in (0, 1), (999, 2), (1000, 1000), (1500, 3456), (end - 5, 5), (0, end), (7, 0), (end, 0):
        got = stream.read(start, n)
        assert got.dtype == np.uint16 and np.array_equal(got, everything[start:start + n])
    if os.path.isdir("/proc/self/fd"):
        opened = len(os.listdir("/proc/self/fd"))
        stream.read(0, len(stream))
        assert len(os.listdir("/proc/self/fd")) == opened
    for start, n in (-1, 3), (0, len(stream) + 1), (len(stream), 1):
        with pytest.raises(IndexError):
            stream.read(start, n)
    assert stream.windows(128) == (len(stream) - 1) // 128 and stream.windows(len(stream) - 1) == 1
    with pytest.raises(prepare.DataError, match=rf"shorter than one window: {len(stream)} tokens.*{len(stream) + 1}"):
        stream.windows(len(stream))


def test_data_shuffled():
    for n in (1, 2, 3, 4, 5, 16, 17, 100, 1023, 4097):
        assert sorted(prepare.shuffled(n, i, 7) for i in range(n)) == list(range(n))
    order = [[prepare.shuffled(2000, i, seed) for i in range(2000)] for seed in (0, 1, -1, 1 << 60)]
    for a in range(4):
        assert abs(np.corrcoef(order[a], range(2000))[0, 1]) < 0.1
        assert all(sum(x == y for x, y in zip(order[a], order[b])) < 20 for b in range(a))
    counts = np.bincount([prepare.shuffled(10, 0, seed) for seed in range(5000)], minlength=10)     # uniform over seeds
    assert ((counts - 500) ** 2 / 500).sum() < 30
    assert [prepare.shuffled(10**9, i, 42) for i in range(3)] == SHUFFLED_42    # a resumed run must see the same order


SHUFFLED_42 = [438331122, 184281192, 164874045]


@pytest.mark.parametrize("damage, message", [
    (lambda d, m: (d / "train-000.bin").write_bytes((d / "train-000.bin").read_bytes()[:-2]), "its metadata says"),
    (lambda d, m: (d / "train-000.bin").write_bytes((d / "train-000.bin").read_bytes() + b"\0\0"), "its metadata says"),
    (lambda d, m: (d / "val-000.bin").write_bytes(b"\1" + (d / "val-000.bin").read_bytes()[1:]), "sha256 differs"),
    (lambda d, m: (d / "val-000.bin").unlink(), "has no bytes"),
    (lambda d, m: m.update(vocab_size=50257), "vocabulary 50257"),
    (lambda d, m: m.update(separator=0), "separator 0"),
    (lambda d, m: m.update(tokenizer="gpt2"), "has 50257 and 50256"),
    (lambda d, m: m.update(tokenizer="gpt5"), "is not one of byte, gpt2"),
    (lambda d, m: m.update(format=99), "format 99"),
    (lambda d, m: m.pop("splits"), "damaged"),
    (lambda d, m: m["splits"].update(val=[]), "damaged"),
    (lambda d, m: m["splits"]["train"].update(tokens=5), "add up"),
    (lambda d, m: m["splits"]["train"]["files"][0].update(tokens="many"), "damaged"),
    (lambda d, m: (d / "meta.json").write_text("{"), "damaged"),
    (lambda d, m: (d / "meta.json").unlink(), r"python prepare.py your_text.txt --name=t")])
def test_data_damage_is_refused(tmp_path, capsys, damage, message):
    (tmp_path / "t.txt").write_text("\n\n".join(map(str, range(3000))))
    assert data_run(capsys, tmp_path / "t.txt", f"--data_dir={tmp_path}")[0] == 0
    prepare.open_dataset("t", tmp_path)
    meta = json.loads((tmp_path / "t" / "meta.json").read_text())
    before = json.dumps(meta)
    damage(tmp_path / "t", meta)
    if json.dumps(meta) != before:
        (tmp_path / "t" / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(prepare.DataError, match=message) as e:
        prepare.open_dataset("t", tmp_path)
    assert "\n" not in str(e.value)


def test_data_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("one\n\ntwo " * 1000)
    (tmp_path / "tiny.txt").write_text("too short")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 1000)
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"txt": "not"}\n')
    for argv, message in [
            (["a.txt", "--nmae=b"], "unknown flag --nmae; did you mean --name"),
            (["a.txt", "--shards=2"], "means nothing to your own text, only to fineweb"),
            (["shakespear"], "did you mean command shakespeare"), (["a.txt", "--name=../x"], "not a plain name"),
            (["a.txt", "--name=cccc"], "belongs to the command"), (["a.txt", "--tokenizer=gpt5"], "unknown tokenizer"),
            (["a.txt", "--workers=0"], "whole number"), (["a.txt", "--workers=many"], "whole number"),
            (["a.txt", "--name"], "needs a value"), (["a.txt", "--val_fraction=5"], "between 0 and 1"),
            (["cccc", "--max_tokens=inf"], "whole number"), (["--name=x"], "say what to prepare"),
            (["no/such.txt"], "no file or folder 'no/such.txt'"), (["tiny.txt"], "too little text"),
            (["latin.txt"], "not UTF-8"), (["bad.jsonl"], "bad.jsonl, line 2")]:
        line = data_refused(capsys, *argv)
        assert message in line, line
        assert not list(tmp_path.glob("data/*/meta.json")) and not list(tmp_path.glob("data/*/*.tmp"))
    assert prepare.parse(["cccc", "--max_tokens=10e9", "--dry_run"]) == (["cccc"], {"max_tokens": 10**10, "dry_run": True})
    for argv in [], ["--help"], ["cccc", "--help"]:
        status, out, _ = data_run(capsys, *argv)
        assert status == 0 and all(f"--{flag}" in out for flag in prepare.FLAGS) and all(c in out for c in prepare.COMMANDS)
    assert data_run(capsys, "a.txt")[0] == 0
    before = data_bytes(tmp_path / "data" / "a")
    assert "was made with" in data_refused(capsys, "a.txt", "--val_fraction=0.5")
    (tmp_path / "a.txt").write_text("something else\n\n" * 1000)
    assert "was made with" in data_refused(capsys, "a.txt")
    assert data_bytes(tmp_path / "data" / "a") == before
    assert "was made with" in data_refused(capsys, "cccc", "--name=a")
    monkeypatch.setattr(prepare, "LINE_BYTES", 99)
    (tmp_path / "wide.jsonl").write_text(json.dumps({"text": "x" * 200}))
    assert "wide.jsonl, line 1: too long" in data_refused(capsys, "wide.jsonl")
    assert data_bytes(tmp_path / "data" / "a") == before
    with pytest.raises(prepare.DataError, match=r"make it with: python prepare.py shakespeare$"):
        prepare.open_dataset("shakespeare")


def test_data_vocabulary_missing(tmp_path, monkeypatch):
    """Offline, the default path works and GPT-2's tokenizer says what to put where."""
    def offline(*args, **kwargs):
        raise requests.ConnectionError("no network")
    monkeypatch.setattr(requests, "get", offline)
    monkeypatch.setattr(prepare, "BACKOFF", 0.01)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})
    assert prepare.get_tokenizer("byte").encode_ordinary("é<|endoftext|>") == list("é<|endoftext|>".encode())
    with pytest.raises(prepare.DataError) as e:
        prepare.get_tokenizer("gpt2")
    for word in ("TIKTOKEN_CACHE_DIR", "vocab.bpe as 6d1cbeee0f20b3d9449abfede4726ed8212e3aee",
                 "encoder.json as 6c7ea1a7e38e3a7f062df639a5b80947f075ffe6"):
        assert word in str(e.value)
    with pytest.raises(prepare.DataError, match="unknown tokenizer"):
        prepare.get_tokenizer("gpt3")


def test_data_disk_full(tmp_path, capsys, monkeypatch):
    """Running out of space leaves no dataset and no litter, and the same command succeeds afterwards."""
    (tmp_path / "a.txt").write_text("one\n\ntwo " * 1000)
    def full(self, tokens):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with monkeypatch.context() as m:
        m.setattr(prepare.ShardWriter, "add", full)
        line = data_refused(capsys, tmp_path / "a.txt", f"--data_dir={tmp_path}")
        assert "free some space and run the same command again" in line
    assert not data_bytes(tmp_path / "a")
    assert data_run(capsys, tmp_path / "a.txt", f"--data_dir={tmp_path}")[0] == 0


# ---- a Hub on this machine, as bad as the real network -------------------------------------------------------------

class BadHub:
    """Serves {path: bytes} on 127.0.0.1. plan[path] lists what goes wrong with the first requests for it; `asked` holds
    every (path, headers)."""

    def __init__(self):
        self.files, self.plan, self.asked, self.page, self.rate = {}, {}, [], 1000, None
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args):
                pass

            def do_GET(self):
                path = self.path.split("?")[0]
                hub.asked.append((self.path, dict(self.headers)))
                plan = hub.plan.get(path, [])
                hub.answer(self, path, plan.pop(0) if plan else "well")

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def add_repository(self, kind, repo, revision, files):
        """kind: "datasets/" or "". A listing with sizes and hashes, and the files."""
        self.listing = [{"type": "directory", "path": "data", "size": 0}]
        for name, content in files.items():
            self.listing.append({"type": "file", "path": name, "size": len(content),
                                 "lfs": {"oid": hashlib.sha256(content).hexdigest(), "size": len(content)}})
            self.files[f"/{kind}{repo}/resolve/{revision}/{name}"] = content
        self.files[f"/api/{kind or 'models/'}{repo}/tree/{revision}"] = self.listing

    def answer(self, h, path, how):
        body, kind, code, extra = self.files.get(path), "application/octet-stream", 200, {}
        if isinstance(body, list):                              # a page of a listing
            start = int(re.search(r"cursor=(\d+)|$", h.path)[1] or 0)
            if start + self.page < len(body):
                extra["Link"] = f'<{self.url}{path}?recursive=true&cursor={start + self.page}>; rel="next"'
            body, kind = json.dumps(body[start:start + self.page]).encode(), "application/json"
        if body is None:
            body, code = b"", 404
        asked = re.fullmatch(r"bytes=(\d+)-", h.headers.get("Range", ""))
        if asked and how != "ignore range":
            start = int(asked[1])
            if how == "wrong range":                            # off by one, of the right length
                start, body = start - 1, body[:-1]
            if start >= len(body):
                code, body, extra["Content-Range"] = 416, b"", f"bytes */{len(body)}"
            else:
                code, extra["Content-Range"], body = 206, f"bytes {start}-{len(body) - 1}/{len(body)}", body[start:]
        length = len(body)
        if isinstance(how, tuple):                              # a status, with headers
            code, extra = how
            body, length = b"busy", 4
        elif how == "html":
            body, kind = b"<html>Please log in</html>", "text/html"
            length = len(body)
        elif how == "html as data":
            body = b"<html>Please log in</html>"
            length = len(body)
        elif how == "corrupt":
            body = body[:-20] + bytes(b ^ 255 for b in body[-20:])
        elif how == "too long":
            body, length = body + b"more", None
        elif how in ("cut", "cut silently"):
            body, length = body[:len(body) // 2], length if how == "cut" else None
        h.send_response(code)
        h.send_header("Content-Type", kind)
        for name, value in extra.items():
            h.send_header(name, value)
        if length is not None:
            h.send_header("Content-Length", str(length))
        h.send_header("Connection", "close")
        h.close_connection = True
        h.end_headers()
        try:
            if how == "stall":
                h.wfile.write(body[:len(body) // 2])
                h.wfile.flush()
                time.sleep(1.5)
                return
            for i in range(0, len(body), 1 << 14):
                h.wfile.write(body[i:i + (1 << 14)])
                if self.rate:
                    time.sleep((1 << 14) / self.rate)
        except OSError:
            pass


@pytest.fixture
def hub(monkeypatch):
    hub = BadHub()
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(prepare, "BACKOFF", 0.01)
    monkeypatch.setattr(prepare, "TIMEOUT", (5, 10))
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


CONTENT = random.Random(0).randbytes(300_000)


@pytest.mark.parametrize("plan, requests_made", [
    ([], 1), (["cut"], 2), (["cut silently"], 2), (["cut", "cut", "cut", "cut silently"], 5), (["cut", "ignore range"], 2),
    (["cut", "wrong range"], 3), (["corrupt"], 2), (["too long"], 2), (["html"], 2), (["html as data"], 2), (["stall"], 2),
    (["cut", "html as data"], 3), ([(500, {})] * 3, 4), ([(503, {"Retry-After": "0"})], 2), (["cut", (416, {})], 3),
    ([(429, {"Retry-After": "1"})], 2), ([(429, {"RateLimit": '"api";r=0;t=1'})], 2)])
def test_data_download_recovers(tmp_path, hub, plan, requests_made, monkeypatch):
    if "stall" in plan:
        monkeypatch.setattr(prepare, "TIMEOUT", (5, 0.5))
    hub.files["/f"], hub.plan["/f"] = CONTENT, list(plan)
    began, target = time.monotonic(), tmp_path / "f"
    prepare.download(hub.url + "/f", str(target), len(CONTENT), hashlib.sha256(CONTENT).hexdigest())
    assert target.read_bytes() == CONTENT and [p.name for p in tmp_path.iterdir()] == ["f"]
    assert len(hub.asked) == requests_made
    assert all(headers["Accept-Encoding"] == "identity" for _, headers in hub.asked)
    if plan and plan[0][0] == 429:
        assert time.monotonic() - began > 0.9                   # it waited as long as it was asked to
    if plan == ["cut"]:
        assert hub.asked[1][1]["Range"] == f"bytes={len(CONTENT) // 2}-"


@pytest.mark.parametrize("plan, requests_made, message", [
    (["corrupt"] * 99, 4, "content is not"), (["html"] * 99, 4, "a web page"), (["html as data"] * 99, 4, "26 bytes announced"),
    ([(500, {})] * 99, 4, "HTTP 500"), ([(401, {})], 1, "set HF_TOKEN"), ([(403, {})], 1, "set HF_TOKEN"),
    ([(404, {})], 1, "check --revision"), ([(410, {})], 1, "HTTP 410"), (["stall"] * 99, 5, "it broke")])
def test_data_download_gives_up(tmp_path, hub, plan, requests_made, message, monkeypatch):
    monkeypatch.setattr(prepare, "TIMEOUT", (5, 0.5 if "stall" in plan else 10))
    content = CONTENT[:100] if plan[0] == "stall" else CONTENT
    hub.files["/f"], hub.plan["/f"] = content, list(plan)
    with pytest.raises(prepare.DataError, match=message):
        prepare.download(hub.url + "/f", str(tmp_path / "f"), len(content), hashlib.sha256(content).hexdigest(), tries=4)
    assert not (tmp_path / "f").exists()
    assert len(hub.asked) in (requests_made, requests_made - 1)


def test_data_download_without_hash(tmp_path, hub):
    """Small files of the Hub have no sha256: their size must do."""
    hub.files["/f"], hub.plan["/f"] = CONTENT, ["cut", "wrong range", "cut silently", "too long", "html as data"]
    prepare.download(hub.url + "/f", str(tmp_path / "f"), len(CONTENT))
    assert (tmp_path / "f").read_bytes() == CONTENT


def test_data_retry_after():
    date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 50))
    for headers, low, high in [({"Retry-After": "7"}, 7, 7), ({"Retry-After": date}, 45, 51),
                               ({"RateLimit": '"api";r=0;t=55'}, 55, 55), ({"RateLimit-Reset": "3"}, 3, 3),
                               ({"Retry-After": "99999"}, 900, 900)]:
        assert low <= prepare.wait_asked(headers) <= high
    assert prepare.wait_asked({}) == prepare.wait_asked({"Retry-After": "soon"}) == 0


def test_data_token_stays_home(tmp_path, hub, monkeypatch):
    """HF_TOKEN goes to HF_ENDPOINT only: not to the storage it redirects to, nor to any other server."""
    other = BadHub()
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    other.files["/f"] = hub.files["/f"] = CONTENT
    elsewhere = other.url.replace("127.0.0.1", "localhost")
    hub.plan["/f"] = [(302, {"Location": elsewhere + "/f"})]
    for i, url in enumerate([hub.url, other.url]):
        prepare.download(url + "/f", str(tmp_path / str(i)), len(CONTENT), hashlib.sha256(CONTENT).hexdigest())
    assert hub.asked[0][1]["Authorization"] == "Bearer hf_secret"
    assert len(other.asked) == 2 and not any("Authorization" in headers for _, headers in other.asked)
    other.server.shutdown()


REVISION = "03a3de5713a0bb23267d26724346508af0f25327"


def data_cccc(hub, inputs=3, lines=400, seed=0):
    """Fill the hub with a small cccc, and return its documents."""
    rng, files, texts = random.Random(seed), {}, []
    words = "the of and in a recurrent gate depth anchor noise state block".split()
    for i in range(inputs):
        rows = []
        for j in range(lines):
            texts.append(f"{i}.{j} " + " ".join(rng.choices(words, k=rng.randint(1, 60))) + "\u2028é")
            rows.append(json.dumps({"id": j, "text": texts[-1], "metadata": {}}, ensure_ascii=j % 2).encode())
        rows[1:1] = [b'\xef\xbb\xbf{"text": ""}', b'{"text": null}', b'{"id": 3}', b'{"text": ""}' if i else b'{"text": 5}']
        files[f"dolma-cccc-filtered-{i:04d}.json.gz"] = gzip.compress(b"\n".join(rows) + b"\n" * (i % 2), mtime=0)
    for stray in "dolma-cccc-filtered-0001.json.gz.part", "dolma-cccc-filtered-00.json.gz", "README.md":
        files[stray] = b"not an input"
    hub.add_repository("datasets/", "common-pile/cccc_filtered", REVISION, files)
    return texts


CCCC_ARGS = ["cccc", "--tokenizer=byte", "--val_fraction=0.1"]


def test_data_cccc(tmp_path, hub, small_shards, capsys, monkeypatch):
    monkeypatch.setattr(prepare, "TIMEOUT", (5, 0.5))
    texts = data_cccc(hub)
    hub.page = 2
    path = f"/datasets/common-pile/cccc_filtered/resolve/{REVISION}/dolma-cccc-filtered-000"
    hub.plan[path + "0.json.gz"] = ["corrupt", "cut", "html as data"]
    hub.plan[path + "1.json.gz"] = ["stall", (429, {"Retry-After": "0"})]
    hub.plan[f"/api/datasets/common-pile/cccc_filtered/tree/{REVISION}"] = ["html as data", (500, {}), "cut silently"]
    status, out, _ = data_run(capsys, *CCCC_ARGS, f"--data_dir={tmp_path}", "--dry_run")
    assert status == 0 and "3 files" in out and not list(tmp_path.iterdir())
    assert data_run(capsys, *CCCC_ARGS, f"--data_dir={tmp_path}")[0] == 0
    dataset, byte = prepare.open_dataset("cccc", tmp_path), prepare.get_tokenizer("byte")
    train, val = data_documents(dataset.train, byte), data_documents(dataset.val, byte)
    assert sorted(train + val) == sorted(texts) and not set(train) & set(val) and 60 < len(val) < 200
    manifest = json.loads((tmp_path / "cccc" / "manifest.json").read_text())
    assert [i["result"]["lines"] for i in manifest["inputs"]] == [{"empty": 3 + (i > 0), "bad": i == 0} for i in range(3)]
    assert manifest["source"]["revision"] == REVISION and all(i["sha256"] for i in manifest["inputs"])
    files = {p.name for p in (tmp_path / "cccc").iterdir()} - {".lock", "manifest.json", "meta.json"}
    assert files == {f["name"] for s in dataset.meta["splits"].values() for f in s["files"]}     # inputs are gone
    assert data_run(capsys, *CCCC_ARGS, f"--data_dir={tmp_path}", "--workers=5", "--name=again")[0] == 0
    assert data_bytes(tmp_path / "again") == data_bytes(tmp_path / "cccc")
    before = data_bytes(tmp_path / "cccc")
    line = data_refused(capsys, *CCCC_ARGS[:2], "--val_fraction=0.2", f"--data_dir={tmp_path}")
    assert "made with val_fraction = 0.1, not 0.2" in line
    (tmp_path / "cccc" / "train-0001-000.bin").unlink()          # a lost file is made again, whatever else is there stays
    assert data_run(capsys, *CCCC_ARGS, f"--data_dir={tmp_path}")[0] == 0 and data_bytes(tmp_path / "cccc") == before


def test_data_cccc_limits(tmp_path, hub, capsys, monkeypatch):
    """--files and --max_tokens stop at the same place whatever the number of workers."""
    texts = data_cccc(hub, inputs=4)
    monkeypatch.setattr(prepare, "BATCH_CHARS", 5000)
    assert data_run(capsys, *CCCC_ARGS, f"--data_dir={tmp_path}", "--name=two", "--files=2")[0] == 0
    assert sum(s["documents"] for s in prepare.open_dataset("two", tmp_path).meta["splits"].values()) == 800
    for workers in 1, 4:
        folder = f"--data_dir={tmp_path}/{workers}"
        assert data_run(capsys, *CCCC_ARGS, folder, f"--workers={workers}", "--max_tokens=100e3")[0] == 0
    assert data_bytes(tmp_path / "1" / "cccc") == data_bytes(tmp_path / "4" / "cccc")
    manifests = [(tmp_path / w / "cccc" / "manifest.json").read_text() for w in "14"]
    assert manifests[0] == manifests[1]
    dataset = prepare.open_dataset("cccc", tmp_path / "1")
    assert 100e3 <= len(dataset.train) + len(dataset.val) < 106e3 < sum(len(t.encode()) for t in texts)


@pytest.mark.parametrize("broken", ["cut", "flipped", "tail", "bad lines"])
def test_data_cccc_bad_at_the_source(tmp_path, hub, capsys, small_shards, broken):
    """A gzip file that is broken although its hash is right, after many good lines; or one with too many bad lines."""
    rows = [json.dumps({"text": f"{i} {random.Random(i).random()}"}).encode() for i in range(5000)]
    if broken == "bad lines":
        rows[::50] = [b"not JSON"] * 100
    content = gzip.compress(b"\n".join(rows))
    content = {"cut": content[:-9], "tail": content + b"junk", "bad lines": content,
               "flipped": content[:-2000] + bytes([content[-2000] ^ 1]) + content[-1999:]}[broken]
    hub.add_repository("datasets/", "common-pile/cccc_filtered", REVISION, {"dolma-cccc-filtered-0000.json.gz": content})
    line = data_refused(capsys, *CCCC_ARGS, f"--data_dir={tmp_path}")
    assert "dolma-cccc-filtered-0000.json.gz" in line and ("100 of 5000" in line) == (broken == "bad lines")
    assert not data_bytes(tmp_path / "cccc") and not list(tmp_path.glob("cccc/*.tmp"))


def test_data_json_lines(tmp_path, monkeypatch):
    """Lines end at newlines only; empty, null and missing text is empty, the rest that is not a text is bad."""
    monkeypatch.setattr(prepare, "LINE_BYTES", 64)
    good = ['{"text": "a\u2028b\x85cd"}', '{"text": "' + "x" * 50 + '"}', '\ufeff{"text": "BOM"}', '{"text": "half \\ud800"}']
    empty = ['{"text": ""}', '{"text": null}', '{"id": 1}']
    bad = ["", "{", '"text"', "[1]", "null", '{"text": 5}', '{"text": ["a"]}', "[" * 60, "caf\xe9", '{"text": "' + "x" * 300]
    with gzip.open(tmp_path / "a.gz", "wb") as f:
        f.write(b"\n".join(line.encode("latin1" if line == "caf\xe9" else "utf-8") for line in good + empty + bad))
    counts, tokens = prepare.encode_batch(prepare.get_tokenizer("byte"), prepare.json_lines(tmp_path / "a.gz"), 0)
    assert counts["lines"] == {"empty": len(empty), "bad": len(bad)} and counts["train"]["documents"] == len(good)
    assert bytes(tokens["train"][:9].astype(np.uint8)) == "a\u2028b\x85cd".encode()
    assert counts["train"]["text_bytes"] + len(good) == counts["train"]["tokens"] == len(tokens["train"])


def test_data_cccc_disk(tmp_path, hub, capsys, monkeypatch):
    data_cccc(hub)
    with monkeypatch.context() as m:
        m.setattr(prepare.shutil, "disk_usage", lambda path: type("usage", (), {"free": 1000}))
        assert "GB are needed" in data_refused(capsys, *CCCC_ARGS, f"--data_dir={tmp_path}")
    calls = []
    def full_later(self, tokens):
        calls.append(1)
        if len(calls) > 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return add(self, tokens)
    add = prepare.ShardWriter.add
    with monkeypatch.context() as m:
        m.setattr(prepare.ShardWriter, "add", full_later)
        assert "free some space" in data_refused(capsys, *CCCC_ARGS, f"--data_dir={tmp_path}")
    done = [i["result"] is not None for i in json.loads((tmp_path / "cccc" / "manifest.json").read_text())["inputs"]]
    assert done == [True, True, False] and not list(tmp_path.glob("cccc/*.tmp"))
    assert data_run(capsys, *CCCC_ARGS, f"--data_dir={tmp_path}")[0] == 0
    assert data_run(capsys, *CCCC_ARGS, f"--data_dir={tmp_path}/straight")[0] == 0
    assert data_bytes(tmp_path / "cccc") == data_bytes(tmp_path / "straight" / "cccc")


def data_killed(folder, hub, delays, make_command):
    """Run a preparation, kill -9 it each of `delays` seconds after its first request to the hub, then let it finish.
    What a kill leaves must not pass for a dataset. Returns how many kills met a running process."""
    kills = 0
    for delay in [*delays, 1e9]:
        before, killing = len(hub.asked), None
        process = subprocess.Popen(make_command(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        while process.poll() is None:
            time.sleep(0.005)
            if killing is None and len(hub.asked) > before:
                killing = time.monotonic() + delay
            if killing and time.monotonic() > killing:
                process.kill()
                process.wait()
                kills += 1
                with pytest.raises(prepare.DataError, match="meta.json is missing"):
                    prepare.open_dataset(folder.name, folder.parent)
        with process.stderr:
            err = process.stderr.read()
        assert process.returncode in (0, -signal.SIGKILL), err
    return kills


def test_data_cccc_killed(tmp_path, hub, capsys):
    data_cccc(hub, inputs=5, lines=6000)
    assert data_run(capsys, *CCCC_ARGS, f"--data_dir={tmp_path}/straight")[0] == 0
    hub.rate = 5e5
    rng = random.Random(1)
    kills = data_killed(tmp_path / "killed" / "cccc", hub, [0.5 * rng.random() for _ in range(5)], lambda: [
        sys.executable, prepare.__file__, *CCCC_ARGS, f"--data_dir={tmp_path}/killed", f"--workers={rng.randint(1, 3)}"])
    assert kills >= 2
    assert data_bytes(tmp_path / "killed" / "cccc") == data_bytes(tmp_path / "straight" / "cccc")


def test_data_cccc_killed_at_every_step(tmp_path, hub, capsys):
    """Die like a killed process at the 1st, then the 2nd, 3rd, ... renaming, removal or sync, until a run gets through."""
    data_cccc(hub)
    assert data_run(capsys, *CCCC_ARGS, f"--data_dir={tmp_path}/straight")[0] == 0
    program = """if True:
        import os, sys, prepare
        for n in range(1, 1000):
            pid = os.fork()
            if not pid:
                left = n
                def deadly(real):
                    def call(*args, **kwargs):
                        global left
                        left -= 1
                        if not left:
                            os._exit(77)
                        return real(*args, **kwargs)
                    return call
                for name in "replace", "remove", "fsync":
                    setattr(os, name, deadly(getattr(os, name)))
                os._exit(prepare.main(sys.argv[1:]))
            if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 77:
                sys.exit(n < 8)"""
    subprocess.run([sys.executable, "-c", program, *CCCC_ARGS, f"--data_dir={tmp_path}/killed"], check=True, timeout=60,
                   cwd=os.path.dirname(prepare.__file__), stdout=subprocess.DEVNULL)
    assert data_bytes(tmp_path / "killed" / "cccc") == data_bytes(tmp_path / "straight" / "cccc")


def test_data_fineweb(tmp_path, hub, capsys):
    def shard(count, seed):
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, count
        return header.tobytes() + np.random.default_rng(seed).integers(0, 50257, count).astype("<u2").tobytes()
    files = {f"fineweb_train_{i:06d}.bin": shard(3000, i) for i in range(1, 4)} | {"fineweb_val_000000.bin": shard(500, 9)}
    hub.add_repository("datasets/", "kjj0/fineweb10B-gpt2", "main", files)
    hub.plan["/datasets/kjj0/fineweb10B-gpt2/resolve/main/fineweb_train_000001.bin"] = ["corrupt", "cut"]
    assert data_run(capsys, "fineweb", "--shards=2", f"--data_dir={tmp_path}")[0] == 0
    dataset = prepare.open_dataset("fineweb", tmp_path)
    assert (len(dataset.train), len(dataset.val), dataset.tokenizer) == (6000, 500, "gpt2")
    assert dataset.bytes_per_token("val") is None
    expected = b"".join(files[f"fineweb_train_{i:06d}.bin"][1024:] for i in (1, 2))
    assert dataset.train.read(0, 6000).astype("<u2").tobytes() == expected
    made = len(hub.asked)
    assert data_run(capsys, "fineweb", "--shards=3", f"--data_dir={tmp_path}")[0] == 0      # only the third is fetched
    assert len(prepare.open_dataset("fineweb", tmp_path).train) == 9000 and len(hub.asked) == made + 2
    files["fineweb_val_000000.bin"] = files["fineweb_val_000000.bin"][:-2]
    hub.add_repository("datasets/", "kjj0/fineweb10B-gpt2", "main", files)
    assert "not a whole token shard" in data_refused(capsys, "fineweb", f"--data_dir={tmp_path}/b")
    assert not (tmp_path / "b" / "fineweb" / "meta.json").exists()


def data_safetensors(tensors):
    """The bytes of a .safetensors file with {name: float32 array}."""
    header, body = {"__metadata__": {"format": "pt"}}, b""
    for name, a in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(a.shape), "data_offsets": [len(body), len(body) + a.nbytes]}
        body += a.tobytes()
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw + body


def data_gpt2_forward(w, idx, n_head):
    """GPT-2 in numpy, float64, from OpenAI's names: token ids (T,) -> logits (T, V). Written without our code."""
    def norm(x, name):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return x * w[name + ".weight"] + w[name + ".bias"]
    w = {k: v.astype(np.float64) for k, v in w.items()}
    T = len(idx)
    x = w["wte.weight"][idx] + w["wpe.weight"][:T]
    for i in range(sum(k.endswith("ln_1.weight") for k in w)):
        p = f"h.{i}."
        q, k, v = ((norm(x, p + "ln_1") @ w[p + "attn.c_attn.weight"] + w[p + "attn.c_attn.bias"])
                   .reshape(T, 3, n_head, -1).transpose(1, 2, 0, 3))
        a = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1])
        a = np.exp(np.where(np.tri(T, dtype=bool), a, -np.inf))
        y = (a / a.sum(-1, keepdims=True) @ v).transpose(1, 0, 2).reshape(T, -1)
        x = x + y @ w[p + "attn.c_proj.weight"] + w[p + "attn.c_proj.bias"]
        u = norm(x, p + "ln_2") @ w[p + "mlp.c_fc.weight"] + w[p + "mlp.c_fc.bias"]
        u = 0.5 * u * (1 + np.tanh(np.sqrt(2 / np.pi) * (u + 0.044715 * u**3)))
        x = x + u @ w[p + "mlp.c_proj.weight"] + w[p + "mlp.c_proj.bias"]
    return norm(x, "ln_f") @ w["wte.weight"].T


def data_random_gpt2(n_layer=2, D=128, V=50, T=16):
    """Random weights by OpenAI's names, linear layers as (in, out)."""
    rng = np.random.default_rng(0)
    shapes = {"wte.weight": (V, D), "wpe.weight": (T, D), "ln_f.weight": (D,), "ln_f.bias": (D,)}
    for i in range(n_layer):
        for name, shape in {"ln_1": (D,), "attn.c_attn": (D, 3 * D), "attn.c_proj": (D, D), "ln_2": (D,),
                            "mlp.c_fc": (D, 4 * D), "mlp.c_proj": (4 * D, D)}.items():
            shapes |= {f"h.{i}.{name}.weight": shape, f"h.{i}.{name}.bias": shape[-1:]}
    return {k: (0.2 * rng.standard_normal(s) + ("ln_" in k and "weight" in k)).astype(np.float32) for k, s in shapes.items()}


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_data_gpt2_weights(tmp_path, hub, capsys, prefix):
    weights = data_random_gpt2()
    stored = {prefix + k: v for k, v in weights.items()} | {prefix + "h.0.attn.bias": np.ones((1, 1, 16, 16), np.float32)}
    hub.add_repository("", "openai-community/gpt2", "main", {"model.safetensors": data_safetensors(stored)})
    hub.plan["/openai-community/gpt2/resolve/main/model.safetensors"] = ["corrupt", "cut"]
    assert data_run(capsys, "gpt2", f"--out_dir={tmp_path}")[0] == 0
    assert [p.name for p in (tmp_path / "gpt2").iterdir() if p.name != ".lock"] == ["latest.pt"]
    checkpoint = torch.load(tmp_path / "gpt2" / "latest.pt", weights_only=True)
    assert (tmp_path / "gpt2" / "latest.pt").stat().st_size < 4 * sum(a.size for a in weights.values()) + 50_000
    assert checkpoint["tokenizer"] == "gpt2"
    model, idx = model_file.from_checkpoint(checkpoint).double().eval(), torch.tensor([[3, 14, 15, 9, 2, 6, 5, 35, 8]])
    c = model.config
    assert (c.variant, c.n_prelude, c.n_embd, c.n_head, c.block_size, c.vocab_size, c.bias, c.gelu) == ("dense", 2, 128, 2, 16, 50, True, "tanh")
    assert np.abs(model(idx)[0][0].detach().numpy() - data_gpt2_forward(weights, idx[0].numpy(), 2)).max() < 1e-5
    assert status(train.main, [f"--out_dir={tmp_path / 'gpt2'}"]) == 2 and "--init_from" in capsys.readouterr().err
    before = (tmp_path / "gpt2" / "latest.pt").read_bytes()
    assert data_run(capsys, "gpt2", f"--out_dir={tmp_path}")[0] == 0
    assert (tmp_path / "gpt2" / "latest.pt").read_bytes() == before


def test_data_not_safetensors(tmp_path, hub, capsys):
    cut = data_safetensors(data_random_gpt2())[:-50]
    for i, content in enumerate([b"\xff" * 100, b"", (5).to_bytes(8, "little") + b"{}   ", cut]):
        hub.add_repository("", "openai-community/gpt2", "main", {"model.safetensors": content})
        assert "model.safetensors" in data_refused(capsys, "gpt2", f"--out_dir={tmp_path}/{i}")
        assert not list((tmp_path / str(i)).glob("gpt2/latest*"))


# ---------------------------------------------------------------------------------------------------------------------
# Settings


def setting(*words, cls=train.TrainConfig):
    return config.load(cls, list(words))


def refused(*words, cls=train.TrainConfig):
    """The error that these words meet: one line."""
    with pytest.raises(config.ConfigError) as error:
        config.load(cls, list(words))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_values():
    """FAULTS 24 (nanoGPT#439, #156, #29): what people write is what the setting becomes, with the setting's type."""
    for words, name, value in ((["--learning_rate=1"], "learning_rate", 1.0), (["--dropout=0"], "dropout", 0.0), (["--max_iters=1e4"], "max_iters", 10_000),
                               (["--max_iters=1_000"], "max_iters", 1000), (["--learning_rate=6e-4"], "learning_rate", 6e-4), (["--bias"], "bias", True),
                               (["--bias=false"], "bias", False), (["--bias=0"], "bias", False), (["--compile=None"], "compile", None),
                               (["--compile=True"], "compile", True), (["--min_lr=None"], "min_lr", None), (["--min_lr=0"], "min_lr", 0.0),
                               (["--cell=a=b"], "cell", "a=b"), (["--cell=123"], "cell", "123"), (["--cell=None"], "cell", "None"), (["--cell="], "cell", "")):
        got = getattr(setting(*words), name)
        assert got == value and type(got) is type(value), words
    assert setting("--start=a=b", cls=sample.SampleConfig).start == "a=b" and setting("--top_k=None", cls=sample.SampleConfig).top_k is None
    assert setting("--seed=1", "--seed=2").seed == 2


def test_mistakes_are_named():
    """FAULTS 24: unknown names say what was meant; wrong types and contradictions name field, value and rule."""
    assert "n_prelude" in refused("--n_layers=12") and "n_prelude" in refused("--n_layer=12")
    assert "learning_rate" in refused("--learing_rate=1") and "max_iters" in refused("--max_iter=1") and "unknown setting xyz" in refused("--xyz=1")
    for words, parts in ((["--max_iters=ten"], ("max_iters", "int", "ten")), (["--max_iters=1.5"], ("max_iters", "int", "1.5")), (["--max_iters=None"], ("max_iters", "None")),
                         (["--learning_rate=fast"], ("learning_rate", "float", "fast")), (["--bias=2"], ("bias", "bool", "2")), (["--max_iters"], ("--max_iters=...",)),
                         (["-x"], ("--name=value",)), (["--n_embd=10", "--n_head=3"], ("n_embd=10", "n_head=3")), (["--variant=gru"], ("variant=gru", "grt")),
                         (["--variant=dense"], ("dense", "n_core")), (["--n_core=0"], ("n_core=0", "grt")), (["--dropout=1"], ("dropout",)), (["--recurrence=0"], ("recurrence=0",)),
                         (["--variant=mor", "--depth_sampling=uniform"], ("mor", "depth")), (["--depth_sampling=random"], ("random", "uniform")), (["--noise=-1"], ("noise=-1",)),
                         (["--max_iters=0"], ("max_iters=0",)), (["--match=loss"], ("match=loss", "train_flops")), (["--match=train_flops"], ("reference",)), (["--dtype=half"], ("dtype=half",)),
                         (["--logger=paper"], ("logger=paper",)), (["--gelu=relu"], ("gelu=relu",)), (["--weight_decay=-1"], ("weight_decay=-1",)), (["--grad_clip=-1"], ("grad_clip=-1",)),
                         (["--beta2=1.5"], ("beta2=1.5",)), (["--warmup_iters=-1"], ("warmup_iters=-1",)), (["--eval_tokens=0"], ("eval_tokens=0",))):
        message = refused(*words)
        assert all(part in message for part in parts), (words, message)


def test_config_files(tmp_path):
    """Files come before flags, later before earlier, `base` beneath; names, types and the missing file are checked."""
    (tmp_path / "base.py").write_text("import math\nn_embd = 64\nn_head = 4\nlearning_rate = 1\n")
    (tmp_path / "top.py").write_text('base = "base.py"\nn_embd = 32\n')
    c = setting("--n_head=2", str(tmp_path / "top.py"))
    assert (c.n_embd, c.n_head, c.learning_rate, c.cell) == (32, 2, 1.0, "top") and type(c.learning_rate) is float
    for content, part in (("n_layers = 3", "n_prelude"), ("n_embd = 'wide'", "n_embd"), ("n_embd = ", "SyntaxError"), ("1 / 0", "ZeroDivisionError"), ('base = "no.py"', "no.py")):
        (tmp_path / "wrong.py").write_text(content)
        message = refused(str(tmp_path / "wrong.py"))
        assert part in message
    assert "config/grt_tiny.py" in refused("config/grt_tinny.py")


def test_help_lists_every_setting(capsys):
    """--help, of both programs: every setting, its default and a comment of its own."""
    for main, cls in ((train.main, train.TrainConfig), (sample.main, sample.SampleConfig)):
        assert status(main, ["--n_embd=64" if cls is train.TrainConfig else "--top_k=5", "--help"]) == 0
        lines = capsys.readouterr().out.splitlines()
        for field in dataclasses.fields(cls):
            (line,) = [line for line in lines if line.startswith(f"--{field.name}=")]
            assert len(line.removeprefix(f"--{field.name}={field.default}").strip()) > 4, line


@pytest.mark.parametrize("path", sorted((HERE / "config").glob("[!_]*.py")), ids=lambda path: path.stem)
def test_every_cell_is_a_model(path):
    """Each config file is plain assignments that make a valid run, and the name of its folder."""
    tree = __import__("ast").parse(path.read_text())
    assert all(type(node).__name__ == "Assign" for node in tree.body)
    if path.stem not in ("nano", "micro", "tiny", "small", "medium", "large"):
        c = setting(path.stem)
        assert c.run_dir == Path("out") / path.stem and c.steps == c.max_iters
        assert c.tokens_per_step % (c.batch_size * c.block_size) == 0


def test_budget_and_match():
    """--budget multiplies the steps; --match=train_flops gives the steps that cost what the dense cell costs; the run's
    folder says both."""
    assert setting("grt_small", "--budget=0.5").steps == 10_000 and setting("grt_small", "--budget=2").steps == 40_000
    c, dense = setting("grt_small", "--budget=2", "--match=train_flops"), setting("dense_small")
    assert c.steps * c.train_flops_per_token() == pytest.approx(2 * 20_000 * dense.train_flops_per_token(), rel=1e-4)
    assert c.steps > 40_000
    folders = {setting("grt_small", *words).run_dir for words in ([], ["--budget=2"], ["--match=train_flops"], ["--budget=2", "--match=train_flops"], ["--seed=2"])}
    assert len(folders) == 5 and Path("out/grt_small") in folders and "2x" in str(c.run_dir) and "train_flops" in str(c.run_dir)
    assert setting("grt_small", "--out_dir=here", "--budget=2").run_dir == Path("here")
    started = time.perf_counter()
    c = setting("poisson_tiny", "--match=train_flops")
    for step in range(50):
        c.lr(step)
    assert time.perf_counter() - started < 5, "the learning rate of a step takes no time"


def test_learning_rate():
    """Linear warm-up to learning_rate, then a cosine that ends at min_lr, a tenth unless it is given."""
    c = setting("--max_iters=1000", "--warmup_iters=100", "--learning_rate=1")
    rates = [c.lr(step) for step in range(1001)]
    assert rates[:100] == pytest.approx([(i + 1) / 101 for i in range(100)]) and rates[100] == 1 == max(rates)
    assert rates[550] == pytest.approx(0.55) and rates[1000] == pytest.approx(0.1) and rates[100:] == sorted(rates[100:], reverse=True)
    assert setting("--max_iters=1000", "--min_lr=0", "--warmup_iters=0").lr(1000) == pytest.approx(0)


@pytest.mark.parametrize("words, parts", [
    (["--device=abacus"], ("device=abacus", "--device=cpu")), (["--device=hpu"], ("device=hpu",)), (["--device=meta"], ("device=meta",)),
    (["--device=cuda:99"], ("device=cuda:99",)), (["--dataset=nothing"], ("nothing", "prepare.py")), (["--block_size=100000", "--tokens_per_step=800000"], ("shorter than one window",)),
    (["--vocab_size=200"], ("vocab_size=200", "257")), (["--init_from=nowhere"], ("nowhere",)), (["--n_layers=2"], ("n_prelude",)),
    (["--out_dir=data/mini/meta.json"], ("data/mini/meta.json",)), (["--reference=nowhere", "--match=train_flops"], ("nowhere",))])
def test_train_refuses_in_one_line(words, parts, work, capsys):
    """What this machine, the data or the folder cannot do: one line that names it, status 2, and nothing written."""
    before = sorted(work.rglob("*"))
    assert status(train.main, [*flags("grt", "run"), *words]) == 2
    error_line(capsys, *parts)
    assert sorted(work.rglob("*")) == before


if __name__ == "__main__":      # started by torch.distributed.run
    one_of_two_ranks()
