"""Which models are captured exactly, found out by capturing each: ``./justw matrix``.

===============  ==============================================================================
``rows``         the table of what is tried: models, shapes, bounds. A new row is one entry
``arms``         one capture: the production command, with this machine's shims and cores
``picture_arm``  the same for prompts with an image, which the command does not take
``prompts``      what is captured
``truth``        how far a dataset is from a Hugging Face forward
``runner``       runs rows; every single-stage reference once
``records``      a row's outcome, and docs/models.json
``render``       docs/models.md out of the records, a pure function
``capacity``     what capture costs of the KV cache in models with several kinds of attention
===============  ==============================================================================
"""
