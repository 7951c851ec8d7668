"""What the machine code of our kernels must look like, checked without a GPU.

    python -m tests.cuda.kernel_rules MODULE CUOBJDUMP [sm_80 sm_90 ...]

prints one table and ends with status 1 if a rule is broken: no access to local memory, which is where registers are
spilled to; 16-byte loads and stores in the kernels that move rows; a bound on registers, so that enough warps fit; and
the arithmetic that docs/numerics.md promises.

The promise of equal bits forbids that a product and a sum are contracted into one fused multiply-add. SASS alone does
not show whether that happened, because IEEE division and square root are made of fused multiply-adds there. But:

1. nvcc with -fmad=false makes `mul.rn`, `add.rn` and `sub.rn` of our products and sums, and one instruction of each
   division and root: `div.rn`, `sqrt.rn`. The PTX is embedded and read here: no `fma` or `mad` of floats, and no
   addition or product without `.rn`.
2. ptxas may contract additions and products without a rounding modifier, never those with one (PTX ISA, Floating Point
   Instructions: add, sub, mul). It is called with --fmad false besides, which is recorded with the PTX and read here.

So no fused multiply-add in SASS is ours. Where a kernel neither divides nor takes a root, none may be there at all, and
that is checked too.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .machine_code import Kernel, Listing, read_module


@dataclass(frozen=True)
class Rule:
    """What holds for the kernels of one kind."""

    name: str
    body: str  # pattern, of where the body's name starts
    registers: int  # at most
    wide: str = ""  # pattern: which of the instances move 16 bytes at once
    shared: int = 0  # bytes of a block at most
    registers_on_10: int = 0  # at most, on compute capability 10.x; as elsewhere where it is 0

    def registers_on(self, architecture: str) -> int:
        return self.registers_on_10 or self.registers if architecture.startswith("sm_10") else self.registers


# Registers decide how many blocks of 256 threads, which all our kernels have, fit into a multiprocessor: 6 with 40,
# 4 with 64, 3 with 80, 2 with 128.
#
# Every kernel of ours needs a rule, and every rule a kernel: a new or renamed one must be looked at. The first that
# fits counts.
RULES = (
    Rule("gather rows", "GatherChunks<", registers=40, wide="<16,"),
    Rule("deliver rows", "DeliverChunks<", registers=40, wide="<16>"),
    Rule("segment sum", "FirstBlocks<", registers=80, wide="<float, 4,|Float16, 8,"),
    # Of long segments only; eight or sixteen rows in flight need more registers on 10.0 than three blocks leave.
    Rule("segment sum, later blocks", "LaterBlocks<", registers=128, wide="<float, 4,|Float16, 8,"),
    Rule("segment sum, long segments", "(CombineBlocks|LongSquares)", registers=128),
    # The compiler keeps more of a row in flight on 10.0, at the price of a block.
    Rule("update fp32", "UpdateRows<float", registers=80, wide="<float, 4,", registers_on_10=128),
    Rule("update 16-bit", "UpdateRows<.*false", registers=80, wide="Float16, 8,", registers_on_10=128),
    # These draw their random numbers in the same kernel.
    Rule("update 16-bit, stochastic", "UpdateRows<.*16, 8,.*true", registers=128, wide="Float16, 8,"),
    Rule("update 16-bit, stochastic, narrow", "UpdateRows<.*true", registers=80, registers_on_10=128),
    # The stacks of dyadic sums, in shared memory.
    Rule("row statistic", "FinishRows", registers=64, shared=33 * 1024),
    Rule("norm and decision", "(SumTiles|DecideUpdate)", registers=64),
    # Small beside the rows.
    Rule("unique ids", "(MakeKeys|FinishUnique|WritePositions)", registers=64),
    Rule("clean ids", "(WriteRows<|NoteFirst<)", registers=64),
    Rule("refusals", "(FindDifference|ForgetDifference|LookForRefusals|RefuseLookup)", registers=64),
    Rule("words between processes", "(WriteWord|ReadWords)", registers=64),
    Rule("operands and results", "(ReadNumbers|ReadPending|WriteOutcome|WritePin)", registers=64),
)

# Kernels of libraries: counted, not judged.
FOREIGN = ("cub::", "thrust::")

# (pattern of kernel, pattern of PTX instruction, why it is right there)
ALLOWED: tuple[tuple[str, str, str], ...] = ()

_FLOAT = r"(?:f16|f16x2|bf16|bf16x2|f32|f32x2|f64)"
FORBIDDEN = (
    (rf"(?:fma|mad)\..*{_FLOAT}$", "is a fused multiply-add"),
    (r"(?:add|sub|mul|div|sqrt|rcp)\.(?:rz|rm|rp)\b.*", "does not round to nearest"),
    (rf"(?:add|sub|mul)\.(?!rn\.).*{_FLOAT}$", "may be contracted, having no .rn"),
    (r".*\.(?:approx|full)\b.*", "is not rounded correctly"),
    (r".*\.ftz\b.*", "flushes denormals"),
    (rf"(?:atom|red)\..*add.*{_FLOAT}$", "adds in no fixed order"),
)
_DIVIDES = re.compile(r"(?:div|sqrt|rcp)\.rn\.f(?:32|64)")


def problems(listing: Listing, architectures: Iterable[str], rules: tuple[Rule, ...] = ()) -> list[str]:
    """Everything that breaks a rule, as sentences."""
    rules = rules or RULES
    found = []
    own = [kernel for kernel in listing.kernels if not kernel.name.startswith(FOREIGN)]
    if not own:
        found.append("the module has no kernels of ours")
    for architecture in architectures:
        names = {kernel.name for kernel in own if kernel.architecture == architecture}
        if missing := {kernel.name for kernel in own} - names or (not names and own and {"everything"}):
            found.append(f"{architecture}: {len(missing)} kernels are missing: {', '.join(sorted(missing)[:3])}")
    for rule in rules:
        if not any(_rule_of(kernel, rules) == rule for kernel in own):
            found.append(f"no kernel is of the kind {rule.name!r}: correct RULES")
        elif rule.wide and not any(_is_wide(kernel, rule) for kernel in own if _rule_of(kernel, rules) == rule):
            found.append(f"no kernel of the kind {rule.name!r} matches {rule.wide!r}: correct RULES")
    for kernel in own:
        found += [f"{kernel.architecture} {kernel.name}: {problem}" for problem in _problems_of(kernel, rules)]
    found += [
        f"{name}: is called rather than inlined, so no kernel shows its arithmetic"
        for name in listing.ptx_only
        if not name.startswith(FOREIGN)
    ]
    found += [
        f"ptxas was called without --fmad false, but with {options!r}"
        for options in listing.ptx_options
        if not re.search(r"-?-fmad[ =]false", options)
    ]
    return found


def _problems_of(kernel: Kernel, rules: tuple[Rule, ...]) -> Iterable[str]:
    rule = _rule_of(kernel, rules)
    if rule is None:
        yield "has no rule: add one to RULES"
        return
    if kernel.registers > rule.registers_on(kernel.architecture):
        yield f"{kernel.registers} registers, more than {rule.registers_on(kernel.architecture)}"
    if kernel.shared > rule.shared:
        yield f"{kernel.shared} bytes of shared memory, more than {rule.shared}"
    if kernel.stack + kernel.local or kernel.local_accesses:
        yield f"{kernel.stack + kernel.local} bytes of local memory, {kernel.local_accesses} accesses to it"
    if _is_wide(kernel, rule):
        if not kernel.wide_loads:
            yield "no 16-byte load from global memory"
        if not kernel.wide_stores:
            yield "no 16-byte store to global memory"
    if kernel.ptx is None:
        yield 'no PTX is embedded, so its arithmetic cannot be judged: build with "+PTX"'
        return
    for opcode in sorted(kernel.ptx):
        why = next((why for pattern, why in FORBIDDEN if re.fullmatch(pattern, opcode)), None)
        if why is not None and not _is_allowed(kernel.name, opcode):
            yield f"{opcode} ({kernel.ptx[opcode]} times) {why}"
    if kernel.fused and not any(_DIVIDES.fullmatch(opcode) for opcode in kernel.ptx):
        yield f"{kernel.fused} fused multiply-adds in SASS, but no division or square root that they could be part of"


def table(listing: Listing, rules: tuple[Rule, ...] = ()) -> str:
    """One line for each kind and architecture: extremes over its kernels."""
    rules = rules or RULES
    header = ("kind", "arch", "kernels", "registers", "stack", "local", "shared", "16B loads", "16B stores", "fma ptx")
    rows = [header]
    groups: dict[tuple[str, str], list[Kernel]] = {}
    for kernel in listing.kernels:
        rule = _rule_of(kernel, rules)
        foreign = kernel.name.startswith(FOREIGN)
        name = kernel.name.split("::")[0] + " (library)" if foreign else rule.name if rule else kernel.name
        groups.setdefault((name, kernel.architecture), []).append(kernel)
    order = {rule.name: place for place, rule in enumerate(rules)}
    for (name, architecture), kernels in sorted(groups.items(), key=lambda group: order.get(group[0][0], len(order))):
        rule = next((rule for rule in rules if rule.name == name), None)
        wide = [kernel for kernel in kernels if rule is not None and _is_wide(kernel, rule)]
        fused = sum(count for k in kernels for opcode, count in (k.ptx or {}).items() if opcode.startswith("fma."))
        rows.append(
            (
                name,
                architecture,
                str(len(kernels)),
                f"{max(k.registers for k in kernels)}" + (f" <= {rule.registers_on(architecture)}" if rule else ""),
                str(max(k.stack for k in kernels)),
                str(sum(k.local_accesses for k in kernels)),
                str(max(k.shared for k in kernels)),
                _span([k.wide_loads for k in wide]),
                _span([k.wide_stores for k in wide]),
                str(fused),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _rule_of(kernel: Kernel, rules: tuple[Rule, ...]) -> Rule | None:
    return next((rule for rule in rules if re.search(rf"\b{rule.body}", kernel.name)), None)


def _is_wide(kernel: Kernel, rule: Rule) -> bool:
    return bool(rule.wide) and re.search(rule.wide, kernel.name) is not None


def _is_allowed(name: str, opcode: str) -> bool:
    return any(re.search(kernel, name) and re.fullmatch(pattern, opcode) for kernel, pattern, _ in ALLOWED)


def _span(numbers: list[int]) -> str:
    if not numbers:
        return "-"
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}..{high}"


def main(arguments: list[str]) -> int:
    if len(arguments) < 3:
        print("usage: python -m tests.cuda.kernel_rules MODULE CUOBJDUMP ARCHITECTURES...", file=sys.stderr)
        return 2
    listing = read_module(Path(arguments[0]), Path(arguments[1]))
    print(table(listing))
    found = problems(listing, arguments[2:])
    for problem in found:
        print(f"machine code: {problem}", file=sys.stderr)
    own = sum(not kernel.name.startswith(FOREIGN) for kernel in listing.kernels)
    print(f"machine code: {own} kernels of ours read, {len(found)} problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
