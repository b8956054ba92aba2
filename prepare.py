"""Text in, token files out: every corpus this project trains on, and the format they share.

    python prepare.py stdlib                      Python's own source text: 10.7 MB, on every machine, no network needed
    python prepare.py shakespeare                 the usual 1.1 MB
    python prepare.py my.txt notes/ book.jsonl --name=mine [--tokenizer=gpt2]       your own text
    python prepare.py cccc [--max_tokens=10e9]    the paper's corpus, 14B tokens: downloaded and tokenized overnight
    python prepare.py fineweb [--shards=100]      10B tokens that somebody else tokenized
    python prepare.py gpt2                        OpenAI's weights (also gpt2-medium, gpt2-large, gpt2-xl)

A dataset is a folder data/<name>/ with

    meta.json         tokenizer, vocabulary, separator, and per split the files with their lengths and hashes
    train*.bin        raw little-endian uint16 tokens; every document is followed by the end-of-text token
    val*.bin          the same, for the documents whose content hash falls below `val_fraction`

meta.json is written last, by rename: a dataset exists or it does not. The split is a function of a document's bytes
alone, so a duplicate never sits on both sides, and neither order nor parallelism changes it. Whatever is interrupted,
even by a power cut, is continued by the same command, and ends in the same bytes.

In reading order: reading a dataset, tokenizers, writing a dataset, small corpora, downloads, large corpora, GPT-2's
weights, the command line.
"""
import bisect
import contextlib
import difflib
import email.utils
import errno
import functools
import gzip
import hashlib
import io
import json
import math
import os
import random
import re
import shutil
import sys
import sysconfig
import tempfile
import threading
import time
import urllib.parse
import zlib
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import requests
import tiktoken
import urllib3

try:
    import fcntl
except ImportError:         # Windows
    fcntl = None

FORMAT = 1                              # raised whenever meta.json changes its meaning
SPLITS = "train", "val"
TOKENIZERS = {"byte": (257, 256), "gpt2": (50257, 50256)}       # name: (vocabulary size, id of <|endoftext|>)
SHARD_TOKENS = 100_000_000              # tokens per file: 200 MB
HASH_BELOW = 100_000_000                # bytes; smaller datasets are verified by sha256 whenever they are opened
BATCH_CHARS = 1 << 20                   # characters handed to a tokenizer thread at a time
LINE_BYTES = 1 << 24                    # a line of JSON from this length on counts as bad: 16 MB


class DataError(Exception):
    """One line for the person: what is wrong, where, and what to do."""


# ---------------------------------------------------------------------------------------------------------------------
# Reading a dataset

class TokenStream:
    """The token files of one split, read as one long array."""

    def __init__(self, files):
        """files: list of (path, tokens in it, offset of the first in bytes)"""
        self.files = [f for f in files if f[1]]         # an empty file cannot be mapped
        self.starts = [0]                               # global position of each file's first token, and the total
        for _, tokens, _ in self.files:
            self.starts.append(self.starts[-1] + tokens)

    def __len__(self):
        return self.starts[-1]

    def read(self, start, n):
        """Tokens start .. start+n-1 as a new uint16 array (n,), across file borders. IndexError outside the stream."""
        if not 0 <= start <= start + n <= len(self):
            raise IndexError(f"tokens {start}..{start + n} of a stream of {len(self)}")
        out, done = np.empty(n, np.uint16), 0
        i = bisect.bisect_right(self.starts, start) - 1
        while done < n:
            path, tokens, offset = self.files[i]
            first = start + done - self.starts[i]
            count = min(n - done, tokens - first)
            # Mapped anew for every read (24 us): windows are drawn at random over all files, so a kept map would
            # rarely be hit, while its touched pages would pile up. This way nothing stays open or resident, and the
            # object can be pickled and forked.
            out[done:done + count] = np.memmap(path, "<u2", "r", offset + 2 * first, (count,))
            done, i = done + count, i + 1
        return out

    def windows(self, T):
        """How many non-overlapping windows of T inputs there are; each also needs its last target."""
        n = (len(self) - 1) // T
        if n < 1:
            raise DataError(f"corpus shorter than one window: {len(self)} tokens, a window of {T} needs {T + 1}; "
                            "use more text or a smaller block_size")
        return n


@dataclass(frozen=True)
class Dataset:
    name: str
    tokenizer: str          # a name for get_tokenizer
    vocab_size: int
    separator: int          # the token that ends every document
    meta: dict              # meta.json as it is
    hash: str               # identifies the tokens: 12 hex digits
    train: TokenStream
    val: TokenStream

    def bytes_per_token(self, split):
        """UTF-8 bytes of text per token of "train" or "val", separators counted as tokens; None if nobody counted.
        Bits per byte = (nats per token) / ln 2 / bytes_per_token."""
        s = self.meta["splits"][split]
        return s["text_bytes"] / s["tokens"] if s["text_bytes"] and s["tokens"] else None


def open_dataset(name, data_dir="data"):
    """Open data_dir/name, checking all that can be checked quickly: metadata, file lengths, and the content of small
    datasets. The one called stdlib is made on the spot when it is missing. DataError otherwise."""
    directory = os.path.join(data_dir, name)
    where = os.path.join(directory, "meta.json")
    if not os.path.exists(where):
        if name != "stdlib":
            args = name if name in COMMANDS else f"your_text.txt --name={name}"
            args += f" --data_dir={data_dir}" * (str(data_dir) != "data")
            raise DataError(f"no dataset {name!r}: {where} is missing; make it with: python prepare.py {args}")
        print(f"{directory} does not exist yet: preparing it (python prepare.py stdlib)")
        prepare_stdlib(data_dir=data_dir)

    def refuse(what):
        raise DataError(f"{what}; remove {directory} and run python prepare.py again") from None

    meta = read_json(where)
    try:
        if meta["format"] != FORMAT:
            refuse(f"{where} has format {meta['format']}, this program reads {FORMAT}")
        tokenizer, known = meta["tokenizer"], TOKENIZERS.get(meta["tokenizer"])
        if (meta["vocab_size"], meta["separator"]) != known:
            refuse(f"{where}: vocabulary {meta['vocab_size']}, separator {meta['separator']}; tokenizer {tokenizer!r} "
                   + (f"has {known[0]} and {known[1]}" if known else f"is not one of {', '.join(TOKENIZERS)}"))
        small = 2 * sum(s["tokens"] for s in meta["splits"].values()) < HASH_BELOW
        streams = {}
        for split in SPLITS:
            files = [(os.path.join(directory, os.path.basename(f["name"])), f["tokens"], f["offset"], f["sha256"])
                     for f in meta["splits"][split]["files"]]
            for path, tokens, offset, sha256 in files:
                size, expected = os.path.getsize(path) if os.path.exists(path) else "no", offset + 2 * tokens
                if size != expected:
                    refuse(f"{path} has {size} bytes, its metadata says {expected}")
                if small and sha256 and file_sha256(path) != sha256:
                    refuse(f"{path} is not what its metadata says (sha256 differs)")
            streams[split] = TokenStream([f[:3] for f in files])
            if len(streams[split]) != meta["splits"][split]["tokens"]:
                refuse(f"{where}: the {split} files do not add up to its token count")
    except (KeyError, TypeError, AttributeError, ValueError, OSError) as e:
        refuse(f"{where} is damaged ({type(e).__name__}: {e})")
    identity = hashlib.sha256(json.dumps([tokenizer, meta["splits"]], sort_keys=True).encode()).hexdigest()[:12]
    return Dataset(name, tokenizer, *known, meta, identity, streams["train"], streams["val"])


def shuffled(n, i, seed):
    """Element i of a pseudo-random permutation of range(n) that `seed` (modulo 2^64) selects, without storing it.

    A Feistel network permutes the 4^k >= n numbers of 2k bits, whatever its round function is; a result >= n is fed
    through again until it falls below n ("cycle walking", Black and Rogaway 2002; fewer than 4 times on average), which
    permutes range(n). Calling it for i = 0 .. n-1 visits every window once per epoch.
    """
    if not 0 <= i < n:
        raise IndexError(f"element {i} of a permutation of {n}")
    k = max(1, (int(n - 1).bit_length() + 1) // 2)
    keys = [_mix(_mix(seed) + r) for r in range(6)]
    x = int(i)
    while True:
        left, right = x >> k, x & ((1 << k) - 1)
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) >> (64 - k))
        x = left << k | right
        if x < n:
            return x


def _mix(z):
    """The finalizer of splitmix64 (Steele et al. 2014): 64 bits in, 64 well-mixed bits out."""
    z &= 0xFFFFFFFFFFFFFFFF
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    z = (z ^ z >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return z ^ z >> 31


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizers

_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
GPT2_VOCABULARY = {         # url: (bytes, sha256), as in tiktoken_ext/openai_public.py
    _URL + "vocab.bpe": (456318, "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"),
    _URL + "encoder.json": (1042301, "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783")}


def get_tokenizer(name):
    """The tiktoken.Encoding called "byte" or "gpt2". DataError when it is unknown, or its vocabulary out of reach."""
    if name == "byte":          # 256 ranks, one per byte, and no merges: made here, so that no network is needed
        return tiktoken.Encoding("byte", pat_str=r"(?s:.)", mergeable_ranks={bytes([i]): i for i in range(256)},
                                 special_tokens={"<|endoftext|>": 256})
    if name != "gpt2":
        raise DataError(f"unknown tokenizer {name!r}; known: {', '.join(TOKENIZERS)}")
    # tiktoken would fetch the two files itself, but without a timeout; so they are put where it looks for them.
    env = os.environ
    cache = (env.get("TIKTOKEN_CACHE_DIR") or env.get("DATA_GYM_CACHE_DIR")
             or os.path.join(tempfile.gettempdir(), "data-gym-cache"))
    files = {url: os.path.join(cache, hashlib.sha1(url.encode()).hexdigest()) for url in GPT2_VOCABULARY}
    try:
        for url, path in files.items():
            size, sha256 = GPT2_VOCABULARY[url]
            if not (os.path.exists(path) and file_sha256(path) == sha256):
                os.makedirs(cache, exist_ok=True)
                download(url, path, size, sha256, tries=2)
        return tiktoken.get_encoding("gpt2")
    except (DataError, OSError) as e:
        parts = " and ".join(f"{url} as {os.path.basename(path)}" for url, path in files.items())
        raise DataError(f"GPT-2's vocabulary is missing from {cache} and cannot be downloaded: set TIKTOKEN_CACHE_DIR "
                        f"to a folder that holds {parts} ({e})") from None


# ---------------------------------------------------------------------------------------------------------------------
# Writing a dataset

def file_sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def publish(f, path):
    """Close the finished temporary file `f` and let it appear as `path`, so that a power cut leaves all or nothing."""
    f.flush()
    os.fsync(f.fileno())
    f.close()
    os.replace(f.name, path)
    if os.name != "nt":                     # elsewhere the folder that holds the name is a file to be synced, too
        folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


def publish_text(text, path):
    """The same for the whole text of a file."""
    f = open(f"{path}.tmp", "w", encoding="utf-8")
    f.write(text)
    publish(f, path)


def write_json(path, value): publish_text(json.dumps(value, indent=1), path)


def read_json(path):
    try:
        with open(path, encoding="utf-8") as f:
            return json.load(f)
    except ValueError as e:
        folder = os.path.dirname(path)
        raise DataError(f"{path} is damaged ({e}); remove {folder} and run python prepare.py again") from None


@contextlib.contextmanager
def locked(directory):
    """Create `directory` and hold its lock: two preparations of one dataset (say, by the ranks of one training run)
    take turns. The system drops the lock when the process ends, however it ends."""
    os.makedirs(directory, exist_ok=True)
    with open(os.path.join(directory, ".lock"), "w") as f:
        if fcntl:
            try:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"{directory} is being prepared by another process: waiting for it")
                fcntl.flock(f, fcntl.LOCK_EX)
        yield


class ShardWriter:
    """Writes one split of one input as <stem>-000.bin, <stem>-001.bin, ... of SHARD_TOKENS each. They carry temporary
    names until all are complete, so that an input which turns out to be broken leaves nothing behind."""

    def __init__(self, directory, stem):
        self.directory, self.stem, self.files, self.open = directory, stem, [], []

    def add(self, tokens):
        while len(tokens):
            if not self.files or self.files[-1]["tokens"] == SHARD_TOKENS:
                name = f"{self.stem}-{len(self.files):03d}.bin"
                self.files.append({"name": name, "tokens": 0, "sha256": hashlib.sha256(), "offset": 0})
                self.open.append(open(os.path.join(self.directory, name + ".tmp"), "wb"))
            file = self.files[-1]
            part, tokens = np.split(tokens, [SHARD_TOKENS - file["tokens"]])
            raw = part.astype("<u2", copy=False).tobytes()
            self.open[-1].write(raw)
            file["sha256"].update(raw)
            file["tokens"] += len(part)

    def publish(self):
        for f, file in zip(self.open, self.files):
            publish(f, os.path.join(self.directory, file["name"]))
            file["sha256"] = file["sha256"].hexdigest()
        return self.files

    def discard(self):
        """Remove what was not published."""
        for f in self.open:
            with contextlib.suppress(OSError):          # on a full disk even closing fails
                f.close()
            with contextlib.suppress(FileNotFoundError):
                os.remove(f.name)


def content_hash(raw):
    """The first 64 bits of sha256 of a document's UTF-8 bytes, as a fraction 0 <= h < 1: what the split looks at."""
    return (int.from_bytes(hashlib.sha256(raw).digest()[:8], "big") >> 11) / (1 << 53)


def text_of(line):
    """The text in a line of JSON (str or bytes); "" when it is missing, null or empty. ValueError for a bad line."""
    if len(line) >= LINE_BYTES:
        raise ValueError("too long")
    try:
        text = json.loads(line.removeprefix(b"\xef\xbb\xbf") if isinstance(line, bytes) else line).get("text") or ""
    except (AttributeError, RecursionError):
        raise ValueError("not an object") from None
    if not isinstance(text, str):
        raise ValueError("text is not a string")
    return text


def encode_batch(tokenizer, items, val_fraction):
    """Tokenize documents, given as str or as lines of JSON (bytes). Returns two dicts: what was counted, {"lines":
    {"empty", "bad"}, "train": {"tokens", "documents", "text_bytes"}, "val": ...}, and {"train": uint16 array, ...}."""
    counts = {"lines": Counter(empty=0, bad=0), **{s: Counter(tokens=0, documents=0, text_bytes=0) for s in SPLITS}}
    tokens = {s: [np.empty(0, np.uint16)] for s in SPLITS}
    for item in items:
        try:
            text = item if isinstance(item, str) else text_of(item)
        except ValueError:
            counts["lines"]["bad"] += 1
            continue
        if not text:
            counts["lines"]["empty"] += 1
            continue
        try:
            raw = text.encode()
        except UnicodeEncodeError:                      # JSON can smuggle in half a surrogate pair
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            raw = text.encode()
        # The ids of encode_ordinary (a text that contains "<|endoftext|>" spells it, it does not end the document), but
        # as an array: no list of Python integers is made, which is faster and leaves the interpreter to other threads.
        ids = tokenizer.encode_to_numpy(text, disallowed_special=())
        split = "val" if content_hash(raw) < val_fraction else "train"
        tokens[split] += ids, [tokenizer.eot_token]
        counts[split].update(tokens=len(ids) + 1, documents=1, text_bytes=len(raw))
    return counts, {s: np.concatenate(parts, dtype=np.uint16, casting="unsafe") for s, parts in tokens.items()}


def batches(items):
    """Group an iterable of str or bytes into lists of about BATCH_CHARS."""
    batch, size = [], 0
    for item in items:
        batch.append(item)
        size += len(item)
        if size >= BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def in_order(executor, function, items, ahead):
    """map() in threads that keeps the order and never runs more than `ahead` items ahead: bounded memory."""
    pending = deque()
    try:
        for item in items:
            pending.append(executor.submit(function, item))
            if len(pending) >= ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()


def write_documents(directory, stem, items, tokenizer, val_fraction, workers=None, max_tokens=math.inf, progress=None):
    """Tokenize documents into <split><stem>-NNN.bin: all of them or, on any error, none. Stops after the batch that
    reaches max_tokens. Returns the counts of encode_batch, with the "files" of each split.

    What is written does not depend on `workers`. These are threads: tiktoken works outside the interpreter lock, and
    there is nothing to copy between processes, nor a process that a kill could leave behind.
    """
    workers, total = workers or os.cpu_count() or 1, encode_batch(tokenizer, [], val_fraction)[0]
    writers = {s: ShardWriter(directory, s + stem) for s in SPLITS}
    try:
        with ThreadPoolExecutor(workers) as executor, contextlib.closing(in_order(
                executor, lambda b: encode_batch(tokenizer, b, val_fraction), batches(items), 2 * workers)) as encoded:
            for counts, tokens in encoded:
                for key in counts:
                    total[key].update(counts[key])
                for s in SPLITS:
                    writers[s].add(tokens[s])
                    if progress:
                        progress.advance("tokens", len(tokens[s]))
                if total["train"]["tokens"] + total["val"]["tokens"] >= max_tokens:
                    break
        bad, lines = total["lines"]["bad"], sum(total["lines"].values()) + sum(total[s]["documents"] for s in SPLITS)
        if bad > lines / 100:
            raise DataError(f"{bad} of {lines} lines are not JSON objects with a text")
        return {"lines": total["lines"], **{s: {**total[s], "files": writers[s].publish()} for s in SPLITS}}
    finally:
        for writer in writers.values():
            writer.discard()


def write_meta(directory, source, splits):
    """Write meta.json, from where on the dataset exists, and say what it holds."""
    vocab_size, separator = TOKENIZERS[source["tokenizer"]]
    write_json(os.path.join(directory, "meta.json"), {
        "format": FORMAT, "tokenizer": source["tokenizer"], "vocab_size": vocab_size, "separator": separator,
        "source": source, "splits": {s: splits[s] for s in SPLITS}})
    for s in SPLITS:
        d = splits[s]
        text = f" from {d['documents']:,} documents, {d['text_bytes']:,} bytes of text" if d["documents"] else ""
        print(f"{directory}: {s:5} {d['tokens']:13,} tokens{text}")


def prepared(directory, source, file="meta.json", key="source"):
    """What `file` in `directory` holds, if it exists. DataError where it was made from something else, or with other
    settings: nothing is mixed or overwritten."""
    path = os.path.join(directory, file)
    if not os.path.exists(path):
        return None
    content = read_json(path)
    have = content.get(key, {})
    for k in have.keys() | source.keys():
        if have.get(k) != source.get(k):
            raise DataError(f"{directory} was made with {k} = {have.get(k)!r}, not {source.get(k)!r}; choose another "
                            f"--name, or remove {directory} first")
    return content


# ---------------------------------------------------------------------------------------------------------------------
# Small corpora: the standard library, Shakespeare, a person's own text

def sections(text, size):
    """Cut a text longer than 2*size characters into sections of size .. 2*size, after a blank line if there is one,
    else after a line, else after a space, else anywhere. So a single long document still gives both splits."""
    start = 0
    while len(text) - start > 2 * size:
        low, high = start + size, min(start + 2 * size, len(text) - size)
        cut = next((i + len(mark) for mark in ("\n\n", "\n", " ") if (i := text.rfind(mark, low, high)) >= 0), high)
        yield text[start:cut]
        start = cut
    yield text[start:]


def prepare_texts(name, make_texts, source, tokenizer="byte", data_dir="data", val_fraction=0.05, workers=None):
    """Write a corpus that needs little time: started over when it was interrupted.
    make_texts() returns an iterable of documents; source is what meta.json remembers about them."""
    directory = os.path.join(data_dir, name)
    source = {**source, "tokenizer": tokenizer, "val_fraction": val_fraction}
    with locked(directory):
        if prepared(directory, source):
            return print(f"{directory} is already prepared")
        encoding = get_tokenizer(tokenizer)
        result = write_documents(directory, "", make_texts(), encoding, val_fraction, workers, progress=Progress())
        if not result["val"]["documents"]:      # a handful of documents: the one with the least hash validates
            least = min((content_hash(t.encode("utf-8", "replace")) for t in make_texts() if t), default=0)
            result = write_documents(directory, "", make_texts(), encoding, np.nextafter(least, 1), workers)
        if not all(result[s]["documents"] for s in SPLITS):
            size = sum(result[s]["text_bytes"] for s in SPLITS)
            raise DataError(f"too little text for {name!r}: {size} bytes cannot be split into training and validation; "
                            "add text, a few paragraphs at least")
        write_meta(directory, source, result)


def stdlib_texts():
    """The .py files of this Python's standard library, in the order of their names: about 11 MB, 600 files.
    Left out: tests and character tables (not written to be read), installed packages, and the one file that is
    generated when Python is built, so that the corpus is the same wherever the same Python runs."""
    root = sysconfig.get_path("stdlib")
    skip = {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages", "__pycache__"}
    paths = []
    for folder, folders, files in os.walk(root):
        folders[:] = [f for f in folders if f not in skip]
        paths += [os.path.join(folder, f) for f in files if f.endswith(".py") and not f.startswith("_sysconfigdata")]
    texts = []
    for path in sorted(paths, key=lambda p: os.path.relpath(p, root).split(os.sep)):
        with open(path, encoding="utf-8", errors="replace") as f:
            texts += sections(f.read(), 1 << 15)
    if sum(map(len, texts)) < 1_000_000:
        raise DataError(f"this Python has no standard library in source form under {root}; prepare another text: "
                        "python prepare.py your_text.txt --name=mine")
    return texts


def prepare_stdlib(name="stdlib", val_fraction=0.06, **options):
    """6% validates: some 0.6 MB, large enough for a steady loss and evaluated in seconds by a small model."""
    texts = stdlib_texts()
    digest = hashlib.sha256("\0".join(texts).encode("utf-8", "replace")).hexdigest()
    source = {"kind": "stdlib", "python": sys.version.split()[0], "sha256": digest}
    prepare_texts(name, lambda: texts, source, val_fraction=val_fraction, **options)


SHAKESPEARE = ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt", 1115394,
               "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed")


def prepare_shakespeare(name="shakespeare", data_dir="data", val_fraction=0.1, **options):
    """Karpathy's tinyshakespeare, cut into some 280 sections between speeches; a tenth validates, as in nanoGPT."""
    url, size, sha256 = SHAKESPEARE
    path = os.path.join(data_dir, "shakespeare.txt")
    os.makedirs(data_dir, exist_ok=True)
    if not (os.path.exists(path) and file_sha256(path) == sha256):
        download(url, path, size, sha256, tries=4)
    prepare_texts(name, lambda: own_texts([path], size // 400), {"kind": "shakespeare", "sha256": sha256},
                  data_dir=data_dir, val_fraction=val_fraction, **options)


def own_files(paths):
    """The files among `paths` and below its folders, each once, by name. In folders, hidden files and those that are
    not text are left out; whatever is named must be text."""
    found, below, ignored = set(), [], 0
    for path in paths:
        if not os.path.exists(path):
            raise DataError(f"no file or folder {path!r}" + suggest(path, COMMANDS, "command "))
        if not os.path.isdir(path):
            found.add(path)
        for folder, folders, files in os.walk(path):
            folders[:] = [f for f in folders if not f.startswith(".")]
            below += [os.path.join(folder, f) for f in files if not f.startswith(".")]
    for path in below:
        try:
            with open_plain(path) as f:
                text = os.path.isfile(path) and b"\0" not in f.read(1 << 14)
        except (OSError, EOFError, zlib.error):
            text = False
        if text:
            found.add(path)
        ignored += not text
    if ignored:
        print(f"{ignored} files that are not text are left out")
    return sorted(found)


def open_plain(path):
    return gzip.open(path) if path.endswith(".gz") else open(path, "rb")


def own_texts(files, size):
    """The documents of a person's files: a line of .jsonl is one, any other file is one; long ones are cut. Files are
    read in blocks, so their size does not matter."""
    for path in files:
        try:
            with io.TextIOWrapper(open_plain(path), encoding="utf-8-sig", newline="") as f:
                if path.removesuffix(".gz").endswith(".jsonl"):
                    for number, line in enumerate(iter(lambda: f.readline(LINE_BYTES), ""), 1):
                        try:
                            if line.strip() and '"text"' not in line:
                                raise ValueError("no text")
                            yield from sections(text_of(line) if line.strip() else "", size)
                        except ValueError as e:
                            raise DataError(f"{path}, line {number}: {e}; a line is a JSON object with a "
                                            'string "text"') from None
                else:
                    rest = ""
                    while block := f.read(1 << 22):
                        *done, rest = sections(rest + block, size)
                        yield from done
                    yield rest
        except (UnicodeDecodeError, EOFError, zlib.error, gzip.BadGzipFile) as e:
            raise DataError(f"{path} is not UTF-8 text ({e}); convert it (iconv -f latin1 -t utf-8) or leave it "
                            "out") from None


def prepare_own(paths, name=None, **options):
    name = name or re.sub(r"[^\w-]", "_", os.path.basename(os.path.abspath(paths[0])).split(".")[0]) or "text"
    if name in COMMANDS:
        raise DataError(f"the name {name!r} belongs to the command; choose another with --name=")
    files = own_files(paths)
    digest, total = hashlib.sha256(), 0
    for path in files:
        digest.update(bytes.fromhex(file_sha256(path)))
        total += os.path.getsize(path)
    # Some 300 sections, so that 5% of them are a fair sample, but of a paragraph at least and 64 KB at most.
    size = min(max(total // 400, 1 << 8), 1 << 16)
    source = {"kind": "text", "files": len(files), "bytes": total, "sha256": digest.hexdigest(), "section": size}
    prepare_texts(name, lambda: own_texts(files, size), source, **options)


# ---------------------------------------------------------------------------------------------------------------------
# Downloads

TIMEOUT = (10, 30)          # seconds to connect, and to wait for the next bytes
TRIES = 8                   # attempts in a row that bring nothing new before a download is given up
BACKOFF = 1.0               # seconds before the second attempt; doubled for each further one, up to a minute
MAX_WAIT = 900              # seconds that a server may ask us to stay away


class Again(Exception):
    """This attempt failed, another one may not: (why, seconds the server asked us to stay away)."""


class Progress:
    """A line about long work, rewritten every second on a terminal, added twice a minute to a log. total: what is
    expected of each unit ("B" downloaded, "tokens" written); the last one named tells the time left."""

    def __init__(self, **total):
        self.total, self.done = total, dict.fromkeys(total or ["tokens"], 0)
        self.began = self.shown = time.monotonic()
        self.every, self.end = (1, "   \r") if sys.stdout.isatty() else (30, "\n")

    def advance(self, unit, n):
        self.done[unit] += n
        now = time.monotonic()
        if now - self.shown < self.every:
            return
        self.shown, parts = now, []
        for unit, done in self.done.items():
            rate = done / (now - self.began)
            parts.append(f"{done / 1e6:,.1f} M{unit} at {rate / 1e6:.2f} M{unit}/s")
        if self.total:
            minutes = max(0, self.total[unit] - done) / max(rate, 1) / 60
            parts.append(f"{minutes // 60:.0f} h {minutes % 60:02.0f} min left")
        print(", ".join(parts), end=self.end, flush=True)


def endpoint():
    url = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    if not re.match(r"https?://[^/]", url):
        raise DataError(f"HF_ENDPOINT={url} is not a web address; it looks like https://huggingface.co")
    return url


def request(url, headers={}):
    """GET url. A response with status 200, 206 or 416 whose body is still to be read; Again or DataError for others."""
    headers = {"Accept-Encoding": "identity", **headers}    # lengths and ranges must mean the file's own bytes
    token = os.environ.get("HF_TOKEN", "").strip()
    # requests drops this header when it is redirected to another host, as it is to the Hub's storage.
    if token and urllib.parse.urlsplit(url)[:2] == urllib.parse.urlsplit(endpoint())[:2]:
        headers["Authorization"] = f"Bearer {token}"
    r = requests.get(url, headers=headers, stream=True, timeout=TIMEOUT)
    code = r.status_code
    page = "text/html" in r.headers.get("Content-Type", "")
    if code == 416 or code in (200, 206) and not page:
        return r
    r.close()
    if code in (401, 403):
        raise DataError(f"{url}: HTTP {code}, access denied; set HF_TOKEN to a token that may read it, and accept the "
                        "terms on the repository's page if it has any")
    if code == 404:
        raise DataError(f"{url}: HTTP 404, there is no such file; check --revision and HF_ENDPOINT")
    if code in (408, 425, 429) or code >= 500:
        raise Again(f"HTTP {code}", wait_asked(r.headers))
    if code < 300:
        raise Again("a web page came instead of the data; is there a login page between this machine and the network?")
    raise DataError(f"{url}: HTTP {code}")


def wait_asked(headers):
    """The seconds that Retry-After (a number or a date), RateLimit-Reset or RateLimit ('"api";r=0;t=55') asks for."""
    asked = headers.get("Retry-After") or headers.get("RateLimit-Reset")
    if not asked and (m := re.search(r"\bt=(\d+)", headers.get("RateLimit", ""))):
        asked = m[1]
    with contextlib.suppress(TypeError, ValueError):
        if not re.fullmatch(r"\d+(\.\d+)?", asked):
            asked = email.utils.parsedate_to_datetime(asked).timestamp() - time.time()
        return min(max(float(asked), 0), MAX_WAIT)
    return 0


def retry(attempt, what, tries=TRIES, gained=lambda: 0, stop=threading.Event()):
    """The result of attempt(), made until it succeeds or fails `tries` times in a row without gaining bytes."""
    failures, had = 0, gained()
    while True:
        try:
            return attempt()
        except (Again, requests.RequestException, urllib3.exceptions.HTTPError) as e:
            why, asked = f"no connection, or it broke ({type(e).__name__})", 0
            if isinstance(e, Again):
                why, asked = (*e.args, 0)[:2]
            failures = 1 if gained() > had else failures + 1
            had = max(had, gained())
            if failures >= tries:
                raise DataError(f"{what}: {why}; gave up after {tries} attempts; run the same command again to go "
                                "on") from None
            wait = max(asked, min(60, BACKOFF * 2 ** (failures - 1)) * random.uniform(0.5, 1))
            print(f"{what}: {why}; again in {wait:.0f} s", file=sys.stderr)
        if stop.wait(wait):
            raise DataError("stopped")


def download(url, path, size, sha256=None, tries=TRIES, progress=None, stop=threading.Event()):
    """Fetch url to `path`, which appears only when it has `size` bytes and the right sha256 (unless that is None).
    What arrived before an interruption waits in path.part and is continued from."""
    part = path + ".part"

    def gained():
        return os.path.getsize(part) if os.path.exists(part) else 0

    def attempt():
        have = gained()
        if have < size:
            with request(url, {"Range": f"bytes={have}-"} if have else {}) as r:
                given = r.headers.get("Content-Range", "")
                if r.status_code == 206 and not given.startswith(f"bytes {have}-{size - 1}/"):
                    os.remove(part)
                    raise Again(f"asked for bytes {have}-{size - 1}, got {given!r}")
                if r.status_code == 416:                        # what we have is not a beginning of what they have
                    os.remove(part)
                    raise Again("the server has less of it than we do")
                if r.status_code == 200:                        # the whole file, asked for or not
                    have = 0
                if int(r.headers.get("Content-Length", size - have)) != size - have:
                    raise Again(f"{r.headers['Content-Length']} bytes announced, {size - have} expected")
                with open(part, "ab" if have else "wb") as f:
                    while have <= size and (block := r.raw.read(1 << 16, decode_content=False)):
                        f.write(block)
                        have += len(block)
                        if progress:
                            progress.advance("B", len(block))
                        if stop.is_set():
                            raise DataError("stopped")
            if have < size:
                raise Again(f"the connection ended at {have} of {size} bytes")
        if have > size or sha256 and file_sha256(part) != sha256:
            os.remove(part)
            raise Again("its content is not what was announced (size or sha256)")

    retry(attempt, url, tries, gained, stop)
    publish(open(part, "ab"), path)


def hub_files(kind, repo, revision, pattern):
    """The files of a Hub repository whose whole name matches: a list of {"file", "url", "size", "sha256"} by name.
    kind: "datasets/" or "" (models). The url starts after the endpoint, which may change before a run is continued."""
    url, found = f"{endpoint()}/api/{kind or 'models/'}{repo}/tree/{revision}?recursive=true", []

    def page():
        with request(url) as r:
            try:
                entries = [e for e in json.loads(r.content) if e["type"] == "file"]
                return [{"file": os.path.basename(e["path"]), "size": e["size"], "sha256": e.get("lfs", {}).get("oid"),
                         "url": f"/{kind}{repo}/resolve/{revision}/{urllib.parse.quote(e['path'])}"}
                        for e in entries], r.links.get("next", {}).get("url")
            except (ValueError, KeyError, TypeError, AttributeError):
                raise Again("this is not the Hub's listing of a repository") from None

    while url:
        files, following = retry(page, url, tries=4)
        found += [f for f in files if re.fullmatch(pattern, f["file"])]
        url = following and urllib.parse.urljoin(url, following)
    if not found:
        raise DataError(f"{repo} at revision {revision} has no file named like {pattern}; check --revision")
    return sorted(found, key=lambda f: f["file"])


def need_disk(directory, needed):
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise DataError(f"{directory} has {free / 1e9:.1f} GB free and {needed / 1e9:.1f} GB are needed; free some "
                        "space and run the same command again to go on")


# ---------------------------------------------------------------------------------------------------------------------
# Large corpora: the paper's, and a tokenized one

CCCC = "common-pile/cccc_filtered"
TOKENS_PER_BYTE = 0.62      # of gzipped input; the whole corpus: 14B tokens from 22.5 GB
WORKER_SPEED = 2e6          # tokens/s of one worker; measured: 1.7e6 on a shared core, 3.4e6 on a free one
LINE_SPEED = 25e6           # B/s of a fair connection, for estimates


def prepare_cccc(name="cccc", data_dir="data", tokenizer="gpt2", max_tokens=math.inf, files=None, workers=None,
                 val_fraction=0.0005, revision="03a3de5713a0bb23267d26724346508af0f25327", dry_run=False):
    """common-pile/cccc_filtered, openly licensed pages of Common Crawl: gzipped lines of JSON with a text.

    manifest.json is the memory of the run: the settings, the inputs, and the result of each finished one. Each input
    has output files of its own, so whatever was not finished is simply done again. One input is downloaded while
    another is tokenized. 0.05% validates: 7M tokens of the whole, as much as nanoGPT takes from OpenWebText.
    Memory does not grow with the files: 90 MB for two workers on a 500 MB input, 380 MB if all lines are 14 MB long.
    """
    directory, workers = os.path.join(data_dir, name), workers or os.cpu_count() or 1
    source = {"kind": "cccc", "repository": CCCC, "revision": revision, "tokenizer": tokenizer, "files": files,
              "val_fraction": val_fraction, "max_tokens": None if max_tokens == math.inf else max_tokens}
    with contextlib.nullcontext() if dry_run else locked(directory):
        prepared(directory, source)
        manifest = prepared(directory, source, "manifest.json")
        if not manifest:
            found = hub_files("datasets/", CCCC, revision, r"dolma-cccc-filtered-\d{4}\.json\.gz")[:files]
            manifest = {"source": source, "inputs": [{**f, "result": None} for f in found]}
        inputs = manifest["inputs"]
        for i in inputs:
            outputs = [f["name"] for s in SPLITS for f in i["result"][s]["files"]] if i["result"] else []
            if not all(os.path.exists(os.path.join(directory, f)) for f in outputs):
                i["result"] = None                          # it lost a file: done again

        def done(split, key):
            return sum(i["result"][split][key] for i in inputs if i["result"])

        def missing():
            return max_tokens - done("train", "tokens") - done("val", "tokens")

        todo = [i for i in inputs if not i["result"]] if missing() > 0 else []
        tokens = max(0, min(missing(), TOKENS_PER_BYTE * sum(i["size"] for i in todo)))
        load, largest = tokens / TOKENS_PER_BYTE, max((i["size"] for i in todo), default=0)
        disk = 2 * tokens + min(load, 2 * largest)          # at most two inputs are kept at a time
        print(f"{CCCC}: {len(inputs)} files, {len(inputs) - len(todo)} done. To do, at the same time: "
              f"{load / 1e9:.1f} GB to download ({load / LINE_SPEED / 3600:.1f} h at {LINE_SPEED / 1e6:.0f} MB/s), "
              f"{tokens / 1e9:.2f}B tokens ({tokens / WORKER_SPEED / workers / 3600:.1f} h with {workers} workers). "
              f"Disk: {disk / 1e9:.1f} GB")
        if dry_run:
            return
        need_disk(directory, disk)
        encoding, progress, stop = get_tokenizer(tokenizer), Progress(B=load, tokens=tokens), threading.Event()
        os.makedirs(os.path.join(directory, "inputs"), exist_ok=True)
        write_json(os.path.join(directory, "manifest.json"), manifest)

        def fetch(item):
            path = os.path.join(directory, "inputs", item["file"])
            if not os.path.exists(path):
                download(endpoint() + item["url"], path, item["size"], item["sha256"], progress=progress, stop=stop)
            return item, path

        with ThreadPoolExecutor(1) as downloader:
            try:
                for item, path in in_order(downloader, fetch, todo, 2):
                    need_disk(directory, 2 * TOKENS_PER_BYTE * item["size"])
                    stem = "-" + item["file"].split(".")[0].split("-")[-1]
                    try:
                        item["result"] = write_documents(directory, stem, json_lines(path), encoding, val_fraction,
                                                         workers, missing(), progress)
                    except (EOFError, zlib.error, gzip.BadGzipFile, DataError) as e:
                        os.remove(path)
                        raise DataError(f"{item['file']}: {e}; nothing of it was kept; run the same command again to "
                                        "fetch it anew, or stop before it with --files") from None
                    write_json(os.path.join(directory, "manifest.json"), manifest)
                    os.remove(path)
                    if missing() <= 0:
                        break
            finally:
                stop.set()
        shutil.rmtree(os.path.join(directory, "inputs"))
        write_meta(directory, source, {s: {
            **{key: done(s, key) for key in ("tokens", "documents", "text_bytes")},
            "files": [f for i in inputs if i["result"] for f in i["result"][s]["files"]]} for s in SPLITS})


def json_lines(path):
    """The lines of a gzipped file as bytes, up to its checksum. Overlong ones come cut, and will count as bad."""
    with gzip.open(path, "rb") as f:
        while line := f.readline(LINE_BYTES):
            yield line
            while len(line) == LINE_BYTES and not line.endswith(b"\n"):
                line = f.readline(LINE_BYTES)


def prepare_fineweb(name="fineweb", data_dir="data", shards=103, dry_run=False, revision="main"):
    """kjj0/fineweb10B-gpt2: 103 training shards of 100M GPT-2 tokens and one for validation, used as they come: 256
    int32 (20240520, 1, number of tokens), then uint16. Ask for more shards later and the rest is fetched."""
    directory, splits = os.path.join(data_dir, name), {}
    source = {"kind": "fineweb", "revision": revision, "tokenizer": "gpt2"}
    prepared(directory, source)
    found = hub_files("datasets/", "kjj0/fineweb10B-gpt2", revision, r"fineweb_(train|val)_\d{6}\.bin")
    for s, last in ("train", shards), ("val", None):
        splits[s] = [f for f in found if f["file"].startswith("fineweb_" + s)][:last]
    todo = [f for fs in splits.values() for f in fs if not os.path.exists(os.path.join(directory, f["file"]))]
    load = sum(f["size"] for f in todo)
    print(f"fineweb: {len(todo)} files to download, {load / 1e9:.1f} GB "
          f"({load / LINE_SPEED / 3600:.1f} h at {LINE_SPEED / 1e6:.0f} MB/s), as much disk")
    if dry_run:
        return
    with locked(directory):
        need_disk(directory, load)
        progress = Progress(B=load)
        for s, files in splits.items():
            for i, f in enumerate(files):
                path = os.path.join(directory, f["file"])
                if not os.path.exists(path):
                    download(endpoint() + f["url"], path, f["size"], f["sha256"], progress=progress)
                header, size = np.fromfile(path, "<i4", 256), os.path.getsize(path)
                if len(header) < 256 or tuple(header[:2]) != (20240520, 1) or size != 1024 + 2 * header[2]:
                    raise DataError(f"{path} is not a whole token shard, its header says; remove it and run this again")
                files[i] = {"name": f["file"], "tokens": int(header[2]), "sha256": f["sha256"], "offset": 1024}
            tokens = sum(f["tokens"] for f in files)
            splits[s] = {"tokens": tokens, "documents": None, "text_bytes": None, "files": files}
        write_meta(directory, source, splits)


# ---------------------------------------------------------------------------------------------------------------------
# GPT-2's weights

def read_safetensors(path):
    """{name: tensor} of a .safetensors file: 8 bytes of length, a JSON header with dtype, shape and place of every
    tensor, then the tensors. They are views of the mapped file: nothing is read before it is used."""
    import torch
    data = np.memmap(path, np.uint8, "c")                       # copy on write: torch wants writable memory
    try:
        length = int(data[:8].view("<u8")[0])
        header = json.loads(data[8:8 + length].tobytes())
        header.pop("__metadata__", None)
        dtypes = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        tensors = {}
        for name, h in header.items():
            if h["dtype"] in dtypes:                            # others are masks, which nobody needs
                begin, end = (8 + length + o for o in h["data_offsets"])
                tensors[name] = torch.from_numpy(data[begin:end]).view(dtypes[h["dtype"]]).view(h["shape"])
        return tensors
    except (ValueError, KeyError, IndexError, TypeError, RuntimeError) as e:
        raise DataError(f"{path} is not a safetensors file ({e})") from None


def convert_gpt2(tensors):
    """Tensors by OpenAI's names (with or without the prefix "transformer.") -> this project's checkpoint, a dict.
    GPT-2 stores its linear layers as (in, out), we as (out, in)."""
    tensors = {k.removeprefix("transformer."): v for k, v in tensors.items()}
    model = {"wte.weight": tensors["wte.weight"], "wpe.weight": tensors["wpe.weight"],
             "norm.weight": tensors["ln_f.weight"], "norm.bias": tensors["ln_f.bias"]}
    layers = {"norm1": "ln_1", "attn.qkv": "attn.c_attn", "attn.out": "attn.c_proj", "norm2": "ln_2",
              "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
    n_layer = 1 + max(int(k.split(".")[1]) for k in tensors if k.startswith("h."))
    for i in range(n_layer):
        for ours, theirs in layers.items():
            weight = tensors[f"h.{i}.{theirs}.weight"]
            model[f"prelude.{i}.{ours}.weight"] = weight.T.contiguous() if weight.dim() == 2 else weight
            model[f"prelude.{i}.{ours}.bias"] = tensors[f"h.{i}.{theirs}.bias"]
    (vocab_size, n_embd), block_size = model["wte.weight"].shape, len(model["wpe.weight"])      # heads are 64 wide
    settings = dict(variant="dense", n_prelude=n_layer, n_core=0, n_coda=0, recurrence=1, n_embd=n_embd,
                    n_head=n_embd // 64, block_size=block_size, vocab_size=vocab_size, bias=True, dropout=0.0,
                    gelu="tanh")
    return {"model": {k: v.float() for k, v in model.items()}, "settings": settings, "tokenizer": "gpt2", "step": 0}


def prepare_gpt2(name, out_dir="out", revision="main"):
    """Fetch OpenAI's weights and write them as out_dir/name/latest.pt."""
    import torch
    directory = os.path.join(out_dir, name)
    weights, target = os.path.join(directory, "model.safetensors"), os.path.join(directory, "latest.pt")
    with locked(directory):
        if os.path.exists(target):
            return print(f"{target} is already there")
        [found] = hub_files("", f"openai-community/{name}", revision, r"model\.safetensors")
        need_disk(directory, 2.1 * found["size"])
        if not os.path.exists(weights):
            download(endpoint() + found["url"], weights, found["size"], found["sha256"],
                     progress=Progress(B=found["size"]))
        try:
            checkpoint = convert_gpt2(read_safetensors(weights))
        except KeyError as e:
            raise DataError(f"{weights} has no tensor {e}: not a GPT-2; remove it") from None
        f = open(target + ".tmp", "wb")
        torch.save(checkpoint, f)
        publish(f, target)
        os.remove(weights)
    parameters = sum(v.numel() for v in checkpoint["model"].values())
    print(f"{target}: {parameters:,} parameters; try python sample.py --run={directory}")


# ---------------------------------------------------------------------------------------------------------------------
# The command line

_TEXT = ["stdlib", "shakespeare", "your own text", "cccc"]
_GPT2 = ["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"]
FLAGS = {           # flag: (kind, who takes it, meaning)
    "name": (str, _TEXT + ["fineweb"], "the dataset's folder; default: the command, or the first file"),
    "data_dir": (str, _TEXT + ["fineweb"], "where datasets live; default: data"),
    "tokenizer": (str, _TEXT, "byte or gpt2; default: byte, for cccc gpt2"),
    "val_fraction": (float, _TEXT, "how much validates; default: 0.06, 0.1, 0.05, 0.0005 in this order"),
    "workers": (int, _TEXT, "tokenizer threads; default: one per core"),
    "max_tokens": (int, ["cccc"], "stop after about so many tokens, say 10e9"),
    "files": (int, ["cccc"], "take only the first so many files"),
    "shards": (int, ["fineweb"], "take only the first so many training shards of 100M tokens"),
    "dry_run": (bool, ["cccc", "fineweb"], "say what it will cost, and stop"),
    "revision": (str, ["cccc", "fineweb"] + _GPT2, "of the repository on the Hub"),
    "out_dir": (str, _GPT2, "where checkpoints live; default: out"),
}
COMMANDS = {"stdlib": prepare_stdlib, "shakespeare": prepare_shakespeare, "cccc": prepare_cccc,
            "fineweb": prepare_fineweb, **{n: functools.partial(prepare_gpt2, n) for n in _GPT2}}


def suggest(word, known, what=""):
    close = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {what}{close[0]}?" if close else ""


def parse(argv):
    """Split arguments into words and {flag: value}. DataError for an unknown flag or a value of the wrong kind."""
    words, flags = [], {}
    for arg in argv:
        if not arg.startswith("--"):
            words.append(arg)
            continue
        flag, equals, value = arg[2:].partition("=")
        if flag not in FLAGS:
            raise DataError(f"unknown flag --{flag}{suggest(flag, FLAGS, '--')}; see python prepare.py --help")
        kind = FLAGS[flag][0]
        try:
            if kind is bool:
                flags[flag] = {"": True, "true": True, "1": True, "false": False, "0": False}[value.lower()]
            elif not value:
                raise ValueError
            elif kind is str:
                flags[flag] = value
            else:
                number = float(value)                           # so that 10e9 is a number of tokens
                if kind is int and (number < 1 or number != int(number)) or kind is float and not 0 < number < 1:
                    raise ValueError
                flags[flag] = kind(number)
        except (ValueError, KeyError, OverflowError):
            rule = {int: "a whole number from 1", float: "a number between 0 and 1", str: "a value", bool: "no value"}
            raise DataError(f"--{flag} needs {rule[kind]}, as --{flag}=...; got {arg!r}") from None
    if not re.fullmatch(r"\w[\w.-]*", flags.get("name", "x")):
        raise DataError(f"--name={flags['name']} is not a plain name: letters, digits, - and _")
    if flags.get("tokenizer", "byte") not in TOKENIZERS:
        raise DataError(f"unknown tokenizer {flags['tokenizer']!r}; known: {', '.join(TOKENIZERS)}")
    return words, flags


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if not argv or "--help" in argv or "-h" in argv:
        print(__doc__)
        for flag, (_, takers, meaning) in FLAGS.items():
            print(f"    --{flag + '=...':17} {meaning} ({', '.join(takers)})")
        return 0
    try:
        words, flags = parse(argv)
        if not words:
            raise DataError(f"say what to prepare: {', '.join(COMMANDS)}, or files of your own")
        what = words[0] if len(words) == 1 and words[0] in COMMANDS else "your own text"
        for flag in flags:
            if what not in FLAGS[flag][1]:
                raise DataError(f"--{flag} means nothing to {what}, only to {', '.join(FLAGS[flag][1])}")
        COMMANDS[what](**flags) if what in COMMANDS else prepare_own(words, **flags)
    except DataError as e:
        print(f"prepare.py: {e}", file=sys.stderr)
        return 2
    except OSError as e:
        hint = "; free some space and run the same command again to go on" if e.errno == errno.ENOSPC else ""
        print(f"prepare.py: {e}{hint}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("prepare.py: interrupted; run the same command again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
