"""What a failed build says: the compiler's first error first, and the rest in a file."""

from __future__ import annotations

import re

# In the order of what says most: a compiler, nvcc, a linker, the shell.
_FIRST_ERRORS = (
    re.compile(r"Killed signal terminated program|virtual memory exhausted|out of memory allocating"),
    re.compile(r":\d+(:\d+)?: (fatal )?error: "),
    re.compile(r"^nvcc (error|fatal) *:|\(\d+\): error: "),
    re.compile(r"undefined reference to|: cannot find |multiple definition of"),
    re.compile(r"\berror: |: not found$|No such file or directory|No space left on device"),
)
_OUT_OF_MEMORY = _FIRST_ERRORS[0]
# ninja's own words about a command that failed, which are followed by the command itself, all flags included.
_FAILED_COMMAND = re.compile(r"^FAILED: .*\n.*\n?", re.MULTILINE)
_SHOWN_LINES = 30


class BuildError(RuntimeError):
    """The native module cannot be built here. The first line says why, the last ones what to do."""


def first_error(output: str) -> str:
    """The line of a build's output that says what is wrong, or the last line if none looks like it."""
    lines = [line.strip() for line in _FAILED_COMMAND.sub("", output).splitlines() if line.strip()]
    for pattern in _FIRST_ERRORS:
        for line in lines:
            if pattern.search(line):
                return line
    return lines[-1] if lines else "no output"


def compilation_error(what: str, output: str, log: str) -> BuildError:
    """An error whose first line has the compiler's first error.

    Args:
      what: what was built, and by which compiler.
      output: everything that ninja and the compilers wrote.
      log: the file that keeps it.
    """
    first = first_error(output)
    shown = _FAILED_COMMAND.sub("", output)
    # From the first error on: what comes before are files that were compiled.
    lines = shown[max(0, shown.find(first)) :].splitlines()[:_SHOWN_LINES]
    advice = f"All of the output is in {log}"
    if _OUT_OF_MEMORY.search(first):
        advice += "\nThere was not enough memory for so many compilers at once. Run it again with MAX_JOBS=1"
    return BuildError("\n".join([f"{what} failed: {first}", *(f"    {line}" for line in lines), advice]))
