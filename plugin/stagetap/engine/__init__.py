"""Everything that touches vLLM. No other folder of StageTap imports it."""
