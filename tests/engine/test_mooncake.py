"""Two engines and Mooncake's store, for real: needs `mooncake_master` and Mooncake's client."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sgl_jax.engine.offline import Engine
from tests.engine.test_block_store import ask, settings_with
from tests.engine.test_host_memory import GOLDEN, conversations, is_moving
from tests.live.live_server import free_port
from tests.support.waiting import until

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("mooncake_master") is None, reason="no mooncake_master"),
]


@pytest.fixture
def master() -> Iterator[tuple["subprocess.Popen[bytes]", str]]:
    """A master that serves metadata, too, and the settings of its clients."""
    rpc, http, metrics = free_port(), free_port(), free_port()
    command = [
        *("mooncake_master", f"--rpc_port={rpc}", f"--metrics_port={metrics}"),
        *("--enable_http_metadata_server=true", f"--http_metadata_server_port={http}"),
        "--http_metadata_server_host=127.0.0.1",
    ]
    settings = {
        "metadata_server": f"http://127.0.0.1:{http}/metadata",
        "master_server_address": f"127.0.0.1:{rpc}",
        "global_segment_size": 64 << 20,
        "local_buffer_size": 64 << 20,
    }
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        yield process, json.dumps(settings)
        process.kill()


def test_a_second_engine_finds_the_first_ones_prefixes_and_outlives_the_master(
    tmp_path: Path, master: tuple["subprocess.Popen[bytes]", str]
) -> None:
    process, extra = master
    settings = settings_with(
        tmp_path,
        GOLDEN / "qwen3",
        hicache_storage_backend="mooncake",
        hicache_storage_backend_extra_config=extra,
        hicache_storage_dir=None,
    )
    with Engine(**settings) as first, Engine(**settings) as second:
        prompts = [talk[0] for talk in conversations(first.info["vocab_size"])]
        ask(first, prompts)
        until(lambda: not is_moving(first), "transfers end")
        longer = [[*prompt, 5] for prompt in prompts]
        expected, found = ask(first, longer), ask(second, longer)
        assert second.server_info()["counters"]["store_loaded_tokens"] > 500
        assert found == expected
        process.kill()
        process.wait()
        # Serving goes on: the store fails, and prompts are computed.
        new = [[*prompt[::-1], 7] for prompt in prompts]
        assert [len(answer[0]) for answer in ask(second, new)] == [8] * len(new)
