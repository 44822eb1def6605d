"""Blocks in files: found again by the next process, bounded, and never wrong."""

import contextlib
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sgl_jax.executor.block_stores import folder_store
from sgl_jax.executor.block_stores.block_store import HEAD_BYTES, StoreBusyError
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


@pytest.mark.parametrize(("num_values", "num_locks"), [(0, 0), (1, 1), (4, 1), (5, 2), (12, 3)])
def test_the_values_of_a_put_share_locks_of_bounded_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_values: int, num_locks: int
) -> None:
    store = FolderStore(tmp_path, GIGABYTE)
    lock, locked_files = folder_store._lock, list[int]()

    def counted_lock(file: int) -> bool:
        locked_files.append(file)
        return lock(file)

    monkeypatch.setattr(folder_store, "_LOCKED_BYTES", 4 * (300 + HEAD_BYTES))
    monkeypatch.setattr(folder_store, "_lock", counted_lock)
    keys, values = zip(*((key(i), value(i)) for i in range(12)), strict=True)
    store.put(keys[:num_values], values[:num_values])
    assert len(locked_files) == num_locks
    assert store.get(keys) == [*values[:num_values], *(12 - num_values) * [None]]
    assert int((tmp_path / "size").read_bytes()) == size_of(tmp_path)


def test_of_a_put_larger_than_the_store_the_last_values_stay(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, 4 * (300 + HEAD_BYTES))
    keys, values = [key(i) for i in range(7)], [value(i) for i in range(7)]
    values[2] = value(2, 2_000)  # larger than the store
    store.put(keys, values)
    assert store.get(keys) == [None, None, None, *values[3:]]
    assert int((tmp_path / "size").read_bytes()) == size_of(tmp_path)


def size_of(folder: Path) -> int:
    """The bytes of all blocks in a folder, the unfinished ones included."""
    files = [*folder.glob("*/*/*"), *folder.glob("unfinished/*")]
    sizes = []
    for path in files:
        with contextlib.suppress(FileNotFoundError):  # removed by an engine that runs
            sizes.append(path.stat().st_size)
    return sum(sizes)


def test_two_stores_in_a_folder_share_its_limit(tmp_path: Path) -> None:
    stores = [FolderStore(tmp_path, 1_000_000) for _ in range(2)]
    for number in range(60):
        stores[number % 2].put([key(number)], [value(number, 50_000)])
        assert size_of(tmp_path) <= 1_000_000
    # What was used last is there, whoever wrote it.
    found = [stores[0].exists([key(number)])[0] for number in range(60)]
    assert found == [False] * 41 + [True] * 19


def test_two_processes_in_a_folder_share_its_limit(tmp_path: Path) -> None:
    writer = textwrap.dedent(
        f"""
        import sys
        from pathlib import Path
        from sgl_jax.executor.block_stores.folder_store import FolderStore
        from tests.executor.block_stores.test_folder_store import key, value
        store = FolderStore(Path({str(tmp_path)!r}), 1_000_000)
        first = int(sys.argv[1])
        for number in range(first, first + 300):
            store.put([key(number)], [value(number, 20_000)])
            (found,) = store.get([key(number)])
            assert found in (None, value(number, 20_000))
        """
    )
    command = [sys.executable, "-c", writer]
    processes = [subprocess.Popen([*command, str(first)]) for first in (0, 200)]
    while any(process.poll() is None for process in processes):
        assert size_of(tmp_path) <= 1_000_000
    assert [process.returncode for process in processes] == [0, 0]
    assert 900_000 < size_of(tmp_path) <= 1_000_000
    assert int((tmp_path / "size").read_bytes()) == size_of(tmp_path)


@pytest.mark.parametrize("damage", [b"", b"x" * 20, b"0" * 19, b"-" + b"1" * 19])
def test_a_damaged_count_is_measured_anew(tmp_path: Path, damage: bytes) -> None:
    store = FolderStore(tmp_path, 4 * 350)
    for number in range(4):
        store.put([key(number)], [value(number)])
    (tmp_path / "size").write_bytes(damage)
    for number in range(4, 9):
        store.put([key(number)], [value(number)])
        assert size_of(tmp_path) <= 4 * 350


def test_a_failed_write_leaves_nothing_uncounted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderStore(tmp_path, 4 * 350)
    for number in range(3):
        store.put([key(number)], [value(number)])
    with monkeypatch.context() as patch:

        def fail(*_: object) -> None:
            raise OSError("no space left")

        patch.setattr(Path, "replace", fail)
        for number in (1, 5):  # also in place of another
            with pytest.raises(OSError, match="no space"):
                store.put([key(number)], [value(number)])
    assert int((tmp_path / "size").read_bytes()) == size_of(tmp_path)
    for number in range(9):
        store.put([key(number)], [value(number)])
        assert size_of(tmp_path) <= 4 * 350
    assert store.get([key(8)]) == [value(8)]


def test_a_put_that_fails_in_the_middle_counts_what_it_has_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderStore(tmp_path, GIGABYTE)
    replace, paths = Path.replace, []

    def fail_third(path: Path, target: Path) -> Path:
        paths.append(path)
        if len(paths) == 3:
            raise OSError("no space left")
        return replace(path, target)

    keys, values = [key(i) for i in range(5)], [value(i) for i in range(5)]
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fail_third)
        with pytest.raises(OSError, match="no space"):
            store.put(keys, values)
    assert store.get(keys) == [*values[:2], None, None, None]
    assert int((tmp_path / "size").read_bytes()) == size_of(tmp_path)


def test_an_engine_that_is_killed_in_a_write_leaves_nothing_uncounted(tmp_path: Path) -> None:
    writer = textwrap.dedent(
        f"""
        import os, signal
        from pathlib import Path
        from sgl_jax.executor.block_stores.folder_store import FolderStore
        from tests.executor.block_stores.test_folder_store import key, value
        store = FolderStore(Path({str(tmp_path)!r}), 1_000_000)
        for number in range(4):
            store.put([key(number)], [value(number, 200_000)])
        Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        store.put([key(9)], [value(9, 150_000)])
        """
    )
    store = FolderStore(tmp_path, 1_000_000)
    assert subprocess.run([sys.executable, "-c", writer], check=False).returncode == -9
    assert len(list((tmp_path / "unfinished").iterdir())) == 1
    for number in range(10, 20):  # by an engine that runs on
        store.put([key(number)], [value(number, 90_000)])
        assert size_of(tmp_path) <= 1_000_000
    FolderStore(tmp_path, 1_000_000)
    assert not list((tmp_path / "unfinished").iterdir())
    assert int((tmp_path / "size").read_bytes()) == size_of(tmp_path)


def test_an_engine_that_holds_the_lock_for_ever_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderStore(tmp_path, GIGABYTE)
    store.put([key(1)], [value(1)])
    monkeypatch.setattr(folder_store, "_LOCK_LIMIT_S", 0.01)
    with store._count():
        with pytest.raises(StoreBusyError, match=str(tmp_path)):
            store.put([key(2)], [value(2)])
        path = path_of(tmp_path, key(1))
        other = FolderStore(tmp_path, GIGABYTE)
        assert other.get([key(1), key(2)]) == [value(1), None]
        path.write_bytes(b"no block")
        assert other.get([key(1)]) == [None]
    other.put([key(2)], [value(2)])
    assert other.get([key(1), key(2)]) == [None, value(2)]


def test_another_engine_puts_during_a_long_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_store, "_LOCKED_BYTES", 1)
    monkeypatch.setattr(folder_store, "_LOCK_LIMIT_S", 0.2)
    written, put_part = threading.Event(), FolderStore._put

    def put_slowly(self: FolderStore, part: dict[str, bytes], count: Any) -> None:
        put_part(self, part, count)
        written.set()
        time.sleep(0.02)

    monkeypatch.setattr(FolderStore, "_put", put_slowly)
    busy, other = FolderStore(tmp_path, GIGABYTE), FolderStore(tmp_path, GIGABYTE)
    with ThreadPoolExecutor(1) as pool:
        numbers = range(25)
        long = pool.submit(busy.put, [key(n) for n in numbers], [value(n) for n in numbers])
        assert written.wait(10)
        other.put([key(100)], [value(100)])
        assert not long.done()
        long.result()
    assert all(other.exists([*(key(n) for n in numbers), key(100)]))


def test_one_thread_puts_while_another_one_reads(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, 20 * 350)
    numbers = [random.Random(3).randrange(40) for _ in range(400)]
    with ThreadPoolExecutor(2) as threads:
        jobs = [threads.submit(store.put, [key(n)], [value(n)]) for n in numbers]
        jobs += [threads.submit(store.get, [key(n)]) for n in numbers]  # type: ignore[arg-type]
        assert all(job.result() is None or len(job.result()) == 1 for job in jobs)
    assert int((tmp_path / "size").read_bytes()) == size_of(tmp_path) <= 20 * 350


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
