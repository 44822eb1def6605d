"""What a step's result means for the requests of one rank: new tokens, stops, releases.

A result belongs to a row's request only if the row's epoch is still that of the launch. If the
request finished, was aborted or retracted meanwhile, its result is dropped: whatever was lost is
computed again, and nothing else needs to know why.
"""

import numpy as np

from sgl_jax.core.messages import FinishReason, OutputBatch, RequestOutput, TokenLogprobs
from sgl_jax.core.step_plan import PromptLogprobs, RankPlan, RankResult
from sgl_jax.mem_cache.release import publish_prefix
from sgl_jax.scheduler.rank_scheduler import RankScheduler
from sgl_jax.scheduler.request import Request


def commit_rank(
    rank: RankScheduler, plan: RankPlan, result: RankResult, batch: OutputBatch
) -> list[Request]:
    """Apply one rank's result, append what its requests gained to `batch`; returns the finished."""
    if len(plan.rows) == 0:
        return []
    running, memory = rank.running, rank.memory
    current = memory.rows.epoch[plan.rows] == plan.epochs
    _publish_chunks(rank, plan, current)
    if plan.prompt_logprobs is not None:
        _collect_prompt_logprobs(rank, plan, result, current)

    index = np.flatnonzero(current & plan.samples)
    rows, tokens = plan.rows[index], result.tokens[index]
    rank.num_generated_tokens += len(rows)
    running.tokens[rows, running.known_len[rows]] = tokens
    running.known_len[rows] += 1
    known = running.known_len[rows]
    stopped = (running.stop_ids[rows] == tokens[:, None]).any(axis=1)
    stopped &= known > running.min_len[rows]
    finished = stopped | (known >= running.max_len[rows])

    detailed = finished | running.is_unsent[rows] | running.return_logprob[rows]
    plain = ~detailed
    batch.rids.extend(running.rids[rows[plain]].tolist())
    batch.tokens.extend(tokens[plain].tolist())

    done = []
    for i in np.flatnonzero(detailed).tolist():
        row, token = int(rows[i]), int(tokens[i])
        finish = None
        if finished[i]:
            finish = FinishReason("stop", token) if stopped[i] else FinishReason("length")
        logprobs = None
        if running.return_logprob[row]:
            logprobs = [_token_logprobs(rank, row, token, result, int(index[i]))]
        batch.outputs.append(_output(rank, row, [token], finish, logprobs))
        if finish is not None:
            done.append(rank.finish(row))
    return done


def _publish_chunks(rank: RankScheduler, plan: RankPlan, current: np.ndarray) -> None:
    """Let other requests share what this step prefilled, as soon as it is known to have run."""
    for i in range(plan.num_decode, len(plan.rows)):
        if current[i]:
            row = int(plan.rows[i])
            lease = rank.memory.leases[row]
            publish_prefix(rank.memory, lease, rank.running.known_tokens(row))


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
    )


def _token_logprobs(
    rank: RankScheduler, row: int, token: int, result: RankResult, index: int
) -> TokenLogprobs:
    assert result.logprobs is not None, "the plan asked for log-probabilities"
    count = int(rank.running.top_logprobs_num[row])
    top_ids: list[int] = []
    top_logprobs: list[float] = []
    if count:
        assert result.top_ids is not None
        assert result.top_logprobs is not None
        top_ids = result.top_ids[index, :count].tolist()
        top_logprobs = result.top_logprobs[index, :count].tolist()
    return TokenLogprobs(token, float(result.logprobs[index]), top_ids, top_logprobs)


def _collect_prompt_logprobs(
    rank: RankScheduler, plan: RankPlan, result: RankResult, current: np.ndarray
) -> None:
    """Keep the log-probabilities of this step's prompt tokens for the request's next output."""
    for index, values in (result.prompt_logprobs or {}).items():
        if not current[index]:
            continue
        request = rank.running.request(int(plan.rows[index]))
        first = int(plan.kv_starts[index]) + 1  # position of the first token predicted here
        end = min(first + len(values.logprobs), request.prompt_len)
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
