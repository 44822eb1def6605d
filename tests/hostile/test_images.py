"""Hostile images get a clear answer each; the server keeps neither their memory nor their time."""

import base64
import json
from collections.abc import Iterator

import pytest

from tests.hostile.attacks import CHAT, Attack, chat, resist
from tests.hostile.hostile_server import HostileServer, hostile_server
from tests.hostile.image_files import hostile_files
from tests.support.images import data_uri, image_file, save_image_model

pytestmark = pytest.mark.long

NUM_FILES = 500


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostileServer]:
    folder = tmp_path_factory.mktemp("hostile_images")
    with hostile_server(
        folder, save_image_model(folder / "model"), "--enable-multimodal"
    ) as server:
        assert see(server, image_file("red")) == (200, "")
        yield server
        assert see(server, image_file("red")) == (200, "")
        assert "Traceback" not in server.log.read_text()


def see(server: HostileServer, file: bytes) -> tuple[int, str]:
    """The status of a chat with this image, and the code of the error."""
    part = {"type": "image_url", "image_url": {"url": data_uri(file)}}
    status, answer = server.post(CHAT, chat([part]))
    return status, "" if status == 200 else json.loads(answer)["error"]["code"]


def test_hostile_images_harm_no_one(server: HostileServer) -> None:
    seen: list[tuple[int, str]] = []

    def attack(server: HostileServer) -> list[int]:
        seen[:] = [see(server, file) for file in hostile_files(NUM_FILES)]
        return [status for status, _ in seen]

    resist(server, Attack("hostile images", attack, (200, 400)))
    assert {code for status, code in seen if status == 400} == {"invalid_image"}
    assert sum(status == 400 for status, _ in seen) > NUM_FILES // 2


def test_a_body_of_images_is_refused_by_its_length(server: HostileServer) -> None:
    part = {"type": "image_url", "image_url": {"url": base64.b64encode(bytes(2**20)).decode()}}
    status, _ = server.post(CHAT, chat([part] * 30))
    assert status == 413
