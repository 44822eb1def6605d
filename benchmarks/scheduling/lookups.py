"""The order by cached prefix among all waiting requests, against two simpler orders.

    python -m benchmarks.scheduling.lookups

The alternatives look up the cached prefixes of the 128 oldest requests, which then come before all
others, or of none (`--schedule-policy fcfs`). Clients wait for their answers, so as many requests
wait as there are clients, less the rows.
"""

from typing import Any

from benchmarks.scheduling.clients import closed_loop, requests
from benchmarks.scheduling.run import new_engine
from benchmarks.scheduling.simulation import Simulation
from benchmarks.scheduling.traffic import Load
from sgl_jax.scheduler.waiting.admission_order import AdmissionOrder

NUM_LOOKED_UP = 128
NUM_ROWS = 64
LOADS = ((256, 40), (2_112, 40), (2_112, 400))  # clients, prefixes
SECONDS = 10.0  # of the logical clock


def line(num_clients: int, num_prefixes: int, policy: str) -> str:
    """Return a line of the table for one order."""
    make = requests("chat", 100, (50, 150), 256, prefixes=(num_prefixes, 1_500))
    load = Load(
        "lookups",
        "",
        lambda: closed_loop(num_clients, make),
        SECONDS,
        pool_tokens=24_576,
        num_rows=NUM_ROWS,
        args={"schedule_policy": policy},
    )
    engine = new_engine(load)
    result = Simulation(load, engine).run()
    counters = engine.scheduler.counters()
    found = counters["cached_tokens"] / counters["prompt_tokens"]
    return f"{found:.3f} | {result.tokens_per_s:,.0f} | {result.mean_wait_ms:,.0f}"


def main() -> None:
    order_keys = AdmissionOrder._order_keys

    def of_oldest(self: AdmissionOrder, *arguments: Any) -> Any:
        columns = self._columns.lines
        waiting = columns.is_waiting[: self._columns.end].nonzero()[0]
        later = waiting[columns.arrival[waiting].argsort(kind="stable")][NUM_LOOKED_UP:]
        cached = columns.most_cached[later]
        columns.most_cached[later] = 0
        keys = order_keys(self, *arguments)
        columns.most_cached[later] = cached
        return keys

    print("| waiting | prefixes | looked up | found | tokens/s | mean wait, ms |")
    print("|---|---|---|---|---|---|")
    for num_clients, num_prefixes in LOADS:
        for name, policy, keys in (
            ("all", "lpm", order_keys),
            (f"the {NUM_LOOKED_UP} oldest", "lpm", of_oldest),
            ("none", "fcfs", order_keys),
        ):
            AdmissionOrder._order_keys = keys  # type: ignore[assignment, method-assign]
            figures = line(num_clients, num_prefixes, policy)
            print(
                f"| {num_clients - NUM_ROWS:,} | {num_prefixes} | {name} | {figures} |", flush=True
            )


if __name__ == "__main__":
    main()
