"""What a step's results mean for its requests: new tokens, stops, releases.

A result belongs to a row's request only if the row's epoch is still that of the launch. If the
request finished, was aborted or retracted meanwhile, its result is dropped, and
computed again if it is still wanted.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sgl_jax.core.messages import FinishReason, RequestOutput, TokenLogprobs
from sgl_jax.core.step_plan import (
    BoolArray,
    Float32Array,
    Int32Array,
    PromptLogprobs,
    RankPlan,
    RankResult,
    RowIndex,
    StepPlan,
)
from sgl_jax.mem_cache.rank_memory import commit_rows
from sgl_jax.scheduler.draft_policy import learn_from_drafts
from sgl_jax.scheduler.gained_outputs import GainedOutputs
from sgl_jax.scheduler.rank_scheduler import RankScheduler
from sgl_jax.scheduler.ranks import Ranks
from sgl_jax.scheduler.request import Request
from sgl_jax.scheduler.running_rows import RowColumns
from sgl_jax.scheduler.step_arrays import LaunchedRows


def apply_result(
    ranks: Ranks,
    plan: StepPlan,
    launched: LaunchedRows,
    results: Sequence[RankResult],
    outputs: GainedOutputs,
) -> list[Request]:
    """Apply the results of `plan`, which was launched with `launched`.

    Adds what requests gained to `outputs`; returns the finished.
    """
    running, bounds = ranks.running, launched.bounds
    current = ranks.tables.epoch[launched.rows] == launched.epochs
    for k, rank_plan in enumerate(plan.ranks):
        if rank_plan.num_scored is not None:
            own_current = current[bounds[k] : bounds[k + 1]]
            _collect_prompt_logprobs(ranks.ranks[k], rank_plan, results[k], own_current)

    index = (current & launched.samples).nonzero()[0]
    rows = launched.rows[index]
    tokens = np.concatenate([result.tokens for result in results]).take(index, axis=0)
    detailed = running.is_unsent[rows] | running.return_logprob[rows]
    num_stop_ids = max(rank.running.num_stop_ids for rank in ranks.ranks)
    if tokens.shape[1] == 1:
        gains = _append_token(running, rows, tokens[:, 0], num_stop_ids)
        ranks.num_generated_tokens += len(rows)
    else:
        gains = _append_tokens(running, rows, tokens, num_stop_ids)
        drafted = np.concatenate([rank_plan.num_drafts for rank_plan in plan.ranks])[index]
        _count_drafts(ranks, rows, drafted, tokens)
        detailed |= gains.counts > 1
        ranks.num_generated_tokens += int(gains.counts.sum())
    detailed |= gains.is_finished
    plain = ~detailed
    plain_bounds = index[plain].searchsorted(bounds).tolist()
    outputs.add_plain(ranks, rows[plain], plain_bounds, tokens[:, 0][plain])

    done = []
    for i in detailed.nonzero()[0].tolist():
        rank, row = ranks.locate(int(rows[i]))
        gained = tokens[i, : gains.counts[i]].tolist()
        logprobs = None
        if rank.running.return_logprob[row]:
            at = int(index[i]) - bounds[rank.dp_rank]
            logprobs = _token_logprobs(rank, row, gained, results[rank.dp_rank], at)
        finish = _finish_reason(gains, i, gained[-1])
        outputs.outputs.append(_output(rank, row, gained, finish, logprobs))
        if finish is not None:
            done.append(rank.finish(row))
    return done


class _Gains(NamedTuple):
    """What n rows gained in a step."""

    counts: np.ndarray  # int[n] tokens, at least 1
    is_finished: np.ndarray  # bool[n]
    is_stop: np.ndarray  # bool[n] a stop token ended it


def _finish_reason(gains: _Gains, i: int, last_token: int) -> FinishReason | None:
    if not gains.is_finished[i]:
        return None
    return FinishReason("stop", last_token) if gains.is_stop[i] else FinishReason("length")


def _append_token(
    running: RowColumns, rows: RowIndex, tokens: Int32Array, num_stop_ids: int
) -> _Gains:
    """Append one new token int32[n] to each row: what most steps do."""
    known = running.append_token(rows, tokens)
    is_stop = np.zeros(len(rows), np.bool_)
    for stop_id in running.stop_ids.T[:num_stop_ids]:
        is_stop |= stop_id[rows] == tokens
    is_stop &= known > running.min_len[rows]
    counts = np.ones(len(rows), np.int32)
    return _Gains(counts, is_stop | (known >= running.max_len[rows]), is_stop)


def _append_tokens(
    running: RowColumns, rows: RowIndex, tokens: Int32Array, num_stop_ids: int
) -> _Gains:
    """Append new tokens int32[n, w] to their rows, up to the one that ends the request.

    What a step accepted beyond that token is overshoot and forgotten here; its KV is freed with
    the lease, which offers the cache no more than the known tokens.
    """
    is_token = tokens >= 0
    lens = running.known_len[rows, None] + np.arange(1, tokens.shape[1] + 1)
    is_stop = np.zeros(tokens.shape, np.bool_)
    for stop_id in running.stop_ids.T[:num_stop_ids]:
        is_stop |= stop_id[rows, None] == tokens
    is_stop &= lens > running.min_len[rows, None]
    is_end = is_token & (is_stop | (lens >= running.max_len[rows, None]))
    is_finished: BoolArray = np.logical_or.reduce(is_end, axis=1)
    last = is_end.argmax(axis=1)
    counts = np.where(is_finished, last + 1, is_token.sum(axis=1))
    kept = lens <= running.known_len[rows, None] + counts[:, None]
    running.append_tokens(np.repeat(rows, counts), lens[kept] - 1, tokens[kept])
    running.known_len[rows] += counts
    return _Gains(counts, is_finished, is_finished & is_stop[np.arange(len(rows)), last])


def _count_drafts(ranks: Ranks, rows: RowIndex, drafted: Int32Array, tokens: Int32Array) -> None:
    """Now it is known how many drafts were accepted: bring the rows' lengths up to date."""
    accepted = (tokens >= 0).sum(axis=1).astype(np.int32) - 1
    running, tables = ranks.running, ranks.tables
    running.unread_drafts[rows] -= drafted
    running.planned_len[rows] += accepted
    commit_rows(tables, ranks.memories, rows, tables.kv_committed_len[rows] + accepted)
    ranks.num_drafted += int(drafted.sum())
    ranks.num_accepted += int(accepted.sum())
    learn_from_drafts(running, rows, drafted, accepted, ranks.max_draft_tokens)


def _output(
    rank: RankScheduler,
    row: int,
    tokens: list[int],
    finish: FinishReason | None,
    logprobs: list[TokenLogprobs] | None,
) -> RequestOutput:
    request = rank.running.request(row)
    prompt_logprobs = request.pending_prompt_logprobs or None
    request.pending_prompt_logprobs = []
    rank.running.is_unsent[row] = False
    return RequestOutput(
        rid=request.rid,
        token_ids=tokens,
        cached_tokens=request.cached_tokens,
        dp_rank=rank.dp_rank,
        finish=finish,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        prompt_tokens=request.tell_prompt_len(),
    )


def _token_logprobs(
    rank: RankScheduler, row: int, tokens: list[int], result: RankResult, index: int
) -> list[TokenLogprobs]:
    assert result.logprobs is not None, "the plan asked for log-probabilities"
    logprobs = result.logprobs[index].tolist()
    count = int(rank.running.top_logprobs_num[row])
    num_ids = int(rank.running.num_logprob_ids[row])
    if not count and not num_ids:
        return [TokenLogprobs(t, logprobs[i], [], []) for i, t in enumerate(tokens)]
    assert result.top_ids is not None
    assert result.top_logprobs is not None
    top_ids = result.top_ids[index, :, :count].tolist()
    top_logprobs = result.top_logprobs[index, :, :count].tolist()
    return [
        TokenLogprobs(
            t,
            logprobs[i],
            top_ids[i],
            top_logprobs[i],
            _of_ids(result.id_logprobs, (index, i), num_ids),
        )
        for i, t in enumerate(tokens)
    ]


def _of_ids(values: Float32Array | None, at: int | tuple[int, int], count: int) -> list[float]:
    """At one position, of the `count` tokens that the request has named."""
    if not count:
        return []
    assert values is not None, "the plan asked for them"
    of_ids: list[float] = values[at][:count].tolist()
    return of_ids


def _collect_prompt_logprobs(
    rank: RankScheduler, plan: RankPlan, result: RankResult, current: np.ndarray
) -> None:
    """Keep the log-probabilities of this step's prompt tokens for the request's next output."""
    for index, values in (result.prompt_logprobs or {}).items():
        if not current[index]:
            continue
        request = rank.running.request(int(plan.rows[index]))
        end = int(plan.kv_starts[index] + plan.q_lens[index]) + 1
        first = end - len(values.logprobs)  # position of the first token predicted here
        end = min(end, request.prompt_len)
        if request.logprob_next == 0:
            token = int(request.tokens[0])
            request.pending_prompt_logprobs.append(TokenLogprobs(token, None, [], []))
            request.logprob_next = 1
        for position in range(max(request.logprob_next, first), end):
            request.pending_prompt_logprobs.append(
                _prompt_token_logprobs(request, position, values, position - first)
            )
        request.logprob_next = max(request.logprob_next, end)


def _prompt_token_logprobs(
    request: Request, position: int, values: PromptLogprobs, index: int
) -> TokenLogprobs:
    count = request.message.top_logprobs_num
    return TokenLogprobs(
        int(request.tokens[position]),
        float(values.logprobs[index]),
        values.top_ids[index, :count].tolist(),
        values.top_logprobs[index, :count].tolist(),
        _of_ids(values.id_logprobs, index, len(request.message.token_ids_logprob)),
    )
