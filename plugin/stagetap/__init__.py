"""Exact hidden states out of pipeline-parallel vLLM, as datasets."""
