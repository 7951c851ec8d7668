"""The command line: `async-emb`, also `python -m jax_bridge`. One file a command.

Exit status: 0 where all is well, 1 where a command found problems, 2 where it was called wrongly or its output cannot
be written. Where the reader of a pipe has gone it ends as other programs do, by SIGPIPE and in silence.
"""

from __future__ import annotations

import sys

INSTALL_COMMAND = 'python -m pip install "async-emb[cli]"'


def main() -> None:
    """Runs the command that the arguments name, or says what is missing to do so."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        print(
            f"async-emb: the command line needs {error.name}, which is not installed: {INSTALL_COMMAND}",
            file=sys.stderr,
        )
        sys.exit(2)
    from .app import app
    from .streams import writing_to_the_end

    with writing_to_the_end():
        app(prog_name="async-emb")
