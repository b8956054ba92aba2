"""Settings: a dataclass's defaults < config files < --name=value flags, in that order.

    python train.py config/grt_tiny.py --learning_rate=1e-3 --compile

A config file is a list of plain assignments to fields of the dataclass. The one name with a meaning of its own is
`base`: another config file, read first, for what several cells share.
"""
import ast
import dataclasses
import difflib
import inspect
import runpy
import sys
import types
import typing
from pathlib import Path


class ConfigError(Exception):
    """A setting a person must mend: one line that says what, where and what was meant."""


def load(cls, argv, doc="", over={}):
    """An instance of the dataclass `cls` from command-line words. The field `cell`, where `cls` has one, gets the name
    of the last config file; `over` replaces what files say, not what flags say. `--help` prints every field with its
    comment and leaves. Raises ConfigError."""
    values = {}
    for word in argv:
        if word in ("--help", "-h"):
            print(help_text(cls, doc))
            sys.exit(0)
        if not word.startswith("-"):
            values.update(read_file(cls, word))
    values.update(over)
    for word in argv:
        if word.startswith("-"):
            if not word.startswith("--"):
                raise ConfigError(f"{word}: settings are written --name=value (--help lists them)")
            name, equals, text = word[2:].partition("=")
            values[name] = parse(cls, name, text if equals else None, f"--{name}")
    try:
        return cls(**values)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def read_file(cls, name):
    """The assignments of one config file as {field: value}, its `base` underneath."""
    path = find(name)
    try:
        found = runpy.run_path(str(path))
    except Exception as error:
        raise ConfigError(f"{path}: {type(error).__name__}: {error}") from None
    found = {k: v for k, v in found.items() if not k.startswith("__") and not isinstance(v, types.ModuleType)}
    values = read_file(cls, path.parent / found.pop("base")) if "base" in found else {}
    for key, value in found.items():
        values[key] = check(cls, key, value, f"{path}: {key}")
    if any(f.name == "cell" for f in dataclasses.fields(cls)):
        values["cell"] = path.stem
    return values


def find(name):
    """The config file called `name`: a path, or the name of a file in this folder, with or without .py."""
    here = Path(__file__).parent
    places = [Path(name), Path(f"{name}.py")]
    if str(Path(name).parent) in (".", here.name):       # config/grt_tiny.py is found from any folder
        places.append(here / f"{Path(name).stem}.py")
    for path in places:
        if path.is_file():
            return path
    near = difflib.get_close_matches(Path(name).stem, [p.stem for p in here.glob("[!_]*.py")], n=1)
    raise ConfigError(f"{name}: no such config file" + (f"; did you mean config/{near[0]}.py?" if near else ""))


def parse(cls, name, text, where):
    """The value that the words `--name=text` give a field; `text` is None for a bare `--name`."""
    kinds = kinds_of(cls, name)
    if text is None:
        if bool not in kinds:
            raise ConfigError(f"{where} needs a value: {where}=...")
        return True
    if str in kinds:
        return None if text == "None" and type(None) in kinds else text
    if text.lower() in ("true", "false", "none"):
        text = text.capitalize()
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    return check(cls, name, value, where)


def check(cls, name, value, where):
    """`value` as a field's declared type takes it: 1 is a fine float, 1e4 a fine int, 0 and 1 fine booleans."""
    kinds = kinds_of(cls, name)
    if type(value) in kinds:
        return value
    if type(value) is int and float in kinds:
        return float(value)
    if type(value) is float and int in kinds and value.is_integer():
        return int(value)
    if type(value) is int and bool in kinds and value in (0, 1):
        return bool(value)
    names = " or ".join(getattr(k, "__name__", str(k)).replace("NoneType", "None") for k in kinds)
    raise ConfigError(f"{where} must be {names}, not {value!r}")


def kinds_of(cls, name):
    """The types a field takes. An unknown name is an error that says what was probably meant."""
    hints = typing.get_type_hints(cls)
    if name not in hints:
        # n_layer(s) is what the nearest name misses: depth here is three numbers
        near = ["n_prelude"] if name in ("n_layer", "n_layers") else difflib.get_close_matches(name, hints, n=1, cutoff=0.5)
        raise ConfigError(f"unknown setting {name}" + (f"; did you mean {near[0]}?" if near else "; --help lists them all"))
    return typing.get_args(hints[name]) or (hints[name],)


def comments(cls):
    """{field: the comment on its line} for a dataclass and those it extends."""
    found = {}
    for base in reversed(cls.__mro__[:-1]):
        for line in inspect.getsource(base).splitlines():
            code, _, comment = line.partition("#")
            name, colon, _ = code.strip().partition(":")
            if colon and comment and name in typing.get_type_hints(cls):
                found.setdefault(name, comment.strip())
    return found


def help_text(cls, doc=""):
    """Every setting with its default and its comment, one a line."""
    said = comments(cls)
    lines = [f"--{f.name}={f.default!s}".ljust(36) + said.get(f.name, "") for f in dataclasses.fields(cls)]
    return "\n".join([doc.strip(), "", *lines])


def fail(error):
    """Print an error a person can mend as one line, and leave with status 2."""
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    sys.exit(2)
