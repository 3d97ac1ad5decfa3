"""A vLLM package as released, beside the patched one: for what must not have changed."""

from __future__ import annotations

import os
from pathlib import Path

from stagetap import patchstack
from stagetap.patchstack.locate import find_vllm

CPU_SHIM = '''
"""Only what Model Runner V2 needs on CPU: a placeholder for Triton's CPU backend."""
import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from triton.backends import backends

    class Driver:
        @staticmethod
        def is_active():
            return False

    class Backend:
        driver = Driver
        compiler = None

    backends.setdefault("cpu", Backend)
'''


def unpatched_site(folder: Path, shim: bool) -> Path:
    """Make ``folder`` a directory for PYTHONPATH that holds vLLM as it was released.

    Only the files that the series touches are copies, the others are links. With ``shim`` a
    ``sitecustomize`` stands in for the series' patch to Triton's detection.
    """
    package = find_vllm(None).path
    touched = patchstack.status().files
    copy = folder / "vllm"
    for directory, names, files in os.walk(package):
        target = copy / Path(directory).relative_to(package)
        target.mkdir(parents=True)
        names[:] = [name for name in names if name != "__pycache__"]
        for name in files:
            source = Path(directory, name)
            relative = f"vllm/{source.relative_to(package).as_posix()}"
            if relative in touched:
                (target / name).write_bytes(source.read_bytes())
            else:
                (target / name).symlink_to(source)
    patchstack.revert(copy)
    if shim:
        (folder / "sitecustomize.py").write_text(CPU_SHIM)
    return folder
