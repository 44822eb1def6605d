"""Folders of embedding models: base models with the files of sentence-transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file, save_file

from tests.models.golden_server import GOLDEN

POOLING = {"word_embedding_dimension": 64, "pooling_mode_lasttoken": True}


def write_modules(folder: Path, pooling: dict[str, Any] | None = None) -> None:
    """Write what says that the folder's model makes embeddings."""
    names = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (name, path) in enumerate(names.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling or POOLING))


def save_base_model(folder: Path, **changes: Any) -> Path:
    """Copy the golden Qwen3 model without its head, with the tensors' names of a base model."""
    shutil.copytree(GOLDEN / "qwen3", folder)
    body = "model."
    tensors = {
        name.removeprefix(body): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if name.startswith(body)
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder
