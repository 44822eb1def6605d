"""Steps on the device: the tokens a plain recomputation gives, however steps are cut and spread."""

import threading
import weakref
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from sgl_jax.checkpoint.loading import load_params
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.executor import model_executor, programs
from sgl_jax.executor.model_executor import ModelExecutor
from sgl_jax.executor.programs import Programs
from sgl_jax.executor.weights import ServedWeights
from sgl_jax.kernels.attention.batch import AttentionBatch
from sgl_jax.models.architecture import BuildOptions
from sgl_jax.models.config import ModelConfig
from sgl_jax.models.placement import place_model
from tests.executor.step_driver import Driver, Row
from tests.support.long import long
from tests.support.shared_programs import forget_programs
from tests.support.waiting import until

CONTEXT = 64
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, 90, n).tolist() for n in (3, 21, 1, 10)]
STEPS = 12
DRAFTING = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 3}


@pytest.fixture(scope="session")
def reference_logits(model_folder):
    """tokens -> logits [len(tokens), vocab], computing everything anew each time."""
    config = ModelConfig.from_path(model_folder)
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "tensor"))
    placed = place_model(config, mesh, BuildOptions(jnp.float32, separates_layers=True))
    params = load_params(placed, model_folder, "dummy")

    def forward(params, tokens, length):
        model = nnx.merge(placed.graphdef, params)
        pages = jnp.arange(1, 17, dtype=jnp.int32)[None]
        zero = jnp.zeros(1, jnp.int32)
        batch = AttentionBatch.build(pages, zero, length[None], jnp.int32(0), CONTEXT)
        hidden, *_ = model(tokens, [batch], (jnp.zeros((2, 17, 4, 4, 16)),))
        return model.logits(hidden).whole_rows()

    run = jax.jit(jax.shard_map(forward, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))

    def logits(tokens):
        padded = np.zeros(CONTEXT, np.int32)
        padded[: len(tokens)] = tokens
        return np.asarray(run(params, padded, np.int32(len(tokens))))[: len(tokens)]

    return logits


@pytest.fixture(scope="session")
def greedy(reference_logits):
    """(prompt, n) -> the n tokens that greedy decoding by recomputation gives."""

    def generate(prompt, n):
        tokens = list(prompt)
        for _ in range(n):
            tokens.append(int(reference_logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]

    return generate


def rows(dp_size=1, sampling=None, prompts=PROMPTS):
    """A row per prompt, dealt over the ranks."""
    settings = {} if sampling is None else {"sampling": sampling}
    return [
        Row(i % dp_size, 1 + i // dp_size, list(p), seed=i + 7, **settings)
        for i, p in enumerate(prompts)
    ]


@pytest.mark.parametrize(
    ("chunk", "prompts", "overlap"),
    [
        (3, PROMPTS[:2], True),
        (8, PROMPTS[1:2], False),
        pytest.param(3, PROMPTS[:2], False, marks=pytest.mark.long),
        pytest.param(8, PROMPTS[1:2], True, marks=pytest.mark.long),
    ],
)
def test_chunked_prefill_and_decode_give_the_tokens_of_recomputation(
    make_executor, greedy, chunk, prompts, overlap
):
    outputs = Driver(make_executor(), rows(prompts=prompts)).run(STEPS, chunk, overlap)
    assert min(map(len, outputs)) > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output == greedy(prompt, len(output))


@pytest.mark.parametrize(
    "layout",
    [
        *long({"dp_size": 2}, {"tp_size": 2}),
        {"dp_size": 2, "tp_size": 2, "weight_sharding": "data"},
    ],
    ids=str,
)
def test_every_mesh_gives_the_tokens_of_one_device(make_executor, greedy, layout):
    executor = make_executor(**layout)
    outputs = Driver(executor, rows(executor.sizes.dp_size)).run(STEPS, chunk=2)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output == greedy(prompt, len(output))
    assert min(map(len, outputs)) > 0


def test_sampled_tokens_do_not_depend_on_rank_neighbours_or_overlap(make_executor):
    sampling = SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.1)
    together = Driver(make_executor(), rows(sampling=sampling)).run(STEPS, chunk=2)
    alone = rows(sampling=sampling)[1]
    alone.row = 4
    assert Driver(make_executor(), [alone]).run(STEPS, 2, overlap=False) == [together[1]]
    spread = Driver(make_executor(dp_size=2), rows(2, sampling)).run(STEPS, chunk=2)
    assert spread == together


GREEDY = SamplingParams(temperature=0.0)
RANDOM = SamplingParams(temperature=0.7, top_k=3, frequency_penalty=0.3, min_new_tokens=20)


@pytest.mark.parametrize(
    ("sampling", "dp_size", "overlap"),
    [
        (GREEDY, 1, True),
        (RANDOM, 2, True),
        *[
            pytest.param(*own, marks=pytest.mark.long)
            for own in (
                (GREEDY, 1, False),
                (GREEDY, 2, False),
                (GREEDY, 2, True),
                (RANDOM, 1, False),
                (RANDOM, 1, True),
                (RANDOM, 2, False),
            )
        ],
    ],
    ids=lambda own: own if not isinstance(own, SamplingParams) else f"{own.temperature}",
)
def test_drafts_change_how_many_tokens_a_step_brings_but_not_which(
    make_executor, sampling, dp_size, overlap
):
    """Repetitive prompts, so that drafts are accepted now and then; lengths travel on device."""
    prompts = [[5, 6, 7] * 4, [9] * 7, PROMPTS[1], PROMPTS[2]]
    plain = Driver(make_executor(), rows(1, sampling, prompts)).run(40, chunk=2)
    executor = make_executor(dp_size=dp_size, **DRAFTING)
    drafting = Driver(executor, rows(dp_size, sampling, prompts), num_drafts=3)
    outputs = drafting.run(24, 2, overlap)
    for row, output, expected in zip(drafting.rows, outputs, plain, strict=True):
        shared = min(len(output), len(expected))
        assert shared > 12
        assert output[:shared] == expected[:shared], row
    assert max(map(len, outputs)) > 24, "no draft was ever accepted"


def test_a_row_admitted_again_with_its_output_goes_on_as_if_never_interrupted(make_executor):
    sampling = SamplingParams(temperature=1.0, frequency_penalty=0.5)
    prompt = PROMPTS[3]
    straight = Driver(make_executor(), [Row(0, 1, prompt, sampling)]).run(STEPS)[0]
    resumed = Row(0, 3, prompt + straight[:4], sampling, prompt_len=len(prompt))
    assert Driver(make_executor(), [resumed]).run(6)[0] == straight[4 : 4 + len(resumed.output)]
    assert len(resumed.output) > 3


def test_log_probabilities_are_those_of_the_model(make_executor, reference_logits):
    executor = make_executor()
    (row,) = rows(prompts=[PROMPTS[0]], sampling=SamplingParams(temperature=0.5))
    row.logprob_ids = (90, 3, 90)
    driver = Driver(executor, [row])
    for _ in range(2):
        plan, _ = driver.plan(chunk=8, return_logprob=True, top_logprobs_num=3, num_logprob_ids=3)
        (result,) = executor.result(executor.launch(plan))
        want = log_softmax(reference_logits(row.prompt + row.output)[-1])
        token, top_ids, top = result.tokens[0, 0], result.top_ids[0, 0], result.top_logprobs[0, 0]
        row.output.append(int(token))
        np.testing.assert_allclose(result.logprobs[0], want[[token]], atol=1e-4)
        np.testing.assert_allclose(top, np.sort(want)[::-1][:20], atol=1e-4)
        np.testing.assert_allclose(top, want[top_ids], atol=1e-4)
        np.testing.assert_allclose(result.id_logprobs[0, 0, :3], want[[90, 3, 90]], atol=1e-4)
    plan, _ = driver.plan(chunk=8, return_logprob=True)
    assert executor.result(executor.launch(plan))[0].id_logprobs is None


def test_named_tokens_are_scored_at_each_place_that_drafts_reach(make_executor, reference_logits):
    """Of rows on two ranks, each with tokens of its own, a step after the other."""
    executor = make_executor(**DRAFTING, dp_size=2)
    all_rows = rows(2, prompts=[[5, 6] * 6, PROMPTS[1], [7, 8, 9] * 4])
    for row, ids in zip(all_rows, ((1, 2), (), (94, 0, 50)), strict=True):
        row.logprob_ids = ids
    driver = Driver(executor, all_rows, num_drafts=3)
    most = 0
    for _ in range(8):
        plan, order = driver.plan(chunk=8, return_logprob=True, num_logprob_ids=3)
        results = driver._read([(plan, executor.launch(plan), order)])
        for result, of_rank in zip(results, order, strict=True):
            for row, tokens, values in zip(of_rank, result.tokens, result.id_logprobs, strict=True):
                gained = int((tokens >= 0).sum())
                most = max(most, gained)
                known = row.prompt + row.output
                for j in range(gained):
                    want = log_softmax(reference_logits(known[: len(known) - gained + j])[-1])
                    ids = list(row.logprob_ids)
                    np.testing.assert_allclose(values[j, : len(ids)], want[ids], atol=1e-4)
    assert most > 1, "no draft was accepted"


def test_a_prompt_is_scored_chunk_by_chunk_beside_a_decoding_row(make_executor, reference_logits):
    executor = make_executor()
    first, scored = rows(prompts=PROMPTS[:2])
    first.logprob_ids, scored.logprob_ids = (7,), (0, 95, 33)
    driver = Driver(executor, [first])
    executor.result(executor.launch(driver.plan(8)[0]))
    driver.rows.append(scored)
    scored.length = len(scored.prompt)
    got = []
    while scored.committed < len(scored.prompt):
        plan, order = driver.plan(chunk=7)
        (rank,) = plan.ranks
        num_scored = np.where([row is scored for row in order[0]], rank.q_lens, 0)
        rank = rank._replace(num_scored=num_scored, num_logprob_ids=3)
        plan = replace(plan, ranks=(rank,))
        (result,) = executor.result(executor.launch(plan))
        assert list(result.prompt_logprobs) == [1]
        got.append(result.prompt_logprobs[1])
    check_scores(got, scored.prompt, 0, reference_logits, scored.logprob_ids)


def check_scores(got, prompt, first, reference_logits, ids=()):
    """The model's, at each position from `first` on that has a successor in the prompt."""
    want = log_softmax(reference_logits(prompt))[first:-1]
    logprobs = np.concatenate([chunk.logprobs for chunk in got])[: len(want)]
    successors = np.array(prompt[first + 1 :])
    np.testing.assert_allclose(logprobs, want[np.arange(len(want)), successors], atol=1e-4)
    top = np.concatenate([chunk.top_logprobs for chunk in got])[: len(want)]
    np.testing.assert_allclose(top, -np.sort(-want, axis=-1)[:, :20], atol=1e-4)
    for chunk in got:
        assert (chunk.id_logprobs is None) == (not ids)
    if ids:
        of_ids = np.concatenate([chunk.id_logprobs for chunk in got])[: len(want), : len(ids)]
        np.testing.assert_allclose(of_ids, want[:, list(ids)], atol=1e-4)


def test_rows_of_two_ranks_are_scored_from_their_own_position_on(make_executor, reference_logits):
    """Beside rows that are not, and where only one of the ranks scores."""
    executor = make_executor(dp_size=2)
    all_rows = rows(2)
    driver = Driver(executor, all_rows)
    first_scored = {id(all_rows[1]): 9, id(all_rows[3]): 2}  # both on rank 1, all others plain
    got = {key: [] for key in first_scored}
    for _ in range(6):
        before = {id(row): row.committed for row in all_rows}
        plan, order = driver.plan(chunk=4)
        ranks = []
        for rank, of_rank in zip(plan.ranks, order, strict=True):
            ends = [before[id(row)] + n for row, n in zip(of_rank, rank.q_lens, strict=True)]
            starts = [max(first_scored.get(id(row), 99), before[id(row)]) for row in of_rank]
            num_scored = np.maximum(np.array(ends) - np.array(starts), 0).astype(np.int32)
            num_scored[: rank.num_decode] = 0
            ranks.append(rank._replace(num_scored=num_scored if num_scored.any() else None))
        results = executor.result(executor.launch(replace(plan, ranks=tuple(ranks))))
        assert results[0].prompt_logprobs is None
        for i, values in (results[1].prompt_logprobs or {}).items():
            got[id(order[1][i])].append(values)
    for row in (all_rows[1], all_rows[3]):
        check_scores(got[id(row)], row.prompt, first_scored[id(row)], reference_logits)


def test_a_row_that_is_scored_changes_no_drafts_beside_it(make_executor):
    executor = make_executor(**DRAFTING)
    outputs = []
    for is_scored in (False, True):
        executor.reset()
        (row, other) = (Row(0, 1, [5, 6] * 6), Row(0, 2, list(PROMPTS[1])))
        driver = Driver(executor, [row], num_drafts=3)
        driver.run(2)
        driver.rows.append(other)
        other.length = len(other.prompt)
        for _ in range(3):
            plan, order = driver.plan(chunk=8)
            (rank,) = plan.ranks
            assert rank.num_drafts[0] == 3
            num_scored = np.array([0, rank.q_lens[1] if is_scored else 0], np.int32)
            rank = rank._replace(num_scored=num_scored)
            waiting = [(plan := replace(plan, ranks=(rank,)), executor.launch(plan), order)]
            driver._read(waiting)
        outputs.append((row.output, other.output))
    assert outputs[0] == outputs[1]


def test_results_out_of_order_or_twice_are_refused(make_executor):
    executor = make_executor()
    driver = Driver(executor, rows(prompts=PROMPTS[:1]))
    first, second = (executor.launch(driver.plan(8)[0]) for _ in range(2))
    with pytest.raises(RuntimeError, match="in launch order"):
        executor.result(second)
    executor.result(first)
    with pytest.raises(RuntimeError, match="once each"):
        executor.result(first)
    executor.result(second)


def test_after_a_failed_step_reset_gives_a_working_executor(make_executor, greedy):
    executor = make_executor()
    Driver(executor, rows()).run(3, chunk=2)
    executor._state.kv_pools[0].delete()  # what an error inside a donated step leaves behind
    with pytest.raises(RuntimeError, match=r"[Dd]eleted"):
        Driver(executor, rows()).run(1, chunk=2)
    executor.reset()
    outputs = Driver(executor, rows()).run(STEPS, chunk=2)
    assert outputs[0] == greedy(PROMPTS[0], len(outputs[0]))


def test_a_step_with_nothing_to_do_is_a_step(make_executor):
    executor = make_executor(dp_size=2)
    one_sided = Driver(executor, [Row(1, 1, PROMPTS[0])])
    plan, _ = one_sided.plan(8)
    idle, busy = executor.result(executor.launch(plan))
    assert len(idle.tokens) == 0
    assert len(busy.tokens) == 1


@pytest.mark.parametrize("settings", [{}, DRAFTING], ids=["plain", "drafting"])
def test_pool_and_token_table_are_updated_in_place(make_executor, settings):
    """No program of a step holds a second pool or table, in its outputs or in between."""
    executor = make_executor(**settings)
    Driver(executor, rows(), num_drafts=executor.sizes.max_draft_tokens).run(4, chunk=2)
    pool, table = executor._state.kv_pools[0], executor._state.token_table
    state_bytes = pool.nbytes + table.nbytes
    for bucket, program in executor._programs._steps.items():
        memory = program.memory_analysis()
        assert memory.alias_size_in_bytes >= state_bytes, bucket
        copies = [
            line
            for line in program.as_text().splitlines()
            if " copy(" in line
            and any(f"[{','.join(map(str, x.shape))}]" in line for x in (pool, table))
        ]
        assert not copies, (bucket, copies)


def test_a_model_whose_logits_are_no_numbers_is_refused_in_warm_up(make_args, monkeypatch):
    executor = ModelExecutor(make_args(warmup="staged", page_size=1, dp_size=2))
    executor.weights.arrays = tuple(leaf * np.inf for leaf in executor.weights.arrays)
    with pytest.raises(ValueError, match="computes logits that are no finite numbers"):
        executor.warm_up()


def test_programs_are_compiled_while_weights_are_loaded(make_args, monkeypatch):
    are_compiled = threading.Event()
    compile_all, load_first = Programs.compile_all, ServedWeights.load_first

    def compiles(programs, *rest):
        compile_all(programs, *rest)
        are_compiled.set()

    def loads(weights):
        assert are_compiled.wait(120)
        load_first(weights)

    monkeypatch.setattr(Programs, "compile_all", compiles)
    monkeypatch.setattr(ServedWeights, "load_first", loads)
    executor = ModelExecutor(make_args(warmup="staged", max_running_requests=1))
    monkeypatch.setattr(Programs, "compile_all", None)
    executor.warm_up()


@pytest.mark.parametrize(
    ("found", "kept"),
    [(60, 60), (110, 101), pytest.param(100, 101, marks=pytest.mark.long)],
)
def test_pools_shrink_if_weights_take_clearly_more_than_planned(
    make_args, monkeypatch, greedy, found, kept
):
    pages = iter([(101,), (found,)])
    monkeypatch.setattr(model_executor, "choose_pool_pages", lambda *given: next(pages))
    executor = ModelExecutor(make_args())
    assert executor.sizes.pool_pages == (kept,)
    (output,) = Driver(executor, rows(prompts=PROMPTS[:1])).run(STEPS, 8)
    assert output == greedy(PROMPTS[0], len(output))


@pytest.fixture
def compiled_until_closed(monkeypatch):
    """The steps whose compilation has started; the first ends when its `Programs` are closed."""
    started, is_closed, load_first = [], threading.Event(), ServedWeights.load_first

    def step(own, bucket):
        started.append(bucket)
        assert is_closed.wait(60)

    def close(own, close=Programs.close):
        close(own)
        is_closed.set()

    def loads(weights):
        until(lambda: started, "a compilation starts")
        load_first(weights)

    monkeypatch.setattr(programs, "_MAX_COMPILE_THREADS", 1)
    monkeypatch.setattr(Programs, "step", step)
    monkeypatch.setattr(Programs, "close", close)
    monkeypatch.setattr(ServedWeights, "load_first", loads)
    return started


def test_weights_that_cannot_be_loaded_end_the_compilation(
    make_args, monkeypatch, compiled_until_closed
):
    """Or a process with a bad checkpoint would end only once all programs are compiled."""
    monkeypatch.setattr(model_executor, "make_zeros", lambda shapes: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ModelExecutor(make_args(warmup="all"))
    for thread in threading.enumerate():
        if thread.name.startswith("compile-first"):
            thread.join(60)
    assert len(compiled_until_closed) == 1


def test_pools_that_shrink_end_the_compilation_for_larger_ones(
    make_args, monkeypatch, compiled_until_closed
):
    pages = iter([(101,), (60,)])
    monkeypatch.setattr(model_executor, "choose_pool_pages", lambda *given: next(pages))
    ModelExecutor(make_args(warmup="all"))
    assert not any(each.name.startswith("compile-first") for each in threading.enumerate())
    assert len(compiled_until_closed) == 1


def test_blocks_beyond_the_hosts_memory_are_refused_at_the_start(make_args):
    with pytest.raises(RuntimeError, match=r"would take 1000000\..* GB that .* --hicache-ratio or"):
        ModelExecutor(make_args(enable_hierarchical_cache=True, hicache_size=1e6))


def test_warm_up_compiles_everything_that_is_ever_launched(make_args):
    limits = {"max_running_requests": 1, "chunked_prefill_size": 4}
    executor = ModelExecutor(make_args(warmup="plain", **limits))
    executor.warm_up()
    pool = np.asarray(executor._state.kv_pools[0])
    assert not pool[:, 1:].any()  # warm-up writes to the null page alone
    (row,) = rows(prompts=PROMPTS[:1], sampling=SamplingParams(temperature=1.0, min_p=0.1))
    driver = Driver(executor, [row])
    for _ in range(4):
        plan, _ = driver.plan(4, return_logprob=True)
        executor.result(executor.launch(plan))
    assert executor.compile_counts()["compiles_after_ready"] == 0
    jax.jit(lambda x: x * 3 + 1)(np.ones(3))  # a compilation besides the steps
    assert executor.compile_counts()["compiles_after_ready"] == 1
    program = weakref.ref(executor._programs.step(executor._stages.buckets.all[0]))
    executor.close()
    forget_programs()
    assert program() is None


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
