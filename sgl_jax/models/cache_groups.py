"""Groups of a model's layers by the tokens that they need, and each layer's place in its group."""

import math
from collections.abc import Sequence

from sgl_jax.core.engine_sizes import LAST_VALUE, CacheGroup
from sgl_jax.models.layer_specs import LayerSpec


def group_layers(specs: Sequence[LayerSpec]) -> tuple[CacheGroup, ...]:
    """Return layers grouped by the tokens they need.

    Full attention comes first, then windows from wide to narrow, then recurrent layers. Groups with
    equally many layers of like heads share a pool; the first group has the first pool. States have
    a separate pool. Layers that read another layer's cache, or none, are in no group.
    """
    by_window: dict[int | None, list[int]] = {}
    recurrent = tuple(layer for layer, spec in enumerate(specs) if spec.recurrence)
    for layer, spec in enumerate(specs):
        if spec.has_attention and spec.cache_source is None:
            by_window.setdefault(spec.sliding_window, []).append(layer)
    windows = sorted(by_window, key=lambda w: -math.inf if w is None else -w)
    pages = {w: (len(own), specs[own[0]].heads) for w, own in by_window.items()}
    pools = list(dict.fromkeys(pages[window] for window in windows))
    groups = [
        CacheGroup(window, pools.index(pages[window]), tuple(by_window[window]))
        for window in windows
    ]
    if recurrent:
        groups.append(CacheGroup(LAST_VALUE, len(pools), recurrent, is_recurrent=True))
    return tuple(groups)


def cache_places(
    specs: Sequence[LayerSpec], groups: Sequence[CacheGroup]
) -> tuple[tuple[int, int], ...]:
    """Return each layer's group, and its place, or its source's, among the group's layers.

    Layers without a cache get a place that is not read.
    """
    places = {
        layer: (number, place)
        for number, group in enumerate(groups)
        for place, layer in enumerate(group.layers)
    }
    sources = (spec.cache_source for spec in specs)
    return tuple(
        places.get(n if source is None else source, (0, 0)) for n, source in enumerate(sources)
    )
