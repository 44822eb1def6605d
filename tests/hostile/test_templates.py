"""A model's chat template that does not end, or takes all memory, harms only who meets it."""

import threading
import time
from pathlib import Path

import psutil
import pytest

from tests.hostile.attacks import CHAT, GENERATE, chat, prompts
from tests.hostile.hostile_server import assert_unharmed, hostile_server
from tests.support.tokenizers import TEMPLATE, byte_level, save

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
FILL = "{{ 'a' * 10**11 }}"
STOP_S = 15.0  # drain and kill


@pytest.mark.long
@pytest.mark.parametrize(
    ("program", "status"),
    [
        pytest.param(LOOP, 503, id="loop"),
        pytest.param(FILL, 400, id="fill", marks=pytest.mark.long),
    ],
)
def test_the_server_goes_on_and_stops_when_told(program: str, status: int, tmp_path: Path) -> None:
    template = tmp_path / "bad.jinja"
    template.write_text(
        "{% if messages[0].content == 'bad' %}" + program + "{% endif %}" + TEMPLATE
    )
    model = save(byte_level(), tmp_path / "model")
    flags = ("--chat-template", str(template), "--drain-timeout", "1")
    with hostile_server(tmp_path, model, *flags) as server:
        assert server.post(CHAT, chat("good"))[0] == 200

        def run() -> None:
            assert server.post(CHAT, chat("bad"))[0] == status

        assert_unharmed(server, "template", run)
        assert server.post(CHAT, chat("good"))[0] == 200

        # Told to stop while templates loop, it stops.
        for _ in range(4):
            threading.Thread(target=server.post, args=(CHAT, chat("bad")), daemon=True).start()
        time.sleep(0.5)
        family = psutil.Process(server.process.pid).children(recursive=True)
        start = time.monotonic()
        server.process.terminate()
        assert server.process.wait(STOP_S * 2) == 0, server.log.read_text()[-2000:]
        assert time.monotonic() - start < STOP_S
        _, alive = psutil.wait_procs(family, timeout=STOP_S)
        assert not alive


@pytest.mark.long
def test_long_prompts_of_one_client_do_not_delay_anothers(tmp_path: Path) -> None:
    """Clients with keys of their own: one sends long lists, the other asks for short chats."""
    keys = tmp_path / "keys"
    keys.write_text("greedy g\nmodest m\n")
    model = save(byte_level(), tmp_path / "model")
    flags = ("--api-key-file", str(keys), "--context-length", "65536")
    greedy, modest = ({"authorization": f"Bearer {key}"} for key in "gm")
    with hostile_server(tmp_path, model, *flags) as server:
        assert server.post(CHAT, chat("hi"), modest)[0] == 200
        body = prompts("hello there " * 900, 500)
        threads = [
            threading.Thread(target=server.post, args=(GENERATE, body, greedy)) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        waits = []
        while any(thread.is_alive() for thread in threads) and len(waits) < 100:
            start = time.monotonic()
            assert server.post(CHAT, chat("hi"), modest)[0] == 200
            waits.append(time.monotonic() - start)
        for thread in threads:
            thread.join()
        print(f"{len(waits)} chats, the longest took {max(waits):.3f} s")
        assert len(waits) > 3
        assert max(waits) < 1.0
