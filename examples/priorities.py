"""Send requests with priorities: an urgent one is served before those that came first.

It needs a server with priorities and one row. Its URL is an optional argument:

    scripts/serve --enable-priority-scheduling --max-running-requests 1

The requests end in this order:

    priority 40
    priority 20
    priority 0
"""

import json
import sys

import httpx

PRIORITIES = (0, 20, 40)  # differ by more than --priority-scheduling-preemption-threshold


def main(url: str = "http://127.0.0.1:30000") -> None:
    body = {
        "text": ["Count."] * len(PRIORITIES),
        "priority": PRIORITIES,
        "sampling_params": {"temperature": 0, "max_new_tokens": 64, "ignore_eos": True},
        "stream": True,
    }
    with httpx.stream("POST", f"{url}/generate", json=body, timeout=60) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if event["meta_info"]["finish_reason"] is not None:
                print(f"priority {PRIORITIES[event['index']]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
