"""Checkpoints arrive whole, in their sharding, or every problem is named."""

import json
import shutil
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax.nnx.traversals import flatten_mapping
from jax.sharding import Mesh
from safetensors.numpy import load_file, save_file

from sgl_jax.checkpoint.convert import convert
from sgl_jax.checkpoint.errors import CheckpointError
from sgl_jax.checkpoint.finite import non_finite_parameters
from sgl_jax.checkpoint.hf_loading import aligned
from sgl_jax.checkpoint.loading import detect_format, load_params
from sgl_jax.checkpoint.stored_head import with_stored_head
from sgl_jax.core.progress import Progress
from sgl_jax.models.architecture import BuildOptions
from sgl_jax.models.config import ModelConfig
from sgl_jax.models.expert_placement import place_experts
from sgl_jax.models.placement import place_model
from tests.support.embedding_models import save_base_model, write_modules
from tests.support.long import long

GOLDEN = Path(__file__).parents[1] / "golden"


def load(folder, dp=1, tp=1, *, load_format=None, shards_weights=False, placement=None, **options):
    mesh = Mesh(np.array(jax.devices()[: dp * tp]).reshape(dp, tp), ("data", "tensor"))
    built = BuildOptions(jnp.float32, shards_weights=shards_weights)
    if placement is not None:
        built = built._replace(placement=placement, ep_size=dp * tp, tp_size=tp)
    placed = place_model(ModelConfig.from_path(folder), mesh, built)
    return flatten_mapping(
        load_params(placed, folder, load_format or detect_format(folder), **options)
    )


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for path, array in expected.items():
        np.testing.assert_array_equal(np.asarray(actual[path]), np.asarray(array), str(path))


@pytest.fixture
def qwen3(tmp_path):
    """A writable copy of a small model, and its tensors."""
    folder = tmp_path / "qwen3"
    shutil.copytree(GOLDEN / "qwen3", folder)
    return folder, load_file(folder / "model.safetensors")


def test_q_k_and_v_lie_side_by_side_for_each_kv_head(qwen3):
    folder, tensors = qwen3
    qkv = np.asarray(load(folder)["layers", "0", "attention", "qkv", "weight"])
    assert qkv.shape == (2, 64, 2 * 4 * 32)
    qkv = qkv.reshape(2, 64, 2, 4, 32)
    prefix = "model.layers.1.self_attn"
    q, k, v = (tensors[f"{prefix}.{name}_proj.weight"] for name in "qkv")
    np.testing.assert_array_equal(qkv[1, :, 1, 1], q[3 * 32 : 4 * 32].T)  # second head's second
    np.testing.assert_array_equal(qkv[1, :, 1, 2], k[32:].T)
    np.testing.assert_array_equal(qkv[1, :, 0, 3], v[:32].T)


def test_on_a_cpu_each_layers_matrices_are_arrays_of_their_own(qwen3):
    folder, _ = qwen3
    stacked = load(folder)["layers", "0", "mlp", "down", "weight"]
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "tensor"))
    built = BuildOptions(jnp.float32, separates_layers=True)
    placed = place_model(ModelConfig.from_path(folder), mesh, built)
    params = load_params(placed, folder, detect_format(folder))
    for layer, down in enumerate(params["layers"]["0"]["mlp"]["down"]["weight"]):
        np.testing.assert_array_equal(np.asarray(down), np.asarray(stacked)[layer])


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_weight_that_is_no_number_is_named_with_its_file(qwen3, value, tp):
    folder, tensors = qwen3
    name = "model.layers.1.self_attn.v_proj.weight"
    tensors[name][3, 5] = value
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"'{name}' in '.*model\.safetensors' holds values"):
        load(folder, tp=tp)


@pytest.mark.parametrize("layer", [0, 1])
def test_of_a_large_parameter_a_sample_is_looked_at_in_every_layer(layer):
    large = np.zeros((2, 4096, 256), np.float32)
    large[layer, 32] = np.nan
    assert non_finite_parameters({("a", "b"): large}, check_all=False) == [("a", "b")]
    large[layer, 32], large[layer, 33, 5] = 0, np.inf
    assert non_finite_parameters({("a", "b"): large}, check_all=False) == []
    assert non_finite_parameters({("a", "b"): large}, check_all=True) == [("a", "b")]


def test_a_weight_of_an_orbax_checkpoint_that_is_no_number_is_named(qwen3, tmp_path, monkeypatch):
    folder, tensors = qwen3
    tensors["model.norm.weight"][0] = np.nan
    save_file(tensors, folder / "model.safetensors")
    with monkeypatch.context() as unchecked:
        unchecked.setattr(
            "sgl_jax.checkpoint.hf_loading.non_finite_parameters", lambda params, check_all: []
        )
        convert(folder, tmp_path / "orbax", "float32")
    with pytest.raises(CheckpointError, match=r"norm/weight in '.*orbax_params_2' holds values"):
        load(tmp_path / "orbax")


def test_each_chip_holds_its_part_only(qwen3):
    folder, _ = qwen3
    params = load(folder, dp=2, tp=2, shards_weights=True)
    down = params["layers", "0", "mlp", "down", "weight"]
    assert {shard.data.shape for shard in down.addressable_shards} == {(2, 48, 32)}
    embedding = params["embedding", "weight"]
    assert {shard.data.shape for shard in embedding.addressable_shards} == {(125, 64)}


def test_kv_heads_are_copied_to_the_chips_that_need_them(qwen3):
    folder, _ = qwen3
    one, four = load(folder), load(folder, tp=4)
    qkv, copied = (np.asarray(p["layers", "0", "attention", "qkv", "weight"]) for p in (one, four))
    assert copied.shape == (2, 64, 4 * 3 * 32)
    qkv, copied = qkv.reshape(2, 64, 2, 4, 32), copied.reshape(2, 64, 4, 3, 32)
    for head in range(4):
        np.testing.assert_array_equal(copied[:, :, head, 0], qkv[:, :, head // 2, head % 2])
        np.testing.assert_array_equal(copied[:, :, head, 1:], qkv[:, :, head // 2, 2:])


def test_the_vocabulary_is_padded_with_zeros(qwen3):
    folder, tensors = qwen3
    embedding = np.asarray(load(folder, tp=4)["embedding", "weight"])
    np.testing.assert_array_equal(embedding[:250], tensors["model.embed_tokens.weight"])
    assert embedding.shape == (252, 64)
    assert not embedding[250:].any()


@pytest.mark.parametrize("stored", [ml_dtypes.bfloat16, np.float16])
def test_half_precision_is_cast_to_the_wanted_type(qwen3, stored):
    folder, tensors = qwen3
    halves = {name: tensor.astype(stored) for name, tensor in tensors.items()}
    save_file(halves, folder / "model.safetensors")
    down = load(folder)["layers", "0", "mlp", "down", "weight"]
    assert down.dtype == jnp.float32
    expected = halves["model.layers.0.mlp.down_proj.weight"].astype(np.float32).T
    np.testing.assert_array_equal(np.asarray(down)[0], expected)


@pytest.fixture
def packed(tmp_path):
    """A writable copy of a small model with experts in MXFP4, and its tensors."""
    folder = tmp_path / "packed"
    shutil.copytree(GOLDEN / "gpt_oss_mxfp4", folder)
    return folder, load_file(folder / "model.safetensors")


DOWN = "model.layers.1.mlp.experts.down_proj"


def test_packed_experts_stay_packed(packed):
    folder, tensors = packed
    params = load(folder, tp=2)
    values, scales = (
        params["layers", "1", "mlp", "down", "weight", x] for x in ("values", "scales")
    )
    assert (values.dtype, scales.dtype) == (jnp.int4, jnp.uint8)
    assert {shard.data.shape for shard in values.addressable_shards} == {(2, 5, 32, 32)}
    assert {shard.data.shape for shard in scales.addressable_shards} == {(2, 5, 1, 32)}
    stored = tensors[f"{DOWN}_scales"][3].T
    np.testing.assert_array_equal(np.asarray(scales)[0, 3, : len(stored)], stored)


def test_bytes_are_taken_for_packed_experts_alone(packed, qwen3):
    folder, tensors = packed
    tensors[f"{DOWN}_blocks"] = tensors[f"{DOWN}_blocks"].astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"'{DOWN}_blocks' has type F32; supported: U8"):
        load(folder)
    folder, tensors = qwen3
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.uint8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"'model\.norm\.weight' has type U8; supported: BF16"
    ):
        load(folder)


def test_a_scale_that_stands_for_no_number_is_noticed(packed):
    folder, tensors = packed
    tensors[f"{DOWN}_scales"][2, 1, 0] = 255
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"down.*scales that are no finite numbers"):
        load(folder)


def test_several_files_are_read_as_one(qwen3):
    folder, tensors = qwen3
    whole = load(folder)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_same(load(folder), whole)
    (folder / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"missing: \['b.safetensors'\]"):
        load(folder)


def test_wrong_tensors_are_named_in_one_line(qwen3):
    folder, tensors = qwen3
    del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.mlp.surprise"] = np.zeros(3, np.float32)
    tensors["lm_head.weight"] = np.zeros((7, 64), np.float32)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert str(caught.value) == (
        f"4 tensors in {str(folder)!r} do not match config.json: "
        "lm_head.weight has shape [7, 64] instead of [250, 64]; "
        "model.layers.0.mlp.surprise is unexpected; "
        "model.layers.1.mlp.up_proj.weight is missing; "
        "model.norm.weight is missing"
    )
    for i in range(20):
        tensors[f"surprise.{i}"] = np.zeros(3, np.float32)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"^24 tensors in .*; and 16 more$"):
        load(folder)


def test_harmless_extras_are_tolerated(tmp_path):
    folder = tmp_path / "tied"
    shutil.copytree(GOLDEN / "qwen2", folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
    save_file(tensors, folder / "model.safetensors")
    assert_same(load(folder), load(GOLDEN / "qwen2"))


def test_a_damaged_file_is_named(qwen3):
    folder, _ = qwen3
    (folder / "model.safetensors").write_bytes(b"not a tensor in sight")
    with pytest.raises(CheckpointError, match=r"cannot read .*model\.safetensors"):
        load(folder)


def test_a_folder_without_weights_is_refused(qwen3):
    folder, _ = qwen3
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="neither"):
        load(folder)


@pytest.mark.parametrize(
    "family",
    [
        *("qwen3_moe_mixed", "gpt_oss_mxfp4"),
        *long("qwen2", "qwen3_moe", "gemma3", "gpt_oss", "deepseek_v3", "gemma4", "gemma4_moe"),
    ],
)
def test_an_orbax_checkpoint_holds_the_same_for_any_mesh(tmp_path, family):
    output = tmp_path / "converted"
    convert(GOLDEN / family, output, "float32")
    assert (output / "config.json").is_file()
    assert not list(output.glob("*.safetensors"))
    for dp, tp, shards_weights in ((1, 1, False), (2, 2, True), (1, 4, False)):
        expected = load(GOLDEN / family, dp, tp, shards_weights=shards_weights)
        actual = load(output, dp, tp, shards_weights=shards_weights)
        assert_same(actual, expected)
        for path, array in expected.items():
            assert actual[path].sharding == array.sharding


def test_a_head_that_differs_from_tied_embeddings_is_converted(tmp_path, qwen3):
    folder, tensors = qwen3
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    convert(folder, tmp_path / "orbax", "float32")
    head = load(tmp_path / "orbax")["lm_head", "weight"]
    np.testing.assert_array_equal(np.asarray(head), tensors["lm_head.weight"].T)


@pytest.mark.parametrize("change", ["none", "type", "last", "rows"])
def test_stored_heads_are_compared_with_tied_embeddings(tmp_path, change, monkeypatch, caplog):
    monkeypatch.setattr("sgl_jax.checkpoint.stored_head._BLOCK_NUMBERS", 1000)
    folder = tmp_path / "tied"
    shutil.copytree(GOLDEN / "qwen2", folder)
    tensors = load_file(folder / "model.safetensors")
    halves = tensors["model.embed_tokens.weight"].astype(np.float16)
    head = halves.copy() if change == "type" else halves.astype(np.float32)
    if change == "last":
        head[-1, -1] += 1
    tensors |= {"model.embed_tokens.weight": halves.astype(np.float32)}
    tensors |= {"lm_head.weight": head[:-1].copy() if change == "rows" else head}
    save_file(tensors, folder / "model.safetensors")
    found = with_stored_head(ModelConfig.from_path(folder), folder, "safetensors")
    assert found.tie_word_embeddings == (change in ("none", "type"))
    assert ("lm_head.weight differs" in caplog.text) != found.tie_word_embeddings


def load_stored(folder):
    """The weights of a folder, with the head that its files call for."""
    config = with_stored_head(ModelConfig.from_path(folder), folder, "safetensors")
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "tensor"))
    placed = place_model(config, mesh, BuildOptions(jnp.float32))
    return flatten_mapping(load_params(placed, folder, "safetensors"))


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3Model"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_an_embedding_model_is_loaded_without_a_head(tmp_path, is_tied, architecture):
    changes = {"tie_word_embeddings": is_tied, "architectures": [architecture]}
    folder = save_base_model(tmp_path / "base", **changes)
    write_modules(folder)
    expected = load(GOLDEN / "qwen3")
    del expected["lm_head", "weight"]
    assert_same(load_stored(folder), expected)
    convert(folder, tmp_path / "orbax", "float32")
    assert_same(load(tmp_path / "orbax"), expected)
    assert (tmp_path / "orbax" / "1_Pooling" / "config.json").is_file()


def test_a_base_model_is_no_model_of_text(tmp_path):
    folder = save_base_model(tmp_path / "base")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
        load_stored(folder)


def four_experts(folder, family):
    """A copy of a model of five experts without the last."""
    shutil.copytree(GOLDEN / family, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_local_experts": 4}))
    tensors = load_file(folder / "model.safetensors")
    kept = {
        name: tensor[:4] if "mlp.gate." in name or name.endswith("experts.gate_up_proj") else tensor
        for name, tensor in tensors.items()
        if "experts.4." not in name
    }
    save_file(kept, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("num_copies", [0, 2])
@pytest.mark.parametrize("load_format", ["safetensors", "orbax"])
@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (2, 1)])
def test_placed_experts_lie_in_their_slots(tmp_path, load_format, num_copies, dp, tp):
    folder = given = four_experts(tmp_path / "given", "qwen3_moe")
    loads = np.array([[1, 2, 3, 9], [9, 2, 1, 1]])
    placement = place_experts(loads, num_copies, 2)
    if load_format == "orbax":
        folder = tmp_path / "orbax"
        convert(given, folder, "float32")
    plain = load(given)
    placed = load(folder, dp, tp, placement=placement)
    for path, array in placed.items():
        own, wanted = np.asarray(array), np.asarray(plain[path])
        if path[-2] in ("gate", "up", "down"):
            assert own.shape[1] == 4 + num_copies
            wanted = np.stack([wanted[n][list(placement.experts[n])] for n in range(2)])
            assert array.sharding.spec[1] == ("tensor" if tp > 1 else ("data", "tensor"))
        if path != ("embedding", "weight") and path != ("lm_head", "weight"):
            np.testing.assert_array_equal(own, wanted, str(path))


def test_an_orbax_checkpoint_of_another_config_is_refused(tmp_path):
    output = tmp_path / "converted"
    convert(GOLDEN / "qwen3", output, "float32")
    shutil.copyfile(GOLDEN / "llama" / "config.json", output / "config.json")
    with pytest.raises(CheckpointError, match=r"layers/0/attention/q_norm/weight is unexpected"):
        load(output)


def test_an_orbax_checkpoint_of_an_earlier_format_is_to_be_converted_again(tmp_path):
    shutil.copyfile(GOLDEN / "llama" / "config.json", tmp_path / "config.json")
    (tmp_path / "orbax_params").mkdir()
    with pytest.raises(CheckpointError, match=r"no orbax_params_2 folder .* converted again"):
        load(tmp_path)


def test_converting_onto_an_existing_folder_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="exists already"):
        convert(GOLDEN / "qwen3", tmp_path, "float32")


def test_dummy_weights_are_random_and_do_not_depend_on_the_mesh():
    one = load(GOLDEN / "llama", load_format="dummy", seed=5)
    two = load(GOLDEN / "llama", tp=2, load_format="dummy", seed=5)
    assert_same(two, one)
    down = np.asarray(one["layers", "0", "mlp", "down", "weight"])
    assert 0.1 < down.std() < 0.2  # the config's initializer_range is 0.15
    assert np.all(np.asarray(one["norm", "weight"]) == 1)
    from_one = load(GOLDEN / "gemma3", load_format="dummy")["norm", "weight"]
    assert np.all(np.asarray(from_one) == 0)


def test_of_a_checkpoint_of_images_and_text_the_text_is_read(tmp_path):
    text = json.loads((GOLDEN / "gemma3" / "config.json").read_text())
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(GOLDEN / "gemma3" / "model.safetensors")
    named = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    named["vision_tower.vision_model.post_layernorm.bias"] = np.zeros(3, np.float32)
    named["multi_modal_projector.mm_soft_emb_norm.weight"] = np.zeros(3, np.float32)
    save_file(named, tmp_path / "model.safetensors")
    assert_same(load(tmp_path), load(GOLDEN / "gemma3"))


@pytest.fixture
def with_images(tmp_path):
    """Qwen3.5 with experts as it is published: images beside the text, experts in one tensor."""
    text = json.loads((GOLDEN / "qwen3_5_moe" / "config.json").read_text())
    config = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    own = load_file(GOLDEN / "qwen3_5_moe" / "model.safetensors")
    for layer in range(4):
        experts = [f"model.layers.{layer}.mlp.experts.{expert}" for expert in range(5)]
        gates, ups, downs = (
            np.stack([own.pop(f"{name}.{kind}_proj.weight") for name in experts])
            for kind in ("gate", "up", "down")
        )
        name = f"model.layers.{layer}.mlp.experts"
        own[f"{name}.gate_up_proj"] = np.concatenate([gates, ups], axis=1)
        own[f"{name}.down_proj"] = downs
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor for name, tensor in own.items()
    }
    tensors["model.visual.merger.norm.bias"] = np.zeros(3, np.float32)
    tensors["mtp.layers.0.mlp.gate.weight"] = np.zeros(3, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 2)])
def test_experts_may_be_one_tensor_beside_what_is_not_of_the_text(with_images, dp, tp):
    shards = {"shards_weights": dp > 1}
    expected = load(GOLDEN / "qwen3_5_moe", dp, tp, **shards)
    assert_same(load(with_images, dp, tp, **shards), expected)


def test_a_missing_expert_is_named(tmp_path):
    shutil.copytree(GOLDEN / "qwen3_5_moe", tmp_path / "own")
    folder = tmp_path / "own"
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.2.mlp.experts.3.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"2\.mlp\.experts\.3\.up_proj\.weight is missing"):
        load(folder)


@pytest.mark.parametrize("family", [*long("qwen3_next"), "qwen3_5"])
def test_an_orbax_checkpoint_of_a_model_with_recurrences_is_for_any_mesh(tmp_path, family):
    output = tmp_path / "converted"
    convert(GOLDEN / family, output, "float32")
    for dp, tp, shards_weights in ((1, 1, False), (2, 2, True)):
        expected = load(GOLDEN / family, dp, tp, shards_weights=shards_weights)
        assert_same(load(output, dp, tp, shards_weights=shards_weights), expected)


def test_what_belongs_to_a_key_head_lies_together():
    tensors = load_file(GOLDEN / "qwen3_5" / "model.safetensors")
    qkv = np.asarray(load(GOLDEN / "qwen3_5")["layers", "0", "attention", "qkv", "weight"])
    stored = tensors["model.layers.1.linear_attn.in_proj_qkv.weight"]
    assert qkv.shape == (3, 32, 2 * 34)  # 8 of q, 8 of k, 3 heads of 6 of v
    second = np.concatenate([stored[8:16], stored[24:32], stored[50:68]])
    np.testing.assert_array_equal(qkv[1, :, 34:], second.T)


def test_unlike_layers_are_stacked_with_their_like_and_named_by_the_first():
    params = load(GOLDEN / "qwen3_moe_mixed")
    tensors = load_file(GOLDEN / "qwen3_moe_mixed" / "model.safetensors")
    own = {path[1] for path in params if path[0] == "layers"}
    assert own == {"0", "1", "4"}  # dense and sparse in turn, twice, then three dense ones
    for first, layers in (("0", (0, 2)), ("4", (4, 5, 6))):
        down = np.asarray(params["layers", first, "mlp", "down", "weight"])
        for array, layer in zip(down, layers, strict=True):
            stored = tensors[f"model.layers.{layer}.mlp.down_proj.weight"]
            np.testing.assert_array_equal(array, stored.T)
    down = np.asarray(params["layers", "1", "mlp", "down", "weight"])
    stored = tensors["model.layers.3.mlp.experts.4.down_proj.weight"]
    np.testing.assert_array_equal(down[1, 4], stored.T)


def test_an_unknown_format_is_refused():
    with pytest.raises(ValueError, match="load_format must be one of"):
        load(GOLDEN / "qwen3", load_format="torch")


@pytest.mark.parametrize("load_format", ["safetensors", "dummy", "orbax"])
def test_each_byte_that_is_loaded_counts_as_progress(qwen3, tmp_path, load_format):
    folder, tensors = qwen3
    if load_format == "orbax":
        convert(folder, tmp_path / "orbax", "float32")
        folder = tmp_path / "orbax"
    progress = _RecordedProgress()
    params = load(folder, tp=2, load_format=load_format, progress=progress)
    (phase,) = progress.begun
    stored = sum(tensor.nbytes for tensor in tensors.values())
    total = stored if load_format == "safetensors" else sum(p.nbytes for p in params.values())
    assert (phase.report.phase, phase.report.unit) == ("loading", "bytes")
    assert phase.report.done == phase.report.total == total


class _RecordedProgress(Progress):
    """Keeps the phases that have ended."""

    def __init__(self):
        super().__init__()
        self.begun = []

    @contextmanager
    def phase(self, *args):
        with super().phase(*args) as phase:
            self.begun.append(phase)
            yield phase


def test_a_cpu_takes_a_filled_part_without_a_copy():
    part = aligned([3, 5], np.dtype(ml_dtypes.bfloat16))
    part[:] = 1
    array = jax.device_put(part, jax.devices("cpu")[0])
    assert array.unsafe_buffer_pointer() == part.ctypes.data
    assert (array.shape, array.dtype) == ((3, 5), jnp.bfloat16)
