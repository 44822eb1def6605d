"""The list of mutations fits the code: each names a text that is there, once."""

from pathlib import Path

import pytest

from tests.mutation.mutations import MUTATIONS, Mutation

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_changes_one_place_and_leaves_valid_code(mutation: Mutation) -> None:
    text = (ROOT / mutation.path).read_text()
    assert text.count(mutation.before) == 1
    changed = text.replace(mutation.before, mutation.after)
    assert changed != text
    compile(changed, mutation.path, "exec")


def test_there_are_many_and_each_has_a_name_of_its_own() -> None:
    assert len(MUTATIONS) >= 20
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
