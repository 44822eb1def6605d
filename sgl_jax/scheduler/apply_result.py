"""Applies a step's results to its requests: new tokens, stops, releases.

A result belongs to a row's request only if the row's epoch is still the launch's. If the request
finished, was aborted or retracted meanwhile, its result is dropped; after a retract it is
recomputed.
"""

from collections.abc import Sequence

import numpy as np

from sgl_jax.core.engine_messages import FinishReason, RequestOutput, TokenLogprobs
from sgl_jax.core.step_plan import (
    Float32Array,
    Int32Array,
    PromptLogprobs,
    RankPlan,
    RankResult,
    StepPlan,
)
from sgl_jax.core.token_values import TOKEN_VALUES, named_values
from sgl_jax.mem_cache.row_growth import commit_rows
from sgl_jax.scheduler.draft_policy import rate_drafts
from sgl_jax.scheduler.in_flight_rows import (
    GOES_ON,
    STOPPED,
    InFlightRows,
    Records,
    append,
)
from sgl_jax.scheduler.kept_states import record_starts
from sgl_jax.scheduler.output_buffer import OutputBuffer
from sgl_jax.scheduler.rank_scheduler import RankScheduler
from sgl_jax.scheduler.ranks import Ranks
from sgl_jax.scheduler.request import Request


def apply_result(
    ranks: Ranks,
    plan: StepPlan,
    launched: InFlightRows,
    results: Sequence[RankResult],
    outputs: OutputBuffer,
) -> tuple[list[Request], int]:
    """Apply the results of `plan`, which was launched with `launched`; add new tokens to `outputs`.

    Returns the finished requests, and the number of rows with non-finite results, which gain
    nothing (`non_finite.py`).
    """
    rows, bounds = launched
    running, epoch = ranks.running, ranks.tables.epoch
    for i in [i for i, own in enumerate(plan.ranks) if own.num_scored is not None]:
        part = rows[bounds[i] : bounds[i + 1]]
        is_current = epoch[part["row"]] == part["epoch"]
        _collect_prompt_logprobs(ranks.ranks[i], plan.ranks[i], results[i], is_current)
    tokens = np.concatenate([result.tokens for result in results])
    num_stop_ids = max(rank.running.num_stop_ids for rank in ranks.ranks)
    num_tokens, num_failed, plain_rows, plain_tokens, detailed = append(
        rows,
        tokens,
        running.records,
        epoch,
        running.tokens,
        running.latest,
        running.stop_ids[:, :num_stop_ids],
    )
    for i in [i for i, result in enumerate(results) if result.token_values]:
        own = rows[bounds[i] : bounds[i + 1]]
        _collect_values(ranks.ranks[i], plan.ranks[i], results[i], own, epoch)
    ranks.num_generated_tokens += num_tokens
    ranks.tenants.serve_outputs(running.tenant, rows["row"], rows["num_gained"], num_tokens)
    if tokens.shape[1] > 1:
        _count_ahead(ranks, rows, tokens)
        if ranks.has_states:
            record_starts(ranks, plan, rows, tokens)
    outputs.add_plain(ranks, plain_rows, plain_tokens)

    done = []
    columns = (rows[name][detailed].tolist() for name in ("row", "num_gained", "end"))
    for i, joint_row, count, end in zip(detailed.tolist(), *columns, strict=True):
        rank, row = ranks.locate(joint_row)
        gained = tokens[i, :count].tolist()
        logprobs = None
        if rank.columns.return_logprob[row]:
            at = i - bounds[rank.dp_rank]
            logprobs = _token_logprobs(rank, row, gained, results[rank.dp_rank], at)
        finish = _finish_reason(end, gained[-1])
        hidden = None
        if rank.columns.returns_hidden[row]:
            hidden = _hidden(results[rank.dp_rank], i - bounds[rank.dp_rank])
        outputs.outputs.append(_output(rank, row, gained, finish, logprobs, hidden))
        if finish is not None:
            done.append(rank.finish(row))
    return done, num_failed


def _finish_reason(end: int, last_token: int) -> FinishReason | None:
    if end == GOES_ON:
        return None
    return FinishReason("stop", last_token) if end == STOPPED else FinishReason("length")


def _count_ahead(ranks: Ranks, launched: Records, tokens: Int32Array) -> None:
    """Update the rows' lengths with the tokens that they gained after the first, and the statistics
    of drafts. `launched` LAUNCHED[n] and `tokens` cover all rows of the step; rows without new
    tokens are skipped."""
    index = launched["num_gained"].nonzero()[0]
    launched = launched[index]
    rows = launched["row"]
    accepted = (tokens[index] >= 0).sum(axis=1).astype(np.int32) - 1
    running, tables = ranks.running, ranks.tables
    running.unread_drafts[rows] -= launched["num_ahead"]
    running.planned_len[rows] += accepted
    commit_rows(tables, ranks.memories, rows, tables.kv_committed_len[rows] + accepted)
    if not ranks.max_draft_tokens:
        return
    drafted = launched["num_ahead"]
    ranks.num_verified += int(np.count_nonzero(drafted))
    ranks.num_drafted += int(drafted.sum())
    ranks.num_accepted += int(accepted.sum())
    rate_drafts(running, rows, drafted, accepted)


def _output(
    rank: RankScheduler,
    row: int,
    tokens: list[int],
    finish: FinishReason | None,
    logprobs: list[TokenLogprobs] | None,
    hidden: bytes | None,
) -> RequestOutput:
    request = rank.running.request(row)
    prompt_logprobs = request.pending_prompt_logprobs or None
    request.pending_prompt_logprobs = []
    values, request.pending_values = request.pending_values, {}
    rank.columns.is_unsent[row] = False
    return RequestOutput(
        rid=request.rid,
        token_ids=tokens,
        cached_tokens=request.cached_tokens,
        dp_rank=rank.dp_rank,
        finish=finish,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        prompt_tokens=request.pop_prompt_len(),
        hidden=hidden,
        token_values={name: b"".join(parts) for name, parts in values.items()},
    )


def _hidden(result: RankResult, index: int) -> bytes:
    assert result.hidden is not None, "the plan asked for hidden states"
    hidden: bytes = result.hidden[index].astype("<f4", copy=False).tobytes()
    return hidden


def _token_logprobs(
    rank: RankScheduler, row: int, tokens: list[int], result: RankResult, index: int
) -> list[TokenLogprobs]:
    assert result.logprobs is not None, "the plan asked for log-probabilities"
    logprobs = result.logprobs[index].tolist()
    count = int(rank.columns.top_logprobs_num[row])
    num_ids = int(rank.columns.num_logprob_ids[row])
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
    """Return the values at one position for the `count` tokens named by the request."""
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


def _collect_values(
    rank: RankScheduler, plan: RankPlan, result: RankResult, launched: Records, epoch: Int32Array
) -> None:
    """Keep the values of the tokens of this step that stay, for the requests' next outputs.
    `launched` LAUNCHED[n] are the rank's rows, after `append`. A row that failed has no output."""
    columns, ends = rank.columns, np.cumsum(launched["q_len"])
    is_kept = epoch[launched["row"]] == launched["epoch"]
    for i in (is_kept & (columns.token_values[launched["own_row"]] > 0)).nonzero()[0].tolist():
        step = launched[i]
        request, first = rank.running.request(int(step["own_row"])), int(step["kv_start"])
        count = int(step["q_len"])
        if i < plan.num_decode:  # from the token before the gained ones on, as far as those go
            count = int(step["num_gained"])
            first = int(columns.known_len[step["own_row"]]) - count - 1
        at = slice(ends[i] - step["q_len"], ends[i]) if plan.num_steps is None else i
        assert first <= request.value_next, "every token from there on is computed"
        num_known = request.value_next - first
        if num_known < count:
            for name in named_values(request.message.token_values):
                queries = result.token_values[name][at][num_known:count]
                written = queries.astype(TOKEN_VALUES[name]).tobytes()
                request.pending_values.setdefault(name, []).append(written)
            request.value_next = first + count
