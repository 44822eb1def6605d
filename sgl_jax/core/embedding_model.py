"""Decides by its folder's files for sentence-transformers whether a model makes embeddings."""

import json
import os
from pathlib import Path
from typing import Any

_MODULES_FILE = "modules.json"
_POOLING_FILE = "config.json"  # in the module's folder
_MODE = "pooling_mode"
_LAST_TOKEN = "lasttoken"
_SERVED_MODULES = ("Transformer", "Pooling", "Normalize")


def embedding_refusal(folder: Path, *, is_embedding: bool = False) -> str:
    """Return why the model in `folder` makes no embeddings; "" if it does.

    An embedding is the normalized hidden state of the last token. `is_embedding` is the setting of
    that name: then the folder is not asked.
    """
    if is_embedding:
        return ""
    try:
        modules = {
            str(module["type"]).rpartition(".")[-1]: folder / module["path"]
            for module in json.loads((folder / _MODULES_FILE).read_text())
        }
        others = [name for name in modules if name not in _SERVED_MODULES]
        if others:
            return f"the module {others[0]} of its {_MODULES_FILE} is not supported"
        if "Pooling" not in modules:
            return f"its {_MODULES_FILE} has no Pooling"
        modes = _pooling_modes(json.loads((modules["Pooling"] / _POOLING_FILE).read_text()))
    except FileNotFoundError as error:
        return f"its folder has no {os.path.relpath(error.filename, folder)}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its {_MODULES_FILE} cannot be read: {type(error).__name__}: {error}"
    if modes == [_LAST_TOKEN]:
        return ""
    return f"its pooling is {', '.join(modes) or 'none'}, and only {_LAST_TOKEN} is supported"


def _pooling_modes(config: dict[str, Any]) -> list[str]:
    """Return the names of the pooling modes that are on, in either form of the file."""
    if _MODE in config:
        return [str(config[_MODE])]
    return [
        name.removeprefix(f"{_MODE}_")
        for name, is_on in config.items()
        if is_on is True and name.startswith(_MODE)
    ]
