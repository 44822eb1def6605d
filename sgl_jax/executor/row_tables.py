"""The device's tables of rows between steps: tokens, lengths, and sampling parameters.

Owns the program that fills a row when a request is admitted. Row 0 is the null row: padding writes
there, and no result reads it. Admissions are split into pieces of one fixed size, so the program is
compiled once, and a long prompt takes several launches.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from sgl_jax.core.step_plan import IMAGE_FIELDS, Int32Array, RowAdmission
from sgl_jax.layers.sampling.row_params import pack_row_params, packed_width

_PIECE_TOKENS = 1024
_PIECE_ROWS = 16
_TOKEN_WORDS = 3 * _PIECE_TOKENS
_UNUSED_IMAGE = np.array([2**31 - 1, 0, 0, 0], np.int32)  # begins after all tokens


class DeviceRows(NamedTuple):
    """Tables on the device, one block of rows per rank, sharded over 'data'."""

    tokens: jax.Array  # int32[dp * num_rows, max_context_len]
    lens: jax.Array  # int32[dp * num_rows]
    params: jax.Array  # int32[dp * num_rows, packed_width]
    # int32[dp * num_rows, max_images, IMAGE_FIELDS]; None if no images are served
    images: jax.Array | None = None


def _line_words(max_stop_ids: int, max_images: int) -> int:
    # Row, number of tokens, images, parameters.
    return 2 + max_images * IMAGE_FIELDS + packed_width(max_stop_ids)


def piece_words(max_stop_ids: int, max_images: int = 0) -> int:
    """Return the number of words of a piece for one rank."""
    return _TOKEN_WORDS + _PIECE_ROWS * _line_words(max_stop_ids, max_images)


def cut_admissions(
    admissions: Sequence[Sequence[RowAdmission]], max_stop_ids: int, max_images: int = 0
) -> Iterator[Int32Array]:
    """Yield pieces int32[dp, piece_words] that admit all of `admissions[rank]`. Each piece is a new
    array. Unused entries write zeros to the null row."""
    flat = [_flatten(of_rank, max_stop_ids, max_images) for of_rank in admissions]
    num_pieces = max(
        max(-(-entries.shape[1] // _PIECE_TOKENS), -(-len(lines) // _PIECE_ROWS))
        for entries, lines in flat
    )
    for i in range(num_pieces):
        piece = empty_piece(len(flat), max_stop_ids, max_images)
        for words, (entries, lines) in zip(piece, flat, strict=True):
            some = entries[:, i * _PIECE_TOKENS : (i + 1) * _PIECE_TOKENS]
            words[:_TOKEN_WORDS].reshape(3, _PIECE_TOKENS)[:, : some.shape[1]] = some
            these = lines[i * _PIECE_ROWS : (i + 1) * _PIECE_ROWS]
            words[_TOKEN_WORDS:].reshape(_PIECE_ROWS, -1)[: len(these)] = these
        yield piece


def empty_piece(dp_size: int, max_stop_ids: int, max_images: int = 0) -> Int32Array:
    return np.zeros((dp_size, piece_words(max_stop_ids, max_images)), np.int32)


def _flatten(
    admissions: Sequence[RowAdmission], max_stop_ids: int, max_images: int
) -> tuple[Int32Array, Int32Array]:
    """Return all tokens as [3, n] (row, position, token) and all lines as [m, _line_words]."""
    num_tokens = [len(admission.tokens) for admission in admissions]
    entries = np.empty((3, sum(num_tokens)), np.int32)
    lines = np.empty((len(admissions), _line_words(max_stop_ids, max_images)), np.int32)
    first_param = 2 + max_images * IMAGE_FIELDS
    first = 0
    for line, admission, n in zip(lines, admissions, num_tokens, strict=True):
        entries[0, first : first + n] = admission.row
        entries[1, first : first + n] = np.arange(admission.start, admission.start + n)
        entries[2, first : first + n] = admission.tokens
        first += n
        line[:2] = admission.row, admission.start + n
        images = line[2:first_param].reshape(max_images, IMAGE_FIELDS)
        images[: len(admission.images)] = admission.images
        images[len(admission.images) :] = _UNUSED_IMAGE
        line[first_param:] = pack_row_params(admission, max_stop_ids)
    return entries, lines


def write_piece(tables: DeviceRows, words: jax.Array) -> DeviceRows:
    """Return one rank's tables with a piece's words int32[piece_words] written; traced."""
    images, first_param = tables.images, 2
    rows, positions, tokens = words[:_TOKEN_WORDS].reshape(3, _PIECE_TOKENS)
    lines = words[_TOKEN_WORDS:].reshape(_PIECE_ROWS, -1)
    if images is not None:
        num_words = images.shape[1] * IMAGE_FIELDS
        first_param += num_words
        lists = lines[:, 2:first_param].reshape(_PIECE_ROWS, -1, IMAGE_FIELDS)
        images = images.at[lines[:, 0]].set(lists, mode="drop")
    return DeviceRows(
        tables.tokens.at[rows, positions].set(tokens, mode="drop"),
        tables.lens.at[lines[:, 0]].set(lines[:, 1], mode="drop"),
        tables.params.at[lines[:, 0]].set(lines[:, first_param:], mode="drop"),
        images,
    )
