"""The embedded engine: token-exact sampling from a Hugging Face model in this process.

It is for laptops, tests and the demo; large models are served by vLLM or SGLang. Prompts are token
ids; answers are token ids with log probabilities and policy versions. `tugline.inference.server`
serves an `Engine` (torch) or a `tugline.testing.ScriptedEngine` (no model) over HTTP.
"""
