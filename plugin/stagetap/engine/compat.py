"""What differs between the pinned releases of vLLM; nothing else in the plugin asks which it is.

A difference is told by what can be imported, never by a version number. `python -m surface` (in
tests/) checks every name, override and attribute that the plugin uses against each pin's sources.
"""

try:  # the one that vLLM's own cache-only layer asks, in each release
    from vllm.utils.torch_utils import is_quantized_kv_cache  # 0.32.0
except ImportError:
    from vllm.v1.kv_cache_interface import is_quantized_kv_cache  # 0.33.0

__all__ = ["is_quantized_kv_cache"]
