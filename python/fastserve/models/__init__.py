"""Models: from a name to weights that the one decoder computes with.

- ``resolve``: a path, ``smollm2`` or a hub id → files.
- ``config``, filled by ``hf_config`` or ``gguf_config``: the architecture record.
- ``safetensors_file``, ``gguf_file``: headers, read into ``tensors``.
- ``checkpoint``, ``dequant``, ``packed``, ``weights``: numbers into fused matrices.
- ``native``: the forward pass. ``rope`` and ``memory`` are what it needs beside weights.

Nothing is imported here, so that a name can be resolved without what runs a model.
"""
