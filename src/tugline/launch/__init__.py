"""Who runs sessions where: one process here, more machines later."""
