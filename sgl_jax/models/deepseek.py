"""DeepSeek V2, V3, R1, V3.2, Kimi K2, GLM-5: latent attention, dense layers first, then experts.

V3.2 and GLM-5 attend to tokens that an indexer chooses. The text model of Mistral 3's multimodal
models is Mistral, Ministral 3 or, with latents, Mistral 4.
"""

from functools import partial

from sgl_jax.core.layer_configs import LatentConfig
from sgl_jax.layers.attention import replicated_kv_heads
from sgl_jax.layers.head_sources import ByHead, HeadMatrices, HeadRows
from sgl_jax.layers.indexer import Indexer
from sgl_jax.layers.latent_attention import LatentAttention
from sgl_jax.layers.linear import Linear
from sgl_jax.layers.norm import LayerNorm, RMSNorm
from sgl_jax.layers.sources import Padded, Source, Tensor, row_size
from sgl_jax.models.architecture import Architecture, BuildOptions
from sgl_jax.models.config import LayerSpec, ModelConfig
from sgl_jax.models.decoder_layer import DecoderLayer
from sgl_jax.models.llama import gated_mlp, llama_layer, norm
from sgl_jax.models.projections import as_floats, linear
from sgl_jax.models.qwen3 import mixture_of_experts

_LATENT_EPS = 1e-6  # for latents' norms; all other norms use the config's `rms_norm_eps`


def deepseek_layer(config: ModelConfig, spec: LayerSpec, options: BuildOptions) -> DecoderLayer:
    """Declare one layer. Raise ValueError if `tp_size` chips cannot split heads or widths."""
    mlp = mixture_of_experts(config, spec, spec.moe, options) if spec.moe else None
    return DecoderLayer(
        norm("input_layernorm", config.hidden_size, config, options),
        latent_attention(config, spec, options),
        norm("post_attention_layernorm", config.hidden_size, config, options),
        mlp or gated_mlp(config, spec, options),
    )


def mistral3_layer(config: ModelConfig, spec: LayerSpec, options: BuildOptions) -> DecoderLayer:
    """Declare one layer: latent attention if the layer has latents, else Llama's layer."""
    return (deepseek_layer if spec.latent else llama_layer)(config, spec, options)


def latent_attention(
    config: ModelConfig, spec: LayerSpec, options: BuildOptions
) -> LatentAttention:
    """Declare the attention of a layer. Raise ValueError if `tp_size` chips cannot split heads."""
    sizes, heads, hidden = spec.latent, config.num_heads, config.hidden_size
    assert sizes is not None
    replicated_kv_heads(heads, 1, options.tp_size)
    query_norm, name, inputs = None, "self_attn.q_proj.weight", hidden
    if sizes.query_rank is not None:
        query_norm = _latent_norm("self_attn.q_a_layernorm", sizes.query_rank, options)
        name, inputs = "self_attn.q_b_proj.weight", sizes.query_rank
    rows = heads * sizes.query_dim
    query = HeadRows(name, rows, 0, sizes.query_dim, sizes.nope_dim)
    rope = _rotated_rows(HeadRows(name, rows, sizes.nope_dim, sizes.query_dim, sizes.rope_dim))
    width = heads * sizes.value_dim
    output = Tensor("self_attn.o_proj.weight", (width, hidden), transposed=True)
    return LatentAttention(
        sizes,
        linear(spec, options, _down(sizes, hidden)),
        linear(spec, options, ByHead((query, *rope), heads, (inputs,)), "outputs"),
        _up(sizes, spec, heads),
        linear(spec, options, output, "inputs"),
        dtype=options.dtype,
        query_norm=query_norm,
        latent_norm=_latent_norm("self_attn.kv_a_layernorm", sizes.rank, options),
        scale=config.score_scale,
        attend=options.kernels.attend_latents,
        indexer=_indexer(sizes, spec, options, hidden),
    )


def _indexer(
    sizes: LatentConfig, spec: LayerSpec, options: BuildOptions, hidden: int
) -> Indexer | None:
    own = sizes.indexer
    if own is None or own.reuses:
        return None
    assert sizes.query_rank is not None
    module, width, turned = "self_attn.indexer", own.head_dim, sizes.rope_dim

    def part(name: str, num_heads: int, inputs: tuple[int, ...]) -> Source:
        """Return each head's rows, of which the first are rotated, in the order of `rotate`."""
        kept = partial(HeadRows, f"{module}.{name}", num_heads * width)
        rows: tuple[HeadRows, ...] = (kept(0, width, width),)
        if own.pairs_neighbours:
            rows = (*_rotated_rows(kept(0, width, turned)), kept(turned, width, width - turned))
        return ByHead(rows, num_heads, inputs)

    key_norm = LayerNorm(
        part("k_norm.weight", 1, ()), part("k_norm.bias", 1, ()), _LATENT_EPS, options.dtype
    )
    weights = Tensor(f"{module}.weights_proj.weight", (hidden, own.num_heads), transposed=True)
    return Indexer(
        own,
        turned,
        queries=linear(spec, options, part("wq_b.weight", own.num_heads, (sizes.query_rank,))),
        key=linear(spec, options, part("wk.weight", 1, (hidden,))),
        key_norm=key_norm,
        weights=Linear(weights, options.dtype),  # never quantized
    )


def _latent_norm(name: str, size: int, options: BuildOptions) -> RMSNorm:
    return RMSNorm(Tensor(f"{name}.weight", (size,)), _LATENT_EPS, options.dtype)


def _down(sizes: LatentConfig, hidden: int) -> Source:
    """Return the queries' latent, the latent, and the key's rotated part, padded to a row size."""
    kept = partial(HeadRows, "self_attn.kv_a_proj_with_mqa.weight", sizes.width)
    parts = [kept(0, sizes.width, sizes.rank)]
    parts += _rotated_rows(kept(sizes.rank, sizes.width, sizes.rope_dim))
    if (own := sizes.query_rank) is not None:
        parts = [HeadRows("self_attn.q_a_proj.weight", own, 0, own, own), *parts]
    both = ByHead(tuple(parts), 1, (hidden,))
    return Padded(both, row_size(both.shape[1]), axis=1, on_every_mesh=True)


def _rotated_rows(part: HeadRows) -> tuple[HeadRows, HeadRows]:
    """Return the rows in the order of `rotary.rotate`; a checkpoint has pairs side by side."""
    return part.every_second(0), part.every_second(1)


def _up(sizes: LatentConfig, spec: LayerSpec, heads: int) -> tuple[Source, Source]:
    """Return the sources of `UpProjections`: each head's rows of one tensor, key then value."""
    stride = sizes.nope_dim + sizes.value_dim
    part = partial(HeadRows, "self_attn.kv_b_proj.weight", heads * stride)
    keys = HeadMatrices(part(0, stride, sizes.nope_dim), heads, sizes.rank)
    own = part(sizes.nope_dim, stride, sizes.value_dim)
    values = HeadMatrices(own, heads, sizes.rank, transposed=True)
    return as_floats(spec, keys), as_floats(spec, values)


DEEPSEEK = Architecture(
    deepseek_layer, has_further_layers=True, unused_in_sharing_layers=("self_attn.indexer.",)
)
# Vision tensors are not read.
MISTRAL3 = Architecture(
    mistral3_layer,
    body="language_model.model.",
    head="language_model.lm_head",
    spare_prefixes=("vision_tower.", "multi_modal_projector."),
)
