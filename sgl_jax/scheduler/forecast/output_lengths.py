"""Estimates the distribution of output lengths: the chance to continue after a number of tokens.

Lengths fall into buckets, eight to each doubling. Each class of requests (tenant, and requested
limit by doublings) keeps two counts per bucket: outputs that reached it, and outputs that ended
there by themselves. Their ratio is the bucket's hazard, and the product of (1 - hazard) is the
chance to pass (Kaplan and Meier, 1958). So an output cut off by its limit or its client counts up
to its length, and so does a running output: the estimate moves long before the first long output
ends. Counts decay with each ended output. Classes with few outputs use the hazards of all requests;
if these are few, a scale-free prior applies: an output doubles its length with a chance of .7.
"""

import numpy as np
from numpy.typing import NDArray

from sgl_jax.core.compiled import compiled
from sgl_jax.core.step_plan import BoolArray, Int32Array, IntpArray, RowIndex
from sgl_jax.scheduler.request import Request
from sgl_jax.scheduler.running_rows import RowColumns

Float64Array = NDArray[np.float64]
Int64Array = NDArray[np.int64]

MAX_CLASSES = 256  # requests of any further class count in the class of all
_ALL = 0
_PER_DOUBLING = 8
_NUM_DOUBLINGS = 22
# The weight of an ended output halves after about 90 more.
_KEPT = 1 - 1 / 128
# Each prior counts as this many outputs.
_WEIGHT_OF_ALL = 8.0
_WEIGHT_OF_PRIOR = 2.0
_PRIOR_HAZARD = 0.0424  # 1 - 2 ** (-1 / 16)
_PRIOR_FROM = 32  # tokens, before which the prior expects no end
_MAX_HAZARD = 0.99
# A request with a smaller chance to continue counts as ended.
_LEAST_CHANCE = 0.001
_NO_LENS = np.zeros(0, np.int32)


# Steps ahead for which needs are forecast: 0, 8, .. 24, 32, 40, .. 56, 64, 80, .. 112, 128, 160, ..
# 1,024. Later steps are not planned: memory idle for longer costs more than a retract, which keeps
# all tokens.
MOMENTS: IntpArray = np.concatenate(
    (np.arange(0, 32, 8), ((4 + np.arange(4)) << np.arange(3, 8)[:, None]).reshape(-1), [1024])
)


def _bucket_starts() -> IntpArray:
    """Return the least length of each bucket: 0, 1, .. 15, 16, 18, .. 30, 32, 36, .."""
    doublings = np.arange(_NUM_DOUBLINGS)[:, None]
    starts = (_PER_DOUBLING + np.arange(_PER_DOUBLING)) << doublings
    return np.concatenate((np.arange(_PER_DOUBLING), starts.reshape(-1)))


class OutputLengths:
    """The estimate, for requests of all ranks."""

    def __init__(self) -> None:
        self.starts = _bucket_starts()
        shape = (MAX_CLASSES, len(self.starts))
        # [class, bucket]: the chance to reach the bucket.
        self.survival: Float64Array = np.zeros(shape)
        # [class, bucket, moment]: the chance that so many steps follow from the bucket's first
        # length, computed by `buckets`; `is_current`, [class, bucket], marks computed entries.
        self.chances: Float64Array = np.zeros((*shape, len(MOMENTS) - 1))
        self.is_current: BoolArray = np.zeros(shape, np.bool_)
        self._reached = np.zeros(shape)
        self._ended = np.zeros(shape)
        self._classes: dict[tuple[int, int], int] = {}
        self.num_updates = 0
        _update(_NO_LENS, _NO_LENS, 1, self.starts, self._reached, self._ended, self.survival)

    def class_of(self, request: Request) -> int:
        """Return the number of the request's class, its index in `survival`."""
        key = request.tenant, (request.max_len - request.prompt_len).bit_length()
        number = self._classes.get(key)
        if number is None:
            if len(self._classes) == MAX_CLASSES - 1:
                return _ALL
            number = self._classes[key] = 1 + len(self._classes)
            self.survival[number] = self.survival[_ALL]
            self.is_current[number] = False
        return number

    def add(self, number: int, num_tokens: int, *, has_ended: bool) -> None:
        """Count an ended output of class `number`; without `has_ended` it was cut off."""
        _count(number, num_tokens, has_ended, self.starts, self._reached, self._ended)

    def buckets(self, classes: Int32Array, output_lens: Int32Array) -> Int32Array:
        """Return int32[n], the buckets of outputs by class and present length; update `chances`."""
        found: Int32Array = _find_buckets(
            classes,
            output_lens,
            self.starts,
            self.survival,
            MOMENTS,
            self.chances,
            self.is_current,
        )
        return found

    def expected(self, number: int, output_len: int, left_len: int) -> tuple[int, float]:
        """Return the bucket of an output of `output_len` tokens, and the mean number of tokens that
        follow, `left_len` at most."""
        bucket, expected = _expected(
            number,
            output_len,
            left_len,
            self.starts,
            self.survival,
            MOMENTS,
            self.chances,
            self.is_current,
        )
        return bucket, expected

    def update(self, running: RowColumns, rows: RowIndex) -> None:
        """Compute `survival` again, with the present lengths of the running requests in `rows`."""
        self.is_current[:] = False
        self.num_updates += 1
        _update(
            running.length_class[rows],
            running.planned_len[rows] - running.prompt_len[rows],
            1 + len(self._classes),
            self.starts,
            self._reached,
            self._ended,
            self.survival,
        )


@compiled("(int64, int64)")
def _bucket_of(num_tokens: int, num_buckets: int) -> int:
    """Return the bucket of a length, by `_bucket_starts`."""
    num_doublings = 0
    while num_tokens >> num_doublings >= 2 * _PER_DOUBLING:
        num_doublings += 1
    bucket = num_doublings * _PER_DOUBLING + (num_tokens >> num_doublings)
    return int(min(bucket, num_buckets - 1))


@compiled("(int64, int64, boolean, int64[::1], float64[:, ::1], float64[:, ::1])")
def _count(
    number: int,
    num_tokens: int,
    has_ended: bool,
    starts: IntpArray,
    reached: Float64Array,
    ended: Float64Array,
) -> None:
    """Count an output of `num_tokens` in class `number` and in all; decay earlier counts."""
    assert 0 <= number < len(reached) == len(ended)
    assert reached.shape[1] == ended.shape[1] == len(starts)
    assert num_tokens >= 0
    bucket = _bucket_of(num_tokens, len(starts))
    for each in (_ALL, number):
        for k in range(len(starts)):
            reached[each, k] *= _KEPT
            ended[each, k] *= _KEPT
            if k < bucket or (k == bucket and has_ended):
                reached[each, k] += 1
        if has_ended:
            ended[each, bucket] += 1
        if number == _ALL:
            break


@compiled(
    "(int64, float64[::1], int64[::1], int64[::1], float64[::1])",
)
def _find_chances(
    bucket: int,
    survival: Float64Array,
    starts: IntpArray,
    moments: IntpArray,
    chances: Float64Array,
) -> None:
    """Write the chances of an output in `bucket` to continue up to each of `moments`."""
    assert len(survival) == len(starts)
    assert len(chances) < len(moments)
    first = bucket
    for j in range(len(chances)):
        while bucket + 1 < len(starts) and starts[bucket + 1] <= starts[first] + moments[j]:
            bucket += 1
        chance = survival[bucket] / survival[first]
        chances[j] = chance if chance >= _LEAST_CHANCE else 0.0


@compiled(
    "(int32[::1], int32[::1], int64[::1], float64[:, ::1], int64[::1], float64[:, :, ::1], "
    "boolean[:, ::1])"
)
def _find_buckets(
    classes: Int32Array,
    output_lens: Int32Array,
    starts: IntpArray,
    survival: Float64Array,
    moments: IntpArray,
    chances: Float64Array,
    is_current: BoolArray,
) -> Int32Array:
    """Return int32[n], the buckets of outputs, and write their missing `chances`."""
    buckets = np.empty(len(classes), np.int32)
    assert len(output_lens) == len(classes)
    for i in range(len(classes)):
        of_class, bucket = classes[i], _bucket_of(output_lens[i], len(starts))
        assert 0 <= of_class < len(survival)
        assert bucket >= 0
        buckets[i] = bucket
        if not is_current[of_class, bucket]:
            _find_chances(bucket, survival[of_class], starts, moments, chances[of_class, bucket])
            is_current[of_class, bucket] = True
    return buckets


@compiled(
    "(int64, int64, int64, int64[::1], float64[:, ::1], int64[::1], float64[:, :, ::1], "
    "boolean[:, ::1])"
)
def _expected(
    of_class: int,
    output_len: int,
    left_len: int,
    starts: IntpArray,
    survival: Float64Array,
    moments: IntpArray,
    chances: Float64Array,
    is_current: BoolArray,
) -> tuple[int, float]:
    """Return the bucket of an output, and the mean number of tokens that follow."""
    bucket = _bucket_of(output_len, len(starts))
    assert 0 <= of_class < len(survival)
    assert bucket >= 0
    goes_on = chances[of_class, bucket]
    if not is_current[of_class, bucket]:
        _find_chances(bucket, survival[of_class], starts, moments, goes_on)
        is_current[of_class, bucket] = True
    expected, last = 0.0, len(goes_on) - 1
    for j in range(len(goes_on)):
        expected += goes_on[j] * (min(moments[j + 1], left_len) - min(moments[j], left_len))
    return bucket, expected + goes_on[last] * max(left_len - moments[last + 1], 0)


@compiled(
    "(int32[::1], int32[::1], int64, int64[::1], float64[:, ::1], float64[:, ::1], float64[:, ::1])"
)
def _update(
    classes: Int32Array,
    output_lens: Int32Array,
    num_classes: int,
    starts: IntpArray,
    reached: Float64Array,
    ended: Float64Array,
    survival: Float64Array,
) -> None:
    """Compute `survival` of the first `num_classes` classes. `classes` and `output_lens` belong to
    the running requests: they have reached all buckets before their present one, and ended in
    none."""
    num_buckets = len(starts)
    assert 0 < num_classes <= len(survival)
    assert reached.shape == ended.shape == survival.shape
    assert reached.shape[1] == num_buckets
    assert len(classes) == len(output_lens)
    running = np.zeros((num_classes, num_buckets))
    for i in range(len(classes)):
        assert 0 <= classes[i] < num_classes
        bucket = _bucket_of(output_lens[i], num_buckets)
        running[classes[i], bucket] += 1
        if classes[i] != 0:
            running[0, bucket] += 1
    hazards = np.empty(num_buckets)  # of all classes
    for number in range(num_classes):
        passed = 0.0
        for k in range(num_buckets - 1, -1, -1):
            here, running[number, k] = running[number, k], passed
            passed += here
        chance = 1.0
        for k in range(num_buckets):
            prior = _PRIOR_HAZARD if starts[k] >= _PRIOR_FROM else 0.0
            weight = _WEIGHT_OF_PRIOR
            if number > 0:
                prior, weight = hazards[k], _WEIGHT_OF_ALL
            at_risk = reached[number, k] + running[number, k] + weight
            hazard = min((ended[number, k] + prior * weight) / at_risk, _MAX_HAZARD)
            if number == 0:
                hazards[k] = hazard
            survival[number, k] = chance
            chance *= 1 - hazard
