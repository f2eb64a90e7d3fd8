from typing import Any

def packb(o: Any, *, use_bin_type: bool = ...) -> bytes: ...
def unpackb(
    packed: bytes | memoryview,
    *,
    raw: bool = ...,
    strict_map_key: bool = ...,
    max_buffer_size: int = ...,
) -> Any: ...
