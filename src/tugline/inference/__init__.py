"""The embedded engine: a Hugging Face causal LM served over HTTP from inside this process.

Small enough to read, exact enough to train on: token ids in, token ids, log probabilities and the
policy version of every sampled token out. `tugline.inference.server` serves an
`tugline.inference.engine.Engine` (torch) or a `tugline.inference.scripted.ScriptedEngine` (none).
"""
