"""Encoders of quantized weights for make_quantized_golden.py, and independent decoders.

Every encoder takes a matrix [out, in] in float32 and returns the tensors that replace it in a
published checkpoint, by the last part of their names. Every decoder takes those tensors and returns
the matrix in float64; it is the reference and shares no code with the encoders.
"""

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams

Tensors = dict[str, torch.Tensor]

# The output column of each nibble of a word, from its low bits: AWQ's layout "gemm".
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
FP8_MAX = 448.0
BLOCK = 128


def encode_compressed(weight: torch.Tensor, scheme: QuantizationScheme) -> Tensors:
    """Encode with compressed-tensors: its observers' minimum and maximum, scales and packers."""
    args = scheme.weights
    scale, zero_point = calculate_qparams(*extremes(weight, args), args)
    state = {"weight": weight, "weight_scale": scale.bfloat16()}
    if not args.symmetric:
        state["weight_zero_point"] = zero_point.to(torch.int8)
    tensors = compressor(scheme).compress(state, scheme)
    if "weight_packed" in tensors:
        expected = compressed_weight(tensors, scheme)
        assert torch.equal(expected, decode_packed(tensors))
    else:
        assert torch.equal(compressed_weight(tensors, scheme), decode_plain(tensors))
    return tensors


def compressor(scheme: QuantizationScheme) -> type[BaseCompressor]:
    return BaseCompressor.get_value_from_registry(scheme.format)


def compressed_weight(tensors: Tensors, scheme: QuantizationScheme) -> torch.Tensor:
    """Return the matrix that compressed-tensors decodes, in float64."""
    wide = tensors | {"weight_scale": tensors["weight_scale"].double()}
    return compressor(scheme).decompress(wide, scheme)["weight"]


def extremes(weight: torch.Tensor, args: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
    if args.strategy == "tensor":
        return weight.min()[None], weight.max()[None]
    if args.strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    groups = weight.unflatten(1, (-1, args.group_size))
    return groups.amin(-1), groups.amax(-1)


def decode_plain(tensors: Tensors) -> torch.Tensor:
    """Decode int8 or fp8 with a scale for the matrix, [1], or for each row, [out, 1]."""
    return tensors["weight"].double() * tensors["weight_scale"].double()


def decode_packed(tensors: Tensors) -> torch.Tensor:
    """Decode 4 bits with an offset of 8.

    Words have eight columns, low bits first; words of zeros have eight rows.
    """
    out, size = tensors["weight_shape"].tolist()
    scale = tensors["weight_scale"].double().numpy()
    values = nibbles(tensors["weight_packed"]).reshape(out, size) - 8.0
    zeros = np.zeros_like(scale)
    if "weight_zero_point" in tensors:
        zeros = nibbles(tensors["weight_zero_point"].T).reshape(scale.shape[1], out).T - 8.0
    group = size // scale.shape[1]
    return torch.from_numpy((values - zeros.repeat(group, 1)) * scale.repeat(group, 1))


def nibbles(words: torch.Tensor) -> np.ndarray:
    """Unpack int32 [..., n] to [..., n, 8], low bits first."""
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    return (words.contiguous().numpy().view(np.uint32)[..., None] >> shifts) & 15


def pack(values: torch.Tensor) -> torch.Tensor:
    """Pack [..., n, 8] numbers below 16 into int32 [..., n], low bits first."""
    shifts = torch.arange(0, 32, 4)
    return (values.long() << shifts).sum(-1).to(torch.uint32).view(torch.int32)


def encode_blocks(weight: torch.Tensor) -> Tensors:
    """Encode as fp8 with a float32 factor per block of 128 rows and columns, cut at edges."""
    out, size = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -size % BLOCK, 0, -out % BLOCK))
    blocks = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    scale = blocks.abs().amax((1, 3)) / FP8_MAX
    scaled = (blocks / scale[:, None, :, None]).reshape(padded.shape)[:out, :size]
    values = scaled.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    args = QuantizationArgs(
        num_bits=8, type="float", strategy="block", block_structure=[BLOCK, BLOCK]
    )
    tensors = {"weight": values.contiguous(), "weight_scale_inv": scale}
    expected = dequantize(tensors["weight"], scale.double(), args=args)
    assert torch.equal(expected, decode_blocks(tensors))
    return tensors


def decode_blocks(tensors: Tensors) -> torch.Tensor:
    values, scale = tensors["weight"].double(), tensors["weight_scale_inv"].double()
    rows, columns = (torch.arange(size) // BLOCK for size in values.shape)
    return values * scale[rows[:, None], columns]


def encode_groups(
    weight: torch.Tensor, group_of: torch.Tensor, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return values [in, out] below 16, and zeros and float16 scales [groups, out]."""
    members = [weight[:, group_of == group] for group in range(int(group_of.max()) + 1)]
    low = torch.stack([own.amin(1) for own in members]).clamp(max=0)
    high = torch.stack([own.amax(1) for own in members]).clamp(min=0)
    if symmetric:
        scale = (2 * torch.maximum(-low, high) / 15).half()
        zeros = torch.full_like(low, 8)
    else:
        scale = ((high - low) / 15).half()
        zeros = (-low / scale.float()).round().clamp(1, 15)
    values = (weight.T / scale.float()[group_of] + zeros[group_of]).round().clamp(0, 15)
    return values, zeros, scale


def encode_awq(weight: torch.Tensor, group_of: torch.Tensor) -> Tensors:
    """Encode as AWQ: values and zeros with eight output columns a word, in AWQ's order."""
    values, zeros, scale = encode_groups(weight, group_of, symmetric=False)
    qweight, qzeros = (pack(own.unflatten(1, (-1, 8))[..., AWQ_ORDER]) for own in (values, zeros))
    return {"qweight": qweight, "qzeros": qzeros, "scales": scale}


def decode_awq(tensors: Tensors) -> torch.Tensor:
    scale = tensors["scales"].double().numpy()
    place = np.argsort(AWQ_ORDER)
    values, zeros = (
        nibbles(tensors[name])[..., place].reshape(-1, scale.shape[1]).astype(np.float64)
        for name in ("qweight", "qzeros")
    )
    group = len(values) // len(scale)
    weight = (values - zeros.repeat(group, 0)) * scale.repeat(group, 0)
    return torch.from_numpy(weight.T.copy())


def encode_gptq(weight: torch.Tensor, group_of: torch.Tensor, symmetric: bool) -> Tensors:
    """Encode as GPTQ, with the group of each row.

    Words have eight input rows; words of zeros minus one have eight output columns.
    """
    values, zeros, scale = encode_groups(weight, group_of, symmetric)
    return {
        "qweight": pack(values.unflatten(0, (-1, 8)).transpose(1, 2)),
        "qzeros": pack((zeros - 1).unflatten(1, (-1, 8))),
        "scales": scale,
        "g_idx": group_of.to(torch.int32),
    }


def decode_gptq(tensors: Tensors) -> torch.Tensor:
    scale, group = tensors["scales"].double().numpy(), tensors["g_idx"].numpy()
    values = nibbles(tensors["qweight"]).swapaxes(1, 2).reshape(-1, scale.shape[1])
    zeros = nibbles(tensors["qzeros"]).reshape(scale.shape) + 1.0
    return torch.from_numpy(((values - zeros[group]) * scale[group]).T.copy())
