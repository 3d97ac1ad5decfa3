"""A training run on many nodes in one file: the store, the engines and the trainer.

``document`` reads the file, ``checks`` holds its values against each other, ``commands`` says what
to start on which node.
"""
