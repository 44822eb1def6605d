"""A model folder for a GGUF file: its config, its tokenizer, and a link to the file.

All processes of a server then read an ordinary folder. It is kept in the user's cache, so that the
vocabulary is converted once.
"""

import json
import os
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

from sgl_jax.core.private_files import check_private_folder, make_private_folder, user_cache_folder

GGUF_SUFFIX = ".gguf"
GGUF_FILE = f"model{GGUF_SUFFIX}"  # the link in a model folder
_VERSION = 1  # of the folder's contents; another makes new folders


def model_folder(model_path: str) -> str:
    """Return the folder of a GGUF file, or of the one in a folder without a config.json.

    Another path is returned as it is. The last part of the returned path is the file's name.

    Raises:
        GgufError: the file is damaged, incomplete or unsupported.
        OSError: the folder cannot be written, or other users can write to the cache.
    """
    file = _gguf_file(Path(model_path))
    if file is None:
        return model_path
    status = file.stat()
    facts = f"{file.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\0{_VERSION}"
    cache = user_cache_folder("gguf")
    make_private_folder(cache)
    check_private_folder(cache)
    parent = cache / sha256(facts.encode()).hexdigest()[:16]
    folder = parent / file.stem
    if not folder.is_dir():
        with TemporaryDirectory(dir=cache) as made:
            _write(file.resolve(), Path(made, file.stem))
            make_private_folder(parent)
            try:
                os.rename(Path(made, file.stem), folder)
            except OSError:
                if not folder.is_dir():  # else another process was faster
                    raise
    return str(folder)


def _gguf_file(path: Path) -> Path | None:
    if path.is_file() and path.suffix == GGUF_SUFFIX:
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(path.glob(f"*{GGUF_SUFFIX}"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ValueError(f"{str(path)!r} holds several models; name one of {names}")
    return files[0] if files else None


def _write(file: Path, folder: Path) -> None:
    # Imported here: a server of another format needs neither the readers nor the tokenizers.
    from sgl_jax.checkpoint.gguf.config import hf_config
    from sgl_jax.checkpoint.gguf.header import GgufError, read_header
    from sgl_jax.checkpoint.gguf.tokenizer import write_tokenizer

    folder.mkdir(mode=0o700)
    header = read_header(file)
    try:
        config = hf_config(header)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        write_tokenizer(header, folder)
    except (GgufError, OSError):
        raise
    # Any key may have a value of any type, and the tokenizers' library raises any error.
    except Exception as error:
        reason = " ".join(str(error).split())
        raise GgufError(f"{str(file)!r} has wrong metadata: {reason}") from error
    (folder / GGUF_FILE).symlink_to(file)
