"""Text in, token files out: every corpus this project trains on, and the format they share.

    python prepare.py stdlib                            Python's own source text; every machine has it, no network
    python prepare.py shakespeare                       1.1 MB, the usual first corpus
    python prepare.py my.txt notes/ book.jsonl --name=mine [--tokenizer=gpt2]        your own text
    python prepare.py --help                            everything else

A dataset is a folder data/<name>/ with

    meta.json         tokenizer, vocabulary, separator, and per split the files with their lengths and hashes
    train*.bin        raw little-endian uint16 tokens; every document is followed by the end-of-text token
    val*.bin          the same, for the documents whose content hash falls below `val_fraction`

meta.json is written last, by rename: a dataset exists or it does not. The split is a function of a document's bytes
alone, so a duplicate can never sit on both sides, and neither order nor parallelism can change it.

In reading order: reading a dataset, tokenizers, writing a dataset, small corpora, the command line.
"""
import bisect
import contextlib
import difflib
import errno
import gzip
import hashlib
import json
import os
import re
import sys
import sysconfig
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import tiktoken

FORMAT = 1                              # raised whenever meta.json changes its meaning
TOKENIZERS = {"byte": (257, 256), "gpt2": (50257, 50256)}       # name: (vocabulary size, id of <|endoftext|>)
SHARD_TOKENS = 100_000_000              # tokens per file: 200 MB
HASH_BELOW = 100_000_000                # bytes; smaller datasets are verified by sha256 whenever they are opened
BATCH_CHARS = 1 << 20                   # characters handed to a tokenizer thread at a time
PIECE_CHARS = 1 << 18                   # longest text given to the tokenizer in one call


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
    if not os.path.exists(where) and name == "stdlib":
        print(f"{directory} does not exist yet: preparing it (python prepare.py stdlib)")
        prepare_stdlib(data_dir=data_dir)
    again = f"remove {directory} and run python prepare.py again"
    try:
        with open(where, encoding="utf-8") as f:
            meta = json.load(f)
    except FileNotFoundError:
        args = name if name in COMMANDS else f"your_text.txt --name={name}"
        if data_dir != "data":
            args += f" --data_dir={data_dir}"
        raise DataError(f"no dataset {name!r}: {where} is missing; make it with: python prepare.py {args}") from None
    except ValueError as e:
        raise DataError(f"{where} is not readable ({e}); {again}") from None
    try:
        if meta["format"] != FORMAT:
            raise DataError(f"{where} has format {meta['format']}, this program reads {FORMAT}; {again}")
        if meta["tokenizer"] not in TOKENIZERS:
            raise DataError(f"{where}: unknown tokenizer {meta['tokenizer']!r}; known: {', '.join(TOKENIZERS)}")
        if (meta["vocab_size"], meta["separator"]) != TOKENIZERS[meta["tokenizer"]]:
            raise DataError(f"{where}: vocab_size {meta['vocab_size']} and separator {meta['separator']} are not those of "
                            f"tokenizer {meta['tokenizer']!r} {TOKENIZERS[meta['tokenizer']]}; {again}")
        total = sum(f["tokens"] for s in ("train", "val") for f in meta["splits"][s]["files"])
        streams = {}
        for split in ("train", "val"):
            files = []
            for f in meta["splits"][split]["files"]:
                path = os.path.join(directory, os.path.basename(f["name"]))
                expected = f["offset"] + 2 * f["tokens"]
                size = os.path.getsize(path) if os.path.exists(path) else None
                if size != expected:
                    found = "is missing" if size is None else f"has {size} bytes, its metadata says {expected}"
                    raise DataError(f"{path} {found}; {again}")
                if 2 * total < HASH_BELOW and f["sha256"] and file_sha256(path) != f["sha256"]:
                    raise DataError(f"{path} is not what its metadata says (sha256 differs); {again}")
                files.append((path, f["tokens"], f["offset"]))
            streams[split] = TokenStream(files)
            if len(streams[split]) != meta["splits"][split]["tokens"]:
                raise DataError(f"{where}: the {split} files do not add up to its token count; {again}")
        identity = hashlib.sha256(json.dumps([meta["tokenizer"], meta["splits"]], sort_keys=True).encode())
        return Dataset(name, meta["tokenizer"], meta["vocab_size"], meta["separator"], meta,
                       identity.hexdigest()[:12], streams["train"], streams["val"])
    except (KeyError, TypeError, AttributeError) as e:
        raise DataError(f"{where} is damaged ({type(e).__name__}: {e}); {again}") from None


def shuffled(n, i, seed):
    """Element i of a pseudo-random permutation of range(n) that `seed` (any integer) selects, without storing it.

    A Feistel network permutes the 4^k >= n numbers of 2k bits whatever its round function is; results >= n are fed
    through again until one falls below n ("cycle walking", Black and Rogaway 2002; fewer than 4 rounds on average),
    which is a permutation of range(n). Calling it for i = 0 .. n-1 visits every window once per epoch.
    """
    if not 0 <= i < n:
        raise IndexError(f"element {i} of a permutation of {n}")
    k = max(1, (int(n - 1).bit_length() + 1) // 2)
    keys = [_mix(seed + 0x9E3779B97F4A7C15 * (r + 1)) for r in range(6)]
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

def get_tokenizer(name):
    """The tiktoken.Encoding called "byte" or "gpt2". DataError when it is unknown, or its vocabulary out of reach."""
    if name == "byte":          # 256 ranks, one per byte, and no merges: made here, so that no network is needed
        return tiktoken.Encoding("byte", pat_str=r"(?s:.)", mergeable_ranks={bytes([i]): i for i in range(256)},
                                 special_tokens={"<|endoftext|>": 256})
    if name != "gpt2":
        raise DataError(f"unknown tokenizer {name!r}; known: {', '.join(TOKENIZERS)}")
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as e:
        raise DataError(f"the GPT-2 vocabulary is missing ({type(e).__name__}); set TIKTOKEN_CACHE_DIR to a folder "
                        "holding vocab.bpe and encoder.json") from None


# ---------------------------------------------------------------------------------------------------------------------
# Writing a dataset

def file_sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def fsync_directory(path):
    """Make renames in `path` survive a power cut, where directories can be synced at all (not on Windows)."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def publish(f, path):
    """Close the finished temporary file `f` and let it appear as `path`: sync, rename, sync the folder."""
    f.flush()
    os.fsync(f.fileno())
    f.close()
    os.replace(f.name, path)
    fsync_directory(os.path.dirname(path))


def write_json(path, value):
    f = open(path + ".tmp", "w", encoding="utf-8")
    json.dump(value, f, indent=1)
    f.write("\n")
    publish(f, path)


@contextlib.contextmanager
def locked(directory):
    """Create `directory` and hold its lock: two preparations of one dataset (say, by the ranks of one training run)
    take turns. The system drops the lock when the process ends, however it ends."""
    os.makedirs(directory, exist_ok=True)
    with open(os.path.join(directory, ".lock"), "w") as f:
        try:
            import fcntl
        except ImportError:                             # Windows: no lock
            yield
            return
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{directory} is being prepared by another process: waiting for it")
            fcntl.flock(f, fcntl.LOCK_EX)
        yield


class ShardWriter:
    """Writes one split of one input as files <stem>.bin, or <stem>-000.bin, <stem>-001.bin, ... of SHARD_TOKENS."""

    def __init__(self, directory, stem):
        self.directory, self.stem, self.files, self.f = directory, stem, [], None

    def add(self, tokens):
        while len(tokens):
            if self.f is None:
                self.name = f"{self.stem}-{len(self.files):03d}.bin"
                self.f = open(os.path.join(self.directory, self.name + ".tmp"), "wb")
                self.count, self.digest = 0, hashlib.sha256()
            part, tokens = np.split(tokens, [SHARD_TOKENS - self.count])
            raw = part.astype("<u2", copy=False).tobytes()
            self.f.write(raw)
            self.digest.update(raw)
            self.count += len(part)
            if self.count == SHARD_TOKENS:
                self.finish()

    def finish(self):
        if self.f is not None:
            publish(self.f, os.path.join(self.directory, self.name))
            self.files.append({"name": self.name, "tokens": self.count, "sha256": self.digest.hexdigest(), "offset": 0})
            self.f = None


def content_hash(raw):
    """The first 64 bits of sha256 of a document's UTF-8 bytes, as a fraction 0 <= h < 1: what the split looks at."""
    return (int.from_bytes(hashlib.sha256(raw).digest()[:8], "big") >> 11) / (1 << 53)


def encode_batch(tokenizer, texts, val_fraction):
    """Tokenize documents. Returns {split: {"arrays": [uint16 arrays], "documents": n, "text_bytes": n, "least": h}}."""
    out = {s: {"arrays": [], "documents": 0, "text_bytes": 0, "least": 1.0} for s in ("train", "val")}
    for text in texts:
        raw = text.encode("utf-8", "replace")           # JSON can smuggle in half a surrogate pair; tiktoken agrees
        h = content_hash(raw)
        split = out["val" if h < val_fraction else "train"]
        # encode_ordinary: a text that contains "<|endoftext|>" spells it, it does not end the document. Very long
        # texts go in pieces, since one call holds its whole result as a list of Python integers.
        for i in range(0, len(text), PIECE_CHARS):
            split["arrays"].append(np.array(tokenizer.encode_ordinary(text[i:i + PIECE_CHARS]), np.uint16))
        split["arrays"].append(np.array([tokenizer.eot_token], np.uint16))
        split["documents"] += 1
        split["text_bytes"] += len(raw)
        split["least"] = min(split["least"], h)
    for split in out.values():
        split["arrays"] = np.concatenate(split["arrays"] or [np.empty(0, np.uint16)])
    return out


def batches(texts):
    """Group an iterable of documents into lists of about BATCH_CHARS characters."""
    batch, chars = [], 0
    for text in texts:
        batch.append(text)
        chars += len(text)
        if chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
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


def write_documents(directory, stem, texts, tokenizer, val_fraction, workers, max_tokens=None, progress=None):
    """Tokenize an iterable of documents into <split><stem>-NNN.bin. Returns {split: {files, tokens, documents,
    text_bytes, least}}. The bytes written depend on the documents, tokenizer and val_fraction only, not on `workers`.

    The workers are threads: tiktoken works outside the interpreter lock, and nothing has to be copied between
    processes or can be left behind by a killed one.
    """
    result = {s: {"files": [], "tokens": 0, "documents": 0, "text_bytes": 0, "least": 1.0} for s in ("train", "val")}
    writers = {s: ShardWriter(directory, s + stem) for s in result}
    with ThreadPoolExecutor(workers) as executor:
        encoded = in_order(executor, lambda b: encode_batch(tokenizer, b, val_fraction), batches(texts), 2 * workers)
        with contextlib.closing(encoded):
            for batch in encoded:
                for s, part in batch.items():
                    writers[s].add(part["arrays"])
                    result[s]["tokens"] += len(part["arrays"])
                    result[s]["documents"] += part["documents"]
                    result[s]["text_bytes"] += part["text_bytes"]
                    result[s]["least"] = min(result[s]["least"], part["least"])
                if progress:
                    progress(result)
                if max_tokens is not None and sum(r["tokens"] for r in result.values()) >= max_tokens:
                    break
    for s, writer in writers.items():
        writer.finish()
        result[s]["files"] = writer.files
    return result


def write_meta(directory, tokenizer, source, splits):
    """Write meta.json: from here on the dataset exists."""
    write_json(os.path.join(directory, "meta.json"), {
        "format": FORMAT, "tokenizer": tokenizer, "vocab_size": TOKENIZERS[tokenizer][0],
        "separator": TOKENIZERS[tokenizer][1], "dtype": "<u2", "source": source, "splits": splits})


def already_prepared(directory, tokenizer, source):
    """True when `directory` holds just this dataset; DataError when it holds another one, which we do not touch."""
    where = os.path.join(directory, "meta.json")
    if not os.path.exists(where):
        return False
    try:
        with open(where, encoding="utf-8") as f:
            meta = json.load(f)
        have = {"tokenizer": meta["tokenizer"], **meta["source"]}
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{where} is damaged; remove {directory} and run this again") from None
    want = {"tokenizer": tokenizer, **source}
    for key in want:
        if have.get(key) != want[key]:
            raise DataError(f"{directory} already holds a dataset with {key} = {have.get(key)!r}, not {want[key]!r}; "
                            f"choose another --name, or remove {directory} first")
    print(f"{directory} is already prepared")
    return True


# ---------------------------------------------------------------------------------------------------------------------
# Small corpora: the standard library, Shakespeare, a person's own text

def sections(text, size):
    """Cut a document longer than 2*size characters into sections of size .. 2*size, after a blank line if there is
    one, else after a line, else after a space, else anywhere. So a single long text still gives both splits."""
    start = 0
    while len(text) - start > 2 * size:
        low, high = start + size, start + 2 * size
        cut = next((i + len(mark) for mark in ("\n\n", "\n", " ") if (i := text.rfind(mark, low, high)) >= 0), high)
        yield text[start:cut]
        start = cut
    if text[start:].strip():
        yield text[start:]


def prepare_texts(name, make_texts, source, tokenizer="byte", data_dir="data", val_fraction=0.05, workers=None):
    """Write a corpus that needs no download and little time: started over when it was interrupted.
    make_texts() returns an iterable of documents; source is what meta.json remembers about them."""
    directory = os.path.join(data_dir, name)
    source = {**source, "val_fraction": val_fraction}
    with locked(directory):
        if already_prepared(directory, tokenizer, source):
            return
        encoding, workers = get_tokenizer(tokenizer), workers or os.cpu_count() or 1
        splits = write_documents(directory, "", make_texts(), encoding, val_fraction, workers)
        if not splits["val"]["documents"]:      # a handful of documents: the one with the least hash validates
            least = np.nextafter(splits["train"]["least"], 1)
            splits = write_documents(directory, "", make_texts(), encoding, least, workers)
        if not all(s["documents"] for s in splits.values()):
            raise DataError(f"too little text for {name!r}: {sum(s['text_bytes'] for s in splits.values())} bytes cannot "
                            "be split into training and validation; add text, at least a few paragraphs")
        for s in splits.values():
            del s["least"]
        write_meta(directory, tokenizer, source, splits)
    for s, d in splits.items():
        print(f"{directory}: {s:5} {d['documents']:,} documents, {d['text_bytes']:,} bytes of text, {d['tokens']:,} tokens")


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
    prepare_texts(name, lambda: texts, {"kind": "stdlib", "python": sys.version.split()[0], "sha256": digest},
                  val_fraction=val_fraction, **options)


def open_text(path):
    return gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb")


def own_files(paths):
    """The files among `paths` and below its folders; in folders, hidden files and those that are not text are left
    out. Each path once, in the order of their names."""
    found, ignored = set(), 0
    for path in paths:
        if not os.path.exists(path):
            raise DataError(f"no file or folder {path!r}" + suggest(path, COMMANDS, "command "))
        if os.path.isfile(path):
            found.add(path)
        for folder, folders, files in os.walk(path):
            folders[:] = [f for f in folders if not f.startswith(".")]
            for f in (os.path.join(folder, f) for f in files if not f.startswith(".")):
                with open_text(f) as handle:
                    try:
                        is_text = b"\0" not in handle.read(1 << 14)
                    except OSError:
                        is_text = False
                if is_text:
                    found.add(f)
                else:
                    ignored += 1
    if ignored:
        print(f"{ignored} files that are not text are left out")
    return sorted(found)


def own_texts(files, size):
    """The documents of a person's files: a line of .jsonl is one, any other file is one; long ones are cut."""
    for path in files:
        with open_text(path) as f:
            if path.removesuffix(".gz").endswith((".jsonl", ".ndjson")):
                for number, line in enumerate(f, 1):
                    if line.strip():
                        try:
                            text = json.loads(line.decode("utf-8-sig"))["text"]
                            if not isinstance(text, str):
                                raise TypeError
                        except (ValueError, TypeError, KeyError):
                            raise DataError(f"{path}, line {number}: not a JSON object with a string \"text\"") from None
                        yield from sections(text, size)
            else:
                yield from sections_of_file(f, path, size)


def sections_of_file(f, path, size, block=1 << 22):
    """sections() of a text file, read a block at a time so that a file of any size needs little memory."""
    import codecs
    decode, rest = codecs.getincrementaldecoder("utf-8-sig")().decode, ""
    while True:
        data = f.read(block)
        try:
            rest += decode(data, final=not data)
        except UnicodeDecodeError:
            raise DataError(f"{path} is not UTF-8 text; convert it (iconv -f latin1 -t utf-8) or leave it out") from None
        if not data:
            yield from sections(rest, size)
            return
        *done, rest = [*sections(rest, size)] or [""]
        yield from done


def prepare_own(paths, name=None, **options):
    name = name or re.sub(r"[^\w-]", "_", os.path.basename(os.path.normpath(paths[0])).split(".")[0])
    if name in COMMANDS:
        raise DataError(f"the name {name!r} belongs to the command; choose another with --name=")
    files = own_files(paths)
    digest, total = hashlib.sha256(), 0
    for path in files:
        digest.update(bytes.fromhex(file_sha256(path)))
        total += os.path.getsize(path)
    # 400 sections or more, so that 5% of them are a fair sample, but of a page at least and 64 KB at most.
    size = min(max(total // 400, 1 << 10), 1 << 16)
    source = {"kind": "text", "files": len(files), "bytes": total, "sha256": digest.hexdigest(), "section": size}
    prepare_texts(name, lambda: own_texts(files, size), source, **options)


# ---------------------------------------------------------------------------------------------------------------------
# The command line

COMMANDS = {"stdlib": prepare_stdlib}
FLAGS = {"name": str, "tokenizer": str, "data_dir": str, "val_fraction": float, "workers": int}


def suggest(word, known, what=""):
    close = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {what}{close[0]!r}?" if close else ""


def parse(argv):
    """Split arguments into words and {flag: value}. DataError for an unknown flag or a value of the wrong kind."""
    words, flags = [], {}
    for arg in argv:
        if not arg.startswith("--"):
            words.append(arg)
            continue
        flag, has_value, value = arg[2:].partition("=")
        if flag not in FLAGS:
            raise DataError(f"unknown flag --{flag}{suggest(flag, FLAGS)}; see python prepare.py --help")
        kind = FLAGS[flag]
        try:
            if not has_value:
                raise ValueError
            number = float(value) if kind in (int, float) else None
            if kind is int and (number != int(number) or number < 1) or kind is float and not 0 < number < 1:
                raise ValueError
            flags[flag] = value if kind is str else kind(number)
        except (ValueError, OverflowError):
            rule = {int: "a whole number from 1", float: "a number between 0 and 1", str: "a value"}[kind]
            raise DataError(f"--{flag} needs {rule}: --{flag}=..., not {arg!r}") from None
    if "name" in flags and not re.fullmatch(r"\w[\w.-]*", flags["name"]):
        raise DataError(f"--name={flags['name']} is not a plain name: letters, digits, - and _")
    if "tokenizer" in flags and flags["tokenizer"] not in TOKENIZERS:
        raise DataError(f"unknown tokenizer {flags['tokenizer']!r}; known: {', '.join(TOKENIZERS)}")
    return words, flags


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if not argv or "--help" in argv or "-h" in argv:
        print(__doc__)
        return 0
    try:
        words, flags = parse(argv)
        if not words:
            raise DataError("say what to prepare: one of " + ", ".join(COMMANDS) + ", or your own files")
        if words[0] in COMMANDS and len(words) == 1:
            COMMANDS[words[0]](**flags)
        else:
            prepare_own(words, **flags)
    except DataError as e:
        print(f"prepare.py: {e}", file=sys.stderr)
        return 2
    except OSError as e:
        hint = "; free some space and run the same command again" if e.errno == errno.ENOSPC else ""
        print(f"prepare.py: {e}{hint}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("prepare.py: interrupted; run the same command again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
