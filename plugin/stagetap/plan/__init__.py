"""What a capture costs on each stage of a target, told from its ``config.json`` alone.

===================  ==============================================================
``parallel``         what tensor and expert parallelism divide, or refuse to
``weights``          one weight of a layer: its shape on one GPU
``quantization``     bytes of a weight under ``quantization_config``
``attention``        kinds of attention: their weights, and what they cache
``feed_forward``     dense and mixture-of-experts blocks: their weights
``defaults``         what a model type's class holds where a configuration is silent
``model``            a target: its decoder layers, and what surrounds them
``untold``           what of a configuration is refused, since its shapes cannot be told
``read_layers``      which attention and feed-forward block each layer has
``read_model``       a configuration as a model
``stages``           stages, owners, memory of one GPU of each
``balance``          would another partition hold more KV cache?
``document``         a plan as JSON
``couplings``        settings of a server that only make sense together
===================  ==============================================================

All pure, but that ``defaults`` may ask transformers. Shapes are those that vLLM 0.32.0 allocates;
``tests/engine/test_plan.py`` compares.
"""
