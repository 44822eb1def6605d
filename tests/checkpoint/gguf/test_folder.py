"""A GGUF file becomes a model folder once, which only its user can write."""

import os
import shutil
from pathlib import Path

import pytest

from sgl_jax.checkpoint.gguf.folder import model_folder
from tests.checkpoint.gguf.gguf_files import write_gguf


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sgl_jax" / "gguf"


@pytest.fixture
def file(tmp_path):
    return write_gguf("qwen3", tmp_path / "Tiny-1M.Q8_0.gguf")


def test_the_folder_has_the_files_name_and_a_link_to_it(file, cache):
    folder = Path(model_folder(str(file)))
    assert folder.name == "Tiny-1M.Q8_0"  # names the model in the API
    assert folder.parent.parent == cache
    assert sorted(path.name for path in folder.iterdir()) == [
        *("config.json", "model.gguf", "tokenizer.json", "tokenizer_config.json")
    ]
    assert (folder / "model.gguf").resolve() == file
    for path in (cache, folder.parent, folder):
        assert path.stat().st_mode & 0o777 == 0o700


def test_the_folder_is_written_once(file):
    folder = Path(model_folder(str(file)))
    before = (folder / "config.json").stat()
    assert model_folder(str(file)) == str(folder)
    assert (folder / "config.json").stat().st_ino == before.st_ino


def test_a_file_that_changed_has_a_new_folder(file):
    folder = model_folder(str(file))
    os.utime(file, ns=(1, 1))
    assert model_folder(str(file)) != folder


def test_two_processes_that_write_it_at_once_get_the_same(file, monkeypatch):
    folder = Path(model_folder(str(file)))
    seen = []
    is_dir = Path.is_dir

    def first_time_absent(path):
        seen.append(path)
        return is_dir(path) and (path != folder or seen.count(folder) > 1)

    monkeypatch.setattr(Path, "is_dir", first_time_absent)
    assert model_folder(str(file)) == str(folder)
    assert seen.count(folder) == 2


def test_a_folder_with_one_file_and_no_config_is_that_file(file, tmp_path):
    assert model_folder(str(tmp_path)) == model_folder(str(file))
    shutil.copy(file, tmp_path / "second.gguf")
    with pytest.raises(ValueError, match=r"several models; name one of Tiny-1M.Q8_0.gguf, second"):
        model_folder(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert model_folder(str(tmp_path)) == str(tmp_path)


@pytest.mark.parametrize("path", ["models/demo", "absent", "absent.gguf", "qwen3-8b", ""])
def test_other_paths_stay_as_they_are(path):
    assert model_folder(path) == path


def test_a_cache_that_others_can_write_is_refused(file, cache):
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    with pytest.raises(PermissionError, match="not be writable by others"):
        model_folder(str(file))
