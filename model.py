"""The Gated Recurrent Transformer and the models it is compared with (Hegazy, Alanwar & Elhoushi 2026, arXiv 2608.15062).

A GPT-2 stores every layer it runs. A recurrent-depth model stores few and runs some of them many times: a prelude of p
blocks once, a core of s shared blocks R times, a coda of c blocks once, written p+s×R+c. Looping alone costs quality,
for the same weights then do the same thing at every step. The GRT lets one core do different work at each step:

    a   = prelude(embed(tokens))                      the anchor: computed once, never changed
    h_0 = a
    for r = 1..R:
        u_r = W [h_{r-1} + ε_x ; a]                   a light projection, 2D -> D
        o_r = core(u_r)                               the proposal, by the same s blocks at every step
        g_r = sigmoid(f([LN h_{r-1} ; LN a]) + ε_g)   the gate, one number per channel; f: 2D -> D -> D with SiLU
        h_r = g_r h_{r-1} + (1 - g_r) o_r             g = 1 keeps the old state
    logits = head(LN(coda(h_R)))

The noises ε ~ N(0, 0.1²) are drawn anew at every step and in training only. f's output bias starts at +4, so g ≈ 0.98:
the state passes through almost untouched and the model learns what to overwrite. Each optimizer step draws its depth
r ~ Uniform{1..R}; inference uses R, or any smaller depth. W and f are shared by all steps. The halves of W and of f's
first layer that read the anchor are the same at every step and computed once: the update costs 6D² operations per token
and step plus 4D² once, not 10D² per step, and no output changes.

In reading order:
    ModelConfig                                       what a model is, checked; its operations by two accountings
    Attention, MLP, Block                             GPT-2's, pre-norm
    KVCache                                           keys and values of a text so far, one slot per executed block
    Looped, HeavyTail, MixtureOfRecursions, Gated     the update rules (dense is a model whose core is empty)
    fold, sample_depth                                randomness as a function of (seed, step)
    Transformer, ChunkedCrossEntropy, choose          forward and its loss, generation, counts
    load_checkpoint, from_checkpoint                  a run that was saved, and the model in it

Shapes: B batch, T tokens, D width (n_embd), H heads, V vocabulary, S cache length, R recurrence."""
import itertools
import math
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from typing import NamedTuple, Optional

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class ModelError(ValueError):
    """Something asked of a model that it cannot be or do: one line."""


def need(truth, text):
    if not truth:
        raise ModelError(text)


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model. Raises ModelError naming field, value and rule where something contradicts itself."""
    variant: str = "grt"       # update rule: dense, looped, poisson, mor or grt
    n_prelude: int = 1         # blocks run once, before the core (dense: all of them)
    n_core: int = 1            # shared blocks, run `recurrence` times (dense: 0)
    n_coda: int = 1            # blocks run once, after the core (dense: 0)
    recurrence: int = 10       # R, the number of times the core runs (dense: 1)
    n_embd: int = 768          # D, the width
    n_head: int = 12           # attention heads
    block_size: int = 1024     # the longest context, in tokens
    vocab_size: int = 50304    # GPT-2's 50257 padded to a multiple of 64
    bias: bool = False         # biases in linear layers and LayerNorms, as GPT-2 has them
    dropout: float = 0.0       # on embeddings, attention and residual branches
    init_std: float = 0.02     # initial standard deviation of embeddings and linear layers (GPT-2's)
    gelu: str = "erf"          # erf (exact), or tanh as in OpenAI's weights
    anchor: bool = True        # grt: feed the prelude's output to every step (off: a rung of the ablation ladder)
    gate: bool = True          # grt: blend old state and proposal (off: take the proposal)
    gate_bias: float = 4.0     # grt: initial bias of the gate's output; +4 keeps 98% of the old state
    half_identity: bool = False  # grt: W starts as half the identity on each side, u = (h + a) / 2, not at random
    noise: float = 0.1         # grt: standard deviation of the state's and the gate's noise in training; 0 is off
    depth_sampling: str = ""   # depth per optimizer step: fixed, uniform or poisson ("" is the variant's own)

    def __post_init__(self):
        need(self.variant in RULES, f"variant={self.variant}: must be one of {', '.join(RULES)}")
        for name in ("recurrence", "n_embd", "n_head", "block_size", "vocab_size"):
            need(getattr(self, name) >= 1, f"{name}={getattr(self, name)}: must be at least 1")
        for name in ("n_prelude", "n_core", "n_coda", "noise", "init_std"):
            need(getattr(self, name) >= 0, f"{name}={getattr(self, name)}: must not be negative")
        need(self.n_embd % self.n_head == 0, f"n_embd={self.n_embd}: must be a multiple of n_head={self.n_head}")
        need(0 <= self.dropout < 1, f"dropout={self.dropout}: must be in [0, 1)")
        need(self.gelu in ("erf", "tanh"), f"gelu={self.gelu}: must be erf or tanh")
        need(self.depth_sampling in ("", "fixed", "uniform", "poisson"),
             f"depth_sampling={self.depth_sampling}: must be fixed, uniform, poisson or empty for the variant's own")
        need(self.variant != "dense" or (self.n_core, self.n_coda, self.recurrence) == (0, 0, 1),
             f"variant=dense has n_core=0, n_coda=0 and recurrence=1, not {self.n_core}, {self.n_coda} and "
             f"{self.recurrence}; n_prelude is its number of blocks")
        need(self.variant == "dense" or self.n_core, f"n_core={self.n_core}: variant={self.variant} needs a core to repeat")
        need(self.variant != "mor" or self.sampling == "fixed",
             "variant=mor has one router per recursion: its depth is fixed")

    @property
    def sampling(self):
        """How the depth of an optimizer step is drawn: fixed, uniform or poisson."""
        return self.depth_sampling or RULES[self.variant].sampling

    @property
    def layout(self):
        """The model as p+s×R+c."""
        return f"{self.n_prelude}+{self.n_core}×{self.recurrence}+{self.n_coda}" if self.n_core else str(self.n_prelude)

    def executed_blocks(self): return self.n_prelude + self.n_core * self.recurrence + self.n_coda

    def flops_per_token(self, recurrence=None, tokens=None, accounting="executed", head=True):
        """Operations of a forward pass per token, a multiplication and an addition counted apart; attention over all T²
        pairs; no lookups, norms and elementwise work. recurrence: depth, R by default; tokens: sequence length T, block_size
        by default; head: with the output layer. accounting="executed" is what the program runs, anchor's halves once, as
        torch.utils.flop_counter counts it; "paper" the paper's formula, (p + sR + c)(24D² + 4TD) + R·10D² for GRT."""
        need(accounting in ("executed", "paper"), f"accounting={accounting}: must be executed or paper")
        rule, D, T = RULES[self.variant], self.n_embd, tokens or self.block_size
        depth = self.recurrence if recurrence is None else recurrence
        total = (self.n_prelude + self.n_coda) * (24 * D**2 + 4 * T * D)
        for step in range(depth):
            kept = rule.tokens_kept(self, step, T)
            total += self.n_core * (24 * D**2 + 4 * kept * D) * kept / T
        return total + rule.flops(self, depth, T, accounting == "paper") + head * 2 * D * self.vocab_size

    def step_flops_per_token(self, depth, accounting="executed", head=True):
        """Operations per token of a training step: forward, and twice as many backward through the steps with gradient."""
        forward = lambda r: self.flops_per_token(r, None, accounting, head)
        return forward(depth) + 2 * forward(min(depth, RULES[self.variant].backprop_steps))

    def train_flops_per_token(self, accounting="executed", head=True):
        """Operations per token of a training step, expected over the depths that it draws."""
        at = lru_cache(lambda r: self.step_flops_per_token(r, accounting, head))
        depths = range(1 if self.sampling == "uniform" else self.recurrence, self.recurrence + 1)
        if self.sampling == "poisson":
            depths = [sample_depth(self, 0, step) for step in range(10_000)]
        return sum(at(r) for r in depths) / len(depths)


class Attention(nn.Module):
    """Causal multi-head self-attention, through PyTorch's flash kernels where the device has them."""
    def __init__(self, c):
        super().__init__()
        D, self.n_head, self.dropout = c.n_embd, c.n_head, c.dropout
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=c.bias), nn.Linear(D, D, bias=c.bias)

    def forward(self, x, slot=None, keep=None):
        """x [B, T, D] -> [B, T, D]. slot: where the cache keeps this block's keys and values, the text so far among
        them. keep [B, T]: tokens that may be attended to; each token sees itself too."""
        B, T, D = x.shape
        q, k, v = (y.view(B, T, self.n_head, -1).transpose(1, 2) for y in self.qkv(x).split(D, dim=2))  # [B, H, T, D/H]
        mask = causal_mask(torch.arange(T, device=x.device), T, keep) if slot is None and keep is not None else None
        if slot is not None:
            k, v, mask = slot.append(k, v, keep)
        causal = True if mask is None and T > 1 else False      # not the bare expression: compiled, T may be a symbol
        y = F.scaled_dot_product_attention(q, k, v, mask, self.dropout if self.training else 0.0, is_causal=causal)
        return self.out(y.transpose(1, 2).reshape(B, T, D))


class MLP(nn.Module):
    """D -> 4D -> D with GELU."""
    def __init__(self, c):
        super().__init__()
        D, self.approximate = c.n_embd, "tanh" if c.gelu == "tanh" else "none"
        self.up, self.down = nn.Linear(D, 4 * D, bias=c.bias), nn.Linear(4 * D, D, bias=c.bias)

    def forward(self, x):
        return self.down(F.gelu(self.up(x), approximate=self.approximate))


class Block(nn.Module):
    """x + attention(LN x), then x + mlp(LN x); under a rule that wants sandwich norms, each sum goes through LN too."""
    def __init__(self, c):
        super().__init__()
        norm = partial(nn.LayerNorm, c.n_embd, bias=c.bias)
        self.norm1, self.attn, self.norm2, self.mlp, self.drop = norm(), Attention(c), norm(), MLP(c), nn.Dropout(c.dropout)
        self.after1, self.after2 = (norm() if RULES[c.variant].sandwich else nn.Identity() for _ in range(2))

    def forward(self, x, slot=None, keep=None):
        x = self.after1(x + self.drop(self.attn(self.norm1(x), slot, keep)))
        return self.after2(x + self.drop(self.mlp(self.norm2(x))))


def run(blocks, slots, x, keep=None):
    """x [B, T, D] through blocks, each with the next slot of the cache."""
    for block in blocks:
        x = block(x, next(slots), keep)
    return x


def causal_mask(positions, end, kept=None):
    """Which of 0..end-1 queries at positions [T] may see: [T, end]; with kept [B, end] those and oneself: [B, 1, T, end]."""
    i, j = positions[:, None], torch.arange(end, device=positions.device)
    return j <= i if kept is None else (j <= i) & kept[:, None, None, :] | (j == i)


class Slot(NamedTuple):
    """One executed block's part of the cache during one forward pass over T new tokens."""
    keys: torch.Tensor             # [B, H, S, D/H], written in place
    values: torch.Tensor           # [B, H, S, D/H]
    kept: torch.Tensor             # [B, S] the tokens a router kept at this step (mor)
    weight: float                  # of the new keys against those that earlier steps left: 1 replaces, 0 leaves
    where: object                  # the new positions: a slice, or a tensor that a compiled step reads
    end: int                       # the new tokens may look among positions 0..end-1
    mask: Optional[torch.Tensor]   # [T, end] which of them; None: all, causally

    def append(self, k, v, keep):
        """Store the new tokens' k, v [B, H, T, D/H]; return keys, values and mask for their attention."""
        where, end, mask = self.where, self.end, self.mask
        for buffer, new in (self.keys, k), (self.values, v):
            if self.weight:
                buffer[:, :, where] = new if self.weight == 1 else torch.lerp(buffer[:, :, where], new, self.weight)
        if keep is not None:
            self.kept[:, where] = keep
            mask = causal_mask(torch.arange(end, device=k.device)[where], end, self.kept[:, :end])
        if end == k.shape[2]:               # a first pass sees itself as in training, whatever the cache keeps
            return k, v, mask
        return self.keys[:, :, :end], self.values[:, :, :end], mask


class KVCache:
    """Keys and values of the text so far, in static buffers of S = `size` positions; `length` tokens are held. Step r of
    core block i has keys unlike those of every other step; `sharing` says what R steps leave behind. All modes but full are
    approximations: tokens read shared keys, but for the first pass, a prompt's first piece, which reads its own exactly. A
    forward pass takes its slots from `open` and reads them up to its last token, whose position is a Python number. After
    `freeze` it reads all S positions under a mask and finds its own in the tensor `position`: the same graph for every
    token, fit to be compiled."""
    # what step r's keys weigh against those that earlier steps left in the same slot
    SHARING = {"full": lambda r: 1.0,                  # no slot is shared, each executed block has its own: exact
               "mean": lambda r: 1 / (r + 1),          # one slot a block, the mean over the steps so far
               "first": lambda r: float(r == 0),       # one slot a block, written by the first step
               "last": lambda r: 1.0}                  # one slot a block, overwritten by every step

    def __init__(self, config, batch_size, size=None, recurrence=None, device=None, dtype=None, sharing="full"):
        c, self.length, self.size, self.frozen = config, 0, size or config.block_size, False
        R = self.recurrence = c.recurrence if recurrence is None else recurrence
        need(self.size <= c.block_size, f"size={self.size}: the model has positions for block_size={c.block_size} tokens")
        need(sharing in self.SHARING, f"kv={sharing}: must be one of {', '.join(self.SHARING)}")
        need(c.variant != "mor" or sharing == "full",
             f"kv={sharing}: a mor model's steps hold different tokens; only full is possible")
        p, s, n = c.n_prelude, c.n_core, c.n_core * (R if sharing == "full" else min(R, 1))     # n: the core's slots
        core = [(p + (r * s + i) % n, self.SHARING[sharing](r)) for r in range(R) for i in range(s)]
        # for every executed block, in order, its slot and the weight of what it writes
        self.map = [(i, 1.0) for i in range(p)] + core + [(p + n + i, 1.0) for i in range(c.n_coda)]
        # a tensor per slot: of views of one, a compiled step would copy the whole cache to write a token
        buffers = lambda *shape, dtype=dtype: [torch.zeros(shape, device=device, dtype=dtype) for _ in range(p + n + c.n_coda)]
        self.keys, self.values = (buffers(batch_size, c.n_head, self.size, c.n_embd // c.n_head) for _ in range(2))
        self.kept = buffers(batch_size, self.size if c.variant == "mor" else 0, dtype=torch.bool)
        self.position = torch.zeros(1, device=device, dtype=torch.long)

    def open(self, T):
        """Positions [T] of T new tokens, and a slot for each block in the order in which blocks run."""
        if self.frozen:
            where, end = self.position.clone(), self.size
            positions, self.position = where, self.position.add_(1)
        else:
            start, end = self.length, self.length + T
            need(end <= self.size, f"the cache holds {self.size} tokens; {start} + {T} do not fit")
            where, positions, self.length = slice(start, end), torch.arange(start, end, device=self.position.device), end
        mask = causal_mask(positions, end) if self.frozen or 1 < T < end else None
        return positions, (Slot(self.keys[i], self.values[i], self.kept[i], w, where, end, mask) for i, w in self.map)

    def reset(self): self.length, self.frozen = 0, False

    def freeze(self):
        """From here on one token a pass, at `position`, which the pass moves on."""
        self.frozen = True
        for buffer in (*self.keys, *self.values, *self.kept, self.position.fill_(self.length)):
            torch._dynamo.mark_static_address(buffer)      # CUDA graphs may write to it

    def num_bytes(self): return sum(b.numel() * b.element_size() for b in (*self.keys, *self.values, *self.kept))


class Looped(nn.Module):
    """Plain depth sharing, h_r = core(h_{r-1}), and the interface of every rule. With an empty core: the dense model.
    start(x) takes the prelude's output [B, T, D] and returns h_0 and what the steps share. step(h, shared, r, core)
    returns h_{r+1} and what the next step gets; core(x, keep=None) runs the shared blocks. penalty(shared) joins the loss
    in training. Left out: step embedding and halting of Universal Transformers (Dehghani et al. 2018, arXiv 1807.03819)."""
    sampling = "fixed"                              # how training draws its depth, unless told otherwise
    backprop_steps = math.inf                       # the last so many steps receive gradient
    most_steps = math.inf                           # the rule knows no more
    sandwich = False                                # blocks have norms after their sums too
    regions = ()                                    # its methods that are worth compiling
    tokens_kept = staticmethod(lambda c, r, T: T)   # how many of T tokens step r's core reads in training
    matrices = staticmethod(lambda c: (0, 0))       # how many D×D matrices multiply the state, and the anchor, in a step

    def __init__(self, c):
        super().__init__()
        self.config = c

    def reset_parameters(self): pass       # inits of its own, after those of Transformer
    def start(self, x): return x, None
    def step(self, h, shared, r, core): return core(h), shared
    def penalty(self, shared): return 0.0

    @classmethod
    def flops(cls, c, depth, T, paper=False):
        """Operations per token of the rule itself: executed, or by the paper's formula, the anchor's part at every step."""
        state, anchor = cls.matrices(c)
        return 2 * c.n_embd**2 * (depth * state + (depth if paper else 1) * anchor)


class HeavyTail(Looped):
    """Heavy-tail depth sampling (Geiping et al. 2025, arXiv 2502.05171): u_r = W [h_{r-1} ; a], h_r = LN core(u_r).
    h_0 is drawn from a truncated normal of variance 2/5, depth from a log-normal Poisson; gradients flow through the last 8
    steps only; blocks have sandwich norms (why: README). Ours: evaluation starts every token from one fixed draw, so that a
    loss is the same twice; depth is capped at 4R (their code has no cap). Left out: RoPE, gated SiLU and embedding scale."""
    sampling, backprop_steps, sandwich = "poisson", 8, True
    matrices = staticmethod(lambda c: (1, 1))
    std = math.sqrt(2 / 5)
    draw = staticmethod(partial(nn.init.trunc_normal_, std=std, a=-3 * std, b=3 * std))

    def __init__(self, c):
        super().__init__(c)
        self.project_state, self.project_anchor = (nn.Linear(c.n_embd, c.n_embd, bias=False) for _ in range(2))
        self.norm = nn.LayerNorm(c.n_embd, bias=c.bias)
        fixed = self.draw(torch.empty(c.n_embd, device="cpu"), generator=torch.Generator().manual_seed(0))
        self.register_buffer("h0", fixed, persistent=False)

    def start(self, x):
        h = self.draw(torch.empty_like(x)) if self.training else self.h0.expand_as(x)
        return h, self.project_anchor(x)

    def step(self, h, projected, r, core):
        return self.norm(core(self.project_state(h) + projected)), projected


class MixtureOfRecursions(Looped):
    """Mixture-of-Recursions (Bae et al. 2025, arXiv 2507.10524), middle-cycle, expert-choice, recursion-wise cache.
    Recursion r keeps ⌊T(R-r)/R⌋ of the tokens kept before (r from 0), those its router θ_r likes best: h ← h + w core(h),
    w = α sigmoid(θ_r·h), with attention among the kept tokens. Others stay as they are. The best k of a sequence depend on
    its future, so evaluation and generation keep a token where sigmoid(θ_r·h) > 1/2, which the penalty, 0.001 × the
    cross-entropy of router against membership, teaches. `leaky` = True evaluates with the top k all the same, and counts in
    `decisions` how often the two disagree. Left out: token-choice routing, recursive key-value sharing, the z-loss."""
    alpha, penalty_weight = 0.1, 0.001
    tokens_kept = staticmethod(lambda c, r, T: max(1, T * (c.recurrence - r) // c.recurrence))

    def __init__(self, c):
        super().__init__(c)
        self.routers = nn.ModuleList(nn.Linear(c.n_embd, 1, bias=False) for _ in range(c.recurrence))
        self.most_steps, self.leaky, self.decisions = c.recurrence, False, [0, 0]   # decisions: those that differ, and all

    def start(self, x):
        index = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        return x, (index if self.training or self.leaky else torch.ones_like(index, dtype=torch.bool), 0.0)

    def step(self, h, shared, r, core):
        before, penalty = shared
        if not (self.training or self.leaky):               # before [B, T] tells of every token whether it was kept
            logits = self.routers[r](h)
            keep = before & (logits.squeeze(-1) > 0)
            return torch.where(keep[..., None], h + self.alpha * torch.sigmoid(logits) * core(h, keep), h), (keep, penalty)
        # before [B, kept] holds the kept tokens' positions, ascending
        logits = self.routers[r](h.take_along_dim(before[..., None], dim=1)).squeeze(-1)
        best = logits.topk(self.tokens_kept(self.config, r, h.shape[1]), dim=1).indices.sort().values
        member = torch.zeros_like(logits).scatter(1, best, 1.0)
        penalty = penalty + F.binary_cross_entropy_with_logits(logits.float(), member.float())
        if not self.training:
            self.decisions[0] += ((logits > 0) != member.bool()).sum().item()
            self.decisions[1] += member.numel()
        index, weight = before.gather(1, best), self.alpha * torch.sigmoid(logits.gather(1, best))[..., None]
        update = weight * core(h.take_along_dim(index[..., None], dim=1))   # ascending: a plain causal pass
        return h.scatter_add(1, index[..., None].expand_as(update), update.type_as(h)), (index, penalty)

    def penalty(self, shared): return self.penalty_weight * shared[1]

    @classmethod
    def flops(cls, c, depth, T, paper=False):
        """The routers, each on the tokens kept before it; the paper's formula leaves them out."""
        return 0 if paper else 2 * c.n_embd * sum(cls.tokens_kept(c, max(r - 1, 0), T) for r in range(depth)) / T


class Gated(Looped):
    """The GRT's update (equations above); W = [project_state | project_anchor], f's first layer [gate_state | gate_anchor],
    the anchor's halves applied once. Without `anchor` the core reads h + ε and the gate the state alone; without `gate` the
    proposal becomes the state; with neither and no noise this is Looped: the rungs of the paper's ablation ladder."""
    sampling, regions = "uniform", ("project", "blend")
    matrices = staticmethod(lambda c: (c.anchor + 2 * c.gate, c.anchor + (c.anchor and c.gate)))

    def __init__(self, c):
        super().__init__(c)
        D = c.n_embd
        if c.anchor:
            self.project_state, self.project_anchor = nn.Linear(D, D, bias=False), nn.Linear(D, D)   # W's bias: once too
        if c.gate:
            self.norm_state, self.gate_state = nn.LayerNorm(D, bias=False), nn.Linear(D, D, bias=not c.anchor)
            self.gate_out = nn.Linear(D, D)
        if c.gate and c.anchor:
            self.norm_anchor, self.gate_anchor = nn.LayerNorm(D, bias=False), nn.Linear(D, D)

    def reset_parameters(self):
        if self.config.gate:
            nn.init.constant_(self.gate_out.bias, self.config.gate_bias)
        if self.config.anchor and self.config.half_identity:
            for half in self.project_state, self.project_anchor:
                nn.init.eye_(half.weight).data.div_(2)

    def start(self, a):
        projected = self.project_anchor(a) if self.config.anchor else 0.0
        gated = self.gate_anchor(self.norm_anchor(a)) if self.config.anchor and self.config.gate else 0.0
        return a, (projected, gated)

    def step(self, h, shared, r, core):
        proposal = core(self.project(h, shared[0]))
        return self.blend(h, proposal, shared[1]) if self.config.gate else proposal, shared

    def project(self, h, projected):
        """The core's input [B, T, D] from the state and the anchor's half of W."""
        u = self.noisy(h)
        return (self.project_state(u) + projected).type_as(h) if self.config.anchor else u

    def blend(self, h, proposal, gated):
        """The new state [B, T, D] from the old one, the proposal and the anchor's half of f's first layer."""
        return torch.lerp(proposal, h, self.gate(h, gated).type_as(h))

    def gate(self, h, gated):
        """How much of the old state each channel keeps, in (0, 1): [B, T, D]."""
        return torch.sigmoid(self.noisy(self.gate_out(F.silu(self.gate_state(self.norm_state(h)) + gated))))

    def noisy(self, x):
        return torch.add(x, torch.randn_like(x), alpha=self.config.noise) if self.training and self.config.noise else x


RULES = {"dense": Looped, "looped": Looped, "poisson": HeavyTail, "mor": MixtureOfRecursions, "grt": Gated}


def fold(*numbers):
    """One well-mixed number in [0, 2**63) from several, order and all (the finaliser of SplitMix64, Steele et al. 2014)."""
    x = 0
    for n in numbers:
        x = (x + n + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        x ^= x >> 31
    return x >> 1


def sample_depth(config, seed, step):
    """The number of core steps that optimizer step `step` runs, the same on every rank and after every resume.
    uniform: {1..R}. poisson: Poisson(e^τ) + 1 with τ ~ N(ln R - σ²/2, σ), σ = 1/2, whose mean is R + 1 (Geiping et al.
    2025, section 3.3), capped at 4R (ours)."""
    R, sigma = config.recurrence, 0.5
    if config.sampling != "poisson":
        return R if config.sampling == "fixed" else 1 + fold(seed, step) % R
    generator = torch.Generator().manual_seed(fold(seed, step))
    tau = torch.randn((), generator=generator, dtype=torch.float64) * sigma + math.log(R) - sigma**2 / 2
    return min(int(torch.poisson(tau.exp(), generator=generator)) + 1, 4 * R)


class Transformer(nn.Module):
    """Prelude, recurrent core, coda: one model for every system. Inits, with σ = init_std and n blocks executed at depth R:
        embeddings, linear layers        N(0, σ²)
        attn.out, mlp.down               N(0, (σ / √(2n))²): the branches add up along the residual stream
        biases, LayerNorms               0, 1;  gate_out.bias = gate_bias"""
    prefill_chunk = 128     # tokens of a prompt read at once: what the paper's serving table reads, and all it needs memory for

    def __init__(self, config):
        super().__init__()
        c = self.config = config
        self.recompute = False      # training: keep each core step's input alone, run it again backward
        self.wte, self.wpe = nn.Embedding(c.vocab_size, c.n_embd), nn.Embedding(c.block_size, c.n_embd)  # wte: the head too
        blocks = lambda n: nn.ModuleList(Block(c) for _ in range(n))
        self.drop, self.prelude, self.core = nn.Dropout(c.dropout), blocks(c.n_prelude), blocks(c.n_core)
        self.rule, self.coda, self.norm = RULES[c.variant](c), blocks(c.n_coda), nn.LayerNorm(c.n_embd, bias=c.bias)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                residual = name.endswith(("attn.out.weight", "mlp.down.weight"))
                nn.init.normal_(p, std=c.init_std / math.sqrt(2 * c.executed_blocks()) if residual else c.init_std)
            elif name.endswith("bias"):
                nn.init.zeros_(p)
        self.rule.reset_parameters()

    def forward(self, idx, targets=None, recurrence=None, cache=None, want="all"):
        """idx [B, T] -> (logits [B, T, V], loss), loss the mean cross-entropy in nats, None without targets [B, T].
        recurrence: core steps, R by default. cache: a KVCache that holds the text before idx and gets idx added.
        want: logits of "all" tokens, of the "last" alone, [B, 1, V], or "none": with targets, the loss then never holds
        the logits of the whole batch, the largest tensor of a training step."""
        depth, T, rule = self.depth(recurrence), idx.shape[1], self.rule
        need(T <= self.config.block_size, f"{T} tokens do not fit block_size={self.config.block_size}")
        positions, slots = torch.arange(T, device=idx.device), itertools.repeat(None)
        if cache is not None:
            need(cache.recurrence == depth, f"the cache was made for {cache.recurrence} steps, not {depth}")
            positions, slots = cache.open(T)
        a = run(self.prelude, slots, self.drop(self.wte(idx) + self.wpe(positions)))     # [B, T, D]
        core = partial(run, self.core, slots)
        step = partial(checkpoint, rule.step, use_reentrant=False) if self.recompute and self.training else rule.step
        h, shared = rule.start(a)
        first, grad = depth - rule.backprop_steps, torch.is_grad_enabled()
        for r in range(depth):
            if r == first:
                torch.clear_autocast_cache()                # it may hold weights that were cast without gradient
            with torch.set_grad_enabled(grad and r >= first):
                h, shared = step(h, shared, r, core)
        x = self.norm(run(self.coda, slots, h))
        logits = None if want == "none" else F.linear(x[:, -1:] if want == "last" else x, self.wte.weight)
        if targets is None:
            return logits, None
        head = self.wte.weight if grad else self.wte.weight.detach()    # the loss computes no gradient that nobody wants
        loss = (ChunkedCrossEntropy.apply(x.flatten(0, 1), head, targets.flatten()) if logits is None else
                F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()))
        return logits, loss + rule.penalty(shared) if self.training else loss

    def depth(self, recurrence=None):
        """The core steps that `recurrence` asks for, R if None. Raises ModelError where the model cannot run them."""
        depth, most = self.config.recurrence if recurrence is None else recurrence, self.rule.most_steps
        need(0 <= depth <= most, f"recurrence={depth}: this {self.config.variant} model runs 0 to {most} steps")
        return depth

    @torch.no_grad()
    def stream(self, idx, max_new_tokens, temperature=1.0, top_k=None, recurrence=None, n_vocab=None, seed=0, cached=True,
               kv="full", exit_kl=None, compile=False, depths=None):
        """Continue idx [B, T], T >= 1, by yielding one new token a row at a time, [B], max_new_tokens times. temperature: 0
        takes the likeliest token. top_k: draw among the k likeliest. n_vocab: ids from here on, the vocabulary's padding,
        are never drawn. cached: False computes every token from scratch, to the same result. kv: what the cache keeps of
        the R steps (KVCache). exit_kl: stop looping as `exit_early` does; `depths`, a list, gets the steps each token took,
        [B]. compile: run new tokens through one compiled graph. Positions are learned, so a full window cannot slide by one
        token: its last half becomes the new context, read from position 0."""
        c, depth, depths = self.config, self.depth(recurrence), [] if depths is None else depths
        need(idx.dim() == 2 and idx.shape[1] > 0, f"a prompt needs at least one token: idx is {list(idx.shape)}, not [B, T]")
        need(exit_kl is None or cached and not compile and kv == "full" and c.variant != "mor" and depth > 0,
             "exit_kl needs the full cache, an uncompiled step, a core step to run, and a model whose steps hold all tokens")
        training, decode = self.training, self.compiled_decode() if compile else self.decode
        self.eval()
        try:
            cache = KVCache(c, len(idx), None, depth, idx.device, self.dtype, kv) if cached else None
            context, token, generator = idx[:, -c.block_size:], None, torch.Generator(idx.device).manual_seed(seed)
            for _ in range(max_new_tokens):
                if context.shape[1] > c.block_size:
                    context = context[:, -(c.block_size // 2 or 1):]
                    if cached:
                        cache.reset()
                if not cached:
                    logits = self(context, recurrence=depth, want="last")[0]
                elif cache.length == 0:
                    logits = self.prefill(context, cache)
                    if compile:
                        cache.freeze()
                elif exit_kl is None:
                    logits = decode(token[:, None], cache)
                else:
                    logits, steps = self.exit_early(token[:, None], cache, exit_kl)
                    depths.append(steps)
                token = choose(logits[:, -1, :n_vocab].float(), temperature, top_k, generator)
                context = torch.cat((context, token[:, None]), dim=1)
                yield token
        finally:
            self.train(training)

    def prefill(self, idx, cache):
        """Logits [B, 1, V] after a prompt [B, T] on top of what the cache holds, read in pieces: a pass needs memory for
        its tokens' activations, and generation needs little else beside weights and cache."""
        *most, last = idx.split(self.prefill_chunk, dim=1)
        for part in most:
            self(part, recurrence=cache.recurrence, cache=cache, want="none")
        return self(last, recurrence=cache.recurrence, cache=cache, want="last")[0]

    def decode(self, token, cache):
        """Logits [B, 1, V] after one more token [B, 1] on top of those in the cache."""
        return self(token, recurrence=cache.recurrence, cache=cache, want="last")[0]

    def compiled_decode(self):
        """`decode` as one graph, for a frozen cache, whose depth, sharing and batch it is made for; on CUDA replayed as a
        CUDA graph."""
        torch._dynamo.config.cache_size_limit = 64      # 8 in a process would be an error; 2.6's name, kept as an alias
        mode = "reduce-overhead" if self.wte.weight.is_cuda else None
        return torch.compile(self.decode, fullgraph=True, dynamic=False, mode=mode)

    def exit_early(self, token, cache, exit_kl):
        """As `decode`, but a row stops looping when KL(p_r || p_{r-1}) < exit_kl, p_r the next token's distribution after
        step r and the coda (Geiping et al. 2025, section 6.1): logits [B, 1, V], and the steps that ran [B]."""
        c, R, (positions, [*slots]) = self.config, cache.recurrence, cache.open(1)
        coda, slots = slots[len(slots) - c.n_coda:], iter(slots)
        h, shared = self.rule.start(run(self.prelude, slots, self.wte(token) + self.wpe(positions)))
        active, steps, before = torch.ones(len(token), dtype=torch.bool, device=token.device), 0, None
        for r in range(R):
            new, shared = self.rule.step(h, shared, r, partial(run, self.core, slots))
            h, steps = torch.where(active[:, None, None], new, h), steps + active.long()
            logits = F.linear(self.norm(run(self.coda, iter(coda), h)), self.wte.weight)
            p = F.log_softmax(logits[:, 0].float(), dim=-1)
            if r > 0:
                active = active & ((p.exp() * (p - before)).sum(dim=-1).clamp(min=0) >= exit_kl)
            if not active.any():
                break
            before = p
        ran = torch.arange(R, device=token.device)[:, None].minimum(steps - 1)      # [R, B]: each step, or the last that ran
        for buffers in cache.keys, cache.values:            # a skipped step has the keys and values of the last that ran
            for i in range(c.n_prelude, c.n_prelude + c.n_core):
                mine = [b[:, :, cache.length - 1] for b in buffers[i:len(buffers) - c.n_coda:c.n_core]]     # R × [B, H, D/H]
                for old, new in zip(mine, torch.stack(mine).take_along_dim(ran[:, :, None, None], dim=0)):
                    old.copy_(new)
        return logits, steps

    def generate(self, idx, max_new_tokens, **how):
        """idx [B, T] and its continuation, [B, T + max_new_tokens]; keywords as in `stream`."""
        return torch.cat((idx, *(t[:, None] for t in self.stream(idx, max_new_tokens, **how))), dim=1)

    @property
    def dtype(self): return self.wte.weight.dtype

    def num_params(self):
        """Parameters by part, and their total; the head is tied to the token embedding and counted there."""
        count = {name: sum(p.numel() for p in part.parameters()) for name, part in self.named_children()}
        return count | {"total": sum(p.numel() for p in self.parameters())}

    def compile_regions(self):
        """Compile blocks and the rule's regions in place: one graph for all steps, whatever R; names of parameters stay."""
        for block in (*self.prelude, *self.core, *self.coda):
            block.compile()
        for name in self.rule.regions:
            setattr(self.rule, name, torch.compile(getattr(self.rule, name)))


class ChunkedCrossEntropy(torch.autograd.Function):
    """mean over N of cross_entropy(x Wᵀ, targets), for x [N, D], W [V, D], targets [N].
    The gradient is known as soon as the loss is: p - onehot(target) for each row of logits. So both are computed chunk by
    chunk in the forward pass, by the same three matrix products, and only the gradients of x and W are kept."""
    chunk = 4096    # tokens: 0.8 GB of float32 logits at GPT-2's vocabulary; smaller ones add up dW more often

    @staticmethod
    def forward(ctx, x, W, targets):
        low = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        wide, x_low, W_low, N, total = torch.promote_types(x.dtype, torch.float32), x.to(low), W.to(low), len(x), 0.0
        dx, dW = torch.empty_like(x) if any(ctx.needs_input_grad) else None, None
        for i in range(0, N, ChunkedCrossEntropy.chunk):
            rows = slice(i, i + ChunkedCrossEntropy.chunk)
            target, logits = targets[rows, None], (x_low[rows] @ W_low.t()).to(wide)
            largest, where = logits.max(dim=1, keepdim=True)
            at_target = logits.gather(1, target)
            p = torch.softmax(logits, dim=1, out=logits)
            total = total + (largest - p.gather(1, where).log() - at_target).sum()   # log Σ exp - logit; max p >= 1/V
            if dx is not None:
                g = p.scatter_add_(1, target, p.new_full((), -1.0).expand_as(target)).to(low)
                dx[rows] = (g @ W_low).div_(N)
                part = g.t() @ (x_low[rows] / N)
                dW = part.to(W.dtype) if dW is None else dW.add_(part)
        ctx.save_for_backward(dx, dW)
        return total / N

    @staticmethod
    def backward(ctx, grad):
        dx, dW = ctx.saved_tensors
        return dx.mul_(grad), dW.mul_(grad), None


def choose(logits, temperature, top_k, generator):
    """One token a row from logits [B, V], with no transfer to the host: argmax of p/e, e ~ Exp(1), is a draw from p."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    if top_k is not None:
        logits = logits.masked_fill(logits < logits.topk(min(top_k, logits.shape[-1])).values[:, -1:], -math.inf)
    p = F.softmax(logits / temperature, dim=-1)
    return (p / torch.empty_like(p).exponential_(generator=generator)).argmax(dim=-1)


class CheckpointError(Exception):
    """A checkpoint that cannot be written or read: one line with the file and why."""


def load_checkpoint(path, device="cpu"):
    """The dict of a saved run, its tensors on `device`. Raises CheckpointError."""
    try:
        checkpoint = torch.load(path, map_location=device, weights_only=True)
        checkpoint["model"], checkpoint["settings"]
        return checkpoint
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such checkpoint; train.py writes one") from None
    except Exception as error:              # a file that is cut, or not a checkpoint, raises one of many kinds
        raise CheckpointError(f"{path} is not a whole checkpoint of this project ({type(error).__name__})") from error


def from_checkpoint(checkpoint):
    """The Transformer of a loaded checkpoint, where its tensors are."""
    weights, settings = checkpoint["model"], checkpoint["settings"]
    model = Transformer(ModelConfig(**{f.name: settings[f.name] for f in fields(ModelConfig) if f.name in settings}))
    model.load_state_dict(weights)
    return model.to(weights["wte.weight"].device)
