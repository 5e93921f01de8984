"""Text and tokens: tokenizers, chat templates, and tokens back to text."""
