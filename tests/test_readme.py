"""The README's example runs as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


def test_the_example_runs_and_learns() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    result = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, timeout=300, cwd=README.parent, check=False
    )
    assert result.returncode == 0, result.stderr
    loss, shape = result.stdout.split(maxsplit=1)
    assert float(loss) < 0.2  # the mean square of the targets is 0.5
    assert shape.strip() == "(3, 16)"
