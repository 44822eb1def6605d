"""What a step's result means for the requests of one rank: new tokens, stops, releases.

A result belongs to a row's request only if the row's epoch is still that of the launch. If the
request finished, was aborted or retracted meanwhile, its result is dropped: whatever was lost is
computed again, and nothing else needs to know why.
"""

from typing import NamedTuple

import numpy as np

from sgl_jax.core.messages import FinishReason, OutputBatch, RequestOutput, TokenLogprobs
from sgl_jax.core.step_plan import (
    BoolArray,
    Int32Array,
    PromptLogprobs,
    RankPlan,
    RankResult,
    RowIndex,
)
from sgl_jax.scheduler.rank_scheduler import RankScheduler
from sgl_jax.scheduler.request import Request
from sgl_jax.scheduler.running_rows import RunningRows


def commit_rank(
    rank: RankScheduler, plan: RankPlan, result: RankResult, batch: OutputBatch
) -> list[Request]:
    """Apply one rank's result, append what its requests gained to `batch`; returns the finished."""
    if len(plan.rows) == 0:
        return []
    running, memory = rank.running, rank.memory
    planned = plan.rows.astype(np.intp)
    current = memory.rows.epoch[planned] == plan.epochs
    if plan.num_scored is not None:
        _collect_prompt_logprobs(rank, plan, result, current)

    index = (current & plan.samples).nonzero()[0]
    rows, tokens = planned[index], result.tokens[index]
    detailed = running.is_unsent[rows] | running.return_logprob[rows]
    if tokens.shape[1] == 1:
        gains = _append_token(running, rows, tokens[:, 0])
    else:
        gains = _append_tokens(running, rows, tokens)
        _count_drafts(rank, rows, plan.num_drafts[index], tokens)
        detailed |= gains.counts > 1
    rank.num_generated_tokens += int(np.add.reduce(gains.counts))
    detailed |= gains.is_finished
    plain = ~detailed
    batch.rids.extend(running.rids[rows[plain]].tolist())
    batch.tokens.extend(tokens[:, 0][plain].tolist())

    done = []
    for i in detailed.nonzero()[0].tolist():
        row, gained = int(rows[i]), tokens[i, : gains.counts[i]].tolist()
        logprobs = None
        if running.return_logprob[row]:
            logprobs = _token_logprobs(rank, row, gained, result, int(index[i]))
        finish = _finish_reason(gains, i, gained[-1])
        batch.outputs.append(_output(rank, row, gained, finish, logprobs))
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


def _append_token(running: RunningRows, rows: RowIndex, tokens: Int32Array) -> _Gains:
    """Append one new token int32[n] to each row: what most steps do."""
    known = running.known_len[rows]
    running.tokens[rows, known] = tokens
    known += 1
    running.known_len[rows] = known
    is_stop = np.zeros(len(rows), np.bool_)
    for stop_ids in running.stop_ids[: running.num_stop_ids]:
        is_stop |= stop_ids[rows] == tokens
    is_stop &= known > running.min_len[rows]
    counts = np.ones(len(rows), np.int32)
    return _Gains(counts, is_stop | (known >= running.max_len[rows]), is_stop)


def _append_tokens(running: RunningRows, rows: RowIndex, tokens: Int32Array) -> _Gains:
    """Append new tokens int32[n, w] to their rows, up to the one that ends the request.

    What a step accepted beyond that token is overshoot and forgotten here; its KV is freed with
    the lease, which offers the cache no more than the known tokens.
    """
    is_token = tokens >= 0
    lens = running.known_len[rows, None] + np.arange(1, tokens.shape[1] + 1)
    is_stop = np.zeros(tokens.shape, np.bool_)
    for stop_ids in running.stop_ids[: running.num_stop_ids]:
        is_stop |= stop_ids[rows, None] == tokens
    is_stop &= lens > running.min_len[rows, None]
    is_end = is_token & (is_stop | (lens >= running.max_len[rows, None]))
    is_finished: BoolArray = np.logical_or.reduce(is_end, axis=1)
    last = is_end.argmax(axis=1)
    counts = np.where(is_finished, last + 1, is_token.sum(axis=1))
    kept = lens <= running.known_len[rows, None] + counts[:, None]
    running.tokens[np.repeat(rows, counts), lens[kept] - 1] = tokens[kept]
    running.known_len[rows] += counts
    return _Gains(counts, is_finished, is_finished & is_stop[np.arange(len(rows)), last])


def _count_drafts(
    rank: RankScheduler, rows: RowIndex, drafted: Int32Array, tokens: Int32Array
) -> None:
    """Now it is known how many drafts were accepted: bring the rows' lengths up to date."""
    accepted = (tokens >= 0).sum(axis=1).astype(np.int32) - 1
    rank.running.unread_drafts[rows] -= drafted
    rank.running.planned_len[rows] += accepted
    rank.memory.commit_rows(rows, rank.memory.rows.kv_committed_len[rows] + accepted)
    rank.drafts.learn(rows, drafted, accepted, rank.running.known_len[rows])


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
    if not count:
        return [TokenLogprobs(t, logprobs[i], [], []) for i, t in enumerate(tokens)]
    assert result.top_ids is not None
    assert result.top_logprobs is not None
    top_ids = result.top_ids[index, :, :count].tolist()
    top_logprobs = result.top_logprobs[index, :, :count].tolist()
    return [
        TokenLogprobs(t, logprobs[i], top_ids[i], top_logprobs[i]) for i, t in enumerate(tokens)
    ]


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
    )
