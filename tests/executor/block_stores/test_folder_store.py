"""Blocks in files: found again by the next process, bounded, and never wrong."""

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sgl_jax.executor.block_stores.folder_store import FolderStore

GIGABYTE = 10**9


def key(number: int, fingerprint: str = "ab") -> str:
    return f"{fingerprint}/{number:032x}"


def value(number: int, size: int = 300) -> bytes:
    return random.Random(number).randbytes(size)


def path_of(folder: Path, name: str) -> Path:
    (path,) = folder.glob(f"*/*/{name.split('/')[1]}")
    return path


def test_values_are_found_by_the_next_process(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, GIGABYTE)
    store.put([key(1), key(2)], [value(1), value(2)])
    store.close()
    store = FolderStore(tmp_path, GIGABYTE)
    assert store.exists([key(1), key(2), key(3), key(1, "cd")]) == [True, True, False, False]
    assert store.get([key(2), key(3), key(1)]) == [value(2), None, value(1)]


def test_a_value_that_is_put_twice_counts_once(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, 2 * 350)
    for number in (1, 2, 2):
        store.put([key(number)], [value(number)])
    assert store.get([key(1), key(2)]) == [value(1), value(2)]


def test_an_unfinished_file_is_removed_once_its_writer_must_be_gone(tmp_path: Path) -> None:
    FolderStore(tmp_path, GIGABYTE)
    old, new = tmp_path / "unfinished" / "old", tmp_path / "unfinished" / "new"
    for path in (old, new):
        path.write_bytes(b"half a block")
    os.utime(old, (time.time() - 3600,) * 2)
    FolderStore(tmp_path, GIGABYTE)
    assert not old.exists()
    assert new.exists(), "an engine may be writing it"


def test_one_thread_puts_while_another_one_reads(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, 20 * 350)
    numbers = [random.Random(3).randrange(40) for _ in range(400)]
    with ThreadPoolExecutor(2) as threads:
        jobs = [threads.submit(store.put, [key(n)], [value(n)]) for n in numbers]
        jobs += [threads.submit(store.get, [key(n)]) for n in numbers]  # type: ignore[arg-type]
        assert all(job.result() is None or len(job.result()) == 1 for job in jobs)
    assert store._num_bytes == sum(path.stat().st_size for path in tmp_path.glob("ab/*/*"))


def test_the_least_recently_used_give_way(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, 4 * 350)
    for number in range(4):
        store.put([key(number)], [value(number)])
    time.sleep(0.02)  # the times of files are coarse
    assert store.get([key(0)]) == [value(0)]
    store.put([key(4)], [value(4)])
    assert store.exists([key(number) for number in range(5)]) == [True, False, True, True, True]
    # Also across a restart, by the times of the files, and with less room.
    store.close()
    store = FolderStore(tmp_path, 2 * 350)
    assert store.exists([key(0), key(4)]) == [True, True]
    assert sum(store.exists([key(number) for number in range(5)])) == 2
    store.put([key(5)], [value(5, size=900)])  # it would not fit into the empty store
    assert sum(store.exists([key(number) for number in range(6)])) == 2


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    foreign = tmp_path / "ab" / "notes" / "README.md"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("not ours")
    store = FolderStore(tmp_path, 400)
    for number in range(5):
        store.put([key(number)], [value(number)])
    assert foreign.read_text() == "not ours"


@pytest.mark.parametrize("num_corruptions", [300, pytest.param(10_000, marks=pytest.mark.long)])
def test_a_corrupt_file_is_a_miss(tmp_path: Path, num_corruptions: int) -> None:
    rng = random.Random(5)
    store = FolderStore(tmp_path, GIGABYTE)
    num_missed = 0
    for _ in range(num_corruptions):
        store.put([key(1), key(2)], [value(1), value(2)])
        path, data = path_of(tmp_path, key(1)), bytearray(path_of(tmp_path, key(1)).read_bytes())
        kind = rng.choice(["cut", "grown", "flipped", "zeroed", "another block", "gone"])
        if kind == "cut":
            data = data[: rng.randrange(len(data))]
        elif kind == "grown":
            data += rng.randbytes(rng.randrange(1, 9))
        elif kind == "flipped":
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif kind == "zeroed":
            first = rng.randrange(len(data) - 8)
            data[first : first + 8] = bytes(8)
        elif kind == "another block":
            data = bytearray(path_of(tmp_path, key(2)).read_bytes())
        path.write_bytes(data)
        if kind == "gone":
            path.unlink()
        assert store.get([key(1), key(2)]) == [None, value(2)], kind
        assert store.exists([key(1)]) == [False]
        num_missed += 1
    assert num_missed == num_corruptions


def test_a_process_that_is_killed_leaves_whole_files(tmp_path: Path) -> None:
    writer = textwrap.dedent(
        f"""
        from pathlib import Path
        from sgl_jax.executor.block_stores.folder_store import FolderStore
        from tests.executor.block_stores.test_folder_store import key, value
        store = FolderStore(Path({str(tmp_path)!r}), 10**9)
        print("begun", flush=True)
        for number in range(10**6):
            store.put([key(number)], [value(number, 200_000)])
        """
    )
    with subprocess.Popen(
        [sys.executable, "-c", writer], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        while len(list(tmp_path.glob("ab/*/*"))) < 20:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    store = FolderStore(tmp_path, GIGABYTE)
    found = [number for number in range(10**4) if store.exists([key(number)])[0]]
    assert len(found) >= 20
    assert all(store.get([key(number)]) == [value(number, 200_000)] for number in found)
