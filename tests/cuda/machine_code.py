"""What is in the device code of a module, as `cuobjdump` prints it: registers, stack, instructions of SASS and of PTX.

SASS is what a GPU runs. PTX is what NVIDIA's compiler made of our source, and what its assembler ptxas made SASS of: it
is embedded where the list of architectures says "+PTX".
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

# "        /*0040*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;           /* 0x... */"
_SASS_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
_SASS_FUNCTION = re.compile(r"^\s*Function : (\S+)")
_USAGE_FUNCTION = re.compile(r"^\s*Function (\S+):")
_ARCHITECTURE = re.compile(r"^arch = (sm_\w+)")
_PTX_OPTIONS = re.compile(r"^ptxasOptions =(.*)")
_PTX_FUNCTION = re.compile(r"^(?:\.\w+\s+)*\.(?:entry|func)\s+(?:\([^)]*\)\s*)?([\w$]+)")
_PTX_OPCODE = re.compile(r"^(?:@!?%\w+\s+)?([a-z]\w*(?:(?:\.|::)\w+)*)(?:\s|$)")


@dataclass
class Kernel:
    """One function of one architecture."""

    name: str  # demangled, without our namespaces
    architecture: str  # "sm_90"
    registers: int = 0
    stack: int = 0  # bytes of a thread
    local: int = 0
    shared: int = 0  # bytes of a block
    sass: Counter[str] = field(default_factory=Counter)  # how often each instruction is there
    ptx: Counter[str] | None = None  # None: no PTX is embedded

    @property
    def wide_loads(self) -> int:
        """Loads of 16 bytes or more from global memory."""
        return _wide(self.sass, "LDG")

    @property
    def wide_stores(self) -> int:
        return _wide(self.sass, "STG")

    @property
    def local_accesses(self) -> int:
        """Loads and stores of memory that stands in for registers, or for an array that does not fit into them."""
        return sum(count for opcode, count in self.sass.items() if opcode.split(".")[0] in ("LDL", "STL"))

    @property
    def fused(self) -> int:
        """Fused multiply-adds of fp32 in SASS: contracted ones, but also those inside of division and square root."""
        return sum(count for opcode, count in self.sass.items() if opcode.split(".")[0] == "FFMA")


@dataclass
class Listing:
    """Everything that was read of one module."""

    kernels: list[Kernel]
    ptx_options: list[str]  # of ptxas, one line for each embedded PTX
    ptx_only: list[str] = field(default_factory=list)  # functions of PTX that SASS does not have under their name


def read_module(module: Path, cuobjdump: Path) -> Listing:
    """Reads the device code of a shared library."""
    usage, sass, ptx = (_output(cuobjdump, option, module) for option in ("-res-usage", "-sass", "-ptx"))
    return parse(usage, sass, ptx)


def parse(usage: str, sass: str, ptx: str) -> Listing:
    """The three outputs of cuobjdump, together."""
    resources = parse_usage(usage)
    instructions = parse_sass(sass)
    intermediate, options = parse_ptx(ptx)
    if resources.keys() != instructions.keys():
        odd = sorted(resources.keys() ^ instructions.keys())
        raise ValueError(f"cuobjdump's two lists of functions differ by {odd[:3]}: its output is not what is read here")
    names = demangle(name for _, name in [*resources, *intermediate])
    kernels = [
        Kernel(
            name=short_name(names[name]),
            architecture=architecture,
            registers=resource["REG"],
            stack=resource["STACK"],
            local=resource["LOCAL"],
            shared=resource["SHARED"],
            sass=instructions[architecture, name],
            ptx=intermediate.get((architecture, name)),
        )
        for (architecture, name), resource in resources.items()
    ]
    kernels.sort(key=lambda kernel: (kernel.name, kernel.architecture))
    return Listing(
        kernels, options, sorted(short_name(names[key[1]]) for key in intermediate.keys() - resources.keys())
    )


def parse_usage(text: str) -> dict[tuple[str, str], dict[str, int]]:
    """(architecture, mangled name) -> {"REG": 32, "STACK": 0, ...}."""
    found = {}
    architecture = name = ""
    for line in text.splitlines():
        if match := _ARCHITECTURE.match(line):
            architecture = match[1]
        elif match := _USAGE_FUNCTION.match(line):
            name = match[1]
        elif name and line.strip().startswith("REG:"):
            found[architecture, name] = {key: int(value) for key, value in re.findall(r"([A-Z]+):(\d+)", line)}
            name = ""
    return found


def parse_sass(text: str) -> dict[tuple[str, str], Counter[str]]:
    """(architecture, mangled name) -> how often each instruction is there."""
    found: dict[tuple[str, str], Counter[str]] = {}
    architecture = ""
    counts: Counter[str] = Counter()
    for line in text.splitlines():
        if match := _SASS_INSTRUCTION.match(line):
            counts[match[1]] += 1
        elif match := _ARCHITECTURE.match(line):
            architecture = match[1]
        elif match := _SASS_FUNCTION.match(line):
            counts = found[architecture, match[1]] = Counter()
    return found


def parse_ptx(text: str) -> tuple[dict[tuple[str, str], Counter[str]], list[str]]:
    """(architecture, mangled name) -> how often each instruction is there; and the options of each ptxas run."""
    found: dict[tuple[str, str], Counter[str]] = {}
    options: list[str] = []
    architecture = ""
    counts: Counter[str] = Counter()
    for line in text.splitlines():
        if line.startswith("Fatbin ptx code"):
            options.append("")
        elif match := _ARCHITECTURE.match(line):
            architecture = match[1]
        elif match := _PTX_OPTIONS.match(line):
            options[-1] = match[1].strip()
        elif match := _PTX_FUNCTION.match(line):
            counts = found[architecture, match[1]] = Counter()
        else:
            counts.update(_ptx_opcodes(line))
    return found, options


def _ptx_opcodes(line: str) -> Iterator[str]:
    # Inline assembly may put several statements on a line, in braces of their own.
    for statement in re.split(r"[;{}]", line.split("//")[0]):
        if match := _PTX_OPCODE.match(statement.strip()):
            yield match[1]


def demangle(names: Iterable[str]) -> dict[str, str]:
    """What the C++ names stand for."""
    mangled = list(dict.fromkeys(names))
    result = subprocess.run(["c++filt"], input="\n".join(mangled), capture_output=True, text=True, check=True)
    return dict(zip(mangled, result.stdout.splitlines(), strict=True))


def short_name(name: str) -> str:
    """A kernel's name for people and rules: our own namespaces and the parameters are left out."""
    name = re.sub(r"\(anonymous namespace\)::|async_emb::(?:(?:core|cuda|isa_\w+)::)*", "", name)
    depth = 0
    for i, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0:
            name = name[:i]
            break
    return name.removeprefix("void ")


def _wide(counts: Counter[str], family: str) -> int:
    parts = ((opcode.split("."), count) for opcode, count in counts.items())
    return sum(count for (first, *rest), count in parts if first == family and {"128", "256"} & set(rest))


def _output(cuobjdump: Path, option: str, module: Path) -> str:
    return subprocess.run([cuobjdump, option, module], capture_output=True, text=True, check=True).stdout
