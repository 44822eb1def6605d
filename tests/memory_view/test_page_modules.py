"""Pure functions of the page's modules, in node where there is one; and rules for its files."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from sgl_jax.memory_view import MEMORY_PAGE

NODE = shutil.which("node")


@pytest.mark.skipif(NODE is None, reason="needs node")
def test_the_pure_functions_of_the_modules() -> None:
    version = subprocess.run([NODE, "--version"], capture_output=True, text=True, check=True).stdout
    if tuple(map(int, version.strip("v\n").split("."))) < (20, 19):
        pytest.skip("needs a node that loads .js files as modules: 20.19")
    tests = Path(__file__).with_name("page.test.mjs")
    run = subprocess.run([NODE, "--test", tests], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr


def test_no_text_becomes_markup_and_nothing_is_loaded_from_elsewhere() -> None:
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|https?://"
    for file in MEMORY_PAGE.iterdir():
        assert not re.search(forbidden, file.read_text()), file.name
    index = (MEMORY_PAGE / "index.html").read_text()
    assert not re.search(r"\bstyle=|\son\w+=|<style", index)
    assert re.findall(r"<script[^>]*>(.*?)</script>", index) == [""]
