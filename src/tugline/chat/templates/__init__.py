"""Between words and ids: templates that make prompts, and what takes answers apart again."""
