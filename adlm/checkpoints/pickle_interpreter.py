"""A pickle interpreter that never imports or calls anything. Independent of files.

It builds plain data, and a `TensorRecord` for each tensor. Objects of the other classes that released checkpoints
contain (configs, tokenizers, counters) become an inert `ForeignObject` with the class name and the constructor's data;
any other global is rejected. Opcode names are those of Python's pickletools.

`torch.load(weights_only=True)` with stubs for those classes was tried instead (PyTorch 2.13). It is not as
safe: it really calls the functions that it permits, and that list can be extended but not reduced, so a file of 400
bytes that calls `bytearray(2**32)` takes four gigabytes before it can be rejected. It also needs every class by name in
advance, reads all tensors at once, and would leave the checks of the archive (`torch_archive`) to be made before it.
"""

import io
import math
import pickletools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

MAX_OPCODES = 1_000_000  # a few seconds; GPT-2's slow tokenizer, which released files may contain, takes 587,363
MAX_NAME_LENGTH = 200

# Globals that a released checkpoint may contain. They are not imported either: the list detects attacks.
PERMITTED_GLOBALS = re.compile(
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
class Global:
    """The name of a function or class in the pickle; never resolved."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False, slots=True)
class ForeignObject:
    """An object that was not constructed: the name of its class, its arguments and its state."""

    name: str
    data: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Storage:
    """A one-dimensional array in the archive."""

    dtype: torch.dtype
    key: str
    length: int


@dataclass(frozen=True, eq=False)
class TensorRecord:
    """The metadata of a tensor whose data has not been read yet."""

    storage: Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.size) * self.storage.dtype.itemsize


class DamagedPickle(Exception):
    """The pickle or its archive is invalid; `torch_archive` turns it into a user error with the path."""


def interpret(program: bytes) -> tuple[Any, set[str]]:
    """The object that a pickle builds, and the class names of its ForeignObjects."""
    interpreter = PickleInterpreter()
    try:
        for number, (opcode, argument, _) in enumerate(pickletools.genops(io.BytesIO(program))):
            if number > MAX_OPCODES:
                raise DamagedPickle(f"its data.pkl has more than {MAX_OPCODES:,} opcodes")
            interpreter.execute(opcode.name, argument)
        return interpreter.result(), interpreter.foreign
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, UnicodeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DamagedPickle(f"its data.pkl cannot be interpreted ({type(error).__name__}: {reason})") from None


INTEGERS = {"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4"}
STRINGS = {"STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
BYTES = {"BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"}
CONSTANTS = INTEGERS | STRINGS | BYTES | {"FLOAT", "BINFLOAT"}
SINGLETONS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
EMPTY_CONTAINERS: dict[str, Callable[[], Any]] = {
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_SET": lambda: ForeignObject("set"),
}
TUPLE_LENGTHS = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class PickleInterpreter:
    """The pickle machine: stack, mark stack and memo. Values are never called; only plain dict keys are hashed."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.foreign: set[str] = set()

    def result(self) -> Any:
        if len(self.stack) != 1:
            raise DamagedPickle("its data.pkl does not end with a single object")
        return self.stack[0]

    def execute(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in CONSTANTS:
            if name in INTEGERS and not -(2**63) <= argument < 2**63:
                raise DamagedPickle("its data.pkl contains an integer of more than 64 bits")
            stack.append(argument)
        elif name in SINGLETONS:
            stack.append(SINGLETONS[name])
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
            self.pop_mark()
        elif name == "DUP":
            stack.append(stack[-1])
        elif name not in ("PROTO", "FRAME", "STOP"):
            self.execute_container(name, argument)

    def pop_mark(self) -> list[Any]:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def execute_container(self, name: str, argument: Any) -> None:
        """The opcodes that build and fill tuples, lists, dicts and sets."""
        stack = self.stack
        if name in TUPLE_LENGTHS:
            items = stack[-TUPLE_LENGTHS[name] :]
            del stack[-TUPLE_LENGTHS[name] :]
            stack.append(tuple(items))
        elif name in EMPTY_CONTAINERS:
            stack.append(EMPTY_CONTAINERS[name]())
        elif name == "TUPLE":
            stack.append(tuple(self.pop_mark()))
        elif name == "LIST":
            stack.append(self.pop_mark())
        elif name == "DICT":
            items = self.pop_mark()
            stack.append({})
            add_items(stack[-1], items)
        elif name == "FROZENSET":
            stack.append(ForeignObject("frozenset", self.pop_mark()))
        elif name == "APPEND":
            add_items(stack[-2], [stack.pop()])
        elif name in ("APPENDS", "ADDITEMS", "SETITEMS"):
            items = self.pop_mark()
            add_items(stack[-1], items)
        elif name == "SETITEM":
            value, key = stack.pop(), stack.pop()
            add_items(stack[-1], [key, value])
        else:
            self.execute_construction(name, argument)

    def execute_construction(self, name: str, argument: Any) -> None:
        """The opcodes that would import or call something."""
        stack = self.stack
        if name == "GLOBAL":
            stack.append(check_global(*argument.split(" ", 1)))
        elif name == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            stack.append(check_global(module, attribute))
        elif name in ("REDUCE", "NEWOBJ"):
            arguments, function = stack.pop(), stack.pop()
            stack.append(self.reduce(function, arguments))
        elif name == "NEWOBJ_EX":
            keywords, arguments, function = stack.pop(), stack.pop(), stack.pop()
            stack.append(self.reduce(function, (arguments, keywords)))
        elif name == "OBJ":
            function, *rest = self.pop_mark()
            stack.append(self.reduce(function, tuple(rest)))
        elif name == "INST":
            stack.append(self.reduce(check_global(*argument.split(" ", 1)), tuple(self.pop_mark())))
        elif name == "BUILD":
            state = stack.pop()
            if isinstance(stack[-1], ForeignObject):
                stack[-1].data.append(state)  # the state of plain data is dropped: it would only set attributes
        elif name in ("BINPERSID", "PERSID"):
            stack.append(parse_storage(stack.pop() if name == "BINPERSID" else argument))
        else:
            raise DamagedPickle(f"its data.pkl contains the opcode {name}, which no checkpoint needs")

    def reduce(self, function: Any, arguments: Any) -> Any:
        """The value of function(*arguments) for tensors, parameters and empty OrderedDicts; else a ForeignObject."""
        if not isinstance(function, Global):
            raise DamagedPickle("its data.pkl calls an object that is not a global")
        name = str(function)
        if name == "collections.OrderedDict" and len(arguments) == 0:
            return {}
        if name == "torch._utils._rebuild_tensor_v2":
            return parse_tensor(*arguments[:4])
        if name == "torch._utils._rebuild_parameter" and isinstance(arguments[0], TensorRecord):
            return arguments[0]
        self.foreign.add(name)
        return ForeignObject(name, [arguments])


def printable_name(text: str) -> str:
    """A name from a file, made safe to print: at most 100 characters, non-printable ones replaced by "?"."""
    return "".join(character if character.isprintable() else "?" for character in text[:100])


def check_global(module: Any, name: Any) -> Global:
    """The global, if a checkpoint may contain it."""
    if not isinstance(module, str) or not isinstance(name, str) or len(module) + len(name) > MAX_NAME_LENGTH:
        raise DamagedPickle("it contains a global without a valid name; nothing in it was executed")
    if not PERMITTED_GLOBALS.fullmatch(f"{module}.{name}"):
        raise DamagedPickle(
            f"it names {printable_name(f'{module}.{name}')}, which no checkpoint needs; nothing in it was executed"
        )
    return Global(module, name)


def add_items(container: Any, items: list[Any]) -> None:
    """Add items to a list, or alternating keys and values to a dict.

    Only plain keys are added: hashing a nested tuple can take exponential time.
    """
    if isinstance(container, list):
        container.extend(items)
    elif isinstance(container, dict):
        for key, value in zip(items[::2], items[1::2], strict=True):
            if isinstance(key, (str, int, float, bytes, type(None))):
                container[key] = value
    elif isinstance(container, ForeignObject):
        container.data.append(items)
    else:
        raise DamagedPickle("its data.pkl adds items to an object that is not a container")


def parse_storage(persistent_id: Any) -> Storage:
    """The storage of a persistent id ("storage", storage type, key, device, length)."""
    if not isinstance(persistent_id, tuple) or len(persistent_id) < 5 or not isinstance(persistent_id[1], Global):
        raise DamagedPickle("it has a persistent id that is not a storage")
    storage_type, key, length = persistent_id[1], persistent_id[2], persistent_id[4]
    if storage_type.module != "torch" or storage_type.name not in DTYPES:
        raise DamagedPickle(f"it has a storage of an unknown type: {printable_name(str(storage_type))}")
    if not isinstance(key, str) or len(key) > MAX_NAME_LENGTH or not isinstance(length, int) or length < 0:
        raise DamagedPickle("one of its storages has an invalid key or length")
    return Storage(DTYPES[storage_type.name], key, length)


def parse_tensor(storage: Any, offset: Any, size: Any, stride: Any) -> TensorRecord:
    """The record of a tensor from the arguments of _rebuild_tensor_v2."""
    if not isinstance(storage, Storage) or len(size) != len(stride) or len(size) > 64:
        raise DamagedPickle("one of its tensors has no valid storage, shape and strides")
    if not all(type(number) is int and number >= 0 for number in (offset, *size, *stride)):
        raise DamagedPickle("one of its tensors has a shape that is not of non-negative integers")
    if math.prod(size) >= 2**48 or any(number >= 2**48 for number in (offset, *size, *stride)):
        raise DamagedPickle("one of its tensors is larger than any memory")
    return TensorRecord(storage, offset, tuple(size), tuple(stride))
