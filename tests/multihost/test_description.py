"""Facts that hosts must share: hosts that would compute differently differ in one."""

from sgl_jax.core.server_args import ServerArgs
from sgl_jax.multihost.description import describe_host, differences


def test_heads_are_compared_by_their_files_not_by_their_places(tmp_path):
    def facts(place, weights):
        folder = tmp_path / place
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(weights)
        return describe_host(
            ServerArgs(
                model_path=str(tmp_path),
                speculative_algorithm="EAGLE3",
                speculative_draft_model_path=str(folder),
            )
        )

    own = facts("here", b"weights")
    assert differences(own, facts("there", b"weights")) == []
    (found,) = differences(own, facts("elsewhere", b"others"))
    assert found.startswith("weights of the draft model is")


def test_the_quantization_is_compared_wherever_it_is_written(tmp_path):
    own = describe_host(ServerArgs(model_path=str(tmp_path)))
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    (found,) = differences(own, describe_host(ServerArgs(model_path=str(tmp_path))))
    assert found.startswith("hf_quant_config.json is")
