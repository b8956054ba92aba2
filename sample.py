"""Let a checkpoint speak.

    python sample.py                                             # the newest checkpoint under out/
    python sample.py --run=out/grt_tiny --start="def main(" --num_samples=3 --recurrence=2

The samples of one call are drawn side by side; the first is printed as it comes, the others when all are done. A sample
ends with its document. Settings:
"""
import codecs
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import torch

import config
from config import ConfigError
from model import CheckpointError, KVCache, ModelError, from_checkpoint, load_checkpoint
from prepare import DataError, get_tokenizer
from train import checkpoint_path, find_device, low_precision, wants_compile


@dataclass(frozen=True)
class SampleConfig:
    """Every setting of sample.py."""
    run: str = ""                        # a run's folder or a checkpoint; "" is the newest under out/
    start: str = ""                      # the prompt; "" is the beginning of a document
    file: str = ""                       # read the prompt from this file instead
    num_samples: int = 1                 # texts to draw side by side
    max_new_tokens: int = 500            # longest continuation, in tokens
    temperature: float = 0.8             # 0 takes the likeliest token each time
    top_k: Optional[int] = 200           # draw among the k likeliest tokens; None among all
    recurrence: Optional[int] = None     # core steps; None is the model's own R
    kv: str = "full"                     # what the cache keeps of the R steps: full, mean, first or last
    exit_kl: Optional[float] = None      # stop looping when the KL between successive depths is below this, 5e-4 say
    seed: int = 1337                     # the same seed, the same text
    device: str = "auto"                 # auto, cpu, cuda, cuda:1, mps
    dtype: str = "auto"                  # auto, float32 or bfloat16; auto is bfloat16 on GPUs that have it
    compile: bool = False                # generate through one compiled graph: slow to start, then fast on a GPU

    def __post_init__(self):
        for name, least in (("num_samples", 1), ("max_new_tokens", 1), ("temperature", 0), ("top_k", 1), ("recurrence", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name}={value}: must be at least {least}")
        for name, allowed in (("dtype", ("auto", "float32", "bfloat16")), ("kv", KVCache.SHARING)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)}: must be one of {', '.join(allowed)}")
        if self.start and self.file:
            raise ValueError("start and file are two prompts; give one")


def newest_checkpoint():
    """The checkpoint under out/ that was written last."""
    found = sorted(Path("out").glob("*/*.pt"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ConfigError("no checkpoint under out/; train one with: python train.py config/grt_tiny.py")
    return found[-1]


def read_prompt(c):
    """The prompt as text. Raises ConfigError where it cannot be read or is not text."""
    try:
        text = Path(c.file).read_text(encoding="utf-8") if c.file else c.start
        text.encode("utf-8")             # an argument that was not UTF-8 arrives with lone surrogates
        return text
    except UnicodeError:
        raise ConfigError(f"the prompt{' in ' + c.file if c.file else ''} is not UTF-8 text") from None
    except OSError as error:
        raise ConfigError(f"{c.file}: {error.strerror}") from None


def sample(c):
    path = checkpoint_path(c.run) if c.run else newest_checkpoint()
    device = find_device(c.device)
    compile = wants_compile(c.compile, device)
    checkpoint = load_checkpoint(path, device)
    tokenizer = get_tokenizer(checkpoint["tokenizer"])
    model = from_checkpoint(checkpoint)
    if low_precision(c.dtype, device):
        model.bfloat16()
    recurrence = model.depth(c.recurrence)
    prompt = read_prompt(c)
    idx = torch.tensor(tokenizer.encode_ordinary(prompt) or [tokenizer.eot_token], device=device).repeat(c.num_samples, 1)
    print(f"{path}: {model.config.variant} {model.config.layout}, step {checkpoint['step']}"
          + (f", {recurrence} core steps" if recurrence != model.config.recurrence else ""), file=sys.stderr)

    texts, ended, depths = [bytearray() for _ in range(c.num_samples)], [False] * c.num_samples, []
    decoder = codecs.getincrementaldecoder("utf-8")("replace")          # a character may come in several tokens
    show = lambda data, final=False: print(decoder.decode(data, final), end="", flush=True)
    show(prompt.encode())
    for tokens in model.stream(idx, c.max_new_tokens, c.temperature, c.top_k, recurrence, tokenizer.n_vocab, c.seed,
                               kv=c.kv, exit_kl=c.exit_kl, compile=compile, depths=depths):
        for i, token in enumerate(tokens.tolist()):
            ended[i] = ended[i] or token == tokenizer.eot_token
            if not ended[i]:
                data = tokenizer.decode_single_token_bytes(token)
                texts[i] += data
                if i == 0:
                    show(data)
        if all(ended):
            break
    show(b"", final=True)
    print()
    for text in texts[1:]:
        print("-" * 40)
        print(prompt + text.decode("utf-8", "replace"))
    if depths:
        print(f"core steps a token: {torch.stack(depths).float().mean():.2f} of {recurrence}", file=sys.stderr)


def main(argv=None):
    sys.stdout.reconfigure(errors="replace")      # a terminal that cannot show a character gets a ?
    try:
        sample(config.load(SampleConfig, sys.argv[1:] if argv is None else argv, __doc__))
    except (ConfigError, DataError, CheckpointError, ModelError) as error:
        config.fail(error)
    except BrokenPipeError:               # python sample.py | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
