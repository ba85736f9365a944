"""Containers of Apptainer, without a daemon or root."""
