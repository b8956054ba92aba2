import errno
import gzip
import hashlib
import http.server
import json
import os
import pickle
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import requests
import torch

import prepare

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
    settings, m = checkpoint["settings"], {k: v.double() for k, v in checkpoint["model"].items()}
    shape = {"n_prelude": 2, "n_embd": 128, "n_head": 2, "block_size": 16, "vocab_size": 50}
    assert {k: settings[k] for k in shape} == shape
    assert settings["variant"] == "dense" and settings["gelu"] == "tanh" and settings["bias"] is True
    # The converted tensors, run by PyTorch's own layers, against the original ones in numpy.
    F, idx = torch.nn.functional, torch.tensor([3, 14, 15, 9, 2, 6, 5, 35, 8])
    x = m["wte.weight"][idx] + m["wpe.weight"][:9]
    for i in range(2):
        def linear(x, name):
            return F.linear(x, m[f"prelude.{i}.{name}.weight"], m[f"prelude.{i}.{name}.bias"])
        def norm(x, name):
            return F.layer_norm(x, (128,), m[f"prelude.{i}.{name}.weight"], m[f"prelude.{i}.{name}.bias"])
        q, k, v = (t.view(9, 2, 64).transpose(0, 1) for t in linear(norm(x, "norm1"), "attn.qkv").split(128, -1))
        x = x + linear(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).reshape(9, 128), "attn.out")
        x = x + linear(F.gelu(linear(norm(x, "norm2"), "mlp.up"), approximate="tanh"), "mlp.down")
    logits = F.layer_norm(x, (128,), m["norm.weight"], m["norm.bias"]) @ m["wte.weight"].T
    assert len(m) == 4 + 2 * 12
    assert np.abs(logits.numpy() - data_gpt2_forward(weights, idx.numpy(), 2)).max() < 1e-5
    before = (tmp_path / "gpt2" / "latest.pt").read_bytes()
    assert data_run(capsys, "gpt2", f"--out_dir={tmp_path}")[0] == 0
    assert (tmp_path / "gpt2" / "latest.pt").read_bytes() == before


def test_data_not_safetensors(tmp_path, hub, capsys):
    cut = data_safetensors(data_random_gpt2())[:-50]
    for i, content in enumerate([b"\xff" * 100, b"", (5).to_bytes(8, "little") + b"{}   ", cut]):
        hub.add_repository("", "openai-community/gpt2", "main", {"model.safetensors": content})
        assert "model.safetensors" in data_refused(capsys, "gpt2", f"--out_dir={tmp_path}/{i}")
        assert not list((tmp_path / str(i)).glob("gpt2/latest*"))
