"""What of vLLM the plugin uses, checked against a release's sources without importing them.

``python -m surface VERSION`` says what is missing. Native libraries of a release cannot always be
loaded where the tests run, its Python files can always be read.
"""
