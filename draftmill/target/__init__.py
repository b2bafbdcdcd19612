"""The target model: its files and identity (no torch), its tokenizer and template, and its forward passes."""
