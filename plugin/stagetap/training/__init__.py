"""StageTap's data in speculators' trainer. Needs the extra ``train``, and no vLLM.

speculators knows its backends and drafts from registries that it reads once. ``register`` fills
them; after it, speculators' own command line does the rest.
"""
