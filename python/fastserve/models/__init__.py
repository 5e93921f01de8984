"""Models: from a name to weights that the one decoder computes with.

- ``resolve``: a path, ``smollm2`` or a hub id → files.
- ``config``, filled by ``hf_config`` or ``gguf_config``: the architecture record.
- ``safetensors_file``, ``gguf_file``: headers, read into ``tensors``.
- ``checkpoint``, ``dequant``, ``weights``: numbers into fused matrices. These need torch.
- ``decoder``: the forward pass.

Nothing is imported here, so that a name can be resolved and a tokenizer made without torch.
"""
