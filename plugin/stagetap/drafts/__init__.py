"""Draft models that other trainers lack, as classes for speculators' trainer.

Importing a draft registers it with speculators and transformers. Needs the extra ``train``.
"""
