"""Each published form of quantization_config is read; what is not supported is refused by name."""

import copy
import json

import pytest

from sgl_jax.core.layer_configs import Scheme
from sgl_jax.models.config import ModelConfig, ModelConfigError
from sgl_jax.models.quantization import QuantizationConfig, Rule, Stored, quantize_at_load
from sgl_jax.models.quantization_config import read_quantization
from tests.models.golden_server import GOLDEN

PROJ = "model.layers.1.mlp.up_proj"
QWEN3 = json.loads((GOLDEN / "qwen3" / "config.json").read_text())


def weights(**fields):
    return {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True} | fields


TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
TENSOR = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}


def compressed(layout, own, activations=None, **fields):
    group = {"targets": ["Linear"], "weights": own, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    } | fields


INT4 = weights(num_bits=4, strategy="group", group_size=128)
FP8 = weights(type="float", strategy="tensor")
BLOCK = weights(type="float", strategy="block", block_structure=[128, 128])
AWQ = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 64, "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
PLAIN, PACKED = Stored("plain"), Stored("compressed")
GPTQ_STORED = Stored("gptq", "scales", zero_points_less_one=True)

FORMS = [
    (compressed("int-quantized", weights()), Scheme("int8"), PLAIN),
    (compressed("naive-quantized", weights(strategy="tensor")), Scheme("int8"), PLAIN),
    (
        compressed("int-quantized", weights(), TOKEN),
        Scheme("int8", activation="int8"),
        PLAIN,
    ),
    (
        compressed("float-quantized", FP8, TENSOR),
        Scheme("fp8", activation="fp8", has_input_scale=True),
        PLAIN,
    ),
    (
        compressed("float-quantized", FP8, TOKEN | {"type": "float"}),
        Scheme("fp8", activation="fp8"),
        PLAIN,
    ),
    (
        compressed("float-quantized", BLOCK, TOKEN | {"type": "float", "strategy": "group"}),
        Scheme("fp8", 128),
        Stored("plain", block=(128, 128)),
    ),
    (compressed("pack-quantized", INT4), Scheme("int4", 128), PACKED),
    (compressed("pack-quantized", INT4 | {"strategy": "channel"}), Scheme("int4"), PACKED),
    (compressed("pack-quantized", INT4 | {"actorder": "static"}), Scheme("int4", 128), PACKED),
    (
        compressed("pack-quantized", INT4 | {"symmetric": False, "actorder": "group"}),
        Scheme("int4", 128, has_zero_points=True, has_input_order=True),
        PACKED,
    ),
    (
        {"quant_method": "fp8", "weight_block_size": [128, 64], "activation_scheme": "dynamic"},
        Scheme("fp8", 64),
        Stored("plain", "weight_scale_inv", (128, 64)),
    ),
    (
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        Scheme("fp8", activation="fp8"),
        PLAIN,
    ),
    (
        {"quant_method": "fp8", "activation_scheme": "static"},
        Scheme("fp8", activation="fp8", has_input_scale=True),
        PLAIN,
    ),
    (
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        Scheme("fp8", activation="fp8", has_input_scale=True),
        Stored("plain", "weight_scale_inv", input_scale="activation_scale"),
    ),
    (MODELOPT, Scheme("fp8", activation="fp8", has_input_scale=True), PLAIN),
    (
        MODELOPT | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        Scheme("fp8", activation="fp8"),
        PLAIN,
    ),
    (AWQ, Scheme("int4", 64, has_zero_points=True), Stored("awq", "scales")),
    (
        {"quant_method": "awq", "version": "gemm", "w_bit": 4, "q_group_size": -1},
        Scheme("int4", None, has_zero_points=True),
        Stored("awq", "scales"),
    ),
    (AWQ | {"zero_point": False}, Scheme("int4", 64), Stored("awq", "scales")),
    (GPTQ, Scheme("int4", 128), GPTQ_STORED),
    (
        GPTQ | {"sym": False, "desc_act": True},
        Scheme("int4", 128, has_zero_points=True, has_input_order=True),
        GPTQ_STORED,
    ),
    (GPTQ | {"desc_act": True, "group_size": -1}, Scheme("int4"), GPTQ_STORED),
    (GPTQ | {"checkpoint_format": "gptq_v2"}, Scheme("int4", 128), Stored("gptq", "scales")),
]


@pytest.mark.parametrize(("given", "scheme", "stored"), FORMS)
def test_a_published_form_is_read(given, scheme, stored):
    config = read_quantization({"quantization_config": given})
    assert config.rule_of(PROJ) == Rule(scheme, stored)
    assert config.rule_of("lm_head") is None
    assert not config.has_kv_scales


def test_mxfp4_is_of_experts_alone():
    config = read_quantization({"quantization_config": {"quant_method": "mxfp4"}})
    rule = Rule(Scheme("mxfp4", 32), Stored("mxfp4"))
    assert config.rule_of("model.layers.0.mlp.experts.down_proj") == rule
    assert config.rule_of("model.layers.0.self_attn.q_proj") is None


def test_no_config_is_no_quantization():
    assert read_quantization({}) is None
    assert read_quantization({"quantization_config": None}) is None


def test_an_older_name_of_the_field_is_read():
    given = compressed("int-quantized", weights())
    assert read_quantization({"compression_config": given}).rule_of(PROJ).scheme == Scheme("int8")


def test_a_scheme_of_the_cache_promises_scales():
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    given = compressed("float-quantized", FP8, kv_cache_scheme=cache | {"symmetric": True})
    assert read_quantization({"quantization_config": given}).has_kv_scales


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("int8", "must be an object"),
        ({"quant_method": "bitsandbytes"}, "compressed-tensors, fp8, awq, gptq, mxfp4, modelopt"),
        (MODELOPT | {"quant_algo": "NVFP4"}, "must be FP8 or FP8_PER_CHANNEL_PER_TOKEN"),
        (MODELOPT | {"kv_cache_scheme": {"num_bits": 4, "type": "float"}}, "num_bits"),
        (MODELOPT | {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"}}, "FP8"),
        (MODELOPT | {"quantization": "FP8"}, "must be an object"),
        ({"quant_method": "compressed-tensors"}, "needs config_groups"),
        (compressed("marlin-24", INT4), "int-quantized, float-quantized, naive-quantized, pack-"),
        (compressed("pack-quantized", weights(num_bits=2)), "supported: int of 8 bits, float of"),
        (compressed("int-quantized", INT4), "int of 4 bits as pack-quantized"),
        (compressed("int-quantized", weights(symmetric=False)), "supported as pack-quantized"),
        (compressed("int-quantized", None), "must have weights"),
        (compressed("int-quantized", weights(strategy="token")), "tensor, channel, group, block"),
        (compressed("pack-quantized", INT4 | {"group_size": 0}), "group_size"),
        (compressed("float-quantized", BLOCK | {"block_structure": [8]}), "block_structure"),
        (compressed("int-quantized", weights(), TOKEN | {"type": "float"}), "8 bits of the weigh"),
        (compressed("pack-quantized", INT4, TOKEN), "8 bits of the weights' type"),
        (compressed("int-quantized", weights(), TOKEN | {"symmetric": False}), "asymmetric input"),
        (compressed("int-quantized", weights(), TOKEN | {"strategy": "block"}), "token, tensor, g"),
        (compressed("int-quantized", weights(), TOKEN | {"dynamic": False}), "must be one of tens"),
        (compressed("int-quantized", weights(), ignore=[]), "ignore must name it"),
        (compressed("int-quantized", weights(), sparsity_config={"a": 1}), "sparsity_config"),
        (compressed("int-quantized", weights(), transform_config={"a": 1}), "transform_config"),
        (compressed("int-quantized", weights(), kv_cache_scheme={"num_bits": 4}), "num_bits"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "must be e4m3"),
        ({"quant_method": "fp8", "activation_scheme": "none"}, "one of dynamic, static"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size"),
        (AWQ | {"version": "gemv"}, "gemm"),
        (AWQ | {"bits": 8}, "supported with 4 bits"),
        (AWQ | {"group_size": "all"}, "group_size"),
        (GPTQ | {"bits": 8}, "supported with 4 bits"),
        (GPTQ | {"lm_head": True}, "lm_head"),
        (GPTQ | {"checkpoint_format": "marlin"}, "gptq or gptq_v2"),
        (GPTQ | {"dynamic": {"a": {"bits": 8}}}, "dynamic of 'a' must be empty"),
        (GPTQ | {"dynamic": {"-:(": {}}}, r"dynamic: 're:\(' is no pattern"),
        (GPTQ | {"dynamic": ["a"]}, "dynamic of gptq must be an object"),
        (GPTQ | {"modules_in_block_to_quantize": [["a", 1]]}, "must be a list of names"),
        (GPTQ | {"modules_in_block_to_quantize": "a"}, "must be a list of names"),
    ],
)
def test_a_form_that_is_not_supported_is_refused_in_one_line(given, words):
    with pytest.raises(ModelConfigError, match=words) as caught:
        read_quantization({"quantization_config": given})
    assert "\n" not in str(caught.value)


def test_names_and_expressions_leave_modules_out():
    ignored = ["lm_head", "re:.*self_attn.*", "model.layers.0.mlp.down_proj"]
    given = compressed("int-quantized", weights(), ignore=ignored)
    config = ModelConfig.from_dict(QWEN3 | {"quantization_config": given})
    first, second = (spec.rules for spec in config.layers)
    assert first.of("self_attn.q_proj") is None
    assert second.of("mlp.down_proj") is not None
    assert first.of("mlp.down_proj") is None
    assert first.of("mlp.up_proj") is not None


def test_groups_of_other_targets_have_their_own_scheme():
    given = compressed("int-quantized", weights())
    own = copy.deepcopy(given["config_groups"]["group_0"])
    own |= {"targets": ["re:.*down_proj"], "weights": FP8, "format": "float-quantized"}
    given["config_groups"] = {"group_0": own} | {"group_1": given["config_groups"]["group_0"]}
    config = read_quantization({"quantization_config": given})
    assert config.rule_of("model.layers.0.mlp.down_proj").scheme.weight == "fp8"
    assert config.rule_of("model.layers.0.mlp.up_proj").scheme.weight == "int8"


def test_model_optimizers_own_file_counts_if_config_json_has_no_quantization(tmp_path):
    own = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    own["exclude_modules"] = ["lm_head", "model.layers.1*", "*.self_attn.o_proj"]
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": own}))
    config = ModelConfig.from_path(tmp_path)
    first, second = (spec.rules for spec in config.layers)
    assert config.quantization.has_kv_scales
    assert first.of("mlp.down_proj").scheme.weight == "fp8"
    assert first.of("self_attn.o_proj") is None
    assert second.of("mlp.down_proj") is None


CLASS, EXPRESSION, NAME = "Linear", "re:.*down_proj", "model.layers.0.mlp.down_proj"
BROADER = "re:.*"  # before EXPRESSION, by its text


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (EXPRESSION, CLASS),
        (NAME, CLASS),
        (NAME, EXPRESSION),
        (NAME, "mlp.down_proj"),
        (BROADER, EXPRESSION),
    ],
)
def test_of_several_targets_the_one_of_precedence_applies(first, second, order):
    given = compressed("pack-quantized", weights())
    own = given["config_groups"]["group_0"]
    groups = [own | {"targets": [first]}, own | {"targets": [second], "weights": INT4}][::order]
    given["config_groups"] = {f"group_{n}": group for n, group in enumerate(groups)}
    config = read_quantization({"quantization_config": given})
    assert config.rule_of("model.layers.0.mlp.down_proj").scheme.weight == "int8"
    other = "int4" if first == NAME else "int8"
    assert config.rule_of("model.layers.1.mlp.down_proj").scheme.weight == other


def test_one_target_of_two_schemes_is_refused():
    given = compressed("pack-quantized", weights())
    own = given["config_groups"]["group_0"]
    names = [f"model.layers.0.mlp.experts.{n}.up_proj" for n in range(2)]
    given["config_groups"] = {
        "group_0": own | {"targets": names[:1]},
        "group_1": own | {"targets": names[1:], "weights": INT4},
    }
    with pytest.raises(ModelConfigError, match=r"several schemes .*experts\.0\.up_proj"):
        read_quantization({"quantization_config": given})


@pytest.mark.parametrize("body", ["model", "model.language_model", "language_model.model"])
@pytest.mark.parametrize("stored", ["model", "model.language_model", "language_model.model"])
def test_a_name_fits_with_any_prefix_of_layers(body, stored):
    given = compressed("int-quantized", weights())
    given["config_groups"]["group_0"]["targets"] = [f"{body}.layers.0.mlp.down_proj"]
    config = ModelConfig.from_dict(QWEN3 | {"quantization_config": given})
    quantized = [spec.rules.of("mlp.down_proj") is not None for spec in config.layers]
    assert quantized == [True, False]
    assert config.layers[0].rules.of("mlp.up_proj") is None
    assert config.quantization.rule_of(f"{stored}.layers.0.mlp.down_proj") is not None
    assert config.quantization.rule_of(f"{stored}.layers.1.mlp.down_proj") is None


def test_listed_experts_of_gptq_are_quantized():
    names = [[f"mlp.experts.{n}.{x}_proj" for n in range(128)] for x in ("gate", "up", "down")]
    given = GPTQ | {"modules_in_block_to_quantize": names}
    config = read_quantization({"quantization_config": given})
    assert config.rule_of("model.layers.5.mlp.experts.77.up_proj") is not None
    assert config.rule_of("model.layers.5.mlp.shared_expert.up_proj") is None
    assert config.rule_of("model.layers.5.self_attn.q_proj") is None


def test_experts_are_quantized_alike():
    config = QuantizationConfig((((), Rule(Scheme("int8"), PLAIN)),), ("re:.*experts.0.up_proj",))
    assert config.rule_of("model.layers.0.mlp.experts.7.up_proj") is None
    assert config.rule_of("model.layers.0.mlp.experts.7.down_proj") is not None


@pytest.mark.parametrize("scheme", [Scheme("int8"), Scheme("int4", 128)])
def test_floats_are_quantized_at_load_but_for_the_head(scheme):
    config = quantize_at_load(scheme)
    assert config.rule_of(PROJ) == Rule(scheme, Stored("float"))
    assert config.rule_of("lm_head") is None


def test_a_quantized_checkpoint_is_not_quantized_again():
    given = compressed("int-quantized", weights())
    config = ModelConfig.from_dict(QWEN3 | {"quantization_config": given})
    assert config.quantized("none") is config
    with pytest.raises(ModelConfigError, match="quantized already"):
        config.quantized("int8")
