"""Is a dataset captured on several stages what one stage would have captured?

========================  ==========================================================
``partition``             which layers each stage runs, and so who owns which tap (pure)
``metrics``               two tensors in float64 numbers
``compare``               two datasets, tensor by tensor; pure functions over samples
``arms``                  one capture in a process of its own
``prove``                 both arms and the comparison
========================  ==========================================================
"""
