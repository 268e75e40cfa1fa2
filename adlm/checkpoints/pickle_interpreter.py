"""A stack machine that follows a pickle without importing or calling anything it names. Knows no files.

It builds plain data and notes down tensors. The objects that released checkpoints carry along (configs, tokenizers,
counters) become an inert `Foreign` with their name and the data that was meant for them; any other name is refused.
There is no call in it to be tricked into.
"""

import io
import math
import pickletools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

MOST_STEPS = 1_000_000  # a few seconds; GPT-2's slow tokenizer, which released files may carry, takes 587,363
LONGEST_NAME = 200

# What a released checkpoint may name. None of it is imported either: the list tells a checkpoint from an attack.
PERMITTED = re.compile(
    r"(omegaconf|transformers|tokenizers|hydra|lightning|lightning_fabric|lightning_utilities|pytorch_lightning"
    r"|torchmetrics|dataloader|diffusion|models|noise_schedule)\.[\w.]+"
    r"|collections\.(OrderedDict|defaultdict|Counter|deque)|typing\.\w+|argparse\.Namespace|enum\.\w+"
    r"|datetime\.\w+|pathlib\.\w*Path|copyreg\._reconstructor|_codecs\.encode"
    r"|(builtins|__builtin__)\.(object|set|frozenset|dict|list|tuple|int|float|bool|str|bytes|bytearray|complex|slice|range)"
    r"|numpy\.(_?core\.multiarray\.(scalar|_reconstruct)|dtype|ndarray)"
    r"|torch\.(_utils\._rebuild_\w+|\w+Storage|Size|device|nn\.parameter\.Parameter"
    r"|b?float\d+|u?int\d+|bool|half|double|float|long|short)"
)

DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


@dataclass(frozen=True)
class Name:
    """A function or class that the file names; only ever a name."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False, slots=True)
class ForeignObject:
    """An object of a class that was not imported: its name, and the data that was meant for it."""

    name: str
    data: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Storage:
    """A run of numbers in the archive."""

    dtype: torch.dtype
    key: str
    length: int


@dataclass(frozen=True, eq=False)
class TensorRecord:
    """A tensor that has not been read yet."""

    storage: Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.size) * self.storage.dtype.itemsize


class DamagedPickle(Exception):
    """The file is not what it says; becomes a sentence with the file's name."""


def interpret(program: bytes) -> tuple[Any, set[str]]:
    """What a pickle builds, and the names of everything in it that was left foreign."""
    machine = PickleInterpreter()
    try:
        for step, (opcode, argument, _) in enumerate(pickletools.genops(io.BytesIO(program))):
            if step > MOST_STEPS:
                raise DamagedPickle(f"its data.pkl takes more than {MOST_STEPS:,} steps")
            machine.do(opcode.name, argument)
        return machine.result(), machine.foreign
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, UnicodeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DamagedPickle(f"its data.pkl cannot be followed ({type(error).__name__}: {reason})") from None


INTEGERS = {"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4"}
TEXTS = {"STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
BYTES = {"BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"}
CONSTANTS = INTEGERS | TEXTS | BYTES | {"FLOAT", "BINFLOAT"}
FIXED: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
EMPTY: dict[str, Callable[[], Any]] = {
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_SET": lambda: ForeignObject("set"),
}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class PickleInterpreter:
    """The stack machine. Nothing on its stack is ever called, compared or hashed but plain keys."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.foreign: set[str] = set()

    def result(self) -> Any:
        if len(self.stack) != 1:
            raise DamagedPickle("its data.pkl does not end with one object")
        return self.stack[0]

    def do(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in CONSTANTS:
            if name in INTEGERS and not -(2**63) <= argument < 2**63:
                raise DamagedPickle("its data.pkl holds a number of more than 64 bits")
            stack.append(argument)
        elif name in FIXED:
            stack.append(FIXED[name])
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            self.memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(self.memo[argument])
        elif name == "MARK":
            self.marks.append(len(stack))
        elif name == "POP":
            stack.pop()
        elif name == "POP_MARK":
            self.since_mark()
        elif name == "DUP":
            stack.append(stack[-1])
        elif name not in ("PROTO", "FRAME", "STOP"):
            self.build(name, argument)

    def since_mark(self) -> list[Any]:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def build(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in TUPLES:
            together = tuple(stack[-TUPLES[name] :])
            del stack[-TUPLES[name] :]
            stack.append(together)
        elif name in EMPTY:
            stack.append(EMPTY[name]())
        elif name == "TUPLE":
            stack.append(tuple(self.since_mark()))
        elif name == "LIST":
            stack.append(self.since_mark())
        elif name == "DICT":
            items = self.since_mark()
            stack.append({})
            put(stack[-1], items)
        elif name == "FROZENSET":
            stack.append(ForeignObject("frozenset", self.since_mark()))
        elif name == "APPEND":
            put(stack[-2], [stack.pop()])
        elif name in ("APPENDS", "ADDITEMS", "SETITEMS"):
            items = self.since_mark()
            put(stack[-1], items)
        elif name == "SETITEM":
            value, key = stack.pop(), stack.pop()
            put(stack[-1], [key, value])
        else:
            self.make(name, argument)

    def make(self, name: str, argument: Any) -> None:
        """The steps that would call something."""
        stack = self.stack
        if name == "GLOBAL":
            stack.append(permitted(*argument.split(" ", 1)))
        elif name == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            stack.append(permitted(module, attribute))
        elif name in ("REDUCE", "NEWOBJ"):
            arguments, callee = stack.pop(), stack.pop()
            stack.append(self.called(callee, arguments))
        elif name == "NEWOBJ_EX":
            keywords, arguments, callee = stack.pop(), stack.pop(), stack.pop()
            stack.append(self.called(callee, (arguments, keywords)))
        elif name == "OBJ":
            callee, *rest = self.since_mark()
            stack.append(self.called(callee, tuple(rest)))
        elif name == "INST":
            stack.append(self.called(permitted(*argument.split(" ", 1)), tuple(self.since_mark())))
        elif name == "BUILD":
            state = stack.pop()
            if isinstance(stack[-1], ForeignObject):
                stack[-1].data.append(state)  # on plain data a state is an attribute nobody needs
        elif name in ("BINPERSID", "PERSID"):
            stack.append(stored(stack.pop() if name == "BINPERSID" else argument))
        else:
            raise DamagedPickle(f"its data.pkl holds the step {name}, which no checkpoint needs")

    def called(self, callee: Any, arguments: Any) -> Any:
        """What a call would make, where it is a tensor or an ordered dict; else something foreign."""
        if not isinstance(callee, Name):
            raise DamagedPickle("its data.pkl calls something that is no name")
        named = str(callee)
        if named == "collections.OrderedDict" and len(arguments) == 0:
            return {}
        if named == "torch._utils._rebuild_tensor_v2":
            return noted(*arguments[:4])
        if named == "torch._utils._rebuild_parameter" and isinstance(arguments[0], TensorRecord):
            return arguments[0]
        self.foreign.add(named)
        return ForeignObject(named, [arguments])


def describe_value(text: str) -> str:
    """A name out of a file, fit to be printed: no control characters, no novels."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:100])


def permitted(module: Any, name: Any) -> Name:
    """The name, if a checkpoint has any business with it."""
    if not isinstance(module, str) or not isinstance(name, str) or len(module) + len(name) > LONGEST_NAME:
        raise DamagedPickle("it names something by no proper name; nothing of it was run")
    if not PERMITTED.fullmatch(f"{module}.{name}"):
        raise DamagedPickle(
            f"it names {describe_value(f'{module}.{name}')}, which no checkpoint needs; nothing of it was run"
        )
    return Name(module, name)


def put(container: Any, items: list[Any]) -> None:
    """Add to a list or, two by two, to a dict, if the key is plain: a nested tuple can take forever to hash."""
    if isinstance(container, list):
        container.extend(items)
    elif isinstance(container, dict):
        for key, value in zip(items[::2], items[1::2], strict=True):
            if isinstance(key, (str, int, float, bytes, type(None))):
                container[key] = value
    elif isinstance(container, ForeignObject):
        container.data.append(items)
    else:
        raise DamagedPickle("its data.pkl adds to something that is no container")


def stored(identity: Any) -> Storage:
    """('storage', a storage type, key, device, length)"""
    if not isinstance(identity, tuple) or len(identity) < 5 or not isinstance(identity[1], Name):
        raise DamagedPickle("it refers to something outside itself that is no storage")
    kind, key, length = identity[1], identity[2], identity[4]
    if kind.module != "torch" or kind.name not in DTYPES:
        raise DamagedPickle(f"it stores numbers of a kind that is not known: {describe_value(str(kind))}")
    if not isinstance(key, str) or len(key) > LONGEST_NAME or not isinstance(length, int) or length < 0:
        raise DamagedPickle("one of its storages has no proper key or length")
    return Storage(DTYPES[kind.name], key, length)


def noted(storage: Any, offset: Any, size: Any, stride: Any) -> TensorRecord:
    """A tensor's shape, before anything is read."""
    if not isinstance(storage, Storage) or len(size) != len(stride) or len(size) > 64:
        raise DamagedPickle("one of its tensors is not made of a storage, a shape and strides")
    if not all(type(number) is int and number >= 0 for number in (offset, *size, *stride)):
        raise DamagedPickle("one of its tensors has a shape that is not whole numbers")
    if math.prod(size) >= 2**48 or any(number >= 2**48 for number in (offset, *size, *stride)):
        raise DamagedPickle("one of its tensors is larger than any memory")
    return TensorRecord(storage, offset, tuple(size), tuple(stride))
