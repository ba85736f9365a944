"""Counters of the engine as Prometheus text, named like vLLM's with ``tugline:`` in front."""

from __future__ import annotations

from tugline.inference.base import Stats


def metrics_text(stats: Stats, model: str) -> str:
    """The whole page."""
    label = f'model_name="{model}"'
    rows: list[tuple[str, str, str, float]] = [
        ("num_requests_running", "gauge", label, stats.running),
        ("num_requests_waiting", "gauge", label, stats.waiting),
        ("num_sequences_parked", "gauge", label, stats.parked),
        ("prompt_tokens_total", "counter", label, stats.prompt_tokens),
        ("prefix_cache_hits_total", "counter", label, stats.reused_tokens),
        ("generation_tokens_total", "counter", label, stats.sampled_tokens),
        ("forward_seconds_total", "counter", label, stats.busy_s),
        ("forward_passes_total", "counter", label, stats.steps),
    ]
    rows += [
        ("request_success_total", "counter", f'{label},finished_reason="{reason}"', count)
        for reason, count in stats.finished.items()
    ]
    lines: list[str] = []
    for name, kind, labels, value in rows:
        header = f"# TYPE tugline:{name} {kind}"
        if header not in lines:
            lines.append(header)
        lines.append(f"tugline:{name}{{{labels}}} {value:g}")
    return "\n".join(lines) + "\n"
