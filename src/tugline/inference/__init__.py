"""The embedded engine: exact tokens out of a Hugging Face model, in this process.

For laptops, tests and the demo; large models are served by vLLM or SGLang. Token ids go in, token
ids with log probabilities and policy versions come out. `tugline.inference.server` serves an
`Engine` (torch) or a `tugline.testing.ScriptedEngine` (no model) over HTTP.
"""
