"""Records the rows of a step from its launch to its result, and loops over them.

`launch` counts the tokens that a step will sample; `append` adds the sampled tokens to their rows.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sgl_jax.core.compiled import compiled
from sgl_jax.core.step_plan import NON_FINITE, Int32Array, IntpArray, RowIndex

Records = NDArray[Any]

TOKEN_BLOCK = 64  # tokens written to a row's table together
NOT_SCORED = 2**31 - 1
# The end of a request: none yet, its longest permitted length, a stop token, or non-finite results.
GOES_ON, TOO_LONG, STOPPED, FAILED = 0, 1, 2, 3

# The fields of a running request that each step reads or writes: see `running_rows.py`.
ROW = np.dtype(
    [
        ("known_len", np.int32),
        ("planned_len", np.int32),
        ("unread_drafts", np.int32),
        ("min_len", np.int32),  # no stop before this many tokens
        ("max_len", np.int32),
        # First prompt position with a requested log-probability of its successor; NOT_SCORED if
        # there is none, or all have been planned.
        ("score_start", np.int32),
        ("top_logprobs_num", np.int16),  # a row has 32 bytes, half a cache line
        ("return_logprob", np.bool_),
        ("has_grammar", np.bool_),
        ("returns_hidden", np.bool_),
        ("token_values", np.uint8),  # requested, see `token_values.py`
        ("is_unsent", np.bool_),  # nothing sent yet: the first output carries more than a token
    ],
    align=True,
)

# A row of a launched step.
LAUNCHED = np.dtype(
    [
        ("row", np.int64),  # joint: see `ranks.py`
        ("own_row", np.int32),  # index on its rank
        ("epoch", np.int32),  # of the row's lease
        ("kv_start", np.int32),
        ("kv_end", np.int32),  # without drafts, which may be rejected
        ("q_len", np.int32),
        ("num_ahead", np.int32),  # tokens that it may gain after the first: drafts, further steps
        ("num_scored", np.int32),  # queries
        ("num_unread", np.int32),  # `num_ahead` of earlier launches
        ("num_gained", np.int32),  # tokens, once the result is read; 0 if it is dropped
        ("end", np.int8),  # GOES_ON, TOO_LONG, STOPPED or FAILED
        ("samples", np.bool_),
        ("relayed", np.bool_),  # whether any of `num_unread` are
    ],
    align=True,
)

# A rank's rows of a launched step, together.
SHARE = np.dtype(
    [
        ("num_decode", np.int64),  # rows
        ("longest", np.int64),  # the most tokens that a row may need
        ("num_scored", np.int64),  # queries
        ("top_logprobs_num", np.int64),  # the most that a row reports; -1 if none reports any
        ("is_masked", np.bool_),  # a row draws a token by a grammar, or returns a hidden state
        ("returns_hidden", np.bool_),
        ("token_values", np.uint8),  # requested, see `token_values.py`
    ],
    align=True,
)


class InFlightRows(NamedTuple):
    """The rows of a launched step, rank by rank."""

    rows: Records  # LAUNCHED[n]
    bounds: list[int]  # rank k's rows are in [bounds[k], bounds[k + 1])


@compiled(
    "(int64[::1], int64[::1], int64[::1], int32[::1], share[::1], int32[::1], row[::1], "
    "int32[::1], int32[::1])",
    share=SHARE,
    row=ROW,
)
def launch(
    bounds: IntpArray,
    decode_rows: RowIndex,
    chunk_rows: RowIndex,
    chunk_lens: Int32Array,
    shares: Records,
    num_ahead: Int32Array,
    records: Records,
    committed_len: Int32Array,
    epoch: Int32Array,
) -> Records:
    """Count the rows of a step as launched; return LAUNCHED[n].

    Args:
        bounds: int64[ranks + 1], the bounds of each rank's part of the result: decode rows, then
            prefill chunks.
        decode_rows, chunk_rows: int64, rows by their index on their rank, rank by rank.
        chunk_lens: int32, the tokens of each chunk.
        shares: SHARE[ranks] with `num_decode`; the other fields are filled in.
        num_ahead: int32, tokens that each decode row may gain after the first, rank by rank:
            drafts or further steps; empty if there are none.
        records: ROW of all joint rows.
        committed_len, epoch: int32, of all joint rows.
    """
    launched = np.empty(len(decode_rows) + len(chunk_rows), LAUNCHED)
    num_ranks, rows_per_rank = len(shares), len(records) // len(shares)
    assert len(records) == len(committed_len) == len(epoch)
    assert len(bounds) == num_ranks + 1
    assert bounds[num_ranks] == len(launched)
    assert len(chunk_rows) == len(chunk_lens)
    assert len(num_ahead) in (0, len(decode_rows))
    chunk = decode = 0
    for rank in range(num_ranks):
        share = shares[rank]
        share.top_logprobs_num = -1
        first_chunk = bounds[rank] + share.num_decode
        assert first_chunk <= bounds[rank + 1]
        for i in range(bounds[rank], bounds[rank + 1]):
            num_tokens, ahead = 1, 0
            if i >= first_chunk:
                assert chunk < len(chunk_rows)
                own_row, num_tokens = chunk_rows[chunk], chunk_lens[chunk]
                chunk += 1
            else:
                assert decode < len(decode_rows)
                own_row = decode_rows[decode]
                if len(num_ahead):
                    ahead = num_ahead[decode]
                decode += 1
            assert 0 <= own_row < rows_per_rank
            number = rank * rows_per_rank + own_row
            row, step = records[number], launched[i]
            start = committed_len[number]
            end = start + num_tokens
            num_scored = max(end - max(start, row.score_start), 0)
            step.row, step.own_row, step.epoch = number, own_row, epoch[number]
            step.kv_start, step.kv_end = start, end
            step.q_len, step.num_ahead = num_tokens + ahead, ahead
            step.num_unread, step.relayed = row.unread_drafts, row.unread_drafts > 0
            samples = end == row.planned_len
            step.num_scored, step.samples = num_scored, samples
            share.longest = max(share.longest, end + row.unread_drafts + ahead)
            share.num_scored += num_scored
            share.token_values |= row.token_values
            if samples:
                share.is_masked |= row.has_grammar | row.returns_hidden
                share.returns_hidden |= row.returns_hidden
                if row.return_logprob:
                    share.top_logprobs_num = max(share.top_logprobs_num, row.top_logprobs_num)
                row.planned_len += 1
                row.score_start = NOT_SCORED
            row.unread_drafts += ahead
    return launched


@compiled(
    "(launched[::1], int32[:, ::1], row[::1], int32[::1], int32[:, ::1], int32[:, ::1], "
    "int32[:, :])",
    launched=LAUNCHED,
    row=ROW,
)
def append(
    launched: Records,
    new_tokens: Int32Array,
    records: Records,
    epoch: Int32Array,
    tokens: Int32Array,
    latest: Int32Array,
    stop_ids: Int32Array,
) -> tuple[int, int, RowIndex, Int32Array, IntpArray]:
    """Append each row's new tokens, up to the token that ends its request.

    Accepted tokens after the end are overshoot and dropped here; their KV is freed with the lease,
    which offers the cache only the known tokens. Returns

    - the number of appended tokens, and the number of rows with non-finite results;
    - the joint rows that gained one token and nothing else, int64[m], and the token of each,
      int32[m];
    - the indices of all other rows that gained tokens.

    Args:
        launched: LAUNCHED[n] of a step; `num_gained` and `end` are filled in. A row with another
            epoch now gains nothing.
        new_tokens: int32[n, w], padded with negative values; NON_FINITE comes first in a failed
            row.
        records: ROW of all joint rows.
        epoch: int32, the current epochs of the rows' leases.
        tokens, latest: columns of `RowColumns`.
        stop_ids: the columns of `RowColumns.stop_ids` to check.
    """
    num_tokens, num_failed, (num_rows, width) = 0, 0, new_tokens.shape
    assert len(launched) == num_rows
    assert len(records) == len(epoch) == len(tokens) == len(latest) == len(stop_ids)
    for i in range(num_rows):
        step, number = launched[i], launched[i].row
        assert 0 <= number < len(records)
        count, end = 0, GOES_ON
        if new_tokens[i, 0] == NON_FINITE:
            end = FAILED
            num_failed += 1
        elif step.samples and epoch[number] == step.epoch:
            row = records[number]
            length, min_len, max_len = row.known_len, row.min_len, row.max_len
            assert 0 <= length < max_len <= tokens.shape[1]
            while end == GOES_ON and count < width and (count == 0 or new_tokens[i, count] >= 0):
                token = new_tokens[i, count]
                place = length % TOKEN_BLOCK
                latest[number, place] = token
                if place == TOKEN_BLOCK - 1:
                    for j in range(TOKEN_BLOCK):
                        tokens[number, length - place + j] = latest[number, j]
                length += 1
                count += 1
                if length >= max_len:
                    end = TOO_LONG
                if length > min_len:
                    for j in range(stop_ids.shape[1]):
                        if stop_ids[number, j] == token:
                            end = STOPPED
            row.known_len = length
        step.num_gained, step.end = count, end
        num_tokens += count
    plain, plain_tokens = np.empty(num_rows, np.int64), np.empty(num_rows, np.int32)
    others = np.empty(num_rows, np.int64)
    num_plain = num_others = 0
    # A loop apart: the first waits for memory less if it does less.
    for i in range(num_rows):
        step, row = launched[i], records[launched[i].row]
        if step.num_gained == 0:
            continue
        has_more = row.is_unsent or row.return_logprob or row.token_values != 0
        if step.num_gained > 1 or step.end != GOES_ON or has_more:
            others[num_others] = i
            num_others += 1
        else:
            plain[num_plain], plain_tokens[num_plain] = step.row, new_tokens[i, 0]
            num_plain += 1
    return num_tokens, num_failed, plain[:num_plain], plain_tokens[:num_plain], others[:num_others]
