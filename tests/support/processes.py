"""Code that runs in a process of its own."""
import subprocess
import sys
from pathlib import Path


def run_python(code, *arguments):
    """Return the output of `code`, or of a file, in a new process; from a file, for graph mode reads the source."""
    code = code.read_text(encoding="utf-8") if isinstance(code, Path) else code
    Path("script.py").write_text(code, encoding="utf-8")
    done = subprocess.run([sys.executable, "script.py", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
