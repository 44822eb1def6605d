"""What a step has to compute, and what a device has to read for it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StepWork:
    """What one rank computes in a step."""

    tokens: int  # queries of all rows
    kv_tokens_read: int  # by all rows together
    query_key_pairs: int  # of attention
    is_prefill: bool = True  # decode's products hide behind its reads


@dataclass(frozen=True)
class DeviceBytes:
    """What one device holds, by how it is read."""

    layer_and_head_bytes: int  # read whole in every step, experts left out
    expert_bytes: int
    weight_itemsize: int
    kv_token_bytes: int  # of all layers
    kv_itemsize: int
    tp_size: int
