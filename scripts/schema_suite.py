"""Request answers by many JSON schemas, and validate each answer that ended by itself.

    scripts/schema_suite.py FOLDER [--url http://127.0.0.1:30000]

FOLDER holds files in the form of the public JSON-Schema-Test-Suite, such as its
`tests/draft2020-12`: lists of objects with a `schema` each. A schema that the server refuses is
counted by the reason; the exit code is 1 if an answer was not valid.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs

_PROMPT = "Give me an example as JSON."
_LONGEST_REASON = 100  # characters


def schemas_in(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield description and schema of each group in the files; skip non-object schemas."""
    for file in sorted(folder.glob("*.json")):
        for group in json.loads(file.read_text()):
            if isinstance(group["schema"], dict):
                yield f"{file.stem}: {group['description']}", group["schema"]


def answers(http: httpx.Client, schema: Any, num_answers: int) -> list[str] | str:
    """Return the texts of the answers that ended by themselves, or why the schema was refused."""
    sampling = {"json_schema": json.dumps(schema), "temperature": 1.0, "max_new_tokens": 200}
    body = {"text": _PROMPT, "sampling_params": {**sampling, "n": num_answers, "seed": 1}}
    response = http.post("/generate", json=body)
    if response.status_code == 400:
        reason: str = response.json()["error"]["message"]
        return reason[:_LONGEST_REASON]
    response.raise_for_status()
    results = response.json()
    results = results if isinstance(results, list) else [results]
    return [
        result["text"]
        for result in results
        if result["meta_info"]["finish_reason"]["type"] == "stop"
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the counts of all results, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--answers", type=int, default=4, help="to each schema (4)")
    options = parser.parse_args(argv)
    refused: Counter[str] = Counter()
    num_schemas = num_cut = num_valid = 0
    invalid: list[str] = []
    with httpx.Client(base_url=options.url, timeout=120) as http:
        for name, schema in schemas_in(options.folder):
            num_schemas += 1
            texts = answers(http, schema, options.answers)
            if isinstance(texts, str):
                refused[texts] += 1
                continue
            num_cut += options.answers - len(texts)
            validator = jsonschema_rs.validator_for(schema)
            for text in texts:
                if validator.is_valid(json.loads(text)):
                    num_valid += 1
                else:
                    invalid.append(f"{name}: {text}")
    print(
        f"{num_schemas} schemas, {refused.total()} refused; of the answers to the others "
        f"{num_valid} valid, {len(invalid)} not, {num_cut} cut off"
    )
    for reason, count in refused.most_common():
        print(f"refused {count}: {reason}")
    for line in invalid:
        print(f"not valid: {line}")
    return 1 if invalid else 0


if __name__ == "__main__":
    sys.exit(main())
